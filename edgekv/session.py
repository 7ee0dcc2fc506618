"""Session: a conversation on the KV cache whose spans can be hidden, shown, evicted and rewound at once.

Every edit is planned by the ledger, carried out by the engine and committed in one place (:meth:`Session._edit`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, Union

import numpy as np
import numpy.typing as npt

from . import catalog, render
from ._llama import uninterrupted
from .columns import State
from .engine import SCRATCH, Chunk, Engine, Settings
from .errors import (
    AuditFailed,
    BadState,
    ClosedError,
    MaskUnsupported,
    NoLogits,
    SessionBroken,
    UsageError,
)
from .generation import Generation, Request
from .history import View, clip
from .ledger import Ledger
from .model import Model, TokenArray
from .next_logits import NextLogits
from .plans import Plan
from .receipts import Audit, Receipt, Stats, Timings
from .sampling import GREEDY, Sampler, Sampling
from .spans import Range, Span, SpanTable, Target, runs

P = ParamSpec("P")
R = TypeVar("R")
Source = Union[str, "os.PathLike[str]", Model, Engine]
Progress = Callable[[int, int], None]


def _verb(method: Callable[Concatenate[Session, P], R]) -> Callable[Concatenate[Session, P], R]:
    """A public verb: one at a time, on an open and sound session, after the generation before it has ended."""

    @functools.wraps(method)
    def call(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            self._be_ready()
            return method(self, *args, **kwargs)

    return call


class Session:
    """One transcript over llama.cpp's sequences.

    ``source``: a manifest name, a path to a GGUF file, a :class:`Model`, or an :class:`Engine` to share. What the
    session opened itself it closes itself. ``settings`` with ``n_ctx``, ``kv_type`` and ``n_threads`` as shortcuts
    say how the context is opened (not with an Engine, which is open already).

    Raises ModelError, TooLarge and UsageError as Model and Engine do.
    """

    def __init__(
        self,
        source: Source = catalog.DEFAULT,
        *,
        n_ctx: int | None = None,
        kv_type: str | None = None,
        n_threads: int | None = None,
        settings: Settings = Settings(),
    ) -> None:
        changes = {k: v for k, v in {"n_ctx": n_ctx, "kv_type": kv_type, "n_threads": n_threads}.items() if v is not None}
        self._closing = contextlib.ExitStack()
        try:
            self.engine: Final = self._open(source, settings, changes)
            sequences = self.engine.take_sequences()
        except BaseException:
            self._closing.close()
            raise
        self.model: Final = self.engine.model
        self.progress: Progress | None = None
        self._live, archives = sequences[0], sequences[1:]
        self._ledger = Ledger(self._live, archives, can_shift=self.engine.can_shift)
        self._spans = SpanTable()
        self._next = NextLogits(self.engine)
        self._original: tuple[int, View, npt.NDArray[np.float32]] | None = None
        self._generation: Generation | None = None
        self._broken = ""
        self._counts = {"prefilled": 0, "generated": 0, "reread": 0, "reused": 0}
        self._since = _Since()
        self._closing.callback(self._release, sequences)

    def _open(self, source: Source, settings: Settings, changes: dict[str, Any]) -> Engine:
        if isinstance(source, Engine):
            if changes:
                raise UsageError(f"{', '.join(changes)} cannot change on an engine that is open")
            return source
        model = source if isinstance(source, Model) else self._closing.enter_context(Model(source))
        return self._closing.enter_context(Engine(model, _with(settings, changes)))

    # -- life ---------------------------------------------------------------------------------------------------

    @property
    def lock(self) -> Any:
        """The engine's lock; every verb holds it."""
        return self.engine.lock

    def close(self) -> None:
        """Free this session's cells, and the engine and model if it opened them. Closing twice is fine."""
        with self.lock:
            self._closing.close()

    def _release(self, sequences: Sequence[int]) -> None:
        self._generation = None
        self.engine.give_back(sequences, self._ledger.num_cells)
        self._broken = "closed"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _be_ready(self) -> None:
        if self._broken == "closed" or self.engine.closed:
            raise ClosedError("the session was closed; open a new one")
        if self._broken:
            raise SessionBroken(self._broken)
        generation = self._generation
        if generation is None or generation.finished:
            return
        if generation.started:
            generation.close()
        else:
            generation.finish()

    def __repr__(self) -> str:
        return f"<Session {self.model.path.name}: {self._ledger.count(State.VISIBLE)} visible tokens>"

    def __str__(self) -> str:
        """The spans and their states, a line each."""
        return render.session_table(self)

    # -- reading ------------------------------------------------------------------------------------------------

    @_verb
    def append(
        self,
        text: str | Iterable[int] | TokenArray,
        *,
        name: str | None = None,
        role: str = "",
        tags: Iterable[str] = (),
        special: bool = False,
    ) -> Span:
        """Read text (or token ids) behind what is there; returns its span.

        The first text of a session gets the model's BOS in front, as a span of its own. ``special`` reads control
        tokens such as ``<|im_start|>`` as such; by default they are plain text. An empty text reads nothing and
        gives an empty span. ``progress(done, total)`` of the session is called after every batch.

        Cost: every token is read once. Raises ContextFull (nothing read), UsageError (name taken, bad token).
        """
        if name is not None:
            self._spans.check_name(name)
        tokens = self.model.tokenize(text, special=special) if isinstance(text, str) else self.model.check_tokens(text)
        bos = self.model.bos if isinstance(text, str) and len(tokens) and not len(self._ledger) else None
        given = tokens if bos is None else np.concatenate([np.asarray([bos], np.int32), tokens])
        name = name or self._spans.free_name(role or "text")

        def register(read: Range) -> Span:
            if bos is not None:
                self._spans.add(Span(_BOS_NAME, read[0], read[0] + 1, "control"))
            return self._spans.add(Span(name, read[1] - len(tokens), read[1], role, frozenset(tags)))

        if not len(given):
            return register((len(self._ledger), len(self._ledger)))
        started = time.perf_counter()
        span = self._read(given, register)
        self._counts["prefilled"] += len(given)
        self._since.read(len(given), time.perf_counter() - started)
        return span

    def _read(self, tokens: TokenArray, register: Callable[[Range], R]) -> R:
        """Decode tokens at the cursor, batch by batch, and record them; all of them or, on any error, none."""
        self._ledger.check_room(len(tokens), self.engine.cells_free)
        start, done = self._ledger.cursor, 0
        self._next.clear()
        try:
            while done < len(tokens):
                part = tokens[done : done + self.engine.n_batch]
                last = done + len(part) == len(tokens)
                with uninterrupted():
                    chunk = Chunk(self._live, start + done, part, "last" if last else "none")
                    row = self.engine.decode([chunk], self._next if last else None)[0]
                    done += len(part)
                if self.progress is not None:
                    self.progress(done, len(tokens))
            with uninterrupted():
                read = self._ledger.append(tokens, start)
                self._next.in_buffer(row, self._ledger.view)
                return register(read)
        except BaseException:
            unrecorded = start + done - self._ledger.cursor
            if unrecorded > 0:
                with uninterrupted():
                    self._next.clear()
                    self.engine.drop(self._live, start, start + unrecorded)
            raise

    @_verb
    def score(self, text: str | Iterable[int] | TokenArray) -> npt.NDArray[np.float64]:
        """float64 (n_tokens,): the log-probability of every token of ``text`` if it came next; nothing is kept.

        Cost: the tokens are read and dropped again. Raises ContextFull, NoLogits (nothing in front of it).
        """
        tokens = self.model.tokenize(text) if isinstance(text, str) else self.model.check_tokens(text)
        parts = [
            _log_softmax_at(rows, tokens[at : at + len(rows)]) for at, rows in self._teacher_force(tokens)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.float64)

    @_verb
    def logits_over(self, text: str | Iterable[int] | TokenArray) -> npt.NDArray[np.float32]:
        """float32 (n_tokens, n_vocab): row i is the distribution that predicts token i of ``text``; nothing is kept.

        Cost: as :meth:`score`, and 4 * n_tokens * n_vocab bytes.
        """
        tokens = self.model.tokenize(text) if isinstance(text, str) else self.model.check_tokens(text)
        out = np.empty((len(tokens), self.model.n_vocab), np.float32)
        for at, rows in self._teacher_force(tokens):
            out[at : at + len(rows)] = rows
        return out

    def _teacher_force(self, tokens: TokenArray) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """(index, rows) that predict tokens[index:], read in batches and dropped at the end."""
        if not len(tokens):
            return
        self._freshen()
        self._ledger.check_room(len(tokens) - 1, self.engine.cells_free)
        self._next.keep_logits()
        yield 0, self._next.array()[None, :]
        start, done = self._ledger.cursor, 0
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

    @_verb
    def logits(self) -> npt.NDArray[np.float32]:
        """float32 (n_vocab,): the next token's logits, for what is visible now.

        Cost: nothing, or one token read again after an edit. Raises NoLogits on an empty session.
        """
        self._freshen()
        return self._next.array()

    def _freshen(self) -> None:
        """Read the last visible token again if its logits were computed while something else was visible."""
        view = self._ledger.view
        if self._next.fresh(view):
            return
        last = self._ledger.last_visible
        if last is None:
            raise NoLogits("there is no distribution yet: append something first")
        changed = self._ledger.history.view_of(last) != clip(view, last)
        self._reread(keep=changed and self.engine.cells_free > 0)
        self._counts["reread"] += 1
        self._since.reread += 1

    def _reread(self, *, keep: bool) -> None:
        try:
            reread = self._ledger.plan_reread(keep_original=keep)
        except MaskUnsupported:  # no archive has room: the first reading cannot be kept
            reread = self._ledger.plan_reread(keep_original=False)
        if reread.undo and self._next.known:
            assert self._next.view is not None
            self._original = (reread.index, self._next.view, self._next.array())
        token = self._ledger.tokens[reread.index : reread.index + 1]
        with uninterrupted():
            self._apply(reread.plan)
            try:
                row = self.engine.decode([Chunk(self._live, reread.pos, token)], self._next)[0]
            except BaseException:
                self._undo_reread(reread.undo, reread.index)
                raise
            changed = self._ledger.history.view_of(reread.index) != clip(self._ledger.view, reread.index)
            self._ledger.commit(reread.plan)
            if changed:
                self._ledger.history.computed_again(reread.index, self._ledger.view)
            self._next.in_buffer(row, self._ledger.view)

    def _undo_reread(self, undo: Sequence[Any], index: int) -> None:
        if undo:
            self.engine.apply(undo)
        else:
            self._broken = f"token {index} could not be read again and its cell is gone; start a new session"

    # -- generating ---------------------------------------------------------------------------------------------

    @_verb
    def generate(
        self,
        max_tokens: int = 256,
        *,
        sampling: Sampling = GREEDY,
        stop: str | Iterable[str] = (),
        name: str | None = None,
        role: str = "assistant",
    ) -> Generation:
        """Continue the transcript; the result streams and becomes a span. See :class:`Generation`.

        Cost: one token read for every token kept, one more after an edit. While it runs it may raise ContextFull
        (what was generated stays), NoLogits (empty session), GrammarStuck; GrammarError at its start.
        """
        if name is not None:
            self._spans.check_name(name)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._generation = Generation(self, Request(max_tokens, sampling, stops, name, role))
        return self._generation

    def begin_generation(self, generation: Generation) -> Sampler:
        """For Generation: its sampler, with penalties that count what is visible now."""
        generation.start_index = len(self._ledger)
        self._since.begin(self._ledger.count(State.VISIBLE), self._ledger.count(State.MASKED))
        return Sampler(self.model, generation.request.sampling, self._ledger.visible_tokens)

    def is_current(self, generation: Generation) -> bool:
        return generation is self._generation and not self._broken and not self.engine.closed

    def sample_token(self, sampler: Sampler) -> int:
        if not len(self._ledger) and self.model.bos is not None:
            self._read(np.asarray([self.model.bos], np.int32), self._register_bos)
        self._freshen()
        return self._next.sample(sampler)

    def _register_bos(self, read: Range) -> Span:
        if self._generation is not None:
            self._generation.start_index = read[1]
        return self._spans.add(Span(_BOS_NAME, *read, "control"))

    def read_token(self, token: int) -> int:
        """For Generation: read one sampled token into the cache; returns its index."""
        if self.engine.cells_free < 1:
            self._ledger.check_room(1, 0)
        cursor = self._ledger.cursor
        with uninterrupted():
            chunk = Chunk(self._live, cursor, np.asarray([token], np.int32))
            row = self.engine.decode([chunk], self._next)[0]
            index, _ = self._ledger.append(chunk.tokens, cursor)
            self._next.in_buffer(row, self._ledger.view)
        self._counts["generated"] += 1
        return index

    def shorten(self, index: int, text: str) -> list[int]:
        """For Generation: rewind to ``index``, then read ``text`` (the part of a token before a stop string)."""
        if index < len(self._ledger):
            self._commit("rewind", self._ledger.plan_rewind(index))
        if not text:
            return []
        tokens = self.model.tokenize(text)
        self._read(tokens, lambda read: read)
        return [int(t) for t in tokens]

    def end_generation(self, generation: Generation) -> Span:
        """For Generation: register what was generated as a span."""
        name = generation.request.name or self._spans.free_name(generation.request.role or "text")
        start = min(generation.start_index, len(self._ledger))
        span = self._spans.add(Span(name, start, len(self._ledger), generation.request.role))
        self._since.end()
        return span

    def timings(self, generation: Generation) -> Timings:
        return self._since.timings(generation)

    # -- editing ------------------------------------------------------------------------------------------------

    @_verb
    def mask(self, target: Target, *, gap: str = "close", force: bool = False, refresh_last: bool = True) -> Receipt:
        """Hide tokens: nothing read from now on attends to them; their cells stay, and unmask is instant.

        gap: "close" moves the visible tokens in front of the target up to those behind it, "keep" leaves the
        positions empty (unmask is then bit-exact). Masking the tail moves the cursor back, which equals a restart.
        force: mask attention sinks too. refresh_last=False samples the next token from the logits as they are,
        computed while the target was visible, for models trained that way; by default the last visible token is
        read again first.

        Masked is not forgotten: visible tokens computed while the target was visible carry what they took from it;
        the receipt counts them. No cell and no RAM is freed.

        Cost: no token read; native metadata, and one rotation of K at the next decode when a gap was closed.
        Raises MaskUnsupported, BadState, PinnedTokens, UnknownSpan; then nothing has changed.
        """
        self._need_mask()
        ranges = self._spans.resolve(target)
        gap, notes = self._gap(gap)
        plan = self._ledger.plan_mask(ranges, gap, force=force)
        receipt = self._edit("mask", plan, notes)
        if not refresh_last and self._next.known:
            self._next.view = self._ledger.view
        return receipt

    @_verb
    def unmask(self, target: Target) -> Receipt:
        """Show masked tokens again where they belong, without reading them. Bit-exact where no position moved.

        Cost: as :meth:`mask`. Raises BadState (nothing masked there), UnknownSpan, MaskUnsupported.
        """
        self._need_mask()
        return self._edit("unmask", self._ledger.plan_unmask(self._spans.resolve(target)), ())

    @_verb
    def evict(self, target: Target, *, gap: str = "close", force: bool = False) -> Receipt:
        """Mask for good: the cells are freed, the text stays known, and coming back means reading it again.

        Takes visible and masked tokens. Cost and errors as :meth:`mask`.
        """
        self._need_mask()
        ranges = self._spans.resolve(target)
        gap, notes = self._gap(gap)
        return self._edit("evict", self._ledger.plan_evict(ranges, gap, force=force), notes)

    @_verb
    def rewind(self, target: int | Target) -> Receipt:
        """Drop everything from an index, or from the start of a span, on; hidden tokens there too. Exact.

        Cost: no token read; one is read again before the next is sampled. Raises UsageError, UnknownSpan,
        MaskUnsupported.
        """
        if not self.model.capabilities.rewind:
            raise MaskUnsupported(self.model.capabilities.rewind.reason)
        index = int(target) if isinstance(target, (int, np.integer)) else self._first_index(target)
        plan = self._ledger.plan_rewind(index)
        return self._edit("rewind", plan, ())

    def _first_index(self, target: Target) -> int:
        ranges = self._spans.resolve(target)
        if not ranges:
            raise UsageError("the target holds no token")
        return min(start for start, _ in ranges)

    @contextlib.contextmanager
    def masked(self, target: Target, *, gap: str = "close", force: bool = False) -> Iterator[Receipt]:
        """Mask inside the block, unmask what this hid (and is still masked) after it."""
        receipt = self.mask(target, gap=gap, force=force)
        try:
            yield receipt
        finally:
            hidden = self._still_masked(receipt.ranges)
            if hidden:
                self.unmask(hidden)

    def _still_masked(self, ranges: Sequence[Range]) -> list[Range]:
        flags = np.zeros(len(self._ledger), np.bool_)
        for start, stop in ranges:
            flags[start:stop] = True
        return runs(flags & (self._ledger.columns.state == State.MASKED))

    def _need_mask(self) -> None:
        if not self.model.capabilities.mask:
            raise MaskUnsupported(f"{self.model.capabilities.mask.reason}; start again without the text instead")

    def _gap(self, gap: str) -> tuple[str, tuple[str, ...]]:
        """The gap that is possible here, and what to tell the user about it."""
        if gap not in ("close", "keep"):
            raise UsageError(f"gap is 'close' or 'keep', not {gap!r}")
        if gap == "close" and not self.engine.can_shift:
            return "keep", (f"gap kept: {self.model.capabilities.close_gaps.reason}",)
        return gap, ()

    def _edit(self, verb: str, plan: Plan, notes: tuple[str, ...]) -> Receipt:
        """Carry a plan out and say what it did."""
        started = time.perf_counter()
        reused = self._reused_by(plan)
        self._commit(verb, plan)
        ms = (time.perf_counter() - started) * 1e3
        self._counts["reused"] += reused
        if plan.num_moved and self.engine.settings.kv_type.startswith("q"):
            notes += (f"K of moved tokens is quantised again ({self.engine.settings.kv_type})",)
        influenced = self._ledger.influenced_by(plan.edited) if verb in ("mask", "evict") else []
        return Receipt(
            verb,
            plan.edited,
            plan.num_edited,
            ms,
            gap=plan.gap if verb in ("mask", "evict") else "",
            moved=plan.num_moved,
            freed=plan.num_freed,
            influenced=sum(stop - start for start, stop in influenced),
            reread=int(not self._next.fresh(self._ledger.view) and self._ledger.last_visible is not None),
            reused=reused,
            masked=self._ledger.count(State.MASKED),
            notes=notes,
        )

    def _reused_by(self, plan: Plan) -> int:
        """Visible tokens behind the first edited one, all of which a restart would read again."""
        if not plan.edited:
            return 0
        first = plan.edited[0][0]
        return int(np.count_nonzero((self._ledger.columns.visible & plan.after.visible)[first:]))

    def _commit(self, verb: str, plan: Plan) -> None:
        with uninterrupted():
            self._apply(plan)
            self._ledger.commit(plan)
            if verb == "rewind" and plan.edited:
                self._spans.truncate(plan.edited[0][0])
                self._ledger.history.truncate(plan.edited[0][0])
                self._next.clear()
            self._restore_logits()

    def _apply(self, plan: Plan) -> None:
        """The native half of an edit. Its steps were checked by the ledger; one that fails breaks the session."""
        try:
            self.engine.apply(plan.steps)
        except BaseException as err:
            self._broken = f"an edit failed half way ({err}); open a new session and append what you need"
            raise SessionBroken(self._broken) from err

    def _restore_logits(self) -> None:
        """The first reading of the last token is visible again: its logits are, too."""
        if self._original is None:
            return
        index, view, logits = self._original
        if index != self._ledger.last_visible:
            if index >= len(self._ledger) or self._ledger.columns.state[index] == State.DROPPED:
                self._original = None
        elif view == self._ledger.view and not self._ledger.has_original(index):
            self._next.in_copy(logits, view)
            self._original = None

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans, in order of their first token."""
        return self._spans.ordered()

    @property
    def tokens(self) -> TokenArray:
        """int32 (n,): every token of the transcript in index order, hidden ones too."""
        return self._ledger.tokens.copy()

    def span(self, name: str) -> Span:
        """The span of that name; raises UnknownSpan."""
        for span in self._spans.ordered():
            if span.name == name:
                return span
        self._spans.resolve(name)
        raise BadState(f"{name!r} selects several spans")

    @_verb
    def text(self, target: Target) -> str:
        """The text of a target, hidden tokens too, control tokens spelled out."""
        chosen = self._ledger.select(self._spans.resolve(target))
        return self.model.detokenize(self._ledger.tokens[chosen])

    @property
    def stats(self) -> Stats:
        """Tokens by state, tokens read and reused, cells and bytes of cache in use."""
        with self.lock:
            ledger, engine = self._ledger, self.engine
            return Stats(
                visible=ledger.count(State.VISIBLE),
                masked=ledger.count(State.MASKED),
                parked=ledger.count(State.PARKED),
                evicted=ledger.count(State.EVICTED),
                cells_used=ledger.num_cells,
                cells=engine.num_cells,
                kv_bytes_used=ledger.num_cells * self.model.kv_bytes_per_token(engine.settings.kv_type),
                cursor=ledger.cursor,
                **self._counts,
            )

    def states(self, span: Span) -> dict[State, int]:
        """How many of a span's tokens are in which state."""
        with self.lock:
            found, numbers = np.unique(self._ledger.columns.state[span.start : span.stop], return_counts=True)
        return {State(s): int(n) for s, n in zip(found, numbers, strict=True)}

    @_verb
    def influenced_by(self, target: Target) -> list[Range]:
        """The ranges of visible tokens computed while the target was visible, directly or through others."""
        return self._ledger.influenced_by(self._spans.resolve(target))

    @_verb
    def audit(self) -> Audit:
        """Read what llama.cpp really holds and compare it with the ledger, position by position.

        Cost: copies the session's K and V once. Raises AuditFailed with the first difference.
        """
        expected = self._ledger.expected_positions()
        for seq, wanted in {**expected, SCRATCH: np.empty(0, np.int32)}.items():
            held = self.engine.positions(seq)
            if not np.array_equal(held[0], wanted):
                raise AuditFailed(_difference(seq, held[0], wanted))
            if any(not np.isin(window, wanted).all() for window in held[1:]):
                raise AuditFailed(f"sequence {seq}: the sliding-window cache holds positions the ledger does not know")
        if self.engine.cells_used < self._ledger.num_cells:
            raise AuditFailed(f"{self.engine.cells_used} cells counted, the ledger holds {self._ledger.num_cells}")
        return Audit(len(expected), sum(len(p) for p in expected.values()))


