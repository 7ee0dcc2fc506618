"""compare: mask-and-continue against restart, on the user's own model, text and CPU.

    from edgekv import compare
    report = compare.run("smollm2", workload="chat", cases=8)
    print(report.verdict); open("report.html", "w").write(report.html())

Three blocks stand side by side, never one number: cost, consistency, and what still leaks.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from edgekv.compare.options import Options
from edgekv.compare.report import Report
from edgekv.compare.run import Run, Watch
from edgekv.model import Model

__all__ = ["Options", "Report", "Run", "run"]


def run(
    model: str | os.PathLike[str] | Model,
    options: Options | None = None,
    *,
    watch: Watch = lambda *_: None,
    **changes: Any,
) -> Report:
    """Run and report. ``changes`` are fields of :class:`Options`, and go before those of ``options``; ``watch`` is
    called with (what, done, in all).

    Ctrl-C ends it and the report tells what was finished. Raises UsageError for options that make no sense, and for a
    model whose memory cannot be masked; ModelError, TooLarge, ContextFull as Session does.
    """
    chosen = replace(options or Options(), **_tuples(changes))
    if isinstance(model, Model):
        return _reported(Run(model, chosen, watch))
    with Model(model) as loaded:
        return _reported(Run(loaded, chosen, watch))


def _reported(made: Run) -> Report:
    made.all()
    return Report.of(made)


def _tuples(changes: dict[str, Any]) -> dict[str, Any]:
    lists = ("arms", "suffix", "span")
    return {key: tuple(value) if key in lists else value for key, value in changes.items()}
