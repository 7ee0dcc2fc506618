"""Parked spans and modules among other edits: whose logits are the next ones, and what receipts may claim."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgekv import Session, cells, errors, prefill
from helpers import EXACT, look, some_tokens

TinyPath = Callable[..., Path]
NEAR = 2e-2  # hiding a token moves logits by about 1


def read(path: Path, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """The next token's logits of a session that was never edited."""
    with Session(path, settings=EXACT) as session:
        session.append(tokens)
        return session.logits()


@pytest.mark.parametrize("then", ["none", "recompute"])
@pytest.mark.parametrize("alone", ["attached", "isolated"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_text_that_recompute_keeps_at_the_end(
    tiny_path: TinyPath, tmp_path: Path, kind: str, alone: str, then: str
) -> None:
    """The logits behind what was read again are not those of the text that was kept behind it."""
    prefill("Kept as it is.", tmp_path / "kept.kv", tiny_path(kind), attend="System.", settings=EXACT)
    logits = []
    for with_a in (True, False):
        with Session(tiny_path(kind), settings=EXACT) as session:
            session.append("System.", name="sys")
            if with_a:
                session.append(some_tokens(20, 1), name="a")
            session.append(some_tokens(9, 2), name="x")
            if alone == "attached":
                session.attach(tmp_path / "kept.kv")
            else:
                session.append("Kept as it is.", attend="sys")
            if with_a:
                session.mask("a", then=then)
                if then == "none":
                    session.recompute()
            logits.append(session.logits())
            session.audit()
    assert np.abs(logits[0] - logits[1]).max() < NEAR


@pytest.mark.parametrize("kind", ["yarn", "mrope"])
@pytest.mark.parametrize("verb", ["park", "mask", "evict"])
def test_logits_after_an_undo_that_reads_again(tiny_path: TinyPath, kind: str, verb: str) -> None:
    with Session(tiny_path(kind), settings=EXACT, on_unsupported="recompute") as session:
        session.append(some_tokens(6, 1), name="sys")
        session.append(some_tokens(9, 2), name="a")
        getattr(session, verb)("a")
        session.append(some_tokens(4, 3), name="b")
        session.rewind("a")
        session.undo()
        session.mask("b")
        session.audit()
        assert np.abs(session.logits() - read(tiny_path(kind), session.visible_tokens)).max() < NEAR


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        *((kind, order) for kind in ("llama", "gemma3", "yarn", "mrope") for order in (["a", "c"], "undo")),
        *((kind, ["c", "a"]) for kind in ("llama", "gemma3")),  # c alone would have to come to where a was
    ],
)
def test_the_first_reading_of_a_parked_token_comes_back(tiny_path: TinyPath, kind: str, order: list[str]) -> None:
    with Session(tiny_path(kind), settings=EXACT) as session:
        for name, count in (("sys", 10), ("a", 20), ("c", 15)):
            session.append(some_tokens(count, count), name=name)
        before, logits = look(session), session.logits()
        session.mask("a", gap="keep")
        session.logits()  # reads the last token of c again; its first reading waits
        session.park("c", gap="keep")
        session.audit()
        if order == "undo":
            session.undo()
            session.undo()
        else:
            receipts = [session.unmask(name) for name in order]
            assert receipts[-1].exact
        session.audit()
        assert look(session).states == before.states
        assert np.abs(session.logits() - logits).max() < 1e-4
        assert not session._ledger.inexact().any()


def test_what_was_read_without_another_is_never_called_exact(tiny_path: TinyPath) -> None:
    """b did not see a; shown again beside it, b is not what it would have been."""
    for hide in ("mask", "park"):
        with Session(tiny_path("llama"), settings=EXACT) as session:
            session.append(some_tokens(10), name="sys")
            session.append(some_tokens(20), name="a")
            getattr(session, hide)("a")
            session.append(some_tokens(15), name="b")
            getattr(session, hide)("b")
            session.unmask("a")
            receipt = session.unmask("b")
            assert (receipt.exact, receipt.unaware) == (False, 15)


def test_evicted_and_read_back_with_a_first_reading_gone(tiny_path: TinyPath) -> None:
    with Session(tiny_path("llama"), settings=EXACT) as session:
        for name, count in (("sys", 10), ("a", 20), ("c", 15)):
            session.append(some_tokens(count, count), name=name)
        session.mask("a", gap="keep")
        session.logits()
        session.evict("c", gap="keep")
        session.undo()
        session.unmask("a")
        told = session.logits()
        wrong = session._ledger.inexact()
        with Session(tiny_path("llama"), settings=EXACT) as fresh:
            fresh.append(session.visible_tokens)
            assert np.abs(told - fresh.logits()).max() < NEAR or wrong.any()


def test_a_foreign_module_is_not_exact(tiny_path: TinyPath, tmp_path: Path) -> None:
    prefill("A module.", tmp_path / "m.kv", tiny_path("llama"), attend="System.", settings=EXACT)
    with Session(tiny_path("llama"), settings=EXACT) as session:
        session.append("Something else.")
        receipt = session.attach(tmp_path / "m.kv")
        assert not receipt.exact
        assert receipt.unaware == receipt.tokens


def test_reused_counts_what_an_edit_shows_or_hides(tiny_path: TinyPath) -> None:
    with Session(tiny_path("llama"), settings=EXACT) as session:
        for name in ("sys", "a", "b"):
            session.append(some_tokens(20), name=name)
        assert session.mask("a").reused == 20
        assert session.park("a").reused == 0  # nothing visible changes
        assert session.evict("a").reused == 0
        assert session.stats.reused == 20


@pytest.mark.parametrize("to", ["ram", "folder"])
@pytest.mark.parametrize("free", [0, 400])
def test_many_stretches_of_one_blob(tiny_path: TinyPath, tmp_path: Path, to: str, free: int) -> None:
    """With room for the whole blob it is loaded at once, else piece by piece."""
    with Session(tiny_path("llama"), settings=EXACT) as session:
        session.append(some_tokens(10), name="sys")
        a = session.append(some_tokens(200, 1), name="a")
        session.append(some_tokens(20, 2), name="b")
        logits = session.logits()
        session.park("a", "ram" if to == "ram" else tmp_path, gap="keep")
        if not free:
            session.append(some_tokens(session.engine.cells_free - 100, 3), name="filler")
        session.unmask([(i, i + 1) for i in range(a.start, a.stop, 2)])
        session.audit()
        if not free:
            session.rewind("filler")
        session.unmask("a")
        session.audit()
        assert np.abs(session.logits() - logits).max() < 1e-4


def test_a_module_that_cannot_be_loaded_leaves_an_empty_session_empty(
    tiny_path: TinyPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "_SLICE_BYTES", 4096)
    prefill("A module of some length, in several slices.", tmp_path / "m.kv", tiny_path("llama"), settings=EXACT)
    from edgekv import store

    with store.Stored(tmp_path / "m.kv") as stored:
        contents = {name: stored.read(name) for name in stored._members}
    contents["cells/1"] = contents["cells/0"]  # K and V of other positions, under a right checksum
    store.write(tmp_path / "m.kv", contents.items())
    with Session(tiny_path("llama"), settings=EXACT) as session:
        before = look(session)
        with pytest.raises(errors.DamagedFile, match="K and V are not"):
            session.attach(tmp_path / "m.kv")
        assert look(session) == before
