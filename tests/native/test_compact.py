"""compact: cells in a row; nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgekv import Session, errors, memory
from edgekv.cells import Cells
from helpers import EXACT, cells_in_llama, look, some_tokens

TinyPath = Callable[..., Path]


@pytest.fixture(params=["llama", "gemma3", "yarn", "mrope", "mamba", "lfm2"])
def session(request: pytest.FixtureRequest, tiny_path: TinyPath) -> Iterator[Session]:
    settings = replace(EXACT, n_ctx=1024, n_batch=64)
    with Session(tiny_path(request.param), settings=settings) as session:
        session.append(some_tokens(600), name="all")
        if session.model.capabilities.mask:
            session.mask((20, 60))
            session.evict((100, 560))
        yield session


def test_all_is_as_it_was(session: Session) -> None:
    with session.fork() as fork:
        fork.append(some_tokens(7, 1))
        logits = session.logits(), fork.logits()
        following = session.logits_over(some_tokens(20, 2))
        before = look(session), look(fork)
        receipt = session.compact()
        assert receipt.tokens == session.engine.cells_used
        if session.model.path.stem != "mamba-0":  # no cells, one state a sequence
            assert receipt.tokens == cells_in_llama(session.engine)
        assert (look(session), look(fork)) == before
        for s, was in zip((session, fork), logits, strict=True):
            np.testing.assert_array_equal(s.logits(), was)  # kept: nothing was read
        assert np.abs(session.logits_over(some_tokens(20, 2)) - following).max() < 1e-3
        if session.model.capabilities.mask:
            session.unmask((20, 60))
        session.append(some_tokens(300, 3))
        look(session)
        look(fork)


def test_stats_say_when_it_pays(session: Session) -> None:
    masks = bool(session.model.capabilities.mask)
    stats = session.stats
    assert (stats.cells_scanned, stats.compact_saves) == (768, 512 if masks else 0)
    receipt = session.compact()
    assert str(receipt).endswith("decode scans 512 cells fewer" if masks else "there was nothing to gain")
    stats = session.stats
    assert (stats.cells_scanned, stats.compact_saves) == (256 if masks else 768, 0)


def test_without_memory_nothing_changes(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    before = look(session)
    monkeypatch.setattr(memory, "free_ram", lambda: -1)
    with pytest.raises(errors.TooLarge, match="compacting"):
        session.compact()
    monkeypatch.undo()
    assert look(session) == before


def test_a_state_that_is_lost_is_told_to_all(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(_cells: Cells) -> None:
        raise errors.AuditFailed("gone; open a new session")

    with session.fork() as fork:
        going = fork.generate(5)
        next(going)
        monkeypatch.setattr(Cells, "repack", lose)
        with pytest.raises(errors.AuditFailed):
            session.compact()
        for s in (session, fork):
            with pytest.raises(errors.SessionBroken, match="open a new session"):
                s.append("a")
        assert len(list(going)) == 0
        assert going.finish_reason == "closed"
