"""Transcript: the edits of a session, each planned first, carried out at once, and accounted for in a receipt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

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

    ``restarts``: what this model's memory cannot do is done by reading again.
    """

    def __init__(self, engine: Engine, *, restarts: bool = False, of: Transcript | None = None) -> None:
        self.engine: Final = engine
        self.restarts: Final[bool] = restarts if of is None else of.restarts
        self.record: Final[Record] = Record(engine, None if of is None else of.record)
        self.journal: Final[Journal] = Journal() if of is None else of.journal.copy()
        self.reader: Final = Reader(self.record)
        self.ledger: Final = self.record.ledger
        self.spans: Final = self.record.spans

    # -- hiding and showing -------------------------------------------------------------------------------------

    def mask(self, ranges: Sequence[Range], how: Hiding) -> Receipt:
        plan = self.record.plan.mask(ranges, how.gap, force=how.force, suffix_moves=how.suffix_moves)
        return self._edit("mask", plan, how.notes)

    def evict(self, ranges: Sequence[Range], how: Hiding) -> Receipt:
        return self._edit("evict", self.record.plan.evict(ranges, how.gap, force=how.force), how.notes)

    def unmask(self, ranges: Sequence[Range]) -> Receipt:
        return self._edit("unmask", self.record.plan.unmask(ranges))

    def rewind(self, row: int) -> Receipt:
        return self._edit("rewind", self.record.plan.rewind(row))

    def shorten(self, row: int) -> None:
        """Rewind, as a part of generating: no edit of the user's."""
        self._carry_out(self.record.plan.rewind(row), rewound=True)

    def _edit(self, verb: str, plan: Plan, notes: tuple[str, ...] = ()) -> Receipt:
        """Carry a plan out, commit it, and say what it did. Raises SessionBroken when it fails half way."""
        began = time.perf_counter()
        former = Former.of(self.ledger, self._changed(plan.after), self.spans.ordered())
        reused = self._num_reused(plan)
        self._carry_out(plan, rewound=verb == "rewind")
        self.record.tally.reused += reused
        ms = (time.perf_counter() - began) * 1e3
        receipt = self._receipt(verb, plan, ms, reused=reused, notes=notes)
        return self.journal.add(receipt, former)

    def _carry_out(self, plan: Plan, *, rewound: bool = False) -> None:
        record = self.record

        def commit() -> None:
            self.ledger.commit(plan)
            if rewound and plan.edited:
                record.forget_from(plan.edited[0][0])
            record.restore_logits()

        if self.ledger.has_cells:
            self._check_copies(plan)
            with uninterrupted():
                record.apply(plan.steps)
                commit()
        else:
            self.reader.restart(self.ledger.ids[plan.after.visible], lambda: self._restarted(commit))

    def _restarted(self, commit: Callable[[], None]) -> None:
        commit()
        self.ledger.history.recomputed(runs(self.ledger.columns.visible), self.ledger.view)

    def _check_copies(self, plan: Plan) -> None:
        if plan.num_copied > self.engine.cells_free + plan.num_freed:
            raise ContextFull(
                f"a fork holds {plan.num_copied:,} of the cells that would move, so they are copied first, and "
                f"{self.engine.cells_free:,} cells are free; close a fork, evict something, or use gap='keep'"
            )

    # -- new text -----------------------------------------------------------------------------------------------

    def insert(self, row: int, tokens: TokenArray, register: Callable[[Range], Span]) -> Receipt:
        """Read new tokens in front of ``row``."""
        try:
            arrival = self.record.plan.insert(row, tokens)
        except MaskUnsupported:
            if not self.restarts:
                raise
            return self._insert_and_recompute(row, tokens, register)
        return self._arrive("insert", arrival, register)

    def replace(self, ranges: Sequence[Range], tokens: TokenArray, register: Callable[[Range], Span]) -> Receipt:
        """Mask the visible tokens of these ranges and read new ones in front of the first."""
        hide = self.ledger.select(ranges) & self.ledger.columns.visible
        if not hide.any():
            raise BadState("nothing to replace: the target's tokens are all masked or evicted")
        row = int(hide.argmax())
        try:
            return self._arrive("replace", self.record.plan.insert(row, tokens, hide), register)
        except MaskUnsupported:
            if not self.restarts:
                raise
        masked = self.mask(ranges, Hiding("keep", force=True))
        try:
            inserted = self._insert_and_recompute(row, tokens, register)
        except BaseException:
            self.undo()
            self.journal.forget(2)
            raise
        return self.journal.merge(2, replace(inserted, verb="replace", tokens=masked.tokens, ranges=masked.ranges))

    def append_alone(self, tokens: TokenArray, attend: Flags, register: Callable[[Range], Span]) -> Span:
        """Read new tokens at the end that see ``attend`` only."""
        arrival = self.record.plan.append_alone(tokens, attend)
        return self.reader.arrive(arrival, lambda: register((len(self.ledger) - len(tokens), len(self.ledger))))

    def _arrive(self, verb: str, arrival: Arrival, register: Callable[[Range], Span]) -> Receipt:
        began = time.perf_counter()
        spans, left = self.spans.ordered(), arrival.plan.after.without(arrival.row, arrival.stop)
        new = (len(self.ledger), len(self.ledger) + len(arrival.tokens))
        former = Former.of(self.ledger, self._changed(left), spans).and_(Former.none(new, spans))
        reused = int(np.count_nonzero((self.ledger.columns.visible & left.visible)[arrival.row :]))
        span = self.reader.arrive(arrival, lambda: register(new))
        ms = (time.perf_counter() - began) * 1e3
        self.record.tally.reused += reused
        receipt = self._receipt(verb, arrival.plan, ms, reused=reused, span=span, prefilled=len(arrival.tokens))
        return self.journal.add(receipt, former)

    def _changed(self, after: Columns) -> Flags:
        """The rows whose state or reserved place is another one afterwards."""
        now = self.ledger.columns
        return np.asarray((now.state != after.state) | (now.reserved != after.reserved))

    def _insert_and_recompute(self, row: int, tokens: TokenArray, register: Callable[[Range], Span]) -> Receipt:
        """Where the suffix cannot move: new tokens and all visible ones behind them are read."""
        began = time.perf_counter()
        again = self.record.plan.insert_and_recompute(row, tokens)
        new = (len(self.ledger), len(self.ledger) + len(tokens))
        former = Former.none(new, self.spans.ordered())

        def commit() -> Span:
            self.ledger.open_rows(row, tokens)
            self._commit_again(again)
            return register(new)

        span = self.reader.recompute(again, commit)
        notes = (f"{self.engine.close_gaps.reason}: all behind the new text was read again",)
        ms = (time.perf_counter() - began) * 1e3
        prefilled = again.num_tokens
        receipt = self._receipt("insert", again.plan, ms, prefilled=prefilled, span=span, notes=notes)
        return self.journal.add(replace(receipt, tokens=len(tokens), ranges=(new,), freed=0), former)

    # -- reading again ------------------------------------------------------------------------------------------

    def recompute(self, index: int | None = None) -> Receipt:
        """Read the visible tokens from ``index`` on again, None for the first one that is not exact."""
        began = time.perf_counter()
        if not self.ledger.has_cells:
            return self._restart_from_nothing(began)
        if (close := self.record.plan.close()) is not None:
            self._carry_out(close)
        inexact = self.ledger.inexact()
        first = int(inexact.argmax()) if inexact.any() else len(self.ledger)
        again = self.record.plan.recompute(first if index is None else self.ledger.places.row(index))
        if again.num_tokens:
            self.reader.recompute(again, lambda: self._commit_again(again))
        ms = (time.perf_counter() - began) * 1e3
        receipt = self._receipt("recompute", replace(again.plan, edited=again.read), ms, prefilled=again.num_tokens)
        return self.journal.add(replace(receipt, freed=0))

    def _commit_again(self, again: Recompute) -> None:
        self.ledger.commit(again.plan)
        self.ledger.history.recomputed(again.read, self.ledger.view, self.ledger.first_gap)

    def _restart_from_nothing(self, began: float) -> Receipt:
        """Every edit of such a model is a restart: there is nothing to read again."""
        plan = Plan((), self.ledger.columns.copy(), ())
        return self.journal.add(self._receipt("recompute", plan, (time.perf_counter() - began) * 1e3))

    def compact(self) -> Receipt:
        """Put all cells in a row; no token, position or mask changes."""
        began, saves = time.perf_counter(), self.engine.compact_saves
        with uninterrupted():
            self.engine.compact()
        notes = (f"decode scans {saves:,} cells fewer",) if saves else ("there was nothing to gain",)
        ms = (time.perf_counter() - began) * 1e3
        masked = self.ledger.count(State.MASKED)
        return self.journal.add(Receipt("compact", (), self.engine.cells_used, ms, masked=masked, notes=notes))

    # -- undo ---------------------------------------------------------------------------------------------------

    def undo(self) -> Receipt:
        """The newest edit that was not undone, back. Tokens whose K and V are gone are read again."""
        newest = self.journal.newest()
        if newest is None:
            raise BadState("nothing to undo: no edit of this session is left in its journal")
        edit, former = newest
        began = time.perf_counter()
        try:
            plan, reused, prefilled = self._back(former)
        except MaskUnsupported:
            if not self.restarts:
                raise
            plan, reused, prefilled = self._back_and_recompute(former)
        with uninterrupted():
            self.spans.restore(former.spans)
            self.spans.keep_only(self.ledger.places.by_index(~self.ledger.columns.where(State.DROPPED)))
        ms = (time.perf_counter() - began) * 1e3
        receipt = self._receipt("undo", plan, ms, reused=reused, prefilled=prefilled)
        return self.journal.undone(replace(receipt, tokens=edit.tokens, undone=edit.verb))

    def _back(self, former: Former) -> tuple[Plan, int, int]:
        """Give tokens the states they had; returns what was done, tokens reused and tokens read."""
        plan = self.record.plan.back(former.rows(self.ledger), former.columns)
        reused, gone = self._num_reused(plan), self._gone(former)
        self.reader.check_room(len(gone) - plan.num_freed)
        before = Former.of(self.ledger, self._rows(former.rows(self.ledger)), ())
        if plan.edited or not len(gone):
            self._carry_out(plan)
        try:
            self._read_back(former, gone)
        except BaseException:
            self._carry_out(self.record.plan.back(before.rows(self.ledger), before.columns))
            raise
        edited = tuple(runs(self._flags(plan.edited) | self._rows(gone)))
        return replace(plan, edited=edited), reused, len(gone)

    def _back_and_recompute(self, former: Former) -> tuple[Plan, int, int]:
        rows = former.rows(self.ledger)
        again = self.record.plan.back_and_recompute(rows, former.columns)
        self.reader.recompute(again, lambda: self._commit_again(again))
        return replace(again.plan, edited=tuple(runs(self._rows(rows)))), 0, again.num_tokens

    def _gone(self, former: Former) -> npt.NDArray[np.int64]:
        """The rows that had cells before the edit and have none now."""
        rows = former.rows(self.ledger)
        if not self.ledger.has_cells:
            return rows[:0]
        return rows[former.columns.in_cells & ~self.ledger.columns.in_cells[rows]]

    def _read_back(self, former: Former, gone: npt.NDArray[np.int64]) -> None:
        """Read rows that have no cells again, run by run; those that were masked are masked at once."""
        rows = former.rows(self.ledger)
        masked, missing = self._rows(rows[former.columns.where(State.MASKED)]), self._rows(gone)
        for part in (*runs(missing & ~masked), *runs(missing & masked)):
            self.reader.arrive(self.record.plan.read_back(part), lambda: None)
            if masked[part[0]]:
                self._carry_out(self.record.plan.back(rows, former.columns))

    def _rows(self, rows: npt.NDArray[np.int64]) -> Flags:
        flags = np.zeros(len(self.ledger), np.bool_)
        flags[rows] = True
        return flags

    # -- receipts -----------------------------------------------------------------------------------------------

    def _flags(self, ranges: Sequence[Range]) -> Flags:
        flags = np.zeros(len(self.ledger), np.bool_)
        for start, stop in ranges:
            flags[start:stop] = True
        return flags

    def _num_reused(self, plan: Plan) -> int:
        """Visible tokens behind the first edited one, all of which a restart would read again."""
        if not plan.edited or not self.ledger.has_cells:
            return 0
        both = self.ledger.columns.visible & plan.after.visible
        return int(np.count_nonzero(both[plan.edited[0][0] :]))

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
        told = verb in ("mask", "evict", "unmask", "insert", "replace", "undo")
        if plan.num_moved and self.engine.settings.kv_type.startswith("q"):
            notes = (*notes, f"K is quantised again by the move ({self.engine.settings.kv_type})")
        if not ledger.has_cells and verb != "recompute":
            prefilled = int(visible.sum())
            notes = (*notes, f"read again from the start: {self.engine.model.capabilities.mask.reason}")
        return Receipt(
            verb,
            tuple(ledger.places.ranges(edited)),
            int((hidden if verb == "replace" else edited).sum()),
            ms,
            gap=plan.gap if verb in ("mask", "evict", "replace") else "",
            moved=plan.num_moved,
            freed=plan.num_freed,
            copied=plan.num_copied,
            influenced=int(ledger.influenced_by(hidden).sum()) if told and hidden.any() else 0,
            unaware=int((ledger.history.unaware(came) & visible).sum()) if told and came.any() else 0,
            prefilled=prefilled,
            reread=int(self.record.needs_reread),
            reused=reused,
            masked=ledger.count(State.MASKED),
            span=span,
            notes=notes,
        )
