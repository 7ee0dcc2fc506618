"""Influence, against a brute-force reachability on random histories."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgekv.history import History, clip
from edgekv.spans import Range, runs


class Brute:
    """Every computation as a node that depends on the nodes it saw."""

    def __init__(self) -> None:
        self.history = History()
        self.hidden: set[int] = set()
        self.deps: list[set[int]] = []

    def view(self) -> tuple[Range, ...]:
        flags = np.array([i in self.hidden for i in range(len(self.deps))], np.bool_)
        return tuple(runs(flags))

    def seen(self, index: int) -> set[int]:
        direct = {j for j in range(index) if j not in self.hidden}
        return direct.union(*(self.deps[j] for j in direct))

    def append(self, count: int) -> None:
        start, view = len(self.deps), self.view()
        for i in range(start, start + count):
            self.deps.append(set())
            self.deps[i] = self.seen(i)
        self.history.computed(start, start + count, view)

    def again(self, index: int) -> None:
        self.deps[index] = self.seen(index)
        self.history.computed_again(index, self.view())


@given(st.data())
def test_influence_is_reachability(data: st.DataObject) -> None:
    brute = Brute()
    brute.append(data.draw(st.integers(1, 6)))
    for _ in range(data.draw(st.integers(0, 12))):
        total = len(brute.deps)
        action = data.draw(st.sampled_from(["append", "hide", "show", "again"]))
        if action == "append":
            brute.append(data.draw(st.integers(1, 5)))
        elif action == "hide":
            brute.hidden |= data.draw(st.sets(st.integers(0, total - 1), max_size=4))
        elif action == "show":
            brute.hidden -= data.draw(st.sets(st.integers(0, total - 1), max_size=4))
        elif shown := [i for i in range(total) if i not in brute.hidden]:
            brute.again(shown[-1])
    total = len(brute.deps)
    span = data.draw(st.sets(st.integers(0, total - 1), min_size=1, max_size=4))
    found = brute.history.influenced([(i, i + 1) for i in sorted(span)], total)
    assert set(np.flatnonzero(found).tolist()) == {i for i in range(total) if i not in span and brute.deps[i] & span}


def test_view_of_is_clipped_to_what_came_before() -> None:
    history = History()
    history.computed(0, 10, ())
    history.computed(10, 12, ((2, 4), (8, 10)))
    assert history.view_of(3) == ()
    assert history.view_of(11) == ((2, 4), (8, 10))
    history.computed_again(9, ((2, 4), (8, 9), (10, 12)))
    assert history.view_of(9) == ((2, 4), (8, 9))
    history.undo_again(9)
    assert history.view_of(9) == ()


def test_truncate_leaves_what_came_before() -> None:
    history = History()
    history.computed(0, 10, ())
    history.computed(10, 20, ((0, 5),))
    history.truncate(10)
    assert len(history.epochs) == 1
    assert clip(((0, 5), (8, 12)), 10) == ((0, 5), (8, 10))
