"""The result as one HTML file that needs nothing else: two charts, the table, the sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Final

from edgekv.compare.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    axis_y,
    decades,
    figure,
    fragment,
    line,
    log_y,
    page,
    scale,
    steps,
    table,
    x_tick,
)
from edgekv.longrun.result import TITLES, Result

_COLOURS: Final = {"mask": "var(--a)", "summarise": "var(--c)", "reread": "var(--b)", "llama_cpp": "var(--d)"}
_DASHED: Final = "llama_cpp"  # it often runs where another line does
_LEGEND: Final = [(TITLES[n] + " (dashed)" * (n == _DASHED), colour) for n, colour in _COLOURS.items()]
_BELOW: Final = "turn"


def render(result: Result) -> str:
    """A whole document."""
    return page(f"edgekv bench chat: {result.facts['model']['name']}", body(result))


def body(result: Result) -> str:
    """The same as a fragment, for notebooks."""
    charts = [ttft(result), tokens(result)] if result.num_turns else []
    notes = [f"{TITLES[name]}: {note}" for name, notes in result.notes.items() for note in notes]
    return fragment(
        "<h1>A long chat in a small cache</h1>"
        f"<p class='verdict'>{escape(result.verdict)}</p><p class='dim'>{escape(result.header)}</p>"
        f"<div class='charts'>{''.join(charts)}</div><div class='scroll'>{table(result.rows())}</div>"
        "<p class='dim'>TTFT: from the message handed over to the first piece of the answer; summaries count to the "
        "turn that waits for them. Tokens read: prompts and answers; again: beyond those that were new.</p>"
        + "".join(f"<p class='dim'>{escape(note)}</p>" for note in notes)
    )


def ttft(result: Result) -> str:
    """Seconds to the first token by turn, on a logarithmic axis."""
    series = {name: [max(t.ttft_ms / 1e3, 1e-4) for t in turns] for name, turns in result.turns.items()}
    low, high = min(map(min, series.values())), max(map(max, series.values()))
    y = log_y(low * 0.8, high * 1.2)
    parts = axis_y(decades(low, high), y, lambda v: f"{v:g} s")
    return figure("First token, by turn", [*parts, *_lines(series, y)], _BELOW, _LEGEND)


def tokens(result: Result) -> str:
    """Tokens read so far, prompts and answers, by turn."""
    series = {name: list(accumulate(t.read for t in turns)) for name, turns in result.turns.items()}
    high = max(map(max, series.values()))
    y = scale(0, high * 1.05, HEIGHT - BOTTOM, TOP)
    parts = axis_y(steps(high), y, lambda v: f"{v:,.0f}")
    return figure("Tokens read so far", [*parts, *_lines(series, y)], _BELOW, _LEGEND)


def _lines(series: Mapping[str, Sequence[float]], y: Callable[[float], float]) -> list[str]:
    """A line a way over the turns, and the turns below them."""
    num = max(map(len, series.values()))
    x = scale(1, num, LEFT + 12, WIDTH - RIGHT - 12)
    marks = [x_tick(x(turn), f"{turn:.0f}") for turn in steps(num)[1:] if turn == int(turn)]
    for name, values in series.items():
        path = [(x(turn), y(value)) for turn, value in enumerate(values, 1)]
        marks.append(line(path, _COLOURS[name], dashed=name == _DASHED))
    return marks
