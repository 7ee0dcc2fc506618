"""Four ways to lead the same conversation in a cache that is too small for it, and what each turn of each costs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from edgekv import _llama, memory, policies
from edgekv.chat import Chat
from edgekv.chat import Options as ChatOptions
from edgekv.errors import DecodeFailed, TooLarge
from edgekv.longrun.options import Options
from edgekv.longrun.texts import Dialogue, Frame
from edgekv.policies import Policy
from edgekv.script import num_same
from edgekv.session import Session
from edgekv.turns import SUMMARY


@dataclass(frozen=True)
class Turn:
    """A message and its answer.

    ttft_ms: from the message handed over to the first piece of the answer. ms: to its last. prefilled: tokens that were
    read, those an edit had read again too. generated: tokens that were read as they were sampled. new: tokens that the
    conversation did not have before: of the message, the template and the answer, and of summaries. visible: tokens the
    model sees afterwards. summaries: made in this turn.
    """

    ttft_ms: float
    ms: float
    prefilled: int
    generated: int
    new: int
    visible: int
    summaries: int = 0

    @property
    def read(self) -> int:
        return self.prefilled + self.generated


class Way(ABC):
    """A conversation on a context of its own. Close it."""

    def __init__(self, frame: Frame, options: Options) -> None:
        self.frame: Final = frame
        self.options: Final = options
        self._num_turns = 0

    def say(self, message: str) -> Turn:
        """Say it, and hear the whole answer."""
        before, began, first = self._counts(), time.perf_counter(), 0.0
        for _ in self._talk(message):
            first = first or time.perf_counter()
        ended = time.perf_counter()
        prefilled, generated, extra, summaries = (now - then for now, then in zip(self._counts(), before, strict=True))
        new = self.frame.num_new(message, first=not self._num_turns) + self._num_kept() + extra
        self._num_turns += 1
        ttft_ms = ((first or ended) - began) * 1e3
        return Turn(ttft_ms, (ended - began) * 1e3, prefilled, generated, new, self._num_visible(), summaries)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of how it went."""
        return ()

    @abstractmethod
    def _talk(self, message: str) -> Iterator[str]:
        """Everything that a message takes, and the pieces of the answer, none of them empty."""

    @abstractmethod
    def _counts(self) -> tuple[int, int, int, int]:
        """So far: tokens prefilled, tokens generated, tokens of summary exchanges, summaries."""

    @abstractmethod
    def _num_kept(self) -> int:
        """Tokens of the newest answer."""

    @abstractmethod
    def _num_visible(self) -> int: ...

    @abstractmethod
    def close(self) -> None: ...


class Chatting(Way):
    """A Chat with a policy."""

    def __init__(self, frame: Frame, options: Options, policy: Policy) -> None:
        super().__init__(frame, options)
        self.policy: Final = policy
        self._session: Final = Session(frame.model, settings=options.settings)
        self._chat: Chat | None = None

    def _talk(self, message: str) -> Iterator[str]:
        self._chat = self._chat or self._begin()  # the system text is read on the first message's account
        self._reply = self._chat.ask(message, sampling=self.frame.sampling)
        yield from (piece for _, piece in self._reply.pieces() if piece)

    def _begin(self) -> Chat:
        options = ChatOptions(policy=self.policy, max_tokens=self.options.max_tokens)
        return Chat(self._session, system=self.frame.system, options=options)

    @property
    def notes(self) -> tuple[str, ...]:
        return self._chat.notes if self._chat is not None else ()

    def _counts(self) -> tuple[int, int, int, int]:
        stats = self._session.stats
        turns = [t for t in (self._chat.turns if self._chat else ()) if SUMMARY in t.message.tags]
        made = sum(turn.message.role == "assistant" for turn in turns)
        return stats.prefilled + stats.reread, stats.generated, sum(t.range[1] - t.range[0] for t in turns), made

    def _num_kept(self) -> int:
        return self._reply.timings.generated

    def _num_visible(self) -> int:
        return self._session.stats.visible

    def close(self) -> None:
        self._session.close()


