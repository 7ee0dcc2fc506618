"""Undo with no evaluation in between: every edit can be taken back, on every kind of model, back to the start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from edgekv import Model, Session, Settings
from edgekv.errors import BadState, MaskUnsupported, UnknownSpan
from helpers import some_tokens

TinyPath = Callable[..., Path]
KINDS = ["llama", "gemma3", "yarn", "mrope"]
LENGTH = 40
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["mask", "mask", "evict", "evict", "park", "unmask", "rewind"]),
        st.integers(0, LENGTH - 1), st.integers(1, 15), st.sampled_from(["close", "keep"]),
    ), min_size=1, max_size=8,
)  # fmt: skip


def seen(session: Session) -> tuple[list[int], list[int], list[int]]:
    """State of every token, and position of every visible one; what may go on is the same."""
    session.audit()
    columns = session._ledger.columns
    places = np.where(columns.visible, columns.pos, -1)
    if session.engine.can_shift:  # only how far apart they stand counts
        first = places[columns.visible].min(initial=1 << 30)
        places = np.where(columns.visible, columns.pos - first, -1)
    return columns.state.tolist(), columns.reserved.tolist(), places.tolist()


def edit(session: Session, verb: str, start: int, length: int, gap: str) -> bool:
    try:
        if verb == "rewind":
            return bool(session.rewind(start).tokens)
        target = (start, min(LENGTH, start + length))
        if verb == "unmask":
            session.unmask(target)
        else:
            getattr(session, verb)(target, gap=gap, force=True)
    except (BadState, UnknownSpan, MaskUnsupported):  # nothing there, or no archive has room
        return False
    return True


def undo_all(session: Session, edits: list[tuple[str, int, int, str]]) -> None:
    states = [seen(session)]
    for one in edits:
        if edit(session, *one):
            states.append(seen(session))
    for state in reversed(states[:-1]):
        session.undo()
        assert seen(session) == state
    with pytest.raises(BadState):
        session.undo()


@pytest.mark.parametrize("kind", KINDS)
def test_undo_back_to_the_start(tiny_path: TinyPath, kind: str) -> None:
    model = Model(tiny_path(kind))

    @settings(
        max_examples=15, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None,
        phases=[Phase.generate],
    )  # fmt: skip
    @given(EDITS)
    def test(edits: list[tuple[str, int, int, str]]) -> None:
        with Session(model, settings=Settings(n_ctx=256, n_batch=64, n_threads=1)) as session:
            session.append(some_tokens(LENGTH))
            undo_all(session, edits)

    test()
    model.close()
