"""Indexes and rows, against a plain list; shared cells, against sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.places import Places
from edgekv.shares import PRIVATE, Shares

READINGS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=8)


def both(readings: list[tuple[int, int]]) -> tuple[Places, list[int]]:
    """The places, and the same as a list of indexes in reading order."""
    places, order = Places(), list[int]()
    for row, count in readings:
        new = list(range(len(order), len(order) + count))
        if row >= len(order):
            places.append(count)
            order += new
        else:
            places.insert(row, count)
            order[row:row] = new
    return places, order


@given(READINGS)
def test_rows_and_indexes(readings: list[tuple[int, int]]) -> None:
    places, order = both(readings)
    assert len(places) == len(order)
    for row, index in enumerate(order):
        assert places.row(index) == row
    assert places.row(len(order)) == len(order)
    rows = np.arange(len(order))
    assert places.indexes_of(rows).tolist() == order
    assert places.rows_of(np.asarray(order, np.int64)).tolist() == rows.tolist()
    assert places.by_index(np.asarray(order)).tolist() == sorted(order)


@given(READINGS, st.lists(st.booleans(), max_size=60))
def test_chosen_rows_as_ranges(readings: list[tuple[int, int]], chosen: list[bool]) -> None:
    places, order = both(readings)
    flags = np.asarray([*chosen, *[False] * len(order)][: len(order)], np.bool_)
    covered = {i for a, b in places.ranges(flags) for i in range(a, b)}
    assert covered == {index for index, flag in zip(order, flags, strict=True) if flag}


@given(READINGS, st.integers(0, 40), st.integers(0, 40))
def test_a_range_holds_its_tokens(readings: list[tuple[int, int]], start: int, stop: int) -> None:
    places, order = both(readings)
    start, stop = min(start, len(order)), min(max(start, stop), len(order))
    found = {order[row] for row in np.flatnonzero(places.rows([(start, stop)]))}
    assert set(range(start, stop)) <= found
    for extra in found - set(range(start, stop)):
        before = max(i for i in range(len(order)) if order[i] < extra and i < order.index(extra))
        assert extra > stop - 1 or start <= order[before] < stop, "put in later, between two of them"


def test_what_is_inserted_between_neighbours_belongs_to_the_stretch() -> None:
    places, order = both([(0, 5), (2, 2), (7, 3)])
    assert order == [0, 1, 5, 6, 2, 3, 4, 7, 8, 9]
    assert np.flatnonzero(places.rows([(0, 5)])).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert np.flatnonzero(places.rows([(2, 5)])).tolist() == [4, 5, 6]
    assert np.flatnonzero(places.rows([(4, 7)])).tolist() == [2, 3, 6]  # no neighbours: nothing between belongs
    assert np.flatnonzero(places.rows([(6, 8)])).tolist() == [3, 7]


def test_a_copy_goes_its_own_way() -> None:
    places, _ = both([(0, 5), (2, 2)])
    other = places.copy()
    other.insert(0, 3)
    places.append(1)
    assert places.indexes_of(np.arange(8)).tolist() == [0, 1, 5, 6, 2, 3, 4, 7]
    assert other.indexes_of(np.arange(10)).tolist() == [7, 8, 9, 0, 1, 5, 6, 2, 3, 4]


def private(count: int) -> np.ndarray:
    return np.full(count, PRIVATE, np.int32)


def test_a_cell_is_free_when_the_last_lets_go() -> None:
    shares = Shares()
    assert not shares
    assert not shares.elsewhere(private(3)).any()
    ids = shares.share(private(3))
    assert ids.tolist() == [0, 1, 2]
    assert shares.elsewhere(ids).all()
    shares.share(ids[:1])  # a third holds the first
    shares.release(ids)
    assert shares.elsewhere(ids).tolist() == [True, False, False]
    shares.release(np.concatenate([ids[:1], private(2)]))
    assert not shares.elsewhere(ids).any()
    assert shares.share(private(1)).tolist() == [3]  # no id is given twice


@pytest.mark.parametrize("count", [0, 1, 5])
def test_cells_of_one_s_own_are_never_elsewhere(count: int) -> None:
    shares = Shares()
    shares.share(private(2))
    assert not shares.elsewhere(private(count)).any()
    shares.release(private(count))
