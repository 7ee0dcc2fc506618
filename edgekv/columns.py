"""The ledger's rows: where every token's K and V are. Pure numpy."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Flags: TypeAlias = npt.NDArray[np.bool_]


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
    """One row a token: its position, state, sequence (of a visible or masked token), and whether a masked token
    keeps its place in the layout (``reserved``)."""

    pos: npt.NDArray[np.int32]
    state: npt.NDArray[np.int8]
    seq: npt.NDArray[np.int16]
    reserved: Flags

    @classmethod
    def empty(cls, size: int) -> Columns:
        return cls(
            np.empty(size, np.int32), np.empty(size, np.int8), np.empty(size, np.int16), np.empty(size, np.bool_)
        )

    def __len__(self) -> int:
        return len(self.pos)

    def first(self, n: int) -> Columns:
        """Views of the first ``n`` rows."""
        return Columns(self.pos[:n], self.state[:n], self.seq[:n], self.reserved[:n])

    def copy(self) -> Columns:
        return Columns(self.pos.copy(), self.state.copy(), self.seq.copy(), self.reserved.copy())

    def grown(self, size: int) -> Columns:
        """The same rows with room for ``size``."""
        more = Columns.empty(size)
        more.first(len(self)).assign(self)
        return more

    def assign(self, other: Columns) -> None:
        """Overwrite every row."""
        self.pos[:], self.state[:], self.seq[:], self.reserved[:] = other.pos, other.state, other.seq, other.reserved

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


def last(flags: Flags) -> int | None:
    """The index of the last True."""
    return len(flags) - 1 - int(flags[::-1].argmax()) if flags.any() else None


def runs_of(chosen: Flags, pos: npt.NDArray[np.int32], *same: npt.NDArray[Any]) -> list[npt.NDArray[np.intp]]:
    """The chosen indexes, split wherever positions are not consecutive or one of the ``same`` columns changes."""
    indexes = np.flatnonzero(chosen)
    cut = np.diff(pos[indexes]) != 1
    for column in same:
        cut |= column[indexes][1:] != column[indexes][:-1]
    return [part for part in np.split(indexes, np.flatnonzero(cut) + 1) if len(part)]
