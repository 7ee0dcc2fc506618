"""``edgekv prefill``, and ``edgekv inspect`` of session files and KV modules."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgekv import Session, Settings
from helpers import TEXT, open_tiny, some_tokens

Edgekv = Callable[..., Any]
TinyPath = Callable[..., Path]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "manual.txt"
    path.write_text(TEXT, "utf-8")
    return path


def test_prefill_writes_a_module_that_a_session_takes(
    edgekv: Edgekv, tiny_path: TinyPath, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "system.txt").write_text("You are terse.")
    done = edgekv("prefill", text, "--attend", tmp_path / "system.txt", "-m", tiny_path("llama"))
    assert done.code == 0
    assert "manual.kv, named manual" in done.out
    with open_tiny(tiny_path("llama")) as session:
        session.append("You are terse.")
        receipt = session.attach(tmp_path / "manual.kv")
        assert receipt.notes == ()
        assert session.text("manual") == TEXT


def test_prefill_json_and_standard_input(edgekv: Edgekv, tiny_path: TinyPath, tmp_path: Path) -> None:
    out = tmp_path / "gist.kv"
    args = ("prefill", "-", "-o", out, "--kv-type", "q8_0", "-m", tiny_path("llama"), "--json")
    done = edgekv(*args, stdin=TEXT.encode())
    told = json.loads(done.out)
    assert told["schema"] == "edgekv.prefill/1"
    assert (told["path"], told["size"], told["name"]) == (str(out), out.stat().st_size, "gist")
    with open_tiny(tiny_path("llama"), kv_type="q8_0") as session:
        assert session.attach(out).tokens == told["tokens"]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["-"], 2, "--output"),
        (["nosuch.txt"], 1, "nosuch.txt"),
        ([""], 2, "is no file to read"),
        (["/"], 2, "is no file to read"),
        (["{binary}"], 2, "is not text"),
        (["{empty}"], 2, "no token"),
        (["{text}", "-o", "{folder}"], 1, "is a folder"),
        (["{text}", "-o", "{folder}/not/there.kv"], 1, "No such file"),
        (["{text}", "-o", "{text}"], 2, "is one of the texts"),
        (["{text}", "--attend", "{empty}", "-o", "{empty}"], 2, "is one of the texts"),
        (["{text}", "-o", "{llama}"], 1, "is a model"),
        (["{text}", "-m", "nosuch"], 1, "nosuch"),
        (["{text}", "-m", "{mamba}"], 1, "recurrent"),
    ],
)
def test_prefill_refuses(
    edgekv: Edgekv, tiny_path: TinyPath, text: Path, tmp_path: Path, args: list[str], code: int, said: str
) -> None:
    (tmp_path / "binary").write_bytes(b"\x7fELF\x02\x00\x00\xff\x00")
    (tmp_path / "empty").write_bytes(b"")
    before = sorted(tmp_path.iterdir())
    paths = {name: tmp_path / name for name in ("binary", "empty")}
    given = [
        a.format(text=text, folder=tmp_path, mamba=tiny_path("mamba"), llama=tiny_path("llama"), **paths) for a in args
    ]
    model = [] if "-m" in given else ["-m", tiny_path("llama")]
    done = edgekv("prefill", *given, *model)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.fixture
def session_file(tiny_path: TinyPath, tmp_path: Path) -> Path:
    with open_tiny(tiny_path("llama")) as session:
        session.append("You are terse.", name="system", role="system")
        session.append(TEXT, name="manual", tags=["big", "pdf"])
        session.append(some_tokens(20), name="chat")
        session.mask("manual")
        session.park("chat")
        session.save(tmp_path / "chat.kvs")
    return tmp_path / "chat.kvs"


def test_a_session_file_is_read_without_its_model(edgekv: Edgekv, tiny_path: TinyPath, session_file: Path) -> None:
    moved = session_file.read_bytes().replace(str(tiny_path("llama")).encode(), b"x" * len(str(tiny_path("llama"))))
    assert moved != session_file.read_bytes()
    done = edgekv("inspect", session_file)
    assert (done.code, done.err) == (0, "")
    for said in (
        "session, format 1",
        "f16, flash attention on",
        "20 parked",
        "manual",
        "big, pdf",
        "The token is 한글",
    ):
        assert said in done.out


def test_its_json(edgekv: Edgekv, session_file: Path) -> None:
    told = json.loads(edgekv("inspect", session_file, "--json").out)
    assert told["schema"] == "edgekv.inspect-file/1"
    assert (told["kind"], told["size"]) == ("session", session_file.stat().st_size)
    assert told["session"]["tokens"]["parked"] == 20
    assert "module" not in told
    manual = next(s for s in told["session"]["spans"] if s["name"] == "manual")
    assert (manual["tags"], manual["states"]) == (["big", "pdf"], {"masked": manual["stop"] - manual["start"]})


def test_a_module_is_read_without_its_model(edgekv: Edgekv, tiny_path: TinyPath, text: Path, tmp_path: Path) -> None:
    edgekv("prefill", text, "-m", tiny_path("llama"))
    done = edgekv("inspect", tmp_path / "manual.kv")
    assert done.code == 0
    assert "KV module, format 1" in done.out
    assert "The token is 한글" in done.out
    told = json.loads(edgekv("inspect", tmp_path / "manual.kv", "--json").out)
    assert (told["kind"], told["module"]["name"]) == ("module", "manual")


def test_a_damaged_file_is_refused(edgekv: Edgekv, session_file: Path) -> None:
    data = bytearray(session_file.read_bytes())
    data[-300] ^= 1
    session_file.write_bytes(data)
    done = edgekv("inspect", session_file)
    assert (done.code, done.out) == (1, "")
    assert "is damaged" in done.err


def test_a_zip_of_somebody_else(edgekv: Edgekv, tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "text")
    done = edgekv("inspect", tmp_path / "other.zip")
    assert done.code == 1
    assert "neither a session file nor a KV module" in done.err


def test_no_escape_sequence_of_a_file_reaches_the_terminal(edgekv: Edgekv, tiny_path: TinyPath, tmp_path: Path) -> None:
    with open_tiny(tiny_path("llama")) as session:
        session.append("\x1b[2J\x1b]0;owned\x07 text", name="evil\x1b", role="\x1b[1m", tags=["\x1b[5m"])
        session.save(tmp_path / "evil.kvs")
    done = edgekv("inspect", tmp_path / "evil.kvs")
    assert done.code == 0
    assert "\x1b" not in done.out


def test_inspect_of_a_file_loads_no_llama_cpp(session_file: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from edgekv.cli.kept import inspect_kept; "
        "inspect_kept(Path(sys.argv[1]), as_json=True); assert 'llama_cpp' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, session_file], check=True, stdout=subprocess.DEVNULL)


def test_a_session_or_module_given_as_a_model(edgekv: Edgekv, session_file: Path) -> None:
    done = edgekv("run", "-m", session_file, "--part", f"a={session_file}")
    assert done.code in (1, 2)
    with pytest.raises(Exception, match="session file or KV module"):
        Session(session_file, settings=Settings(n_ctx=256))
