"""The verdict: what the figures mean, in two sentences, and what to do.

Words for a KL divergence follow llama.cpp's yardstick for quantised weights (LLaMA-3-8B: q8_0 .0014, q4_K_M .031).
What lies within the noise floor is called that, and never a win.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Final, NamedTuple

Q8_0: Final = 0.0014
Q4_K_M: Final = 0.031
_NOISE: Final = 1.5  # times the floor: what a run of another day would still call noise
_SLACK: Final = 0.15  # above chance: what a hundred cases can rule out
_MASKS: Final = (
    *("mask", "summary_mask", "mask_keep_gap", "mask_auto", "cache_reuse", "mask_recompute", "summary_clean"),
    "isolated",
)


def words(kld: float, floor: float) -> str:
    """What a mean KL divergence costs, in words."""
    if kld <= _NOISE * floor:
        return "within noise"
    extra = kld - floor
    if extra <= Q8_0:
        return "like q8_0 weights"
    if extra <= Q4_K_M:
        return "less than q4_K_M weights"
    if extra <= 3 * Q4_K_M:
        return "more than q4_K_M weights"
    return f"{extra / Q4_K_M:.0f}x q4_K_M weights"


class Gain(NamedTuple):
    """Milliseconds that a mask saves behind ``suffix`` tokens."""

    suffix: int
    least: float
    mid: float
    most: float


def break_even(curve: list[dict[str, Any]]) -> dict[str, Any]:
    """From how many tokens behind the span on a mask answers sooner than a restart: {"tokens", "range", "said"}.

    Between the two measured lengths where the sign of the gain changes, on a straight line; at the span of which most
    lengths were measured. ``range``: the same for the gain of a slow mask (third quartile) over a quick restart (first
    quartile), and the other way round. Outside of what was measured no number is given.
    """
    spans = {p["span"] for p in curve}
    rows = max(([g for p in curve if p["span"] == span and (g := _gain(p))] for span in spans), key=len, default=[])
    if len(rows) < 2:
        return {"tokens": None, "range": None, "said": "not measured"}
    rows.sort()
    low, tokens, high = (_crossing([(g.suffix, getattr(g, which)) for g in rows]) for which in ("most", "mid", "least"))
    if not rows[0].suffix < tokens <= rows[-1].suffix:
        side = f"below {rows[0].suffix:,}" if tokens <= rows[0].suffix else f"above {rows[-1].suffix:,}"
        return {"tokens": None, "range": None, "said": f"{side} tokens"}
    ends = [low if low > rows[0].suffix else None, high if high <= rows[-1].suffix else None]
    return {"tokens": tokens, "range": ends, "said": f"at about {tokens:,.0f} tokens ({_between(ends, rows)})"}


def _between(ends: list[float | None], rows: list[Gain]) -> str:
    low = f"below {rows[0].suffix:,}" if ends[0] is None else f"{ends[0]:,.0f}"
    return f"{low} to {f'above {rows[-1].suffix:,}' if ends[1] is None else f'{ends[1]:,.0f}'}"


def _crossing(points: list[tuple[int, float]]) -> float:
    """Where a gain becomes more than 0, on straight lines; the first length if it is so there, infinity if nowhere."""
    if points[0][1] > 0:
        return points[0][0]
    for (s0, g0), (s1, g1) in pairwise(points):
        if g0 <= 0 < g1:
            return s0 + (s1 - s0) * -g0 / (g1 - g0)
    return math.inf


def _gain(point: dict[str, Any]) -> Gain | None:
    mask, restart = (point["arms"].get(n, {}).get("ttft_ms") for n in (_masked(point), "restart"))
    if not mask or not restart or mask["median"] is None or restart["median"] is None:
        return None
    (m_low, m_high), (r_low, r_high) = mask["iqr"], restart["iqr"]
    return Gain(point["suffix"], r_low - m_high, restart["median"] - mask["median"], r_high - m_low)


def _masked(point: dict[str, Any]) -> str:
    return next((n for n in ("mask", "mask_keep_gap", "mask_auto", "cache_reuse") if n in point["arms"]), "mask")


def decide(data: dict[str, Any]) -> tuple[str, str]:
    """(advice, the verdict): "mask", "mask with recompute", "isolate", "restart", or "measure more"."""
    arms = data["arms"]
    name = masking_arm(arms)
    if name is None:
        return "measure more", "No arm of this run masks anything, so there is nothing to decide."
    floor, vs = data["noise"]["vs_restart"].get("kld_mean"), arms[name]["vs_restart"]
    leaks, said = leak_words(arms, name)
    advice = _advice(data, name, floor, leaks)
    even = data["break_even"]["said"]
    pays = "" if even == "not measured" else f" A mask begins to pay {even} behind the span."
    caution = " What leaks is not known." if advice == "mask" and leaks != "nothing" else ""
    return advice, f"{_first(data, vs, floor)} {said}{pays} {_ADVICE[advice]}{caution}"


def masking_arm(arms: dict[str, Any]) -> str | None:
    """The arm the verdict speaks of."""
    return next((n for n in _MASKS if n in arms), None)


_ADVICE: Final = {
    "mask": "Mask and go on.",
    "mask with recompute": 'Mask with then="auto" or "recompute" where the rest must not know of the span.',
    "isolate": "Read texts that are to go later with attend=, so that what follows them can be kept.",
    "restart": "Read again instead: behind so short a text it costs no more.",
    "measure more": "Run it with more cases to decide.",
}


def _first(data: dict[str, Any], vs: dict[str, Any], floor: float | None) -> str:
    point = max((p for p in data["curve"] if _gain(p)), key=lambda p: (p["span"], p["suffix"]), default=None)
    said = "Nothing was timed; " if point is None else _sooner(point)
    if not vs or floor is None:
        return said + "how near it is to a restart was not measured."
    low, high = vs["kld_ci"] or (math.nan, math.nan)
    spread = f" ({low:.4f}-{high:.4f})" if vs["kld_ci"] else ""
    return (
        f"{said}it differs from a restart by a mean KL of {vs['kld_mean']:.4f}{spread}, {vs['cases']} cases: "
        f"{words(vs['kld_mean'], floor)} (noise floor {floor:.4f})."
    )


def _sooner(point: dict[str, Any]) -> str:
    mask, restart = (point["arms"][n]["ttft_ms"] for n in (_masked(point), "restart"))
    behind = f"With {point['suffix']:,} tokens behind the span, "
    if _overlap(mask["iqr"], restart["iqr"]):
        return f"{behind}masking answered no sooner than a restart (n {mask['n']}); "
    a, b = mask["median"], restart["median"]
    return (
        f"{behind}the first token came after {a / 1e3:.2f} s instead of {b / 1e3:.2f} s ({max(a / b, b / a):.1f} times "
        f"{'sooner' if a < b else 'later'}, n {mask['n']}); "
    )


def _overlap(one: list[float], other: list[float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def leak_words(arms: dict[str, Any], name: str) -> tuple[str, str]:
    """("leaks", "nothing", "unknown" or "not asked", and the sentence): what the forced choice says, or that it can
    say nothing."""
    full, mask, restart = (arms.get(n, {}).get("leak") or {} for n in ("full", name, "restart"))
    if not mask.get("n") or not full.get("n") or not restart.get("n"):
        return "not asked", "What still leaks was not asked."
    low, high = mask["ci"]
    found = f"{mask['accuracy']:.0%} of its codes are found ({low:.0%}-{high:.0%}, n {mask['n']})"
    level = max(mask["chance"], restart["accuracy"])
    if full["ci"][0] <= max(full["chance"], restart["ci"][1]):
        if restart["ci"][0] > restart["chance"]:
            return "unknown", f"A restart finds {restart['accuracy']:.0%} of the codes: what stays visible tells them."
        seen = f"with the span in view the model finds {full['accuracy']:.0%} of its codes"
        return "unknown", f"Too small to tell what leaks: {seen} (n {full['n']})."
    if low > mask["chance"] and mask["accuracy"] > restart["ci"][1]:
        return "leaks", f"The span is still decodable: {found}, a restart finds {restart['accuracy']:.0%}."
    if high > level + _SLACK:
        return "unknown", f"Too few cases to tell what leaks: {found}, a restart finds {restart['accuracy']:.0%}."
    return "nothing", f"No direct recall was seen: {found}, a restart finds {restart['accuracy']:.0%}."


def _advice(data: dict[str, Any], name: str, floor: float | None, leaks: str) -> str:
    arms, behind = data["arms"], data["workload"]["tokens_behind"]
    vs, even = arms[name]["vs_restart"], data["break_even"]["tokens"]
    if even is not None and behind is not None and behind < even:
        return "restart"
    if leaks == "leaks":
        return "mask with recompute"
    if not vs or floor is None or vs["kld_ci"] is None:
        return "measure more"
    if vs["kld_mean"] <= _NOISE * floor or vs["kld_ci"][1] - floor <= Q4_K_M:
        return "mask"
    isolated = arms.get("isolated", {}).get("vs_restart", {}).get("kld_mean")
    if isolated is not None and isolated <= _NOISE * floor and (behind or 0) > 64:
        return "isolate"
    return "mask with recompute"
