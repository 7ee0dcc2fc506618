"""Recovery: a verb that an exception cut short, at any bytecode, has happened as a whole or not at all.

A verb begins a :class:`Unit`: how ledger, spans, journal and the rest were. Native work only adds cells, or moves some
aside in a way the unit knows to reverse, until :meth:`Record.change`: there the ledger is changed first, and then the
native steps are carried out and the unit is replaced by one of how things are now, with no bytecode in between (see
:meth:`Cells.perform`). So whoever finds the unit of a verb that no longer runs goes back to what it says: at the end of
the verb that failed, or, should that be cut short as well, at the beginning of the next one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from .errors import AuditFailed

if TYPE_CHECKING:
    from .cells import Call
    from .engine import Engine
    from .record import Record
    from .steps import Move

R = TypeVar("R")

_STAY: Final = frozenset({"broken", "released"})  # what a record is from then on, whatever is taken back
LOST: Final = "an edit was cut short half way and some K and V are gone; open a new session and append what you need"


class Keeps(Protocol):
    """Something that can go back to how it was."""

    def kept(self) -> Any: ...

    def restore_kept(self, before: Any) -> None: ...


class Unit:
    """How ``records`` of ``engine``, and others, are; ``frame`` runs the verb.

    inverse: the moves that bring back what was moved since. checkpoint: whether a copy of the state waits aside, of a
    model whose state cannot be rewound. overwritten: whether the state itself is gone, and its text has to be read.
    """

    def __init__(
        self, engine: Engine, records: Sequence[Record], frame: FrameType | None, others: Sequence[Keeps] = ()
    ) -> None:
        self.engine, self.records, self.frame, self.others = engine, tuple(records), frame, tuple(others)
        self.inverse: tuple[Move, ...] = ()
        self.checkpoint = self.overwritten = False
        self._before = [(thing, thing.kept()) for thing in (*self.records, *self.others)]

    @property
    def running(self) -> bool:
        """Whether the verb is still under way, in this thread."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None

    def restore(self) -> None:
        for thing, before in self._before:
            thing.restore_kept(before)

    def renewed(self) -> Unit:
        """How things are now."""
        return Unit(self.engine, self.records, self.frame, self.others)


def ready(engine: Engine) -> bool:
    """Take back what a verb left that was cut short. Callers hold the lock. Returns whether another verb is under way
    in this thread, of which the caller is a part."""
    unit = engine.unit
    if unit is None:
        if not engine.closed and any(ref() is None for ref in engine.owners.values()):
            _let_go(engine)
        return False
    if unit.running:
        return True
    take_back(engine)
    return False


def whole(engine: Engine, records: Sequence[Record], work: Callable[[], R], others: Sequence[Keeps] = ()) -> R:
    """Do ``work``: on any exception, everything since the last :meth:`Record.change` never happened. Callers hold the
    lock."""
    if ready(engine):
        return work()
    engine.untouch()
    engine.unit = Unit(engine, records, sys._getframe(), others)
    try:
        result = work()
        engine.unit = None
        return result
    except BaseException:
        take_back(engine)
        raise


def stands(engine: Engine) -> list[Call]:
    """The calls after which what was done so far stands, whatever comes."""
    unit = engine.unit
    renewed = [] if unit is None else [partial(setattr, engine, "unit", unit.renewed())]
    return [*engine.untouched(), *renewed]


def keep(engine: Engine) -> None:
    """What was done so far stands, though the verb fails."""
    for call in stands(engine):
        call()


def take_back(engine: Engine, *, go_on: bool = False) -> None:
    """Be what the unit says. That may be cut short, too, and done again. ``go_on``: the verb is not over."""
    unit = engine.unit
    if unit is None:
        return
    if not engine.closed:
        try:
            _take_back(engine, unit)
        except AuditFailed as err:
            engine.lost = f"what a verb left that was cut short could not be told ({err}); open a new session"
    engine.unit = unit.renewed() if go_on else None


def _take_back(engine: Engine, unit: Unit) -> None:
    engine.idle()
    unit.restore()
    records = open_records(engine)
    if engine.touched:
        if unit.inverse:
            engine.bring_back(unit.inverse, [partial(setattr, unit, "inverse", ())])
        if unit.checkpoint:
            engine.become_aside(unit.records[0].live, [partial(setattr, unit, "checkpoint", False)])
        wanted = {seq: pos for record in records for seq, pos in record.ledger.expected_positions().items()}
        lacking = engine.hold_only(wanted)
        for record in records:
            if lacking.intersection(record.sequences) or (unit.overwritten and record in unit.records):
                record.heal()
        unit.overwritten = False
        if engine.shares and engine.model.capabilities.mask:
            members = engine.members()
            for record in records:
                record.ledger.own_alone(members)
    _count(engine, records)


def _let_go(engine: Engine) -> None:
    """Empty the sequences of sessions that nobody closed, and nobody has any more."""
    records = open_records(engine)
    engine.empty_but({seq for record in records for seq in record.sequences})
    _count(engine, records)


def _count(engine: Engine, records: Sequence[Record]) -> None:
    """These sessions are all there are: what the others had is free."""
    engine.owners = {record.live: engine.owners[record.live] for record in records}
    engine.free_but({seq for record in records for seq in record.sequences})
    num_cells = engine.shares.count([record.ledger.cell_ids for record in records])
    engine.parking.keep_only({record: record.ledger.columns.blobs for record in records})
    engine.checked(num_cells)


def open_records(engine: Engine) -> list[Record]:
    """The records of the sessions that are open."""
    found = [ref() for ref in list(engine.owners.values())]
    return [record for record in found if record is not None and not record.released]
