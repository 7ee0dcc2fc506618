"""Text on its way in and out: bytes that are no UTF-8, lone surrogates, byte order marks, terminals that know ASCII."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgekv import Session, wording
from edgekv.chat import Chat
from edgekv.cli.output import plain
from edgekv.compare.workloads import file
from edgekv.errors import UsageError

TinyPath = Callable[..., Path]
Edgekv = Callable[..., Any]
CHAT = ("--n-ctx", 512, "--temperature", 0, "--max-tokens", 4)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def texts_of(edgekv: Edgekv) -> list[str]:
    """What the user has said in the one conversation that is kept; as it was evaluated, too."""
    (kept,) = json.loads(edgekv("chat", "--list", "--json").out)["conversations"]
    with Session.load(kept["path"], n_threads=1) as session:
        turns = [turn for turn in Chat.load(session).turns if turn.message.role == "user"]
        assert all(turn.message.content.strip() in session.text(turn.range) for turn in turns)
        return [turn.message.content for turn in turns]


# -- in --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stdin", "messages"),
    [
        (b"caf\xe9\nna\xc3\xafve\n", ["caf\ufffd", "naïve"]),
        (b"half \xf0\x9f\x98", ["half \ufffd"]),
        (b"\xef\xbb\xbfHello\r\n\r\nyou\r\n", ["Hello", "you"]),
        ('"""\r\none\r\ntwo ☃\r\n"""\r\nthree'.encode("utf-16"), ["one\ntwo ☃", "three"]),
        ("☃\n☃☃\n".encode("utf-16-be").join([b"\xfe\xff", b""]), ["☃", "☃☃"]),
        (b'"""\none\n\xff\n"""\n', ["one\n\ufffd"]),
    ],
)  # fmt: skip
def test_a_pipe(edgekv: Edgekv, tiny_path: TinyPath, stdin: bytes, messages: list[str]) -> None:
    done = edgekv("chat", tiny_path(), *CHAT, stdin=stdin)
    assert done.code == 0 and "a bug" not in done.err
    assert texts_of(edgekv) == messages


@pytest.mark.parametrize(
    ("stdin", "messages"),
    [
        (rb'{"message": "half \ud83d"}', ["half \ufffd"]),
        (rb'{"message": "whole \ud83d\ude00"}', ["whole 😀"]),
        (b'{"message": "caf\xe9"}', ["caf\ufffd"]),
        (b'\xef\xbb\xbf{"message": "/marked"}', [" /marked"]),
        (r'{"message": "\udc00☃"}'.encode("utf-16"), ["\ufffd☃"]),
    ],
)
def test_json_lines(edgekv: Edgekv, tiny_path: TinyPath, stdin: bytes, messages: list[str]) -> None:
    done = edgekv("chat", tiny_path(), *CHAT, "--json", stdin=stdin)
    assert done.code == 0 and all(json.loads(line)["event"] for line in done.out.splitlines())
    assert texts_of(edgekv) == messages


@pytest.mark.parametrize("system", ["caf\udce9", "half \ud83d", "\udced\udc95\udc9c"])
def test_the_system_text(edgekv: Edgekv, tiny_path: TinyPath, system: str) -> None:
    said = b"/system\nHello\n/system too \xe9\n"
    done = edgekv("chat", tiny_path(), *CHAT, "--json", "--system", system, stdin=said)
    told = [e["text"] for line in done.out.splitlines() if (e := json.loads(line))["event"] == "system"]
    assert done.code == 0 and told == [wording.mended(system), "too \ufffd"]


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\r\n☃{% endfor %}"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_template(edgekv: Edgekv, tiny_path: TinyPath, tmp_path: Path, encoding: str) -> None:
    own = tmp_path / "own.jinja"
    own.write_bytes(TEMPLATE.encode(encoding))
    said = f"Hello\n/save {tmp_path / 'x.kvs'}\n".encode()
    assert edgekv("chat", tiny_path(), *CHAT, "--template", own, stdin=said).code == 0
    with Session.load(tmp_path / "x.kvs", n_threads=1) as session:
        assert "\ufeff" not in session.text((0, len(session.tokens)))
        assert session.text("user-1").endswith("<user>Hello</user>\n☃")


@pytest.mark.parametrize(
    ("data", "code", "reported"),
    [
        (TEMPLATE.encode("latin-1", "replace") + b"\xe9", 0, "is not UTF-8 text"),
        (TEMPLATE.encode("utf-16-le"), 2, "is not text"),
        (b"GGUF\x00\x00\x00\x03\xff", 2, "is not text"),
    ],
)
def test_a_template_that_is_none(
    edgekv: Edgekv, tiny_path: TinyPath, tmp_path: Path, data: bytes, code: int, reported: str
) -> None:
    own = tmp_path / "own.jinja"
    own.write_bytes(data)
    done = edgekv("chat", tiny_path(), *CHAT, "--template", own, stdin=b"Hello\n")
    assert done.code == code and reported in done.err and str(own) in done.err and "a bug" not in done.err


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_workload(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "cases.jsonl"
    line = r'{"segments": [{"text": "☃ \ud83d"}, {"text": "b", "mask": true}], "question": "\udce9?"}'
    path.write_bytes(f"{line}\r\n".encode(encoding))
    (case,) = file.workload(path)(None, 0)  # type: ignore[arg-type]
    assert (case.segments[0].text, case.question) == ("☃ \ufffd", "\ufffd?")


def test_decoding_warns_of_what_it_replaces() -> None:
    with pytest.warns(UserWarning, match=r"x is not UTF-8 text: byte 3 is 0xe9"):
        assert wording.decoded(b"caf\xe9 \xff", "x") == "caf\ufffd \ufffd"
    with pytest.warns(UserWarning, match="x is not UTF-16 text"):
        assert wording.decoded(b"\xff\xfeh\x00i", "x") == "h\ufffd"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            wording.decoded(b"", "x")
            == wording.decoded(b"\xff\xfe", "x")
            == wording.decoded(b"\xef\xbb\xbf", "x")
            == ""
        )
        assert wording.decoded(b"one zero byte\x00 in a long text", "x") == "one zero byte\x00 in a long text"
    for data in ("text".encode("utf-16-be"), b"\x00", b"\x89PNG\r\n\x1a\n\x00"):
        with pytest.raises(UsageError, match="x is not text"):
            wording.decoded(data, "x")


@pytest.mark.parametrize(
    ("text", "mended"),
    [("", ""), ("a☃😀", "a☃😀"), ("\ud83d\ude00", "😀"), ("\ud800", "\ufffd"), ("\udce2\udc98\udc83", "☃"),
     ("a\udce9", "a\ufffd"), ("\ud83d\udce9x", "\U0001f4e9x")],
)  # fmt: skip
def test_mending(text: str, mended: str) -> None:
    assert wording.mended(text) == mended
    assert plain({text: [text, Path("x"), {"y": text}]}) == {mended: [mended, "x", {"y": mended}]}


# -- out -------------------------------------------------------------------------------------------------------------


def ascii_only(*args: object, stdin: bytes) -> subprocess.CompletedProcess[bytes]:
    """A process whose streams have no encoding but ASCII."""
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "40"}
    command = [sys.executable, "-m", "edgekv", *map(str, args)]
    return subprocess.run(command, input=stdin, env=env, capture_output=True, check=False)


def test_output_in_ascii_is_readable_and_json_stays_json(tiny_path: TinyPath) -> None:
    stdin = "한국어?\n/map\n/spans\n/load\n".encode()
    done = ascii_only("chat", tiny_path(), *CHAT, stdin=stdin)
    shown = (done.stdout + done.stderr).decode("ascii")
    assert done.returncode == 0 and "#" in shown and "%" in shown and "512 cells - policy" in shown
    assert "\\xb7" not in shown and "\\u2026" not in shown
    done = ascii_only("chat", tiny_path(), *CHAT, "--json", stdin=stdin)
    told = [json.loads(line) for line in done.stdout.decode("ascii").splitlines()]
    kept = next(e for e in told if e["event"] == "conversations")["conversations"]
    assert done.returncode == 0 and kept[0]["begins"] == "한국어?"


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_a_stream_that_is_closed(tiny_path: TinyPath, stream: str) -> None:
    closing = f"import os; os.close({['stdin', 'stdout', 'stderr'].index(stream)})"
    arguments = ["edgekv", "chat", str(tiny_path()), *map(str, CHAT), "--no-autosave"]
    script = f"{closing}; os.execv({sys.executable!r}, [{sys.executable!r}, '-m', *{arguments!r}])"
    done = subprocess.run([sys.executable, "-c", script], input=b"Hi\n/spans\n/x\n", capture_output=True, check=False)
    assert done.returncode == (0 if stream == "stdin" else 1), done.stderr  # /x is no command
    assert b"Traceback" not in done.stdout + done.stderr and b"a bug" not in done.stdout + done.stderr