_BOS_NAME: Final = "<bos>"


class _Since:
    """What happened since the last generation ended, for its timings."""

    def __init__(self) -> None:
        self.prefilled = self.reread = self.visible = self.masked = 0
        self.prefill_s = 0.0
        self._of_last = (0, 0, 0, 0, 0.0)

    def read(self, num_tokens: int, seconds: float) -> None:
        self.prefilled += num_tokens
        self.prefill_s += seconds

    def begin(self, visible: int, masked: int) -> None:
        self.visible, self.masked = visible, masked

    def end(self) -> None:
        self._of_last = (self.prefilled, max(0, self.visible - self.prefilled), self.masked, self.reread, self.prefill_s)
        self.prefilled = self.reread = 0
        self.prefill_s = 0.0

    def timings(self, generation: Generation) -> Timings:
        prefilled, reused, masked, reread, prefill_s = self._of_last
        first = generation.first_token_at or generation.ended_at
        return Timings(
            prefilled=prefilled,
            reused=reused,
            masked=masked,
            reread=reread,
            generated=len(generation.tokens),
            prefill_ms=prefill_s * 1e3,
            ttft_ms=(prefill_s + first - generation.started_at) * 1e3,
            decode_ms=(generation.ended_at - first) * 1e3,
        )


def _with(settings: Settings, changes: dict[str, Any]) -> Settings:
    import dataclasses

    return dataclasses.replace(settings, **changes)


def _log_softmax_at(logits: npt.NDArray[np.float32], tokens: TokenArray) -> npt.NDArray[np.float64]:
    """float64 (n,): log-probability of tokens[i] under row i."""
    top = logits.max(axis=1, keepdims=True)
    total = np.exp(logits - top, dtype=np.float64).sum(axis=1)
    chosen = logits[np.arange(len(tokens)), tokens].astype(np.float64)
    return np.asarray(chosen - top[:, 0] - np.log(total))


def _difference(seq: int, held: npt.NDArray[np.int32], wanted: npt.NDArray[np.int32]) -> str:
    extra, missing = np.setdiff1d(held, wanted), np.setdiff1d(wanted, held)
    return (
        f"sequence {seq}: llama.cpp holds {len(held)} cells, the ledger {len(wanted)}; "
        f"only in llama.cpp: {extra[:8].tolist()}, only in the ledger: {missing[:8].tolist()}"
    )
