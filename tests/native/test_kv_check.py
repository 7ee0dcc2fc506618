"""A quantised cache is tried at its first use on a machine; what is found is told, and kept where that is possible."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgekv import Engine, Model, Session, Settings, errors, kv_check
from edgekv.doctor import checks, selftest

TinyPath = Callable[..., Path]
Q8 = Settings(n_ctx=256, n_threads=1, kv_type="q8_0")
Q4 = Settings(n_ctx=256, n_threads=1, kv_type="q4_0")


@pytest.fixture(autouse=True)
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine on which nothing was tried yet, and the file in which results are kept there."""
    monkeypatch.setattr(kv_check, "_passed", set())
    monkeypatch.setattr(kv_check, "_record", lambda: tmp_path / "cache" / "kv-types.json")
    return tmp_path / "cache" / "kv-types.json"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is tried, as it happens."""
    seen, measure = [], kv_check.measure

    def counted(kv_type: str, head_size: int) -> float:
        seen.append((kv_type, head_size))
        return measure(kv_type, head_size)

    monkeypatch.setattr(kv_check, "measure", counted)
    return seen


@pytest.fixture
def garbled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised caches whose keys are turned by a wrong RoPE: real logits, and wrong ones."""
    logits = kv_check._logits

    def wrong(model: Model, kv_type: str) -> Any:
        return logits(model, kv_type, 0.0 if kv_type == "f16" else 100.0)

    monkeypatch.setattr(kv_check, "_logits", wrong)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process."""
    monkeypatch.setattr(kv_check, "_passed", set())


@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_rounding_is_far_from_the_limit(kv_type: str, head_size: int) -> None:
    assert 0 < kv_check.measure(kv_type, head_size) < kv_check.LIMITS[kv_type] / 2


@pytest.mark.usefixtures("garbled")
@pytest.mark.parametrize("head_size", [64, 256])
@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_wrong_keys_are_far_beyond_it(kv_type: str, head_size: int) -> None:
    assert kv_check.measure(kv_type, head_size) > 2 * kv_check.LIMITS[kv_type]


def test_tried_once(
    tiny_path: TinyPath, record: Path, tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings(), Model(tiny_path("llama")) as model:
        warnings.simplefilter("error")
        for _ in range(2):
            with Engine(model, Q8) as engine:
                assert engine.notes == ()
        Engine(model, Settings(n_ctx=256, n_threads=1)).close()  # f16 is what it is compared with
        assert tried == [("q8_0", 32)]
        Engine(model, Q4).close()
        assert tried == [("q8_0", 32), ("q4_0", 32)]
        forget(monkeypatch)
        Engine(model, Q8).close()  # another process
        assert len(tried) == 2
        assert len(json.loads(record.read_text())) == 2
        monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")  # llama.cpp then takes other code
        kv_check._machine.cache_clear()
        Engine(model, Q8).close()
        assert len(tried) == 3
    kv_check._machine.cache_clear()


@pytest.mark.usefixtures("garbled")
def test_a_cache_that_garbles_is_told_every_time(tiny_path: TinyPath, record: Path) -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"q8_0 cache garbles on this CPU.*kv_type='f16'"):
            session = Session(tiny_path("llama"), settings=Q8)
        with session:
            assert "edgekv doctor" in session.engine.notes[0]
            session.append("It opens all the same.")
    assert not record.exists()
    finding = checks.carry_out(checks.Check("quantised KV", selftest._quantised))
    assert finding.status == "failed"
    assert "garbles" in finding.message


def test_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = kv_check._logits
    monkeypatch.setattr(kv_check, "_logits", lambda m, t: logits(m, t) * (1.0 if t == "f16" else float("nan")))
    assert kv_check.measure("q8_0", 64) == float("inf")
    assert "mean KL inf" in kv_check._note("q8_0", 64)


@pytest.mark.parametrize("content", [b"", b"{", b"null", b'{"a": 1}', b"[1, null, [2]]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_record_is_none(tried: list[tuple[str, int]], record: Path, content: bytes) -> None:
    record.parent.mkdir()
    record.write_bytes(content)
    assert kv_check._note("q8_0", 64) == ""
    assert len(tried) == 1
    assert len(json.loads(record.read_text())) == 1  # and it is whole again


def test_a_record_that_cannot_be_written(
    tried: list[tuple[str, int]], record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.mkdir(parents=True)  # a folder is where the file would be
    assert kv_check._note("q8_0", 64) == ""
    forget(monkeypatch)

    monkeypatch.setattr(kv_check, "_record", lambda: _raise(errors.FileError("no home folder")))
    for _ in range(2):
        assert kv_check._note("q8_0", 64) == ""
    assert len(tried) == 2  # once more, then this process knows


def _raise(error: Exception) -> Any:
    raise error


def test_a_record_does_not_grow_for_ever(record: Path) -> None:
    for i in range(70):
        kv_check._keep(str(i))
    assert json.loads(record.read_text()) == [str(i) for i in range(6, 70)]


@pytest.mark.parametrize("trouble", [errors.TooLarge("no room"), OSError("no temporary folder")])
def test_what_cannot_be_tried_tells_nothing(
    tiny_path: TinyPath, record: Path, trouble: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_check, "_write", lambda *_: _raise(trouble))
    with Session(tiny_path("llama"), settings=Q8) as session:
        assert session.engine.notes == ()
    assert not record.exists()


@pytest.mark.parametrize("kind", ["mamba", "lfm2", "gemma3", "yarn", "mrope"])
def test_every_kind_of_model_opens(tiny_path: TinyPath, kind: str) -> None:
    with Session(tiny_path(kind), settings=Q8) as session:
        assert session.engine.notes == ()
