"""Turns: the messages of a conversation, and which tokens of a session each is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .errors import UsageError
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
    template; None for what a person wrote.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str = ""
    tags: tuple[str, ...] = ()
    raw: str | None = None

    def for_template(self, template: Template, markup: Markup) -> dict[str, Any]:
        """As the template gets it: nothing in a text acts as a control token, but those the model said itself."""
        made: dict[str, Any] = {"role": self.role, "content": markup.escape(self.content)}
        if self.raw is not None:
            made["content"] = self.raw
        if self.reasoning and (key := _reasoning_key(template)):
            made |= {"content": markup.escape(self.content), key: markup.escape(self.reasoning)}
        if self.tool_calls:
            made["tool_calls"] = [_escaped(call, markup) for call in self.tool_calls]
        if self.name:
            made["name"] = markup.escape(self.name)
        return made

    def as_dict(self) -> dict[str, Any]:
        """As in the chat API of OpenAI; what is empty is left out."""
        made = {"role": self.role, "content": self.content, "reasoning_content": self.reasoning, "name": self.name}
        return {k: v for k, v in made.items() if v or k in ("role", "content")} | (
            {"tool_calls": list(self.tool_calls)} if self.tool_calls else {}
        )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Message:
        """A message of the chat API of OpenAI. Raises UsageError for one that makes no sense."""
        content = given.get("content") or ""
        if not isinstance(given.get("role"), str) or not isinstance(content, str):
            raise UsageError(f"a message has a role and a content, both text: {dict(given)!r}")
        calls = tuple(given.get("tool_calls") or ())
        return cls(
            given["role"],
            content,
            str(given.get("reasoning_content") or ""),
            calls,
            str(given.get("name") or ""),
        )


def _reasoning_key(template: Template) -> str:
    """Under which name a template takes reasoning, "" for none: then it stays in the content."""
    return next((key for key in ("reasoning_content", "thinking") if template.mentions(key)), "")


def _escaped(value: Any, markup: Markup) -> Any:
    if isinstance(value, str):
        return markup.escape(value)
    if isinstance(value, Mapping):
        return {key: _escaped(item, markup) for key, item in value.items()}
    return [_escaped(item, markup) for item in value] if isinstance(value, Sequence) else value


@dataclass(frozen=True)
class Turn:
    """A message and the index range of its tokens, delimiters included; an empty one before it is read.

    parts: the index ranges of what has a name in it: "thinking", "tool_result".
    """

    name: str
    message: Message
    range: Range = (0, 0)
    parts: tuple[tuple[str, Range], ...] = field(default=())

    @property
    def read(self) -> bool:
        return self.range[0] < self.range[1]

    @property
    def tags(self) -> frozenset[str]:
        return frozenset((TURN, *self.message.tags))

    def part_tags(self, part: str) -> frozenset[str]:
        of = (f"tool:{self.message.name}",) if part == TOOL_RESULT and self.message.name else ()
        return frozenset((part, *of))
