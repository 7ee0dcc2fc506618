"""Script: the text of a conversation as its template writes it, and where in the session each part of it is.

Pure text and numpy. A template may write history otherwise than before (reasoning goes, system text moves); the
difference to what was read becomes hunks, and a hunk names tokens.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .markup import Lexed, plain, same_letters
from .spans import Range

if TYPE_CHECKING:
    from .model import TokenArray

T = TypeVar("T", bound=np.generic)

#: Cuts a text where control tokens stand.
Split = Callable[[str], Sequence[str]]


class Hunk(NamedTuple):
    """Characters [start, stop) of the old text become ``text``."""

    start: int
    stop: int
    text: str


def changes(
    old: str, new: str, split: Split, seams: Sequence[int] = (), anchors: Sequence[tuple[int, int]] = ()
) -> list[Hunk]:
    """The hunks, in order and disjoint, that make ``new`` of ``old``; an append is one hunk at the end.

    Compared in lines and control tokens: what a template drops or moves is made of those. seams: characters of ``new``
    at which turns begin; where new text may be said to begin at one of several places, it begins there. anchors:
    characters of both, ascending, that are the same place, such as the end of a message.
    """
    if new.startswith(old):
        return [Hunk(len(old), len(old), new[len(old) :])] if len(new) > len(old) else []
    begin = old.rfind("\n", 0, common(old, new)) + 1
    edges = [(begin, begin), *(pair for pair in anchors if min(pair) >= begin < max(pair))]
    found = [
        Hunk(hunk.start + a, hunk.stop + a, hunk.text)
        for (a, c), (b, d) in pairwise(edges)
        for hunk in _differences(_chunks(old[a:b], split), _chunks(new[c:d], split))
    ]
    a, c = edges[-1]
    last = _rest(_chunks(old[a:], split), _chunks(new[c:], split))
    return _at_seams(old, [*found, *(Hunk(h.start + a, h.stop + a, h.text) for h in last)], set(seams))


class _Chunk(NamedTuple):
    """A line, or a control token, which ``acts`` and is never cut."""

    text: str
    acts: bool


def _chunks(text: str, split: Split) -> list[_Chunk]:
    return [
        _Chunk(line, len(split(f"a{part}a")) > 1) for part in split(text) for line in part.splitlines(keepends=True)
    ]


def _differences(ours: list[_Chunk], theirs: list[_Chunk]) -> list[Hunk]:
    at = np.concatenate([[0], np.cumsum([len(c.text) for c in ours])]).astype(int).tolist()
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    found = (_trimmed(at[a], ours[a:b], theirs[c:d]) for kind, a, b, c, d in matcher.get_opcodes() if kind != "equal")
    return [hunk for hunk in found if hunk.start < hunk.stop or hunk.text]


def _rest(ours: list[_Chunk], theirs: list[_Chunk]) -> list[Hunk]:
    """Behind the last anchor, all from the first difference on is one hunk, to the end: new text at the end is read
    as such, however it is like what stood there."""
    same = 0
    while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
        same += 1
    start, stop = (sum(len(c.text) for c in ours[:n]) for n in (same, len(ours)))
    front = _front(ours[same:], theirs[same:])
    text = "".join(c.text for c in theirs[same:])[front:]
    return [Hunk(start + front, stop, text)] if start + front < stop or text else []


def _front(ours: list[_Chunk], theirs: list[_Chunk]) -> int:
    """How many characters both begin with, before a control token of either."""
    plain = bool(ours and theirs) and not (ours[0].acts or theirs[0].acts)
    return common(ours[0].text, theirs[0].text) if plain else 0


def _trimmed(at: int, ours: list[_Chunk], theirs: list[_Chunk]) -> Hunk:
    """A hunk without what both its sides begin and end with."""
    gone, text = ("".join(c.text for c in side) for side in (ours, theirs))
    front = _front(ours, theirs)
    back = _front(*([_Chunk(c.text[::-1], c.acts) for c in reversed(side)] for side in (ours, theirs)))
    back = min(back, len(gone) - front, len(text) - front)
    return Hunk(at + front, at + len(gone) - back, text[front : len(text) - back])


def _at_seams(old: str, hunks: list[Hunk], seams: set[int]) -> list[Hunk]:
    """Text that is put in and ends as what stands in front of it ends can as well begin earlier."""
    made, shift, least = [], 0, 0
    for hunk in hunks:
        if hunk.start == hunk.stop and hunk.start + shift not in seams:
            slides = range(1, common(old[least : hunk.start][::-1], hunk.text[::-1]) + 1)
            n = next((n for n in slides if hunk.start + shift - n in seams), 0)
            text = hunk.text[len(hunk.text) - n :] + hunk.text[: len(hunk.text) - n]
            hunk = Hunk(hunk.start - n, hunk.start - n, text)
        made.append(hunk)
        shift, least = shift + len(hunk.text) - (hunk.stop - hunk.start), hunk.stop
    return made


def common(one: str, other: str) -> int:
    """How many characters two texts both begin with."""
    shorter = min(len(one), len(other))
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), shorter)


def num_same(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differ[0]) if len(differ) else shorter


@dataclass(frozen=True)
class Script:
    """``text``, and for each of its tokens, in reading order: id, index in the session, the characters complete after
    it, whether the model said it (then it was sampled, and may not be how the text would be tokenized), and whether it
    was ``kept`` though the text is another there: white space of an answer, or what could not be edited.
    """

    text: str
    ids: TokenArray
    index: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    said: npt.NDArray[np.bool_]
    kept: npt.NDArray[np.bool_]

    @classmethod
    def empty(cls) -> Script:
        none, flags = np.empty(0, np.int64), np.empty(0, np.bool_)
        return cls("", np.empty(0, np.int32), none, none, flags, flags)

    def __len__(self) -> int:
        return len(self.ids)

    def appended(self, lexed: Lexed, first_index: int, *, said: bool = False) -> Script:
        """With a text behind it whose tokens were read at ``first_index``."""
        return self.with_tokens(len(self.text), len(self.text), lexed, first_index, len(self), len(self), said=said)

    def with_tokens(
        self, start: int, stop: int, lexed: Lexed, first_index: int, first: int, last: int, *, said: bool = False
    ) -> Script:
        """Characters [start, stop), and tokens [first, last), give way to a text with its tokens."""
        new, n = np.arange(first_index, first_index + len(lexed.ids)), len(lexed.ids)
        shift = len(lexed.text) - (stop - start)
        return Script(
            self.text[:start] + lexed.text + self.text[stop:],
            _spliced(self.ids, first, last, lexed.ids),
            _spliced(self.index, first, last, new),
            np.concatenate([np.minimum(self.ends[:first], start), lexed.ends + start, self.ends[last:] + shift]),
            _spliced(self.said, first, last, np.full(n, said)),
            _spliced(self.kept, first, last, lexed.lossy),
        )

    def reworded(self, hunk: Hunk) -> Script:
        """With other characters for the same tokens: what the template writes and what was evaluated differ there."""
        start, stop, text = hunk
        shift = len(text) - (stop - start)
        ends = np.where(self.ends >= stop, self.ends + shift, np.minimum(self.ends, start))
        first, last = self.tokens_in(start, stop)
        kept = self.kept.copy()
        kept[first:last] = True
        if text:  # it has no tokens of its own: it is counted to those that end where it begins, or to the first
            kept[: max(first, last)] |= self.ends[: max(first, last)] == stop
            kept[:1] |= not start
        return replace(self, text=self.text[:start] + text + self.text[stop:], ends=ends, kept=kept)

    def shortened(self, count: int) -> Script:
        """The first ``count`` tokens of it."""
        end = int(self.ends[count - 1]) if count else 0
        parts = (part[:count] for part in (self.ids, self.index, self.ends, self.said, self.kept))
        return Script(self.text[:end], *parts)  # type: ignore[arg-type]

    def misspelled(self, spell: Callable[[TokenArray], str]) -> str:
        """A part of the text that its tokens do not spell, white space aside; "" where they spell all of it. What was
        ``kept`` is left out. spell: the text of tokens, marks of :mod:`edgekv.markup` not in it."""
        if rest := "".join(plain(self.text[self.start_of(len(self)) :]).split()):
            return rest
        cuts = np.flatnonzero(np.diff(np.concatenate([[True], self.kept, [True]]))).tolist()
        for first, last in zip(cuts[::2], cuts[1::2], strict=True):
            part = self.text[self.start_of(first) : self.start_of(last)]
            if not same_letters(part, spell(self.ids[first:last])):
                return part
        return ""

    # -- characters and tokens ----------------------------------------------------------------------------------

    def start_of(self, number: int) -> int:
        """The character a token begins at."""
        return int(self.ends[number - 1]) if number else 0

    def number_at(self, at: int) -> int:
        """The number of the first token of what begins at a character: tokens of a part of that character only, which
        complete none, belong to it."""
        number = int(np.searchsorted(self.ends, at, side="right"))
        while number and not self.kept[number - 1] and self.start_of(number - 1) == self.ends[number - 1] == at:
            number -= 1
        return number

    def tokens_in(self, start: int, stop: int) -> Range:
        """The numbers of the tokens that characters [start, stop) touch; for an empty range where it lies."""
        first = self.number_at(start)
        if start == stop:
            return (first, first + (first < len(self) and self.start_of(first) < start))
        return (first, max(first, int(np.searchsorted(self.ends, stop, side="left")) + 1))

    def inside(self, start: int, stop: int) -> Range:
        """The numbers of the tokens that lie in characters [start, stop), but for white space at the edges: in many
        vocabularies the space in front of a word belongs to its token."""
        first, last = self.tokens_in(start, stop)
        first += first < last and bool(self.text[self.start_of(first) : start].strip())
        last -= first < last and bool(self.text[stop : int(self.ends[last - 1])].strip())
        return (first, last)

    def widened(self, hunk: Hunk) -> tuple[Hunk, Range]:
        """The hunk over whole tokens, and the numbers of those that go."""
        first, last = self.tokens_in(hunk.start, hunk.stop)
        if first == last:
            return hunk, (first, last)
        start, stop = min(self.start_of(first), hunk.start), max(int(self.ends[last - 1]), hunk.stop)
        text = self.text[start : hunk.start] + hunk.text + self.text[hunk.stop : stop]
        return Hunk(start, stop, text), (first, last)


def _spliced(array: npt.NDArray[T], first: int, last: int, new: npt.NDArray[T]) -> npt.NDArray[T]:
    return np.concatenate([array[:first], new, array[last:]])
