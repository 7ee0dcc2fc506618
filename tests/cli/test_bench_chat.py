"""edgekv bench chat, as a user calls it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgekv.longrun.ways import Turn, Way

Edgekv = Callable[..., Any]
TinyPath = Callable[..., Path]
QUICK = ("--n-ctx", "512", "--message-tokens", "30", "--max-tokens", "12", "--threads", "1")
COLUMNS = ("turn 5", "at end", "ratio", "median", "worst", "time", "read", "tokens", "again")


def test_a_table_and_what_it_says(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    done = edgekv("bench", "chat", tiny_path("llama"), *QUICK, "--turns", "12")
    assert done.code == 0
    assert "\x1b" not in done.out
    lines = [line.strip() for line in done.out.splitlines()]
    assert any(all(column in line for column in COLUMNS) for line in lines)
    rows = {title: line for line in lines for title in ("mask", "llama_cpp.Llama") if line.startswith(title)}
    assert rows["mask"].split()[-1] == "0"
    assert int(rows["llama_cpp.Llama"].split()[-1].replace(",", "")) > 1000
    said = re.sub(r"\s+", " ", done.out)
    assert "none of them twice" in said
    assert "A mask is not a restart" in said
    assert "12 turns in 512 cells" in said


def test_json_on_stdout_and_a_plot(edgekv: Edgekv, tiny_path: TinyPath, tmp_path: Path) -> None:
    page = tmp_path / "chat.html"
    done = edgekv("bench", "chat", tiny_path("llama"), *QUICK, "--turns", "3", "--json", "-", "--plot", page)
    told = json.loads(done.out)
    assert (done.code, told["schema"]) == (0, "edgekv.bench-chat/1")
    assert [len(way["turns"]) for way in told["ways"].values()] == [3] * 4
    assert told["settings"]["n_ctx"] == 512
    assert f"written: {page}" in done.err
    text = page.read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert not re.findall(r"https?://|<script|<link|@import|src=|url\(", text)
    assert [p.name for p in tmp_path.iterdir()] == ["chat.html"]


def test_json_in_a_file_beside_the_table(edgekv: Edgekv, tiny_path: TinyPath, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    done = edgekv("bench", "chat", tiny_path("llama"), *QUICK, "--turns", "2", "--json", file)
    assert done.code == 0
    assert "llama_cpp.Llama" in done.out
    assert json.loads(file.read_text("utf-8"))["settings"]["turns"] == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--turns", "0"], "--turns"),
        (["--message-tokens", "7"], "--message-tokens"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--n-ctx", "0"], "--n-ctx"),
        (["--n-ctx", "many"], "--n-ctx"),
        (["--seed", "-1"], "--seed"),
        (["--threads", "0"], "--threads"),
        (["--trim-to", "0"], "--trim-to"),
        (["--max-tokens", "400"], "larger n_ctx"),
        (["--plot", "-"], "--plot - is not possible"),
        (["--plot", "/nowhere/p.html"], "no such folder"),
        (["--json", "/tmp"], "it is a folder"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    edgekv: Edgekv, tiny_path: TinyPath, args: list[str], said: str
) -> None:
    done = edgekv("bench", "chat", tiny_path("llama"), *QUICK, *args)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_a_model_that_cannot_mask_is_refused(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    done = edgekv("bench", "chat", tiny_path("mamba"), *QUICK)
    assert (done.code, done.out) == (2, "")
    assert "recurrent" in done.err


def test_the_group_alone_is_help(edgekv: Edgekv) -> None:
    done = edgekv("bench")
    assert (done.code, done.err) == (0, "")
    assert "chat" in done.out
    assert edgekv("bench", "chats").code == 2


def test_an_interrupted_run_reports_what_is_finished(
    edgekv: Edgekv, tiny_path: TinyPath, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right, count = Way.say, iter(range(1000))

    def say(self: Way, message: str) -> Turn:
        if next(count) == 14:
            raise KeyboardInterrupt
        return right(self, message)

    monkeypatch.setattr(Way, "say", say)
    file = tmp_path / "chat.json"
    done = edgekv("bench", "chat", tiny_path("llama"), *QUICK, "--json", file)
    assert done.code == 130
    assert "Interrupted" in done.out
    assert len(json.loads(file.read_text("utf-8"))["ways"]["mask"]["turns"]) == 3


@pytest.mark.slow
def test_ctrl_c(start: Callable[..., subprocess.Popen[bytes]], tiny_path: TinyPath) -> None:
    """A real one, once there is progress on stderr."""
    process = start("bench", "chat", tiny_path("llama"), *QUICK, "--turns", "200", "--json", "-")
    assert process.stderr is not None
    for _ in range(2):  # the first line may come before the first turn has ended
        assert b"chatting" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert b"Traceback" not in err
    told = json.loads(out)
    assert told["interrupted"] is True
    assert 0 < len(told["ways"]["llama_cpp"]["turns"]) < 200
