"""Edits as data: what the planner works out, the engine carries out, and the ledger then commits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .columns import CellRun, Columns
from .history import View
from .shares import PRIVATE
from .spans import Range
from .steps import Drop, Load, Move, Own, Shift, Step


@dataclass(frozen=True)
class Original:
    """The first reading of a token that was read again under a mask, kept so that unmask is exact.

    ``seq`` and ``pos`` say where its cell waits, ``hidden`` what it could not see; ``cell`` as in Columns.
    """

    row: int
    seq: int
    pos: int
    hidden: View
    cell: int = PRIVATE


@dataclass(frozen=True)
class Park:
    """Cells that are copied into a blob before they are dropped, and the row of each, int (n,)."""

    run: CellRun
    rows: npt.NDArray[np.intp]


@dataclass(frozen=True)
class Plan:
    """An edit worked out: native ``steps`` in order, and the ledger ``after`` them.

    edited: the ranges of rows whose state changes. restored: tokens whose first reading comes back. gap: "close",
    "keep" or "tail" for an edit that hides tokens. parks and loads come before the first step.
    """

    steps: tuple[Step, ...]
    after: Columns
    originals: tuple[Original, ...]
    edited: tuple[Range, ...] = ()
    restored: tuple[int, ...] = ()
    gap: str = ""
    parks: tuple[Park, ...] = ()
    loads: tuple[Load, ...] = ()

    @property
    def num_moved(self) -> int:
        """Tokens whose position changes."""
        return sum(s.p1 - s.p0 for s in self.steps if not isinstance(s, (Drop, Own)) and s.delta)

    @property
    def num_freed(self) -> int:
        return sum(s.num_freed for s in self.steps if isinstance(s, Drop))

    @property
    def num_parked(self) -> int:
        return sum(len(park.rows) for park in self.parks)

    @property
    def num_loaded(self) -> int:
        return sum(load.p1 - load.p0 for load in self.loads)

    @property
    def num_copied(self) -> int:
        """Cells it takes to leave those of other sessions alone."""
        return sum(s.p1 - s.p0 for s in self.steps if isinstance(s, Own))


@dataclass(frozen=True)
class Part:
    """A stretch of a recompute: tokens to read again at ``pos``, or, with ``keep``, cells that are right as they are.
    ``back`` brings the old cells back from aside."""

    tokens: npt.NDArray[np.int32]
    pos: int
    back: tuple[Move, ...]
    keep: bool = False


@dataclass(frozen=True)
class Recompute:
    """A plan to read visible tokens again: the old cells go aside, the parts are read in order, and ``plan`` drops
    what is left aside. leaving: brings back cells of tokens that are not read again. read: the rows that are read."""

    parts: tuple[Part, ...]
    leaving: tuple[Move, ...]
    plan: Plan
    read: tuple[Range, ...]

    @property
    def away(self) -> tuple[Step, ...]:
        return tuple(m.reverse for m in (*(m for part in self.parts for m in part.back), *self.leaving))

    @property
    def num_tokens(self) -> int:
        return sum(stop - start for start, stop in self.read)


@dataclass(frozen=True)
class Reread:
    """A plan to read the token at ``row`` again at position ``pos``; ``undo`` brings its cell back should that
    fail."""

    plan: Plan
    row: int
    pos: int
    undo: tuple[Move, ...]

    @property
    def num_cells(self) -> int:
        """Free cells it takes."""
        return 1 + self.plan.num_copied - self.plan.num_freed


@dataclass(frozen=True)
class Arrival:
    """A plan to evaluate tokens aside, seeing the cells ``seen``, and to bring them into the text at ``row``.

    The first ``num_lead`` of them only lead to the position of the others, and are dropped at once. opened: whether
    rows are to be made for them; else they are there, without cells. close_up: shifts that bring copies of the seen
    cells together first. hidden: what the tokens do not see. alone: whether that is on purpose.
    """

    row: int
    tokens: npt.NDArray[np.int32]
    pos: int
    seen: tuple[CellRun, ...]
    close_up: tuple[Shift, ...]
    plan: Plan
    hidden: View
    opened: bool
    alone: bool
    num_lead: int = 0

    @property
    def stop(self) -> int:
        return self.row + len(self.tokens) - self.num_lead

    @property
    def num_cells(self) -> int:
        """Free cells it takes until it is done."""
        return len(self.tokens) + sum(s.p1 - s.p0 for s in self.close_up) + self.plan.num_copied
