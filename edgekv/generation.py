"""Generation: the iterator ``Session.generate`` returns. It holds nothing while it is not asked for a piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import recovery
from ._llama import uninterrupted
from .errors import BadState, UsageError
from .host import Host
from .model import TextStream
from .receipts import Timings
from .sampling import GREEDY, Sampler, Sampling
from .spans import Span
from .tally import Turn


@dataclass(frozen=True)
class Request:
    """What was asked of a generation."""

    max_tokens: int = 256
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    name: str | None = None
    role: str = "assistant"
    special: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise UsageError(f"max_tokens must be 0 or more, not {self.max_tokens}")
        if any(not s for s in self.stop):
            raise UsageError("a stop string cannot be empty: it would stop at once")


class Generation:
    """Pieces of text as they are sampled; every piece handed out is in the cache already.

    It is lazy: it begins with its first token, from whatever is in the session by then, and holds nothing before; its
    name must be free then. Left half read, it stays where it is. Any verb of the session, or another generation that
    begins on it, ends it there: ``finish_reason`` is "closed", what was generated stays in the session and in
    ``tokens`` and ``text``, and text that was held back comes as its last piece. (Edits inside ``Session.midway`` do
    not.) ``text``, ``span`` and ``timings`` generate what is left first. Ctrl-C ends it as a verb does.

    Text never ends inside a character: where ``max_tokens`` cuts one, its bytes stay in the session and out of the
    text, and the text of the next generation begins with the whole character. A U+FFFD within a text is what the model
    sampled: bytes that begin a character, and then others (SmolLM2 in Korean at temperature 1: 4 of 164 answers).

    ``finish_reason``: "end" (the model's own end token), "stop" (a stop string, which is taken out again),
    "length", or "closed".
    """

    def __init__(self, host: Host, request: Request) -> None:
        self.request = request
        self.finish_reason: str | None = None
        self.tokens: list[int] = []
        self.seed: int | None = None
        self.start_index = -1
        self._first_token_at = self._started_at = self._ended_at = 0.0
        self.host = host
        self._sampler: Sampler | None = None
        self._stream: TextStream = host.model.text_stream(special=request.special)
        self._begun = b""  # of a character that the text before began
        self._text = ""
        self._shown = 0
        self._marks: list[int] = []  # characters complete after each token, -1 inside a character
        self._span: Span | None = None
        self.cut_short = False  # while a step is under way
        self._coming: asyncio.Future[str | None] | None = None  # what a cancelled task asked for
        self._turn = Turn()

    # -- what callers see ---------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The whole text; generates what is left of it first."""
        self.finish()
        return self._text

    @property
    def span(self) -> Span:
        """The generated tokens' span; generates what is left first."""
        self.finish()
        if self._span is None:
            raise BadState("this generation failed before its first token: it has no span")
        return self._span

    @property
    def timings(self) -> Timings:
        """What it cost; generates what is left first."""
        self.finish()
        first = self._first_token_at or self._ended_at
        return Timings(
            prefilled=self._turn.prefilled,
            reused=self._turn.reused,
            masked=self._turn.masked,
            reread=self._turn.reread,
            generated=len(self.tokens),
            prefill_ms=self._turn.prefill_s * 1e3,
            ttft_ms=(self._turn.prefill_s + first - self._started_at) * 1e3,
            decode_ms=(self._ended_at - first) * 1e3,
        )

    @property
    def started(self) -> bool:
        return self._sampler is not None

    @property
    def inside_character(self) -> bool:
        """Whether its tokens end with a part of a character, which is no part of ``text``."""
        return self._stream.pending

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def finish(self) -> Generation:
        """Generate to the end."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """End it where it is; what was generated stays in the session."""
        with self.host.lock, uninterrupted():
            if not self.finished:
                self.host.whole(lambda: self._end("closed"), self)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while (piece := self.step()) is not None:
            if piece:
                return piece
        raise StopIteration

    def step(self) -> str | None:
        """One token more: the text that may be shown now, often none; None when there is nothing more to come."""
        with self.host.lock:  # a verb of another thread may have ended it since the last step
            self.settle()
            self.host.engine.check_idle()
            if not self.finished:
                self._try_step()
            piece = self.release()
            return None if self.finished and not piece else piece

    def settle(self) -> None:
        """One whose step was cut short, after a token was drawn that was not kept, does not go on."""
        recovery.ready(self.host.engine)
        if self.cut_short:
            self.cut_short = False
            self.give_up()

    def __aiter__(self) -> AsyncIterator[str]:
        """The same pieces for ``async for``; each is made in a worker thread, so the event loop goes on meanwhile.

        A task that is cancelled leaves the generation where it is, as a loop that breaks does; a piece that was on
        its way then comes first the next time.
        """
        return self

    async def __anext__(self) -> str:
        if self._coming is None or self._coming.get_loop() is not asyncio.get_running_loop():
            self._coming = asyncio.ensure_future(asyncio.to_thread(next, self, None))
        piece = await asyncio.shield(self._coming)
        self._coming = None
        if piece is None:
            raise StopAsyncIteration
        return piece

    def __repr__(self) -> str:
        return f"<Generation {len(self.tokens)} tokens, {self.finish_reason or 'open'}>"

    # -- how it works -------------------------------------------------------------------------------------------

    def _try_step(self) -> None:
        try:
            with uninterrupted():  # a token is in the cache and in the text, or in neither
                if not self.started:
                    self.begin()
                self.cut_short = True
                self.host.whole(self._step, self)
                self.cut_short = False
        except BaseException:
            self.cut_short = True
            self.settle()
            raise

    def _step(self) -> None:
        """One token: sample, read it into the cache, look for an end."""
        if (token := self.draw()) is not None:
            self.host.read(token)
            self.take(token)

    def draw(self) -> int | None:
        """Sample the next token, which the caller reads and has taken; None where it ends instead."""
        if self._sampler is None:
            self._start()
        assert self._sampler is not None
        if not self.host.open or len(self.tokens) >= self.request.max_tokens:
            self._end("length" if self.host.open else "closed")
            return None
        token = self.host.sample(self._sampler)
        self._first_token_at = self._first_token_at or time.perf_counter()
        if self.host.model.is_end(token):
            self._end("end")
            return None
        return token

    def take(self, token: int) -> None:
        """A token that was drawn and read: its text is part of what was said, unless a stop string begins in it."""
        self.tokens.append(token)
        self._text += self._stream.feed(token)
        self._marks.append(-1 if self._stream.pending else len(self._text))
        if (at := self._find_stop()) is not None:
            self._cut(at)
            self._end("stop")

    def give_up(self) -> None:
        """Something failed: it ends here and keeps what was said."""
        with uninterrupted():
            if self.started and self.host.open:
                self.close()
            elif not self.finished:
                self.finish_reason = "closed"  # it never began, or the session is gone: it has no span

    def begin(self) -> None:
        """What comes before its first token, as a whole."""
        self.host.whole(self._start, self)

    def _start(self) -> None:
        self.host.end_open()
        self._started_at = time.perf_counter()
        self._sampler, self.start_index = self.host.begin(self)
        self.seed = self._sampler.seed
        self._begun = self.host.unfinished()
        self._stream.go_on(self._begun)

    def _end(self, reason: str) -> None:
        self._ended_at = time.perf_counter()
        if self._sampler is None:  # closed before it began: nothing was sampled, an empty span marks the place
            self._start()
            assert self._sampler is not None
        self._sampler.close()
        self._span, self._turn = self.host.end(self.request.name, self.request.role, self.start_index)
        self.finish_reason = reason

    def kept(self) -> dict[str, Any]:
        """What it is now. Its lists are appended to, or replaced: of them the length is enough."""
        mine = dict(vars(self))
        for name in ("cut_short", "_coming"):
            del mine[name]
        return {**mine, "_stream": self._stream.copy(), "lengths": (len(self.tokens), len(self._marks))}

    def restore_kept(self, before: dict[str, Any]) -> None:
        mine = {**before, "_stream": before["_stream"].copy()}
        tokens, marks = mine.pop("lengths")
        vars(self).update(mine)
        del self.tokens[tokens:], self._marks[marks:]

    def _find_stop(self) -> int | None:
        """Where the first stop string begins in the text not yet shown."""
        found = [self._text.find(s, self._shown) for s in self.request.stop]
        return min((at for at in found if at >= 0), default=None)

    def _cut(self, at: int) -> None:
        """Take the stop string out of text and cache; a token it begins inside of is read again without it.

        Where the model's state cannot be rewound it stays in the cache, and only the text ends before it.
        """
        keep = max((i + 1 for i, mark in enumerate(self._marks) if 0 <= mark <= at), default=0)
        if at and not keep and self._begun:  # the first character began before this generation: it cannot be read again
            keep = 1 + next(i for i, mark in enumerate(self._marks) if mark > 0)
        done = self._marks[keep - 1] if keep else 0
        again = self.host.shorten(self.start_index + keep, self._text[done:at])
        self._text = self._text[:at]
        if again is not None:
            self.tokens = self.tokens[:keep] + again

    def release(self) -> str:
        """Text that may be shown: all but what may still become a stop string."""
        safe = len(self._text) - (0 if self.finished else held_back(self._text[self._shown :], self.request.stop))
        piece, self._shown = self._text[self._shown : safe], max(safe, self._shown)
        return piece


def held_back(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of ``text`` that begins one of the stop strings."""
    longest = min(len(text), max((len(s) for s in stops), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0)
