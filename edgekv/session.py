"""Session: a conversation on the KV cache whose parts can be hidden, shown, replaced, forked and dropped at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from . import numerics, render
from .base import verb
from .columns import State
from .errors import BadState, MaskUnsupported, UnknownSpan
from .generation import Generation, Request
from .host import BOS_NAME, Host, register_bos
from .keeping import Keeping
from .model import TokenArray
from .receipts import Audit, Receipt, Stats
from .sampling import Sampling
from .spans import Range, Span, Target
from .transcript import Transcript


class Session(Keeping):
    """One transcript over llama.cpp's sequences.

    ``source``: a manifest name, a path to a GGUF file, a :class:`Model`, or an :class:`Engine` to share. What the
    session opened itself it closes itself. ``settings`` with ``n_ctx``, ``kv_type``, ``n_threads`` and
    ``max_parked_bytes`` as shortcuts say how the context is opened (not with an Engine, which is open already).
    ``memory_budget``, bytes or text such as "512MiB": what the whole process may take; n_ctx and the KV type are chosen
    to fit, where they are not given (see :mod:`edgekv.budget`). ``on_unsupported``: what a model's
    memory cannot do is refused ("refuse"), or done at a restart's price, as the receipt says ("recompute").
    ``sampling``, an attribute, is what generations use that are told nothing else. ``memo``, another, is a text of the
    caller's own that files keep. ``progress``, a third, is called with (tokens read, tokens to read) after every batch
    of a reading.

    Raises ModelError, TooLarge and UsageError as Model and Engine do.
    """

    def __enter__(self) -> Session:
        return self

    def __str__(self) -> str:
        """The spans and their states, a line each."""
        return repr(self) if self._closed else render.session_table(self)

    # -- reading ------------------------------------------------------------------------------------------------

    @verb
    def append(
        self,
        text: str | Iterable[int] | TokenArray,
        *,
        name: str | None = None,
        role: str = "",
        tags: Iterable[str] = (),
        special: bool = False,
        attend: Target | None = None,
    ) -> Span:
        """Read text (or token ids) behind what is there; returns its span.

        The first text of a session gets the model's BOS in front, as a span of its own. ``special`` reads control
        tokens such as ``<|im_start|>`` as such; by default they are plain text. An empty text reads nothing and
        gives an empty span.

        attend: what the text may look at, and nothing else, of what is in front of it: an isolated span. The
        attention sinks are always seen. Whatever else is masked later, this span knows nothing of it, but for its last
        token where the next one is sampled right behind it: that one is read again with everything in view.

        Cost: every token is read once. An isolated span is read aside and moved into place, which rotates K once.
        Guarantees: all of it is read, or nothing has changed.
        Raises ContextFull, UsageError (name taken, bad token), BadState (attend is not visible), MaskUnsupported
        (attend on a model that cannot shift).
        """
        if name is not None:
            self._check_name(name)
        tokens, span_of = self._tokens(text, special=special), self._namer(name, role, tags)
        bos = self._first_tokens if len(tokens) and isinstance(text, str) else np.empty(0, np.int32)

        def register(read: Range) -> Span:
            if len(bos):
                register_bos(self._spans, read)
            return span_of((read[1] - len(tokens), read[1]))

        if not len(tokens):
            return register((len(self._ledger), len(self._ledger)))
        if attend is not None:
            return self._transcript.append_alone(tokens, self._attended(attend), register)
        return self._reader.read(np.concatenate([bos, tokens]), register)

    def _attended(self, attend: Target) -> npt.NDArray[np.bool_]:
        """bool (n,): the rows an isolated text sees."""
        if not self.engine.can_shift:
            why = self.engine.close_gaps if self._ledger.has_cells else self.model.capabilities.mask
            raise MaskUnsupported(f"an isolated text is moved into its place, which cannot be done here: {why.reason}")
        chosen = self._rows(attend)
        if (chosen & ~self._ledger.columns.visible).any():
            raise BadState("what a text is to attend to must be visible; unmask it first")
        chosen[self._transcript.record.plan.sinks] = True
        return chosen & self._ledger.columns.visible

    @verb
    def score(self, text: str | Iterable[int] | TokenArray) -> npt.NDArray[np.float64]:
        """float64 (n_tokens,): the log-probability of every token of ``text`` if it came next; nothing is kept.

        Cost: the tokens are read, and dropped again.
        Guarantees: the session is as it was.
        Raises ContextFull, NoLogits (nothing in front of it), UsageError (bad token).
        """
        tokens = self._tokens(text)
        with contextlib.closing(self._reader.teacher_force(tokens)) as forced:  # whatever happens, its end runs
            parts = [numerics.log_probabilities(rows, tokens[at : at + len(rows)]) for at, rows in forced]
        return np.concatenate(parts) if parts else np.empty(0, np.float64)

    @verb
    def logits_over(self, text: str | Iterable[int] | TokenArray) -> npt.NDArray[np.float32]:
        """float32 (n_tokens, n_vocab): row i is the distribution that predicts token i of ``text``; nothing is kept.

        Cost: the tokens are read, and dropped again; 4 * n_tokens * n_vocab bytes.
        Guarantees: the session is as it was.
        Raises as :meth:`score`.
        """
        tokens = self._tokens(text)
        out = np.empty((len(tokens), self.model.n_vocab), np.float32)
        with contextlib.closing(self._reader.teacher_force(tokens)) as forced:
            for at, rows in forced:
                out[at : at + len(rows)] = rows
        return out

    @verb
    def logits(self) -> npt.NDArray[np.float32]:
        """float32 (n_vocab,): the next token's logits, for what is visible now.

        Cost: nothing, or one token read again after an edit.
        Guarantees: never those computed while something else was visible.
        Raises NoLogits on an empty session.
        """
        return self._reader.logits()

    # -- generating ---------------------------------------------------------------------------------------------

    @verb
    def generate(
        self,
        max_tokens: int = 256,
        *,
        sampling: Sampling | None = None,
        stop: str | Iterable[str] = (),
        name: str | None = None,
        role: str = "assistant",
        special: bool = False,
    ) -> Generation:
        """Continue the transcript; the result streams and becomes a span. See :class:`Generation`.

        sampling: how tokens are chosen; the session's own ``sampling``, greedy unless it was set, by default. special:
        control tokens that are sampled are spelled out in the text.

        Nothing happens yet: it begins with its first token, from what is there by then. The next verb of the session,
        or another generation that begins on it, ends one that has begun where it is ("closed", with what it has).

        Cost: one token read for every token kept, one more after an edit.
        Guarantees: a token is in the cache and in the text, or in neither, whatever stops it. (A stop string stays in
        the cache where a state cannot be rewound.)
        Raises UsageError; while it runs ContextFull (what was generated stays), NoLogits (empty session),
        GrammarError, GrammarStuck.
        """
        if name is not None:
            self._check_name(name)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = sampling or self.sampling
        sampling.check(self.model)
        return Generation(Host(self._transcript), Request(max_tokens, sampling, stops, name, role, special))

    @contextlib.contextmanager
    def midway(self) -> Iterator[None]:
        """A block in which verbs do not end a generation that is open: what they hide or show, its next token obeys.

        Where the block reads tokens, or drops some, the generation ends after it all the same.
        """
        with self.lock:
            record = self._transcript.record
            generation, record.generation = record.generation, None
            length = len(self._ledger), self._ledger.count(State.DROPPED)
            try:
                yield
            finally:
                if generation is not None and (len(self._ledger), self._ledger.count(State.DROPPED)) != length:
                    generation.close()
                elif generation is not None and not generation.finished:
                    record.generation = generation

    @verb
    def fork(self) -> Session:
        """A second session on the same cells, with masks of its own.

        What one hides, reads or drops, the other does not notice. It has this session's spans, history and next
        logits. Cells are copied only when one of the two would move them under the other. Closing either frees what
        nobody else holds; model and engine close with the last. :func:`decode_together` runs several in one batch.

        Cost: native metadata; no token is read, no K or V copied.
        Guarantees: exact; it goes on as this session would.
        Raises UsageError when the engine's ``n_sessions`` (five unless set) are in use; then nothing has changed.
        """
        other = object.__new__(type(self))
        other._begin(Transcript(self.engine, of=self._transcript), self._lease.take())
        other.sampling, other.memo = self.sampling, self.memo
        other._transcript.record.begin()
        return other

    # -- names --------------------------------------------------------------------------------------------------

    @verb
    def mark(self, target: Target, name: str, *, role: str = "", tags: Iterable[str] = ()) -> Span:
        """Name what is there already: a span from the target's first index to its last; spans may nest.

        A span of that name moves there, and gets this role and these tags.

        Cost: nothing is read, moved or hidden.
        Guarantees: the span is what targets of that name mean from then on.
        Raises UsageError (no such name can be, no token in the target), UnknownSpan.
        """
        ranges = self._spans.resolve(target)
        self._ledger.select(ranges)
        tags = frozenset((tags,) if isinstance(tags, str) else tags)
        span = Span(name, ranges[0][0], ranges[-1][1], role, tags)
        if name == BOS_NAME:
            self._check_name(name)
        return self._spans.put(span)

    def indexes_of(self, target: Target) -> npt.NDArray[np.int64]:
        """int64 (n,): the indexes of a target's tokens, in reading order. Raises UnknownSpan, UsageError."""
        with self.lock:
            self._look()
            return self._ledger.places.indexes_of(np.flatnonzero(self._rows(target)))

    def ranges(self, indexes: npt.NDArray[np.int64]) -> list[Range]:
        """A target of these tokens and no others: a range also selects what was put in between two of its indexes, so
        ranges end there."""
        index = np.unique(indexes)
        with self.lock:
            self._look()
            rows = self._ledger.places.rows_of(index)
        cuts = np.flatnonzero((np.diff(index) != 1) | (np.diff(rows) != 1)) + 1
        return [(int(part[0]), int(part[-1]) + 1) for part in np.split(index, cuts) if len(part)]

    @verb
    def unmark(self, name: str) -> Span:
        """Take a name away; its tokens stay as they are. Returns the span it was.

        Cost: nothing is read, moved or hidden.
        Guarantees: no target of that name means anything any more.
        Raises UnknownSpan.
        """
        return self._spans.remove(self.span(name))

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans, in order of their first token."""
        with self.lock:
            self._look()
            return self._spans.ordered()

    def span(self, name: str) -> Span:
        """The span of that name; raises UnknownSpan."""
        for span in self.spans:
            if span.name == name:
                return span
        self._spans.resolve(name)  # raises with the near names, unless it selects spans by another way
        raise UnknownSpan(f"{name!r} is no span's name, though it selects some")

    @property
    def tokens(self) -> TokenArray:
        """int32 (n,): every token of the transcript in index order, hidden and dropped ones too."""
        with self.lock:
            self._look()
            return self._ledger.places.by_index(self._ledger.ids).copy()

    @property
    def visible_tokens(self) -> TokenArray:
        """int32 (n,): what the model sees, in reading order: a restart would read these."""
        with self.lock:
            self._look()
            return self._ledger.visible_tokens.copy()

    def indexes(self, state: State = State.VISIBLE) -> npt.NDArray[np.int64]:
        """int64 (n,): the indexes of the tokens in that state, in reading order."""
        with self.lock:
            self._look()
            return self._ledger.places.indexes_of(np.flatnonzero(self._ledger.columns.where(state)))

    @verb
    def text(self, target: Target) -> str:
        """The text of a target in reading order, hidden tokens too, control tokens spelled out.

        Raises UnknownSpan, UsageError (no token in it).
        """
        return self.model.detokenize(self._ledger.ids[self._rows(target)])

    @property
    def stats(self) -> Stats:
        """Tokens by state, tokens read and reused, cells and bytes of cache in use."""
        with self.lock:
            self._look()
            ledger, tally = self._ledger, self._transcript.record.tally
            in_memory, on_disk = self.engine.parking.num_bytes(self._transcript.record)
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
                cells_scanned=self.engine.cells_scanned,
                compact_saves=self.engine.compact_saves,
                kv_bytes_used=self.engine.kv_bytes(ledger.num_cells),
                parked_bytes=in_memory,
                parked_on_disk=on_disk,
                cursor=ledger.cursor,
            )

    @property
    def last_edit(self) -> Receipt | None:
        """The receipt of the edit that :meth:`undo` would take back, None for none."""
        with self.lock:
            self._look()
            newest = self._transcript.journal.newest()
            return None if newest is None else newest[0]

    def states(self, span: Span) -> dict[State, int]:
        """How many of a span's tokens are in which state."""
        with self.lock:
            self._look()
            chosen = self._ledger.places.rows([span.range])
            found, numbers = np.unique(self._ledger.columns.state[chosen], return_counts=True)
        return {State(s): int(n) for s, n in zip(found, numbers, strict=True)}

    @verb
    def influenced_by(self, target: Target) -> list[Range]:
        """The index ranges of visible tokens computed while the target was visible, directly or through others.

        Raises UnknownSpan, UsageError.
        """
        return self._ledger.places.ranges(self._ledger.influenced_by(self._rows(target)))

    @verb
    def audit(self) -> Audit:
        """Read what llama.cpp really holds and compare it with the ledger, position by position.

        Cost: copies the session's K and V once. Raises AuditFailed with the first difference.
        """
        return self._transcript.record.audit()
