"""Undo with no evaluation in between: every edit can be taken back, on every kind of model, back to the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from edgekv import Model, Session, Settings, Span, State
from edgekv.errors import BadState, ContextFull, MaskUnsupported, UnknownSpan
from helpers import look, some_tokens

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
            states.append(seen(session))  # noqa: PERF401
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


@pytest.fixture(params=["yarn", "mrope"])
def fixed(request: pytest.FixtureRequest, tiny_path: TinyPath) -> Iterator[Session]:
    """A session whose positions cannot be shifted."""
    settings = Settings(n_ctx=256, n_threads=1, kv_type="f32", flash_attention=False)
    with Session(tiny_path(request.param), settings=settings) as session:
        session.append(some_tokens(60))
        yield session


def test_what_was_evicted_after_a_kept_gap_comes_back(fixed: Session) -> None:
    before, logits = seen(fixed), fixed.logits()
    fixed.mask((10, 30))
    fixed.evict((30, 40))
    receipt = fixed.undo()
    assert (receipt.undone, receipt.prefilled) == ("evict", 10)  # in the sight of what is masked, as at first
    assert fixed.undo().undone == "mask"
    assert seen(fixed) == before
    assert np.abs(fixed.logits() - logits).max() < 1e-4


def test_evicted_text_leads_to_the_position_of_what_comes_after(fixed: Session) -> None:
    fixed.evict((10, 30))
    fixed.evict((30, 40))
    free = fixed.engine.cells_free
    assert fixed.undo().prefilled == 30  # twenty of them are dropped again
    assert fixed.engine.cells_free == free - 10
    assert fixed.states(Span("gap", 10, 30)) == {State.EVICTED: 20}
    assert fixed.undo().prefilled == 20
    assert fixed.stats.visible == 60
    fixed.audit()


def test_a_parked_gap_stays_parked_while_it_leads(fixed: Session) -> None:
    fixed.park((10, 30))
    fixed.evict((30, 40))
    assert fixed.undo().prefilled == 30
    assert fixed.states(Span("gap", 10, 30)) == {State.PARKED: 20}
    assert fixed.undo().loaded_bytes > 0
    assert fixed.stats.visible == 60
    fixed.audit()


def test_an_undo_that_cannot_be_done_is_passed_over(fixed: Session) -> None:
    fixed.mask((10, 20))
    fixed.mask((40, 60))
    fixed.append(some_tokens(20, 1))
    before = look(fixed)
    with pytest.raises(MaskUnsupported, match=r"the mask of 20 tokens cannot be undone: .*rewind .* unmask it"):
        fixed.undo()
    assert look(fixed) == before
    assert fixed.undo().ranges == ((10, 20),)
    with pytest.raises(BadState, match="nothing to undo"):
        fixed.undo()
    fixed.rewind(60)  # what the message named
    fixed.unmask((40, 60))
    assert fixed.visible_tokens.tolist() == some_tokens(60).tolist()
    fixed.audit()


def test_an_undo_without_room_is_not_passed_over(fixed: Session) -> None:
    fixed.mask((10, 30))
    fixed.evict((30, 40))
    fixed.append(some_tokens(fixed.engine.cells_free, 2))
    before = look(fixed)
    for _ in range(2):
        with pytest.raises(ContextFull):
            fixed.undo()
        assert look(fixed) == before
    fixed.rewind(60)
    fixed.undo()
    fixed.rewind(60)


def test_a_failure_while_text_is_evaluated_again(fixed: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several stretches the second fails: all is as it was, and the same undo works afterwards."""
    before = seen(fixed)
    fixed.mask((10, 20))
    fixed.evict([(20, 25), (30, 40)])
    hidden, arrive, calls = look(fixed), fixed._reader.arrive, list[int]()

    def fails(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ContextFull("for this test")
        return arrive(*args)

    monkeypatch.setattr(fixed._reader, "arrive", fails)
    with pytest.raises(ContextFull):
        fixed.undo()
    assert look(fixed) == hidden
    fixed.undo()
    fixed.undo()
    assert seen(fixed) == before


def test_undo_of_a_replace_and_what_came_before_it(fixed: Session) -> None:
    before = seen(fixed)
    fixed.evict((30, 40))
    fixed.replace((10, 20), some_tokens(6, 3))
    fixed.undo()
    fixed.undo()
    assert fixed.visible_tokens.tolist() == some_tokens(60).tolist()
    assert [pos for pos in seen(fixed)[2] if pos >= 0] == before[2]
