"""Reply: an answer of a chat, as it is said. Room is made and blocks are hidden while it is being said."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import answers
from ._llama import raise_if_interrupted, uninterrupted
from .answers import TEXT, Stream
from .errors import ContextFull
from .receipts import Receipt, Timings
from .sampling import Sampling
from .turns import Message

if TYPE_CHECKING:
    from .chat import Chat
    from .generation import Generation


class Reply:
    """Pieces of an answer's text; iterate, or ask for ``text``, ``message``, ``timings``: that finishes it.

    It holds nothing while it is not asked for a piece; the chat's next verb ends it where it is, and so does Ctrl-C,
    with what was said kept. ``finish_reason`` as in :class:`~edgekv.generation.Generation`. ``receipts``: of the edits
    made meanwhile, to make room or to hide a block.
    """

    def __init__(self, chat: Chat, max_tokens: int, sampling: Sampling | None, stop: tuple[str, ...]) -> None:
        self._chat, self._max_tokens, self._sampling, self._stop = chat, max_tokens, sampling, stop
        self._stream = Stream(chat.opening)
        self._queue: deque[tuple[str, str]] = deque()
        self._raw, self._checked = "", 0
        self._parts: list[Timings] = []
        self._num_said = 0
        self._generation: Generation | None = None
        self.receipts: list[Receipt] = []
        self.finish_reason: str | None = None
        self._reason = "closed"
        self._message: Message | None = None
        self.prompt_tokens = 0

    # -- what callers see ---------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[str]:
        return (piece for kind, piece in self.pieces() if kind == TEXT)

    def pieces(self) -> Iterator[tuple[str, str]]:
        """("thinking" or "text", piece): the model's reasoning, too."""
        while self._queue or not self.finished:
            if not self._queue:
                self._step()
            while self._queue:
                yield self._queue.popleft()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def finish(self) -> Reply:
        """Say all of it."""
        while not self.finished:
            self._step()
        return self

    def close(self) -> None:
        """End it where it is; what was said stays in the chat."""
        if not self.finished:
            if self._generation is not None:
                self._generation.close()
            self._end()

    @property
    def message(self) -> Message:
        """The whole answer; says what is left of it first."""
        self.finish()
        assert self._message is not None
        return self._message

    @property
    def text(self) -> str:
        return self.message.content

    @property
    def reasoning(self) -> str:
        return self.message.reasoning

    @property
    def tool_calls(self) -> tuple[dict[str, Any], ...]:
        """The calls it makes as <tool_call>{...}</tool_call>; they stay in the text, too."""
        return answers.Answer(self.text, self.text).tool_calls

    @property
    def timings(self) -> Timings:
        """What it cost, from the reading of the message on; says what is left first."""
        self.finish()
        return _sum(self._parts)

    # -- how it works -------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One token, and what comes of it."""
        try:
            raise_if_interrupted()
            with uninterrupted():  # a token is in the cache and in the conversation, or in neither
                self._say_one()
        except BaseException:
            with uninterrupted():
                self.close()
            raise

    def _say_one(self) -> None:
        if self._generation is None:
            self._generation = self._chat.generation(self._max_tokens - self._num_said, self._sampling, self._stop)
        try:
            piece = self._generation.step()
        except ContextFull:
            self._continue(self._chat.room_to_go_on)
        else:
            self._take(piece)

    def _take(self, piece: str | None) -> None:
        if piece is None:
            self._end()
            return
        self._raw += piece
        self._queue.extend(self._stream.feed(piece))
        if self._chat.block_ended(self._raw, self._checked):
            self._checked = len(self._raw)
            assert self._generation is not None
            self._generation.close()
            self._continue(self._chat.hide_blocks)

    def _continue(self, edit: Any) -> None:
        """What was said so far is the chat's; then the edit, and a generation that goes on."""
        self._keep()
        self.receipts += edit()

    def _keep(self) -> None:
        if self._generation is not None:
            generation, self._generation = self._generation, None
            self._chat.keep(generation)
            self._num_said += len(generation.tokens)
            self._parts.append(generation.timings)
            self._reason = generation.finish_reason or "closed"

    def _end(self) -> None:
        self._keep()
        self._queue.extend(self._stream.finish())
        self.finish_reason = self._reason
        self._message = self._chat.ended(self)


def _sum(parts: list[Timings]) -> Timings:
    """Several generations of one answer as one: what was in the cache counts where it began."""
    if not parts:
        return Timings(0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    first, rest = parts[0], parts[1:]
    return replace(
        first,
        prefilled=sum(t.prefilled for t in parts),
        reread=sum(t.reread for t in parts),
        generated=sum(t.generated for t in parts),
        decode_ms=first.decode_ms + sum(t.ttft_ms + t.decode_ms for t in rest),
    )
