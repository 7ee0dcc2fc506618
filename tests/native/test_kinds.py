"""What each kind of model can do, said with the reason, and done: mask where it can be, refused where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edgekv import Model, Session, errors
from edgekv._llama import lib
from helpers import TEXT, look, open_tiny, some_tokens

ATTENTION = ("llama", "gemma3", "mrope", "yarn", "deepseek2")
NO_SHIFT = {"mrope": "M-RoPE", "yarn": "YaRN"}
STATEFUL = {"mamba": "recurrent", "lfm2": "hybrid"}
KV_TYPES = ("f32", "f16", "q8_0", "q4_0")
DRIFT = {"f32": 2e-2, "f16": 0.2, "q8_0": 0.5, "q4_0": 3.0}  # of logits, by shifting there and back
AFTER = some_tokens(12, seed=9)


@pytest.fixture
def opened(tiny_path: Callable[..., Path]) -> Iterator[Callable[..., Session]]:
    """``opened(kind, **settings)``: a session with 60 tokens in three spans: head, middle, tail."""
    sessions = []

    def make(kind: str, **settings: object) -> Session:
        session = open_tiny(tiny_path(kind), **settings)
        sessions.append(session)
        for name, seed in (("head", 1), ("middle", 2), ("tail", 3)):
            session.append(some_tokens(20, seed), name=name)
        return session

    yield make
    for session in sessions:
        session.close()


# ---- what they say --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*ATTENTION, *STATEFUL])
def test_capabilities_and_their_reasons(tiny_path: Callable[..., Path], kind: str) -> None:
    with Model(tiny_path(kind)) as model:
        told = model.capabilities
    answers = {name: said["ok"] for name, said in told.as_dict().items()}
    can, shift = kind not in STATEFUL, kind in ("llama", "gemma3", "deepseek2")
    assert answers == {"mask": can, "close_gaps": shift, "park": can, "rewind": can}
    assert all(said["reason"] for said in told.as_dict().values())
    if not shift:
        assert {**NO_SHIFT, **STATEFUL}[kind] in told.close_gaps.reason
    if not can:
        assert STATEFUL[kind] in told.mask.reason


@pytest.mark.parametrize(("kind", "words"), [("encoder", "encoder"), ("vocab_only", "vocabulary")])
def test_not_generative(tiny_path: Callable[..., Path], kind: str, words: str) -> None:
    with pytest.raises(errors.NotGenerative, match=words):
        Model(tiny_path(kind))


# ---- gaps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_gap_is_closed_where_it_can_be(opened: Callable[..., Session], kind: str) -> None:
    session = opened(kind)
    receipt = session.mask("middle")
    assert (receipt.gap, receipt.moved, receipt.notes) == ("close", 20, ())
    assert session.engine.positions(3)[0].tolist() == list(range(20, 60))


@pytest.mark.parametrize("kind", NO_SHIFT)
def test_a_gap_is_kept_where_it_must_be_and_the_receipt_says_why(opened: Callable[..., Session], kind: str) -> None:
    session = opened(kind)
    receipt = session.mask("middle", gap="close")
    assert (receipt.gap, receipt.moved) == ("keep", 0)
    assert len(receipt.notes) == 1
    assert NO_SHIFT[kind] in receipt.notes[0]
    assert receipt.notes[0] in str(receipt)
    assert session.engine.positions(3)[0].tolist() == [*range(20), *range(40, 60)]
    assert session.mask((42, 45), gap="keep").notes == ()  # asked for, so there is nothing to explain


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("use", [False, True], ids=["untouched", "sampled while masked"])
def test_mask_and_unmask_in_place_are_bit_identical(opened: Callable[..., Session], kind: str, use: bool) -> None:
    session = opened(kind)
    before = session.logits_over(AFTER)
    session.mask("middle", gap="keep")
    hidden = session.logits_over(AFTER) if use else None
    session.unmask("middle")
    np.testing.assert_array_equal(session.logits_over(AFTER), before)
    if hidden is not None:
        assert np.abs(hidden - before).max() > 0.1
    session.audit()


# ---- what no shift costs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NO_SHIFT)
def test_a_place_taken_since_is_refused_and_nothing_changes(opened: Callable[..., Session], kind: str) -> None:
    session = opened(kind)
    session.mask("tail")
    session.append(some_tokens(5, 4), name="new")
    before, logits = look(session), session.logits()
    with pytest.raises(errors.MaskUnsupported, match="rewind"):
        session.unmask("tail")
    assert look(session) == before
    np.testing.assert_array_equal(session.logits(), logits)
    assert len(session.generate(3).finish().tokens) == 3
    session.rewind("new")  # as the message says
    session.unmask("tail")
    assert look(session).tokens[40:60] == tuple(some_tokens(20, 3).tolist())


@pytest.mark.parametrize("kind", NO_SHIFT)
def test_no_archive_left_is_refused_and_nothing_changes(opened: Callable[..., Session], kind: str) -> None:
    session = opened(kind, n_archives=2)
    session.mask("tail")
    for name in ("second", "third"):
        session.append(some_tokens(20, 5), name=name)
        before, logits = look(session), session.logits()
        if name == "second":
            session.mask(name)
    with pytest.raises(errors.MaskUnsupported, match="n_archives"):
        session.mask("third")
    assert look(session) == before
    np.testing.assert_array_equal(session.logits(), logits)
    session.evict("tail")  # as the message says
    session.mask("third")
    session.append("on")
    session.audit()


@pytest.mark.parametrize("kind", NO_SHIFT)
def test_a_token_is_read_again_though_no_archive_can_keep_its_first_reading(
    opened: Callable[..., Session], kind: str
) -> None:
    session = opened(kind, n_archives=1)
    session.mask("tail")
    session.append(some_tokens(20, 4))
    session.mask("middle")
    assert np.isfinite(session.logits()).all()
    assert session.stats.reread == 1
    session.unmask("middle")
    session.generate(3).finish()
    session.audit()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_no_archive_left_is_no_trouble_where_positions_can_move(opened: Callable[..., Session], kind: str) -> None:
    session = opened(kind, n_archives=1)
    for round in range(4):
        session.mask("tail" if not round else f"t{round}")
        session.append(some_tokens(20, round), name=f"t{round + 1}")
        session.audit()
    assert session.stats.masked == 80


# ---- recurrent and hybrid -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_state_refuses_every_edit_before_anything_is_touched(opened: Callable[..., Session], kind: str) -> None:
    session = opened(kind)
    before, logits = look(session), session.logits()
    edits: list[Callable[[], object]] = [
        lambda: session.mask("middle"),
        lambda: session.mask("tail"),
        lambda: session.unmask("middle"),
        lambda: session.evict("middle"),
        lambda: session.evict((0, 60), force=True),
        lambda: session.rewind("tail"),
        lambda: session.rewind(0),
        lambda: session.insert(30, "a"),
        lambda: session.replace("middle", "a"),
        lambda: session.append("a", attend="middle"),
        session.recompute,
        lambda: session.masked("middle").__enter__(),
    ]
    for edit in edits:
        with pytest.raises(errors.MaskUnsupported, match=STATEFUL[kind]):
            edit()
    assert look(session) == before
    np.testing.assert_array_equal(session.logits(), logits)


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_state_reads_generates_and_is_audited(opened: Callable[..., Session], kind: str) -> None:
    session = opened(kind)
    generation = session.generate(8, name="said").finish()
    assert len(generation.tokens) == 8
    session.append(TEXT)
    assert session.generate(4, stop=session.generate(4).text[1:3] or "x").finish().finished
    assert session.audit().cells == len(session.tokens)
    other = opened(kind)
    assert other.generate(8).finish().tokens == generation.tokens


# ---- the cache, type by type ----------------------------------------------------------------------------------------


def blob_size(session: Session) -> int:
    return int(lib.llama_state_seq_get_size(session.engine.ctx, 3))


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("kind", ATTENTION)
def test_bytes_a_token_are_what_the_state_grows_by(tiny_path: Callable[..., Path], kind: str, kv_type: str) -> None:
    with open_tiny(tiny_path(kind), kv_type=kv_type) as session:
        session.append(some_tokens(8))  # fewer than a window holds, so that both caches grow
        before = blob_size(session)
        session.append(some_tokens(16))
        grown = blob_size(session) - before
        caches = len(session.engine.positions(3))
        bookkeeping = caches * (12 + (12 if kind == "mrope" else 0))  # state_blob: a cell's position and sequence
        assert grown / 16 == session.model.kv_bytes_per_token(kv_type) + bookkeeping
        assert session.stats.kv_bytes_used == 24 * session.model.kv_bytes_per_token(kv_type)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("kind", ATTENTION)
def test_every_cache_type_masks_shows_shifts_and_goes_on(
    opened: Callable[..., Session], kind: str, kv_type: str
) -> None:
    session = opened(kind, kv_type=kv_type)
    before = session.logits_over(AFTER)
    session.mask("middle", gap="keep")
    session.audit()
    session.unmask("middle")
    np.testing.assert_array_equal(session.logits_over(AFTER), before)
    receipt = session.mask("middle", gap="close")
    can = session.engine.close_gaps
    assert receipt.gap == ("close" if can else "keep")
    if not can:
        assert receipt.notes == (can.reason,)
    elif kv_type.startswith("q"):
        assert "quantised again" in receipt.notes[0]
    session.generate(4).finish()
    session.audit()
    session.rewind(60)
    session.unmask("middle")
    session.audit()
    drift = np.abs(session.logits_over(AFTER) - before).max()
    assert drift < (DRIFT[kv_type] if can else 1e-4)  # without a shift: only the batches of the last token differ
    assert len(session.generate(4).finish().tokens) == 4
