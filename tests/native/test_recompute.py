"""recompute: after it the session equals a fresh prefill of what is visible; whatever fails, nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgekv import Session, Settings, errors
from helpers import EXACT, look, open_tiny, some_tokens

TinyPath = Callable[..., Path]
SIZES = {"head": 20, "middle": 50, "tail": 30}


def fill(session: Session) -> Session:
    for name, size in SIZES.items():
        session.append(some_tokens(size, size), name=name)
    return session


@pytest.fixture(params=["llama", "gemma3", "yarn", "mrope"])
def session(request: pytest.FixtureRequest, tiny_path: TinyPath) -> Iterator[Session]:
    settings = replace(EXACT, n_batch=16)
    with Session(tiny_path(request.param), settings=settings) as session:
        yield fill(session)


def difference_from_restart(session: Session) -> float:
    logits = session.logits()
    with Session(session.model, settings=session.engine.settings) as restart:
        restart.append(session._ledger.visible_tokens)
        return float(np.abs(restart.logits() - logits).max())


@pytest.mark.parametrize("gap", ["close", "keep"])
def test_it_equals_a_fresh_prefill(session: Session, gap: str) -> None:
    receipt = session.mask("middle", gap=gap)
    assert receipt.influenced == SIZES["tail"]
    assert difference_from_restart(session) > 0.05
    again = session.recompute()
    assert (again.prefilled, again.influenced) == (SIZES["tail"], 0)
    assert str(again).startswith("read again 30 tokens")
    assert difference_from_restart(session) < 2e-2
    assert session.recompute().prefilled == 0  # nothing is left to do
    session.audit()


def test_the_masked_span_comes_back(tiny_path: TinyPath) -> None:
    with fill(Session(tiny_path(), settings=EXACT)) as session:
        session.mask("middle", then="recompute")
        session.unmask("middle")
        session.audit()
        assert session.text("middle") == session.model.detokenize(some_tokens(50, 50))
        assert session.recompute().prefilled == SIZES["tail"]  # those were read without the middle
        assert difference_from_restart(session) < 2e-2


@pytest.mark.parametrize(
    ("then", "budget", "read"), [("none", 64, 0), ("auto", 29, 0), ("auto", 30, 30), ("recompute", 0, 30)]
)
def test_mask_then(tiny_path: TinyPath, then: str, budget: int, read: int) -> None:
    with fill(Session(tiny_path(), settings=EXACT)) as session:
        receipt = session.mask("middle", then=then, budget=budget)
        assert receipt.prefilled == read
        assert receipt.exact == bool(read)
        assert ("30 tokens read again" in str(receipt)) == bool(read)
        session.audit()


def test_a_kept_gap_is_not_exact(tiny_path: TinyPath) -> None:
    """No visible token saw the span, and yet those behind the gap stand too far away."""
    with fill(Session(tiny_path(), settings=EXACT)) as session:
        session.mask("middle", gap="keep")
        session.rewind("tail")
        with pytest.raises(errors.BadState):
            session.mask("middle")
        session.append(some_tokens(5), name="new")
        assert not session.influenced_by("middle")


@pytest.mark.parametrize("kind", ["llama", "yarn"])
def test_without_room_nothing_changes(tiny_path: TinyPath, kind: str) -> None:
    with fill(open_tiny(tiny_path(kind), n_ctx=256)) as session:
        session.mask("middle")
        session.append(some_tokens(session.engine.cells_free - 5), name="rest")
        before = look(session)
        with pytest.raises(errors.ContextFull):
            session.recompute()
        assert look(session) == before
        session.audit()


def test_an_interrupt_brings_the_cells_back(session: Session) -> None:
    session.mask("middle", gap="keep")
    logits = session.logits()
    before = look(session)

    def stop(done: int, _total: int) -> None:
        if done >= 16:
            raise KeyboardInterrupt

    session.progress = stop
    with pytest.raises(KeyboardInterrupt):
        session.recompute(20)
    session.progress = None
    session.audit()
    if not session.engine.can_shift:  # else the gap was closed before the reading began
        assert look(session) == before
        np.testing.assert_array_equal(session.logits(), logits)
    assert session.recompute().prefilled > 0
    assert difference_from_restart(session) < 2e-2


@pytest.mark.parametrize("start", [-1, 101, 1000])
def test_an_index_that_is_not_there(tiny_path: TinyPath, start: int) -> None:
    with fill(Session(tiny_path(), settings=EXACT)) as session, pytest.raises(errors.UsageError):
        session.recompute(start)


def test_what_keeps_a_state_refuses(tiny_path: TinyPath) -> None:
    with Session(tiny_path("mamba"), settings=Settings(n_ctx=256, n_threads=1)) as session:
        session.append("text")
        with pytest.raises(errors.MaskUnsupported):
            session.recompute()


def test_then_is_one_of_three(tiny_path: TinyPath) -> None:
    with fill(Session(tiny_path(), settings=EXACT)) as session, pytest.raises(errors.UsageError, match="auto"):
        session.mask("middle", then="perhaps")
