"""The ledger's rows: where every token's K and V are. Pure numpy."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .shares import PRIVATE

Flags: TypeAlias = npt.NDArray[np.bool_]

#: The blob of a token that is not parked.
NO_BLOB: Final = -1


class State(enum.IntEnum):
    """Where a token's K and V are."""

    VISIBLE = 0  # in the live sequence
    MASKED = 1  # in an archive sequence
    PARKED = 2  # in host memory or a file
    EVICTED = 3  # gone; the token is known
    DROPPED = 4  # gone, and the token no longer belongs to the transcript


_CODES = {state: np.int8(state) for state in State}  # comparing with an enum member is four times as slow


class CellRun(NamedTuple):
    """Cells of one sequence at consecutive positions [p0, p1)."""

    seq: int
    p0: int
    p1: int


@dataclass
class Columns:
    """One row a token, in reading order: its position, state, sequence (of a visible or masked token), whether a
    hidden token keeps its place in the layout (``reserved``), the id of a cell that is or was shared with another
    session (``cell``, see :class:`~edgekv.shares.Shares`), whether another text took its place (``replaced``), and
    which blob holds the K and V of a parked token, at its position (``blob``, see
    :class:`~edgekv.parking.Parking`)."""

    pos: npt.NDArray[np.int32]
    state: npt.NDArray[np.int8]
    seq: npt.NDArray[np.int16]
    reserved: Flags
    cell: npt.NDArray[np.int32]
    replaced: Flags
    blob: npt.NDArray[np.int32]

    @classmethod
    def empty(cls, size: int) -> Columns:
        pos, cell = np.empty(size, np.int32), np.empty(size, np.int32)
        state, seq = np.empty(size, np.int8), np.empty(size, np.int16)
        reserved, replaced = np.empty(size, np.bool_), np.empty(size, np.bool_)
        return cls(pos, state, seq, reserved, cell, replaced, np.empty(size, np.int32))

    @classmethod
    def dropped(cls, size: int, seq: int = 0) -> Columns:
        """Rows that belong to nobody."""
        rows = cls.empty(size)
        rows.pos[:], rows.state[:], rows.seq[:], rows.cell[:] = 0, State.DROPPED, seq, PRIVATE
        rows.reserved[:], rows.replaced[:], rows.blob[:] = False, False, NO_BLOB
        return rows

    @property
    def _all(self) -> tuple[npt.NDArray[Any], ...]:
        return (self.pos, self.state, self.seq, self.reserved, self.cell, self.replaced, self.blob)

    def __len__(self) -> int:
        return len(self.pos)

    def first(self, n: int) -> Columns:
        """Views of the first ``n`` rows."""
        return Columns(*(column[:n] for column in self._all))

    def copy(self) -> Columns:
        return Columns(*(column.copy() for column in self._all))

    def take(self, rows: npt.NDArray[np.intp]) -> Columns:
        """Copies of some rows."""
        return Columns(*(column[rows] for column in self._all))

    def with_rows(self, row: int, new: Columns) -> Columns:
        """The same rows with those of ``new`` in front of ``row``."""
        both = zip(self._all, new._all, strict=True)
        return Columns(*(np.concatenate([old[:row], more, old[row:]]) for old, more in both))

    def without(self, row: int, stop: int) -> Columns:
        """The rows but those in [row, stop)."""
        return Columns(*(np.concatenate([column[:row], column[stop:]]) for column in self._all))

    def grown(self, size: int) -> Columns:
        """The same rows with room for ``size``."""
        more = Columns.empty(size)
        more.first(len(self)).assign(self)
        return more

    def assign(self, other: Columns) -> None:
        """Overwrite every row."""
        for mine, theirs in zip(self._all, other._all, strict=True):
            mine[:] = theirs

    def where(self, state: State) -> Flags:
        return np.equal(self.state, _CODES[state])

    @property
    def visible(self) -> Flags:
        return self.where(State.VISIBLE)

    @property
    def in_cells(self) -> Flags:
        """The tokens that have a cell: visible or masked."""
        return np.less_equal(self.state, _CODES[State.MASKED])

    @property
    def parked(self) -> Flags:
        return self.where(State.PARKED)

    @property
    def blobs(self) -> set[int]:
        """The blobs that hold parked tokens."""
        return set(self.blob[self.parked].tolist())

    def renumber_blobs(self, numbers: dict[int, int]) -> None:
        """The blobs have other numbers now."""
        old = self.blob.copy()
        for was, now in numbers.items():
            self.blob[old == was] = now

    @property
    def last_visible(self) -> int | None:
        return last(self.visible)

    def free_tail(self) -> None:
        """Hidden tokens behind the last visible one reserve no place."""
        end = self.last_visible
        self.reserved[0 if end is None else end + 1 :] = False

    def cell_runs(self, chosen: Flags) -> list[CellRun]:
        """Where the chosen tokens' cells are."""
        return [
            CellRun(int(self.seq[i[0]]), int(self.pos[i[0]]), int(self.pos[i[0]]) + len(i))
            for i in runs_of(chosen, self.pos, self.seq)
        ]

    def cells_at(self, run: CellRun) -> Flags:
        """bool (n,): the tokens whose cells those are."""
        return np.asarray(self.in_cells & (self.seq == run.seq) & (self.pos >= run.p0) & (self.pos < run.p1))


def last(flags: Flags) -> int | None:
    """The index of the last True."""
    return len(flags) - 1 - int(flags[::-1].argmax()) if flags.any() else None


def runs_of(chosen: Flags, pos: npt.NDArray[np.int32], *same: npt.NDArray[Any]) -> list[npt.NDArray[np.intp]]:
    """The chosen indexes, split wherever positions are not consecutive or one of the ``same`` columns changes."""
    indexes = np.flatnonzero(chosen)
    if not len(indexes):
        return []
    places = pos[indexes]
    cut = places[1:] - places[:-1] != 1
    for column in same:
        values = column[indexes]
        cut |= values[1:] != values[:-1]
    ends = [0, *(np.flatnonzero(cut) + 1).tolist(), len(indexes)]
    return [indexes[a:b] for a, b in pairwise(ends)]
