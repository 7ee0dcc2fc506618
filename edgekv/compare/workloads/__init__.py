"""Workloads: each yields cases. Texts are made from a seed (see prose.py), so no two cases share a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from edgekv.compare.workloads import canary, chat, file, summary, think, tools
from edgekv.compare.workloads.making import Workload
from edgekv.errors import UsageError

NAMES: Final[dict[str, Workload]] = {
    "canary": canary.cases,
    "chat": chat.cases,
    "tools": tools.cases,
    "think": think.cases,
    "summary": summary.cases,
}

#: Cases of a run unless told otherwise: a leak's interval needs a hundred, the others compare many tokens a case.
DEFAULT_CASES: Final = {"canary": 100}
FEW: Final = 12


def find(name: str) -> Workload:
    """A workload by its name, or the user's own file. Raises UsageError, with what there is."""
    if name in NAMES:
        return NAMES[name]
    path = Path(name)
    if path.suffix in (".jsonl", ".txt") or path.exists():
        return file.workload(path)
    raise UsageError(f"no workload {name!r}; there are {', '.join(NAMES)}, or a .jsonl or .txt file of your own")
