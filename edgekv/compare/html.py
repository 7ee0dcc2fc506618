"""The report as one HTML file that needs nothing else; the tables are those of the Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Final

from edgekv.compare.charts import (
    HEIGHT,
    WIDTH,
    axis_y,
    bar,
    decades,
    figure,
    fragment,
    line,
    log_x,
    log_y,
    page,
    scale,
    table,
    x_tick,
)
from edgekv.compare.tables import TITLES, blocks, header

_KL: Final = (1e-5, 100.0)  # what a logarithmic axis shows of 0, and of infinity where an arm rules a token out
_COLOURS: Final = {
    "mask": "var(--a)", "mask_keep_gap": "var(--b)", "mask_auto": "var(--c)", "mask_recompute": "var(--c)",
    "isolated": "var(--d)", "restart": "var(--e)", "restart_cold": "var(--f)", "full": "var(--g)",
    "cache_reuse": "var(--h)", "placebo": "var(--i)",
    "summary_mask": "var(--a)", "summary_clean": "var(--c)", "summary_restart": "var(--f)",
}  # fmt: skip


def render(data: dict[str, Any]) -> str:
    """A whole document."""
    return page(f"edgekv compare: {data['workload']['name']}", body(data))


def body(data: dict[str, Any]) -> str:
    """The report as a fragment, for notebooks."""
    charts = [chart for chart in (ttft(data), distance(data), leak(data)) if chart]
    tables = [f"<h2>{escape(title)}</h2><div class='scroll'>{table(rows)}</div>" for title, rows in blocks(data)]
    return fragment(
        "<h1>Mask and go on, or start again?</h1>"
        f"<p class='verdict'>{escape(data['verdict'])}</p><p class='dim'>{escape(header(data))}</p>"
        f"<div class='charts'>{''.join(charts)}</div>{''.join(tables)}"
        "<p class='dim'>KL divergence in nats, of next-token distributions, over the text's true continuation and the "
        "restart's own; intervals are bootstrapped over cases (95 %). A mask frees no memory: cells and bytes are "
        "those of the cache in use.</p>"
    )


# -- charts ---------------------------------------------------------------------------------------------------------


def ttft(data: dict[str, Any]) -> str:
    """Seconds to the first token over the suffix length, at the longest span; quartiles as bars."""
    longest = max((p["span"] for p in data["curve"]), default=0)
    points = [p for p in data["curve"] if p["span"] == longest]
    names = [n for n in TITLES if all(n in p["arms"] and p["arms"][n]["ttft_ms"]["median"] for p in points)]
    if not points or not names:
        return ""
    seconds = {n: [{k: _s(p["arms"][n]["ttft_ms"], k) for k in ("low", "mid", "high")} for p in points] for n in names}
    top = max(v["high"] for series in seconds.values() for v in series)
    low = min(v["low"] for series in seconds.values() for v in series)
    x = log_x([p["suffix"] for p in points])
    y = log_y(low * 0.8, top * 1.2)
    parts = axis_y(decades(low, top), y, lambda v: f"{v:g} s")
    parts += [x_tick(x(p["suffix"]), f"{p['suffix']:,}") for p in points]
    for name in names:
        path = [(x(p["suffix"]), y(v["mid"])) for p, v in zip(points, seconds[name], strict=True)]
        parts.append(line(path, _COLOURS[name]))
        for (cx, cy), v in zip(path, seconds[name], strict=True):
            parts.append(bar(cx, y(v["low"]), y(v["high"]), _COLOURS[name]))
            parts.append(f"<circle cx='{cx:.1f}' cy='{cy:.1f}' r='3.5' fill='{_COLOURS[name]}'/>")
    return _figure(f"First token after the edit, {longest:,} tokens masked", parts, "tokens behind the span", names)


def distance(data: dict[str, Any]) -> str:
    """Mean KL from the restart by the number of tokens behind the question, intervals as bars; the floor is dashed."""
    rows = {n: a["vs_restart"]["kld_by_distance"] for n, a in data["arms"].items() if a["vs_restart"]}
    rows = {n: r for n, r in rows.items() if n not in ("full", "restart", "placebo", "restart_cold")}
    floor = data["noise"]["vs_restart"].get("kld_by_distance")
    if not rows or not floor:
        return ""
    every = [p for r in (*rows.values(), floor) for p in r]
    values = [_on_axis(v) for p in every for v in (p["kld_mean"], *(p["kld_ci"] or ()))]
    ends = sorted({p["to"] for r in rows.values() for p in r})
    x, low, top = log_x(ends), min(values), max(values)
    place = log_y(low * 0.7, top * 1.4)

    def y(value: float) -> float:
        return place(_on_axis(value))

    def path(points: list[dict[str, Any]]) -> list[tuple[float, float]]:
        return [(x(p["to"]), y(p["kld_mean"])) for p in points]

    parts = axis_y(decades(low, top), y, lambda v: f"{v:g}")
    parts += [x_tick(x(e), f"{e:,}") for e in ends if e == ends[-1] or x(ends[-1]) - x(e) > 34]
    parts.append(line(path(floor), "var(--dim)", dashed=True))
    for n, r in rows.items():
        parts.append(line(path(r), _COLOURS[n]))
        parts += [bar(x(p["to"]), y(p["kld_ci"][0]), y(p["kld_ci"][1]), _COLOURS[n]) for p in r if p["kld_ci"]]
    return _figure("KL divergence from the restart (dashed: noise)", parts, "tokens behind the question", list(rows))


def _on_axis(kld: float) -> float:
    return min(max(kld, _KL[0]), _KL[1])


def leak(data: dict[str, Any]) -> str:
    """Codes found, with Wilson intervals, against chance."""
    arms = {n: a["leak"] for n, a in data["arms"].items() if a["leak"].get("n")}
    if not arms:
        return ""
    bars = {TITLES[n]: (found, _COLOURS[n]) for n, found in arms.items()}
    if data["controls"].get("n"):
        bars["control: never told"] = (data["controls"], "var(--dim)")
    height, left = 26 * len(bars) + 46, 190
    x = scale(0, 1, left, WIDTH - 20)
    parts = [x_tick(x(v), f"{v:.0%}", height - 26) for v in (0, 0.25, 0.5, 0.75, 1)]
    for row, (title, (found, colour)) in enumerate(bars.items()):
        cy = 18 + 26 * row
        parts += _leak_bar(cy, left, x, found, title, colour)
    chance = x(next(iter(arms.values()))["chance"])
    parts.append(f"<path d='M{chance:.1f} 4V{height - 36}' stroke='var(--dim)' stroke-dasharray='4 3'/>")
    return _figure("Codes of the masked span that are found (dashed: chance)", parts, "", [], height)


def _leak_bar(
    cy: int, left: int, x: Callable[[float], float], found: dict[str, Any], title: str, colour: str
) -> list[str]:
    low, high = (x(end) for end in found["ci"])
    width = max(1.0, x(found["accuracy"]) - left)
    whisker = f"M{low:.1f} {cy}H{high:.1f}M{low:.1f} {cy - 5}v10M{high:.1f} {cy - 5}v10"
    return [
        f"<text x='{left - 8}' y='{cy + 4}' text-anchor='end'>{escape(title)}</text>",
        f"<rect x='{left}' y='{cy - 8}' width='{width:.1f}' height='16' fill='{colour}' opacity='.75'/>",
        f"<path d='{whisker}' stroke='var(--fg)' fill='none'/>",
    ]


def _figure(title: str, parts: Sequence[str], below: str, names: Sequence[str], height: int = HEIGHT) -> str:
    return figure(title, parts, below, [(TITLES[n], _COLOURS[n]) for n in names], height)


def _s(found: dict[str, Any], which: str) -> float:
    value = {"low": found["iqr"][0], "mid": found["median"], "high": found["iqr"][1]}[which]
    return max(float(value) / 1e3, 1e-4)
