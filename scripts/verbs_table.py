"""The README's table of verbs, from their docstrings.

    python scripts/verbs_table.py            print it
    python scripts/verbs_table.py --write    put it into README.md, between the two markers

A test compares the two, so neither can drift.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from edgekv import Session

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- verbs -->\n", "<!-- /verbs -->"
VERBS = (
    *("append", "generate", "mask", "unmask", "masked", "park", "evict", "rewind", "insert", "replace", "recompute"),
    *("undo", "attach", "save", "load", "fork", "compact", "mark", "unmark", "score", "logits_over", "logits"),
)


def table() -> str:
    """The table in Markdown: call, what it does, cost, what it guarantees."""
    rows = [("verb", "does", "cost", "guarantees"), ("---",) * 4, *(row(name) for name in VERBS)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def row(name: str) -> tuple[str, str, str, str]:
    method = getattr(Session, name)
    text = inspect.getdoc(method) or ""
    does = plain(text.split("\n\n")[0])
    return (f"`{name}({parameters(method)})`", does, part(text, "Cost"), part(text, "Guarantees"))


def parameters(method: object) -> str:
    """The names a caller gives, defaults that say something with them."""
    known = inspect.signature(method).parameters.values()  # type: ignore[arg-type]
    return ", ".join(p.name for p in known if p.name != "self")


def part(text: str, heading: str) -> str:
    """The first sentence behind a heading of the docstring; raises ValueError without one."""
    found = re.search(rf"^{heading}: (.+?)(?:\.\s|\.$|\.\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"no {heading}: in {text[:60]!r}")
    return plain(found[1])


def plain(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(text.split())).replace("``", "`")
    return text.removesuffix(".").replace("|", "\\|")


def written() -> str:
    """The README with the table as it should be; raises ValueError without the markers."""
    text = README.read_text("utf-8")
    head, tail = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:head] + table() + text[tail:]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(written(), "utf-8")
    else:
        print(table(), end="")
