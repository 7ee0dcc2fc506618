"""Sessions that outlive the process: what was saved is what is loaded, and it goes on as it would have."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgekv import Engine, Model, Sampling, Session, Settings, State, errors, saving
from helpers import look, open_tiny, python, some_tokens

TinyPath = Callable[..., Path]
KINDS = ["llama", "gemma3", "yarn", "mrope"]
STATES = ["mamba", "lfm2"]


def edited(path: Path, **settings: object) -> Session:
    """Spans masked with gaps closed and kept, parked, evicted, inserted, undone; stale logits read again."""
    session = open_tiny(path, **settings)  # type: ignore[arg-type]
    for name, count in (("sys", 10), ("a", 60), ("b", 30), ("c", 20)):
        session.append(some_tokens(count, count), name=name, role=f"{name}-role", tags=[name, "all"])
    session.mask("a")
    session.logits()
    session.append(some_tokens(12, 1), name="d")
    session.park("b", gap="keep")
    session.evict((105, 110))
    if session.engine.can_shift:
        session.insert(112, some_tokens(5, 2), name="new")
        session.append(some_tokens(6, 3), name="alone", attend="sys")
    session.mask((120, 124))
    session.undo()
    session.mask((120, 124), gap="keep")
    session.append(some_tokens(3, 4))
    return session


@pytest.mark.parametrize("flash_attention", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_load_is_what_was_saved_and_goes_on_alike(
    tiny_path: TinyPath, tmp_path: Path, kind: str, flash_attention: bool
) -> None:
    path = tmp_path / "chat.kvs"
    with edited(tiny_path(kind), flash_attention=flash_attention) as session:
        assert session.save(path) == path.stat().st_size
        with Session.load(path, n_threads=1) as loaded:
            assert look(loaded) == look(session)
            assert loaded.stats == session.stats
            assert loaded.history == session.history
            columns, now = loaded._ledger.columns, session._ledger.columns
            assert np.array_equal(columns.pos, now.pos)
            assert np.array_equal(columns.reserved, now.reserved)
            assert loaded.influenced_by("a") == session.influenced_by("a")
            assert np.array_equal(loaded.logits(), session.logits())
            assert loaded.generate(40).tokens == session.generate(40).tokens
            assert np.array_equal(loaded.logits(), session.logits())


@pytest.mark.parametrize("kind", KINDS)
def test_edits_after_a_load_do_what_they_would_have_done(tiny_path: TinyPath, tmp_path: Path, kind: str) -> None:
    with edited(tiny_path(kind)) as session:
        session.save(tmp_path / "chat.kvs")
        with Session.load(tmp_path / "chat.kvs", n_threads=1) as loaded:
            for both in (session, loaded):
                both.unmask("b")
                both.append(some_tokens(4, 9))
                both.undo()
                both.undo()
                both.recompute()
            assert look(loaded) == look(session)
            assert [r.verb for r in loaded.history] == [r.verb for r in session.history]
            assert np.abs(loaded.logits() - session.logits()).max() < 0.1


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("on_unsupported", ["refuse", "recompute"])
def test_a_state_is_saved_whole(tiny_path: TinyPath, tmp_path: Path, kind: str, on_unsupported: str) -> None:
    settings = Settings(n_ctx=256, n_threads=1)
    with Session(tiny_path(kind), settings=settings, on_unsupported=on_unsupported) as session:
        session.append(some_tokens(50, 1), name="a")
        session.append(some_tokens(20, 2), name="b")
        if on_unsupported == "recompute":
            session.mask((20, 40))
        session.save(tmp_path / "chat.kvs")
        with Session.load(tmp_path / "chat.kvs", n_threads=1) as loaded:
            assert look(loaded) == look(session)
            assert np.array_equal(loaded.logits(), session.logits())
            assert loaded.generate(20).tokens == session.generate(20).tokens
            if on_unsupported == "recompute":
                loaded.unmask((20, 40))
                loaded.audit()


@pytest.mark.parametrize("kind", [*KINDS, *STATES])
def test_an_empty_session(tiny_path: TinyPath, tmp_path: Path, kind: str) -> None:
    with open_tiny(tiny_path(kind)) as session:
        session.save(tmp_path / "empty.kvs")
    with Session.load(tmp_path / "empty.kvs", n_threads=1) as loaded:
        with pytest.raises(errors.NoLogits):
            loaded.logits()
        loaded.append("Now there is something.")
        loaded.audit()


def test_in_another_process(tiny_path: TinyPath, tmp_path: Path) -> None:
    with edited(tiny_path("llama")) as session:
        session.save(tmp_path / "chat.kvs")
        done = python(_GO_ON, tmp_path / "chat.kvs")
        assert json.loads(done.stdout or "null") == session.generate(40).tokens, done.stderr


_GO_ON = """
import sys
from edgekv import Session
with Session.load(sys.argv[1], n_threads=1) as session:
    print(session.generate(40).tokens)
