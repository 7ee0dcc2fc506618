"""Session: a conversation on the KV cache whose spans can be hidden, shown, evicted and rewound at once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from . import catalog, numerics, render
from .columns import State
from .engine import Engine
from .errors import BadState, ClosedError, MaskUnsupported, SessionBroken, UnknownSpan, UsageError
from .generation import Generation, Request
from .host import BOS_NAME, Host
from .model import Model, TokenArray
from .receipts import Audit, Receipt, Stats
from .sampling import GREEDY, Sampling
from .settings import Settings
from .spans import Range, Span, Target, runs
from .transcript import Progress, Transcript

P = ParamSpec("P")
R = TypeVar("R")


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
    say how the context is opened (not with an Engine, which is open already). ``progress``, an attribute, is called
    with (tokens read, tokens to read) after every batch of an append.

    Raises ModelError, TooLarge and UsageError as Model and Engine do.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Model | Engine = catalog.DEFAULT,
        *,
        n_ctx: int | None = None,
        kv_type: str | None = None,
        n_threads: int | None = None,
        settings: Settings = Settings(),
    ) -> None:
        given = {"n_ctx": n_ctx, "kv_type": kv_type, "n_threads": n_threads}
        changes = {name: value for name, value in given.items() if value is not None}
        self._closing = contextlib.ExitStack()
        self._closed = False
        try:
            self.engine: Final = self._open(source, settings, changes)
            self._transcript = Transcript(self.engine)
        except BaseException:
            self._closing.close()
            raise
        self._ledger = self._transcript.ledger
        self._spans = self._transcript.spans
        self._generation: Generation | None = None
        self._closing.callback(self._transcript.release)

    def _open(self, source: Any, settings: Settings, changes: dict[str, Any]) -> Engine:
        if isinstance(source, Engine):
            if changes or settings != Settings():
                raise UsageError("an engine that is open keeps its settings; give them to Engine(...)")
            return source
        model = source if isinstance(source, Model) else self._closing.enter_context(Model(source))
        return self._closing.enter_context(Engine(model, dataclasses.replace(settings, **changes)))

    # -- life ---------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        return self.engine.model

    @property
    def lock(self) -> contextlib.AbstractContextManager[object]:
        """The engine's lock; every verb holds it."""
        return self.engine.lock

    def close(self) -> None:
        """Free this session's cells, and the engine and model if it opened them. Closing twice is fine."""
        with self.lock:
            self._closed = True
            self._closing.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _be_ready(self) -> None:
        self._check_open()
        if self._transcript.broken:
            raise SessionBroken(self._transcript.broken)
        if self._transcript.reading:
            raise BadState("an append of this session is still reading; its progress callback cannot change it")
        generation = self._generation
        if generation is None or generation.finished:
            return
        if generation.started:
            generation.close()
        else:
            generation.finish()

    def _check_open(self) -> None:
        if self._closed or self.engine.closed:
            raise ClosedError("the session was closed; open a new one")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._ledger.count(State.VISIBLE)} visible tokens"
        return f"<Session {self.model.path.name}: {state}>"

    def __str__(self) -> str:
        """The spans and their states, a line each."""
        return repr(self) if self._closed else render.session_table(self)

    @property
    def progress(self) -> Progress | None:
        return self._transcript.progress

    @progress.setter
    def progress(self, callback: Progress | None) -> None:
        self._transcript.progress = callback

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
        gives an empty span.

        Cost: every token is read once. Raises ContextFull, UsageError (name taken, bad token); nothing has changed.
        """
        if name is not None:
            self._check_name(name)
        labels = frozenset((tags,) if isinstance(tags, str) else tags)
        tokens = self._tokens(text, special=special)
        bos = self._bos_for(text) if len(tokens) else np.empty(0, np.int32)
        name = name or self._spans.free_name(role or "text")

        def register(read: Range) -> Span:
            if len(bos):
                self._spans.add(Span(BOS_NAME, read[0], read[0] + 1, "control"))
            return self._spans.add(Span(name, read[1] - len(tokens), read[1], role, labels))

        if not len(tokens):
            return register((len(self._ledger), len(self._ledger)))
        return self._transcript.read(np.concatenate([bos, tokens]), register)

    def _check_name(self, name: str) -> None:
        if name == BOS_NAME:
            raise UsageError(f"{name!r} is the span of the model's own first token; choose another name")
        self._spans.check_name(name)

    def _tokens(self, text: str | Iterable[int] | TokenArray, *, special: bool = False) -> TokenArray:
        return self.model.tokenize(text, special=special) if isinstance(text, str) else self.model.check_tokens(text)

    def _bos_for(self, text: object) -> TokenArray:
        """The BOS token in front of a session's first text; token ids are read as given."""
        first = isinstance(text, str) and self._ledger.blank and self.model.bos is not None
        return np.asarray([self.model.bos] if first else [], np.int32)

    @_verb
    def score(self, text: str | Iterable[int] | TokenArray) -> npt.NDArray[np.float64]:
        """float64 (n_tokens,): the log-probability of every token of ``text`` if it came next; nothing is kept.

        Cost: the tokens are read and dropped again. Raises ContextFull, NoLogits (nothing in front of it),
        MaskUnsupported (a state that cannot be rewound).
        """
        tokens = self._tokens(text)
        with contextlib.closing(self._transcript.teacher_force(tokens)) as forced:  # whatever happens, its end runs
            parts = [numerics.log_probabilities(rows, tokens[at : at + len(rows)]) for at, rows in forced]
        return np.concatenate(parts) if parts else np.empty(0, np.float64)

    @_verb
    def logits_over(self, text: str | Iterable[int] | TokenArray) -> npt.NDArray[np.float32]:
        """float32 (n_tokens, n_vocab): row i is the distribution that predicts token i of ``text``; nothing is kept.

        Cost and errors: as :meth:`score`, and 4 * n_tokens * n_vocab bytes.
        """
        tokens = self._tokens(text)
        out = np.empty((len(tokens), self.model.n_vocab), np.float32)
        with contextlib.closing(self._transcript.teacher_force(tokens)) as forced:
            for at, rows in forced:
                out[at : at + len(rows)] = rows
        return out

    @_verb
    def logits(self) -> npt.NDArray[np.float32]:
        """float32 (n_vocab,): the next token's logits, for what is visible now.

        Cost: nothing, or one token read again after an edit. Raises NoLogits on an empty session.
        """
        return self._transcript.logits()

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
            self._check_name(name)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._generation = Generation(Host(self._transcript), Request(max_tokens, sampling, stops, name, role))
        return self._generation

    # -- editing ------------------------------------------------------------------------------------------------

    @_verb
    def mask(
        self,
        target: Target,
        *,
        gap: str = "close",
        force: bool = False,
        refresh_last: bool = True,
        then: str = "none",
        budget: int = 64,
    ) -> Receipt:
        """Hide tokens: nothing read from now on attends to them; their cells stay, and unmask is instant.

        gap: "close" moves the visible tokens in front of the target up to those behind it, "keep" leaves the
        positions empty (unmask is then bit-exact). Masking the tail moves the cursor back, which equals a restart.
        force: mask attention sinks too. refresh_last=False samples the next token from the logits as they are,
        computed while the target was visible, for models trained that way; by default the last visible token is
        read again first.

        then: "recompute" makes it exact by :meth:`recompute`, "auto" does where at most ``budget`` visible tokens are
        influenced: the loss is large where few tokens stand behind the span, and there reading them again is cheap.
        Should the reading fail (ContextFull), the mask stands.

        Masked is not forgotten: visible tokens computed while the target was visible carry what they took from it;
        the receipt counts them. No cell and no RAM is freed.

        Cost: no token read; native metadata, and one rotation of K at the next decode when a gap was closed.
        Raises MaskUnsupported, BadState, PinnedTokens, UnknownSpan; then nothing has changed.
        """
        self._need_mask()
        if then not in ("none", "recompute", "auto"):
            raise UsageError(f"then is 'none', 'recompute' or 'auto', not {then!r}")
        ranges = self._spans.resolve(target)
        gap, notes = self._gap(gap)
        receipt = self._transcript.edit("mask", self._ledger.plan_mask(ranges, gap, force=force), notes)
        if then == "recompute" or (then == "auto" and 0 < receipt.influenced <= budget):
            return receipt.then(self._transcript.recompute(None))
        if refresh_last:
            return receipt
        self._transcript.accept_stale_logits()
        return dataclasses.replace(receipt, reread=0)

    @_verb
    def unmask(self, target: Target) -> Receipt:
        """Show masked tokens again where they belong, without reading them. Bit-exact where no position moved.

        Cost: as :meth:`mask`. Raises BadState (nothing masked there), UnknownSpan, MaskUnsupported.
        """
        self._need_mask()
        return self._transcript.edit("unmask", self._ledger.plan_unmask(self._spans.resolve(target)))

    @_verb
    def evict(self, target: Target, *, gap: str = "close", force: bool = False) -> Receipt:
        """Mask for good: the cells are freed, the text stays known, and coming back means reading it again.

        Takes visible and masked tokens. Cost and errors as :meth:`mask`.
        """
        self._need_mask()
        ranges = self._spans.resolve(target)
        gap, notes = self._gap(gap)
        return self._transcript.edit("evict", self._ledger.plan_evict(ranges, gap, force=force), notes)

    @_verb
    def rewind(self, target: int | Target) -> Receipt:
        """Drop everything from an index, or from the start of a span, on; hidden tokens there too. Exact.

        Cost: no token read; one is read again before the next is sampled. Raises UsageError, UnknownSpan,
        MaskUnsupported; then nothing has changed.
        """
        if not self.model.capabilities.rewind:
            raise MaskUnsupported(self.model.capabilities.rewind.reason)
        index = int(target) if isinstance(target, (int, np.integer)) else self._first_index(target)
        return self._transcript.edit("rewind", self._ledger.plan_rewind(index))

    def _first_index(self, target: Target) -> int:
        ranges = self._spans.resolve(target)
        if not ranges:
            raise UsageError("the target holds no token")
        return min(start for start, _ in ranges)

    @_verb
    def recompute(self, start: int | None = None) -> Receipt:
        """Read visible tokens again, so that the session is what it would be had the hidden ones never been read.

        From index ``start`` on, or from the first visible token that was computed while something else was visible
        (none: nothing is read). Kept gaps close. ``progress`` is called as in :meth:`append`.

        Cost: those tokens are read once more, and need as many free cells until that is done. Raises ContextFull,
        MaskUnsupported (a state that cannot be rewound); on any error, and on Ctrl-C, the cells from before are back.
        """
        self._need_mask()
        if start is not None and not 0 <= start <= len(self._ledger):
            raise UsageError(f"cannot read again from {start}: the transcript has {len(self._ledger)} tokens")
        return self._transcript.recompute(start)

    @contextlib.contextmanager
    def masked(self, target: Target, *, gap: str = "close", force: bool = False) -> Iterator[Receipt]:
        """Mask inside the block, and unmask after it what this hid and is still masked."""
        receipt = self.mask(target, gap=gap, force=force)
        try:
            yield receipt
        finally:
            if hidden := self._still_masked(receipt.ranges):
                self.unmask(hidden)

    def _still_masked(self, ranges: Sequence[Range]) -> list[Range]:
        flags = np.zeros(len(self._ledger), np.bool_)
        for start, stop in ranges:
            flags[start:stop] = True
        return runs(flags & self._ledger.columns.where(State.MASKED))

    def _need_mask(self) -> None:
        if not self.model.capabilities.mask:
            raise MaskUnsupported(f"{self.model.capabilities.mask.reason}; start again without the text instead")

    def _gap(self, gap: str) -> tuple[str, tuple[str, ...]]:
        """The gap that is possible here, and what to tell the user about it."""
        if gap not in ("close", "keep"):
            raise UsageError(f"gap is 'close' or 'keep', not {gap!r}")
        if gap == "close" and not self.engine.can_shift:
            return "keep", (self.engine.close_gaps.reason,)
        return gap, ()

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans, in order of their first token."""
        return self._spans.ordered()

    def span(self, name: str) -> Span:
        """The span of that name; raises UnknownSpan."""
        for span in self._spans.ordered():
            if span.name == name:
                return span
        self._spans.resolve(name)  # raises with the near names, unless it selects spans by another way
        raise UnknownSpan(f"{name!r} is no span's name, though it selects some")

    @property
    def tokens(self) -> TokenArray:
        """int32 (n,): every token of the transcript in index order, hidden ones too."""
        return self._ledger.tokens.copy()

    @_verb
    def text(self, target: Target) -> str:
        """The text of a target, hidden tokens too, control tokens spelled out."""
        chosen = self._ledger.select(self._spans.resolve(target))
        return self.model.detokenize(self._ledger.tokens[chosen])

    @property
    def stats(self) -> Stats:
        """Tokens by state, tokens read and reused, cells and bytes of cache in use."""
        with self.lock:
            ledger, tally = self._ledger, self._transcript.tally
            return Stats(
                visible=ledger.count(State.VISIBLE),
                masked=ledger.count(State.MASKED),
                parked=ledger.count(State.PARKED),
                evicted=ledger.count(State.EVICTED),
                prefilled=tally.prefilled,
                generated=tally.generated,
                reread=tally.reread,
                reused=tally.reused,
                cells_used=ledger.num_cells,
                cells=self.engine.num_cells,
                kv_bytes_used=ledger.num_cells * self.model.kv_bytes_per_token(self.engine.settings.kv_type),
                cursor=ledger.cursor,
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
        return self._transcript.audit()
