"""Turns: the messages of a conversation, and which tokens of a session each is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from .markup import Markup
from .spans import Range
from .template import Template

TURN: Final = "turn"
THINKING: Final = "thinking"
TOOL_RESULT: Final = "tool_result"
SUMMARY: Final = "summary"
PINNED: Final = "pinned"


@dataclass(frozen=True)
class Message:
    """What somebody said. ``role``: "system", "user", "assistant", "tool", or what else the template knows.

    reasoning: what the model thought before it. tool_calls: as in the chat API of OpenAI. name: of a tool, for its
    result. tags: for targets such as "tag:draft". raw: as the model said it, with its own control tokens, for the
    template; None for what a person wrote. said: the part of ``raw`` behind the reasoning.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str = ""
    tags: tuple[str, ...] = ()
    raw: str | None = None
    said: str | None = None

    def for_template(self, template: Template, markup: Markup) -> dict[str, Any]:
        """As the template gets it: nothing in a text acts as a control token, but those the model said itself."""
        content = markup.escape(self.content, own=self.role == "assistant")
        made: dict[str, Any] = {"role": self.role, "content": content if self.raw is None else self.raw}
        if self.reasoning and (key := _reasoning_key(template)):
            made |= {"content": content if self.said is None else self.said, key: markup.escape(self.reasoning)}
        if self.tool_calls:
            made["tool_calls"] = [escaped(call, markup) for call in self.tool_calls]
        if self.name:
            made["name"] = markup.escape(self.name)
        return made

    def probed(self, probe: str, *, front: bool) -> Message:
        """With something at the end of all that it says, or in front of it."""

        def put(text: str | None) -> str | None:
            return text and (f"{probe}{text}" if front else f"{text}{probe}")

        return replace(self, content=put(self.content) or probe, raw=put(self.raw), said=put(self.said))


def _reasoning_key(template: Template) -> str:
    """Under which name a template takes reasoning, "" for none: then it stays in the content."""
    return next((key for key in ("reasoning_content", "thinking") if template.mentions(key)), "")


def escaped(value: Any, markup: Markup) -> Any:
    """Plain data in which no text acts as a control token, keys included."""
    if isinstance(value, str):
        return markup.escape(value)
    if isinstance(value, Mapping):
        return {escaped(key, markup): escaped(item, markup) for key, item in value.items()}
    return [escaped(item, markup) for item in value] if isinstance(value, Sequence) else value


@dataclass(frozen=True)
class Turn:
    """A message and the index range of its tokens, delimiters included; an empty one before it is read.

    parts: the index ranges of what has a name in it: "thinking", "tool_result".
    """

    name: str
    message: Message
    range: Range = (0, 0)
    parts: tuple[tuple[str, Range], ...] = ()

    @property
    def read(self) -> bool:
        return self.range[0] < self.range[1]

    @property
    def tags(self) -> frozenset[str]:
        return frozenset((TURN, *self.message.tags))

    def part_tags(self, part: str) -> frozenset[str]:
        of = (f"tool:{self.message.name}",) if part == TOOL_RESULT and self.message.name else ()
        return frozenset((part, *of))
