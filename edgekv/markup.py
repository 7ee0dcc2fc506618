"""Markup: rendered texts as tokens, where a template's control tokens act and those a person typed do not.

A chat template and what people say end up in one string. Whatever in a person's text spells a control token gets a
MARK inside, before it is rendered; the mark is gone again when the string becomes tokens, and the text is read as the
letters it is.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from .errors import UsageError

if TYPE_CHECKING:
    from .model import Model, TokenArray

MARK: Final = "\ufdd0"  # a code point Unicode keeps for programs' own use
CUT: Final = "\ufdd2"  # another: the text is tokenized apart on both sides of it


_TAKEN: Final = re.compile(f"[{MARK}{CUT}]")


_LOWER: Final = {ord(c): ord(c.lower()) for c in string.ascii_uppercase}


class _Finder:
    """Finds where any of some texts stand, from left to right, the longest first."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = set(texts)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        first = "".join(map(re.escape, sorted({text[0] for text in self._texts})))
        self._first = re.compile(f"[{first}]" if first else "(?!)")

    def __call__(self, text: str) -> Iterator[tuple[int, int]]:
        at = 0
        while match := self._first.search(text, at):
            at = match.start()
            stop = next((at + n for n in self._lengths if text[at : at + n] in self._texts), 0)
            if stop:
                yield at, stop
            at = max(stop, at + 1)


@dataclass(frozen=True)
class Lexed:
    """A text and its tokens: int32 (n,) ids, int64 (n,) the characters complete after each, and bool (n,) whether it
    belongs to a part that the vocabulary has no tokens for, so that letters are missing or are others."""

    text: str
    ids: TokenArray
    ends: npt.NDArray[np.int64]
    lossy: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, text: str, ids: TokenArray, ends: npt.NDArray[np.int64], *, lossy: bool = False) -> Lexed:
        return cls(text, ids, ends, np.full(len(ids), lossy))

    @classmethod
    def joined(cls, parts: list[Lexed]) -> Lexed:
        at = np.cumsum([0, *(len(part.text) for part in parts)])
        ids = [np.empty(0, np.int32), *(part.ids for part in parts)]
        ends = [np.empty(0, np.int64), *(part.ends + at[i] for i, part in enumerate(parts))]
        lossy = [np.empty(0, np.bool_), *(part.lossy for part in parts)]
        return cls("".join(p.text for p in parts), np.concatenate(ids), np.concatenate(ends), np.concatenate(lossy))

    def after(self, number: int) -> Lexed:
        """Without the first ``number`` tokens and their characters."""
        at = int(self.ends[number - 1]) if number else 0
        return Lexed(self.text[at:], self.ids[number:], self.ends[number:] - at, self.lossy[number:])


def plain(text: str) -> str:
    """A text as it was before it was escaped."""
    return text.replace(MARK, "").replace(CUT, "")


def same_letters(one: str, other: str) -> bool:
    """Whether two texts are equal but for white space and marks. SentencePiece has no other sign for a space than a
    U+2581."""
    first, second = ("".join(plain(text).replace("\u2581", " ").split()) for text in (one, other))
    return first == second