"""


def test_a_load_of_a_load(tiny_path: TinyPath, tmp_path: Path) -> None:
    with edited(tiny_path("gemma3")) as session:
        session.save(tmp_path / "1.kvs")
        with Session.load(tmp_path / "1.kvs", n_threads=1) as loaded:
            loaded.save(tmp_path / "2.kvs")
        with Session.load(tmp_path / "2.kvs", n_threads=1) as again:
            assert look(again) == look(session)
            assert again.generate(20).tokens == session.generate(20).tokens


def test_saving_changes_nothing(tiny_path: TinyPath, tmp_path: Path) -> None:
    with edited(tiny_path("llama")) as session, edited(tiny_path("llama")) as other:
        before, history = look(session), session.history
        session.save(tmp_path / "chat.kvs")
        session.save(tmp_path / "chat.kvs")
        assert look(session) == before
        assert session.history == history
        assert np.array_equal(session.logits(), other.logits())


def test_an_open_generation_ends_before_the_save(tiny_path: TinyPath, tmp_path: Path) -> None:
    with open_tiny(tiny_path("llama")) as session:
        session.append("The quick brown fox")
        generation = session.generate(30)
        next(generation)
        session.save(tmp_path / "chat.kvs")
        assert generation.finish_reason == "closed"
        with Session.load(tmp_path / "chat.kvs", n_threads=1) as loaded:
            assert loaded.tokens.tolist() == session.tokens.tolist()


def test_sampling_is_kept(tiny_path: TinyPath, tmp_path: Path) -> None:
    with open_tiny(tiny_path("llama")) as session:
        session.append("The quick brown fox")
        session.sampling = Sampling(
            temperature=0.8, seed=7, top_k=40, logit_bias={5: -math.inf, 6: 1.5}, json_schema={"type": "object"}
        )
        session.save(tmp_path / "chat.kvs")
        with Session.load(tmp_path / "chat.kvs", n_threads=1) as loaded:
            assert loaded.sampling == session.sampling
            loaded.sampling = session.sampling = Sampling(temperature=0.8, seed=7)
            assert loaded.generate(20).tokens == session.generate(20).tokens
            with loaded.fork() as fork:
                assert fork.sampling == loaded.sampling


def test_a_fork_and_what_others_hold(tiny_path: TinyPath, tmp_path: Path) -> None:
    """A fork is saved for itself; cells it shares are its own afterwards."""
    with edited(tiny_path("llama")) as session, session.fork() as fork:
        fork.mask((100, 104))
        fork.park("d")
        fork.save(tmp_path / "fork.kvs")
        with Session.load(tmp_path / "fork.kvs", n_threads=1) as loaded:
            assert look(loaded).states == look(fork).states
            assert loaded.stats.cells_used == loaded.engine.cells_used
            loaded.unmask("d")
            loaded.audit()
        session.audit()


def test_into_an_engine_that_others_use(tiny_path: TinyPath, tmp_path: Path) -> None:
    with edited(tiny_path("llama")) as session:
        session.save(tmp_path / "chat.kvs")
    settings = Settings(n_ctx=1024, n_threads=1)
    with Model(tiny_path("llama")) as model, Engine(model, settings) as engine, Session(engine) as other:
        other.append(some_tokens(50, 8))
        before = look(other)
        with Session.load(tmp_path / "chat.kvs", engine) as loaded:
            loaded.audit()
            other.audit()
            assert engine.cells_used == before.cells_used + loaded.stats.cells_used
        assert look(other) == before


def test_other_sizes_are_possible(tiny_path: TinyPath, tmp_path: Path) -> None:
    with edited(tiny_path("llama")) as session:
        session.save(tmp_path / "chat.kvs")
        for settings in (
            Settings(n_ctx=2048, n_batch=64, n_threads=1),
            Settings(n_ctx=256, n_sessions=1, n_archives=2, n_threads=1),
        ):
            with Session.load(tmp_path / "chat.kvs", tiny_path("llama"), settings=settings) as loaded:
                assert look(loaded).states == look(session).states


def test_masks_that_need_more_archives_than_there_are(tiny_path: TinyPath, tmp_path: Path) -> None:
    with open_tiny(tiny_path("llama")) as session:
        for name in ("sys", "a", "b", "c"):
            session.append(some_tokens(20), name=name)
        session.mask("b")
        session.mask("a")  # it has come to where b was
        session.save(tmp_path / "chat.kvs")
        with pytest.raises(errors.WrongFile, match="n_archives=2"):
            Session.load(tmp_path / "chat.kvs", settings=Settings(n_ctx=256, n_archives=1, n_threads=1))


def test_no_room_for_its_cells(tiny_path: TinyPath, tmp_path: Path) -> None:
    with open_tiny(tiny_path("llama")) as session:
        session.append(some_tokens(300))
        session.save(tmp_path / "chat.kvs")
    with pytest.raises(errors.ContextFull, match="300 cells and 256 are free"):
        Session.load(tmp_path / "chat.kvs", settings=Settings(n_ctx=256, n_threads=1))


def test_the_model_may_have_moved(tiny_path: TinyPath, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(tiny_path("llama").read_bytes())
    with open_tiny(model) as session:
        session.append("The quick brown fox")
        session.save(tmp_path / "chat.kvs")
    model.unlink()
    with pytest.raises(errors.ModelNotFound, match=r"model\.gguf"):
        Session.load(tmp_path / "chat.kvs")
    with Session.load(tmp_path / "chat.kvs", tiny_path("llama"), n_threads=1) as loaded:
        assert loaded.text((0, 1)) is not None


def test_progress_counts_cells(tiny_path: TinyPath, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    with edited(tiny_path("llama")) as session:
        session.progress = lambda done, total: heard.append((done, total))
        session.save(tmp_path / "chat.kvs")
        total = session.stats.cells_used + session.stats.parked
        assert heard[-1] == (total, total)
        assert heard == sorted(heard)
        session.progress = lambda _done, _total: session.audit()
        with pytest.raises(errors.BadState, match="progress"):
            session.save(tmp_path / "chat.kvs")
        session.progress = None
        session.audit()
    heard.clear()
    with Session.load(tmp_path / "chat.kvs", n_threads=1, progress=lambda done, all_: heard.append((done, all_))):
        assert heard[-1] == (total, total)


def test_from_another_thread_and_beside_a_loop(tiny_path: TinyPath, tmp_path: Path) -> None:
    with edited(tiny_path("llama")) as session:

        async def speak() -> list[str]:
            return [piece async for piece in session.generate(30)]

        saver = threading.Thread(target=lambda: session.save(tmp_path / "chat.kvs"))
        saver.start()
        asyncio.run(speak())
        saver.join()
        session.audit()
        with Session.load(tmp_path / "chat.kvs", n_threads=1) as loaded:
            loaded.audit()


def test_where_llama_cpp_does_not_tell_the_order_of_cells(
    tiny_path: TinyPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the slices are saved in the order of positions."""
    with edited(tiny_path("llama")) as session:

        def changed(_sequences: object) -> None:
            raise errors.AuditFailed("laid out otherwise")

        monkeypatch.setattr(session.engine, "in_order", changed)
        session.save(tmp_path / "chat.kvs")
        with Session.load(tmp_path / "chat.kvs", n_threads=1) as loaded:
            assert look(loaded) == look(session)


