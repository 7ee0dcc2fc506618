"""Spreads and intervals, in numpy: what stands beside every figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Numbers = Sequence[float] | npt.NDArray[np.floating[Any]]

_RESAMPLES: Final = 2000
_Z95: Final = 1.959963984540054


def spread(values: Numbers) -> dict[str, Any]:
    """Median and quartiles: {"median", "iqr": [25 %, 75 %], "n"}; nulls where there are none."""
    if not len(values):
        return {"median": None, "iqr": None, "n": 0}
    low, middle, high = (float(q) for q in np.percentile(np.asarray(values), [25, 50, 75]))
    return {"median": middle, "iqr": [low, high], "n": len(values)}


def mean_ci(groups: Sequence[Numbers], seed: int = 0) -> tuple[float, list[float] | None]:
    """The mean over all values, and its 95 % bootstrap interval when whole groups are drawn again with replacement.

    Tokens of one case are not independent, so a case is the unit that is drawn (Efron & Tibshirani, 1993, percentile
    method, 2,000 resamples). The interval is None with fewer than two groups.
    """
    kept = [np.asarray(g, np.float64) for g in groups if len(g)]
    if not kept:
        return math.nan, None
    sums, sizes = np.array([g.sum() for g in kept]), np.array([len(g) for g in kept])
    mean = float(sums.sum() / sizes.sum())
    if len(kept) < 2:
        return mean, None
    drawn = np.random.default_rng(seed).integers(0, len(kept), (_RESAMPLES, len(kept)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return mean, [float(q) for q in np.percentile(means, [2.5, 97.5])]


def wilson(hits: int, n: int) -> list[float] | None:
    """The 95 % Wilson score interval of a proportion (Wilson 1927); None for n = 0."""
    if not n:
        return None
    p, z2 = hits / n, _Z95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return [max(0.0, centre - half), min(1.0, centre + half)]
