"""Reader: decodes tokens into a session's cells: behind what is there, aside for the middle, or once more.

All of what was to be read is in ledger and cells afterwards or, on any error and on Ctrl-C, nothing of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from . import recovery
from ._llama import raise_if_interrupted, uninterrupted
from .batch import Chunk
from .errors import ContextFull, MaskUnsupported, NoLogits
from .history import clip
from .model import TokenArray
from .next_logits import NextLogits
from .plans import Arrival, Recompute, Reread
from .record import Record
from .sampling import Sampler
from .settings import ASIDE
from .spans import Range, runs
from .steps import Drop, Own

R = TypeVar("R")
Progress = Callable[[int, int], None]


class Reader:
    """Reads for ``record``. ``progress`` is called with (tokens read, tokens to read) after every batch; meanwhile the
    engine is ``reading``, and no session on it may be touched."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._engine = record.engine
        self._ledger = record.ledger
        self.progress: Progress | None = None
        self._num_read = self._num_wanted = 0

    # -- behind what is there -----------------------------------------------------------------------------------

    def read(self, tokens: TokenArray, register: Callable[[Range], R]) -> R:
        """Decode tokens at the cursor, batch by batch, and record them. ``register`` gets their index range."""
        ledger, record = self._ledger, self._record
        self.check_room(len(tokens))
        start, began = ledger.cursor, time.perf_counter()

        def commit() -> R:
            read = ledger.append(tokens, start)
            record.tally.read(len(tokens), time.perf_counter() - began)
            return register(read)

        with self._reading(len(tokens)):
            if self._engine.model.capabilities.rewind:
                self._decode_all(record.live, start, tokens)
                return record.change((), commit)
            record.copy_state()
            self._decode_all(record.live, start, tokens)
            return record.change((), commit, self._engine.cells.clearing(ASIDE))

    def refill(self) -> None:
        """Evaluate the visible tokens of a ledger that was filled without K and V, from position 0 on. On an error
        some of them are in cells; the caller abandons the record."""
        tokens, began = self._ledger.visible_tokens, time.perf_counter()
        self._num_read, self._num_wanted = 0, len(tokens)
        self._decode_all(self._record.live, 0, tokens)
        self._record.tally.read(len(tokens), time.perf_counter() - began)

    def read_one(self, token: int) -> int:
        """Read one sampled token; returns its index. Raises ContextFull."""
        ledger, record = self._ledger, self._record
        self.check_room(1)
        cursor = ledger.cursor
        self._engine.decode_one(record.live, cursor, token, record.next, record)
        return self.was_read(token, cursor, 0)

    def was_read(self, token: int, pos: int, row: int) -> int:
        """One token was decoded at ``pos``, its logits are at batch index ``row``; returns its index."""
        self._record.next.in_buffer(row, self._ledger.view)
        self._record.tally.generated += 1
        return self._ledger.append_one(token, pos)

    def check_room(self, num_cells: int) -> None:
        self._ledger.check_room(num_cells, self._engine.cells_free)

    @contextlib.contextmanager
    def _reading(self, num_tokens: int) -> Iterator[NextLogits]:
        """While tokens are read the next logits are new ones; yields those from before."""
        record = self._record
        record.next.keep_logits()
        before = record.next
        self._num_read, self._num_wanted = 0, num_tokens
        self._engine.evaluate_for(record)
        try:
            self._engine.reading, record.next = True, NextLogits(self._engine)
            yield before
        finally:
            self._engine.reading = False
            self._engine.evaluate_for(None)

    def _decode_all(self, seq: int, start: int, tokens: TokenArray) -> None:
        """Decode tokens from position ``start`` on, batch by batch, counting them; the last gives the next logits."""
        done = 0
        while done < len(tokens):
            part = tokens[done : done + self._engine.n_batch]
            with uninterrupted():
                self._decode(seq, start + done, part, last=done + len(part) == len(tokens))
                done += len(part)
                self._num_read += len(part)
            raise_if_interrupted()
            self._engine.check_stopped()
            if self.progress is not None:
                self.progress(self._num_read, self._num_wanted)

    def _decode(self, seq: int, pos: int, tokens: TokenArray, *, last: bool = True) -> None:
        """Read tokens at ``pos``; behind the last of them are the next logits, under the view there is now."""
        record = self._record
        chunk = Chunk(seq, pos, tokens, "last" if last else "none")
        row = self._engine.decode([chunk], [record.next] if last else ())[0]
        if last:
            record.next.in_buffer(row, self._ledger.view)

    # -- into the middle ----------------------------------------------------------------------------------------

    def arrive(self, arrival: Arrival, register: Callable[[], R]) -> R:
        """Read tokens aside, seeing what they are to see, and bring them to their place; the rest of the plan too."""
        if not self._ledger.has_cells:
            return self._arrive_by_restart(arrival, register)
        self.check_room(arrival.num_cells)
        record, began = self._record, time.perf_counter()
        with self._reading(len(arrival.tokens)) as before:
            self._bring_seen(arrival)
            self._decode_all(ASIDE, arrival.pos, arrival.tokens)
            steps = (*self._leave_seen(arrival), *arrival.plan.steps)
            return record.change(steps, lambda: self._arrived(arrival, before, time.perf_counter() - began, register))

    def _bring_seen(self, arrival: Arrival) -> None:
        """What the tokens are to see goes aside, too; copies of it where it has to be closed up."""
        self._engine.share(arrival.seen, ASIDE)
        for shift in arrival.close_up:
            self._engine.apply([Own(ASIDE, shift.p0, shift.p1), shift])

    @staticmethod
    def _leave_seen(arrival: Arrival) -> Iterator[Drop]:
        moved = {(s.p0, s.p1): s.delta for s in arrival.close_up}
        for _, p0, p1 in arrival.seen:
            delta = moved.get((p0, p1))
            kept = p1 - p0 if delta is None else 0
            yield Drop(ASIDE, p0 + (delta or 0), p1 + (delta or 0), kept)

    def _arrived(self, arrival: Arrival, before: NextLogits, seconds: float, register: Callable[[], R]) -> R:
        record, new = self._record, self._record.next
        record.next = before
        record.commit_arrival(arrival)
        record.tally.read(len(arrival.tokens), seconds)
        if self._ledger.last_visible == arrival.stop - 1:  # nothing visible stands behind them
            new.view = arrival.hidden if arrival.alone else self._ledger.view
            record.next = new
        return register()

    def _arrive_by_restart(self, arrival: Arrival, register: Callable[[], R]) -> R:
        ids = self._ledger.ids
        if arrival.opened:
            ids = np.concatenate([ids[: arrival.row], arrival.tokens, ids[arrival.row :]])
        visible = arrival.plan.after.visible
        return self.restart(ids[visible], lambda: self._record.commit_arrival(arrival), register)

    # -- once more ----------------------------------------------------------------------------------------------

    def recompute(self, again: Recompute, commit: Callable[[], R]) -> R:
        """The old cells wait aside until every token is read; on any error they come back."""
        self.check_room(again.num_tokens)
        record, began = self._record, time.perf_counter()

        def done() -> R:
            read = commit()
            record.original = None
            self._name_next(read_last=not again.parts[-1].keep)
            record.tally.read(again.num_tokens, time.perf_counter() - began)
            return read

        with self._reading(again.num_tokens):
            record.move_aside(again.away, [m for part in again.parts for m in part.back] + [*again.leaving])
            for number, part in enumerate(again.parts):
                if part.keep:
                    left = [m for other in again.parts[:number] if not other.keep for m in other.back]
                    left += [m for other in again.parts[number + 1 :] for m in other.back]
                    record.move_aside(part.back, [*left, *again.leaving])
                else:
                    self._decode_all(record.live, part.pos, part.tokens)
            return record.change(again.plan.steps, done)

    def _name_next(self, *, read_last: bool) -> None:
        """After a commit: the logits of the last decode are the next ones, under the view there is now, where it read
        the last visible token."""
        if not read_last:
            self._record.next.clear()
        elif self._record.next.known:
            self._record.next.view = self._ledger.view

    def restart(self, tokens: TokenArray, commit: Callable[[], None], done: Callable[[], R]) -> R:
        """Where tokens have no cells: read ``tokens`` from the start, and be that from then on.

        They are read aside; where there is no room for that beside the old ones, in their place, and should that fail
        the old ones are read again.
        """
        record, own = self._record, self._ledger.num_own_cells
        aside = len(tokens) <= self._engine.cells_free
        self.check_room(len(tokens) - (0 if aside else own))
        began = time.perf_counter()

        def finished() -> R:
            record.tally.read(len(tokens), time.perf_counter() - began)
            commit()
            self._ledger.history.recomputed(runs(self._ledger.columns.visible), self._ledger.view)
            self._name_next(read_last=True)
            return done()

        with self._reading(len(tokens)):
            if aside:
                self._decode_all(ASIDE, 0, tokens)
                result = finished()
                self._engine.become(ASIDE, record.live, own, recovery.stands(self._engine))
                return result
            if self._engine.unit is not None:
                self._engine.unit.overwritten = True
            self._engine.clear(record.live, own)
            self._decode_all(record.live, 0, tokens)
            return record.change((), finished)

    # -- and drop again -----------------------------------------------------------------------------------------

    def teacher_force(self, tokens: TokenArray) -> Generator[tuple[int, npt.NDArray[np.float32]], None, None]:
        """(index, float32 rows) that predict tokens[index:], read in batches and dropped at the end.

        A recurrent state cannot be rewound: there a copy of it reads them, aside.
        """
        if not len(tokens):
            return
        self.freshen()
        self.check_room(len(tokens) - 1)
        record, copied = self._record, not self._engine.model.capabilities.rewind
        record.next.keep_logits()
        yield 0, record.next.array()[None, :]
        seq, start, done = ASIDE if copied else record.live, self._ledger.cursor, 0
        most = min(self._engine.max_outputs, self._engine.n_batch)
        self._engine.evaluate_for(record)
        try:
            if copied:
                self._engine.replace(record.live, ASIDE)
            while done < len(tokens) - 1:
                part = tokens[done : min(done + most, len(tokens) - 1)]
                with uninterrupted():
                    self._engine.decode([Chunk(seq, start + done, part, "all")])
                    done += len(part)
                self._engine.check_stopped()
                yield done - len(part) + 1, self._engine.logit_rows(range(len(part)))
        finally:
            self._engine.evaluate_for(None)
            if copied:
                self._engine.clear(ASIDE, done)
            elif done:
                self._engine.drop(seq, start, start + done)

    # -- the next token -----------------------------------------------------------------------------------------

    def logits(self) -> npt.NDArray[np.float32]:
        """float32 (n_vocab,): a copy of the next token's logits for what is visible now."""
        self.freshen()
        return self._record.next.array()

    def sample(self, sampler: Sampler) -> int:
        """Draw the next token for what is visible now."""
        self.freshen()
        return self._record.next.sample(sampler)

    def accept_stale_logits(self) -> None:
        """Sample the next token from the logits as they are, although an edit came after them."""
        if self._record.next.known:
            self._record.next.view = self._ledger.view

    def freshen(self) -> None:
        """Read the last visible token again if its logits were computed while something else was visible."""
        last = self._ledger.last_visible
        if last is None:
            raise NoLogits("there is no distribution yet: append something first")
        if not self._record.needs_reread:
            return
        if not self._ledger.has_cells:
            return self.restart(self._ledger.visible_tokens, lambda: None, lambda: None)
        changed = self._ledger.history.view_of(last) != clip(self._ledger.view, last)
        self._reread(self._plan_reread(keep=changed), changed)
        self._record.tally.read_again()

    def _plan_reread(self, *, keep: bool) -> Reread:
        """Keep the first reading where a cell and an archive have room. Raises ContextFull where not even the token's
        own cell is to be had, as a fork holds it."""
        if keep:
            with contextlib.suppress(ContextFull, MaskUnsupported):
                reread = self._record.plan.reread(keep_original=True)
                self.check_room(reread.num_cells)
                return reread
        reread = self._record.plan.reread(keep_original=False)
        self.check_room(reread.num_cells)
        return reread

    def _reread(self, reread: Reread, changed: bool) -> None:
        record = self._record
        if reread.undo and record.next.known and record.next.view is not None:
            record.original = (reread.row, record.next.view, record.next.array())

        def commit() -> None:
            self._ledger.commit(reread.plan)
            if changed:
                self._ledger.history.computed_again(reread.row, self._ledger.view, self._ledger.first_gap)

        with uninterrupted():
            record.move_aside(reread.plan.steps, reread.undo)
            self._engine.evaluate_for(record)
            self._decode(record.live, reread.pos, self._ledger.ids[reread.row : reread.row + 1])
            record.change((), commit)
