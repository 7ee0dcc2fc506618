"""The regular expressions of a JSON schema's ``pattern``, as GBNF of the inside of a JSON string.

A subset that every dialect reads in the same way: literals, ``.``, classes, groups, alternatives, greedy counts, and
``^`` and ``$`` at the ends of an alternative. Quotes, backslashes and control characters are written as JSON escapes.
"""

from __future__ import annotations

import json
import re
from typing import Final

#: One character of a JSON string, escaped or not; surrogates, which are half a character, cannot be escaped.
CHAR: Final = (
    r'([^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" ([0-9a-cA-CefEF] [0-9a-fA-F] | [dD] [0-7]) [0-9a-fA-F]{2}))'
)
_PLAIN: Final = r'"\\\x00-\x1F\x7F'  # what a string cannot hold as it is
_CLASSES: Final = {"d": "0-9", "w": "0-9A-Za-z_", "s": " "}
_CONTROL: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}
_COUNT: Final = re.compile(r"\{(\d{1,4})(?:(,)(\d{0,4}))?\}", re.ASCII)
_MOST: Final = 2000


class PatternError(ValueError):
    """A pattern that is not of the subset."""


def literal(text: str) -> str:
    """Text as a GBNF literal."""
    return '"' + "".join(_escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if " " <= char != "\x7f" else f"\\x{ord(char):02X}"


def pattern_rule(pattern: object) -> str:
    """GBNF for what a pattern matches; raises PatternError."""
    if not isinstance(pattern, str):
        raise PatternError("must be text")
    reader = _Reader(pattern)
    rule = reader.alternatives(top=True)
    if reader.at < len(pattern):
        raise PatternError(f"{pattern[reader.at]!r} at {reader.at} has no partner")
    return rule


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def _next(self) -> str:
        return self.text[self.at : self.at + 1]

    def alternatives(self, top: bool = False) -> str:
        found = [self._sequence(top)]
        while self._next() == "|":
            self.at += 1
            found.append(self._sequence(top))
        return " | ".join(found)

    def _sequence(self, top: bool) -> str:
        """One alternative; at the top, what is not anchored may have anything around it."""
        parts: list[str] = []
        before = after = "char*" if top else ""
        if top and self._next() == "^":
            self.at, before = self.at + 1, ""
        while (char := self._next()) and char not in "|)":
            if top and char == "$" and self.text[self.at + 1 : self.at + 2] in ("", "|"):
                self.at, after = self.at + 1, ""
                break
            parts.append(self._counted(self._unit()))
        return " ".join(part for part in (before, *parts, after) if part) or '""'

    def _counted(self, unit: str) -> str:
        char = self._next()
        if char and char in "*+?":
            self.at += 1
            count = char
        elif char == "{":
            if not (found := _COUNT.match(self.text, self.at)):
                raise PatternError(f"a count such as {{2,3}} is expected at {self.at}")
            least, most = int(found[1]), int(found[3]) if found[3] else None if found[2] else int(found[1])
            if max(least, most or 0) > _MOST or (most is not None and least > most):
                raise PatternError(f"a count above {_MOST}, or the first above the second, at {self.at}")
            self.at, count = found.end(), f"{{{least},{'' if most is None else most}}}"
            if most == 0:
                unit, count = '""', ""
        else:
            return unit
        if (after := self._next()) and after in "*+?{":
            raise PatternError(f"{after!r} at {self.at} follows another count")
        return unit + count

    def _unit(self) -> str:
        char, start = self._next(), self.at
        self.at += 1
        if char == "(":
            if self._next() == "?":
                if not self.text.startswith("?:", self.at):
                    raise PatternError(f"'(?' at {start} (of these only '(?:' is known)")
                self.at += 2
            inner = self.alternatives()
            if self._next() != ")":
                raise PatternError(f"'(' at {start} has no partner")
            self.at += 1
            return f"({inner})"
        if char == "[":
            return self._class()
        if char == ".":
            return rf"[^{_PLAIN}\x85\U00002028\U00002029]"
        if char == "\\":
            named = self._escape(start)
            return f"[{_CLASSES[named[1]]}]" if len(named) == 2 else _in_string(named)
        if char in "^$*+?{":
            raise PatternError(f"{char!r} at {start}")
        return _in_string(char)

    def _escape(self, start: int) -> str:
        """The character an escape is for, or a backslash and the letter of a class."""
        char = self._next()
        self.at += 1
        if char in _CLASSES:
            return "\\" + char
        if char in _CONTROL:
            return _CONTROL[char]
        if char == "" or char.isalnum():
            raise PatternError(f"'\\{char}' at {start}")
        return char

    def _class(self) -> str:
        negated = self._next() == "^"
        self.at += negated
        inside, special = "", set[str]()
        while (char := self._next()) != "]" or not (inside or special):
            place = self.at
            if char in ("", "]"):
                raise PatternError("a class that is empty or has no end")
            self.at += 1
            if char in "[&~|-" and (char == "[" or self._next() == char):
                raise PatternError(f"{char!r} at {place} inside a class")
            named = self._escape(place) if char == "\\" else char
            if len(named) == 2:
                if negated:
                    raise PatternError(f"'{named}' at {place} inside a negated class")
                inside += _CLASSES[named[1]]
                continue
            last = named
            if self._next() == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                end = self._next()
                self.at += 1
                last = self._escape(place) if end == "\\" else end
                if len(last) == 2 or last < named:
                    raise PatternError(f"a range at {place}")
            if negated:
                inside += _range(ord(named), ord(last))
                continue
            # What must be escaped in JSON is an alternative of its own.
            special |= {c for c in map(chr, range(128)) if named <= c <= last and _must_escape(c)}
            low = ord(named)
            for at in [*sorted(map(ord, special)), 0x110000]:
                if low <= (top := min(at - 1, ord(last))):
                    inside += _range(low, top)
                low = max(low, at + 1)
        self.at += 1
        if negated:
            return f"[^{_PLAIN}{inside}]"
        parts = [f"[{inside}]"] if inside else []
        return f"({' | '.join([*parts, *map(_in_string, sorted(special))])})"


def _must_escape(char: str) -> bool:
    return char in '"\\\x7f' or char < " "


def _range(low: int, high: int) -> str:
    return f"\\U{low:08X}" + (f"-\\U{high:08X}" if high > low else "")


def _in_string(char: str) -> str:
    """One character, as it is written inside a JSON string."""
    if "\ud800" <= char <= "\udfff":
        raise PatternError("half a character (a surrogate)")
    return literal("\\u007f" if char == "\x7f" else json.dumps(char, ensure_ascii=False)[1:-1])
