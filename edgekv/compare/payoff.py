"""Payoff: whether a mask answers sooner than a restart, near the user's own lengths, and from which length on.

A mask is called sooner or later only where no turn of one took as long as any turn of the other: of two arms that are
equal, four turns of each come apart like that once in 35 times, either way. Anything less is "no sooner".
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

from edgekv.compare.arms import SAME_COST

TURNS: Final = 4  # of each arm, below which turns that come apart tell nothing


class Gain(NamedTuple):
    """Milliseconds that an arm saves against the restart behind ``suffix`` tokens, at the worst, middle and best."""

    suffix: int
    least: float
    middle: float
    most: float
    turns: int

    @property
    def sooner(self) -> bool | None:
        """None where the turns do not tell."""
        if self.turns < TURNS or self.least <= 0 <= self.most:
            return None
        return self.least > 0


def gain(point: dict[str, Any], arm: str) -> Gain | None:
    """What ``arm`` saves at a point of the curve; None where one of the two was not timed."""
    mine, restart = (point["arms"].get(n, {}).get("ttft_ms") for n in (SAME_COST.get(arm, arm), "restart"))
    if not mine or not restart or not mine["n"] or not restart["n"]:
        return None
    (least, most), (r_least, r_most) = mine["range"], restart["range"]
    turns = min(mine["n"], restart["n"])
    return Gain(point["suffix"], r_least - most, restart["median"] - mine["median"], r_most - least, turns)


Timed: TypeAlias = tuple[dict[str, Any], Gain]


def nearest(data: dict[str, Any], arm: str) -> Timed | None:
    """The point of the curve, and the gain there, nearest to the lengths of the cases, as a ratio; the smallest
    without cases."""
    behind = max(1, data["workload"]["tokens_behind"] or 1)
    return min(_at_one_span(data, arm), key=lambda t: abs(math.log(t[1].suffix / behind)), default=None)


def _at_one_span(data: dict[str, Any], arm: str) -> list[Timed]:
    """The points of the span that is nearest to what the cases mask, in order of the suffix."""
    timed = [(p, found) for p in data["curve"] if (found := gain(p, arm))]
    masked = max(1, data["workload"]["tokens_masked"] or 1)
    span = min((p["span"] for p, _ in timed), key=lambda s: abs(math.log(s / masked)), default=None)
    return sorted((t for t in timed if t[0]["span"] == span), key=lambda t: t[1].suffix)


def break_even(data: dict[str, Any], arm: str) -> dict[str, Any]:
    """From how many tokens behind the span on ``arm`` answers sooner than a restart: {"tokens", "range", "said"}.

    Between two measured lengths where the gain becomes positive, on a straight line, at the span nearest to the cases'.
    ``range``: the same for the best and the worst gain; None for an end outside of what was measured. No number is
    given outside of it, nor where the gain changes its sign more than once.
    """
    timed = _at_one_span(data, arm)
    rows = [found for _, found in timed]
    if len(rows) < 2:
        return {"tokens": None, "range": None, "said": "not measured"}
    first, last = rows[0].suffix, rows[-1].suffix
    low, tokens, high = (
        _crossing([(g.suffix, getattr(g, which)) for g in rows]) for which in ("most", "middle", "least")
    )
    if math.isnan(tokens):
        return {"tokens": None, "range": None, "said": "at no one length, as the timings differ too much"}
    low, high = (first if math.isnan(low) else low), (math.inf if math.isnan(high) else high)
    ends = [end if first < end <= last else None for end in (low, high)]
    worst = f"{high:,.0f}" if high <= last else f"above {last:,}"
    behind = f"tokens behind {timed[0][0]['span']:,} masked"
    if tokens <= first:
        said = f"below {first:,} {behind}" + ("" if high <= first else f" ({worst} at the worst)")
        return {"tokens": None, "range": ends, "said": said}
    if tokens > last:
        return {"tokens": None, "range": ends, "said": f"above {last:,} {behind}, if anywhere"}
    best = f"{low:,.0f}" if low > first else f"below {first:,}"
    return {"tokens": tokens, "range": ends, "said": f"at about {tokens:,.0f} {behind} ({best} to {worst})"}


def _crossing(points: list[tuple[int, float]]) -> float:
    """Where a gain becomes more than 0 for good, on straight lines.

    The first length if it is so from there on, infinity if it never is, NaN where it becomes so and ceases to be.
    """
    signs = [value > 0 for _, value in points]
    changes = [i for i, (a, b) in enumerate(pairwise(signs)) if a != b]
    if not changes:
        return points[0][0] if signs[0] else math.inf
    if len(changes) > 1 or signs[0]:
        return math.nan
    (s0, g0), (s1, g1) = points[changes[0] : changes[0] + 2]
    return s0 + (s1 - s0) * -g0 / (g1 - g0)
