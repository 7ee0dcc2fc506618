"""Turns: the messages of a conversation, and which tokens of a session each is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Final, TypeAlias

from .errors import UsageError
from .markup import Markup
from .spans import Range
from .template import Template
from .template.takes import content
from .wording import well_formed

TURN: Final = "turn"
THINKING: Final = "thinking"
TOOL_RESULT: Final = "tool_result"
SUMMARY: Final = "summary"
PINNED: Final = "pinned"

_SHOWN: Final = 40  # characters of a text in a message
_SHORT: Final = 9  # characters of an id, where a template takes no others


#: What a message's content may be given as: text, None for none, or the parts of OpenAI's chat API.
Content: TypeAlias = "str | Sequence[Mapping[str, Any]] | None"


@dataclass(frozen=True)
class Message:
    """What somebody said. ``role``: "system", "user", "assistant", "tool", or what else the template knows.

    content: text; None and a list of {"type": "text", "text": ...} become text, parts joined by a line break.
    reasoning: what the model thought before it. tool_calls: as in the chat API of OpenAI, arguments as JSON text or as
    an object; {"name": ..., "arguments": ...} alone is taken, too. name: of a tool, for its result. tool_call_id: of
    the call that a result belongs to. tags: for targets such as "tag:draft". raw: as the model said it, with its own
    control tokens, for the template; None for what a person wrote. said: the part of ``raw`` after the reasoning.

    Lone surrogates become U+FFFD (a role cannot have any). Raises UsageError for what is none of that, such as a part
    that is no text.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str = ""
    tags: tuple[str, ...] = ()
    raw: str | None = None
    said: str | None = None
    tool_call_id: str = ""

    def __post_init__(self) -> None:
        given: dict[str, Any] = dict(self.__dict__)
        if not isinstance(self.role, str):
            raise UsageError(f"a role is text, not a {type(self.role).__name__}")
        made: dict[str, Any] = {key: _text(given[key], key) for key in ("reasoning", "name", "tool_call_id")}
        made["content"] = text_of(given["content"])
        made["tags"] = tuple(_text(tag, "a tag") for tag in _listed(given["tags"], "tags"))
        made["tool_calls"] = tuple(map(_call, _listed(given["tool_calls"], "tool_calls")))
        self.__dict__.update(made)

    @classmethod
    def of(cls, role: str, content: Content, **others: Any) -> Message:
        """A message with its content, tags and tool calls in any form that is taken."""
        return cls(role, content, **others)  # type: ignore[arg-type]

    def for_template(self, template: Template, markup: Markup) -> dict[str, Any]:
        """As the template gets it: nothing in a text acts as a control token, but those the model said itself."""
        takes, key = template.takes, _reasoning_key(template)
        text = markup.escape(self.content, own=self.role == "assistant") if self.raw is None else self.raw
        made: dict[str, Any] = {"role": self.role}
        if self.reasoning and key:
            text = markup.escape(self.content, own=True) if self.said is None else self.said
            made[key] = markup.escape(self.reasoning)
        made["content"] = content(text, parts=takes.parts(self.role))
        if self.tool_calls:
            made["tool_calls"] = [escaped(_with_arguments(call, takes.objects), markup) for call in self.tool_calls]
        if self.name:
            made["name"] = markup.escape(self.name)
        if self.tool_call_id:
            made["tool_call_id"] = markup.escape(self.tool_call_id)
        return made

    def probed(self, probe: str, *, front: bool) -> Message:
        """With something at the end of all that it says, or in front of it."""

        def put(text: str | None) -> str | None:
            return text and (f"{probe}{text}" if front else f"{text}{probe}")

        return replace(self, content=put(self.content) or probe, raw=put(self.raw), said=put(self.said))


def text_of(given: Any) -> str:
    """The text of a message's content; raises UsageError where it holds something else."""
    if given is None:
        return ""
    if isinstance(given, Mapping) or not isinstance(given, (str, Sequence)) or isinstance(given, (bytes, bytearray)):
        raise UsageError(
            f"content is a text, None or a list of text parts, not a {type(given).__name__}; "
            'a part is {"type": "text", "text": ...}'
        )
    return well_formed(given) if isinstance(given, str) else "\n".join(map(_part, given))


