"""What is said in a long run, and how a model's template writes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np

from edgekv.compare.prose import Writer
from edgekv.errors import TemplateError, UsageError
from edgekv.model import Model, TokenArray
from edgekv.sampling import Sampling
from edgekv.template import PLAIN, PLAIN_STOPS, Template

#: As in the chat API of OpenAI: {"role": ..., "content": ...}.
Messages: TypeAlias = Sequence[dict[str, str]]

_SYSTEM: Final = "You are a terse assistant."
_ANSWER: Final = "edgekvprobeanswer"
_FILLERS: Final = (" so", " it", " now", " a", "?", "!", ".", ",", ";", "a", "o", "e")


class Frame:
    """A model's chat template, or a plain one, as a wrapper uses it. Raises TemplateError.

    ``system``: the system text, None where the template takes none. ``stops``: texts that end an answer. ``sampling``:
    greedy, without the tokens that would end an answer early or begin another turn.
    """

    def __init__(self, model: Model) -> None:
        self.model: Final = model
        self.stops: Final = () if model.chat_template else PLAIN_STOPS
        self.bos: Final = model.bos_text
        self.eos: Final = model.eos_text
        self._template: Final = Template(model.chat_template or PLAIN, bos=self.bos, eos=self.eos)
        self.system: Final = _SYSTEM if self._takes_system() else None
        self.begin: Final[Messages] = [said("system", self.system)] if self.system else []
        self.sampling: Final = Sampling(logit_bias=dict.fromkeys(self._banned, -math.inf))

    def _takes_system(self) -> bool:
        try:
            return _SYSTEM in self._render([said("system", _SYSTEM), said("user", _ANSWER)])
        except TemplateError:
            return False

    @property
    def _banned(self) -> list[int]:
        """The end tokens, and the control tokens the template writes: an answer is plain text, as long as others."""
        control = list(self.model.control_tokens.values())
        written = self.tokens([*self.begin, said("user", "a"), said("assistant", "a"), said("user", "a")])
        return sorted({*self.model.end_tokens, *written[np.isin(written, control)].tolist()})

    @cached_property
    def source(self) -> str:
        """The template, with the BOS in front of it where the model wants one and it writes none itself."""
        written = self._render([said("user", "a")])
        return self._template.source if self._begun(written) == written else "{{ bos_token }}" + self._template.source

    def _begun(self, text: str) -> str:
        """A rendered text, with the BOS in front of it where the model wants one."""
        return text if self.model.bos is None or text.startswith(self.bos) else self.bos + text

    def _render(self, messages: Messages) -> str:
        return self._template.render(messages, add_generation_prompt=True)

    def text(self, messages: Messages) -> str:
        """A prompt for the next answer."""
        return self._begun(self._render(messages))

    def tokens(self, messages: Messages) -> TokenArray:
        """The same, as tokens."""
        return self.model.tokenize(self.text(messages), special=True)

    def num_new(self, message: str, *, first: bool) -> int:
        """How many tokens a message and all that the template writes around it add to a conversation."""
        if first:
            return len(self.tokens([*self.begin, said("user", message)]))
        asked = [said("user", "a"), said("assistant", _ANSWER), said("user", message)]
        added = self.text([*self.begin, *asked]).rpartition(_ANSWER)[2]
        return len(self.model.tokenize(added, special=True))


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def messages(model: Model, num: int, num_tokens: int, seed: int) -> list[str]:
    """So many messages of exactly that many tokens each. Raises UsageError where the vocabulary allows none."""
    writer = Writer(seed)
    return [_message(model, writer, num_tokens) for _ in range(num)]


def _message(model: Model, writer: Writer, num_tokens: int) -> str:
    """Sentences, the last of them cut short, and made up to the length with short words and letters."""
    text = ""
    while True:
        for word in writer.sentence().split():
            longer = f"{text} {word}".strip()
            if len(model.tokenize(longer)) > num_tokens:
                return _filled(model, text, num_tokens)
            text = longer


def _filled(model: Model, text: str, num_tokens: int) -> str:
    while (length := len(model.tokenize(text))) < num_tokens:
        longer = ((text + filler).strip() for filler in _FILLERS)
        found = next((t for t in longer if length < len(model.tokenize(t)) <= num_tokens), None)
        if found is None:
            raise UsageError(f"no message of exactly {num_tokens} tokens was found; take another length or seed")
        text = found
    return text


class Dialogue:
    """A conversation as a wrapper holds it: a list of messages, of which the oldest exchange goes first."""

    def __init__(self, frame: Frame, num_cells: int, max_tokens: int, trim_to: float) -> None:
        self._frame, self._cells, self._max_tokens, self._trim_to = frame, num_cells, max_tokens, trim_to
        self.messages = list(frame.begin)

    def ask(self, message: str) -> TokenArray:
        """The prompt with that message; trimmed where prompt and answer do not fit."""
        self.messages.append(said("user", message))
        prompt = self._frame.tokens(self.messages)
        if len(prompt) + self._max_tokens > self._cells:
            prompt = self._trimmed(prompt)
        return prompt

    def _trimmed(self, prompt: TokenArray) -> TokenArray:
        first = len(self._frame.begin)
        while len(prompt) + self._max_tokens > self._trim_to * self._cells and len(self.messages) > first + 2:
            del self.messages[first : first + 2]
            prompt = self._frame.tokens(self.messages)
        return prompt

    def answered(self, text: str) -> None:
        self.messages.append(said("assistant", text))