class Markup:
    """Texts of one model's vocabulary."""

    plain = staticmethod(plain)

    def __init__(self, model: Model, template: str = "") -> None:
        self._model = model
        self._control = {text: token for text, token in model.control_tokens.items() if text}
        # Tokens that llama.cpp reads in any text; those a template marks turns with are nobody else's to write.
        marks = [text for text in model.defined_tokens if len(text) > 2 and text in template]
        self._control_ids = np.asarray(list(self._control.values()), np.int32)
        self._find = _Finder(self._control)
        self._acting = _Finder(text.translate(_LOWER) for text in self._control)
        self._marking = _Finder(text.translate(_LOWER) for text in marks)

    def escape(self, text: str, *, own: bool = False) -> str:
        """A text in which nothing acts as a control token, in whatever case. ``own``: it is the model's own, which may
        write the marks of reasoning and of tool calls."""
        text = _marked(_TAKEN.sub("\ufffd", text), self._acting, MARK)
        return text if own else _marked(text, self._marking, CUT)

    def split(self, text: str) -> list[str]:
        """The text cut in front of and behind every control token that acts."""
        cuts = [0, *(cut for found in self._found(text) for cut in found), len(text)]
        return [text[a:b] for a, b in pairwise(cuts) if a < b]

    def _found(self, text: str) -> Iterator[tuple[int, int]]:
        """Where control tokens act: not where a mark stands behind one of a single letter."""
        return ((start, stop) for start, stop in self._find(text) if text[stop : stop + 1] != MARK)

    def is_control(self, part: str) -> bool:
        """Whether a part of :meth:`split` is a control token."""
        return part in self._control

    def acting(self, ids: TokenArray) -> npt.NDArray[np.bool_]:
        """bool (n,): which tokens are control tokens."""
        return np.isin(ids, self._control_ids)

    # -- tokens -------------------------------------------------------------------------------------------------

    def lex(self, text: str) -> Lexed:
        """A rendered text as tokens: as llama_tokenize with parse_special reads it, but for what was escaped."""
        parts = self.split(text)
        return Lexed.joined([self._lex(part, parts[i - 1 : i], parts[i + 1 : i + 2]) for i, part in enumerate(parts)])

    def _lex(self, part: str, before: list[str], after: list[str]) -> Lexed:
        if self.is_control(part):
            return Lexed.of(part, np.asarray([self._control[part]], np.int32), np.asarray([len(part)]))
        text = part
        if before and self._model.swallows(self._control[before[0]])[1]:
            text = text.lstrip()
        if after and self._model.swallows(self._control[after[0]])[0]:
            text = text.rstrip()
        if CUT not in text:
            return self._placed(part, self._model.tokenize(plain(text)))
        pieces = [piece for piece in re.split(f"(?<={CUT})", part) if piece]
        return Lexed.joined([self._placed(p, self._model.tokenize(plain(p))) for p in pieces])

    def _placed(self, part: str, ids: TokenArray) -> Lexed:
        """Tokens of a part without control tokens, and where in it they end. Raises UsageError where the vocabulary has
        no token for any of it."""
        said, ends = self._spelled(ids)
        lossy = not same_letters(part, said)
        if lossy and not len(ids):
            raise UsageError(f"this model's vocabulary has no token for {plain(part)!r}; write it in other letters")
        letters = np.flatnonzero(np.asarray([c not in (MARK, CUT) for c in part], np.bool_))
        ends = ends - max(0, len(said) - len(letters))  # a space that some vocabularies put in front
        places = np.concatenate([[0], letters + 1])[np.clip(ends, 0, len(letters))]
        places[-1:] = len(part)
        return Lexed.of(part, ids, places.astype(np.int64), lossy=lossy)

    def _spelled(self, ids: TokenArray) -> tuple[str, npt.NDArray[np.int64]]:
        stream, text, ends = self._model.text_stream(), "", []
        for token in ids.tolist():
            text += stream.feed(token)
            ends.append(len(text))
        text += stream.finish()
        return text, np.asarray([*ends[:-1], len(text)] if ends else [], np.int64)

    def spell(self, ids: TokenArray) -> str:
        """The text of tokens, control tokens spelled out; nothing is marked in it."""
        pieces = map(self._model.piece, ids.tolist())
        spelled = {token: self._model.piece(token, special=True) for token in ids[self.acting(ids)].tolist()}
        found = (spelled.get(token, piece) for token, piece in zip(ids.tolist(), pieces, strict=True))
        return b"".join(found).decode("utf-8", "replace")

    def said(self, ids: TokenArray) -> Lexed:
        """What a model said, as a text that can be rendered: its control tokens act, what it only spelled does not."""
        return Lexed.joined([self._said(ids[a:b]) for a, b in _runs(self.acting(ids))])

    def _said(self, run: TokenArray) -> Lexed:
        text = self._model.detokenize(run)
        if text in self._control and len(run) == 1:
            return Lexed.of(text, run, np.asarray([len(text)]))
        return self._placed(self.escape(self._spelled(run)[0]), run)


def _marked(text: str, find: _Finder, mark: str) -> str:
    """A text with a mark inside everything that is found in it, in any case."""
    parts, at = [], 0
    for start, stop in find(text.translate(_LOWER)):
        parts += [text[at : start + 1], mark, text[start + 1 : stop]]
        at = stop
    return "".join([*parts, text[at:]])


def _runs(control: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Control tokens one by one, the others in runs."""
    if not len(control):
        return []
    cuts = np.flatnonzero(control | np.concatenate([[True], control[:-1]])).tolist()
    return list(pairwise([*cuts, len(control)]))
