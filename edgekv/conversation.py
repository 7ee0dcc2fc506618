"""Conversation: what a chat holds, how it is looked at, and what is hidden in it by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from . import answers
from .columns import State
from .errors import BadState, UsageError
from .following import Following
from .generation import Generation
from .markup import plain
from .policies import BlockMarkers, Cut, Policy, View
from .receipts import Receipt
from .reply import Reply
from .room import Room
from .script import Script
from .session import Session
from .spans import Span, SpanTable, Target
from .template import Template
from .turns import PINNED, SUMMARY, Message, Turn
from .wording import count

_GO_ON: Final = 32  # cells that are made free at once when an answer runs out of them
BESIDE: Final = 2  # cells beside new tokens: one that is read again, one to go on


@dataclass(frozen=True)
class Options:
    """How a chat is led.

    policy: what to hide as it grows (:mod:`edgekv.policies`); None: nothing, and ContextFull when the cache is full.
    spill: what becomes of what the policy hid when its cells are needed: "evict" (its text stays known) or "park" (K
    and V wait in host memory); what somebody hid by hand is parked. then: as in Session.mask. max_tokens: of an
    answer; summary_tokens: of a summary. tools: for the template, as in OpenAI's chat API. variables: others that it
    takes, such as {"enable_thinking": False}.
    """

    policy: Policy | None = None
    spill: str = "evict"
    then: str = "none"
    max_tokens: int = 512
    summary_tokens: int = 160
    tools: tuple[dict[str, Any], ...] = ()
    variables: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.spill not in ("evict", "park"):
            raise UsageError(f"spill is 'evict' or 'park', not {self.spill!r}")
        if self.then not in ("none", "auto", "recompute"):
            raise UsageError(f"then is 'none', 'auto' or 'recompute', not {self.then!r}")
        if self.max_tokens < 1 or self.summary_tokens < 1:
            raise UsageError("an answer and a summary take at least one token")


class Conversation:
    """See :class:`~edgekv.chat.Chat`."""

    def _begin(self, session: Session, template: Template, options: Options) -> None:
        self.session = session
        self._set_options(options)
        self._following = Following(session, template, options.tools, options.variables)
        self._reply: Reply | None = None
        self._count = 0
        self._room = Room(session, options.spill)
        self._summing = False
        self._waiting: tuple[Turn, ...] = ()

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def messages(self) -> tuple[Message, ...]:
        """All of them, hidden ones too."""
        return tuple(turn.message for turn in self.turns)

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self._following.turns

    @property
    def script(self) -> Script:
        """The text the template makes, and its tokens."""
        return self._following.script

    def rendered(self, *, opening: bool = False) -> str:
        """What the template makes of all messages, with a mark in what a person spelled like a control token (see
        :mod:`edgekv.markup`); ``opening``: with the beginning of an answer. Raises TemplateError."""
        return self._following.render(self.messages, opening=opening)

    @property
    def template(self) -> Template:
        return self._following.template

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of how this template is followed."""
        return tuple(self._following.notes)

    @property
    def num_reread(self) -> int:
        """Tokens at the end of the text that were read a second time, as they are tokenized with what follows."""
        return self._following.num_reread

    @property
    def options(self) -> Options:
        return self._options

    @options.setter
    def options(self, options: Options) -> None:
        self._set_options(options)
        self._room.spill = options.spill
        self._following.tools, self._following.variables = options.tools, dict(options.variables or {})

    def _set_options(self, options: Options) -> None:
        if options.policy is not None and not self.session.model.capabilities.mask:
            raise UsageError(f"no policy can hide anything here: {self.session.model.capabilities.mask.reason}")
        self._options = options

    def view(self, need: int = 0) -> View:
        """The session as a policy sees it, when ``need`` cells are wanted."""
        return self._room.view(need)

    def plan(self, policy: Policy | None = None, need: int = 0) -> tuple[Cut, ...]:
        """What a policy, or the chat's own, would hide now, and why; nothing changes."""
        chosen = policy or self.options.policy
        return () if chosen is None else chosen.plan(self.view(need))

    # -- turns --------------------------------------------------------------------------------------------------

    def _turn(self, message: Message) -> Turn:
        if message.role == "system" and not any(turn.name == "system" for turn in self.turns):
            return Turn("system", message)
        SpanTable().check_name(message.role)
        if self._following.markup.escape(message.role) != message.role:
            raise UsageError(f"{message.role!r} is no role: it holds a token that acts in a template")
        self._count += 1
        return Turn(f"{SUMMARY if SUMMARY in message.tags else message.role}-{self._count}", message)

    def _end_reply(self) -> None:
        """An answer that is still open ends where it is. Every verb begins with this; raises ChatBroken."""
        self._following.refuse_broken()
        if self._reply is not None:
            self._reply.close()
            self._reply = None

    # -- for Reply ----------------------------------------------------------------------------------------------

    @property
    def opening(self) -> str:
        return self._following.opening

    def ended(self, reply: Reply, generation: Generation) -> Message:
        """What a generation said is part of the conversation: the answer as a message, and its turn."""
        self._following.take(generation)
        start = self._following.said_from
        answer = answers.parse(self.script.text[start:], self.opening)
        content, half = plain(answer.text), "\ufffd" if generation.inside_character else ""
        message = Message(
            "assistant", content.removesuffix(half), plain(answer.reasoning), raw=answer.raw, said=answer.text
        )
        turn = self._turn(replace(message, tags=(SUMMARY,) if self._summing else ()))
        thinking = None if answer.thinking is None else (start + answer.thinking[0], start + answer.thinking[1])
        self._following.answered(turn.name, turn.message, thinking)
        if self._reply is reply:
            self._reply = None
        return turn.message

    def ran_out(self) -> None:
        """An answer has ended as the cache is full."""
        if not self._summing:
            self._following.note(
                "an answer was cut short as the cache was full and nothing was left to hide; shorter messages or a "
                "larger n_ctx leave more room for it"
            )

    def block_ended(self, raw: str, after: int) -> bool:
        """Whether a block of reasoning that is to be hidden has got its summary."""
        return any(policy.finished(raw, after) for policy in self._block_markers)

    def hide_blocks(self, generation: Generation) -> list[Receipt]:
        """Hide the blocks of the answer that is being said, as a model trained for it expects: the next token still
        comes from the logits that saw them."""
        said = self._following.markup.said(np.asarray(generation.tokens, np.int32))
        script, index = Script.empty().appended(said, 0), self._following.indexes_of(generation)
        blocks = [script.inside(a, b) for policy in self._block_markers for a, b in policy.finished(said.text)]
        with self.session.midway():
            return self._room.hide((i for a, b in blocks for i in index[a:b].tolist()), refresh_last=False)

    @property
    def _block_markers(self) -> list[BlockMarkers]:
        policy = self.options.policy
        return [] if policy is None else [p for p in policy.parts if isinstance(p, BlockMarkers)]

    def room_to_go_on(self, generation: Generation) -> list[Receipt]:
        """Free cells for an answer that runs out of them. Raises ContextFull where nothing is left to hide."""
        ended = generation.finished or len(generation.tokens) >= generation.request.max_tokens
        if ended or self.session.engine.cells_free >= BESIDE:
            return []
        with self.session.midway():
            cuts = self._room.plan(self.options.policy, BESIDE, _GO_ON - BESIDE, opens=False)
            if any(cut.summarise for cut in cuts):
                self._following.note("turns were hidden without a summary: room ran out in the middle of an answer")
            self._note_beyond(cuts)
            return [*self._room.hide_cuts(cuts), *self._room.free(_GO_ON)]

    def _note_beyond(self, cuts: tuple[Cut, ...]) -> None:
        if any(cut.beyond for cut in cuts):
            self._following.note(
                f"{self.options.policy} alone makes too little room for what came next: more was hidden, the oldest "
                "first; a larger n_ctx or shorter messages keep more in view"
            )

    # -- hiding -------------------------------------------------------------------------------------------------

    def mask(self, target: Target) -> Receipt:
        """As Session.mask; of a first turn, the tokens that draw attention as sinks stay."""
        self.session._need_mask()
        self._end_reply()
        return self.session.mask(self._room.but_sinks(target), then=self.options.then)

    def unmask(self, target: Target) -> Receipt:
        """As Session.unmask, but what the template has dropped stays hidden."""
        self.session._need_mask()
        self._end_reply()
        wanted = self.session.indexes_of(target)
        hidden = np.concatenate([self.session.indexes(State.MASKED), self.session.indexes(State.PARKED)])
        back = np.setdiff1d(np.intersect1d(wanted, hidden), self._dropped)
        if not len(back) and np.isin(wanted, self._dropped).any():
            raise BadState("the template writes that no longer: it stays hidden")
        receipt = self.session.unmask(self.session.ranges(back) if len(back) else target)
        self._room.shown()
        return receipt

    def park(self, target: Target) -> Receipt:
        """As Session.park, and :meth:`mask`."""
        self.session._need_mask()
        self._end_reply()
        return self.session.park(self._room.but_sinks(target))

    def evict(self, target: Target) -> Receipt:
        """As Session.evict, and :meth:`mask`."""
        self.session._need_mask()
        self._end_reply()
        return self.session.evict(self._room.but_sinks(target))

    def undo(self) -> Receipt:
        """Take the newest edit back, as Session.undo.

        Raises BadState for one that changed the conversation's text or made room, which stays; the next undo takes the
        newest one before it that can be taken back.
        """
        self._end_reply()
        journal, edit = self.session._transcript.journal, self.session.last_edit
        if edit is not None and (why := self._why_it_stays(edit)):
            while edit is not None and self._why_it_stays(edit):
                journal.pass_over()
                edit = self.session.last_edit
            rest = f"the next undo takes the {edit.verb} before it" if edit is not None else "there is none before it"
            raise BadState(f"the newest edit ({why}; {rest}")
        receipt = self.session.undo()
        self._room.shown()
        self._following.check()
        return receipt

    def _why_it_stays(self, edit: Receipt) -> str:
        """Why an edit is no matter of an undo by hand, "" where it is."""
        fixed = np.union1d(self._dropped, self._following.put_hidden)
        if edit.verb in ("insert", "replace", "rewind") or _touches(edit, fixed):
            return f"{edit.verb}) changed the text of the conversation, which follows its template: it stays as it is"
        gone = np.intersect1d(self._room.hidden, self.session.indexes(State.EVICTED))
        if _touches(edit, gone):
            return f"{edit.verb}) made room: {count(edit.tokens, 'token')} would have to be evaluated again"
        return ""

    @property
    def _dropped(self) -> npt.NDArray[np.int64]:
        """The indexes of what the template has dropped."""
        return np.setdiff1d(self._room.hidden, self.script.index)

    def pin(self, target: Target, *, pinned: bool = True) -> tuple[str, ...]:
        """Keep turns and other spans from every policy, or no longer; returns the names of those in the target."""
        self._end_reply()
        place = self.session.indexes_of(target)
        spans = [s for s in self.session.spans if len(s) and np.isin(self.session.indexes_of(s), place).all()]
        if not spans:
            raise UsageError("no whole span lies in that target; name one")
        self._following.turns = tuple(self._pinned(turn, spans, pinned) for turn in self.turns)
        for span in spans:
            tags = span.tags | {PINNED} if pinned else span.tags - {PINNED}
            self.session.mark(span.range, span.name, role=span.role, tags=tags)
        return tuple(span.name for span in spans)

    @staticmethod
    def _pinned(turn: Turn, spans: list[Span], pinned: bool) -> Turn:
        if not any(span.name == turn.name for span in spans):
            return turn
        tags = tuple(tag for tag in turn.message.tags if tag != PINNED)
        return replace(turn, message=replace(turn.message, tags=(*tags, PINNED) if pinned else tags))


def _touches(edit: Receipt, indexes: npt.NDArray[np.int64]) -> bool:
    return any(((a <= indexes) & (indexes < b)).any() for a, b in edit.ranges)
