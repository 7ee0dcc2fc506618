"""Pages that need nothing else, and the charts on them: no script, no font, no image from anywhere.

Charts are SVG, drawn here; light and dark follow the reader's system. Colours are the style's variables, "var(--a)".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Final, TypeAlias

WIDTH: Final = 560
HEIGHT: Final = 300
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 44

STYLE: Final = """
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

#: What stands in a legend: a title and its colour.
Entry: TypeAlias = tuple[str, str]


# -- pages ----------------------------------------------------------------------------------------------------------


def page(title: str, body: str) -> str:
    """A whole document around a fragment of :func:`fragment`."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title>"
        "<style>:root{color-scheme:light dark}body{margin:0}@media(prefers-color-scheme:dark){body{background:#14171b}}"
        f"</style></head><body>{body}</body></html>\n"
    )


def fragment(inside: str) -> str:
    """Something that stands in this style, also in a notebook."""
    return f"<div class='edgekv'><style>{STYLE}</style>{inside}</div>"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text, the first of them the head."""
    head, *rest = ["".join(f"<{tag}>{escape(c)}</{tag}>" for c in row) for row, tag in _tagged(rows)]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{r}</tr>' for r in rest)}</tbody></table>"


def _tagged(rows: Sequence[Sequence[str]]) -> list[tuple[Sequence[str], str]]:
    return [(row, "td" if n else "th") for n, row in enumerate(rows)]


def figure(title: str, parts: Sequence[str], below: str, legend: Sequence[Entry], height: int = HEIGHT) -> str:
    """A chart of ``parts``, with its title and what the axis below it means."""
    label = f"<text class='dim' x='{(LEFT + WIDTH) / 2}' y='{height - 6}' text-anchor='middle'>{escape(below)}</text>"
    keys = "".join(f"<span><i style='background:{colour}'></i>{escape(name)}</span>" for name, colour in legend)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption><svg viewBox='0 0 {WIDTH} {height}' role='img' "
        f"aria-label='{escape(title)}'>{''.join(parts)}{label}</svg><div class='legend'>{keys}</div></figure>"
    )


# -- scales ---------------------------------------------------------------------------------------------------------


def scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """Values from ``low`` to ``high`` at places from ``start`` to ``stop``."""
    width = high - low or 1.0
    return lambda v: start + (v - low) / width * (stop - start)


def log_x(values: Sequence[int]) -> Callable[[float], float]:
    """Places from left to right, each as far from the next as it is times as much."""
    low, high = math.log2(min(values)), math.log2(max(values))
    place = scale(low, high, LEFT + 20, WIDTH - RIGHT - 20) if high > low else lambda _v: (LEFT + WIDTH) / 2
    return lambda v: place(math.log2(v))


def log_y(low: float, high: float) -> Callable[[float], float]:
    """Places from the bottom up, each as far from the next as it is times as much."""
    place = scale(math.log10(low), math.log10(high), HEIGHT - BOTTOM, TOP)
    return lambda v: place(math.log10(v))


def decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between the two."""
    steps = [
        m * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in (1, 2, 5)
    ]
    inside = [s for s in steps if low * 0.8 <= s <= high * 1.25]
    return inside if len(inside) <= 7 else [s for s in inside if f"{s:e}"[0] == "1"]


def steps(high: float) -> list[float]:
    """From 0 on, by 1, 2 or 5 times a power of ten, up to ``high``: at most seven."""
    power = 10.0 ** math.floor(math.log10(high)) if high > 0 else 1.0
    step = next(s for s in (power / 5, power / 2, power, 2 * power) if high / s <= 6)
    return [step * n for n in range(int(high / step + 1e-9) + 1)]


# -- marks ----------------------------------------------------------------------------------------------------------


def axis_y(ticks: Sequence[float], y: Callable[[float], float], label: Callable[[float], str]) -> list[str]:
    return [
        f"<path d='M{LEFT} {y(t):.1f}H{WIDTH - RIGHT}' stroke='var(--line)'/>"
        f"<text class='dim' x='{LEFT - 6}' y='{y(t) + 4:.1f}' text-anchor='end'>{label(t)}</text>"
        for t in ticks
    ]


def x_tick(x: float, label: str, y: float = HEIGHT - BOTTOM + 18) -> str:
    return f"<text class='dim' x='{x:.1f}' y='{y:.1f}' text-anchor='middle'>{label}</text>"


def line(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> str:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dash = " stroke-dasharray='5 4'" if dashed else ""
    return f"<path d='{path}' stroke='{colour}' stroke-width='2' fill='none'{dash}/>"


def bar(x: float, low: float, high: float, colour: str) -> str:
    return f"<path d='M{x:.1f} {low:.1f}V{high:.1f}' stroke='{colour}' stroke-width='1.5' opacity='.7'/>"
