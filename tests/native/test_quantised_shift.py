"""Quantised keys whose shift would end the process: gaps stay open there, and the user is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgekv import Engine, Model, Session, Settings
from edgekv.capabilities import Capability, close_gaps_in
from edgekv.errors import MaskUnsupported
from edgekv.steps import Shift

YES = Capability(True, "RoPE can be shifted")


def header(more: dict[str, int]) -> dict[str, Any]:
    base = {"embedding_length": 1024, "attention.head_count": 8}  # heads of 128
    return {"general.architecture": "x", **{f"x.{name}": value for name, value in {**base, **more}.items()}}


@pytest.mark.parametrize(
    ("more", "closes"),
    [
        ({}, True),
        ({"attention.key_length": 64}, True),
        ({"attention.key_length": 192}, True),
        ({"attention.key_length": 32}, False),
        ({"attention.key_length": 80}, False),  # Phi-2, StableLM
        ({"attention.key_length": 96}, False),  # Phi-3 mini
        ({"rope.dimension_count": 128}, True),
        ({"rope.dimension_count": 64}, False),  # RoPE on half of each head
        ({"attention.key_length": 512, "attention.key_length_swa": 256}, False),  # Gemma 4
        ({"attention.key_length": 256, "attention.key_length_swa": 256}, True),
        ({"rope.dimension_count_swa": 64}, False),
        ({"attention.head_count": 32}, False),
    ],
)
def test_heads_that_llama_cpp_can_turn(more: dict[str, int], closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for kv_type in ("q8_0", "q4_0"):
        assert bool(close_gaps_in(kv_type, YES, header(more))) is closes
    for kv_type in ("f32", "f16"):
        assert close_gaps_in(kv_type, YES, header(more)) is YES
    no = Capability(False, "for another reason")
    assert close_gaps_in("q8_0", no, header(more)) is no
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    assert not close_gaps_in("q8_0", YES, header(more))
    assert close_gaps_in("f16", YES, header(more))


@pytest.fixture(scope="module")
def model(tiny_path: Callable[[str], Path]) -> Iterator[Model]:
    with Model(tiny_path("llama")) as opened:  # heads of 32
        yield opened


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_the_gap_is_kept_and_the_process_lives(model: Model, kv_type: str) -> None:
    with Session(model, n_ctx=256, kv_type=kv_type, n_threads=1) as session:
        for name in ("front", "middle", "back"):
            session.append(f"some text for the {name}. ", name=name)
        receipt = session.mask("middle", gap="close")
        assert (receipt.gap, receipt.moved) == ("keep", 0)
        assert "cannot shift quantised keys" in str(receipt)
        assert len(session.generate(4).finish().tokens) == 4
        session.unmask("middle")
        session.audit()


def test_the_engine_refuses_the_shift(model: Model) -> None:
    with Engine(model, Settings(n_ctx=256, kv_type="q8_0")) as engine:
        assert not engine.can_shift
        with pytest.raises(MaskUnsupported, match="quantised keys"):
            engine.apply([Shift(3, 0, 1, 1)])


@pytest.mark.real
@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_heads_of_64_close_their_gaps(kv_type: str, smollm2_path: Path) -> None:
    with Session(smollm2_path, n_ctx=256, kv_type=kv_type) as session:
        for name in ("front", "middle", "back"):
            session.append(f"Here is some text for the {name} of it all. ", name=name)
        assert session.mask("middle").gap == "close"
        session.logits()
        session.audit()
