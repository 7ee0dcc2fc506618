"""Host: what a generation does to its session's transcript."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

import numpy as np

from .columns import State
from .errors import ClosedError
from .model import Model
from .sampling import Sampler, Sampling
from .spans import Span
from .tally import Turn
from .transcript import Transcript

BOS_NAME: Final = "<bos>"


class Host:
    """The transcript as a generation sees it. Callers hold ``lock``."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._ledger = transcript.ledger
        self.model: Final[Model] = transcript.engine.model

    @property
    def lock(self) -> AbstractContextManager[object]:
        return self._transcript.engine.lock

    @property
    def open(self) -> bool:
        """Whether the session can go on."""
        return not (self._transcript.released or self._transcript.broken or self._transcript.engine.closed)

    def begin(self, sampling: Sampling) -> tuple[Sampler, int]:
        """A sampler whose penalties count what is visible now, and the index generated tokens begin at."""
        if not self.open:
            raise ClosedError("the session was closed; open a new one")
        if self._ledger.blank and self.model.bos is not None:
            bos = np.asarray([self.model.bos], np.int32)
            self._transcript.read(bos, lambda read: self._transcript.spans.add(Span(BOS_NAME, *read, "control")))
        visible, masked = self._ledger.count(State.VISIBLE), self._ledger.count(State.MASKED)
        self._transcript.tally.begin_generation(visible, masked)
        return Sampler(self.model, sampling, self._ledger.visible_tokens), len(self._ledger)

    def sample(self, sampler: Sampler) -> int:
        """Draw the next token."""
        return self._transcript.sample(sampler)

    def read(self, token: int) -> int:
        """Read a sampled token into the cache; returns its index."""
        return self._transcript.read_one(token)

    def shorten(self, index: int, text: str) -> list[int] | None:
        """Rewind to ``index`` and read ``text`` there, the part of a token before a stop string.

        Returns its tokens, None where the model's state cannot be rewound.
        """
        if not self.model.capabilities.rewind:
            return None
        if index < len(self._ledger):
            self._transcript.edit("rewind", self._ledger.plan_rewind(index))
        tokens = self.model.tokenize(text)
        if len(tokens):
            self._transcript.read(tokens, lambda read: read)
        return [int(t) for t in tokens]

    def end(self, name: str | None, role: str, start: int) -> tuple[Span, Turn]:
        """Register what was generated from index ``start`` on as a span."""
        spans, stop = self._transcript.spans, len(self._ledger)
        span = spans.add(Span(name or spans.free_name(role or "text"), min(start, stop), stop, role))
        return span, self._transcript.tally.end_generation()
