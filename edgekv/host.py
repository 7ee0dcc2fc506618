"""Host: what a generation does to its session's transcript."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from .batch import Chunk
from .columns import State
from .engine import Engine
from .errors import ClosedError
from .model import Model
from .next_logits import NextLogits
from .record import Record
from .recovery import Keeps
from .sampling import Sampler
from .spans import Range, Span, SpanTable
from .tally import Turn
from .transcript import Transcript

if TYPE_CHECKING:
    from .generation import Generation

R = TypeVar("R")

BOS_NAME: Final = "<bos>"


def register_bos(spans: SpanTable, read: Range) -> Span:
    """The span of the model's own first token, the first of those read."""
    return spans.add(Span(BOS_NAME, read[0], read[0] + 1, "control"))


def end_open(transcript: Transcript) -> None:
    """A generation of this session that has begun ends where it is, with what was generated."""
    if transcript.record.generation is not None:
        transcript.record.generation.close()


class Host:
    """The transcript as a generation sees it. Callers hold ``lock``."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._ledger = transcript.ledger
        self._reader = transcript.reader
        self._record = transcript.record
        self.engine: Final[Engine] = transcript.engine
        self.model: Final[Model] = transcript.engine.model

    @property
    def lock(self) -> AbstractContextManager[object]:
        return self.engine.lock

    @property
    def record(self) -> Record:
        return self._record

    @property
    def open(self) -> bool:
        """Whether the session can go on."""
        return not (self._record.released or self._record.broken or self.engine.lost or self.engine.closed)

    def begin(self, generation: Generation) -> tuple[Sampler, int]:
        """A sampler whose penalties count what is visible now, and the index generated tokens begin at.

        A generation that is open ends where it is. Raises ClosedError, UsageError (the name is taken by now).
        """
        sampling, name = generation.request.sampling, generation.request.name
        if not self.open:
            raise ClosedError("the session was closed; open a new one")
        if name is not None:
            self._transcript.spans.check_name(name)
        if self._ledger.blank and self.model.bos is not None:
            bos = np.asarray([self.model.bos], np.int32)
            self._reader.read(bos, lambda read: register_bos(self._transcript.spans, read))
        visible, masked = self._ledger.count(State.VISIBLE), self._ledger.count(State.MASKED)
        self._record.tally.begin_generation(visible, masked)
        sampler = Sampler(self.model, sampling, self._ledger.visible_tokens)
        self._record.generation = generation
        return sampler, len(self._ledger)

    def end_open(self) -> None:
        """A generation that has begun ends where it is."""
        end_open(self._transcript)

    def whole(self, work: Callable[[], R], *others: Keeps) -> R:
        """See :func:`edgekv.recovery.whole`."""
        return self._record.whole(work, *others)

    def unfinished(self) -> bytes:
        """The bytes of a character that the visible text ends inside of."""
        return self.model.unfinished(self._ledger.visible_tokens[-4:])

    def sample(self, sampler: Sampler) -> int:
        """Draw the next token."""
        return self._reader.sample(sampler)

    @property
    def sequence(self) -> int:
        """The sequence it reads into."""
        return self._record.live

    @property
    def holder(self) -> NextLogits:
        """Who keeps the logits of what is read."""
        return self._record.next

    def chunk(self, token: int) -> Chunk:
        """A sampled token as a part of a batch; :meth:`was_read` follows."""
        return Chunk(self._record.live, self._ledger.cursor, np.asarray([token], np.int32))

    def was_read(self, token: int, row: int) -> int:
        """The token was read in a batch, its logits are at index ``row``; returns its index."""
        return self._reader.was_read(token, self._ledger.cursor, row)

    def read(self, token: int) -> int:
        """Read a sampled token into the cache; returns its index."""
        return self._reader.read_one(token)

    def shorten(self, index: int, text: str) -> list[int] | None:
        """Rewind to ``index`` and read ``text`` there, the part of a token before a stop string.

        Returns its tokens, None where the model's state cannot be rewound and is not to be read again.
        """
        if not (self.model.capabilities.rewind or self._transcript.restarts):
            return None
        if index < len(self._ledger):
            self._transcript.shorten(self._ledger.places.row(index))
        tokens = self.model.tokenize(text)
        if len(tokens):
            self._reader.read(tokens, lambda read: read)
        return [int(t) for t in tokens]

    def end(self, name: str | None, role: str, start: int) -> tuple[Span, Turn]:
        """Register what was generated from index ``start`` on as a span; the generation is over."""
        self._record.generation = None
        spans, kept = self._transcript.spans, ~self._ledger.columns.where(State.DROPPED)
        left = np.flatnonzero(self._ledger.places.by_index(kept)[start:])  # a stop string was dropped
        stop = start + int(left[-1]) + 1 if len(left) else start
        span = spans.add(Span(name or spans.free_name(role or "text"), min(start, stop), stop, role))
        return span, self._record.tally.end_generation()
