"""Ranges and what targets mean."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.errors import UnknownSpan, UsageError
from edgekv.spans import Span, SpanTable, merge, runs


@pytest.fixture
def table() -> SpanTable:
    table = SpanTable()
    table.add(Span("system", 0, 8, "system"))
    table.add(Span("tool-1", 8, 20, "tool", frozenset({"big"})))
    table.add(Span("tool-2", 30, 40, "tool"))
    table.add(Span("call", 8, 12, "assistant"))
    return table


@given(st.lists(st.booleans(), max_size=40))
def test_runs_cover_exactly_the_true_ones(flags: list[bool]) -> None:
    covered = [i for a, b in runs(np.array(flags, np.bool_)) for i in range(a, b)]
    assert covered == [i for i, flag in enumerate(flags) if flag]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8))
def test_merge_is_sorted_disjoint_and_complete(ranges: list[tuple[int, int]]) -> None:
    merged = merge(ranges)
    assert all(a < b for a, b in merged)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(merged))
    assert {i for a, b in merged for i in range(a, b)} == {i for a, b in ranges for i in range(a, b)}


def test_half_open_by_example(table: SpanTable) -> None:
    assert table.resolve((0, 1)) == [(0, 1)]


@pytest.mark.parametrize(
    ("target", "ranges"),
    [
        ("system", [(0, 8)]),
        ("tool-*", [(8, 20), (30, 40)]),
        ("role:tool", [(8, 20), (30, 40)]),
        ("tag:big", [(8, 20)]),
        ((3, 5), [(3, 5)]),
        (slice(3, 5), [(3, 5)]),
        (slice(None, 5), [(0, 5)]),
        (range(3, 5), [(3, 5)]),
        (["call", "tool-1", (19, 31)], [(8, 31)]),
        (Span("elsewhere", 1, 2), [(1, 2)]),
        ((np.int64(1), np.int32(4)), [(1, 4)]),
    ],
)
def test_targets(table: SpanTable, target: object, ranges: list[tuple[int, int]]) -> None:
    assert table.resolve(target) == ranges  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [(5, 3), (-1, 3), 4, 1.5, None, slice(0, 4, 2), slice(3, None), (True, 3), ("a", 3)])
def test_what_is_no_target(table: SpanTable, target: object) -> None:
    with pytest.raises(UsageError):
        table.resolve(target)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("tool-3", "tool-1"),
        ("tool", "role:tool"),
        ("big", "tag:big"),
        ("xyzzy", "spans: system"),
        ("nothing*", "spans"),
    ],
)
def test_unknown_names_come_with_a_hint(table: SpanTable, text: str, hint: str) -> None:
    with pytest.raises(UnknownSpan, match=hint.replace("*", r"\*")):
        table.resolve(text)


@pytest.mark.parametrize("name", ["", " ", "a*", "what?", "[x]", "role:x", "tag:y", "system"])
def test_names_that_cannot_be(table: SpanTable, name: str) -> None:
    with pytest.raises(UsageError):
        table.add(Span(name, 0, 1))


def test_truncate_cuts_and_forgets(table: SpanTable) -> None:
    table.keep_only(np.arange(40) < 10)
    assert {(s.name, s.stop) for s in table.ordered()} == {("system", 8), ("tool-1", 10), ("call", 10)}
