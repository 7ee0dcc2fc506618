"""Wrapping: a text that comes in pieces, broken between words at the edge of a window."""

from __future__ import annotations

import re

from rich.cells import cell_len

_WORD = re.compile(r"\s+|\S+")


class Wrap:
    """Feed it pieces; what comes back may be printed. A word is held back until it is whole. Words that are wider than
    the window are left to the terminal, and so is the width of a line that a program formatted: one that begins with
    white space or in a fence of code."""

    def __init__(self, width: int) -> None:
        self._width, self._column = max(1, width), 0
        self._held, self._line = "", ""
        self._fenced = False

    def feed(self, piece: str) -> str:
        self._held += piece
        words = _WORD.findall(self._held)
        whole = words[:-1] if words and not words[-1].isspace() else words
        self._held = "" if len(whole) == len(words) else words[-1]
        return "".join(map(self._put, whole))

    def finish(self) -> str:
        """What was held back."""
        rest, self._held = self._held, ""
        return self._put(rest) if rest else ""

    def _put(self, word: str) -> str:
        if "\n" in word:
            return self._new_line(word)
        self._line += word
        size = cell_len(word)
        if self._fenced or self._line[0].isspace():
            return word
        if word.isspace() and self._column + size >= self._width:
            self._column = self._width  # not shown: the terminal would begin a line for it
            return ""
        if self._column + size <= self._width or size > self._width:
            self._column = (self._column + size) % self._width if size > self._width else self._column + size
            return word
        self._column = size
        return f"\n{word}"

    def _new_line(self, word: str) -> str:
        if self._line.lstrip().startswith("```"):
            self._fenced = not self._fenced
        self._line = word.rsplit("\n", 1)[-1]
        self._column = cell_len(self._line)
        return word
