"""Edits as data: what the ledger works out, the engine carries out, and the ledger then commits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .columns import Columns
from .history import View
from .spans import Range
from .steps import Drop, Step


@dataclass(frozen=True)
class Original:
    """The first reading of a token that was read again under a mask, kept so that unmask is exact.

    ``seq`` and ``pos`` say where its cell waits, ``hidden`` what it could not see.
    """

    index: int
    seq: int
    pos: int
    hidden: View

    @property
    def drop(self) -> Drop:
        return Drop(self.seq, self.pos, self.pos + 1)


@dataclass(frozen=True)
class Plan:
    """An edit worked out: native ``steps`` in order, and the ledger ``after`` them.

    edited: the index ranges whose state changes. restored: tokens whose first reading comes back. gap: "close",
    "keep" or "tail" for an edit that hides tokens.
    """

    steps: tuple[Step, ...]
    after: Columns
    originals: tuple[Original, ...]
    edited: tuple[Range, ...] = ()
    restored: tuple[int, ...] = ()
    gap: str = ""

    @property
    def num_edited(self) -> int:
        return sum(stop - start for start, stop in self.edited)

    @property
    def num_moved(self) -> int:
        """Tokens whose position changes."""
        return sum(s.p1 - s.p0 for s in self.steps if not isinstance(s, Drop) and s.delta)

    @property
    def num_freed(self) -> int:
        return sum(s.p1 - s.p0 for s in self.steps if isinstance(s, Drop))


@dataclass(frozen=True)
class Recompute:
    """A plan to read visible tokens again: their cells go aside, the ``tokens`` are decoded from ``pos`` on, then
    ``plan`` drops what went aside. ``away`` comes first, ``undo`` brings the cells back should a decode fail."""

    away: tuple[Step, ...]
    undo: tuple[Step, ...]
    plan: Plan
    tokens: npt.NDArray[np.int32]
    pos: int


@dataclass(frozen=True)
class Reread:
    """A plan to read token ``index`` again at position ``pos``; ``undo`` brings its cell back should that fail."""

    plan: Plan
    index: int
    pos: int
    undo: tuple[Step, ...]