def _part(part: Any) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise UsageError('a part of a message\'s content is {"type": "text", "text": ...}')
    if part["type"] != "text":
        raise UsageError(f"a part of type {part['type']!r} cannot be given to this model: parts are of type 'text'")
    return _text(part.get("text"), "the text of a part")


def _listed(value: Any, what: str) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise UsageError(f"{what} are a list, not a {type(value).__name__}")
    return list(value)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{what} is text, not a {type(value).__name__}")
    return well_formed(value)


def _call(call: Any) -> dict[str, Any]:
    """A tool call, its function in its place; raises UsageError where it is none."""
    if not isinstance(call, Mapping):
        raise UsageError(f"a tool call is a mapping, not a {type(call).__name__}")
    made: dict[str, Any] = data(call)
    if "function" not in made and "name" in made:
        inner: dict[str, Any] = {key: made.pop(key) for key in ("name", "arguments") if key in made}
        made |= {"type": "function", "function": inner}
    function = made.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError('a tool call is {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}')
    if not isinstance(made.get("id", ""), (str, NoneType)):
        raise UsageError(f"the id of a tool call is text, not a {type(made['id']).__name__}")
    if not _object(function.get("arguments")):
        made["function"] = {**function, "arguments": {}}
    return made


def _object(arguments: Any) -> dict[str, Any]:
    """The arguments of a call, given as an object or as its JSON text."""
    problem = f"a {type(arguments).__name__}"
    made: Any
    try:
        made = (
            json.loads(arguments.strip() or "{}")
            if isinstance(arguments, str)
            else {}
            if arguments is None
            else arguments
        )
    except (ValueError, RecursionError) as err:
        made, problem = None, f"{arguments[:_SHOWN]!r} ({err})"
    if not isinstance(made, dict):
        raise UsageError(f"the arguments of a tool call are an object, or one as JSON text, not {problem}")
    return {str(key): value for key, value in made.items()}


def _with_arguments(call: dict[str, Any], objects: bool | None) -> dict[str, Any]:
    """A call with its arguments as a template takes them (:attr:`Takes.objects`)."""
    given = call["function"]["arguments"]
    if objects is None or isinstance(given, str) is not objects:
        return call
    other = _object(given) if objects else json.dumps(given, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": other}}


def data(value: Any) -> Any:
    """A copy of plain data in which every text has UTF-8."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, Mapping):
        return {data(key): data(item) for key, item in value.items()}
    return [data(item) for item in value] if isinstance(value, (list, tuple)) else value


def with_ids(messages: Sequence[Message], *, wanted: bool, short: bool) -> list[Message]:
    """Messages in which a tool's result has the name of its call: of the call with its id, or else of the oldest one
    that has no result yet. ``wanted``: calls and results without ids get some. ``short``: all of nine letters and
    digits."""
    made, waiting, number = list[Message](), list[tuple[str, str]](), 0
    for message in messages:
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                number += 1
                call_id = _id(call.get("id") or f"call{number:05}" * wanted, short=short)
                calls.append({**call, "id": call_id} if call_id else call)
                waiting.append((call_id, call["function"]["name"]))
            message = replace(message, tool_calls=tuple(calls))
        elif message.role == "tool":
            own, name = _id(message.tool_call_id, short=short), message.name
            found = next((w for w in waiting if (w[0] == own if own else name in ("", w[1]))), None)
            if found is not None:
                waiting.remove(found)
            number += found is None
            call_id, called = found or (own or f"call{number:05}" * wanted, name)
            message = replace(message, tool_call_id=call_id, name=name or called)
        made.append(message)
    return made


def _id(given: str, *, short: bool) -> str:
    if not short or not given or (len(given) == _SHORT and given.isascii() and given.isalnum()):
        return given
    return hashlib.blake2b(given.encode(), digest_size=_SHORT).hexdigest()[:_SHORT]


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
