"""edgekv compare, as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgekv import files
from edgekv.compare.run import Run

Edgekv = Callable[..., Any]
TinyPath = Callable[..., Path]
QUICK = ("--cases", "2", "--compared", "1", "--repeat", "1", "--suffix", "16", "--span", "32", "--threads", "1")


def test_tables_and_a_verdict(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    done = edgekv("compare", tiny_path("llama"), *QUICK)
    assert done.code == 0
    assert "32" in done.out and "16" in done.out and "mask_keep_gap" in done.out
    assert "\x1b" not in done.out


def test_files_and_json(edgekv: Edgekv, tiny_path: TinyPath, tmp_path: Path) -> None:
    page, table = tmp_path / "r.html", tmp_path / "r.csv"
    done = edgekv("compare", tiny_path("llama"), *QUICK, "--json", "-", "--html", page, "--csv", table)
    told = json.loads(done.out)
    assert (done.code, told["schema"]) == (0, "edgekv.compare/1")
    keys = {"schema", "machine", "model", "settings", "workload", "noise", "arms", "curve", "verdict"}
    assert keys <= set(told)
    arm: dict[str, Any] = told["arms"]["mask"]
    assert {
        "n",
        "edit_ms",
        "ttft_ms",
        "tokens_redecoded",
        "decode_tps",
        "cells_used",
        "kv_bytes",
        "rss_peak_bytes",
    } <= set(arm)
    assert {"median", "iqr"} <= set(arm["ttft_ms"])
    wanted = {"kld_mean", "kld_ci", "kld_median", "kld_p99", "same_top", "rms_dp", "dnll", "greedy_match_tokens"}
    assert wanted <= set(arm["vs_restart"]) & set(arm["vs_full"])
    assert {"accuracy", "ci", "chance", "n"} <= set(arm["leak"])
    assert told["settings"]["seed"] == 0
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert table.read_text("utf-8").startswith("arm,")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.csv", "r.html"]


@pytest.mark.parametrize(("limit", "code"), [("100", 0), ("0", 1)])
def test_fail_if(edgekv: Edgekv, tiny_path: TinyPath, limit: str, code: int) -> None:
    done = edgekv(
        "compare", tiny_path("llama"), *QUICK, "--arms", "mask", "--fail-if", f"mask.vs_restart.kld_mean > {limit}"
    )
    assert done.code == code
    assert ("--fail-if holds" in done.err) is bool(code)


def test_a_file_that_cannot_be_written_costs_no_other(
    edgekv: Edgekv, tiny_path: TinyPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = files.replace

    def replace(path: Path, content: bytes) -> Path:
        if path.suffix == ".html":
            raise OSError(28, "No space left on device")
        return right(path, content)

    monkeypatch.setattr(files, "replace", replace)
    page, table = tmp_path / "r.html", tmp_path / "r.csv"
    done = edgekv("compare", tiny_path("llama"), *QUICK, "--arms", "mask", "--html", page, "--csv", table)
    assert done.code == 2
    assert "r.html: No space left on device" in done.err.replace("\n", " ")
    assert table.read_text("utf-8").startswith("arm,")
    assert "Cost (" in done.out


@pytest.mark.parametrize("condition", ["mask.n > 0", "mask.vs_restart.kld_mean > 0"])
def test_a_run_that_was_interrupted_says_so_whatever_its_condition(
    edgekv: Edgekv, tiny_path: TinyPath, monkeypatch: pytest.MonkeyPatch, condition: str
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "_measure_case", interrupted)
    done = edgekv("compare", tiny_path("llama"), *QUICK, "--fail-if", condition)
    assert done.code == 130
    assert "Interrupted" in done.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--workload", "nothing"], "no workload 'nothing'"),
        (["--arms", "mask,magic"], "no arm 'magic'"),
        (["--suffix", "a,b"], "no list of whole numbers"),
        (["--suffix", "0"], "at least 1"),
        (["--fail-if", "mask"], "no condition"),
        (["--html", "/nowhere/r.html"], "no such folder"),
        (["--json", "/tmp"], "it is a folder"),
        (["--cases", "0"], "--cases"),
        (["--html", "-"], "--html - is not possible"),
        (["--csv", "-"], "--csv - is not possible"),
        (["--fail-if", "mask.n > 1.2.3"], "no condition"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    edgekv: Edgekv, tiny_path: TinyPath, args: list[str], said: str
) -> None:
    done = edgekv("compare", tiny_path("llama"), *args)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_the_user_s_own_text(edgekv: Edgekv, tiny_path: TinyPath, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Some text before.\n<<<mask\nThe secret.\nmask>>>\nSome text behind.\n")
    done = edgekv("compare", tiny_path("llama"), *QUICK[2:], "--workload", path, "--json", "-")
    told = json.loads(done.out)
    assert told["workload"]["cases"] == 1
    assert told["arms"]["mask"]["leak"] == {}
    assert "was not asked" in told["verdict"]
