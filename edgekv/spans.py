"""Spans and half-open ranges: ``(0, 1)`` is the token at index 0 only.

Pure Python and numpy; a range is a ``(start, stop)`` tuple of token indexes, several are sorted and disjoint.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from .errors import UnknownSpan, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Range: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Span:
    """A named half-open range [start, stop) of token indexes, with a role and tags; spans may nest."""

    name: str
    start: int
    stop: int
    role: str = ""
    tags: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def range(self) -> Range:
        return (self.start, self.stop)


#: What verbs take: a Span, a name or glob, "role:R", "tag:T", an index range, or several of these.
Target: TypeAlias = Span | str | Range | slice | range | Sequence["Target"]


def runs(flags: npt.NDArray[np.bool_]) -> list[Range]:
    """The half-open runs of True in a one-dimensional array, in order."""
    import numpy as np

    padded = np.zeros(len(flags) + 2, np.bool_)
    padded[1:-1] = flags
    edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Sorted, disjoint ranges that cover the same indexes; empty ones are dropped.

    Neighbours stay two: what was inserted between them belongs to neither (see Places.rows).
    """
    merged: list[Range] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def first_outside(inside: Sequence[Range], holes: Sequence[Range]) -> int | None:
    """The first index that lies in ``inside`` and in none of ``holes`` (both sorted and disjoint), or None."""
    for start, stop in inside:
        for hole_start, hole_stop in holes:
            if hole_start <= start < hole_stop:
                start = hole_stop
        if start < stop:
            return start
    return None


