"""KV modules: read once, attached anywhere, and as good as an isolated text that was read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgekv import Engine, Model, Session, Settings, cells, errors, prefill
from helpers import EXACT, TEXT, look, open_tiny, some_tokens

TinyPath = Callable[..., Path]
SYSTEM = "You are terse. "
KINDS = ["llama", "gemma3", "yarn", "mrope"]
SHIFTING = ["llama", "gemma3"]


@pytest.fixture
def module(tiny_path: TinyPath, tmp_path: Path) -> Callable[[str], Path]:
    """``module(kind)``: TEXT, three times, read behind SYSTEM."""

    def made(kind: str) -> Path:
        path = tmp_path / f"manual-{kind}.kv"
        prefill(TEXT * 3, path, tiny_path(kind), attend=SYSTEM, settings=EXACT)
        return path

    return made


def open_exact(path: Path) -> Session:
    return Session(path, settings=EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_at_its_own_place_it_is_the_text_that_was_read(
    tiny_path: TinyPath, module: Callable[[str], Path], kind: str
) -> None:
    with open_exact(tiny_path(kind)) as session, open_exact(tiny_path(kind)) as read:
        for one in (session, read):
            one.append(SYSTEM, name="system")
        receipt = session.attach(module(kind), name="manual", role="document", tags=["big"])
        span = read.append(TEXT * 3, name="manual", role="document", tags=["big"])
        assert receipt.span == span
        assert (receipt.tokens, receipt.moved, receipt.prefilled, receipt.notes) == (len(span), 0, 0, ())
        assert session.tokens.tolist() == read.tokens.tolist()
        assert session.stats.prefilled == read.stats.prefilled - len(span)
        session.audit()
        for one in (session, read):
            one.append("What now?")
        assert np.abs(session.logits() - read.logits()).max() < 1e-3
        assert session.generate(12).tokens == read.generate(12).tokens


@pytest.mark.parametrize("kind", SHIFTING)
def test_anywhere_else_it_is_an_isolated_text(tiny_path: TinyPath, module: Callable[[str], Path], kind: str) -> None:
    with open_exact(tiny_path(kind)) as session, open_exact(tiny_path(kind)) as read:
        for one in (session, read):
            one.append(SYSTEM, name="system")
            one.append(some_tokens(50), name="chat")
        receipt = session.attach(module(kind))
        span = read.append(TEXT * 3, attend="system")
        assert receipt.moved == len(span)
        session.audit()
        for one in (session, read):
            one.append("What now?")
        assert np.abs(session.logits() - read.logits()).max() < 1e-3
        masked = session.mask("chat")
        assert masked.influenced == len(session.model.tokenize("What now?"))  # and no token of the module


@pytest.mark.parametrize("kind", SHIFTING)
def test_masking_it_is_exact_and_reversible(tiny_path: TinyPath, module: Callable[[str], Path], kind: str) -> None:
    with open_exact(tiny_path(kind)) as session:
        session.append(SYSTEM)
        without = session.logits()
        session.attach(module(kind), name="manual")
        assert session.mask("manual").exact
        assert np.abs(session.logits() - without).max() < 1e-3
        session.unmask("manual")
        session.audit()


@pytest.mark.parametrize("kind", SHIFTING)
def test_several_modules_and_the_same_one_twice(
    tiny_path: TinyPath, module: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    prefill("The bearing is a 6319 C3.", tmp_path / "gist.kv", tiny_path(kind), attend=SYSTEM, settings=EXACT)
    with open_exact(tiny_path(kind)) as session:
        session.append(SYSTEM)
        path = module(kind)
        names = [session.attach(p).span for p in (path, tmp_path / "gist.kv", tmp_path / "gist.kv")]
        assert [span.name for span in names if span] == [f"manual-{kind}", "gist", "gist-2"]
        session.audit()
        session.park("gist")
        session.mask(f"manual-{kind}")
        session.append("What now?")
        session.unmask("gist")
        session.audit()
        assert session.recompute().prefilled > 0
        session.audit()


def test_behind_other_tokens_the_receipt_says_so_and_recompute_reads_it(
    tiny_path: TinyPath, module: Callable[[str], Path]
) -> None:
    with open_exact(tiny_path("llama")) as session, open_exact(tiny_path("llama")) as read:
        for one in (session, read):
            one.append("Something else. ")
        receipt = session.attach(module("llama"))
        read.append(TEXT * 3)
        assert "does not begin with" in str(receipt)
        assert np.abs(session.logits() - read.logits()).max() > 1e-3
        assert session.recompute().prefilled == receipt.tokens
        assert np.abs(session.logits() - read.logits()).max() < 1e-3


@pytest.mark.parametrize("kind", SHIFTING)
def test_into_an_empty_session(tiny_path: TinyPath, tmp_path: Path, kind: str) -> None:
    prefill(TEXT, tmp_path / "alone.kv", tiny_path(kind), settings=EXACT)
    with open_exact(tiny_path(kind)) as session, open_exact(tiny_path(kind)) as read:
        session.attach(tmp_path / "alone.kv")
        read.append(TEXT)
        assert session.tokens.tolist() == read.tokens.tolist()
        assert session.stats.prefilled == 1  # the model's own first token
        assert np.abs(session.logits() - read.logits()).max() < 1e-3


@pytest.mark.parametrize("kind", ["yarn", "mrope"])
def test_where_nothing_can_be_shifted_only_its_own_place_will_do(
    tiny_path: TinyPath, module: Callable[[str], Path], kind: str
) -> None:
    with open_exact(tiny_path(kind)) as session:
        session.append(some_tokens(40))
        before = look(session)
        with pytest.raises(errors.MaskUnsupported, match="append its text instead"):
            session.attach(module(kind))
        assert look(session) == before


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_quantised_modules(tiny_path: TinyPath, tmp_path: Path, kv_type: str) -> None:
    settings = Settings(n_ctx=512, kv_type=kv_type, n_threads=1)
    prefill(TEXT, tmp_path / "q.kv", tiny_path("llama"), attend=SYSTEM, settings=settings)
    with Session(tiny_path("llama"), settings=settings) as session, open_tiny(tiny_path("llama")) as other:
        session.append(SYSTEM)
        session.attach(tmp_path / "q.kv")
        session.audit()
        session.generate(5).finish()
        other.append(SYSTEM)
        before = look(other)
        with pytest.raises(errors.WrongFile, match=f"kv_type='{kv_type}'"):
            other.attach(tmp_path / "q.kv")
        assert look(other) == before


def test_refused_and_nothing_changed(tiny_path: TinyPath, module: Callable[[str], Path], tmp_path: Path) -> None:
    path = module("llama")
    (tmp_path / "text.kv").write_text("no module")
    (tmp_path / "cut.kv").write_bytes(path.read_bytes()[:-100])
    flipped = bytearray(path.read_bytes())
    flipped[len(flipped) // 2] ^= 4
    (tmp_path / "flipped.kv").write_bytes(flipped)
    with open_tiny(tiny_path("llama"), kv_type="f32", flash_attention=False) as session:
        session.append(SYSTEM, name="system")
        session.save(tmp_path / "chat.kvs")
        before = look(session)
        for error, file, name in (
            (errors.NotEdgekvFile, "text.kv", None),
            (errors.DamagedFile, "cut.kv", None),
            (errors.DamagedFile, "flipped.kv", None),
            (errors.WrongFile, "chat.kvs", None),
            (errors.FileError, "nosuch.kv", None),
            (errors.FileError, ".", None),
            (errors.UsageError, path.name, "system"),
            (errors.UsageError, path.name, "a*b"),
        ):
            with pytest.raises(error):
                session.attach(tmp_path / file, name=name)
            assert look(session) == before
        with pytest.raises(errors.WrongFile, match=r"session\.attach"):
            Session.load(path)
    with open_tiny(tiny_path("llama", seed=1), kv_type="f32", flash_attention=False) as session:
        with pytest.raises(errors.WrongFile, match="another model"):
            session.attach(path)
        assert session.stats.visible == 0  # not even the first token was read


def test_no_room(tiny_path: TinyPath, module: Callable[[str], Path]) -> None:
    path = module("llama")
    with Session(tiny_path("llama"), settings=Settings(n_ctx=256, kv_type="f32", flash_attention=False)) as session:
        session.append(some_tokens(100))
        before = look(session)
        with pytest.raises(errors.ContextFull):
            session.attach(path)
        assert look(session) == before


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_a_state_takes_none(tiny_path: TinyPath, tmp_path: Path, module: Callable[[str], Path], kind: str) -> None:
    with pytest.raises(errors.MaskUnsupported):
        prefill(TEXT, tmp_path / "no.kv", tiny_path(kind))
    assert not (tmp_path / "no.kv").exists()
    with open_tiny(tiny_path(kind)) as session, pytest.raises(errors.MaskUnsupported):
        session.attach(module("llama"))


def test_ctrl_c_between_two_slices(
    tiny_path: TinyPath, module: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "_SLICE_BYTES", 4096)
    path = module("llama")
    with open_exact(tiny_path("llama")) as session:
        session.append(SYSTEM)
        before, load, calls = look(session), session.engine.load, []

        def interrupted(*args: object) -> None:
            calls.append(args)
            if len(calls) == 4:
                raise KeyboardInterrupt
            load(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(session.engine, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.attach(path)
        assert len(calls) == 4
        assert look(session) == before
        monkeypatch.undo()
        session.attach(path)
        session.audit()


def test_forks_and_undo_around_a_module(tiny_path: TinyPath, module: Callable[[str], Path]) -> None:
    with Model(tiny_path("llama")) as model, Engine(model, EXACT) as engine, Session(engine) as session:
        session.append(SYSTEM)
        session.attach(module("llama"), name="manual")
        with session.fork() as fork:
            fork.mask("manual")
            fork.undo()
            fork.audit()
            session.rewind("manual")
            session.undo()
            session.audit()


def test_an_empty_text_makes_no_module(tiny_path: TinyPath, tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="no token"):
        prefill("", tmp_path / "no.kv", tiny_path("llama"))
    assert list(tmp_path.iterdir()) == []
