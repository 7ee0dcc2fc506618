"""Who saw what: every computation in order, with what was hidden at the time, so that influence can be told.

A token's K and V depend on every token it could see, and through those on what they had seen. An epoch is a stretch
of computations under one view; replaying the epochs in order gives the tokens that a span has influenced, directly
or through others, also when tokens were computed again later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .spans import Range

if TYPE_CHECKING:
    import numpy.typing as npt

#: What a token could not see: the hidden ranges of indexes, sorted and disjoint.
View: TypeAlias = tuple[Range, ...]


@dataclass
class Epoch:
    """The index ranges computed while ``hidden`` could not be seen.

    gap: the first index whose place was kept empty then (tokens behind it stood further away from those before it than
    in a restart), None for none. again: one token read a second time. redone: a recompute.
    """

    hidden: View
    computed: list[Range] = field(default_factory=list)
    gap: int | None = None
    again: bool = False
    redone: bool = False


class History:
    """Epochs in the order they happened."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []

    def computed(self, start: int, stop: int, hidden: View, gap: int | None = None) -> None:
        """Tokens [start, stop) were computed at the end of the transcript under this view."""
        last = self.epochs[-1] if self.epochs else None
        if last is None or last.again or last.redone or last.hidden != hidden or last.gap != gap:
            self.epochs.append(Epoch(hidden, [(start, stop)], gap))
        elif last.computed and last.computed[-1][1] == start:
            last.computed[-1] = (last.computed[-1][0], stop)
        else:
            last.computed.append((start, stop))

    def computed_again(self, index: int, hidden: View, gap: int | None = None) -> None:
        """One token was read again, in place."""
        self.epochs.append(Epoch(hidden, [(index, index + 1)], gap, again=True))

    def recomputed(self, ranges: Sequence[Range], hidden: View, gap: int | None = None) -> None:
        """Tokens were read again in order, up to the end of the transcript."""
        self.epochs.append(Epoch(hidden, list(ranges), gap, redone=True))

    def undo_again(self, index: int) -> None:
        """The token's first reading is back: its newest second reading no longer counts."""
        for i in reversed(range(len(self.epochs))):
            if self.epochs[i].again and self.epochs[i].computed == [(index, index + 1)]:
                del self.epochs[i]
                return

    def view_of(self, index: int) -> View:
        """What was hidden before ``index`` when its present K and V were computed."""
        for epoch in reversed(self.epochs):
            if any(a <= index < b for a, b in epoch.computed):
                return clip(epoch.hidden, index)
        return ()

    def otherwise(self, view: View, length: int) -> npt.NDArray[np.bool_]:
        """bool (length,): tokens that a fresh prefill under ``view`` would compute otherwise: they were computed under
        another view, behind a gap, or from tokens that have been computed again since."""
        differs = np.zeros(length, np.bool_)
        when, redone = np.full(length, -1), np.full(length, -1)
        for number, epoch in enumerate(self.epochs):
            for start, stop in epoch.computed:
                first = first_difference(epoch.hidden, view, stop)
                first = first if epoch.gap is None else min(first, epoch.gap)
                differs[start:stop] = first < np.arange(start, stop)
                when[start:stop] = number
                if epoch.redone:
                    redone[start:stop] = number
        for start, stop in view:
            redone[start:stop] = -1
        return differs | (np.maximum.accumulate(redone) > when)

    def truncate(self, stop: int) -> None:
        """Computations of tokens at or behind ``stop`` never happened."""
        for epoch in self.epochs:
            epoch.computed = [(a, min(b, stop)) for a, b in epoch.computed if a < stop]
        self.epochs = [e for e in self.epochs if e.computed]

    def influenced(self, span: Sequence[Range], length: int) -> npt.NDArray[np.bool_]:
        """bool (length,): the tokens outside ``span`` whose K and V depend on it. Each epoch costs O(length)."""
        inside = np.zeros(length, np.bool_)
        for start, stop in span:
            inside[start:stop] = True
        tainted = inside.copy()
        for epoch in self.epochs:
            for start, stop in epoch.computed:
                tainted[start:stop] = inside[start:stop]  # what these tokens were before no longer counts
                first = _first_seen(tainted, epoch.hidden, stop)
                tainted[min(max(start, first + 1), stop) : stop] = True
        return tainted & ~inside


def clip(view: Sequence[Range], stop: int) -> View:
    """The part of a view below index ``stop``."""
    return tuple((a, min(b, stop)) for a, b in view if a < stop)


def first_difference(one: View, other: View, stop: int) -> int:
    """The first index below ``stop`` that one view hides and the other shows; ``stop`` when there is none."""
    flags = np.zeros(stop, np.bool_)
    for view in (clip(one, stop), clip(other, stop)):
        for start, end in view:
            flags[start:end] ^= True
    return int(flags.argmax()) if flags.any() else stop


def _first_seen(tainted: npt.NDArray[np.bool_], hidden: View, stop: int) -> int:
    """The first tainted index below ``stop`` that the view shows; ``stop`` when there is none."""
    seen = tainted[:stop].copy()
    for start, end in hidden:
        seen[start:end] = False
    return int(seen.argmax()) if seen.any() else stop
