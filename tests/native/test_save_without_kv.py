"""Session files without K and V: a load evaluates what is visible again, and is exactly a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_save import KINDS, STATES, edited

from edgekv import Engine, Model, Session, Settings, Span, State, errors
from helpers import EXACT, look, open_tiny, some_tokens

TinyPath = Callable[..., Path]


def hidden_states(session: Session) -> set[State]:
    return {State(s) for s in session.states(Span("all", 0, len(session.tokens)))} - {State.VISIBLE}


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_is_a_restart(tiny_path: TinyPath, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "light.kvs"
    with edited(tiny_path(kind), kv_type="f32", flash_attention=False) as session:
        before, logits, history = look(session), session.logits(), session.history
        assert session.save(path, kv=False) == path.stat().st_size < 30_000
        assert look(session) == before
        assert np.array_equal(session.logits(), logits)
        with (
            Session.load(path, n_threads=1) as loaded,
            Session(tiny_path(kind), settings=session.engine.settings) as restart,
        ):
            loaded.audit()
            assert loaded.tokens.tolist() == session.tokens.tolist()
            assert loaded.spans == session.spans
            assert loaded.history == history
            assert hidden_states(loaded) <= {State.EVICTED, State.DROPPED}
            visible = session._ledger.columns.visible
            assert np.array_equal(loaded._ledger.columns.visible, visible)
            restart.append(session._ledger.visible_tokens)
            assert not loaded._ledger.inexact().any()
            assert loaded.stats.cells_used == restart.stats.cells_used == visible.sum()
            assert np.array_equal(loaded.logits(), restart.logits())
            assert loaded.generate(20).tokens == restart.generate(20).tokens


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("on_unsupported", ["refuse", "recompute"])
def test_a_model_without_cells(tiny_path: TinyPath, tmp_path: Path, kind: str, on_unsupported: str) -> None:
    settings = Settings(n_ctx=256, n_threads=1)
    with Session(tiny_path(kind), settings=settings, on_unsupported=on_unsupported) as session:
        session.append(some_tokens(50, 1), name="a")
        session.append(some_tokens(20, 2), name="b")
        if on_unsupported == "recompute":
            session.mask((20, 40))
        session.save(tmp_path / "light.kvs", kv=False)
        with Session.load(tmp_path / "light.kvs", n_threads=1) as loaded:
            assert look(loaded).states == look(session).states
            with Session(tiny_path(kind), settings=settings) as restart:
                restart.append(session._ledger.visible_tokens)
                assert np.array_equal(loaded.logits(), restart.logits())
                assert loaded.generate(20).tokens == restart.generate(20).tokens
            if on_unsupported == "recompute":
                loaded.undo()  # the mask; the generation's tokens go first
                loaded.audit()


@pytest.mark.parametrize("kind", [*KINDS, *STATES])
@pytest.mark.parametrize("restarts", [False, True])
def test_every_edit_can_be_undone(tiny_path: TinyPath, tmp_path: Path, kind: str, restarts: bool) -> None:
    """Whatever an undo needs is evaluated again; where that cannot be, there is nothing to undo."""
    on_unsupported = "recompute" if restarts else "refuse"
    settings = Settings(n_ctx=512, n_threads=1)
    with Session(tiny_path(kind), settings=settings, on_unsupported=on_unsupported) as session:
        random = np.random.RandomState(3)
        session.append(some_tokens(80, 1), name="first")
        for step in range(14):
            at = int(random.randint(5, len(session.tokens) - 12))
            target, verb = (at, at + int(random.randint(1, 9))), step % 7
            try:
                if verb == 0:
                    session.mask(target, gap="keep" if step % 2 else "close")
                elif verb == 1:
                    session.park(target)
                elif verb == 2:
                    session.evict(target)
                elif verb == 3:
                    session.insert(at, some_tokens(4, step))
                elif verb == 4:
                    session.unmask(target)
                elif verb == 5:
                    session.append(some_tokens(6, step))
                else:
                    session.replace(target, some_tokens(5, step))
            except (errors.BadState, errors.MaskUnsupported, errors.UnknownSpan):
                pass
        session.save(tmp_path / "light.kvs", kv=False)
    undone = 0
    with Session.load(tmp_path / "light.kvs", n_threads=1) as loaded:
        while loaded._transcript.journal.newest() is not None:
            loaded.undo()
            loaded.audit()
            undone += 1
        assert undone > 5 or not (restarts or loaded.engine.can_shift)
        loaded.append(some_tokens(3))
        if restarts or loaded._ledger.has_cells:
            loaded.recompute()
        loaded.audit()
        loaded.save(tmp_path / "2.kvs")
        loaded.save(tmp_path / "3.kvs", kv=False)
    for name in ("2.kvs", "3.kvs"):
        with Session.load(tmp_path / name, n_threads=1) as again:
            again.audit()


def test_what_was_hidden_comes_back_by_undo(tiny_path: TinyPath, tmp_path: Path) -> None:
    with Session(tiny_path("llama"), settings=EXACT) as session:
        for name in ("sys", "a", "b", "c"):
            session.append(some_tokens(20, len(name) + ord(name[0])), name=name)
        session.mask("a")
        session.park("b")
        session.save(tmp_path / "light.kvs", kv=False)
        with Session.load(tmp_path / "light.kvs", n_threads=1) as loaded:
            with pytest.raises(errors.BadState, match="evicted"):
                loaded.unmask("a")
            loaded.undo()
            assert loaded.states(loaded.span("b")) == {State.VISIBLE: 20}
            loaded.undo()
            assert loaded.states(loaded.span("a")) == {State.VISIBLE: 20}
            loaded.recompute()
            session.unmask("a")
            session.unmask("b")
            assert np.abs(loaded.logits() - session.logits()).max() < 1e-4


@pytest.mark.parametrize("kind", ["llama", "mamba", "lfm2"])
def test_progress_counts_tokens_and_an_error_in_it_leaves_nothing(
    tiny_path: TinyPath, tmp_path: Path, kind: str
) -> None:
    with open_tiny(tiny_path(kind)) as session:
        session.append(some_tokens(300))
        session.save(tmp_path / "light.kvs", kv=False)
    settings = Settings(n_ctx=512, n_batch=64, n_threads=1)
    with Model(tiny_path(kind)) as model, Engine(model, settings) as engine, Session(engine) as other:
        other.append(some_tokens(50, 8))
        before, logits = look(other), other.logits()
        heard: list[tuple[int, int]] = []

        def stop(done: int, total: int) -> None:
            heard.append((done, total))
            if done > 100:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Session.load(tmp_path / "light.kvs", engine, progress=stop)
        assert heard == [(64, 300), (128, 300)]
        assert look(other) == before
        assert np.array_equal(other.logits(), logits)
        heard.clear()
        with Session.load(
            tmp_path / "light.kvs", engine, progress=lambda done, total: heard.append((done, total))
        ) as loaded:
            assert heard[-1] == (300, 300)
            heard.clear()
            loaded.append(some_tokens(3))
            assert not heard
            loaded.audit()
            other.audit()
            assert engine.cells_used == 353


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_no_room(tiny_path: TinyPath, tmp_path: Path, kind: str) -> None:
    with open_tiny(tiny_path(kind)) as session:
        session.append(some_tokens(300))
        session.save(tmp_path / "light.kvs", kv=False)
    with Model(tiny_path(kind)) as model, Engine(model, Settings(n_ctx=512, n_threads=1)) as engine:
        with Session(engine) as other:
            other.append(some_tokens(230))
            before = look(other)
            with pytest.raises(errors.ContextFull, match="300 cells and 282 are free"):
                Session.load(tmp_path / "light.kvs", engine)
            assert look(other) == before
        with Session.load(tmp_path / "light.kvs", engine) as loaded:
            loaded.audit()


def test_into_a_cache_of_another_kind(tiny_path: TinyPath, tmp_path: Path) -> None:
    """There is nothing in the file that depends on it."""
    with edited(tiny_path("llama")) as session:
        session.save(tmp_path / "light.kvs", kv=False)
        settings = Settings(n_ctx=512, kv_type="q8_0", n_archives=1, n_threads=1)
        with Session.load(tmp_path / "light.kvs", settings=settings) as loaded:
            assert loaded.engine.settings.kv_type == "q8_0"
            loaded.audit()


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_an_empty_session(tiny_path: TinyPath, tmp_path: Path, kind: str) -> None:
    with open_tiny(tiny_path(kind)) as session:
        session.save(tmp_path / "empty.kvs", kv=False)
    with Session.load(tmp_path / "empty.kvs", n_threads=1) as loaded:
        with pytest.raises(errors.NoLogits):
            loaded.logits()
        loaded.append("Now there is something.")
        loaded.audit()


def test_a_fork_is_saved_for_itself(tiny_path: TinyPath, tmp_path: Path) -> None:
    with edited(tiny_path("llama")) as session, session.fork() as fork:
        fork.mask((100, 104))
        before = look(session)
        fork.save(tmp_path / "fork.kvs", kv=False)
        assert look(session) == before
        with Session.load(tmp_path / "fork.kvs", session.engine) as loaded:
            assert np.array_equal(loaded._ledger.visible_tokens, fork._ledger.visible_tokens)
            loaded.audit()
        session.audit()
        fork.audit()
