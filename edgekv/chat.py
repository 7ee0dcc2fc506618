"""Chat: a conversation in the model's own template, of any length, of which no turn reads more than what is new in it.

with Session("smollm2", n_ctx=1024) as session:
    chat = Chat(session, system="You are terse.", options=Options(policy=policies.hide_oldest()))
    for piece in chat.ask("Hello!"):
        print(piece, end="")
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import numpy as np

from . import memos, policies
from ._llama import uninterrupted
from .conversation import BESIDE, Conversation, Options
from .errors import ContextFull, MaskUnsupported, TemplateError, UsageError
from .policies import Cut, Policy, SummarizeOldest
from .receipts import Receipt
from .rendering import Ahead
from .reply import Reply
from .sampling import Sampling
from .session import Session
from .template import PLAIN, PLAIN_STOPS, Template
from .turns import PINNED, SUMMARY, Content, Message, Turn

__all__ = ["ASK_SUMMARY", "Chat", "Options"]

ASK_SUMMARY: Final = "Summarise our conversation so far in a few sentences. Keep names, numbers and what was decided."
_RESERVE: Final = 8  # a share of the cache: as much is kept free for an answer, which may get more as it goes on


class Chat(Conversation):
    """A conversation on ``session``, which must be empty, and is the chat's from then on: its tail is not to be
    appended to or rewound by others. Not for several threads at once.

    The template is rendered over all messages, and only the difference to what was read is carried out: new text is
    read; what the template writes otherwise than before (reasoning dropped, system text moved) is masked or put in
    where it stands, as ``notes`` say. The tokens are those of the rendered whole, but for answers, which stay as
    sampled.

    After each step the session is checked to hold, visibly, what the template wrote, but for what somebody hid and what
    ``notes`` name. ChatBroken says that it does not: every verb raises it from then on, and ``messages`` are there for
    a new chat.

    template: Jinja; the model's own by default, or a plain one where it has none. system: the system text. now: the
    date a template may tell.

    Raises TemplateError, UsageError (the session is not empty; a policy where nothing can be masked).
    """

    def __init__(
        self,
        session: Session,
        *,
        system: Content = None,
        template: str | None = None,
        options: Options = Options(),
        now: datetime | None = None,
    ) -> None:
        if len(session.tokens):
            raise UsageError("a chat begins on an empty session; Chat.load opens a saved one")
        source = template or session.model.chat_template
        self._begin(session, _template(session, source or PLAIN, now), options)
        if source is None:
            self._following.notes.append(
                f"{session.model.path.name} has no chat template: a plain one is used, and a base model may go on "
                "talking rather than answer"
            )
        if system is not None:
            try:
                self.add("system", system)
            except TemplateError:  # some want a user's message, too
                self._waiting = (self._turn(Message.of("system", system)),)

    # -- talking ------------------------------------------------------------------------------------------------

    def add(
        self,
        role: str,
        content: Content,
        *,
        name: str = "",
        tool_calls: Iterable[dict[str, Any]] = (),
        tool_call_id: str = "",
        tags: Iterable[str] = (),
    ) -> Turn:
        """Evaluate a message of anybody's; returns its turn.

        content: text, None for none, or a list of {"type": "text", "text": ...}. name: of the tool, for a tool's
        result. tool_calls: as in OpenAI's chat API, arguments as JSON text or as an object. tool_call_id: of the call
        that a result belongs to; without one, it belongs to the oldest call that has none yet.

        Raises ContextFull (the policy cannot make room), TemplateError (the template refuses it, or leaves it out),
        UsageError (no role can be called that; no such content or call); then it is no part of the conversation. What
        the template writes otherwise from now on may be hidden already. ChatBroken: see :class:`Chat`.
        """
        self._end_reply()
        message = Message.of(role, content, tool_calls=tool_calls, name=name, tags=tags, tool_call_id=tool_call_id)
        self._go_to((*self.turns, self._turn(message)), opening=False)
        return self.turns[-1]

    def ask(
        self,
        content: Content,
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        tags: Iterable[str] = (),
    ) -> Reply:
        """Evaluate a user's message and begin the answer. Raises as :meth:`add`."""
        self._end_reply()
        message = Message.of("user", content, tags=tags)
        return self._answer((*self.turns, self._turn(message)), max_tokens, sampling)

    def reply(self, *, max_tokens: int | None = None, sampling: Sampling | None = None) -> Reply:
        """An answer to what was said so far, such as a tool's result. Raises as :meth:`add`."""
        self._end_reply()
        if not self.turns:
            raise UsageError("there is nothing to answer yet; ask something")
        return self._answer(self.turns, max_tokens, sampling)

    def _answer(self, turns: tuple[Turn, ...], max_tokens: int | None, sampling: Sampling | None) -> Reply:
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, not {max_tokens}")
        most = max_tokens or self.options.max_tokens
        self._go_to(turns, opening=True, reserve=min(most, self.session.engine.num_cells // _RESERVE))
        stops = PLAIN_STOPS if self.template.source == PLAIN else ()
        self._reply = Reply(self, self.session.generate(most, sampling=sampling, stop=stops, special=True))
        return self._reply

    def settle(self) -> None:
        """Read what the template writes behind the last answer; the next message would do so, too."""
        self._end_reply()
        self._go_to(self.turns, opening=False)

    def _go_to(self, turns: tuple[Turn, ...], *, opening: bool, reserve: int = 0, own: bool = False) -> None:
        """Make room, then follow the template there. Ctrl-C waits for a place where text and tokens agree."""
        waiting = self._waiting if turns and not self.turns else ()
        new = [turn.name for turn in (*waiting, *turns) if not any(turn.name == old.name for old in self.turns)]
        done = False
        try:
            with uninterrupted():
                self._follow_with_room((*waiting, *turns), opening=opening, reserve=reserve, own=own)
                done = True
        except KeyboardInterrupt:
            # It came when all was read: a message stays with its answer, or not at all.
            if done and new and [turn.name for turn in self.turns[-len(new) :]] == new:
                with uninterrupted():
                    self._following.back_to(len(self.turns) - len(new))
            raise
        self._waiting = () if self.turns else self._waiting

    def _follow_with_room(self, turns: tuple[Turn, ...], *, opening: bool, reserve: int, own: bool) -> None:
        ahead = self._with_room(turns, opening=opening, reserve=reserve)
        try:
            self._follow(ahead, own=own)
        except ContextFull:
            if self._summing:
                raise
            # What the template rewrote took more cells than its new text has tokens; the rest is made room for again.
            again = self._following.ahead(ahead.turns, opening=opening)
            self._make_room(again, reserve, self.options.policy and policies.NONE)
            self._follow(again, own=own)

    def _with_room(self, turns: tuple[Turn, ...], *, opening: bool, reserve: int) -> Ahead:
        ahead = self._following.ahead(turns, opening=opening)
        if self._summing:
            self._room.free(ahead.num_tokens + reserve + BESIDE)
            return ahead
        before = self.script
        self._make_room(ahead, reserve, self.options.policy)
        if self.script is not before:  # a summary has come in between, or was tried, and takes cells itself
            ahead = self._following.ahead(self._merged(turns), opening=opening)
            self._make_room(ahead, reserve, self.options.policy and policies.NONE)
        return ahead

    def _merged(self, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
        """The turns there are, with what is new in others: messages, and turns in front and behind."""
        given, known = {turn.name: turn for turn in turns}, {turn.name for turn in self.turns}
        kept = [replace(turn, message=given.get(turn.name, turn).message) for turn in self.turns]
        first = [turn for turn in turns[:1] if turn.name not in known and len(turns) > 1 and turns[1].name in known]
        return (*first, *kept, *(turn for turn in turns[len(first) :] if turn.name not in known))

    def _follow(self, ahead: Ahead, *, own: bool = False) -> None:
        before = len(self._following.receipts)
        try:
            self._following.go_to(ahead, own=own)
        finally:
            self._room.mine(r for receipt in self._following.receipts[before:] for r in receipt.ranges)

    def _make_room(self, ahead: Ahead, reserve: int, policy: Policy | None) -> None:
        """Hide what there is no room for, by a policy and beyond it. Raises ContextFull before anything is hidden."""
        need, opens = ahead.num_tokens + BESIDE, any(t.message.role == "user" for t in ahead.turns if not t.read)
        cuts = self._room.plan(policy, need, reserve, opens=opens)
        self._note_beyond(cuts)
        self._hide(cuts)
        self._room.free(need + reserve, need)

    def _hide(self, cuts: tuple[Cut, ...], *, kept: bool | None = None) -> list[Receipt]:
        """Hide what a policy named; what is to be summed up is summed up first, ``kept`` as in :meth:`summarize`."""
        old = [cut for cut in cuts if cut.summarise]
        if old:
            parts = self.options.policy.parts if self.options.policy is not None else ()
            wanted = all(p.kept for p in parts if isinstance(p, SummarizeOldest))
            self._summarise(old, kept=wanted if kept is None else kept)
        return self._room.hide_cuts(cuts, then=self.options.then)

    # -- summaries ----------------------------------------------------------------------------------------------

    def summarize(self, keep: int = 1, *, kept: bool = True) -> tuple[Cut, ...]:
        """Sum up all exchanges but the newest ``keep``, then hide them; returns what was hidden.

        kept: the summary stays on the cache as it was generated, with everything in view, at the end of the
        conversation; else it is made on a fork of what is summed up and read again in its place, clean of it.
        Raises MaskUnsupported where nothing can be hidden, before anything is generated.
        """
        self.session._need_mask()
        self._end_reply()
        cuts = tuple(replace(cut, summarise=True) for cut in policies.keep_turns(keep).plan(self.view()))
        if cuts:
            self._hide(cuts, kept=kept)
        return cuts

    def _summarise(self, cuts: list[Cut], *, kept: bool) -> None:
        """A summary of what is in view, as an exchange of its own; earlier ones are hidden, as it takes them in."""
        earlier = [turn for turn in self.turns if SUMMARY in turn.message.tags]
        before, self._summing = len(self.turns), True
        try:
            if kept:
                _whole(self.ask(ASK_SUMMARY, max_tokens=self.options.summary_tokens, tags=[SUMMARY]))
            else:
                self._put_summary(cuts)
        except BaseException as err:
            with uninterrupted():
                self._following.back_to(before)  # half a summary is none
            if not isinstance(err, (ContextFull, MaskUnsupported, TemplateError)):
                raise
            self._following.note(f"turns were hidden without a summary: {err}")
            return
        finally:
            self._summing = False
        system = {i for turn in self.turns if turn.message.role == "system" for i in range(*turn.range)}
        self._room.hide(i for turn in earlier for i in range(*turn.range) if i not in system)

    def _put_summary(self, cuts: list[Cut]) -> None:
        """Sum turns up on a fork that knows nothing later, and read the summary behind them, without them in view."""
        last = max(k for k, turn in enumerate(self.turns) if any(cut.name == turn.name for cut in cuts))
        with self.session.fork() as session:
            other = self._forked(session)
            other._following.back_to(last + 1)
            text = _whole(other.ask(ASK_SUMMARY, max_tokens=self.options.summary_tokens)).text
        hidden = self._room.hide_cuts(cuts)
        pair = [Message("user", ASK_SUMMARY, tags=(SUMMARY,)), Message("assistant", text, tags=(SUMMARY,))]
        turns = (*self.turns[: last + 1], *(self._turn(m) for m in pair), *self.turns[last + 1 :])
        try:
            self._follow(self._following.ahead(turns, opening=False), own=True)
        except BaseException:
            with uninterrupted():
                for receipt in hidden:
                    self.session.unmask(list(receipt.ranges))
                self._room.shown()
            raise

    # -- other texts --------------------------------------------------------------------------------------------

    def set_system(self, content: Content) -> None:
        """Another system text, in the place of the old one; what stands after it is not evaluated again, and was
        computed with the old one in view. Hidden if the old one is. Raises as :meth:`add`, and MaskUnsupported where
        there is text already and this model's memory allows no edit; then the old one stands."""
        if self.turns:
            self.session._need_mask()
        self._end_reply()
        first, message = self.turns[:1], Message.of("system", content)
        if self._waiting and not first:
            self._waiting = (replace(self._waiting[0], message=message),)
            return
        if first and first[0].message.role == "system":
            turns = (replace(first[0], message=replace(first[0].message, content=message.content)), *self.turns[1:])
        else:
            turns = (self._turn(message), *self.turns)
        self._go_to(turns, opening=False, own=True)

    def attach(self, path: str | os.PathLike[str], *, name: str | None = None) -> Receipt:
        """Take in a KV module between two turns, as Session.attach; it belongs to no message, and policies leave it."""
        if not self.session.model.capabilities.park:
            raise MaskUnsupported(self.session.model.capabilities.park.reason)
        self.settle()
        self._following.begin()
        return self.session.attach(path, name=name, tags=["document", PINNED])

    # -- branches and files -------------------------------------------------------------------------------------

    def fork(self) -> Chat:
        """A second conversation that goes on from here on the same cells; close its session when it is done with."""
        self._end_reply()
        return self._forked(self.session.fork())

    def _forked(self, session: Session) -> Chat:
        other = object.__new__(Chat)
        other.__dict__.update(self.__dict__, session=session, _reply=None)
        other._following, other._room = self._following.fork(session), self._room.fork(session)
        return other

    def save(self, path: str | os.PathLike[str], *, kv: bool = True) -> int:
        """As Session.save, with the messages; :meth:`load` goes on from there. Options are not kept."""
        self._end_reply()
        self.session.memo = memos.write(self._following, self._room.hidden, self._count)
        return self.session.save(path, kv=kv)

    @classmethod
    def load(cls, session: Session, *, options: Options = Options()) -> Chat:
        """The chat of a session that Session.load has opened. Raises WrongFile where it holds none."""
        memo = memos.read(session)
        chat = object.__new__(cls)
        chat._begin(session, _template(session, memo.template, memo.now), options)
        memos.fill(memo, chat._following)
        chat._count, chat._room.hidden = memo.count, np.asarray(memo.hidden, np.int64)
        return chat


def _whole(reply: Reply) -> Reply:
    """A reply, said to its end. Raises ContextFull where the cache was full before."""
    if reply.finish().full:
        raise ContextFull(reply.full)
    return reply


def _template(session: Session, source: str, now: datetime | None) -> Template:
    return Template(source, bos=session.model.bos_text, eos=session.model.eos_text, now=now)
