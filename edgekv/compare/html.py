"""The report as one HTML file that needs nothing else: no script, no font, no image from anywhere.

Charts are SVG, drawn here; light and dark follow the reader's system; the tables are those of the Markdown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Final

from edgekv.compare.tables import TITLES, blocks, header

_WIDTH, _HEIGHT = 560, 300
_KL: Final = (1e-5, 100.0)  # what a logarithmic axis shows of 0, and of infinity where an arm rules a token out
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 14, 44
_COLOURS: Final = {
    "mask": "var(--a)", "mask_keep_gap": "var(--b)", "mask_auto": "var(--c)", "mask_recompute": "var(--c)",
    "isolated": "var(--d)", "restart": "var(--e)", "restart_cold": "var(--f)", "full": "var(--g)",
    "cache_reuse": "var(--h)", "placebo": "var(--i)",
    "summary_mask": "var(--a)", "summary_clean": "var(--c)", "summary_restart": "var(--f)",
}  # fmt: skip

_STYLE: Final = """
.edgekv{--bg:#fff;--fg:#1c1f23;--dim:#5b6570;--line:#d9dee4;--a:#0b63c5;--b:#b3541e;--c:#0f8a6a;--d:#7a4fc0;--e:#c2185b;
--f:#8d6e00;--g:#5b6570;--h:#0097a7;--i:#a1443f;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,sans-serif;max-width:1180px;margin:0 auto;padding:1.2rem}
@media(prefers-color-scheme:dark){.edgekv{--bg:#14171b;--fg:#e6e9ec;--dim:#9aa5b1;--line:#333b44;--a:#6db3ff;--b:#ff9a62;
--c:#4fd1ab;--d:#b79bff;--e:#ff6fa3;--f:#e0c04d;--g:#9aa5b1;--h:#5fd6e2;--i:#f08a84}}
.edgekv h1{font-size:1.5rem;margin:.2rem 0}.edgekv h2{font-size:1.1rem;margin:1.8rem 0 .5rem}
.edgekv .verdict{font-size:1.15rem;border-left:4px solid var(--a);padding-left:.8rem;margin:1rem 0}
.edgekv .dim{color:var(--dim);font-size:.9rem}
.edgekv .charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:1rem}
.edgekv figure{margin:0;border:1px solid var(--line);border-radius:8px;padding:.7rem;min-width:0}
.edgekv figcaption{font-weight:600;margin-bottom:.3rem}.edgekv svg{width:100%;height:auto;display:block}
.edgekv svg text{fill:var(--fg);font:12px system-ui,sans-serif}.edgekv svg .dim{fill:var(--dim)}
.edgekv .legend{display:flex;flex-wrap:wrap;gap:.2rem .9rem;font-size:.85rem;margin-top:.3rem}
.edgekv .legend i{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.3rem}
.edgekv .scroll{overflow-x:auto}.edgekv table{border-collapse:collapse;font-size:.88rem;white-space:nowrap}
.edgekv th,.edgekv td{padding:.25rem .7rem;border-bottom:1px solid var(--line);text-align:right}
.edgekv th:first-child,.edgekv td:first-child{text-align:left;position:sticky;left:0;background:var(--bg)}
@media(max-width:600px){.edgekv td:first-child{white-space:normal;max-width:7.5rem}}
"""


def render(data: dict[str, Any]) -> str:
    """A whole document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>edgekv compare: {escape(data['workload']['name'])}</title>"
        "<style>:root{color-scheme:light dark}body{margin:0}@media(prefers-color-scheme:dark){body{background:#14171b}}"
        f"</style></head><body>{body(data)}</body></html>\n"
    )


def body(data: dict[str, Any]) -> str:
    """The report as a fragment, for notebooks."""
    charts = [chart for chart in (ttft(data), distance(data), leak(data)) if chart]
    tables = [f"<h2>{escape(title)}</h2><div class='scroll'>{_table(rows)}</div>" for title, rows in blocks(data)]
    return (
        f"<div class='edgekv'><style>{_STYLE}</style><h1>Mask and go on, or start again?</h1>"
        f"<p class='verdict'>{escape(data['verdict'])}</p><p class='dim'>{escape(header(data))}</p>"
        f"<div class='charts'>{''.join(charts)}</div>{''.join(tables)}"
        "<p class='dim'>KL divergence in nats, of next-token distributions, over the text's true continuation and the "
        "restart's own; intervals are bootstrapped over cases (95 %). A mask frees no memory: cells and bytes are "
        "those of the cache in use.</p></div>"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = ["".join(f"<{tag}>{escape(c)}</{tag}>" for c in row) for row, tag in _tagged(rows)]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{r}</tr>' for r in rest)}</tbody></table>"


def _tagged(rows: Sequence[Sequence[str]]) -> list[tuple[Sequence[str], str]]:
    return [(row, "td" if n else "th") for n, row in enumerate(rows)]


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
    x = _log([p["suffix"] for p in points])
    y = _scale(math.log10(low * 0.8), math.log10(top * 1.2), _HEIGHT - _BOTTOM, _TOP)
    parts = _axis_y(_decades(low, top), lambda v: y(math.log10(v)), lambda v: f"{v:g} s")
    parts += [_x_tick(x(p["suffix"]), f"{p['suffix']:,}") for p in points]
    for name in names:
        line = [(x(p["suffix"]), y(math.log10(v["mid"]))) for p, v in zip(points, seconds[name], strict=True)]
        parts.append(_line(line, _COLOURS[name]))
        for (cx, cy), v in zip(line, seconds[name], strict=True):
            parts.append(_bar(cx, y(math.log10(v["low"])), y(math.log10(v["high"])), _COLOURS[name]))
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
    x, low, top = _log(ends), min(values), max(values)
    scale = _scale(math.log10(low * 0.7), math.log10(top * 1.4), _HEIGHT - _BOTTOM, _TOP)

    def y(value: float) -> float:
        return scale(math.log10(_on_axis(value)))

    def path(points: list[dict[str, Any]]) -> list[tuple[float, float]]:
        return [(x(p["to"]), y(p["kld_mean"])) for p in points]

    parts = _axis_y(_decades(low, top), y, lambda v: f"{v:g}")
    parts += [_x_tick(x(e), f"{e:,}") for e in ends if e == ends[-1] or x(ends[-1]) - x(e) > 34]
    parts.append(_line(path(floor), "var(--dim)", dashed=True))
    for n, r in rows.items():
        parts.append(_line(path(r), _COLOURS[n]))
        parts += [_bar(x(p["to"]), y(p["kld_ci"][0]), y(p["kld_ci"][1]), _COLOURS[n]) for p in r if p["kld_ci"]]
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
    x = _scale(0, 1, left, _WIDTH - 20)
    parts = [_x_tick(x(v), f"{v:.0%}", height - 26) for v in (0, 0.25, 0.5, 0.75, 1)]
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


def _figure(title: str, parts: Sequence[str], below: str, names: Sequence[str], height: int = _HEIGHT) -> str:
    label = f"<text class='dim' x='{(_LEFT + _WIDTH) / 2}' y='{height - 6}' text-anchor='middle'>{escape(below)}</text>"
    legend = "".join(f"<span><i style='background:{_COLOURS[n]}'></i>{escape(TITLES[n])}</span>" for n in names)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption><svg viewBox='0 0 {_WIDTH} {height}' role='img' "
        f"aria-label='{escape(title)}'>{''.join(parts)}{label}</svg><div class='legend'>{legend}</div></figure>"
    )


def _s(found: dict[str, Any], which: str) -> float:
    value = {"low": found["iqr"][0], "mid": found["median"], "high": found["iqr"][1]}[which]
    return max(float(value) / 1e3, 1e-4)


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    width = high - low or 1.0
    return lambda v: start + (v - low) / width * (stop - start)


def _log(values: Sequence[int]) -> Callable[[float], float]:
    low, high = math.log2(min(values)), math.log2(max(values))
    place = _scale(low, high, _LEFT + 20, _WIDTH - _RIGHT - 20) if high > low else lambda _v: (_LEFT + _WIDTH) / 2
    return lambda v: place(math.log2(v))


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between the two."""
    steps = [
        m * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in (1, 2, 5)
    ]
    inside = [s for s in steps if low * 0.8 <= s <= high * 1.25]
    return inside if len(inside) <= 7 else [s for s in inside if f"{s:e}"[0] == "1"]


def _axis_y(ticks: Sequence[float], y: Callable[[float], float], label: Callable[[float], str]) -> list[str]:
    return [
        f"<path d='M{_LEFT} {y(t):.1f}H{_WIDTH - _RIGHT}' stroke='var(--line)'/>"
        f"<text class='dim' x='{_LEFT - 6}' y='{y(t) + 4:.1f}' text-anchor='end'>{label(t)}</text>"
        for t in ticks
    ]


def _x_tick(x: float, label: str, y: float = _HEIGHT - _BOTTOM + 18) -> str:
    return f"<text class='dim' x='{x:.1f}' y='{y:.1f}' text-anchor='middle'>{label}</text>"


def _line(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> str:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dash = " stroke-dasharray='5 4'" if dashed else ""
    return f"<path d='{path}' stroke='{colour}' stroke-width='2' fill='none'{dash}/>"


def _bar(x: float, low: float, high: float, colour: str) -> str:
    return f"<path d='M{x:.1f} {low:.1f}V{high:.1f}' stroke='{colour}' stroke-width='1.5' opacity='.7'/>"
