"""Rendering: what a chat template writes of a list of turns, and how that differs from what was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from .errors import TemplateError
from .markup import Markup
from .receipts import Receipt
from .script import Hunk, Script, changes, common
from .session import Session
from .template import Template
from .turns import Message, Turn, escaped, with_ids

_PROBE: Final = "\ufdd1"  # a code point nobody writes


@dataclass(frozen=True)
class Ahead:
    """What comes next: the turns, what the template makes of them, and what that changes. opening: whether the model's
    own turn is begun. num_tokens: about how many are to be read."""

    turns: tuple[Turn, ...]
    text: str
    hunks: tuple[Hunk, ...]
    opening: bool
    num_tokens: int


class Rendering:
    """See :class:`~edgekv.following.Following`."""

    def __init__(
        self,
        session: Session,
        template: Template,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.session, self.template = session, template
        self.tools, self.variables = tuple(tools), dict(variables or {})
        self.markup: Final = Markup(session.model, template.source)
        self.script = Script.empty()
        self.turns: tuple[Turn, ...] = ()
        self.opening = ""
        self.notes: list[str] = []
        self.receipts: list[Receipt] = []
        self.num_reread = 0
        self._own = False
        self.put_hidden = np.empty(0, np.int64)
        self.broken = ""
        self.said_from = self._opening_at = 0
        self.preamble: Final = self._find_preamble()

    # -- what the template writes -------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], *, opening: bool, tools: bool = True) -> str:
        """The conversation as text; raises TemplateError. tools: whether the template gets them."""
        if not messages and not opening:
            return ""
        wanted = self.template.mentions("tool_call_id") or self.template.mentions("id")
        messages = with_ids(messages, wanted=wanted, short=wanted and self.template.takes.short_ids)
        written = [m.for_template(self.template, self.markup) for m in messages]
        given = escaped(self.tools, self.markup) if tools else ()
        text = self.template.render(written, add_generation_prompt=opening, tools=given or None, **self.variables)
        return text if not self._first or text.lstrip().startswith(self._first) else self._first + text

    @property
    def _first(self) -> str:
        """The BOS where a text is to begin with it, "" elsewhere."""
        model = self.session.model
        return "" if model.bos is None else model.bos_text

    def ahead(self, turns: tuple[Turn, ...], *, opening: bool) -> Ahead:
        """What it takes to get to those turns; nothing changes. Raises TemplateError, also for a message that the
        template leaves out."""
        text = self.render([turn.message for turn in turns], opening=opening)
        self._find_left_out([turn.message for turn in turns], [t.read for t in turns], text, opening)
        hunks = tuple(self._changes(turns, text))
        lexed = [self.markup.lex(hunk.text) for hunk in hunks]
        if any(part.lossy.any() for part in lexed):
            self.note("this vocabulary has no token for some letters of the text: the model sees it without them")
        return Ahead(turns, text, hunks, opening, sum(len(part.ids) for part in lexed))

    def _find_left_out(self, messages: list[Message], read: list[bool], text: str, opening: bool) -> None:
        """Note what of these messages and tools the template does not write, if it would be for the model to see;
        raise TemplateError for what a user or a tool says."""

        def unwritten(k: int, other: Message) -> bool:
            return self._same_text(text, [*messages[:k], other, *messages[k + 1 :]], opening)

        asked = any(message.role == "user" for message in messages)
        for k, message in enumerate(messages):
            if read[k] or (message.role == "system" and not asked):
                continue
            if message.content.strip() and unwritten(k, message.probed(_PROBE, front=False)):
                if message.role not in ("system", "assistant"):
                    raise TemplateError(
                        f"the chat template leaves out what a message of role {message.role!r} says; give it another "
                        "role, or give another template"
                    )
                self.note(
                    f"the template leaves out what a message of role {message.role!r} says: the model does not see it"
                )
            if message.tool_calls and unwritten(k, replace(message, tool_calls=())):
                self.note("the template leaves out tool calls: the model does not see them")
        if self.tools and asked and self._same_text(text, messages, opening, tools=False):
            self.note("the template takes no tools: the model is not told of them")

    def _same_text(self, text: str, messages: list[Message], opening: bool, *, tools: bool = True) -> bool:
        try:
            return self.render(messages, opening=opening, tools=tools) == text
        except TemplateError:
            return False

    def note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _changes(self, turns: tuple[Turn, ...], text: str) -> list[Hunk]:
        if text.startswith(self.script.text):
            return changes(self.script.text, text, self.markup.split)
        return changes(self.script.text, text, self.markup.split, self._seams(turns, text), self._anchors(turns, text))

    def _anchors(self, turns: tuple[Turn, ...], text: str) -> list[tuple[int, int]]:
        """Where messages that both texts hold end in each, behind what the two begin with alike."""
        ours, old = self.script.text, self._rendered(self.turns)
        same, alike, new = common(ours, text), common(ours, old), {turn.name: k for k, turn in enumerate(turns)}
        found = [(0, 0)]
        for k, turn in enumerate(self.turns):
            if turn.message.role == "system" or turn.name not in new or self._end_of(turn) <= same:
                continue
            here, there = self._place_of(self.turns, k, old), self._place_of(turns, new[turn.name], text)
            if here and k + 1 == len(self.turns) and self.script.said[-1:].any():
                here = alike = len(ours)  # an answer that was just said: nothing of its end is written yet
            if found[-1][0] < here <= alike and there > found[-1][1]:
                found.append((here, there))
        return found[1:]

    def _end_of(self, turn: Turn) -> int:
        """The character behind a turn."""
        here = np.flatnonzero((self.script.index >= turn.range[0]) & (self.script.index < turn.range[1]))
        return int(self.script.ends[here[-1]]) if len(here) else 0

    def _place_of(self, turns: Sequence[Turn], k: int, text: str, *, front: bool = False) -> int:
        """Where the content of a message ends in a rendered text, or begins: there another content makes another text.
        0 where it is not written."""
        messages = [turn.message for turn in turns]
        messages[k] = messages[k].probed(_PROBE, front=front)
        other = self._rendered_of(messages)
        return common(text, other) if other and other[: len(text)] != text[: len(other)] else 0

    def _rendered(self, turns: Sequence[Turn]) -> str:
        return self._rendered_of([turn.message for turn in turns])

    def _rendered_of(self, messages: Sequence[Message]) -> str:
        """A text, "" where the template refuses."""
        try:
            return self.render(messages, opening=False)
        except TemplateError:
            return ""

    def _seams(self, turns: tuple[Turn, ...], text: str) -> list[int]:
        """Where new turns begin in a text."""
        new = [k for k, turn in enumerate(turns) if not turn.read]
        return [at for k in new if (at := self._num_rendered(turns[:k], text)) is not None]

    def _num_rendered(self, turns: Sequence[Turn], text: str) -> int | None:
        """How many characters of the text these turns take; None where it does not begin with them."""
        part = self._rendered(turns)
        return len(part) if part and text.startswith(part) else None

    def _find_preamble(self) -> str:
        """What the template says in front of a first user turn by itself: a date, a system text of its own."""
        words = [Message("user", "edgekvprobeone"), Message("assistant", "edgekvprobetwo")]
        try:
            closed = self.render(words, opening=False)
            after = self.render([*words, Message("user", "edgekvprobesix")], opening=False)
        except TemplateError:
            return ""
        first, second = closed.find(words[0].content), closed.find(words[1].content)
        begins = after[len(closed) : after.find("edgekvprobesix")] if after.startswith(closed) else ""
        if first < 0 or second < 0 or not begins or not closed[:first].endswith(begins):
            return ""
        return closed[: first - len(begins)]
