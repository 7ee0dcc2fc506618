"""Naming: which tokens each turn of a conversation is, as spans of its session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from . import answers
from .rendering import Rendering
from .script import changes
from .spans import Range
from .turns import PINNED, THINKING, TOOL_RESULT, TURN, Message, Turn

#: The span of what a template says in front of a first user turn by itself.
PREAMBLE: Final = "preamble"


class Naming(Rendering):
    """See :class:`~edgekv.following.Following`."""

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
            return len(part) or None  # "" where the template refuses
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
        if message.role == "tool" and (inner := self._place(turn)):
            parts = ((TOOL_RESULT, inner),)
        if message.role == "assistant" and (thinking := answers.find_thinking(self.script.text, start, stop)):
            parts = self._thinking(thinking)
        whole = self.outline(start, stop)
        if message.role == "system" and message.content:
            place = self._place(turn)  # in a turn of somebody else's, or not written yet
            whole = whole if place is not None and _inside(place, whole) else place or (0, 0)
        return replace(turn, range=whole, parts=parts)

    def _extended(self, turn: Turn, stop: int) -> Turn:
        """Up to a character, over tokens that follow one another."""
        number = self.script.number_at(stop)
        first = np.flatnonzero(self.script.index == turn.range[0])
        if not len(first) or first[0] >= number:
            return turn
        return replace(turn, range=self._outline_of(int(first[0]), number))

    def _place(self, turn: Turn) -> Range | None:
        """The index range of a turn's content, without delimiters; None where the template does not write it."""
        k = next(k for k, other in enumerate(self.turns) if other.name == turn.name)
        edges = [self._place_of(self.turns, k, self.script.text, front=front) for front in (True, False)]
        found = self._outline_of(*self.script.inside(*edges)) if 0 < edges[0] < edges[1] else (0, 0)
        return found if found[0] < found[1] else None

    def outline(self, start: int, stop: int) -> Range:
        """The index range of the tokens of characters [start, stop); empty for none."""
        return self._outline_of(self.script.number_at(start), self.script.number_at(stop))

    def _outline_of(self, first: int, last: int) -> Range:
        """The stretch of indexes that goes across most of these tokens. Left out is what belongs to the text no longer
        (dropped by the session, or hidden by the template); what was put in between two tokens belongs to their range
        by itself."""
        index = self.script.index[first:last]
        gone = np.ones(len(self.session.tokens) + 1, np.int64)
        gone[0] = gone[self.script.index + 1] = gone[self.session.indexes() + 1] = 0
        gone[index + 1] = 1
        gone = np.cumsum(gone)
        found: list[list[int]] = []  # start, stop, the places of its first and last token
        for at, number in enumerate(index.tolist()):
            goes_on = (run for run in found if number >= run[1] and gone[number] - gone[run[1]] == number - run[1])
            if (run := next(goes_on, None)) is not None:
                run[1], run[3] = number + 1, at
            elif not any(run[0] <= number < run[1] for run in found):
                found.append([number, number + 1, at, at])
        start, stop, *_ = max(found, key=lambda run: run[3] - run[2], default=[0, 0])
        return (start, stop)

    def _find_system(self) -> None:
        """Where the system text stands now: some templates move it."""
        for k, turn in enumerate(self.turns):
            if turn.message.role == "system" and turn.read:
                here = within(self.script.index, turn.range)
                place = self._place(turn)
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
                tags |= span.tags & {PINNED} if span is not None and name != turn.name else frozenset()
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


def within(indexes: npt.NDArray[np.int64], place: Range) -> npt.NDArray[np.bool_]:
    return np.asarray((indexes >= place[0]) & (indexes < place[1]))


def _inside(inner: Range, outer: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
