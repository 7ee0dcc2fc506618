"""The report as Markdown, for issues and READMEs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgekv.compare.tables import blocks, header


def render(data: dict[str, Any]) -> str:
    """The verdict, the header, the three blocks, the curve."""
    parts = [f"**{data['verdict']}**", header(data)]
    for title, rows in blocks(data):
        parts += [f"### {title}", table(rows)]
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])
