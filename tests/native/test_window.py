"""Sliding-window models: llama.cpp reuses cells outside the window unless a second sequence holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import Model, Session, Settings, errors, tiny
from edgekv.engine import Engine

SETTINGS = Settings(n_ctx=512, n_batch=64, n_threads=1, kv_type="f32", flash_attention=False)


def refill_holes(session: Session) -> None:
    """Free cells in the middle, then read so much that the hole and cells behind it are wanted."""
    rng = np.random.default_rng(0)
    for count in (10, 20, 10, 40):
        session.append(rng.integers(4, 260, count).tolist())
    session.evict((30, 40))
    session.append(rng.integers(4, 260, 25).tolist())


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tiny.write(tmp_path / "window.gguf", "gemma3"))


def test_cells_outside_the_window_are_kept(model: Model) -> None:
    with Session(model, settings=SETTINGS) as session:
        refill_holes(session)
        session.audit()


def test_without_the_keeper_they_would_be_lost(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tells when llama.cpp no longer needs the keeper, and that the audit sees such a loss."""
    start = Engine.__init__

    def without_keeper(self: Engine, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self._cells.windowed = False  # type: ignore[misc]

    monkeypatch.setattr(Engine, "__init__", without_keeper)
    with Session(model, settings=SETTINGS) as session:
        refill_holes(session)
        with pytest.raises(errors.AuditFailed):
            session.audit()


def test_a_mask_brings_old_tokens_into_the_window(model: Model) -> None:
    """What moves up next to the suffix is seen there, as in a restart of the same tokens."""
    rng = np.random.default_rng(1)
    ids = [rng.integers(4, 260, n).tolist() for n in (40, 80, 1)]
    with Session(model, settings=SETTINGS) as session, Session(model, settings=SETTINGS) as restart:
        for part in ids:
            session.append(part)
        session.mask((40, 120))
        restart.append(ids[0])
        restart.append(ids[2])
        assert np.abs(session.logits() - restart.logits()).max() < 2e-2
