"""Numbers and foreign texts as a person reads them."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """'1 token', '1,912 tokens'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(num_bytes: float) -> str:
    """ "98.4 MB": decimal units, as on download pages."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def milliseconds(ms: float) -> str:
    """'0.4 ms', '3.44 s'."""
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.1f} ms"


def printable(text: str) -> str:
    """A text of somebody else's in one line: what a terminal would act on is U+FFFD."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
