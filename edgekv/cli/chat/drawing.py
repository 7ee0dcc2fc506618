"""Drawings of a chat for a person: tables, and the map of cells. rich does the layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from edgekv import render
from edgekv.cellmap import cell_map
from edgekv.wording import count, printable, size, states

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from edgekv import Session, Span
    from edgekv.cli.chat.conversations import Kept

_COLOURS: Final = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_OTHER: Final = "blue"
_VISIBLE, _MASKED, _FREE, _OTHERS = "█", "▒", "·", "▫"
_LINES: Final = 8  # that a map takes at most
_PREVIEW: Final = 60  # columns of a preview at most
_WIDE: Final = 90  # columns from which a list of conversations has names and models
_NARROW: Final = 60  # columns below which previews of texts are left out


def rows(lines: Iterable[Sequence[str]]) -> Table:
    """Lines of a name and what there is to say."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for line in lines:
        table.add_row(*(Text(printable(cell), style="bold" if not n else "") for n, cell in enumerate(line)))
    return table


class Spans:
    """The spans of a session and their states, fitted to the window."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        session, wide = self._session, options.max_width >= _NARROW
        lines = [self._line(span) for span in session.spans]
        taken = sum(max((cell_len(line[n]) for line in lines), default=0) + 2 for n in range(3))
        room = min(_PREVIEW, options.max_width - max(taken, len("span  tokens  state  ")))
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for title in ("span", "tokens", "state", *(["text"] if wide else [])):
            table.add_column(title, justify="right" if title == "tokens" else "left", no_wrap=title != "state")
        for span, line in zip(session.spans, lines, strict=True):
            cells = [Text(line[0], style=_COLOURS.get(span.role, _OTHER)), *map(Text, line[1:])]
            table.add_row(*cells, *([Text(self._begins(span, room))] if wide else []))
        yield table

    def _line(self, span: Span) -> tuple[str, str, str]:
        pinned = "pinned, " if "pinned" in span.tags else ""
        return (printable(span.name), f"{len(span):,}", pinned + states(render.states_of(self._session, span)))

    def _begins(self, span: Span, room: int) -> str:
        text = render.preview(self._session.model, self._session.tokens[span.start : span.stop])
        return text if cell_len(text) <= room else set_cell_size(text, max(1, room - 1)).rstrip() + "…"


class Listed:
    """The conversations that are kept, fitted to the window, and how many they are."""

    def __init__(self, entries: list[Kept], summary: str) -> None:
        self._entries, self._summary = entries, summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._entries:
            yield _conversations(self._entries, options.max_width)
        yield Text(self._summary, style="dim")


def _conversations(entries: list[Kept], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2 if width >= _NARROW else 1, 0, 0))
    table.add_column("#", justify="right", no_wrap=True, min_width=len(str(len(entries))))
    columns: dict[str, Callable[[Kept], str]] = {"changed": lambda kept: f"{kept.changed:%Y-%m-%d %H:%M}"}
    if width >= _WIDE:
        columns |= {"name": lambda kept: kept.name, "model": lambda kept: kept.model}
    columns |= {"turns": lambda kept: f"{kept.turns:,}", "size": lambda kept: size(kept.size)}
    if width < _NARROW:
        columns = {}
    for title in columns:
        table.add_column(title, justify="right" if title in ("turns", "size") else "left", no_wrap=True)
    table.add_column("begins with", overflow="ellipsis", no_wrap=True)
    for number, kept in enumerate(entries, 1):
        row = (str(number), *(cell(kept) for cell in columns.values()), kept.problem or kept.begins)
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


class Cells:
    """The cells in use, in the order of the text: filled what the model sees, shaded what is masked, a dot what is
    free; the colour says whose words they hold."""

    def __init__(self, session: Session) -> None:
        self._session, self._map = session, cell_map(session)
        self._turns = tuple(span for span in session.spans if "turn" in span.tags)

    def facts(self) -> dict[str, Any]:
        """In the order of the text: runs of (turn, state, cells)."""
        m = self._map
        names = [self._turns[k].name if k >= 0 else "" for k in m.spans(self._turns)]
        runs: list[dict[str, Any]] = []
        for name, visible in zip(names, m.visible.tolist(), strict=True):
            state = "visible" if visible else "masked"
            if runs and (runs[-1]["span"], runs[-1]["state"]) == (name, state):
                runs[-1]["cells"] += 1
            else:
                runs.append({"span": name, "state": state, "cells": 1})
        return {"cells": m.cells, "used": len(m.index), "others": m.others, "runs": runs}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        m, width = self._map, options.max_width
        each = max(1, -(-m.cells // (width * _LINES)))  # cells a character
        owner = m.spans(self._turns)
        line = Text()
        for at in range(0, m.cells, each):
            line.append(*self._mark(owner[at : at + each], m.visible[at : at + each], at >= len(m.index) + m.others))
        yield line
        yield self._legend(each)

    def _mark(self, owner: np.ndarray[Any, Any], visible: np.ndarray[Any, Any], free: bool) -> tuple[str, str]:
        """The sign and colour of some cells: what most of them are."""
        if not len(owner):
            return (_FREE, "dim") if free else (_OTHERS, "dim")
        most = Counter(owner.tolist()).most_common(1)[0][0]
        colour = _COLOURS.get(self._turns[most].role, _OTHER) if most >= 0 else _OTHER
        return (_VISIBLE, colour) if visible.mean() >= 0.5 else (_MASKED, colour)

    def _legend(self, each: int) -> Text:
        stats = self._session.stats
        text = Text(f"{count(each, 'cell')} a sign  " if each > 1 else "")
        for role, colour in _COLOURS.items():
            if any(turn.role == role for turn in self._turns):
                text.append(f"{_VISIBLE} {role}  ", colour)
        text.append(f"{_MASKED} masked {stats.masked:,}  {_FREE} free {stats.cells - stats.cells_used:,}")
        text.append(f"  parked {stats.parked:,}  evicted {stats.evicted:,}" if stats.parked or stats.evicted else "")
        return text
