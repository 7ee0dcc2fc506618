"""Following: a session's text follows what a chat template writes of a list of turns, edit by edit.

What the template adds is read; what it writes otherwise than before is masked, or put in, where it stands.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from .columns import State
from .errors import ChatBroken, ContextFull, MaskUnsupported
from .generation import Generation
from .markup import Lexed, plain
from .naming import PREAMBLE, Naming, within
from .receipts import Receipt
from .rendering import Ahead
from .script import Hunk, Script, num_same
from .session import Session
from .turns import TURN, Turn

_MOST_BACK: Final = 8  # tokens at the end that may be dropped to be tokenized together with what follows
_QUOTED: Final = 60  # characters of a text in a message


class Following(Naming):
    """``script`` is the text so far, ``turns`` its messages, ``opening`` how the model's own turn began that is being
    said from character ``said_from`` on; ``notes`` say what the template does to history. ``num_reread``: tokens at the
    end that were read a second time. ``put_hidden``: indexes of new text in a hidden part, which is hidden as well.
    ``broken``: why the session does not hold what the template wrote, "" while it does."""

    def fork(self, session: Session) -> Following:
        """The same for a fork of the session."""
        other = object.__new__(Following)
        other.__dict__.update(self.__dict__, session=session, notes=list(self.notes), receipts=[])
        return other

    def begin(self) -> None:
        """Read what every conversation without a system text begins with, if nothing is read yet."""
        if not len(self.script) and (text := self.preamble or self._first):
            self._read_behind(text, 0)
            self.session.mark(self.outline(0, len(text)), PREAMBLE, role="system", tags=[TURN])

    # -- following ----------------------------------------------------------------------------------------------

    def go_to(self, ahead: Ahead, *, own: bool = False) -> None:
        """Carry it out. Raises ContextFull, TemplateError; what was carried out by then is accounted for. ``own``: the
        messages themselves have changed, which is no doing of the template's."""
        self._own = own
        self._check_tokens()
        old, num_before, unread = self.script, len(self.session.tokens), {t.name for t in ahead.turns if not t.read}
        before, length = old.text, len(old.text)
        middle, tail = self._apart(ahead.hunks)
        for hunk in reversed(middle):
            self._edit(hunk)
        if tail is not None:
            self._read_behind(tail.text, len(self.script.text) - (length - tail.start))
        self.turns = tuple(map(self._if_there, ahead.turns))
        bounds = self._bounds(ahead.text, before, tail.text if tail is not None else "")
        self._name(bounds)
        if middle:
            self._find_system()
        self._opening_at = bounds[-1]
        self.opening = self.script.text[bounds[-1] :] if ahead.opening else ""
        self.said_from = len(self.script.text)
        self._check_step(ahead, old, num_before, unread)

    # -- what must hold -----------------------------------------------------------------------------------------

    def refuse_broken(self) -> None:
        """Raise ChatBroken where a check has failed before."""
        if self.broken:
            raise ChatBroken(self.broken)

    def _break(self, what: str) -> NoReturn:
        self.broken = (
            f"the session no longer holds what the chat template wrote: {what}; open a new session and give its chat "
            "the messages of this one (chat.messages)"
        )
        raise ChatBroken(self.broken)

    def _check_tokens(self) -> None:
        """Raise ChatBroken unless the session holds the script's tokens, in its order."""
        script, session = self.script, self.session
        tokens, n = session.tokens, len(session.tokens)
        if len(script) and (script.index.max() >= n or (tokens[script.index] != script.ids).any()):
            self._break("tokens of the conversation are not there")
        if np.isin(script.index, session.indexes(State.DROPPED)).any():
            self._break("tokens of the conversation were dropped")
        order = session.indexes_of([(0, n)]) if len(script) else script.index
        place = np.empty(n, np.int64)
        place[order] = np.arange(len(order))
        if (np.diff(place[script.index]) <= 0).any():
            self._break("tokens of the conversation are in another order")

    def check(self) -> None:
        """Raise ChatBroken unless the session holds the script's tokens, in its order, and they spell its text."""
        self._check_tokens()
        if part := self.script.misspelled(self.markup.spell):
            self._break(f"it has other tokens for {_shortened(plain(part))!r}")

    def _check_step(self, ahead: Ahead, old: Script, num_before: int, unread: set[str]) -> None:
        """Raise ChatBroken unless what the template writes is what was evaluated, and is visible: all that is new,
        but for edits within something hidden; and nothing of what it writes no longer."""
        if self.script.text != ahead.text:
            self._break("another text was evaluated")
        self.check()
        visible, index = self.session.indexes(), self.script.index
        if np.isin(np.setdiff1d(old.index, index), visible).any():
            self._break("a text that the template writes no longer is visible")
        hidden = np.setdiff1d(index[index >= num_before], visible)
        new = [t for t in self.turns if t.name in unread and within(hidden, t.range).any()]
        if len(np.setdiff1d(hidden, self.put_hidden)) or any(turn.message.role != "system" for turn in new):
            self._break("a new text is not visible")
        if new:
            self.note("the template writes the system text within a turn that is hidden, so it is hidden as well")

    # -- edits --------------------------------------------------------------------------------------------------

    def _apart(self, hunks: tuple[Hunk, ...]) -> tuple[list[Hunk], Hunk | None]:
        """The edits within the text, and the one that ends where it ends: what is new at the end is evaluated as one.
        White space at the end of an answer stays as it was sampled, so its trimming is an edit within."""
        middle, length = list(hunks), len(self.script.text)
        tail = middle.pop() if middle and middle[-1].stop == length else None
        while tail and middle and middle[-1].stop == tail.start and not self._is_own_white_space(middle[-1]):
            hunk = middle.pop()
            tail = Hunk(hunk.start, tail.stop, hunk.text + tail.text)
        return middle, tail

    def _is_own_white_space(self, hunk: Hunk) -> bool:
        """Whether a hunk changes nothing but white space at something that the model said."""
        hunk, (first, last) = self.script.widened(hunk)
        gone = self.script.text[hunk.start : hunk.stop]
        same = "".join(gone.split()) == "".join(hunk.text.split())
        return same and bool(self.script.said[max(0, first - 1) : last + 1].any())

    def _if_there(self, turn: Turn) -> Turn:
        """A turn; one that has lost its first or last token to an edit is to be found anew."""
        ends = (turn.range[0], turn.range[1] - 1)
        return (
            turn if not turn.read or np.isin(ends, self.script.index).all() else replace(turn, range=(0, 0), parts=())
        )

    def _edit(self, hunk: Hunk) -> None:
        """Mask, put in, or both, in the middle; where that cannot be done the history stays as it was read."""
        hunk, (first, last) = self.script.widened(hunk)
        lexed = self.markup.lex(hunk.text)
        if self._is_own_white_space(hunk):
            self.script = self.script.reworded(hunk)  # the model's own white space stays as it said it
            return
        try:
            start = self._carry_out(first, last, lexed)
        except MaskUnsupported as err:
            self._stays(err)
            self.script = self.script.reworded(hunk)
        else:
            self.script = self.script.with_tokens(hunk.start, hunk.stop, lexed, start, first, last)

    def _stays(self, err: MaskUnsupported) -> None:
        """History that cannot be edited stays as it is where it is the template that writes it otherwise."""
        if self._own:
            raise err
        self.note(f"the template writes history otherwise than it was read, and it stays as it was read: {err}")

    def _carry_out(self, first: int, last: int, lexed: Lexed) -> int:
        """The edit of tokens [first, last); the index of the new ones. Within a part that is hidden they are, too."""
        session, index = self.session, self.script.index
        ranges = session.ranges(np.intersect1d(index[first:last], session.indexes()))
        if not len(lexed.ids):
            if ranges:
                self._did(session.mask(ranges, force=True))
            return len(session.tokens)
        if ranges:
            receipt = session.replace(ranges, lexed.ids)
        else:
            receipt = session.insert(int(index[min(first, len(index) - 1)]), lexed.ids)
        assert receipt.span is not None
        new = session.unmark(receipt.span.name).range
        if not ranges and self._in_hidden(first, last):
            self.put_hidden = np.union1d(self.put_hidden, np.arange(*new))
            with contextlib.suppress(
                ContextFull
            ):  # it is masked, and there is no room to evaluate the last token again
                session.mask([new], force=True)
        else:
            self._did(receipt)
        return new[0]

    def _in_hidden(self, first: int, last: int) -> bool:
        """Whether tokens that are all hidden, or a place between two tokens, lie within a turn of which both sides are
        hidden, or replace something hidden."""
        sides = self.script.index[[max(0, first - 1), min(last, len(self.script) - 1)]]
        if last > first:
            return True
        inside = any(t.range[0] <= sides[0] and sides[1] < t.range[1] for t in self.turns)
        return inside and not np.isin(sides, self.session.indexes()).any()

    def _did(self, receipt: Receipt) -> None:
        self.receipts.append(receipt)
        if self._own:
            return
        hidden, came = receipt.tokens if receipt.verb != "insert" else 0, receipt.prefilled
        self.note(
            "the template writes history otherwise than it was read: "
            f"{'hidden and ' if hidden and came else 'hidden' if hidden else ''}"
            f"{'put in' if came else ''} where it stands, and nothing behind it is read again"
        )

    # -- reading ------------------------------------------------------------------------------------------------

    def _read_behind(self, text: str, keep: int) -> None:
        """Read text at the end, behind the first ``keep`` characters; what stands there instead is dropped."""
        script = self.script
        if keep < len(script.text):
            number = script.tokens_in(keep, len(script.text))[0]
            text = script.text[script.start_of(number) : keep] + text
            if not self._drop_from(number):
                self.script = script.reworded(Hunk(keep, len(script.text), ""))
                text = text[keep - script.start_of(number) :]
            else:
                self.num_reread += script.start_of(number) < keep
        back, lexed = self._lex_behind(text)
        if back:
            self.num_reread += back
            self._drop_from(len(self.script) - back)
        if len(lexed.ids):
            span = self.session.append(lexed.ids)
            self.session.unmark(span.name)
            self.script = self.script.appended(lexed, span.start)
        else:
            self.script = self.script.appended(lexed, 0)

    def _drop_from(self, number: int) -> bool:
        """Drop the tokens from that one on; where something else stands behind them, hide them. Returns whether it
        could be done."""
        script = self.script
        try:
            if number >= len(script):
                pass  # the end of the text that has no tokens: white space that belongs to a control token
            elif self._is_last:
                self.session.rewind(int(script.index[number]))
            elif len(here := np.intersect1d(script.index[number:], self.session.indexes())):
                self.receipts.append(self.session.mask(self.session.ranges(here), force=True))
        except MaskUnsupported as err:
            self._stays(err)
            return False
        self.script = script.shortened(number)
        return True

    @property
    def _is_last(self) -> bool:
        """Whether the end of the script is the end of the session, and can be taken back."""
        session = self.session
        if not (len(self.script) and session.model.capabilities.rewind):
            return False
        index = session.indexes_of((0, len(session.tokens)))
        return bool(index[-1] == self.script.index[-1])

    def _lex_behind(self, text: str) -> tuple[int, Lexed]:
        """The tokens of text behind the script, and how many tokens before it give way, since the two are tokenized
        together: as llama.cpp tokenizes the whole."""
        script = self.script
        control = np.flatnonzero(self.markup.acting(script.ids))
        first = int(control[-1]) + 1 if len(control) else 0
        own = script.text[script.start_of(first) :]
        front = next(iter(self.markup.split(text)), "")
        if not own or self.markup.is_control(front):
            return 0, self.markup.lex(text)
        joint, have = self.markup.lex(own + front), script.ids[first:]
        same = num_same(joint.ids, have)
        back = len(have) - same
        if back and (back > _MOST_BACK or script.said[first + same :].any() or not self._is_last):
            return 0, self._cut_off(joint, len(own), text[len(front) :]) or self.markup.lex(text)
        return back, Lexed.joined([joint.after(same), self.markup.lex(text[len(front) :])])

    def _cut_off(self, joint: Lexed, at: int, rest: str) -> Lexed | None:
        """The part of a text's tokens behind a character, if a token ends there."""
        number = int(np.searchsorted(joint.ends, at, side="right"))
        if not number or joint.ends[number - 1] != at:
            return None
        return Lexed.joined([joint.after(number), self.markup.lex(rest)])

    def take(self, generation: Generation) -> None:
        """What a generation that has ended said is part of the text."""
        ids = np.asarray(generation.tokens, np.int32)
        self.session.unmark(generation.span.name)
        script = self.script.appended(self.markup.said(ids), 0, said=True)
        index = np.concatenate([self.script.index, self.indexes_of(generation)])
        self.script = replace(script, index=index)
        self.check()

    def indexes_of(self, generation: Generation) -> npt.NDArray[np.int64]:
        """The index of each token a generation has said."""
        index = np.arange(max(0, generation.start_index), len(self.session.tokens))
        return np.setdiff1d(index, self.session.indexes(State.DROPPED))  # a stop string was dropped

    def back_to(self, count: int) -> None:
        """Drop all behind the first ``count`` turns."""
        self._own, kept = False, self.turns[:count]
        start = next((turn.range[0] for turn in self.turns[count:] if turn.read), None)
        if start is not None:
            self._drop_from(int(np.flatnonzero(self.script.index == start)[0]))
        self.turns = tuple(map(self._if_there, kept))
        self.check()


def _shortened(text: str) -> str:
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."
