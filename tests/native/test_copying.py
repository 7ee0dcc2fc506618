"""Whether cells can be copied is tried out; what cannot be read back is refused before anything is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgekv import Engine, Model, Session, Settings, cells, errors, state_blob, store
from edgekv._llama import lib
from helpers import EXACT, look, open_tiny, some_tokens

TinyPath = Callable[..., Path]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "yarn", "mrope", "deepseek2"])
def test_every_kind_with_cells_is_understood(tiny_path: TinyPath, kind: str) -> None:
    with open_tiny(tiny_path(kind)) as session:
        assert session.engine.can_copy
        layout = cells.layout_of(session.model)
        assert layout == cells.Layout(
            12 if kind == "mrope" else 0, {"gemma3": (2, 10), "deepseek2": (2,)}.get(kind, (4,))
        )


@pytest.mark.parametrize("flash_attention", [True, False])
def test_a_cache_without_v(tiny_path: TinyPath, tmp_path: Path, flash_attention: bool) -> None:
    """MLA: mask, park, unmask, fork, save and load; a recompute equals a restart."""
    settings = Settings(n_ctx=512, kv_type="f32", flash_attention=flash_attention, n_threads=1)
    with Session(tiny_path("deepseek2"), settings=settings) as session, Session(session.engine) as restart:
        for name in ("sys", "a", "b", "c"):
            session.append(some_tokens(20, ord(name[0])), name=name)
        before = session.logits()
        session.park("a")
        session.mask("b")
        session.recompute()
        restart.append(np.concatenate([some_tokens(20, ord("s")), some_tokens(20, ord("c"))]))
        assert np.abs(session.logits() - restart.logits()).max() < (0.1 if flash_attention else 1e-4)
        session.save(tmp_path / "chat.kvs")
        with Session.load(tmp_path / "chat.kvs", session.engine) as loaded, session.fork() as fork:
            for one in (loaded, fork, session):
                one.unmask("b")
                one.unmask("a")
                one.recompute()
                one.audit()
                assert np.abs(one.logits() - before).max() < (0.1 if flash_attention else 1e-4)


def test_what_is_not_understood_is_refused_at_once(
    tiny_path: TinyPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that come back as something else: everything that needs them says so, the rest works."""
    with open_tiny(tiny_path("llama")) as session:
        session.append(some_tokens(40), name="a")
        session.save(tmp_path / "whole.kvs")
    monkeypatch.setattr(state_blob, "_BEGIN", 12)  # as if llama.cpp wrote something more
    with open_tiny(tiny_path("llama")) as session:
        for name in ("sys", "a", "b"):
            session.append(some_tokens(20, ord(name[0])), name=name)
        logits = session.logits()
        before = look(session)
        with session.fork() as fork:
            for refused in (
                lambda: session.park("a"),
                lambda: session.save(tmp_path / "chat.kvs"),
                lambda: session.attach(tmp_path / "whole.kvs"),
                lambda: Session.load(tmp_path / "whole.kvs", session.engine),
                lambda: fork.mask("a"),  # the gap would close under the other
            ):
                with pytest.raises(errors.MaskUnsupported, match=r"does not know how llama\.cpp writes"):
                    refused()
            assert np.array_equal(fork.logits(), logits)
        assert look(session) == before
        assert not (tmp_path / "chat.kvs").exists()
        session.mask("a")
        session.unmask("a")
        session.save(tmp_path / "light.kvs", kv=False)
        with Session.load(tmp_path / "light.kvs", session.engine) as loaded:
            assert np.abs(loaded.logits() - session.logits()).max() < 0.1


def test_a_copy_is_checked_before_its_cells_are_dropped(
    tiny_path: TinyPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tiny(tiny_path("llama")) as session:
        session.append(some_tokens(60), name="a")
        assert session.engine.can_copy
        before, logits = look(session), session.logits()
        right = lib.llama_state_seq_get_data

        def wrong(ctx: object, data: object, size: int, seq: int) -> int:
            done = int(right(ctx, data, size, seq))
            data[16] = 77  # type: ignore[index]
            return done

        with monkeypatch.context() as patched:
            patched.setattr(lib, "llama_state_seq_get_data", wrong)
            for refused in (
                lambda: session.park((20, 30)),
                lambda: session.save(tmp_path / "chat.kvs"),
            ):
                with pytest.raises(errors.AuditFailed):
                    refused()
        assert look(session) == before
        assert np.array_equal(session.logits(), logits)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_a_refused_load_leaves_no_nan_for_others(tiny_path: TinyPath, tmp_path: Path, kv_type: str) -> None:
    """Without flash attention 0 * NaN from a free cell would be in everybody's logits."""
    settings = Settings(n_ctx=512, kv_type=kv_type, flash_attention=False, n_threads=1)
    path = tmp_path / "nan.kvs"
    with Session(tiny_path("llama"), settings=settings) as session:
        session.append(some_tokens(60))
        session.save(path)
    with store.Stored(path) as stored:
        contents = {name: stored.read(name).tobytes() for name in stored._members}
    slices = bytearray(contents["cells/0"])
    slices[-64:] = b"\xff" * 64
    store.write(path, list({**contents, "cells/0": bytes(slices)}.items()))
    with (
        Model(tiny_path("llama")) as model,
        Engine(model, settings) as engine,
        Session(engine) as other,
        Session(engine) as same,
    ):
        other.append(some_tokens(30, 2))
        before = look(other)
        with pytest.raises(errors.DamagedFile, match="infinite, or none"):
            Session.load(path, engine)
        assert look(other) == before
        other.append(some_tokens(30, 3))
        assert np.isfinite(other.logits()).all()
        same.append(np.concatenate([some_tokens(30, 2), some_tokens(30, 3)]))
        assert np.abs(same.logits() - other.logits()).max() < 1e-2


def test_k_that_means_something_else_is_refused(
    tiny_path: TinyPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "LLAMA_ATTN_ROT_DISABLE"
    monkeypatch.delenv(name, raising=False)
    for kv_type in ("q8_0", "f16"):
        with open_tiny(tiny_path("llama"), kv_type=kv_type) as session:
            session.append(some_tokens(40))
            session.save(tmp_path / kv_type)
    for value, differs in (("1", True), (" 2x", True), ("0", False), ("", False), ("true", False)):
        monkeypatch.setenv(name, value)
        Session.load(tmp_path / "f16", n_threads=1).close()
        if not differs:
            Session.load(tmp_path / "q8_0", n_threads=1).close()
            continue
        with pytest.raises(errors.WrongFile, match="without LLAMA_ATTN_ROT_DISABLE"):
            Session.load(tmp_path / "q8_0", n_threads=1)


def test_k_of_another_state_version_is_refused(
    tiny_path: TinyPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(tiny_path("llama"), settings=EXACT) as session:
        session.append(some_tokens(40))
        session.save(tmp_path / "chat.kvs")
        session.save(tmp_path / "light.kvs", kv=False)
    monkeypatch.setattr(lib, "LLAMA_STATE_SEQ_VERSION", lib.LLAMA_STATE_SEQ_VERSION + 1)
    with pytest.raises(errors.WrongFile, match=r"llama-cpp-python \d.* in version 3"):
        Session.load(tmp_path / "chat.kvs", n_threads=1)
    Session.load(tmp_path / "light.kvs", n_threads=1).close()