class Rereading(Way):
    """Messages are trimmed; what the prompt and the cache begin with alike is reused, the rest is read."""

    def __init__(self, frame: Frame, options: Options) -> None:
        super().__init__(frame, options)
        self._session: Final = Session(frame.model, settings=options.settings)
        self._dialogue = Dialogue(frame, self._session.engine.num_cells, options.max_tokens, options.trim_to)

    def _talk(self, message: str) -> Iterator[str]:
        session, prompt = self._session, self._dialogue.ask(message)
        have = session.visible_tokens
        same = num_same(have, prompt)
        if same < len(have):
            session.rewind(int(session.indexes()[same]))
        session.append(prompt[same:])
        frame, most = self.frame, self.options.max_tokens
        self._generation = session.generate(most, sampling=frame.sampling, stop=frame.stops)
        yield from self._generation
        self._dialogue.answered(self._generation.text)

    def _counts(self) -> tuple[int, int, int, int]:
        stats = self._session.stats
        return stats.prefilled + stats.reread, stats.generated, 0, 0

    def _num_kept(self) -> int:
        return len(self._generation.tokens)

    def _num_visible(self) -> int:
        return self._session.stats.visible

    def close(self) -> None:
        self._session.close()


class LlamaCpp(Way):
    """llama_cpp.Llama.create_chat_completion, which reuses the prefix by itself, on the same trimmed messages.

    It does not read the last token of an answer until the next prompt holds it.
    """

    def __init__(self, frame: Frame, options: Options) -> None:
        super().__init__(frame, options)
        cells = memory.cells_for(options.settings.n_ctx)
        self._dialogue = Dialogue(frame, cells, options.max_tokens, options.trim_to)
        settings, model = replace(options.settings, n_ctx=cells), frame.model
        try:
            self._llama = _llama.open_llama(str(model.path), settings, frame.source, frame.bos, frame.eos, options.seed)
        except ValueError as err:
            raise TooLarge(f"llama_cpp.Llama could not be opened beside the other contexts: {err}") from err
        self._prefilled = self._generated = self._kept = 0
        self._evals: list[int] = []
        self._llama.eval = counted(self._llama.eval, self._evals)

    def _talk(self, message: str) -> Iterator[str]:
        self._dialogue.ask(message)
        self._evals.clear()
        text, reason = "", None
        try:
            for chunk in self._complete():
                choice = chunk["choices"][0]
                reason = choice["finish_reason"]
                if piece := choice["delta"].get("content"):
                    text += piece
                    yield piece
        except (RuntimeError, ValueError) as err:
            raise DecodeFailed(f"llama_cpp.Llama failed: {err}") from err
        self._dialogue.answered(text)
        self._count(text, cut=reason == "stop")

    def _complete(self) -> Any:
        bias = {str(token): value for token, value in (self.frame.sampling.logit_bias or {}).items()}
        return self._llama.create_chat_completion(
            self._dialogue.messages,
            max_tokens=self.options.max_tokens,
            temperature=0.0,
            logit_bias=bias,
            stop=list(self.frame.stops),
            stream=True,
        )

    def _count(self, text: str, *, cut: bool) -> None:
        """The first batch of a completion is the prompt's, the others are tokens that were sampled."""
        self._prefilled += sum(self._evals[:1])
        self._generated += sum(self._evals[1:])
        self._kept = len(self.frame.model.tokenize(text)) if cut else len(self._evals)

    def _counts(self) -> tuple[int, int, int, int]:
        return self._prefilled, self._generated, 0, 0

    def _num_kept(self) -> int:
        return self._kept

    def _num_visible(self) -> int:
        return int(self._llama.n_tokens)

    def close(self) -> None:
        self._llama.close()


def counted(evaluate: Callable[[Any], None], lengths: list[int]) -> Callable[[Any], None]:
    """The same, which notes how many tokens it was given."""

    def call(tokens: Any) -> None:
        lengths.append(len(tokens))
        evaluate(tokens)

    return call


WAYS: Final[dict[str, Callable[[Frame, Options], Way]]] = {
    "mask": lambda frame, options: Chatting(frame, options, policies.hide_oldest()),
    "summarise": lambda frame, options: Chatting(frame, options, policies.summarize_oldest()),
    "reread": Rereading,
    "llama_cpp": LlamaCpp,
}


def open_all(frame: Frame, options: Options, stack: ExitStack) -> dict[str, Way]:
    """Every way, which the stack closes."""
    ways = {}
    for name, make in WAYS.items():
        ways[name] = make(frame, options)
        stack.callback(ways[name].close)
    return ways
