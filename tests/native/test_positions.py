"""Positions over a long life: past what the model was trained on, and past the bound they are let grow to."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from edgekv import Session, layout, tiny
from helpers import EXACT, some_tokens

WINDOW, STEP = 100, 20


@pytest.fixture(params=["llama", "gemma3"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    path = tiny.write(tmp_path / "short.gguf", request.param, n_ctx_train=512)
    with Session(path, settings=EXACT) as session:
        session.append(some_tokens(STEP), name="system")
        yield session


def chat(session: Session, until: int) -> Iterator[int]:
    """Turns of 20 tokens, the oldest evicted as the newest comes; yields the cursor."""
    while session.stats.cursor < until:
        start = len(session.tokens)
        session.append(some_tokens(STEP, start))
        if len(session.visible_tokens) > WINDOW:
            session.evict((start - WINDOW + 2 * STEP, start - WINDOW + 3 * STEP))
        yield session.stats.cursor


def difference_from_restart(session: Session) -> float:
    """After reading again what was influenced, so that only positions are left to differ."""
    with session.fork() as exact, Session(session.model, settings=EXACT) as fresh:
        exact.recompute()
        fresh.append(session.visible_tokens)
        return float(np.abs(fresh.logits() - exact.logits()).max())


def test_four_times_what_the_model_was_trained_on(session: Session) -> None:
    trained = int(session.model.header[f"{session.model.header['general.architecture']}.context_length"])
    curve = {}
    for number, cursor in enumerate(chat(session, 4 * trained)):
        if number % (trained // STEP) == 0:
            curve[cursor] = difference_from_restart(session)
    assert len(curve) >= 4
    assert max(curve.values()) < 2e-2, curve
    session.audit()


def test_positions_begin_again_at_the_bound(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "REBASE_AT", 400)
    cursors = []
    for cursor in chat(session, 1000):
        cursors.append(cursor)
        session.audit()
        if len(cursors) == 60:
            break
    assert max(cursors) <= 400 + STEP
    assert sum(b < a for a, b in pairwise(cursors)) >= 2
    assert difference_from_restart(session) < 2e-2


def test_masked_tokens_come_back_after_positions_began_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their cells wait at positions of before; they move on the way back."""
    session.append(some_tokens(30, 1), name="span")
    session.append(some_tokens(10, 2))
    before = session.logits()
    session.mask("span")
    session.append(some_tokens(60, 3), name="more")
    monkeypatch.setattr(layout, "REBASE_AT", 100)
    session.evict((70, 90))
    assert session.stats.cursor == len(session.visible_tokens) == 70
    session.rewind("more")
    session.unmask("span")
    session.audit()
    assert np.abs(session.logits() - before).max() < 2e-2
