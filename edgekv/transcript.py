"""Transcript: the edits of a session, each planned first, carried out at once, and accounted for in a receipt.

An edit, its entry in the ledger and its receipt in the journal come in one breath that Ctrl-C waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from . import recovery
from ._llama import uninterrupted
from .columns import Columns, Flags, State
from .engine import Engine
from .errors import BadState, ContextFull, MaskUnsupported
from .journal import Former, Journal
from .model import TokenArray
from .plans import Arrival, Plan, Recompute
from .reader import Reader
from .receipts import Receipt
from .record import Record
from .spans import Range, Span, runs
from .wording import count

R = TypeVar("R")


@dataclass(frozen=True)
class Hiding:
    """How to hide: ``gap`` "close" or "keep", ``force`` attention sinks too, and what the user is told.

    suffix_moves: close the gap by moving what stands behind down, not what stands in front up.
    """

    gap: str
    force: bool = False
    suffix_moves: bool = False
    notes: tuple[str, ...] = ()


class Transcript:
    """The edits of one session on ``engine``, or of a fork ``of`` another; callers hold the engine's lock.

    ``restarts``: what this model's memory cannot do is done by reading again. Targets are rows, bool (n,).
    """

    def __init__(
        self,
        engine: Engine,
        *,
        restarts: bool = False,
        of: Transcript | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.engine: Final = engine
        self.restarts: Final[bool] = restarts if of is None else of.restarts
        self.record: Final[Record] = Record(engine, None if of is None else of.record)
        self.journal: Final[Journal] = journal or Journal() if of is None else of.journal.copy()
        self.record.journal = self.journal
        self.reader: Final = Reader(self.record)
        self.unfinished: tuple[tuple[Receipt, Former] | None, Former] | None = None
        self.ledger: Final = self.record.ledger
        self.spans: Final = self.record.spans

    # -- hiding and showing -------------------------------------------------------------------------------------

    def mask(self, rows: Flags, how: Hiding) -> Receipt:
        plan = self.record.plan.mask(rows, how.gap, force=how.force, suffix_moves=how.suffix_moves)
        return self._edit("mask", plan, how.notes)

    def evict(self, rows: Flags, how: Hiding) -> Receipt:
        return self._edit("evict", self.record.plan.evict(rows, how.gap, force=how.force), how.notes)

    def park(self, rows: Flags, how: Hiding, folder: Path | None) -> Receipt:
        plan = self.record.plan.park(rows, how.gap, force=how.force)
        return self._edit("park", plan, how.notes, folder)

    def unmask(self, rows: Flags) -> Receipt:
        return self._edit("unmask", self.record.plan.unmask(rows))

    def rewind(self, row: int) -> Receipt:
        return self._edit("rewind", self.record.plan.rewind(row))

    def shorten(self, row: int) -> None:
        """Rewind, as a part of generating: no edit of the user's."""
        self._carry_out(self.record.plan.rewind(row), lambda: None, rewound=True)

    def _edit(self, verb: str, plan: Plan, notes: tuple[str, ...] = (), folder: Path | None = None) -> Receipt:
        """Carry a plan out, commit it, and say what it did. Raises SessionBroken when it fails half way."""
        began = time.perf_counter()
        changed = self._changed(plan.after)
        if not changed.any():  # a rewind to the end
            return self._receipt(verb, plan, 0.0)
        # only a rewind drops names; whatever was named since another edit stays named
        spans = self.spans.ordered() if verb == "rewind" else ()
        former = Former.of(self.ledger, changed, spans)
        reused = self._num_reused(plan)

        def done() -> Receipt:
            self.record.tally.reused += reused
            return self.journal.add(self._receipt(verb, plan, _ms(began), reused=reused, notes=notes), former)

        return self._carry_out(plan, done, rewound=verb == "rewind", folder=folder)

    def _carry_out(self, plan: Plan, done: Callable[[], R], *, rewound: bool = False, folder: Path | None = None) -> R:
        """The plan's steps, its entry in the ledger, and ``done``, all or nothing. What it parks goes to ``folder``,
        or to host memory."""

        def commit() -> None:
            self.record.commit(plan)
            if rewound and plan.edited:
                self.record.forget_from(plan.edited[0][0])
            self.record.restore_logits()

        if not self.ledger.has_cells:
            return self.reader.restart(self.ledger.ids[plan.after.visible], commit, done)
        self._check_copies(plan)

        def committed() -> R:
            commit()
            return done()

        with self.record.parked(plan, folder), uninterrupted():
            self.record.load(self.record.read_parked(plan))
            return self.record.change(plan.steps, committed)

    def _check_copies(self, plan: Plan) -> None:
        if plan.loads:
            self.reader.check_room(plan.num_loaded + max(0, plan.num_copied - plan.num_freed))
        elif plan.num_copied > self.engine.cells_free + plan.num_freed:
            raise ContextFull(
                f"a fork holds {plan.num_copied:,} of the cells that would move, so they are copied first, and "
                f"{self.engine.cells_free:,} cells are free; close a fork, evict something, or use gap='keep'"
            )

    # -- new text -----------------------------------------------------------------------------------------------

    def insert(self, row: int, tokens: TokenArray, register: Callable[[Range], Span]) -> Receipt:
        """Read new tokens in front of ``row``."""
        return self._new_text("insert", row, tokens, None, register)

    def replace(self, rows: Flags, tokens: TokenArray, register: Callable[[Range], Span]) -> Receipt:
        """Mask the visible ones of these rows and read new tokens in front of the first."""
        hide = rows & self.ledger.columns.visible
        if not hide.any():
            raise BadState("nothing to replace: the target's tokens are all masked, parked or evicted")
        return self._new_text("replace", int(hide.argmax()), tokens, hide, register)

    def append_alone(self, tokens: TokenArray, attend: Flags, register: Callable[[Range], Span]) -> Span:
        """Read new tokens at the end that see ``attend`` only."""
        arrival = self.record.plan.append_alone(tokens, attend)
        return self.reader.arrive(arrival, lambda: register((len(self.ledger) - len(tokens), len(self.ledger))))

    def _new_text(
        self, verb: str, row: int, tokens: TokenArray, hide: Flags | None, register: Callable[[Range], Span]
    ) -> Receipt:
        try:
            arrival = self.record.plan.insert(row, tokens, hide)
        except MaskUnsupported:
            if not self.restarts:
                raise
            return self._insert_and_recompute(verb, row, tokens, hide, register)
        return self._arrive(verb, arrival, register)

    def _arrive(self, verb: str, arrival: Arrival, register: Callable[[Range], Span]) -> Receipt:
        began, left = time.perf_counter(), arrival.plan.after.without(arrival.row, arrival.stop)
        new, former = self._former_of_new(len(arrival.tokens), left)
        reused = int(np.count_nonzero((self.ledger.columns.visible & left.visible)[arrival.row :]))

        def done() -> Receipt:
            self.record.tally.reused += reused
            span, prefilled = register(new), len(arrival.tokens)
            receipt = self._receipt(verb, arrival.plan, _ms(began), reused=reused, span=span, prefilled=prefilled)
            return self.journal.add(receipt, former)

        return self.reader.arrive(arrival, done)

    def _insert_and_recompute(
        self, verb: str, row: int, tokens: TokenArray, hide: Flags | None, register: Callable[[Range], Span]
    ) -> Receipt:
        """Where the suffix cannot move: new tokens and all visible ones behind them are read."""
        began = time.perf_counter()
        again = self.record.plan.insert_and_recompute(row, tokens, hide)
        new, former = self._former_of_new(len(tokens), again.plan.after.without(row, row + len(tokens)))
        hidden = tuple(runs(hide)) if hide is not None else ()

        def done() -> Receipt:
            self.ledger.open_rows(row, tokens)
            self._commit_again(again)
            notes = (f"{self.engine.close_gaps.reason}: all behind the new text was read again",)
            plan = replace(again.plan, edited=((row, row + len(tokens)),))
            receipt = self._receipt(verb, plan, _ms(began), prefilled=again.num_tokens, span=register(new), notes=notes)
            shifted = tuple((a + len(tokens), b + len(tokens)) for a, b in hidden)  # the new rows come in front
            ranges = self.ledger.places.ranges(self._flags((*plan.edited, *shifted)))
            num_hidden = sum(b - a for a, b in hidden)
            told = replace(receipt, ranges=tuple(ranges), tokens=num_hidden or len(tokens), freed=0)
            return self.journal.add(told, former)

        return self.reader.recompute(again, done)

    def _former_of_new(self, count: int, left: Columns) -> tuple[Range, Former]:
        """The indexes that ``count`` new tokens will have, and how those and all that changes were before; ``left``
        is how the others are afterwards."""
        spans, new = self.spans.ordered(), (len(self.ledger), len(self.ledger) + count)
        return new, Former.of(self.ledger, self._changed(left), spans).and_(Former.none(new, spans))

    # -- reading again ------------------------------------------------------------------------------------------

    @property
    def to_recompute(self) -> Recompute:
        """What it takes to make the session exact."""
        inexact = self.ledger.inexact()
        return self.record.plan.recompute(int(inexact.argmax()) if inexact.any() else len(self.ledger))

    def recompute(self, row: int | None = None) -> Receipt:
        """Read the visible tokens from ``row`` on again, None for the first one that is not exact."""
        began = time.perf_counter()
        if not self.ledger.has_cells:  # every edit is a restart: there is nothing to read again
            plan = Plan((), self.ledger.columns.copy(), ())
            return self.journal.add(self._receipt("recompute", plan, _ms(began)))

        def planned() -> Recompute:
            return self.to_recompute if row is None else self.record.plan.recompute(row)

        again = planned()
        self.reader.check_room(again.num_tokens)
        if (close := self.record.plan.close()) is not None:
            self._carry_out(close, lambda: None)
            again = planned()

        def done() -> Receipt:
            self._commit_again(again)
            plan = replace(again.plan, edited=again.read)
            receipt = self._receipt("recompute", plan, _ms(began), prefilled=again.num_tokens)
            return self.journal.add(replace(receipt, freed=0))

        if not again.num_tokens:
            return self.record.change((), done)
        return self.reader.recompute(again, done)

    def _commit_again(self, again: Recompute) -> None:
        self.record.commit(again.plan)
        if again.read:
            self.ledger.history.recomputed(again.read, self.ledger.view, self.ledger.first_gap)

    def compact(self) -> Receipt:
        """Put all cells in a row; no token, position or mask changes."""
        began, saves = time.perf_counter(), self.engine.compact_saves
        notes = (f"decode scans {saves:,} cells fewer",) if saves else ("there was nothing to gain",)
        with uninterrupted():
            self.engine.compact()
            masked = self.ledger.count(State.MASKED)
            receipt = Receipt("compact", (), self.engine.cells_used, _ms(began), masked=masked, notes=notes)
            return self.journal.add(receipt)

    # -- undo ---------------------------------------------------------------------------------------------------

    def undo(self) -> Receipt:
        """The newest edit that was not undone, back. Tokens whose K and V are gone are evaluated again.

        Where that cannot be done without a shift, nothing changes, and the edit is passed over: the next undo takes the
        one before it.
        """
        newest = self.journal.newest()
        if newest is None:
            raise BadState("nothing to undo: no edit of this session is left in its journal")
        edit, former = newest
        try:
            return self._back(edit, former)
        except MaskUnsupported as err:
            if not self.restarts:
                self.journal.pass_over()
                recovery.keep(self.engine)
                raise MaskUnsupported(
                    f"the {edit.verb} of {count(edit.tokens, 'token')} cannot be undone: {err}; the next undo takes "
                    "the edit before it"
                ) from err
        return self._back_and_recompute(edit, former)

    def _back(self, edit: Receipt, former: Former) -> Receipt:
        """Give tokens the states they had; what has no cells any more is read."""
        began, rows, newest = time.perf_counter(), former.rows(self.ledger), self.journal.newest()
        plan = self.record.plan.back(rows, former.columns)
        gone, reused = self._gone(former), self._num_reused(plan)
        changed = replace(plan, edited=tuple(runs(self._flags(plan.edited) | self._rows(gone))))

        num_read = 0

        def done() -> Receipt:
            receipt = self._receipt("undo", changed, _ms(began), reused=reused, prefilled=num_read)
            return self._undone(edit, former, receipt)

        if not len(gone):
            return self._carry_out(plan, done)
        self.reader.check_room(len(gone) - plan.num_freed)
        before = Former.of(self.ledger, np.ones(len(self.ledger), np.bool_), ())
        self.unfinished = newest, before
        try:
            if self._changed(plan.after).any():
                self._carry_out(plan, lambda: None)
            num_read = self._read_back(former, gone)
            receipt = self._carry_out(self.record.plan.back(rows, former.columns), done)  # kept gaps, too
            self.unfinished = None
            return receipt
        except BaseException:
            recovery.take_back(self.engine, go_on=True)
            self.finish()
            raise

    def finish(self) -> None:
        """An undo of several edits that was cut short between two of them never began."""
        if self.unfinished is None:
            return
        newest, before = self.unfinished
        if self.journal.newest() == newest:
            self._carry_out(self.record.plan.back(before.rows(self.ledger), before.columns), lambda: None)
        self.unfinished = None

    def _back_and_recompute(self, edit: Receipt, former: Former) -> Receipt:
        """As :meth:`_back`, where that would need a shift: all from the first of those tokens on is read again."""
        began, rows = time.perf_counter(), former.rows(self.ledger)
        again = self.record.plan.back_and_recompute(rows, former.columns)
        hidden = former.columns.where(State.MASKED) | former.columns.parked
        lost = int(np.count_nonzero(hidden & again.plan.after.where(State.EVICTED)[rows]))
        notes = (f"{lost:,} hidden tokens have lost their K and V and stay evicted",) if lost else ()

        def done() -> Receipt:
            self._commit_again(again)
            plan = replace(again.plan, edited=tuple(runs(self._rows(rows))))
            receipt = self._receipt("undo", plan, _ms(began), prefilled=again.num_tokens, notes=notes)
            return self._undone(edit, former, receipt)

        return self.reader.recompute(again, done)

    def _undone(self, edit: Receipt, former: Former, receipt: Receipt) -> Receipt:
        kept = self.ledger.places.by_index(~self.ledger.columns.where(State.DROPPED))
        self.spans.keep_only(kept)
        self.spans.restore(former.spans)
        self.spans.keep_only(kept)
        return self.journal.undone(replace(receipt, tokens=edit.tokens, undone=edit.verb))

    def _gone(self, former: Former) -> npt.NDArray[np.int64]:
        """The rows that had K and V before the edit and have none now."""
        rows, now = former.rows(self.ledger), self.ledger.columns
        if not self.ledger.has_cells:
            return rows[:0]
        had, has = former.columns.in_cells | former.columns.parked, now.in_cells | now.parked
        return rows[had & ~has[rows]]

    def _read_back(self, former: Former, gone: npt.NDArray[np.int64]) -> int:
        """Evaluate rows that have no cells again, run by run; those that were hidden are hidden at once. Returns how
        many tokens that took."""
        rows, began = former.rows(self.ledger), self.record.tally.prefilled
        hidden, missing = self._rows(rows[~former.columns.visible]), self._rows(gone)
        for part in sorted((*runs(missing & ~hidden), *runs(missing & hidden))):
            self.reader.arrive(self.record.plan.read_back(part, rows, former.columns), lambda: None)
        return self.record.tally.prefilled - began

    # -- receipts -----------------------------------------------------------------------------------------------

    def _rows(self, rows: npt.NDArray[np.int64]) -> Flags:
        flags = np.zeros(len(self.ledger), np.bool_)
        flags[rows] = True
        return flags

    def _flags(self, ranges: Sequence[Range]) -> Flags:
        flags = np.zeros(len(self.ledger), np.bool_)
        for start, stop in ranges:
            flags[start:stop] = True
        return flags

    def _changed(self, after: Columns) -> Flags:
        """The rows whose state or reserved place is another one afterwards."""
        now = self.ledger.columns
        return np.asarray((now.state != after.state) | (now.reserved != after.reserved))

    def _num_reused(self, plan: Plan) -> int:
        """Visible tokens behind the first that is shown or hidden, all of which a restart would read again."""
        before, after = self.ledger.columns.visible, plan.after.visible
        changed = before != after
        if not changed.any() or not self.ledger.has_cells:
            return 0
        return int(np.count_nonzero((before & after)[changed.argmax() :]))

    def _receipt(
        self,
        verb: str,
        plan: Plan,
        ms: float,
        *,
        reused: int = 0,
        prefilled: int = 0,
        span: Span | None = None,
        notes: tuple[str, ...] = (),
    ) -> Receipt:
        """What a plan that was carried out did."""
        ledger, edited = self.ledger, self._flags(plan.edited)
        visible = ledger.columns.visible
        hidden, came = edited & ~visible, edited & visible
        if plan.num_moved and self.engine.settings.kv_type.startswith("q"):
            notes = (*notes, f"K is quantised again by the move ({self.engine.settings.kv_type})")
        if not ledger.has_cells and verb != "recompute":
            prefilled = int(visible.sum()) if plan.edited else 0
            notes = (*notes, f"read again from the start: {self.engine.model.capabilities.mask.reason}")
            notes += ("nothing of it is kept: it comes back by being read",) if verb == "park" else ()
        return Receipt(
            verb,
            tuple(ledger.places.ranges(edited)),
            int((hidden if verb == "replace" else edited).sum()),
            ms,
            gap=plan.gap if verb in ("mask", "park", "evict", "replace") else "",
            moved=plan.num_moved,
            freed=plan.num_freed,
            copied=plan.num_copied,
            influenced=self._num_influenced(verb, hidden),
            unaware=self._num_unaware(came) if verb in _SHOWS and came.any() else 0,
            prefilled=prefilled,
            reread=int(self.record.needs_reread),
            reused=reused,
            masked=ledger.count(State.MASKED),
            parked_bytes=self.engine.kv_bytes(plan.num_parked),
            loaded_bytes=self.engine.kv_bytes(plan.num_loaded),
            span=span,
            notes=notes,
        )

    def _num_unaware(self, came: Flags) -> int:
        """Visible tokens that were computed without some of those that came, and those of them that were computed
        while others were hidden that are visible now, or the reverse."""
        ledger = self.ledger
        return int(((ledger.history.unaware(came) & ledger.columns.visible) | (came & ledger.inexact())).sum())

    def _num_influenced(self, verb: str, hidden: Flags) -> int:
        if verb == "recompute":
            return int(self.ledger.inexact().sum())
        return int(self.ledger.influenced_by(hidden).sum()) if verb in _HIDES and hidden.any() else 0


_HIDES: Final = frozenset({"mask", "park", "evict", "replace", "undo"})
_SHOWS: Final = frozenset({"unmask", "insert", "replace", "undo"})


def _ms(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
