"""Numbers and foreign texts as a person reads them."""

from __future__ import annotations

import operator
import re
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from .errors import UsageError

_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b\s*", re.IGNORECASE)
_EXPONENT: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNITS: Final = "write '256MiB', '2GiB' (of 1,024), '300MB', '1.5 GB' (of 1,000), or a whole number of bytes"


def count(number: int, noun: str) -> str:
    """'1 token', '1,912 tokens'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def states(numbers: Mapping[str, int]) -> str:
    """How many tokens are in which state: 'masked', '1,200 visible, 3 masked', 'empty'."""
    if len(numbers) < 2:
        return next(iter(numbers), "empty")
    return ", ".join(f"{number:,} {name}" for name, number in numbers.items())


def size(num_bytes: float) -> str:
    """ "98.4 MB": decimal units, as on download pages."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def parameters(number: int) -> str:
    """'135M', '1.2B': as models are called by their size."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            short = number / limit
            return f"{short:.1f}{unit}" if short < 10 else f"{short:.0f}{unit}"
    return str(number)


def milliseconds(ms: float) -> str:
    """'0.4 ms', '3.44 s'."""
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.1f} ms"


def printable(text: str) -> str:
    """A text of somebody else's in one line: what a terminal would act on is U+FFFD."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def harmless(text: str) -> str:
    """A text of somebody else's for a terminal, lines and all: control characters are U+FFFD."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def well_formed(text: str) -> str:
    """A text that has UTF-8: halves of surrogate pairs that belong together are joined, lone ones are U+FFFD."""
    if not any("\ud800" <= c <= "\udfff" for c in text):
        return str.__str__(text)  # an enumeration's member, say, is its text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def num_bytes(size: int | str) -> int:
    """Bytes: a whole number, or text such as "256MiB", "1.5 GB" or "300000 B" (kB is 1,000 bytes, KiB 1,024).

    Raises UsageError for anything else, and for less than 0.
    """
    wanted = _parsed(size) if isinstance(size, str) else _whole(size)
    if wanted < 0:
        raise UsageError(f"{size!r} is not a size; {_UNITS}")
    return wanted


def _parsed(size: str) -> int:
    match = _SIZE.fullmatch(size)
    if not match or (match[3] and not match[2]):
        raise UsageError(f"{size!r} is not a size; {_UNITS}")
    return int(Decimal(match[1]) * (1024 if match[3] else 1000) ** _EXPONENT[match[2].lower()])


def _whole(size: object) -> int:
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise UsageError(f"{size!r} is not a size; {_UNITS}")
    return operator.index(size)
