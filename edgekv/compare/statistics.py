"""Spreads and intervals, in numpy: what stands beside every figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = Sequence[float] | npt.NDArray[np.floating[Any]]
Interval: TypeAlias = list[float] | None

_RESAMPLES: Final = 2000
_Z95: Final = 1.959963984540054


def spread(values: Numbers) -> dict[str, Any]:
    """Median and quartiles: {"median", "iqr": [25 %, 75 %], "n"}; nulls where there are none."""
    if not len(values):
        return {"median": None, "iqr": None, "n": 0}
    low, middle, high = (float(q) for q in np.percentile(np.asarray(values), [25, 50, 75]))
    return {"median": middle, "iqr": [low, high], "n": len(values)}


def mean_ci(groups: Sequence[Numbers], seed: int = 0) -> tuple[float, Interval]:
    """The mean over all values, and its 95 % bootstrap interval when whole groups are drawn again with replacement.

    Tokens of one case are not independent, so a case is the unit that is drawn (Efron & Tibshirani, 1993, percentile
    method, 2,000 resamples). The interval is None with fewer than two groups.
    """
    kept = [np.asarray(g, np.float64) for g in groups if len(g)]
    if not kept:
        return math.nan, None
    sums, sizes = np.array([g.sum() for g in kept]), np.array([len(g) for g in kept])
    drawn = draws(len(kept), seed)
    return float(sums.sum() / sizes.sum()), interval(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1), len(kept))


def quantile_ci(groups: Sequence[Numbers], q: float, seed: int = 0) -> tuple[float, Interval]:
    """The quantile ``q`` (0..1, linear between values) over all values, and its interval as in :func:`mean_ci`."""
    kept = [np.asarray(g, np.float64) for g in groups if len(g)]
    if not kept:
        return math.nan, None
    values, owner = np.concatenate(kept), np.repeat(np.arange(len(kept)), [len(g) for g in kept])
    order = np.argsort(values, kind="stable")
    values, owner = values[order], owner[order]
    times = np.stack([np.bincount(drawn, minlength=len(kept)) for drawn in draws(len(kept), seed)])
    samples = np.array([_quantile(np.repeat(values, each[owner]), q) for each in times])
    return _quantile(values, q), interval(samples, len(kept))


def _quantile(ordered: npt.NDArray[np.float64], q: float) -> float:
    """Of values in order, which may be infinite; np.quantile would sort them again, two thousand times."""
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] if ordered[low] == ordered[high] else np.interp(at, [low, high], ordered[[low, high]]))


def draws(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """int64 (2000, count): which of ``count`` cases each resample holds."""
    return np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))


def interval(samples: npt.NDArray[np.float64], count: int) -> Interval:
    """The middle 95 % of what resamples of ``count`` cases gave; None where one case says nothing of the others."""
    if count < 2:
        return None
    ordered = np.sort(samples)
    return [_quantile(ordered, 0.025), _quantile(ordered, 0.975)]


def wilson(hits: float, n: int) -> Interval:
    """The 95 % Wilson score interval of a proportion (Wilson 1927); None for n = 0."""
    if not n:
        return None
    p, z2 = hits / n, _Z95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return [max(0.0, centre - half), min(1.0, centre + half)]
