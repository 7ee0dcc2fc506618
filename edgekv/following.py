"""Following: a session's text follows what a chat template writes of a list of turns, edit by edit.

What the template adds is read; what it writes otherwise than before is masked, or put in, where it stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from . import answers
from .columns import State
from .errors import MaskUnsupported, TemplateError
from .generation import Generation
from .markup import Lexed, Markup
from .receipts import Receipt
from .script import Hunk, Script, changes, common
from .session import Session
from .spans import Range
from .template import Template
from .turns import THINKING, TOOL_RESULT, TURN, Message, Turn

#: The span of what a template says in front of a first user turn by itself.
PREAMBLE: Final = "preamble"
_PROBE: Final = "\ufdd1"  # a code point nobody writes
_MOST_BACK: Final = 8  # tokens at the end that may be dropped to be tokenized together with what follows


@dataclass(frozen=True)
class Ahead:
    """What comes next: the turns, what the template makes of them, and what that changes. opening: whether the model's
    own turn is begun. num_tokens: about how many are to be read."""

    turns: tuple[Turn, ...]
    text: str
    hunks: tuple[Hunk, ...]
    opening: bool
    num_tokens: int


class Following:
    """``script`` is the text so far, ``turns`` its messages, ``opening`` how the model's own turn began that is being
    said from character ``said_from`` on; ``notes`` say what the template does to history. ``num_reread``: tokens at the
    end that were read a second time."""

    def __init__(
        self,
        session: Session,
        template: Template,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.session, self.template = session, template
        self.tools, self.variables = tuple(tools), dict(variables or {})
        self.markup: Final = Markup(session.model)
        self.script = Script.empty()
        self.turns: tuple[Turn, ...] = ()
        self.opening = ""
        self.notes: list[str] = []
        self.receipts: list[Receipt] = []
        self.num_reread = 0
        self._own = False
        self.said_from = self._opening_at = 0
        self.preamble: Final = self._find_preamble()

    def fork(self, session: Session) -> Following:
        """The same for a fork of the session."""
        other = object.__new__(Following)
        other.__dict__.update(self.__dict__, session=session, notes=list(self.notes), receipts=[])
        return other

    # -- what the template writes -------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], *, opening: bool) -> str:
        """The conversation as text; raises TemplateError."""
        if not messages and not opening:
            return ""
        written = [m.for_template(self.template, self.markup) for m in messages]
        text = self.template.render(written, add_generation_prompt=opening, tools=self.tools or None, **self.variables)
        bos = self._bos
        return text if text.startswith(bos) else bos + text

    @property
    def _bos(self) -> str:
        bos = self.session.model.bos
        return "" if bos is None else self.session.model.detokenize([bos])

    def ahead(self, turns: tuple[Turn, ...], *, opening: bool) -> Ahead:
        """What it takes to get to those turns; nothing changes. Raises TemplateError."""
        text = self.render([turn.message for turn in turns], opening=opening)
        hunks = tuple(self._changes(turns, text))
        return Ahead(turns, text, hunks, opening, sum(len(self.markup.lex(hunk.text).ids) for hunk in hunks))

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
            if here > alike and k + 1 == len(self.turns) and self.script.said[-1:].any():
                here = alike = len(ours)  # an answer that was just said: nothing of its end is written yet
            if found[-1][0] < here <= alike and there > found[-1][1]:
                found.append((here, there))
        return found[1:]

    def _end_of(self, turn: Turn) -> int:
        """The character behind a turn."""
        here = np.flatnonzero((self.script.index >= turn.range[0]) & (self.script.index < turn.range[1]))
        return int(self.script.ends[here[-1]]) if len(here) else 0

    def _place_of(self, turns: Sequence[Turn], k: int, text: str) -> int:
        """Where the content of a message ends in a rendered text: there another content makes another text. 0 where
        it is not written."""
        messages = [turn.message for turn in turns]
        raw = messages[k].raw
        messages[k] = replace(
            messages[k], content=f"{messages[k].content}{_PROBE}", raw=None if raw is None else f"{raw}{_PROBE}"
        )
        other = self._rendered_of(messages)
        at = common(text, other)
        return at if other.startswith(_PROBE, at) else 0

    def _rendered(self, turns: Sequence[Turn]) -> str:
        return self._rendered_of([turn.message for turn in turns])

    def _rendered_of(self, messages: Sequence[Message]) -> str:
        """A text, "" where the template refuses."""
        try:
            return self.render(messages, opening=False)
        except TemplateError:
            return ""

    def _seams(self, turns: tuple[Turn, ...], text: str) -> list[int]:
        """Where new turns begin in a text that does not only go on."""
        if text.startswith(self.script.text):
            return []
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

    def begin(self) -> None:
        """Read what every conversation without a system text begins with, if nothing is read yet."""
        if not len(self.script) and (text := self.preamble or self._bos):
            self._read_behind(text, 0)
            self.session.mark(self.outline(0, len(text)), PREAMBLE, role="system", tags=[TURN])

    # -- following ----------------------------------------------------------------------------------------------

    def go_to(self, ahead: Ahead, *, own: bool = False) -> None:
        """Carry it out. Raises ContextFull, TemplateError; what was carried out by then is accounted for. ``own``: the
        messages themselves have changed, which is no doing of the template's."""
        self._own = own
        before, length = self.script.text, len(self.script.text)
        middle = [hunk for hunk in ahead.hunks if hunk.stop < length]
        tail = next((hunk for hunk in ahead.hunks if hunk.stop == length), None)
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

    def _if_there(self, turn: Turn) -> Turn:
        """A turn; one that has lost its first or last token to an edit is to be found anew."""
        ends = (turn.range[0], turn.range[1] - 1)
        return (
            turn if not turn.read or np.isin(ends, self.script.index).all() else replace(turn, range=(0, 0), parts=())
        )

    def _edit(self, hunk: Hunk) -> None:
        """Mask, put in, or both, in the middle; where that cannot be done the history stays as it was read."""
        hunk, (first, last) = self.script.widened(hunk)
        gone = self.script.text[hunk.start : hunk.stop]
        lexed = self.markup.lex(hunk.text)
        if "".join(gone.split()) == "".join(hunk.text.split()) and self.script.said[first:last].any():
            self.script = self.script.reworded(hunk)  # the model's own white space stays as it said it
            return
        try:
            start = self._carry_out(first, last, lexed)
        except MaskUnsupported as err:
            self.note(f"the template writes history otherwise than it was read, and it stays as it was read: {err}")
            start = None
        if start is None:
            self.script = self.script.reworded(hunk)
        else:
            self.script = self.script.with_tokens(hunk.start, hunk.stop, lexed, start, first, last)

    def _carry_out(self, first: int, last: int, lexed: Lexed) -> int | None:
        """The edit of tokens [first, last); the index of the new ones, None where they are not to be read."""
        session, visible = self.session, self.session.indexes()
        ranges = session.ranges(np.intersect1d(self.script.index[first:last], visible))
        if not len(lexed.ids):
            if ranges:
                self._did(session.mask(ranges, force=True))
            return len(session.tokens)
        if ranges:
            receipt = session.replace(ranges, lexed.ids)
        elif last > first or last >= len(self.script) or self.script.index[last] not in visible:
            return None  # it stands in a part that is hidden: new text there would not be
        else:
            receipt = session.insert(int(self.script.index[last]), lexed.ids)
        assert receipt.span is not None
        session.unmark(receipt.span.name)
        self._did(receipt)
        return receipt.span.start

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

    def note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    # -- reading ------------------------------------------------------------------------------------------------

    def _read_behind(self, text: str, keep: int) -> None:
        """Read text at the end, behind the first ``keep`` characters; what stands there instead is dropped."""
        script = self.script
        if keep < len(script.text):
            number = script.tokens_in(keep, len(script.text))[0]
            text = script.text[script.start_of(number) : keep] + text
            self.num_reread += script.start_of(number) < keep
            self._drop_from(number)
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

    def _drop_from(self, number: int) -> None:
        """Drop the tokens from that one on; where something else stands behind them, hide them."""
        script = self.script
        if self._is_last:
            self.session.rewind(int(script.index[number]))
        elif len(here := np.intersect1d(script.index[number:], self.session.indexes())):
            self.session.mask(self.session.ranges(here), force=True)
        self.script = script.shortened(number)

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
        script, lexed = self.script, self.markup.lex(text)
        control = np.flatnonzero(np.isin(script.ids, list(self.session.model.control_tokens.values())))
        first = int(control[-1]) + 1 if len(control) else 0
        own = script.text[script.start_of(first) :]
        front = next(iter(self.markup.split(text)), "")
        if not own or self.markup.is_control(front):
            return 0, lexed
        joint, have = self.markup.lex(own + front), script.ids[first:]
        same = _num_same(joint.ids, have)
        back = len(have) - same
        if back and (back > _MOST_BACK or script.said[first + same :].any() or not self._is_last):
            return 0, self._cut_off(joint, len(own), text[len(front) :]) or lexed
        kept = int(joint.ends[same - 1]) if same else 0
        rest = Lexed((own + front)[kept:], joint.ids[same:], joint.ends[same:] - kept)
        return back, Lexed.joined([rest, self.markup.lex(text[len(front) :])])

    def _cut_off(self, joint: Lexed, at: int, rest: str) -> Lexed | None:
        """The part of a text's tokens behind a character, if a token ends there."""
        number = int(np.searchsorted(joint.ends, at, side="right"))
        if not number or joint.ends[number - 1] != at:
            return None
        part = Lexed(joint.text[at:], joint.ids[number:], joint.ends[number:] - at)
        return Lexed.joined([part, self.markup.lex(rest)])

    def take(self, generation: Generation) -> None:
        """What a generation that has ended said is part of the text."""
        ids = np.asarray(generation.tokens, np.int32)
        self.session.unmark(generation.span.name)
        script = self.script.appended(self.markup.said(ids), 0, said=True)
        index = np.concatenate([self.script.index, self.indexes_of(generation)])
        self.script = replace(script, index=index)

    def indexes_of(self, generation: Generation) -> npt.NDArray[np.int64]:
        """The index of each token a generation has said."""
        index = np.arange(max(0, generation.start_index), len(self.session.tokens))
        return np.setdiff1d(index, self.session.indexes(State.DROPPED))  # a stop string was dropped

    def _without_end(self, turns: tuple[Turn, ...], number: int) -> tuple[Turn, ...]:
        """The turns when the tokens from that one on are dropped: one that loses its beginning is not read."""
        gone = set(self.script.index[number:].tolist())
        return tuple(replace(turn, range=(0, 0), parts=()) if turn.range[0] in gone else turn for turn in turns)

    def back_to(self, count: int) -> None:
        """Drop all behind the first ``count`` turns."""
        kept = self.turns[:count]
        start = next((turn.range[0] for turn in self.turns[count:] if turn.read), None)
        if start is not None:
            number = int(np.flatnonzero(self.script.index == start)[0])
            kept = self._without_end(kept, number)
            self._drop_from(number)
        self.turns = kept

    # -- names --------------------------------------------------------------------------------------------------

    def _bounds(self, text: str, before: str, tail: str) -> list[int]:
        """Where each turn begins in the text, and where the last ends. ``before``: the text there was, behind which
        ``tail`` was read."""
        bounds = [self._bound(k, text, before, tail) for k in range(len(self.turns) + 1)]
        end = len(text)
        for k in reversed(range(len(bounds))):
            end = bounds[k] = min(end, end if (known := bounds[k]) is None else known)
        return [bound for bound in bounds if bound is not None]

    def _bound(self, k: int, text: str, before: str, tail: str) -> int | None:
        """How many characters the first ``k`` turns take, None where the template does not say so."""
        turns = self.turns
        if k < len(turns) and turns[k].read and (k == 0 or turns[k - 1].read):
            return None  # both were named when they were read
        if k == 0:
            plain = turns and turns[0].message.role != "system" and text.startswith(self.preamble)
            return len(self.preamble) if plain else 0
        part = self._rendered(turns[:k])
        if not part or text.startswith(part):
            return len(part) or None
        hunks = changes(before, part, self.markup.split)
        end = hunks[-1].text if hunks and hunks[-1].stop == len(before) else ""
        return len(text) - len(tail) + len(end) if tail.startswith(end) else None

    def _name(self, bounds: list[int]) -> None:
        """Give the turns that were read their spans, and the one before them its end."""
        turns = list(self.turns)
        if bounds[0] and turns and not turns[0].read and (span := self.outline(0, bounds[0]))[0] < span[1]:
            self.session.mark(span, PREAMBLE, role="system", tags=[TURN])
        if turns and turns[0].message.role == "system" and any(s.name == PREAMBLE for s in self.session.spans):
            self.session.unmark(PREAMBLE)
        for k, turn in enumerate(turns):
            if not turn.read:
                turns[k] = self._located(turn, bounds[k], bounds[k + 1])
            elif k + 1 == len(turns) or not self.turns[k + 1].read:
                turns[k] = self._extended(turn, bounds[k + 1])
        self.turns = tuple(turns)
        self.mark(self.turns)

    def _located(self, turn: Turn, start: int, stop: int) -> Turn:
        message = turn.message
        parts: tuple[tuple[str, Range], ...] = ()
        if message.role == "tool" and (inner := self._place(message.content, start, stop)):
            parts = ((TOOL_RESULT, inner),)
        if message.role == "assistant" and (thinking := answers.find_thinking(self.script.text, start, stop)):
            parts = self._thinking(thinking)
        if message.role == "system" and not self._place(message.content, start, stop):
            return replace(turn, range=self._place(message.content, 0, len(self.script.text)) or (0, 0))
        return replace(turn, range=self.outline(start, stop), parts=parts)

    def _extended(self, turn: Turn, stop: int) -> Turn:
        """Up to a character, over tokens that follow one another."""
        number = int(np.searchsorted(self.script.ends, stop, side="right"))
        first = np.flatnonzero(self.script.index == turn.range[0])
        if not len(first) or first[0] >= number:
            return turn
        return replace(turn, range=(turn.range[0], self._on_from(turn.range[0], self.script.index[first[0] : number])))

    def _place(self, content: str, start: int, stop: int) -> Range | None:
        """The index range of a content in a stretch of the text, without delimiters; None where it is not there."""
        written = self.markup.escape(content).strip()
        at = self.script.text.find(written, start, stop) if written else -1
        if at < 0:
            return None
        first, last = self.script.inside(at, at + len(written))
        found = self._outline_of(first, last)
        return found if found[0] < found[1] else None

    def outline(self, start: int, stop: int) -> Range:
        """The index range of the tokens that end in characters (start, stop]; empty for none."""
        return self._outline_of(*(int(np.searchsorted(self.script.ends, at, side="right")) for at in (start, stop)))

    def _outline_of(self, first: int, last: int) -> Range:
        """From the first of these tokens on, as far as indexes follow one another: what was put in between two of
        them belongs to the range by itself."""
        index = self.script.index[first:last]
        return (int(index[0]), self._on_from(int(index[0]), index)) if len(index) else (0, 0)

    def _on_from(self, stop: int, index: npt.NDArray[np.int64]) -> int:
        """How far indexes of tokens follow one another from ``stop`` on, those that were dropped left out."""
        gone = np.zeros(len(self.session.tokens) + 1, np.int64)
        gone[self.session.indexes(State.DROPPED) + 1] = 1
        gone = np.cumsum(gone)
        for number in index.tolist():
            if number >= stop and gone[number] - gone[stop] == number - stop:
                stop = number + 1
        return stop

    def _find_system(self) -> None:
        """Where the system text stands now: some templates move it."""
        for k, turn in enumerate(self.turns):
            if turn.message.role == "system" and turn.read:
                here = _within(self.script.index, turn.range)
                place = self._place(turn.message.content, 0, len(self.script.text))
                if not here.any() or (place is not None and not _inside(place, turn.range)):
                    self.turns = (*self.turns[:k], replace(turn, range=place or turn.range), *self.turns[k + 1 :])
                    self.mark([self.turns[k]])

    def mark(self, turns: Sequence[Turn]) -> None:
        """The spans of turns and their parts are what the turns say."""
        known = {span.name: span for span in self.session.spans}
        for turn in turns:
            wanted = [(turn.name, turn.range, turn.tags)]
            wanted += [(f"{turn.name}.{part}", place, turn.part_tags(part)) for part, place in turn.parts]
            for name, place, tags in wanted:
                span = known.get(name)
                if place[0] < place[1] and (span is None or (span.range, span.tags) != (place, tags)):
                    self.session.mark(place, name, role=turn.message.role, tags=tags)

    def _thinking(self, place: Range) -> tuple[tuple[str, Range], ...]:
        """The part of a turn that characters of reasoning are."""
        found = self._outline_of(*self.script.inside(*place))
        return ((THINKING, found),) if found[0] < found[1] else ()

    def answered(self, name: str, message: Message, thinking: Range | None) -> Turn:
        """The model's own turn, which began with the opening. ``thinking``: characters of the text."""
        parts = self._thinking(thinking) if thinking is not None else ()
        turn = Turn(name, message, self.outline(self._opening_at, len(self.script.text)), parts)
        self.turns = (*self.turns, turn)
        self.mark([turn])
        return turn


def _num_same(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differ[0]) if len(differ) else shorter


def _within(indexes: npt.NDArray[np.int64], place: Range) -> npt.NDArray[np.bool_]:
    return np.asarray((indexes >= place[0]) & (indexes < place[1]))


def _inside(inner: Range, outer: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
