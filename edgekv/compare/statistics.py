"""Spreads and intervals, in numpy: what stands beside every figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = Sequence[float] | npt.NDArray[np.floating[Any]]
Interval: TypeAlias = list[float] | None

FEWEST: Final = 5  # cases of which an interval tells anything
_RESAMPLES: Final = 2000
_Z95: Final = 1.959963984540054


def spread(values: Numbers) -> dict[str, Any]:
    """Median, quartiles and ends: {"median", "iqr": [25 %, 75 %], "range": [least, most], "n"}; nulls without any."""
    if not len(values):
        return {"median": None, "iqr": None, "range": None, "n": 0}
    least, low, middle, high, most = (float(q) for q in np.percentile(np.asarray(values), [0, 25, 50, 75, 100]))
    return {"median": middle, "iqr": [low, high], "range": [least, most], "n": len(values)}


def mean_ci(groups: Sequence[Numbers], within: tuple[float, float] = (-math.inf, math.inf)) -> tuple[float, Interval]:
    """The mean over all values, and its 95 % interval when whole groups are drawn again with replacement.

    Tokens of one case are not independent, so a case is the unit that is drawn. The interval is the studentised
    bootstrap's (bootstrap-t; Efron & Tibshirani, 1993, ch. 12; 2,000 resamples), cut off at the ends of ``within``:
    divergences are skewed, and of a dozen cases the percentile method covers the mean in 77 to 91 % instead of 95 %,
    this one in 92 to 94 % (log-normal cases, sigma .5 to 1.2). None with fewer than five groups.
    """
    kept = [np.asarray(g, np.float64) for g in groups if len(g)]
    if not kept:
        return math.nan, None
    sums, sizes = np.array([g.sum() for g in kept]), np.array([len(g) for g in kept], np.float64)
    if len(kept) < FEWEST or not np.isfinite(sums).all():
        return float(sums.sum() / sizes.sum()), None
    mean, error = _ratio(sums, sizes)
    drawn = draws(len(kept))
    means, errors = _ratio(sums[drawn], sizes[drawn])
    usable = errors > 1e-9 * error
    if not usable.any():
        return float(mean), [float(mean)] * 2
    low, high = np.percentile((means[usable] - mean) / errors[usable], [2.5, 97.5])
    return float(mean), [float(np.clip(mean - t * error, *within)) for t in (high, low)]


def _ratio(sums: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64]) -> tuple[Any, Any]:
    """The mean over the values of all groups along the last axis, and its standard error (linearised ratio)."""
    count = sums.shape[-1]
    total = sizes.sum(axis=-1)
    mean = sums.sum(axis=-1) / total
    off = sums - np.expand_dims(mean, -1) * sizes
    return mean, np.sqrt(count / max(1, count - 1) * (off**2).sum(axis=-1)) / total


def quantile_ci(groups: Sequence[Numbers], q: float) -> tuple[float, Interval]:
    """The quantile ``q`` (0..1, linear between values) over all values, and its 95 % bootstrap interval.

    Whole groups are drawn again (percentile method). None with fewer than five groups.
    """
    kept = [np.asarray(g, np.float64) for g in groups if len(g)]
    if not kept:
        return math.nan, None
    values, owner = np.concatenate(kept), np.repeat(np.arange(len(kept)), [len(g) for g in kept])
    order = np.argsort(values, kind="stable")
    values, owner = values[order], owner[order]
    if len(kept) < FEWEST:
        return _quantile(values, q), None
    times = np.stack([np.bincount(drawn, minlength=len(kept)) for drawn in draws(len(kept))])
    samples = np.array([_quantile(np.repeat(values, each[owner]), q) for each in times])
    return _quantile(values, q), interval(samples, len(kept))


def _quantile(ordered: npt.NDArray[np.float64], q: float) -> float:
    """Of values in order, which may be infinite; np.quantile would sort them again, two thousand times."""
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] if ordered[low] == ordered[high] else np.interp(at, [low, high], ordered[[low, high]]))


def draws(count: int) -> npt.NDArray[np.int64]:
    """int64 (2000, count): which of ``count`` cases each resample holds; always the same, so a report repeats."""
    return np.random.default_rng(0).integers(0, count, (_RESAMPLES, count))


def interval(samples: npt.NDArray[np.float64], count: int) -> Interval:
    """The middle 95 % of what resamples of ``count`` cases gave; None where they are too few to tell of others."""
    if count < FEWEST:
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
