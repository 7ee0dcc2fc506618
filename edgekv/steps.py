"""The native steps an edit consists of, as data: the ledger plans them, the engine carries them out in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Shift:
    """Add ``delta`` to the positions [p0, p1) of sequence ``seq``; the places they move to must be free."""

    seq: int
    p0: int
    p1: int
    delta: int


@dataclass(frozen=True)
class Move:
    """Take the cells at positions [p0, p1) from sequence ``src`` to ``dst``, shifted by ``delta``; none is freed."""

    src: int
    dst: int
    p0: int
    p1: int
    delta: int = 0

    @property
    def reverse(self) -> Move:
        """The move that undoes this one."""
        return Move(self.dst, self.src, self.p0 + self.delta, self.p1 + self.delta, -self.delta)


@dataclass(frozen=True)
class Own:
    """Give sequence ``seq`` copies of its cells at positions [p0, p1), which another session holds too.

    Before a shift: llama.cpp moves a cell for every sequence that holds it.
    """

    seq: int
    p0: int
    p1: int


@dataclass(frozen=True)
class Drop:
    """Take the cells at positions [p0, p1) out of sequence ``seq``; all but ``kept`` of them, which other sessions
    hold as well, are free afterwards."""

    seq: int
    p0: int
    p1: int
    kept: int = 0

    @property
    def num_freed(self) -> int:
        return self.p1 - self.p0 - self.kept


@dataclass(frozen=True)
class Load:
    """Parked K and V at positions [p0, p1) of a blob come into a sequence, shifted by ``delta``."""

    blob: int
    p0: int
    p1: int
    delta: int = 0

    @property
    def to(self) -> tuple[int, int]:
        """The positions they come to."""
        return self.p0 + self.delta, self.p1 + self.delta


Step: TypeAlias = Shift | Move | Own | Drop
