"""``edgekv inspect``: facts of every kind of model, and the reason for every no."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgekv import Model, memory
from edgekv.cli import output

Edgekv = Callable[..., Any]
TinyPath = Callable[[str], Path]


@pytest.mark.parametrize(
    ("kind", "mask", "close_gaps"),
    [
        ("llama", "", ""),
        ("gemma3", "", ""),
        ("mrope", "", "M-RoPE"),
        ("yarn", "", "YaRN"),
        ("mamba", "recurrent", "recurrent"),
        ("lfm2", "hybrid", "hybrid"),
    ],
)
def test_capabilities_with_their_reasons(
    edgekv: Edgekv, tiny_path: TinyPath, kind: str, mask: str, close_gaps: str
) -> None:
    """'' stands for yes, else the reason names the cause."""
    done = edgekv("inspect", tiny_path(kind), "--json")
    assert (done.code, done.err) == (0, "")
    told = json.loads(done.out)
    assert told["schema"] == "edgekv.inspect/1"
    assert list(told["capabilities"]) == ["mask", "close_gaps", "park", "rewind"]
    for name, cause in (("mask", mask), ("close_gaps", close_gaps)):
        assert told["capabilities"][name]["ok"] is (not cause)
        assert cause in told["capabilities"][name]["reason"]
    assert told["sliding_window"] == (32 if kind == "gemma3" else 0)
    assert told["bos"] == (None if kind == "mrope" else "<|startoftext|>")


def test_json_says_what_the_library_says(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    path = tiny_path("llama")
    told = json.loads(edgekv("inspect", path, "--json").out)
    with Model(path) as model:
        assert told["path"] == str(model.path)
        assert told["size"] == path.stat().st_size
        assert told["fingerprint"] == model.fingerprint
        assert (told["n_ctx_train"], told["n_vocab"]) == (model.n_ctx_train, model.n_vocab)
        assert {kv["kv_type"]: kv["bytes_per_token"] for kv in told["kv"]} == {
            kv_type: model.kv_bytes_per_token(kv_type) for kv_type in memory.KV_BLOCKS
        }
        for kv in told["kv"]:
            assert kv["bytes_cells"] == 4096 * kv["bytes_per_token"]
            assert kv["bytes_total"] > kv["bytes_cells"] + told["size"]
            assert 0 < kv["largest_n_ctx"] <= model.n_ctx_train
    assert "metadata" not in told
    assert json.loads(edgekv("inspect", path, "--json", "--all").out)["metadata"]["llama.block_count"] == "2"


def test_quantised_keys_that_cannot_be_shifted_are_named(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    kv = {
        kv["kv_type"]: kv["close_gaps"] for kv in json.loads(edgekv("inspect", tiny_path("llama"), "--json").out)["kv"]
    }
    assert {name for name, answer in kv.items() if answer["ok"]} == {"f32", "f16"}
    assert "no with q8_0 or q4_0: llama.cpp cannot shift quantised keys" in edgekv("inspect", tiny_path("llama")).out


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mrope", "yarn", "mamba", "lfm2"])
def test_it_fits_a_narrow_terminal(
    edgekv: Edgekv, tiny_path: TinyPath, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = edgekv("inspect", tiny_path(kind))
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    path = str(tiny_path(kind))
    assert max(len(line) for line in lines if path not in line) <= 60
    assert "\x1b" not in done.out
    assert "…" not in done.out  # nothing was cut


def test_a_fact_is_one_line_in_a_pipe(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    done = edgekv("inspect", tiny_path("lfm2"))
    mask = next(line for line in done.out.splitlines() if line.startswith("mask a span"))
    assert mask == (
        "mask a span     no: lfm2 is hybrid: its attention cells could go, its recurrent state would keep the text"
    )
    assert f"file            {tiny_path('lfm2')}" in done.out.splitlines()


def test_a_model_without_cells_has_no_table_of_cells(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    out = edgekv("inspect", tiny_path("mamba")).out
    assert "KV type" not in out
    assert "a state of fixed size" in out


def test_all_lists_the_metadata(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    out = edgekv("inspect", tiny_path("llama"), "--all").out
    assert "llama.attention.head_count_kv" in out
    assert "general.name" in out
    assert "llama.attention" not in edgekv("inspect", tiny_path("llama")).out


def test_little_ram_is_said(edgekv: Edgekv, tiny_path: TinyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_ram", lambda: 14 << 20)
    told = json.loads(edgekv("inspect", tiny_path("llama"), "--json").out)
    sizes = [kv["largest_n_ctx"] for kv in told["kv"]]
    assert told["ram_free"] == 14 << 20
    assert sizes == sorted(sizes)  # f32 first: smaller elements, more cells
    assert 0 < sizes[0] < 4096
    monkeypatch.setattr(memory, "free_ram", lambda: 2 << 20)
    assert "none fits" in edgekv("inspect", tiny_path("llama")).out


def test_a_budget_is_told_part_by_part(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    path = tiny_path("llama")
    told = json.loads(edgekv("inspect", path, "--json", "--budget", "90MB").out)["budget"]
    assert (told["limit"], told["n_ctx"], told["kv_type"]) == (90_000_000, 4096, "f16")
    assert told["process"] == sum(told[part] for part in ("program", "weights", "cache", "buffers")) <= 90_000_000
    assert told["ulimit_v"] > told["process"]
    assert "budget  90.0 MB give n_ctx=4,096 in f16" in edgekv("inspect", path, "--budget", "90MB").out
    assert json.loads(edgekv("inspect", path, "--json").out)["budget"] is None


@pytest.mark.parametrize(("given", "code", "said"), [("20MB", 1, "would do"), ("lots", 2, "is not a size")])
def test_a_budget_that_does_not_do(edgekv: Edgekv, tiny_path: TinyPath, given: str, code: int, said: str) -> None:
    done = edgekv("inspect", tiny_path("llama"), "--budget", given)
    assert (done.code, done.out) == (code, "")
    assert said in done.err


@pytest.mark.parametrize(("kind", "said"), [("encoder", "no cache"), ("vocab_only", "a vocabulary but no model")])
def test_what_does_not_generate(edgekv: Edgekv, tiny_path: TinyPath, kind: str, said: str) -> None:
    for more in ([], ["--json"]):
        done = edgekv("inspect", tiny_path(kind), *more)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("error: ")
        assert said in done.err
        assert done.err.count("\n") == 1


def test_other_files(edgekv: Edgekv, tiny_path: TinyPath, tmp_path: Path) -> None:
    (tmp_path / "note.gguf").write_text("not a model")
    (tmp_path / "cut.gguf").write_bytes(tiny_path("llama").read_bytes()[:-1000])
    (tmp_path / "empty.gguf").write_bytes(b"")
    for name, said in (
        ("note.gguf", "is not a GGUF file"),
        ("cut.gguf", "llama.cpp refused"),
        ("empty.gguf", "is not a GGUF file"),
        ("none.gguf", "none.gguf"),
    ):
        done = edgekv("inspect", tmp_path / name)
        assert (done.code, done.out) == (1, ""), name
        assert said in done.err
        assert "a bug in edgekv" not in done.err


def test_facts_carry_no_control_characters(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    output.print_facts([("name", "a\x1b[31mb\x07 [bold]c[/bold]"), ("longer name", "x " * 200)])
    out = capsys.readouterr().out.splitlines()
    assert out == ["name         a\ufffd[31mb\ufffd [bold]c[/bold]", "longer name  " + " ".join("x" * 200)]


@pytest.mark.real
def test_the_default_model(edgekv: Edgekv, smollm2_path: Path) -> None:
    done = edgekv("inspect", *([] if "EDGEKV_MODELS" not in os.environ else [smollm2_path]))
    assert done.code == 0
    assert "apache-2.0" in done.out
    assert "8,192 tokens of context" in done.out
    assert "no with" not in done.out  # heads of 64: every cache type can be shifted