class SpanTable:
    """The spans of one session, by name; knows what a target means."""

    def __init__(self) -> None:
        self._spans: dict[str, Span] = {}
        self._counter = 0

    def ordered(self) -> tuple[Span, ...]:
        return tuple(sorted(self._spans.values(), key=lambda s: (s.start, -s.stop)))

    def check_name(self, name: str) -> None:
        """Refuse a name that is taken, or that a target could not tell from a glob or a prefix."""
        if name in self._spans:
            taken = self._spans[name]
            raise UsageError(f"a span named {name!r} exists at [{taken.start}, {taken.stop}); choose another name")
        if not name.strip() or any(c in name for c in "*?[]") or name.startswith(("role:", "tag:")):
            raise UsageError(f"{name!r} cannot name a span: no '*', '?', '[', ']', no 'role:' or 'tag:' in front")
        if any(_is_half(c) for c in name):
            raise UsageError(f"{name!r} cannot name a span: it holds half a character, which no file can keep")

    def free_name(self, stem: str) -> str:
        """A name nobody has, from a role or another name; what could not stand in a name is left out."""
        stem = "".join(c for c in stem if c not in "*?[]:" and not _is_half(c)).strip() or "text"
        while True:
            self._counter += 1
            name = f"{stem}-{self._counter}"
            if name not in self._spans:
                return name

    def free(self, name: str) -> str:
        """That name, or one made from it where it is taken or cannot name a span."""
        with contextlib.suppress(UsageError):
            self.check_name(name)
            return name
        return self.free_name(name)

    def add(self, span: Span) -> Span:
        self.check_name(span.name)
        self._spans = {**self._spans, span.name: span}
        return span

    def put(self, span: Span) -> Span:
        """As :meth:`add`, in the place of the span of that name, if there is one."""
        others = self.copy()
        others._spans.pop(span.name, None)
        others.add(span)
        self._spans = others._spans
        return span

    def remove(self, span: Span) -> Span:
        self._spans = {name: s for name, s in self._spans.items() if name != span.name}
        return span

    def kept(self) -> tuple[dict[str, Span], int]:
        """What it is now: the table is replaced, and not written to."""
        return self._spans, self._counter

    def restore_kept(self, before: tuple[dict[str, Span], int]) -> None:
        self._spans, self._counter = before

    @property
    def counter(self) -> int:
        """The number in the last name that was made up."""
        return self._counter

    def fill(self, spans: Iterable[Span], counter: int) -> None:
        """Be what another table was."""
        self._spans, self._counter = {s.name: s for s in spans}, counter

    def copy(self) -> SpanTable:
        other = SpanTable()
        other._spans, other._counter = dict(self._spans), self._counter
        return other

    def keep_only(self, kept: npt.NDArray[np.bool_]) -> None:
        """``kept``, bool (n,), says which indexes are left: a span ends behind its last, one without any is gone."""
        ends = ((s, s.start + _length(kept[s.start : s.stop])) for s in self._spans.values())
        left = (replace(s, stop=stop) for s, stop in ends if stop > s.start or (s.start < len(kept) and kept[s.start]))
        self._spans = {s.name: s for s in left}

    def restore(self, spans: Iterable[Span]) -> None:
        """Spans of before are back, under their names, or, where newer ones have taken those, under others."""
        self._spans = dict(self._spans)
        for span in spans:
            holder, same = self._spans.get(span.name), self._same(span)
            if same is not None and (holder is None or holder == same):
                del self._spans[same.name]
            if holder is None or holder == same:
                self._spans[span.name] = span
            else:
                name = self.free_name(span.name) if same is None else same.name
                self._spans[name] = replace(span, name=name)

    def _same(self, span: Span) -> Span | None:
        """The span that this one has become: cut, or under another name."""
        alike = (span.start, span.role, span.tags)
        here = [s for s in self._spans.values() if (s.start, s.role, s.tags) == alike]
        named = [s for s in here if s.name == span.name]
        return next(iter(named or [s for s in here if s.stop == span.stop]), None)

    def make_way(self, name: str) -> None:
        """A span of that name, whose text is being replaced, gets another."""
        if name in self._spans:
            span, other = self._spans[name], self.free_name(name)
            self.remove(span)
            self._spans = {**self._spans, other: replace(span, name=other)}

    def within(self, name: str, ranges: Sequence[Range]) -> bool:
        """Whether a span of that name lies in one of the ranges."""
        span = self._spans.get(name)
        return span is not None and any(a <= span.start and span.stop <= b for a, b in ranges)

    def resolve(self, target: Target) -> list[Range]:
        """The index ranges a target selects, sorted and disjoint.

        Raises UnknownSpan when a name, glob, role or tag selects nothing, UsageError when it is no target at all.
        """
        if isinstance(target, Span):
            return merge([target.range])
        if isinstance(target, str):
            return merge(s.range for s in self._named(target))
        if isinstance(target, (slice, range)):
            return [_index_range(target.start, target.stop, target.step)]
        if isinstance(target, tuple) and len(target) == 2 and all(_is_index(t) for t in target):
            return [_index_range(target[0], target[1], None)]
        if isinstance(target, (list, tuple, set, frozenset)):
            return merge(r for item in target for r in self.resolve(item))
        raise UsageError(f"{target!r} is no target: give a Span, a name or glob, 'role:R', 'tag:T' or (start, stop)")

    def _named(self, text: str) -> list[Span]:
        kind, _, rest = text.partition(":")
        if kind == "role" and rest:
            found = [s for s in self._spans.values() if s.role == rest]
        elif kind == "tag" and rest:
            found = [s for s in self._spans.values() if rest in s.tags]
        elif text in self._spans:
            found = [self._spans[text]]
        elif any(c in text for c in "*?["):
            found = [s for s in self._spans.values() if fnmatch.fnmatchcase(s.name, text)]
        else:
            found = []
        if not found:
            raise UnknownSpan(self._explain(text))
        return found

    def _explain(self, text: str) -> str:
        near = difflib.get_close_matches(text, self._spans, n=3, cutoff=0.5)
        roles = {s.role for s in self._spans.values()}
        tags = {t for s in self._spans.values() for t in s.tags}
        hints = [f"did you mean {', '.join(map(repr, near))}?"] if near else []
        hints += [f"there is a role of that name: 'role:{text}'"] if text in roles else []
        hints += [f"there is a tag of that name: 'tag:{text}'"] if text in tags else []
        if not hints:
            hints = [f"spans: {', '.join(self._spans) or 'none yet'}"]
        return f"nothing is called {text!r}; {'; '.join(hints)}"


def _length(flags: npt.NDArray[np.bool_]) -> int:
    """How many there are up to the last True."""
    return len(flags) - int(flags[::-1].argmax()) if flags.any() else 0


def _is_half(char: str) -> bool:
    """Half of a surrogate pair, which is no character and cannot be written."""
    return "\ud800" <= char <= "\udfff"


def _is_index(value: object) -> bool:
    import numpy as np

    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _index_range(start: object, stop: object, step: object) -> Range:
    start = 0 if start is None else start
    if step not in (None, 1) or not _is_index(start) or not _is_index(stop):
        raise UsageError("an index range is (start, stop): two whole numbers, step 1, stop given")
    first, last = int(start), int(stop)  # type: ignore[call-overload]
    if first < 0 or last < first:
        raise UsageError(f"[{first}, {last}) is no range of token indexes: 0 <= start <= stop is needed")
    return (first, last)
