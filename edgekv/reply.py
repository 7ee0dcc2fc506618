"""Reply: an answer of a chat, as it is said. Room is made and blocks are hidden while it is being said."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import answers
from ._llama import raise_if_interrupted, uninterrupted
from .answers import TEXT, Stream
from .errors import ContextFull
from .generation import Generation
from .receipts import Receipt, Timings
from .turns import Message

if TYPE_CHECKING:
    from .chat import Chat


class Reply:
    """Pieces of an answer's text; iterate, or ask for ``text``, ``message``, ``timings``: that finishes it.

    It holds nothing while it is not asked for a piece; the chat's next verb ends it where it is, and so does Ctrl-C,
    with what was said kept. ``finish_reason`` as in :class:`~edgekv.generation.Generation`; "length", too, where the
    cache was full and nothing was left to hide, which ``full`` then explains. ``receipts``: of the edits made
    meanwhile, to make room or to hide a block.
    """

    def __init__(self, chat: Chat, generation: Generation) -> None:
        self._chat, self._generation = chat, generation
        self._stream = Stream(chat.opening)
        self._queue: deque[tuple[str, str]] = deque()
        self._raw, self._checked = "", 0
        self._message: Message | None = None
        self.receipts: list[Receipt] = []
        self.full = ""

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
        return self._message is not None

    @property
    def finish_reason(self) -> str | None:
        if not self.finished:
            return None
        return "length" if self.full else self._generation.finish_reason

    def finish(self) -> Reply:
        """Say all of it."""
        while not self.finished:
            self._step()
        return self

    def close(self) -> None:
        """End it where it is; what was said stays in the chat."""
        with uninterrupted():
            if not self.finished:
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
        return self._generation.timings

    # -- how it works -------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One token, and what comes of it."""
        try:
            raise_if_interrupted()
            with uninterrupted():  # a token is in the cache and in the conversation, or in neither
                self.receipts += self._chat.room_to_go_on(self._generation)
                self._take(self._generation.step())
        except ContextFull as err:
            self.full = str(err)
            self.close()
            self._chat.ran_out()
        except BaseException:
            self.close()
            raise

    def _take(self, piece: str | None) -> None:
        if piece is None:
            self._end()
            return
        self._raw += piece
        self._queue.extend(self._stream.feed(piece))
        if self._chat.block_ended(self._raw, self._checked):
            self._checked = len(self._raw)
            self.receipts += self._chat.hide_blocks(self._generation)

    def _end(self) -> None:
        self._queue.extend(self._stream.finish())
        self._message = self._chat.ended(self, self._generation)
