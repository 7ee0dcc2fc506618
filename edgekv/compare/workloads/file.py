"""file: the user's own texts.

JSONL, one case a line: {"segments": [{"role", "text", "mask": true}, ...], "question", "continuation", "secrets":
[{"ask", "options", "right"}], "facts": [...], "controls": [...], "special": true}; all but segments may be left out.
Where segments have roles they are written as turns, as the built-in workloads are, and the question is a user's turn
behind which the model's begins. Or a plain text, one case, whose masked stretch stands between two lines: <<<mask and
mask>>>.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from edgekv.compare.case import Case, Choice, Segment, Style
from edgekv.compare.workloads.making import Workload
from edgekv.errors import UsageError
from edgekv.wording import decoded, mended_json

T = TypeVar("T")

OPEN: Final = "<<<mask"
CLOSE: Final = "mask>>>"
_KEYS: Final = {"segments", "question", "continuation", "secrets", "facts", "controls", "special"}


def workload(path: Path) -> Workload:
    """A workload of a file's cases, each once. Raises UsageError, with the line, for what is no case."""
    try:
        text = decoded(path.read_bytes(), str(path))
    except OSError as err:
        raise UsageError(f"cannot read {path}: {err}") from err
    read = list(_jsonl(text, path)) if path.suffix == ".jsonl" else [_marked(text, path)]
    if not read:
        raise UsageError(f"{path} holds no case")

    def cases(style: Style, _seed: int) -> Iterator[Case]:
        return (_as_turns(case, style) for case in read)

    return cases


def _jsonl(text: str, path: Path) -> Iterator[Case]:
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut strings at U+2028
        if line.strip():
            try:
                yield _case(mended_json(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError) as err:
                raise UsageError(f"{path}, line {number}: {_reason(err)}") from err


def _case(raw: dict[str, Any]) -> Case:
    _check_keys(raw, _KEYS)
    segments = tuple(_segment(s) for s in raw["segments"])
    _check(segments)
    return Case(
        segments,
        question=_typed(raw, "question", str),
        continuation=_typed(raw, "continuation", str),
        secrets=tuple(_choice(c) for c in raw.get("secrets", ())),
        facts=tuple(_choice(c) for c in raw.get("facts", ())),
        controls=tuple(_choice(c) for c in raw.get("controls", ())),
        special=_typed(raw, "special", bool),
    )


def _segment(raw: dict[str, Any]) -> Segment:
    _check_keys(raw, {"text", "mask", "role"})
    if "text" not in raw:
        raise KeyError("text")
    return Segment(_typed(raw, "text", str), _typed(raw, "mask", bool), _typed(raw, "role", str))


def _typed(raw: dict[str, Any], key: str, kind: type[T]) -> T:
    """The value of a key, which may be left out. Raises ValueError for another kind: "false" would be true."""
    value = raw.get(key, kind())
    if not isinstance(value, kind):
        raise ValueError(f"{key!r} is {'a text' if kind is str else 'true or false'}, not {json.dumps(value)}")
    return value


def _check_keys(raw: dict[str, Any], known: set[str]) -> None:
    if unknown := set(raw) - known:
        raise ValueError(f"unknown key {min(unknown)!r}; known: {', '.join(sorted(known))}")


def _as_turns(case: Case, style: Style) -> Case:
    """A conversation, written as the model is used to, where the segments have roles."""
    if not any(s.role for s in case.segments):
        return case
    segments = tuple(replace(s, text=style.turn(s.role, s.text)) if s.role else s for s in case.segments)
    question = style.turn("user", case.question) + style.opening if case.question else ""
    return replace(case, segments=segments, question=question, special=case.special or style.special)


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
