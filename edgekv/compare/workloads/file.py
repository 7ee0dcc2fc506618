"""file: the user's own texts.

JSONL, one case a line: {"segments": [{"role", "text", "mask": true}, ...], "question", "continuation", "secrets":
[{"ask", "options", "right"}], "facts": [...]}; all but segments may be left out. Or a plain text, one case, whose
masked stretch stands between two lines: <<<mask and mask>>>.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from edgekv.compare.case import Case, Choice, Segment, Style
from edgekv.compare.workloads.making import Workload
from edgekv.errors import UsageError

OPEN: Final = "<<<mask"
CLOSE: Final = "mask>>>"
_KEYS: Final = {"segments", "question", "continuation", "secrets", "facts", "controls", "special"}


def workload(path: Path) -> Workload:
    """A workload of a file's cases, each once. Raises UsageError, with the line, for what is no case."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(f"cannot read {path}: {err}") from err
    read = list(_jsonl(text, path)) if path.suffix == ".jsonl" else [_marked(text, path)]
    if not read:
        raise UsageError(f"{path} holds no case")

    def cases(_style: Style, _seed: int) -> Iterator[Case]:
        return iter(read)

    return cases


def _jsonl(text: str, path: Path) -> Iterator[Case]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield _case(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as err:
                raise UsageError(f"{path}, line {number}: {_reason(err)}") from err


def _case(raw: dict[str, Any]) -> Case:
    unknown = set(raw) - _KEYS
    if unknown:
        raise ValueError(f"unknown key {min(unknown)!r}; known: {', '.join(sorted(_KEYS))}")
    segments = tuple(Segment(str(s["text"]), bool(s.get("mask")), str(s.get("role", ""))) for s in raw["segments"])
    _check(segments)
    return Case(
        segments,
        question=str(raw.get("question", "")),
        continuation=str(raw.get("continuation", "")),
        secrets=tuple(_choice(c) for c in raw.get("secrets", ())),
        facts=tuple(_choice(c) for c in raw.get("facts", ())),
        controls=tuple(_choice(c) for c in raw.get("controls", ())),
        special=bool(raw.get("special")),
    )


def _check(segments: tuple[Segment, ...]) -> None:
    if not any(s.mask and s.text for s in segments):
        raise ValueError('no segment with text has "mask": true')
    if not any(s.text for s in segments[: next(i for i, s in enumerate(segments) if s.mask)]):
        raise ValueError("the first segment is masked: a model needs some text in front of it")


def _choice(raw: dict[str, Any]) -> Choice:
    options = tuple(str(option) for option in raw["options"])
    if not 0 <= int(raw["right"]) < len(options) or len(set(options)) < max(2, len(options)) or not all(options):
        raise ValueError('a choice needs two or more different options, none empty, and "right" is the index of one')
    return Choice(str(raw["ask"]), options, int(raw["right"]))


def _marked(text: str, path: Path) -> Case:
    lines = text.splitlines(keepends=True)
    marks = [i for i, line in enumerate(lines) if line.strip() in (OPEN, CLOSE)]
    if [lines[i].strip() for i in marks] != [OPEN, CLOSE]:
        raise UsageError(f"{path} needs one line {OPEN!r} and, behind it, one line {CLOSE!r} around what is masked")
    before, span, after = (
        "".join(lines[a:b]) for a, b in ((0, marks[0]), (marks[0] + 1, marks[1]), (marks[1] + 1, None))
    )
    segments = (Segment(before), Segment(span, mask=True), Segment(after))
    try:
        _check(segments)
    except ValueError as err:
        raise UsageError(f"{path}: {err}") from err
    return Case(segments, question="")


def _reason(err: Exception) -> str:
    return f"{err} is missing" if isinstance(err, KeyError) else str(err)