def test_the_order_of_cells_is_kept(tiny_path: TinyPath, tmp_path: Path) -> None:
    """Attention adds up cell by cell: f16 sums differ where the order does."""
    with open_tiny(tiny_path("llama")) as session:
        session.append(some_tokens(200, 1))
        session.evict((50, 60))
        session.append(some_tokens(30, 2))  # into the hole, and behind
        found = session.engine.in_order((session._transcript.record.live,))
        assert [run.p0 for run in found] != sorted(run.p0 for run in found)
        session.save(tmp_path / "chat.kvs")
        with Session.load(tmp_path / "chat.kvs", n_threads=1) as loaded:
            assert loaded.engine.in_order((loaded._transcript.record.live,)) == [
                run._replace(seq=loaded._transcript.record.live) for run in found
            ]
            session.append(some_tokens(5, 3))
            loaded.append(some_tokens(5, 3))
            assert np.array_equal(session.logits(), loaded.logits())


def test_states_are_what_the_manifest_says(tiny_path: TinyPath) -> None:
    with edited(tiny_path("llama")) as session:
        told = saving._describe(session._transcript, session._ledger).session
        assert told is not None
        assert told.tokens["parked"] == session.stats.parked
        assert told.cells == session.stats.cells_used
        for span, facts in zip(session.spans, told.spans, strict=True):
            assert facts.states == {State(s).name.lower(): n for s, n in session.states(span).items()}
