"""Who saw what: every computation in order, with what was hidden at the time, so that influence can be told.

A token's K and V depend on every token it could see, and through those on what they had seen. An epoch is a stretch
of computations under one view; replaying the epochs in order gives the tokens that a span has influenced, directly
or through others, also when tokens were computed again later. All numbers here are rows: places in reading order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .spans import Range, merge

if TYPE_CHECKING:
    import numpy.typing as npt

#: What a token could not see: the hidden ranges of rows, sorted and disjoint.
View: TypeAlias = tuple[Range, ...]


@dataclass
class Epoch:
    """The ranges of rows computed while ``hidden`` could not be seen.

    gap: the first row whose place was kept empty then (tokens behind it stood further away from those before it than
    in a restart), None for none. again: one token read a second time. redone: tokens read a second time, which
    others had seen. alone: read seeing only what they were to attend to (an isolated span).
    """

    hidden: View
    computed: list[Range] = field(default_factory=list)
    gap: int | None = None
    again: bool = False
    redone: bool = False
    alone: bool = False

    def first_difference(self, view: View, stop: int) -> int:
        """The first row below ``stop`` that was seen then and is hidden under ``view``, or the reverse; a span that
        was to be isolated misses nothing. ``stop`` when there is none."""
        then, now = _seen(self.hidden, stop), _seen(view, stop)
        differs = then & ~now if self.alone else then ^ now
        return int(differs.argmax()) if differs.any() else stop

    def with_rows(self, row: int, count: int) -> Epoch:
        """The same epoch after ``count`` rows, which it did not see, have come in front of ``row``."""
        moved = [piece for r in self.computed for piece in _parted(r, row, count)]
        gap = self.gap if self.gap is None or self.gap < row else self.gap + count
        return replace(self, hidden=view_with_rows(self.hidden, row, count), computed=moved, gap=gap)


class History:
    """Epochs in the order they happened."""

    def __init__(self, epochs: Sequence[Epoch] = ()) -> None:
        self.epochs: list[Epoch] = list(epochs)

    def copy(self) -> History:
        return History([replace(e, computed=list(e.computed)) for e in self.epochs])

    def computed(self, start: int, stop: int, hidden: View, gap: int | None = None) -> None:
        """Tokens [start, stop) were computed at the end of the transcript under this view."""
        last = self.epochs[-1] if self.epochs else None
        special = last is None or last.again or last.redone or last.alone
        if last is None or special or last.hidden != hidden or last.gap != gap:
            self.epochs.append(Epoch(hidden, [(start, stop)], gap))
        elif last.computed and last.computed[-1][1] == start:
            last.computed = [*last.computed[:-1], (last.computed[-1][0], stop)]
        else:
            last.computed = [*last.computed, (start, stop)]

    def computed_again(self, row: int, hidden: View, gap: int | None = None) -> None:
        """One token was read again, in place."""
        self.epochs.append(Epoch(hidden, [(row, row + 1)], gap, again=True))

    def recomputed(self, ranges: Sequence[Range], hidden: View, gap: int | None = None) -> None:
        """Tokens were read again in order."""
        self.epochs.append(Epoch(hidden, list(ranges), gap, redone=True))

    def computed_alone(self, start: int, stop: int, hidden: View, gap: int | None = None) -> None:
        """Tokens were read seeing only what they were to attend to."""
        self.epochs.append(Epoch(hidden, [(start, stop)], gap, alone=True))

    def undo_again(self, row: int) -> None:
        """The token's first reading is back: its newest second reading no longer counts."""
        for i in reversed(range(len(self.epochs))):
            if self.epochs[i].again and self.epochs[i].computed == [(row, row + 1)]:
                del self.epochs[i]
                return

    def insert(self, row: int, count: int) -> None:
        """``count`` rows come in front of ``row``; nothing computed so far has seen them."""
        self.epochs = [e.with_rows(row, count) for e in self.epochs]

    def view_of(self, row: int) -> View:
        """What was hidden before ``row`` when its present K and V were computed."""
        for epoch in reversed(self.epochs):
            if any(a <= row < b for a, b in epoch.computed):
                return clip(epoch.hidden, row)
        return ()

    def still_alone(self, right: npt.NDArray[np.bool_], from_row: int) -> npt.NDArray[np.bool_]:
        """bool (n,): the isolated tokens that stay as they are when ``right`` tells those that are right, and the
        others from ``from_row`` on are read again: nothing they saw is."""
        number_of = np.full(len(right), -1)
        for number, epoch in enumerate(self.epochs):
            for start, stop in epoch.computed:
                number_of[start:stop] = number if epoch.alone else -1
        keep = (number_of >= 0) & right
        read = ~keep & (np.arange(len(right)) >= from_row)
        for row in np.flatnonzero(keep):
            seen = _seen(self.epochs[number_of[row]].hidden, int(row))
            if (seen & read[:row]).any():
                keep[row], read[row] = False, True
        return keep

    def otherwise(self, view: View, length: int) -> npt.NDArray[np.bool_]:
        """bool (length,): tokens that a fresh prefill under ``view`` would compute otherwise: they were computed under
        another view, behind a gap, or from tokens that have been computed again since.

        An isolated span is right while what it attended to is visible and as it was.
        """
        differs = np.zeros(length, np.bool_)
        when, redone = np.full(length, -1), np.full(length, -1)
        for number, epoch in enumerate(self.epochs):
            for start, stop in epoch.computed:
                first = epoch.first_difference(view, stop)
                first = first if epoch.gap is None else min(first, epoch.gap)
                differs[start:stop] = first < np.arange(start, stop)
                when[start:stop] = number
                if epoch.redone:
                    redone[start:stop] = number
        for start, stop in view:
            redone[start:stop] = -1
        newest = np.maximum.accumulate(redone)
        for number, epoch in enumerate(self.epochs):
            for start, stop in epoch.computed if epoch.alone else ():
                mine = np.flatnonzero(when[start:stop] == number) + start
                seen = np.where(_seen(epoch.hidden, stop), redone[:stop], -1)
                newest[mine] = np.maximum.accumulate(seen)[mine]
        return differs | (newest > when)

    def truncate(self, stop: int) -> None:
        """Computations of tokens at or behind ``stop`` never happened."""
        cut = (replace(e, computed=[(a, min(b, stop)) for a, b in e.computed if a < stop]) for e in self.epochs)
        self.epochs = [e for e in cut if e.computed]

    def influenced(self, span: Sequence[Range], length: int) -> npt.NDArray[np.bool_]:
        """bool (length,): the tokens outside ``span`` whose K and V depend on it. Each epoch costs O(length)."""
        inside = np.zeros(length, np.bool_)
        for start, stop in span:
            inside[start:stop] = True
        tainted = inside.copy()
        for epoch in self.epochs:
            for start, stop in epoch.computed:
                tainted[start:stop] = inside[start:stop]  # what these tokens were before no longer counts
                seen = tainted[:stop] & _seen(epoch.hidden, stop)
                first = int(seen.argmax()) if seen.any() else stop
                tainted[min(max(start, first + 1), stop) : stop] = True
        return tainted & ~inside

    def unaware(self, rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """bool (length,): the tokens whose present K and V were computed while one of ``rows``, before them, could
        not be seen."""
        missed = np.zeros(len(rows), np.bool_)
        for epoch in self.epochs:
            for start, stop in epoch.computed:
                unseen = rows[:stop] & ~_seen(epoch.hidden, stop)
                first = int(unseen.argmax()) if unseen.any() else stop
                missed[start:stop] = np.arange(start, stop) > first
        return missed & ~rows


def clip(view: Sequence[Range], stop: int) -> View:
    """The part of a view below row ``stop``."""
    return tuple((a, min(b, stop)) for a, b in view if a < stop)


def view_with_rows(view: View, row: int, count: int) -> View:
    """A view from before ``count`` rows came in front of ``row``: they are hidden in it."""
    return tuple(merge([piece for r in view for piece in _parted(r, row, count)] + [(row, row + count)]))


def _parted(range_: Range, row: int, count: int) -> list[Range]:
    """Where the rows of a range are after ``count`` others came in front of ``row``."""
    start, stop = range_
    if stop <= row:
        return [range_]
    if start >= row:
        return [(start + count, stop + count)]
    return [(start, row), (row + count, stop + count)]


def _seen(hidden: View, stop: int) -> npt.NDArray[np.bool_]:
    """bool (stop,): the rows below ``stop`` that a view shows."""
    seen = np.ones(stop, np.bool_)
    for start, end in hidden:
        seen[start:end] = False
    return seen
