"""``edgekv chat`` through a pipe: messages, commands, events, errors and exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgekv.cli.chat import commands

TinyPath = Callable[..., Path]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody's own state: history and autosave of the tests lie in a folder of their own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def events(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def lines(*said: str) -> bytes:
    return "".join(f"{line}\n" for line in said).encode()


CHAT = ("--n-ctx", 512, "--temperature", 0, "--max-tokens", 8)


def test_a_line_is_a_message(edgekv: Callable[..., Any], tiny_path: TinyPath) -> None:
    done = edgekv("chat", tiny_path(), *CHAT, stdin=lines("Hello!", "", "And?"))
    assert done.code == 0 and done.err.count("read again: 0") == 2
    assert done.out.count("\n") >= 2


def test_several_lines_between_quotes_are_one_message(edgekv: Callable[..., Any], tiny_path: TinyPath) -> None:
    done = edgekv("chat", tiny_path(), *CHAT, "--json", stdin=lines('{"message": "one\\ntwo"}', "/spans"))
    said = [e for e in events(done.out) if e["event"] == "spans"]
    plain = edgekv("chat", tiny_path(), *CHAT, stdin=lines('"""', "one", "two", '"""', "/stats"))
    assert done.code == plain.code == 0
    assert [s["role"] for s in said[0]["spans"]][-2:] == ["user", "assistant"]
    assert "turns           2" in plain.out


def test_every_event_is_a_json_object_with_its_name(
    edgekv: Callable[..., Any], tiny_path: TinyPath, home: Path
) -> None:
    file = home / "x.kvs"
    said = ["Hello!", "/mask user-1", "/spans", "/map", "/stats", "/plan keep_turns(1)", "/unmask user-1", "/undo",
            "/fork", "Branch.", "/back", "/pin user-1", "/unpin user-1", "/system Be terse.", "/set", "/set top_k 5",
            f"/save {file}", f"/load {file}", "/summarize", "/help", "/nonsense", "/exit", "never read"]  # fmt: skip
    done = edgekv("chat", tiny_path(), *CHAT, "--json", stdin=lines(*said))
    told = events(done.out)
    names = [e["event"] for e in told if e["event"] not in ("piece", "note")]
    assert names == ["answer", "receipt", "spans", "map", "stats", "plan", "receipt", "receipt", "fork", "answer",
                     "back", "pin", "pin", "system", "settings", "settings", "saved", "loaded", "summary", "help",
                     "error"]  # fmt: skip
    assert done.code == 1  # an error was said
    answer = next(e for e in told if e["event"] == "answer")
    assert (
        answer["text"]
        == "".join(e["text"] for e in told if e["event"] == "piece" and e["kind"] == "text")[: len(answer["text"])]
    )
    assert answer["timings"]["reread"] == 0 and answer["finish_reason"] in ("length", "end")
    map_ = next(e for e in told if e["event"] == "map")
    assert sum(run["cells"] for run in map_["runs"]) == map_["used"] <= map_["cells"] == 512


@pytest.mark.parametrize(
    "line",
    ["/mask", "/mask nobody", "/unmask user-1", "/back", "/load 1", "/load nowhere.kvs", "/save", "/save /", "/set x 1",
     "/set temperature hot", "/set policy keep_turns(-1)", "/set then never", "/plan nonsense(1)", "/summarize soon",
     "/fork now", "/undo", "/compare", "/pin 2:3", "/mask 0:2", "/evict 5:2", "/"],
)  # fmt: skip
def test_a_command_that_makes_no_sense_changes_nothing(
    edgekv: Callable[..., Any], tiny_path: TinyPath, line: str
) -> None:
    said = lines("Hello!", "/stats", "/set", line, "/stats", "/set", "And on?")
    done = edgekv("chat", tiny_path(), *CHAT, "--no-autosave", "--json", stdin=said)
    told = events(done.out)
    stats = [e for e in told if e["event"] in ("stats", "settings")]
    assert [e["event"] for e in told].count("error") == 1 and done.code == 1
    assert stats[:2] == stats[2:]
    assert [e["event"] for e in told].count("answer") == 2


def test_a_message_too_long_is_refused_and_the_chat_goes_on(edgekv: Callable[..., Any], tiny_path: TinyPath) -> None:
    done = edgekv("chat", tiny_path(), *CHAT, "--json", stdin=lines("Hello!", "word " * 600, "Still there?"))
    told = [e["event"] for e in events(done.out) if e["event"] in ("answer", "error")]
    assert told == ["answer", "error", "answer"] and done.code == 1


def test_a_small_context_never_ends(edgekv: Callable[..., Any], tiny_path: TinyPath) -> None:
    said = [f"Message number {n}, some words long." for n in range(30)]
    done = edgekv("chat", tiny_path(), "--n-ctx", 256, "--max-tokens", 8, "--json", stdin=lines(*said))
    answers = [e for e in events(done.out) if e["event"] == "answer"]
    assert done.code == 0 and len(answers) == 30
    read = [a["timings"]["prefilled"] for a in answers[1:]]
    assert max(read) <= min(read) + 2 and all(a["timings"]["reread"] == 0 for a in answers)


@pytest.mark.parametrize(
    "args",
    [("--policy", "keep_turns()"), ("--policy", "nonsense"), ("--load", "x.kvs", "--system", "y"), ("--n-ctx", "0"),
     ("--memory-budget", "1GB", "--n-ctx", "512"), ("--template", "/nowhere"), ("--autosave", "x", "--no-autosave")],
)  # fmt: skip
def test_wrong_calls_end_with_2(edgekv: Callable[..., Any], tiny_path: TinyPath, args: tuple[str, ...]) -> None:
    assert edgekv("chat", tiny_path(), *args, stdin=b"").code == 2


def test_a_model_that_is_not_there(edgekv: Callable[..., Any], tmp_path: Path) -> None:
    done = edgekv("chat", tmp_path / "none.gguf", stdin=b"Hello\n")
    assert done.code == 1 and "none.gguf" in done.err


def test_a_model_that_cannot_mask_talks_without_a_policy(edgekv: Callable[..., Any], tiny_path: TinyPath) -> None:
    done = edgekv("chat", tiny_path("mamba"), *CHAT, stdin=lines("Hello!", "And?", "/mask user-1"))
    assert "no policy" in done.err and done.err.count("read again: 0") == 2 and done.code == 1


def test_a_template_of_ones_own_and_a_hostile_one(
    edgekv: Callable[..., Any], tiny_path: TinyPath, tmp_path: Path
) -> None:
    own, hostile = tmp_path / "own.jinja", tmp_path / "hostile.jinja"
    own.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}")
    hostile.write_text("{{ ''.__class__.__mro__ }}")
    assert edgekv("chat", tiny_path(), *CHAT, "--template", own, stdin=lines("Hello!")).code == 0
    done = edgekv("chat", tiny_path(), *CHAT, "--template", hostile, stdin=lines("Hello!"))
    assert done.code == 1 and "template" in done.err


def test_the_autosave_of_a_killed_chat_is_loaded(tiny_path: TinyPath) -> None:
    """kill -9 after an answer: another process goes on where it was."""
    command = [sys.executable, "-m", "edgekv", "chat", *map(str, CHAT), "--json", str(tiny_path())]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None and process.stdout is not None
        for message in ("Hello!", "And on?"):
            process.stdin.write(f"{message}\n")
            process.stdin.flush()
            while json.loads(process.stdout.readline())["event"] != "answer":
                pass
        process.stdin.write("/stats\n")  # carried out after the autosave
        process.stdin.flush()
        while (stats := json.loads(process.stdout.readline()))["event"] != "stats":
            pass
        process.send_signal(signal.SIGKILL)
    again = [*command[:4], "--json", "--continue", "--max-tokens", "8"]
    done = subprocess.run(again, input="/stats\nGo on!\n", capture_output=True, text=True, env=env, check=False)
    told = events(done.stdout)
    loaded = next(e for e in told if e["event"] == "stats")
    assert loaded["turns"] == 4 and loaded["visible"] == stats["visible"] and done.returncode == 0
    assert [e["event"] for e in told].count("answer") == 1


def test_ctrl_c_stops_an_answer_and_keeps_it(tiny_path: TinyPath) -> None:
    command = [sys.executable, "-m", "edgekv", "chat", str(tiny_path()), "--n-ctx", "4096", "--max-tokens", "3500",
               "--temperature", "1", "--json", "--no-autosave"]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("Hello!\n/spans\n")
        process.stdin.flush()
        while json.loads(process.stdout.readline())["event"] != "piece":
            pass
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    told = events(out)
    answer = next(e for e in told if e["event"] == "answer")
    spans = next(e for e in told if e["event"] == "spans")["spans"]
    assert answer["finish_reason"] in ("closed", "end") and process.returncode == 0
    assert spans[-1]["role"] == "assistant" and spans[-1]["states"] == {
        "visible": spans[-1]["stop"] - spans[-1]["start"]
    }


def test_compare_measures_this_conversation(edgekv: Callable[..., Any], tiny_path: TinyPath) -> None:
    said = lines("Hello, this is a first message of some length.", "A second one, with a question?", "And a third?",
                 "/compare user-1")  # fmt: skip
    done = edgekv("chat", tiny_path(), *CHAT, "--json", stdin=said)
    report = next(e for e in events(done.out) if e["event"] == "compare")["report"]
    assert report["schema"].startswith("edgekv.compare") and done.code == 0


@pytest.mark.parametrize(
    "line", ["/save ~nosuchuser/x/y", "/summarize ²", "/mask ²:3", "/mask 1:" + "9" * 5000, "[" * 200000]
)
def test_odd_lines_are_no_bugs(edgekv: Callable[..., Any], tiny_path: TinyPath, line: str) -> None:
    done = edgekv("chat", tiny_path(), *CHAT, "--json", "--no-autosave", stdin=lines("Hello!", line, "/stats"))
    assert [e["event"] for e in events(done.out)][-1] == "stats" and "a bug" not in done.err


def test_what_a_model_says_cannot_steer_the_terminal(edgekv: Callable[..., Any], tiny_path: TinyPath) -> None:
    said = lines('{"message": "\\u001b]0;owned\\u0007 hi"}', "/system \x1b]0;owned\x07", "/spans", "/pin \x1b[31m")
    done = edgekv("chat", tiny_path(), *CHAT, "--no-autosave", stdin=said)
    assert "\x1b" not in done.out + done.err and "\x07" not in done.out + done.err


def test_a_saved_chat_brings_its_model(edgekv: Callable[..., Any], tiny_path: TinyPath, tmp_path: Path) -> None:
    edgekv("chat", tiny_path(), *CHAT, "--no-autosave", stdin=lines("Hello!", f"/save {tmp_path / 'x.kvs'}"))
    done = edgekv("chat", "--load", tmp_path / "x.kvs", "--temperature", 0, "--seed", 7, "--json", stdin=lines("/set"))
    told = next(e for e in events(done.out) if e["event"] == "settings")
    assert (told["temperature"], told["seed"]) == (0, 7) and done.code == 0
    assert edgekv("chat", "--load", tmp_path / "x.kvs", "--kv-type", "q8_0", stdin=b"").code == 2


def test_nobody_reads_any_more(tiny_path: TinyPath) -> None:
    command = [sys.executable, "-m", "edgekv", "chat", str(tiny_path()), *map(str, CHAT), "--no-autosave"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(lines(*["Hello!"] * 20))
            process.stdin.close()
        said = process.stderr.read().decode()
    assert process.returncode == 1 and said.count("Errno") == 0 and "Traceback" not in said


def test_help_lists_every_command(edgekv: Callable[..., Any], tiny_path: TinyPath) -> None:
    done = edgekv("chat", tiny_path(), *CHAT, stdin=b"/help\n")
    for name in commands.COMMANDS:
        assert f"/{name}" in done.out
    wanted = (
        "help spans map mask unmask park evict pin summarize undo fork back save load system set stats compare exit"
    )
    assert set(wanted.split()) <= set(commands.COMMANDS)
