"""Distributions compared: against a slow double loop, and at the edges."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgekv import numerics
from edgekv.errors import UsageError
from edgekv.numerics import kl_divergence, log_softmax, same_top

Rows = npt.NDArray[np.float32]

PAIRS = hnp.array_shapes(min_dims=2, max_dims=2, max_side=8).flatmap(
    lambda shape: st.tuples(*[hnp.arrays(np.float32, shape, elements=st.floats(-60, 60, width=32))] * 2)
)


def slow_kl(reference: Rows, other: Rows) -> list[float]:
    """The definition, a number at a time."""

    def log_probabilities(row: Rows) -> list[float]:
        values = [float(v) for v in row]
        top = max(values)
        total = math.fsum(math.exp(v - top) for v in values)
        return [v - top - math.log(total) for v in values]

    out = []
    for left, right in zip(reference, other, strict=True):
        terms = []
        for a, b in zip(log_probabilities(left), log_probabilities(right), strict=True):
            terms.append(math.exp(a) * (a - b))
        out.append(math.fsum(terms))
    return out


@given(PAIRS)
def test_kl_is_its_definition(pair: tuple[Rows, Rows]) -> None:
    np.testing.assert_allclose(kl_divergence(*pair), slow_kl(*pair), rtol=1e-9, atol=1e-12)


@given(PAIRS)
def test_kl_is_never_negative_and_zero_for_equals(pair: tuple[Rows, Rows]) -> None:
    assert (kl_divergence(*pair) >= 0).all()
    assert (kl_divergence(pair[0], pair[0].copy()) == 0).all()


@given(PAIRS, st.floats(-1000, 1000))
def test_a_constant_on_all_logits_changes_nothing(pair: tuple[Rows, Rows], constant: float) -> None:
    shifted = pair[0].astype(np.float64) + constant
    np.testing.assert_allclose(kl_divergence(shifted, pair[1]), kl_divergence(*pair), atol=1e-9)


@given(PAIRS)
def test_probabilities_sum_to_one(pair: tuple[Rows, Rows]) -> None:
    assert log_softmax(pair[0]).dtype == np.float64
    np.testing.assert_allclose(np.exp(log_softmax(pair[0])).sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(log_softmax(pair[0])[0], log_softmax(pair[0][0]), rtol=1e-15)


def test_large_logits_do_not_overflow() -> None:
    rows = np.array([[1e30, 0.0], [-1e30, 0.0]], np.float32)
    assert log_softmax(rows)[0, 0] == 0
    assert kl_divergence(rows, rows).tolist() == [0, 0]


def test_banned_tokens() -> None:
    """A token the reference bans costs nothing, one that only the other bans costs everything."""
    free, banned = np.zeros((1, 3), np.float32), np.array([[0, 0, -np.inf]], np.float32)
    assert kl_divergence(banned, banned)[0] == 0
    assert kl_divergence(banned, free)[0] == pytest.approx(math.log(1.5))
    assert kl_divergence(free, banned)[0] == math.inf


def test_nan_is_not_hidden() -> None:
    rows = np.zeros((2, 3), np.float32)
    rows[1, 1] = np.nan
    told = kl_divergence(rows, np.zeros((2, 3), np.float32))
    assert told[0] == 0
    assert math.isnan(told[1])


def test_same_top() -> None:
    reference = np.array([[1, 2, 3], [3, 3, 1], [9, 0, 0]], np.float32)
    other = np.array([[0, 0, 1], [5, 5, 5], [0, 9, 0]], np.float32)
    assert same_top(reference, other).tolist() == [True, True, False]


def test_no_rows_give_no_figures() -> None:
    empty = np.empty((0, 5), np.float32)
    assert kl_divergence(empty, empty).shape == same_top(empty, empty).shape == (0,)


@pytest.mark.parametrize("shapes", [((2, 3), (2, 4)), ((2, 3), (3, 3)), ((3,), (3,)), ((2, 0), (2, 0))])
def test_shapes_that_make_no_sense(shapes: tuple[Any, Any]) -> None:
    left, right = (np.zeros(shape, np.float32) for shape in shapes)
    for compare in (kl_divergence, same_top):
        with pytest.raises(UsageError, match="n_vocab"):
            compare(left, right)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, 13, 7)).astype(np.float32)
    whole = kl_divergence(left, right)
    for size in (1, 7, 20, 91):
        monkeypatch.setattr(numerics, "_BLOCK", size)
        np.testing.assert_array_equal(kl_divergence(left, right), whole)


def test_memory_stays_small_for_a_large_vocabulary() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((2, 24, 262_144), np.float32)
    tracemalloc.start()
    kl_divergence(left, right)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 << 20  # all rows at once in float64 would take 50 MB a temporary, and there are many


def test_log_probabilities_are_those_of_the_softmax() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 4, (6, 50)).astype(np.float32)
    tokens = rng.integers(0, 50, 6).astype(np.int32)
    np.testing.assert_allclose(
        numerics.log_probabilities(logits, tokens), numerics.log_softmax(logits)[np.arange(6), tokens], atol=1e-5
    )
