"""Numbers and foreign texts as a person reads them."""

from __future__ import annotations

import codecs
import operator
import re
import unicodedata
import warnings
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

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


def mended(text: str) -> str:
    """A text from an argument, a terminal or a JSON string without lone surrogates, which have no UTF-8: bytes that
    Python has escaped in them are decoded, surrogate pairs are joined, and what is left is U+FFFD."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:
        return well_formed(text)


def mended_json(value: Any) -> Any:
    """A value from JSON, whose texts may hold lone surrogates, with all of them :func:`mended`."""
    if isinstance(value, str):
        return mended(value)
    if isinstance(value, dict):
        return {mended(key): mended_json(item) for key, item in value.items()}
    return [mended_json(item) for item in value] if isinstance(value, list) else value


#: Byte order marks and what they announce; the longer ones first, as UTF-32's begins as UTF-16's does.
_MARKS: Final = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def encoding_of(beginning: bytes) -> str:
    """The encoding that a byte order mark announces; UTF-8 where there is none."""
    return next((name for mark, name in _MARKS if beginning.startswith(mark)), "utf-8")


def decoded(data: bytes, source: str) -> str:
    """The text of a file or a pipe without its byte order mark; line ends stay as they are.

    UTF-8, or UTF-16 or UTF-32 with a byte order mark; other bytes become U+FFFD, with a warning that names
    ``source``. Raises UsageError for data that is no text: UTF-16 without a mark, a picture, a model.
    """
    encoding = encoding_of(data)
    try:
        text = data.decode(encoding)
        binary = encoding == "utf-8" and data.count(0) * 8 > len(data)
    except UnicodeDecodeError as err:
        text, binary = data.decode(encoding, "replace"), encoding.startswith("utf-8") and 0 in data
        if not binary:
            at, name = err.start, encoding.upper().removesuffix("-SIG")
            byte = f"0x{data[at]:02x}" if at < len(data) else "missing"
            warnings.warn(
                f"{source} is not {name} text: byte {at:,} is {byte}; such bytes are replaced by U+FFFD", stacklevel=2
            )
    if binary:
        raise UsageError(
            f"{source} is not text: it holds zero bytes, as binary files do, and UTF-16 without a byte order mark; "
            "convert it to UTF-8 first"
        )
    return text


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
