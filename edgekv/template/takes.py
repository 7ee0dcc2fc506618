"""What a template takes: found out by rendering short conversations, as llama.cpp (common/jinja/caps.cpp) and
transformers do.

Some templates take a message's content as a list of typed parts only, a tool call's arguments only as an object or only
as JSON text, or only ids of nine characters. A message is given to each as it takes it.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from edgekv.errors import TemplateError

if TYPE_CHECKING:
    from edgekv.template import Template

_WORDS: Final = "edgekvprobe"
_KEY: Final = "edgekvkey"
_ID: Final = "callabcde"


class Takes:
    """Of one template; each answer is found when it is asked for first, and kept."""

    def __init__(self, template: Template) -> None:
        self._template: Final = template
        self._parts: dict[str, bool] = {}

    def parts(self, role: str) -> bool:
        """Whether the content of messages of that role is to be a list of typed parts: text is not written, or
        refused."""
        known = self._parts.get(role)
        if known is None:
            as_text, as_parts = (
                self._writes({"role": role, "content": content(_WORDS, parts=p)}) for p in (False, True)
            )
            known = self._parts[role] = as_parts and not as_text
        return known

    def _writes(self, message: dict[str, Any]) -> bool:
        """Whether it writes what a message says, at the place of its role in a conversation."""
        if message["role"] == "user":
            return _WORDS in self._rendered([message])
        asked = {"role": "user", "content": content("another", parts=self.parts("user"))}
        if message["role"] == "system":
            return _WORDS in self._rendered([message, asked])
        if message["role"] == "tool":
            message = {**message, "name": "look", "tool_call_id": _ID}
            calls = [_calls(arguments, _ID) for arguments in ({_KEY: "a"}, json.dumps({_KEY: "a"}))]
            if any(_WORDS in self._rendered([asked, call, message]) for call in calls):
                return True
        return _WORDS in self._rendered([asked, message])

    @cached_property
    def objects(self) -> bool | None:
        """Whether the arguments of a tool call are to be an object (True) or JSON text (False); None: it writes
        either right, or no calls."""
        as_object = self._with_call({_KEY: _WORDS}, _ID)
        as_text = self._with_call(json.dumps({_KEY: _WORDS}), _ID)
        if _WORDS not in as_object or f"'{_KEY}'" in as_object:  # refused, or as Python writes it
            return False if _WORDS in as_text else None
        return True if _WORDS not in as_text or f'\\"{_KEY}' in as_text else None

    @cached_property
    def short_ids(self) -> bool:
        """Whether it refuses ids of tool calls but those of nine letters and digits."""
        return bool(self._any_call(_ID)) and not self._any_call("call_abcdefghijkl")

    def _any_call(self, call_id: str) -> str:
        return self._with_call({_KEY: _WORDS}, call_id) or self._with_call(json.dumps({_KEY: _WORDS}), call_id)

    def _with_call(self, arguments: Any, call_id: str) -> str:
        asked = {"role": "user", "content": content("another", parts=self.parts("user"))}
        result = {"role": "tool", "content": content("another", parts=self.parts("tool"))}
        result |= {"name": "look", "tool_call_id": call_id}
        call = _calls(arguments, call_id)
        return self._rendered([asked, call, result]) or self._rendered([asked, call])

    def _rendered(self, messages: list[dict[str, Any]]) -> str:
        """A text, "" where the template refuses."""
        try:
            return self._template.render(messages)
        except TemplateError:
            return ""


def _calls(arguments: Any, call_id: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def content(text: str, *, parts: bool) -> Any:
    """A text as a template gets it."""
    return [{"type": "text", "text": text}] if parts else text
