"""Transcript: a session's tokens, in the ledger and in llama.cpp's cells. The one place that changes both.

Reading appends; edits are planned by the ledger, carried out by the engine, and committed here. Whatever fails, the
two say the same afterwards, or the transcript is marked broken with a message that says how to go on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from ._llama import uninterrupted
from .batch import Chunk
from .columns import State
from .engine import Engine
from .errors import AuditFailed, MaskUnsupported, NoLogits, SessionBroken
from .history import View, clip
from .ledger import Ledger
from .model import TokenArray
from .next_logits import NextLogits
from .plans import Plan, Recompute, Reread
from .receipts import Audit, Receipt
from .sampling import Sampler
from .settings import SCRATCH
from .spans import Range, SpanTable
from .tally import Tally

R = TypeVar("R")
Progress = Callable[[int, int], None]


class Transcript:
    """The tokens of one session on ``engine``; callers hold the engine's lock."""

    def __init__(self, engine: Engine) -> None:
        self.engine: Final = engine
        self._sequences = engine.take_sequences()
        self._live = self._sequences[0]
        self.ledger: Final = Ledger(self._live, self._sequences[1:], can_shift=engine.can_shift)
        self.spans: Final = SpanTable()
        self.tally: Final = Tally()
        self.broken = ""
        self.released = False
        self.reading = False  # while the progress callback may run
        self._num_decoded = 0  # tokens of the reading under way that have cells
        self.progress: Progress | None = None
        self._next = NextLogits(engine)
        self._original: tuple[int, View, npt.NDArray[np.float32]] | None = None

    def release(self) -> None:
        """Free the cells and give the sequences back."""
        self.released = True
        self.engine.give_back(self._sequences, self.ledger.num_cells)

    # -- reading ------------------------------------------------------------------------------------------------

    def read(self, tokens: TokenArray, register: Callable[[Range], R]) -> R:
        """Decode tokens at the cursor, batch by batch, and record them; all of them or, on any error, none.

        ``register`` gets their index range, and runs in the same uninterrupted breath as the ledger's entry.
        """
        self.ledger.check_room(len(tokens), self.engine.cells_free)
        start, length, began = self.ledger.cursor, len(self.ledger), time.perf_counter()
        with self._reading() as before:
            try:
                self._decode_all(start, tokens)
                with uninterrupted():
                    read = self.ledger.append(tokens, start)
                    self.tally.read(len(tokens), time.perf_counter() - began)
                    return register(read)
            except BaseException:
                with uninterrupted():
                    if len(self.ledger) == length:
                        self._next = before
                        self._drop(start, self._num_decoded)
                raise

    def recompute(self, start: int | None) -> Receipt:
        """Read the visible tokens from index ``start`` on again, None for the first one that is not exact."""
        began = time.perf_counter()
        if (close := self.ledger.plan_close()) is not None:
            self.edit("close", close)
        first = self.ledger.first_inexact() if start is None else start
        again = self.ledger.plan_recompute(len(self.ledger) if first is None else first)
        if len(again.tokens):
            self._read_again(again)
        seconds = time.perf_counter() - began
        self.tally.read(len(again.tokens), seconds)
        receipt = self._receipt("recompute", again.plan, seconds * 1e3, 0, ())
        return replace(receipt, prefilled=len(again.tokens), freed=0)

    def _read_again(self, again: Recompute) -> None:
        """The old cells wait aside until every token is read; on any error they come back."""
        self.ledger.check_room(len(again.tokens), self.engine.cells_free)
        aside = False
        with self._reading() as before:
            try:
                with uninterrupted():
                    self.engine.apply(again.away)
                    aside = True
                self._decode_all(again.pos, again.tokens)
                with uninterrupted():
                    aside = False
                    self._apply(again.plan)
                    self.ledger.commit(again.plan)
                    self.ledger.history.recomputed(again.plan.edited, self.ledger.view, self.ledger.first_gap)
                    self._original = None
            except BaseException:
                with uninterrupted():
                    if aside:
                        self._next = before
                        self._drop(again.pos, self._num_decoded)
                        self.engine.apply(again.undo)
                raise

    @contextlib.contextmanager
    def _reading(self) -> Iterator[NextLogits]:
        """While tokens are read the next logits are new ones; yields those from before, should the reading fail."""
        self._next.keep_logits()
        before = self._next
        self._num_decoded = 0
        try:
            self.reading, self._next = True, NextLogits(self.engine)
            yield before
        finally:
            self.reading = False

    def _decode_all(self, start: int, tokens: TokenArray) -> None:
        """Decode tokens from position ``start`` on, batch by batch, counting them."""
        while self._num_decoded < len(tokens):
            at = self._num_decoded
            part = tokens[at : at + self.engine.n_batch]
            with uninterrupted():
                self._decode(start + at, part, last=at + len(part) == len(tokens))
                self._num_decoded += len(part)
            if self.progress is not None:
                self.progress(self._num_decoded, len(tokens))

    def _decode(self, pos: int, tokens: TokenArray, *, last: bool = True) -> None:
        """Read tokens at ``pos``; behind the last of them are the next logits, under the view there is now."""
        chunk = Chunk(self._live, pos, tokens, "last" if last else "none")
        row = self.engine.decode([chunk], self._next if last else None)[0]
        if last:
            self._next.in_buffer(row, self.ledger.view)

    def _drop(self, start: int, count: int) -> None:
        """Take cells behind the cursor away again. A recurrent state cannot: then the session is broken."""
        if not count:
            return
        if self.engine.model.capabilities.rewind:
            self.engine.drop(self._live, start, start + count)
        else:
            self.broken = "a read was interrupted and this model's state cannot be rewound; open a new session"

    def read_one(self, token: int) -> int:
        """Read one sampled token, inside the caller's uninterrupted block; returns its index. Raises ContextFull."""
        ledger = self.ledger
        ledger.check_room(1, self.engine.cells_free)
        cursor = ledger.cursor
        self.engine.decode_one(self._live, cursor, token, self._next)
        self._next.in_buffer(0, ledger.view)
        self.tally.generated += 1
        return ledger.append_one(token, cursor)

    def teacher_force(self, tokens: TokenArray) -> Generator[tuple[int, npt.NDArray[np.float32]], None, None]:
        """(index, float32 rows) that predict tokens[index:], read in batches and dropped at the end."""
        if not self.engine.model.capabilities.rewind:
            raise MaskUnsupported(f"nothing can be scored: {self.engine.model.capabilities.rewind.reason}")
        if not len(tokens):
            return
        self.freshen()
        self.ledger.check_room(len(tokens) - 1, self.engine.cells_free)
        self._next.keep_logits()
        yield 0, self._next.array()[None, :]
        start, done = self.ledger.cursor, 0
        try:
            while done < len(tokens) - 1:
                part = tokens[done : min(done + self.engine.max_outputs, len(tokens) - 1)]
                with uninterrupted():
                    self.engine.decode([Chunk(self._live, start + done, part, "all")])
                    done += len(part)
                yield done - len(part) + 1, self.engine.logit_rows(range(len(part)))
        finally:
            if done:
                with uninterrupted():
                    self.engine.drop(self._live, start, start + done)

    # -- the next token -----------------------------------------------------------------------------------------

    def logits(self) -> npt.NDArray[np.float32]:
        """float32 (n_vocab,): a copy of the next token's logits for what is visible now."""
        self.freshen()
        return self._next.array()

    def sample(self, sampler: Sampler) -> int:
        """Draw the next token for what is visible now."""
        self.freshen()
        return self._next.sample(sampler)

    @property
    def needs_reread(self) -> bool:
        """Whether the last visible token will be read again before the next is sampled."""
        return self.ledger.last_visible is not None and not self._next.fresh(self.ledger.view)

    def accept_stale_logits(self) -> None:
        """Sample the next token from the logits as they are, although an edit came after them."""
        if self._next.known:
            self._next.view = self.ledger.view

    def freshen(self) -> None:
        """Read the last visible token again if its logits were computed while something else was visible."""
        last = self.ledger.last_visible
        if last is None:
            raise NoLogits("there is no distribution yet: append something first")
        if not self.needs_reread:
            return
        changed = self.ledger.history.view_of(last) != clip(self.ledger.view, last)
        self._reread(self._plan_reread(keep=changed and self.engine.cells_free > 0), changed)
        self.tally.read_again()

    def _plan_reread(self, *, keep: bool) -> Reread:
        try:
            return self.ledger.plan_reread(keep_original=keep)
        except MaskUnsupported:  # no archive has room, so the first reading cannot be kept
            return self.ledger.plan_reread(keep_original=False)

    def _reread(self, reread: Reread, changed: bool) -> None:
        if reread.undo and self._next.view is not None:
            self._original = (reread.index, self._next.view, self._next.array())
        token = self.ledger.tokens[reread.index : reread.index + 1]
        with uninterrupted():
            self._apply(reread.plan)
            try:
                self._decode(reread.pos, token)
            except BaseException:
                self._undo(reread)
                raise
            self.ledger.commit(reread.plan)
            if changed:
                self.ledger.history.computed_again(reread.index, self.ledger.view, self.ledger.first_gap)

    def _undo(self, reread: Reread) -> None:
        if reread.undo:
            self.engine.apply(reread.undo)
        else:
            self.broken = f"token {reread.index} could not be read again and its cell is gone; open a new session"

    # -- edits --------------------------------------------------------------------------------------------------

    def edit(self, verb: str, plan: Plan, notes: tuple[str, ...] = ()) -> Receipt:
        """Carry a plan out, commit it, and say what it did. Raises SessionBroken when it fails half way."""
        began = time.perf_counter()
        reused = self._num_reused(plan)
        with uninterrupted():
            self._apply(plan)
            self.ledger.commit(plan)
            if plan.edited and verb == "rewind":
                self._forget_from(plan.edited[0][0])
            self._restore_logits()
        ms = (time.perf_counter() - began) * 1e3
        self.tally.reused += reused
        return self._receipt(verb, plan, ms, reused, notes)

    def _apply(self, plan: Plan) -> None:
        """The native half. Its steps were checked by the ledger; one that fails breaks the session."""
        try:
            self.engine.apply(plan.steps)
        except BaseException as err:
            self.broken = f"an edit failed half way ({err}); open a new session and append what you need"
            raise SessionBroken(self.broken) from err

    def _forget_from(self, index: int) -> None:
        self.spans.truncate(index)
        self.ledger.history.truncate(index)
        self._next.clear()

    def _restore_logits(self) -> None:
        """Where the first reading of the last token is visible again, its logits are, too."""
        if self._original is None:
            return
        index, view, logits = self._original
        if self.ledger.columns.state[index] == State.DROPPED:
            self._original = None
        elif index == self.ledger.last_visible and view == self.ledger.view and not self.ledger.has_original(index):
            self._next.in_copy(logits, view)
            self._original = None

    def _num_reused(self, plan: Plan) -> int:
        """Visible tokens behind the first edited one, all of which a restart would read again."""
        if not plan.edited:
            return 0
        both = self.ledger.columns.visible & plan.after.visible
        return int(np.count_nonzero(both[plan.edited[0][0] :]))

    def _receipt(self, verb: str, plan: Plan, ms: float, reused: int, notes: tuple[str, ...]) -> Receipt:
        hides = verb in ("mask", "evict")
        kv_type = self.engine.settings.kv_type
        if plan.num_moved and kv_type.startswith("q"):
            notes = (*notes, f"K is quantised again by the move ({kv_type})")
        influenced = self.ledger.influenced_by(plan.edited) if hides else []
        return Receipt(
            verb,
            plan.edited,
            plan.num_edited,
            ms,
            gap=plan.gap if hides else "",
            moved=plan.num_moved,
            freed=plan.num_freed,
            influenced=sum(stop - start for start, stop in influenced),
            reread=int(self.needs_reread),
            reused=reused,
            masked=self.ledger.count(State.MASKED),
            notes=notes,
        )

    # -- checking -----------------------------------------------------------------------------------------------

    def audit(self) -> Audit:
        """Compare what llama.cpp holds with the ledger, position by position. Raises AuditFailed."""
        expected = self.ledger.expected_positions()
        for seq, wanted in {**expected, SCRATCH: np.empty(0, np.int32)}.items():
            self._audit_sequence(seq, wanted)
        if self.engine.cells_used < self.ledger.num_cells:
            raise AuditFailed(f"{self.engine.cells_used} cells counted, the ledger holds {self.ledger.num_cells}")
        return Audit(len(expected), sum(len(p) for p in expected.values()))

    def _audit_sequence(self, seq: int, wanted: npt.NDArray[np.int32]) -> None:
        if not self.engine.model.capabilities.mask:  # a state, not cells: only where it ends can be told
            end = int(wanted[-1]) if len(wanted) else -1
            if self.engine.last_position(seq) != end:
                raise AuditFailed(f"sequence {seq} ends at {self.engine.last_position(seq)}, the ledger says {end}")
            return
        for held in self.engine.positions(seq):
            if not np.array_equal(held, wanted):
                raise AuditFailed(_difference(seq, held, wanted))


def _difference(seq: int, held: Sequence[int] | npt.NDArray[np.int32], wanted: npt.NDArray[np.int32]) -> str:
    extra, missing = np.setdiff1d(held, wanted), np.setdiff1d(wanted, held)
    return (
        f"sequence {seq}: llama.cpp holds {len(held)} cells, the ledger {len(wanted)}; "
        f"only in llama.cpp: {extra[:8].tolist()}, only in the ledger: {missing[:8].tolist()}"
    )
