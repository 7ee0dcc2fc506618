"""Answers: what a model says, taken apart: reasoning, text for the reader, tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from .generation import held_back

#: What a reader is shown, and what the model thought before it.
TEXT, THINKING = "text", "thinking"


class Marks(NamedTuple):
    """How a family of models marks its reasoning: it stands between the two, and ``between`` leads to the text."""

    start: str
    end: str
    between: str = ""


MARKS: Final = (
    Marks("<think>", "</think>"),
    Marks("<thinking>", "</thinking>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant<|channel|>final<|message|>"),
)
_FINAL: Final = "<|channel|>final<|message|>"
_STARTS: Final = (*(marks.start for marks in MARKS), _FINAL)
_ENDS: Final = tuple(mark for marks in MARKS for mark in (marks.end, marks.between) if mark)
_TOOL_CALL: Final = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """``raw``, taken apart. thinking: the characters of ``raw`` that reasoning and its marks take, None for none."""

    raw: str
    text: str
    reasoning: str = ""
    thinking: tuple[int, int] | None = None

    @property
    def tool_calls(self) -> tuple[dict[str, Any], ...]:
        """The calls it makes in the notation of Hermes and Qwen, those that are JSON objects."""
        return tuple(call for found in _TOOL_CALL.findall(self.text) if (call := _object(found)) is not None)


def _object(text: str) -> dict[str, Any] | None:
    try:
        made = json.loads(text)
    except ValueError:
        return None
    return made if isinstance(made, dict) else None


def parse(raw: str, prompt: str = "") -> Answer:
    """An answer behind ``prompt``, which may have begun the reasoning already. Reasoning that never ends is reasoning
    to the last character."""
    for marks in MARKS:
        begun = prompt.rstrip().endswith(marks.start)
        lead = raw[: len(raw) - len(raw.lstrip())]
        if begun or raw.startswith(marks.start, len(lead)):
            start = 0 if begun else len(lead)
            inner = 0 if begun else start + len(marks.start)
            return _apart(raw, marks, start, inner)
    text = raw.removeprefix(_FINAL)
    return Answer(raw, text)


def find_thinking(text: str, start: int, stop: int) -> tuple[int, int] | None:
    """The characters of the first block of reasoning in text[start:stop], marks and blank lines behind it included;
    None for none."""
    for marks in MARKS:
        begin = text.find(marks.start, start, stop)
        end = text.find(marks.end, begin + len(marks.start), stop) if begin >= 0 else -1
        if end >= 0:
            behind = text[end + len(marks.end) : stop]
            return begin, stop - len(behind.lstrip("\n"))
    return None


def _apart(raw: str, marks: Marks, start: int, inner: int) -> Answer:
    end = raw.find(marks.end, inner)
    if end < 0:
        return Answer(raw, "", raw[inner:].strip("\n"), (start, len(raw)))
    behind = end + len(marks.end)
    text = raw[behind:].removeprefix(marks.between) if marks.between else raw[behind:].lstrip("\n")
    return Answer(raw, text, raw[inner:end].strip("\n"), (start, len(raw) - len(text)))


class Stream:
    """A growing answer, told as it comes: (THINKING or TEXT, piece). Marks are not told."""

    def __init__(self, prompt: str = "") -> None:
        self._raw, self._prompt = "", prompt
        self._told = {THINKING: 0, TEXT: 0}

    def feed(self, piece: str) -> Iterator[tuple[str, str]]:
        self._raw += piece
        begun = self._raw.lstrip()
        if any(len(begun) < len(start) and start.startswith(begun) for start in _STARTS):
            return  # it may still become a mark
        yield from self._news(parse(self._raw[: len(self._raw) - held_back(self._raw, _ENDS)], self._prompt))

    def finish(self) -> Iterator[tuple[str, str]]:
        """What was held back, as it may have become a mark."""
        yield from self._news(parse(self._raw, self._prompt))

    def _news(self, answer: Answer) -> Iterator[tuple[str, str]]:
        for kind, said in ((THINKING, answer.reasoning), (TEXT, answer.text)):
            if len(said) > self._told[kind]:
                yield kind, said[self._told[kind] :]
                self._told[kind] = len(said)
