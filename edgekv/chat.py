"""Chat: a conversation in the model's own template, of any length, of which no turn costs more than what is new in it.

with Session("smollm2", n_ctx=1024) as session:
    chat = Chat(session, system="You are terse.", options=Options(policy=policies.hide_oldest()))
    for piece in chat.ask("Hello!"):
        print(piece, end="")
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from . import answers, memos, policies
from ._llama import uninterrupted
from .columns import State
from .errors import BadState, ContextFull, MaskUnsupported, UsageError
from .following import Ahead, Following
from .generation import Generation
from .policies import BlockMarkers, Cut, Policy, SummarizeOldest, View
from .receipts import Receipt
from .reply import Reply
from .room import Room
from .sampling import Sampling
from .script import Script
from .session import Session
from .spans import Target
from .template import PLAIN, PLAIN_STOPS, Template
from .turns import PINNED, SUMMARY, Message, Turn

ASK_SUMMARY: Final = "Summarise our conversation so far in a few sentences. Keep names, numbers and what was decided."
_GO_ON: Final = 32  # cells that are made free at once when an answer runs out of them
_RESERVE: Final = 8  # a share of the cache: as much is kept free for an answer, which may get more as it goes on
_BESIDE: Final = 2  # cells beside the new tokens: one that is read again, one to go on


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


class Chat:
    """A conversation on ``session``, which must be empty, and is the chat's from then on: its tail is not to be
    appended to or rewound by others. Not for several threads at once.

    The template is rendered over all messages, and only the difference to what was read is carried out: new text is
    read; what the template writes otherwise than before (reasoning dropped, system text moved) is masked or put in
    where it stands, as ``notes`` say. The tokens are those of the rendered whole, but for answers, which stay as
    sampled.

    template: Jinja; the model's own by default, or a plain one where it has none. system: the system text. now: the
    date a template may tell.

    Raises TemplateError, UsageError (the session is not empty; a policy where nothing can be masked).
    """

    def __init__(
        self,
        session: Session,
        *,
        system: str | None = None,
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
            self.add("system", system)

    def _begin(self, session: Session, template: Template, options: Options) -> None:
        self.session = session
        self._set_options(options)
        self._following = Following(session, template, options.tools, options.variables)
        self._reply: Reply | None = None
        self._count = 0
        self._room = Room(session, options.spill)
        self._summing = False

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

    # -- talking ------------------------------------------------------------------------------------------------

    def add(
        self,
        role: str,
        content: str,
        *,
        name: str = "",
        tool_calls: Iterable[dict[str, Any]] = (),
        tags: Iterable[str] = (),
    ) -> Turn:
        """Read a message of anybody's; returns its turn. ``name``: of the tool, for a tool's result.

        Raises ContextFull (the policy cannot make room), TemplateError (the template refuses it); then the
        conversation is as it was.
        """
        self._end_reply()
        message = Message(role, content, "", tuple(tool_calls), name, tuple(tags))
        self._go_to((*self.turns, self._turn(message)), opening=False)
        return self.turns[-1]

    def ask(
        self, content: str, *, max_tokens: int | None = None, sampling: Sampling | None = None, tags: Iterable[str] = ()
    ) -> Reply:
        """Read a user's message and begin the answer. Raises as :meth:`add`."""
        self._end_reply()
        message = Message("user", content, tags=tuple(tags))
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

    def _turn(self, message: Message) -> Turn:
        if message.role == "system" and not any(turn.name == "system" for turn in self.turns):
            return Turn("system", message)
        self._count += 1
        return Turn(f"{SUMMARY if SUMMARY in message.tags else message.role}-{self._count}", message)

    def _go_to(self, turns: tuple[Turn, ...], *, opening: bool, reserve: int = 0) -> None:
        """Make room, then follow the template there. Ctrl-C waits for a place where text and tokens agree."""
        with uninterrupted():
            self._go_on_to(turns, opening=opening, reserve=reserve)

    def _go_on_to(self, turns: tuple[Turn, ...], *, opening: bool, reserve: int) -> None:
        ahead = self._following.ahead(turns, opening=opening)
        if self._summing:
            self._room.free(ahead.num_tokens + reserve + _BESIDE)
        else:
            before = self.script
            self._make_room(ahead, reserve)
            if self.script is not before:  # a summary has come in between, or was tried
                known = {turn.name for turn in self.turns}
                new = tuple(turn for turn in turns if turn.name not in known)
                ahead = self._following.ahead((*self.turns, *new), opening=opening)
        self._follow(ahead)

    def _follow(self, ahead: Ahead) -> None:
        before = len(self._following.receipts)
        self._following.go_to(ahead)
        self._room.mine(r for receipt in self._following.receipts[before:] for r in receipt.ranges)

    def _make_room(self, ahead: Ahead, reserve: int) -> None:
        policy, need = self.options.policy, ahead.num_tokens + _BESIDE
        if policy is not None:
            cuts = self._room.plan(policy, need, reserve)
            self._hide(cuts, policy)
        self._room.free(need + reserve)

    def _hide(self, cuts: tuple[Cut, ...], policy: Policy) -> list[Receipt]:
        """Hide what a policy named; what is to be summed up is summed up first."""
        old = [cut for cut in cuts if cut.summarise]
        if old:
            kept = all(p.kept for p in policy.parts if isinstance(p, SummarizeOldest))
            self._summarise(old, kept=kept)
        return self._room.hide_cuts(cuts, then=self.options.then)

    def _end_reply(self) -> None:
        """An answer that is still open ends where it is."""
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
        plain = self._following.markup.plain
        message = Message("assistant", plain(answer.text), plain(answer.reasoning), raw=answer.raw)
        turn = self._turn(replace(message, tags=(SUMMARY,) if self._summing else ()))
        thinking = None if answer.thinking is None else (start + answer.thinking[0], start + answer.thinking[1])
        self._following.answered(turn.name, turn.message, thinking)
        if self._reply is reply:
            self._reply = None
        return turn.message

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

    def room_to_go_on(self) -> list[Receipt]:
        """Free cells for an answer that runs out of them. Raises ContextFull."""
        if self.session.engine.cells_free >= _BESIDE:
            return []
        with self.session.midway():
            return self._room.make(self.options.policy, _GO_ON, 0)

    # -- hiding -------------------------------------------------------------------------------------------------

    def mask(self, target: Target) -> Receipt:
        """As Session.mask; of a first turn, the tokens that draw attention as sinks stay."""
        self._end_reply()
        return self.session.mask(self._room.but_sinks(target), then=self.options.then)

    def unmask(self, target: Target) -> Receipt:
        """As Session.unmask, but what the template has dropped stays hidden."""
        self._end_reply()
        wanted = self.session.indexes_of(target)
        hidden = np.concatenate([self.session.indexes(State.MASKED), self.session.indexes(State.PARKED)])
        back = np.setdiff1d(np.intersect1d(wanted, hidden), self._dropped)
        receipt = self.session.unmask(self.session.ranges(back) if len(back) else target)
        self._room.shown()
        return receipt

    def park(self, target: Target) -> Receipt:
        """As Session.park, and :meth:`mask`."""
        self._end_reply()
        return self.session.park(self._room.but_sinks(target))

    def evict(self, target: Target) -> Receipt:
        """As Session.evict, and :meth:`mask`."""
        self._end_reply()
        return self.session.evict(self._room.but_sinks(target))

    def undo(self) -> Receipt:
        """Take the newest edit back, as Session.undo. Raises BadState for one that changed the conversation's text."""
        self._end_reply()
        edit = self.session.last_edit
        if edit is not None and (edit.verb in ("insert", "replace", "rewind") or self._touches_dropped(edit)):
            raise BadState(
                f"the newest edit ({edit.verb}) changed the text of the conversation, which follows its template: it "
                "cannot be undone by itself"
            )
        receipt = self.session.undo()
        self._room.shown()
        return receipt

    @property
    def _dropped(self) -> npt.NDArray[np.int64]:
        """The indexes of what the template has dropped."""
        return np.setdiff1d(self._room.hidden, self.script.index)

    def _touches_dropped(self, edit: Receipt) -> bool:
        return any(((a <= self._dropped) & (self._dropped < b)).any() for a, b in edit.ranges)

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
    def _pinned(turn: Turn, spans: list[Any], pinned: bool) -> Turn:
        if not any(span.name == turn.name for span in spans):
            return turn
        tags = tuple(tag for tag in turn.message.tags if tag != PINNED)
        return replace(turn, message=replace(turn.message, tags=(*tags, PINNED) if pinned else tags))

    # -- summaries ----------------------------------------------------------------------------------------------

    def summarize(self, keep: int = 1, *, kept: bool = True) -> tuple[Cut, ...]:
        """Sum up all exchanges but the newest ``keep``, then hide them; returns what was hidden.

        kept: the summary stays on the cache as it was generated, with everything in view, at the end of the
        conversation; else it is made on a fork of what is summed up and read again in its place, clean of it.
        """
        self._end_reply()
        cuts = tuple(replace(cut, summarise=True) for cut in policies.keep_turns(keep).plan(self.view()))
        if cuts:
            self._hide(cuts, policies.summarize_oldest(kept=kept))
        return cuts

    def _summarise(self, cuts: list[Cut], *, kept: bool) -> None:
        """A summary of what is in view, as an exchange of its own; earlier ones are hidden, as it takes them in."""
        earlier = [turn for turn in self.turns if SUMMARY in turn.message.tags]
        self._summing = True
        try:
            if kept:
                self.ask(ASK_SUMMARY, max_tokens=self.options.summary_tokens, tags=[SUMMARY]).finish()
            else:
                self._put_summary(cuts)
        except (ContextFull, MaskUnsupported) as err:
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
            text = other.ask(ASK_SUMMARY, max_tokens=self.options.summary_tokens).text
        self._room.hide_cuts(cuts)
        pair = [Message("user", ASK_SUMMARY, tags=(SUMMARY,)), Message("assistant", text, tags=(SUMMARY,))]
        turns = (*self.turns[: last + 1], *(self._turn(m) for m in pair), *self.turns[last + 1 :])
        self._follow(self._following.ahead(turns, opening=False))

    # -- other texts --------------------------------------------------------------------------------------------

    def set_system(self, content: str) -> None:
        """Another system text, in the place of the old one; what stands behind it is not read again, and was computed
        with the old one in view. Raises TemplateError, ContextFull."""
        self._end_reply()
        first, message = self.turns[:1], Message("system", content)
        if first and first[0].message.role == "system":
            turns = (replace(first[0], message=replace(first[0].message, content=content)), *self.turns[1:])
        else:
            turns = (self._turn(message), *self.turns)
        self._go_to(turns, opening=False)

    def attach(self, path: str | os.PathLike[str], *, name: str | None = None) -> Receipt:
        """Take in a KV module between two turns, as Session.attach; it belongs to no message, and policies leave it."""
        self.settle()
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

    def save(self, path: str | os.PathLike[str]) -> int:
        """As Session.save, with the messages; :meth:`load` goes on from there. Options are not kept."""
        self._end_reply()
        self.session.memo = memos.write(self._following, self._room.hidden, self._count)
        return self.session.save(path)

    @classmethod
    def load(cls, session: Session, *, options: Options = Options()) -> Chat:
        """The chat of a session that Session.load has opened. Raises WrongFile where it holds none."""
        memo = memos.read(session)
        chat = object.__new__(cls)
        chat._begin(session, _template(session, memo.template, memo.now), options)
        memos.fill(memo, chat._following)
        chat._count, chat._room.hidden = memo.count, np.asarray(memo.hidden, np.int64)
        return chat


def _template(session: Session, source: str, now: datetime | None) -> Template:
    model = session.model
    end = next((t for t in model.end_tokens), None)
    bos = "" if model.bos is None else model.detokenize([model.bos])
    return Template(source, bos=bos, eos="" if end is None else model.detokenize([end]), now=now)
