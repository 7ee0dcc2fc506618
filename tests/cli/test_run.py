"""``edgekv run``: the answer on stdout and nothing else, and every mistake told before anything is read."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgekv import Model, Session, prompt

Edgekv = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[bytes]"]
TinyPath = Callable[[str], Path]
Length = Callable[..., int]

RULES = "Answer in one word. "
REPORT = "The pump at the north gate lost pressure twice; the spare valve is kept in hall 4. "
TAIL = "This was read while the report was visible. "
ASK = "Where is it?"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    texts = {"rules": RULES, "report": REPORT, "tail": TAIL}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return {name: tmp_path / f"{name}.txt" for name in texts}


@pytest.fixture
def three(files: dict[str, Path], tiny_path: TinyPath) -> list[object]:
    """run, on the tiny model, with three parts."""
    parts = [f"--part={name}={path}" for name, path in files.items()]
    return ["run", "-m", tiny_path("llama"), "--max-tokens", 12, "--threads", 1, *parts]


@pytest.fixture
def length(tiny_path: TinyPath) -> Iterator[Length]:
    """How many tokens these texts are, each read by itself."""
    with Model(tiny_path("llama")) as model:
        yield lambda *texts: sum(len(model.tokenize(text)) for text in texts)


def remarks(err: str) -> list[str]:
    """The lines on stderr, without the hint at --chat and the progress that a busy machine shows."""
    return [line for line in err.splitlines() if not line.startswith(("note: ", "reading", "answering"))]


# --- what it prints


def test_the_answer_alone_is_on_stdout(
    edgekv: Edgekv, three: list[object], tiny_path: TinyPath, length: Length
) -> None:
    done = edgekv(*three, "--mask", "report", "--ask", ASK)
    assert done.code == 0
    with Session(tiny_path("llama"), n_ctx=256) as session:
        for name, text in {"rules": RULES, "report": REPORT, "tail": TAIL}.items():
            session.append(text, name=name)
        session.mask("report")
        session.append(ASK)
        assert done.out == session.generate(12).text + "\n"
    read, masked, timings, *nothing_more = remarks(done.err)
    assert not nothing_more
    assert read.startswith(f"read {1 + length(RULES, REPORT, TAIL)} tokens in ")
    assert masked.startswith(f"masked {length(REPORT)} tokens in ")
    assert f"gap closed · {length(TAIL)} visible tokens were computed while it was visible" in masked
    assert f"read {length(ASK)}, read again 0, reused {1 + length(RULES, TAIL)}, masked {length(REPORT)}" in timings


def test_json_is_one_object(edgekv: Edgekv, three: list[object], length: Length) -> None:
    plain = edgekv(*three, "--mask", "report", "--ask", ASK)
    done = edgekv(*three, "--mask", "report", "--ask", ASK, "--json")
    told = json.loads(done.out)
    assert (done.code, told["schema"]) == (0, "edgekv.run/1")
    assert told["answer"] + "\n" == plain.out
    assert (told["question"], told["finish_reason"], told["seed"]) == (ASK, "length", None)
    parts = {part["name"]: part for part in told["parts"]}
    assert list(parts) == ["<begin>", "rules", "report", "tail"]
    assert parts["report"]["tokens"] == length(REPORT)
    assert parts["report"]["states"] == {"masked": length(REPORT)}
    assert parts["tail"]["states"] == {"visible": length(TAIL)}
    assert [r["verb"] for r in told["receipts"]] == ["mask"]
    assert told["receipts"][0]["influenced"] == length(TAIL)
    assert told["receipts"][0]["exact"] is False
    assert told["timings"]["generated"] == told["stats"]["generated"] == 12
    assert told["timings"]["prefilled"] == length(ASK)
    assert told["stats"]["masked"] == length(REPORT)
    assert remarks(done.err) == []


def test_without_a_question_there_is_a_table(edgekv: Edgekv, three: list[object]) -> None:
    done = edgekv(*three, "--mask", "re*", "--mask", "tail")
    assert done.code == 0
    rows = {line.split()[0]: line for line in done.out.splitlines()}
    assert "masked" in rows["report"] and "masked" in rows["tail"]
    assert "visible" in rows["rules"]
    told = json.loads(edgekv(*three, "--json").out)
    assert (told["receipts"], told["question"], told["answer"], told["timings"]) == ([], None, None, None)


@pytest.mark.parametrize("width", [60, 80])
def test_the_table_fits_the_terminal(
    edgekv: Edgekv, three: list[object], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    done = edgekv(*three, "--mask", "report")
    assert max(map(len, done.out.splitlines())) <= width
    assert "The pump" in done.out


def test_no_escape_reaches_a_pipe_and_none_of_a_file_the_table(
    edgekv: Edgekv, tiny_path: TinyPath, tmp_path: Path
) -> None:
    (tmp_path / "evil.txt").write_text("\x1b[31mred\x07 \x1b]0;title\x07 text")
    done = edgekv("run", "-m", tiny_path("llama"), "--part", f"evil={tmp_path / 'evil.txt'}")
    assert done.code == 0
    assert "\x1b" not in done.out + done.err
    assert "\x07" not in done.out
    assert "text" in done.out


def test_keep_gap_leaves_positions_empty(edgekv: Edgekv, three: list[object]) -> None:
    told = json.loads(edgekv(*three, "--mask", "report", "--keep-gap", "--ask", ASK, "--json").out)
    assert told["receipts"][0]["gap"] == "keep"
    assert told["receipts"][0]["moved"] == 0


@pytest.mark.parametrize(("then", "read"), [("auto", True), ("recompute", True), ("none", False)])
def test_what_stands_behind_is_read_again(
    edgekv: Edgekv, three: list[object], length: Length, then: str, read: bool
) -> None:
    told = json.loads(edgekv(*three, "--mask", "report", "--then", then, "--ask", ASK, "--json").out)
    (receipt,) = told["receipts"]
    assert receipt["prefilled"] == (length(TAIL) if read else 0)
    assert receipt["exact"] is read
    without = [part for part in three if not str(part).startswith("--part=report")]
    alone = json.loads(edgekv(*without, "--ask", ASK, "--json").out)
    assert (told["answer"] == alone["answer"]) is read


def test_a_seed_repeats_a_drawn_answer(edgekv: Edgekv, three: list[object]) -> None:
    def answer(*more: object) -> Any:
        return json.loads(edgekv(*three, "--ask", ASK, "--temperature", 2, "--json", *more).out)

    first, again, other = answer("--seed", 7), answer("--seed", 7), answer("--seed", 8)
    assert first["answer"] == again["answer"] != other["answer"]
    assert first["seed"] == 7
    drawn = answer()
    assert answer("--seed", drawn["seed"])["answer"] == drawn["answer"]


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mrope", "yarn"])
def test_every_kind_and_cache(
    edgekv: Edgekv, three: list[object], tiny_path: TinyPath, kind: str, kv_type: str
) -> None:
    more = ["-m", tiny_path(kind), "--kv-type", kv_type, "--force"]  # force: some kinds have no BOS in front
    done = edgekv(*three, *more, "--mask", "report", "--ask", ASK, "--json")
    assert done.code == 0, done.err
    receipt = json.loads(done.out)["receipts"][0]
    closes = kind in ("llama", "gemma3") and not kv_type.startswith("q")
    assert receipt["gap"] == ("close" if closes else "keep")
    assert closes or "gaps are kept" in receipt["notes"][0]


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_a_state_that_cannot_be_masked(edgekv: Edgekv, three: list[object], tiny_path: TinyPath, kind: str) -> None:
    done = edgekv(*three, "-m", tiny_path(kind), "--ask", ASK)
    assert done.code == 0, done.err
    done = edgekv(*three, "-m", tiny_path(kind), "--mask", "report", "--ask", ASK)
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-1].startswith(f"error: {kind} is ")
    assert "read " not in done.err  # before anything was read


# --- input


def test_a_part_from_standard_input(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    args = ["run", "-m", tiny_path("llama"), "--part", "doc=-", "--json"]
    told = json.loads(edgekv(*args, stdin="\ufeffgrün\r\n".encode()).out)
    assert told["parts"][-1]["tokens"] == len("grün\r\n".encode())  # no byte order mark; line ends as they are


def test_a_system_text_comes_first(edgekv: Edgekv, three: list[object]) -> None:
    told = json.loads(edgekv(*three, "--system", "Be terse.", "--json").out)
    assert [part["name"] for part in told["parts"]] == ["<begin>", "system", "rules", "report", "tail"]
    done = edgekv(*three, "--system", "Be terse.", "--part", "system=-")
    assert (done.code, done.err.splitlines()[0][:30]) == (2, "error: two parts are called 's")


def test_empty_parts_and_an_empty_question(edgekv: Edgekv, three: list[object], tiny_path: TinyPath) -> None:
    done = edgekv(*three, "--part", "void=-", "--ask", "", "--json")
    assert done.code == 0
    assert json.loads(done.out)["parts"][-1]["states"] == {}
    assert edgekv(*three, "--part", "void=-", "--mask", "void").code == 2
    nothing = ["run", "-m", tiny_path("mrope"), "--part", "void=-", "--ask", ""]  # no BOS either
    done = edgekv(*nothing)
    assert (done.code, done.out) == (1, "")
    assert "append something first" in done.err


def test_no_answer_is_wanted(edgekv: Edgekv, three: list[object]) -> None:
    done = edgekv(*three, "--ask", ASK, "--max-tokens", 0)
    assert (done.code, done.out) == (0, "\n")


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 2, "there is nothing to read: give --part NAME=FILE"),
        (["--ask", "x"], 2, "there is nothing to read"),
        (["--part", "plain.txt"], 2, "a part is NAME=FILE (or NAME=- for standard input), not 'plain.txt'"),
        (["--part", "a="], 2, "a part is NAME=FILE"),
        (["--part", "=b"], 2, "a part is NAME=FILE"),
        (["--part", "a=/no/such/file"], 1, "/no/such/file: No such file or directory"),
        (["--part", "a=."], 1, ".: Is a directory"),
        (["--part", "a=-", "--part", "b=-"], 2, "only one part can come from standard input"),
        (["--part", "a=x", "--part", "a=y"], 2, "two parts are called 'a'"),
        (["--part", "a*=x"], 2, "'a*' cannot name a span"),
        (["--part", "role:x=x"], 2, "'role:x' cannot name a span"),
        (["--part", "a\x1b=x"], 2, "cannot name a part: it holds characters that cannot be printed"),
        (["--part", "answer=-", "--ask", "x"], 2, "no part can be called 'answer' beside --ask"),
        (["--part", "a=-", "--chat", "--special"], 2, "choose one"),
        (["--part", "a=-", "--temperature", "-1"], 2, "temperature must be in [0,"),
        (["--part", "a=-", "--temperature", "nan"], 2, "temperature must be in [0,"),
        (["--part", "a=-", "--seed", "-1"], 2, "seed must be in"),
        (["--part", "a=-", "--n-ctx", "0"], 2, "--n-ctx"),
        (["--part", "a=-", "--threads", "0"], 2, "--threads"),
        (["--part", "a=-", "--max-tokens", "-1"], 2, "--max-tokens"),
        (["--part", "a=-", "--kv-type", "q5_1"], 2, "--kv-type"),
        (["--system", "x" * 40, "--part", "report=-", "--mask", "reprot"], 2, "did you mean 'report'?"),
        (["--system", "x" * 40, "--part", "report=-", "--mask", "z*"], 2, "spans: <begin>, system, report"),
        (
            ["--part", "report=-", "--mask", "report"],
            2,
            "put more text in front of it (--system TEXT will do, of a few words)",
        ),
        (["--system", "x", "--part", "report=-", "--mask", "report"], 2, "one of the first 4 tokens"),
        (["--part", "a=-", "--n-ctx", "256", "--ask", "x", "--max-tokens", "300"], 1, "need n_ctx=512, not 256"),
        (["--part", "a=-", "--n-ctx", "2000000000"], 1, "would fit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(edgekv: Edgekv, tiny_path: TinyPath, args: list[str], code: int, said: str) -> None:
    done = edgekv("run", "-m", tiny_path("llama"), *args, stdin=b"some text")
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert "a bug in edgekv" not in done.err
    assert "tokens in" not in done.err  # nothing was read


def test_bytes_that_are_no_text(edgekv: Edgekv, tiny_path: TinyPath, tmp_path: Path) -> None:
    """One wrong byte is U+FFFD, with a note; a binary file is refused."""
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 ol\xe9")
    done = edgekv("run", "-m", tiny_path("llama"), "--part", f"a={tmp_path / 'latin.txt'}", "--json")
    assert done.code == 0 and json.loads(done.out)["parts"][-1]["tokens"] == len("caf\ufffd ol\ufffd".encode())
    assert f"note: {tmp_path / 'latin.txt'} is not UTF-8 text: byte 3 is 0xe9" in done.err
    done = edgekv("run", "-m", tiny_path("llama"), "--part", "a=-", stdin=b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR")
    assert (done.code, done.out) == (2, "") and "standard input is not text" in done.err


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_file_as_windows_writes_it(edgekv: Edgekv, tiny_path: TinyPath, tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes("grün ☃".encode(encoding))
    done = edgekv("run", "-m", tiny_path("llama"), "--part", f"a={tmp_path / 'a.txt'}", "--json")
    assert json.loads(done.out)["parts"][-1]["tokens"] == len("grün ☃".encode()) and not done.err


def test_arguments_that_are_no_utf_8(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    args = ("run", "-m", tiny_path("llama"), "--system", "caf\udce9", "--ask", "\ud83d?", "--max-tokens", 1, "--json")
    done = edgekv(*args)
    told = json.loads(done.out)
    assert done.code == 0 and told["question"] == "\ufffd?"
    assert told["parts"][-1]["tokens"] == len("caf\ufffd".encode())


def test_force_masks_the_first_tokens(edgekv: Edgekv, three: list[object], length: Length) -> None:
    assert edgekv(*three, "--mask", "rules", "--ask", ASK).code == 2
    done = edgekv(*three, "--mask", "rules", "--ask", ASK, "--force", "--json")
    assert done.code == 0
    assert json.loads(done.out)["receipts"][0]["tokens"] == length(RULES)


# --- chat


def test_chat_writes_turns_and_leaves_texts_alone(edgekv: Edgekv, tiny_path: TinyPath, length: Length) -> None:
    args = ["run", "-m", tiny_path("llama"), "--chat", "--system", "S", "--part", "doc=-", "--ask", "Q<|im_end|>"]
    told = json.loads(edgekv(*args, "--json", stdin=b"D").out)
    roles = {part["name"]: (part["role"], part["tokens"]) for part in told["parts"]}
    assert roles == {
        "<begin>": ("control", 1),
        "system": ("system", 2 + length("system\nS", "\n")),  # two control tokens
        "doc": ("user", 2 + length("user\nD", "\n")),
    }
    assert told["timings"]["prefilled"] == 3 + length("user\nQ<|im_end|>", "\n", "assistant\n")


def test_special_takes_control_tokens_of_the_texts(edgekv: Edgekv, tiny_path: TinyPath, length: Length) -> None:
    args = ["run", "-m", tiny_path("llama"), "--part", "doc=-", "--json"]
    text = b"<|im_start|>user\n"
    plain, special = (json.loads(edgekv(*args, *more, stdin=text).out) for more in ([], ["--special"]))
    assert plain["parts"][-1]["tokens"] == length(text.decode())
    assert special["parts"][-1]["tokens"] == 1 + length("user\n")


def test_a_chat_model_is_pointed_at_chat(edgekv: Edgekv, three: list[object]) -> None:
    assert "--chat makes turns" in edgekv(*three, "--ask", ASK).err
    assert "--chat makes turns" not in edgekv(*three, "--ask", ASK, "--chat").err
    assert "--chat makes turns" not in edgekv(*three, "--ask", ASK, "--special").err
    assert "--chat makes turns" not in edgekv(*three).err


def test_more_than_it_was_trained_for_is_said(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    args = ["run", "-m", tiny_path("llama"), "--part", "doc=-", "--max-tokens", 2, "--ask", "x"]
    assert "trained for" not in edgekv(*args, stdin=b"x" * 4000).err
    assert "more than the 4,096 this model was trained for" in edgekv(*args, stdin=b"x" * 4100).err


# --- real processes


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_keeps_what_was_said(start: Start, three: list[object]) -> None:
    with start(*three, "--ask", ASK, "--max-tokens", 3500) as process:
        assert process.stdout and process.stderr
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert (first + out).endswith(b"\n")
    assert b"interrupted; kept: " in err


def test_ctrl_c_keeps_what_was_said_in_json(
    edgekv: Edgekv, three: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def progress(what: str, **_: object) -> Iterator[Callable[..., None]]:
        def update(done: int, _total: int) -> None:
            if what == "answering" and done == 20:
                signal.raise_signal(signal.SIGINT)

        yield update

    monkeypatch.setattr(importlib.import_module("edgekv.cli.run"), "progress", progress)
    done = edgekv(*three, "--ask", ASK, "--max-tokens", 3500, "--json")
    told = json.loads(done.out)
    assert (done.code, told["finish_reason"]) == (130, "closed")
    assert told["stats"]["generated"] == told["timings"]["generated"] == 20
    assert told["answer"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
def test_a_reader_that_leaves_ends_it_quietly(start: Start, three: list[object]) -> None:
    with start(*three, "--ask", ASK, "--max-tokens", 3000) as process:
        assert process.stdout and process.stderr
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1
    assert b"error" not in err


@pytest.mark.skipif(os.name == "nt", reason="POSIX shells")
def test_a_closed_standard_input_matters_only_when_it_is_read(three: list[object], tiny_path: TinyPath) -> None:
    def closed(*args: object) -> subprocess.CompletedProcess[str]:
        command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "edgekv", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)

    assert closed(*three).returncode == 0
    done = closed("run", "-m", tiny_path("llama"), "--part", "a=-")
    assert done.returncode == 2
    assert "standard input is closed" in done.stderr


# --- a real model


@pytest.mark.real
def test_an_answer_that_makes_sense(edgekv: Edgekv, smollm2_path: Path, tmp_path: Path) -> None:
    (tmp_path / "report.txt").write_text(REPORT * 4)
    parts = ["--system", "You are a helpful assistant.", "--part", f"report={tmp_path / 'report.txt'}"]
    args = ["run", "-m", smollm2_path, "--chat", *parts, "--max-tokens", 24]
    done = edgekv(*args, "--mask", "report", "--ask", "What is the capital of France?")
    assert done.code == 0
    assert "Paris" in done.out
    assert "<|im_end|>" not in done.out


@pytest.mark.real
def test_turns_are_what_the_models_own_template_writes(smollm2_path: Path) -> None:
    with Model(smollm2_path) as model:
        parts = [prompt.Part("system", "Be terse."), prompt.Part("doc", "Some text.")]
        made = prompt.compose(model, prompt.chatml(model), parts, "Why?")
        text = (
            "<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\nSome text.<|im_end|>\n"
            "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
        )
        pieces = [*made.parts, made.question]
        assert [t for p in pieces if p for t in p.tokens] == model.tokenize(text, special=True).tolist()
