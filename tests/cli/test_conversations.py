"""Conversations of ``edgekv chat``: a file each, never another's, listed and gone on with."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgekv import Session
from edgekv.chat import Chat
from edgekv.cli.chat import conversations
from edgekv.cli.chat.conversations import Autosave
from edgekv.cli.chat.loop import Branch, Loop, State
from edgekv.cli.chat.screen import Events
from edgekv.errors import FileError, UsageError

TinyPath = Callable[..., Path]
Edgekv = Callable[..., Any]
CHAT = ("--n-ctx", 512, "--temperature", 0, "--max-tokens", 4)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that conversations are kept in."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "edgekv" / "conversations"


def lines(*said: str) -> bytes:
    return "".join(f"{line}\n" for line in said).encode()


def events(out: str, *names: str) -> list[dict[str, Any]]:
    return [e for line in out.splitlines() if (e := json.loads(line))["event"] in names or not names]


def texts(path: Path) -> list[str]:
    """What the user has said in a conversation."""
    with Session.load(path, n_threads=1) as session:
        return [m.content for m in Chat.load(session).messages if m.role == "user"]


def said_in(place: Path) -> list[list[str]]:
    return sorted(texts(path) for path in place.iterdir())


# -- files -----------------------------------------------------------------------------------------------------------


def test_each_chat_has_a_file_of_its_own(edgekv: Edgekv, tiny_path: TinyPath, place: Path) -> None:
    for message in ("One", "Two", "Three"):
        assert edgekv("chat", tiny_path(), *CHAT, stdin=lines(message, "More")).code == 0
    assert said_in(place) == [["One", "More"], ["Three", "More"], ["Two", "More"]]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in place.iterdir())
    assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("said", [[], ["/stats"], ["/system Be terse."], ["/set top_k 5", "/map"], ["", "/nonsense"]])
def test_an_empty_conversation_leaves_no_file(
    edgekv: Edgekv, tiny_path: TinyPath, place: Path, said: list[str]
) -> None:
    edgekv("chat", tiny_path(), *CHAT, "--system", "Be brief.", stdin=lines(*said))
    assert not place.exists() or not list(place.iterdir())


def test_no_autosave_keeps_nothing(edgekv: Edgekv, tiny_path: TinyPath, place: Path) -> None:
    said = lines("Hello", "/fork", "Branch", "/back")
    assert edgekv("chat", tiny_path(), *CHAT, "--no-autosave", stdin=said).code == 0
    assert not place.exists()


def test_chats_at_the_same_time_do_not_meet(tiny_path: TinyPath, place: Path) -> None:
    command = [sys.executable, "-m", "edgekv", "chat", str(tiny_path()), *map(str, CHAT)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, **quiet) for _ in range(2)]  # type: ignore[call-overload]
    for number, process in enumerate(running):
        process.communicate(lines(f"I am {number}", "Go on"))
    assert said_in(place) == [["I am 0", "Go on"], ["I am 1", "Go on"]]


@pytest.mark.usefixtures("place")
def test_the_same_second_and_the_same_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are taken with O_EXCL: a draw that is taken is drawn again."""
    drawn = iter(["aaaaaa", "aaaaaa", "aaaaaa", "bbbbbb"])
    monkeypatch.setattr(conversations.secrets, "token_hex", lambda _: next(drawn))

    class Fixed(conversations.datetime):  # type: ignore[misc,name-defined]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)

    monkeypatch.setattr(conversations, "datetime", Fixed)
    assert [conversations._fresh().name for _ in range(2)] == [
        "20260102-030405-aaaaaa.kvs",
        "20260102-030405-bbbbbb.kvs",
    ]


def test_a_branch_has_its_own(edgekv: Edgekv, tiny_path: TinyPath, place: Path) -> None:
    edgekv("chat", tiny_path(), *CHAT, stdin=lines("Trunk", "/fork", "Branch", "/back", "Trunk again"))
    assert said_in(place) == [["Trunk", "Branch"], ["Trunk", "Trunk again"]]


def test_what_a_command_changes_is_kept(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    edgekv("chat", tiny_path(), *CHAT, stdin=lines("Hello", "And?", "/mask user-1", "/pin user-3", "/system Be terse."))
    done = edgekv("chat", "--continue", "--json", stdin=lines("/spans", "/system"))
    spans = {span["name"]: span for span in events(done.out, "spans")[0]["spans"]}
    assert "masked" in spans["user-1"]["states"] or "evicted" in spans["user-1"]["states"]
    assert "pinned" in spans["user-3"]["tags"]
    assert events(done.out, "system")[0]["text"] == "Be terse."


# -- going on --------------------------------------------------------------------------------------------------------


def test_the_newest_is_offered_and_continued_in_its_own_file(edgekv: Edgekv, tiny_path: TinyPath, place: Path) -> None:
    edgekv("chat", tiny_path(), *CHAT, stdin=lines("Old"))
    edgekv("chat", tiny_path(), *CHAT, stdin=lines("New, and longer than the other one"))
    done = edgekv("chat", tiny_path(), *CHAT, stdin=lines(""))
    assert '"New, and longer than the other one" (2 turns' in done.err and "--continue" in done.err
    done = edgekv("chat", "--continue", "--max-tokens", 4, stdin=lines("More"))
    assert done.code == 0 and "the last conversation" not in done.err
    assert said_in(place) == [["New, and longer than the other one", "More"], ["Old"]]


def test_continuing_without_a_word_changes_nothing(edgekv: Edgekv, tiny_path: TinyPath, place: Path) -> None:
    edgekv("chat", tiny_path(), *CHAT, stdin=lines("Hello"))
    (path,) = place.iterdir()
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert edgekv("chat", "--continue", stdin=lines("/stats", "/set top_k 3")).code == 0
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


@contextlib.contextmanager
def continued(path: Path) -> Iterator[tuple[Chat, Autosave]]:
    """As chat --continue does it."""
    seen = conversations.seen(path)
    with Session.load(path, n_threads=1) as session:
        chat, autosave = Chat.load(session), Autosave(path, seen=seen)
        autosave.begin_with(chat)
        yield chat, autosave


def test_two_that_continue_the_same_lose_nothing(tiny_path: TinyPath, place: Path, edgekv: Edgekv) -> None:
    edgekv("chat", tiny_path(), *CHAT, stdin=lines("Begin"))
    (path,) = place.iterdir()
    with continued(path) as (left, one), continued(path) as (right, other):
        for chat, autosave, text in ((left, one, "Left"), (right, other, "Right"), (left, one, "More")):
            chat.add("user", text)
            autosave.save(chat)
        assert one.path == path != other.path
    assert said_in(place) == [["Begin", "Left", "More"], ["Begin", "Right"]]


def test_one_that_another_is_writing_now(tiny_path: TinyPath, place: Path, edgekv: Edgekv) -> None:
    edgekv("chat", tiny_path(), *CHAT, stdin=lines("Begin"))
    (path,) = place.iterdir()
    with continued(path) as (chat, autosave), conversations._locked(path) as mine:
        assert mine
        chat.add("user", "More")
        autosave.save(chat)
    assert said_in(place) == [["Begin"], ["Begin", "More"]]


def test_a_conversation_that_changed_elsewhere_is_reported(
    edgekv: Edgekv, tiny_path: TinyPath, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edgekv("chat", tiny_path(), *CHAT, stdin=lines("Begin"))
    (path,) = place.iterdir()
    with continued(path) as (chat, autosave), continued(path) as (elsewhere, other):
        loop = Loop(State(Events(), None, [Branch(chat, autosave)]))
        loop.line("/system Be terse.")
        elsewhere.add("user", "From elsewhere")
        other.save(elsewhere)  # in a new file, as the first has changed
        loop.line("/pin user-1")
        assert autosave.path == path
        path.write_bytes(b"somebody's")
        loop.line("/unpin user-1")
    assert autosave.path != path and path.read_bytes() == b"somebody's"
    (note,) = events(capsys.readouterr().out, "note")
    assert f"kept in {autosave.path} from now on: {path} was changed" in note["text"]


def test_a_copy_is_another_conversation(edgekv: Edgekv, tiny_path: TinyPath, place: Path, tmp_path: Path) -> None:
    edgekv("chat", tiny_path(), *CHAT, stdin=lines("Begin"))
    (path,) = place.iterdir()
    said = lines(f"/save {tmp_path / 'copy.kvs'}", "/fork", f"/load {tmp_path / 'copy.kvs'}", "More", f"/load {path}")
    done = edgekv("chat", "--continue", "--max-tokens", 4, stdin=said)
    assert done.code == 0 and said_in(place) == [["Begin"], ["Begin", "More"]]


def test_a_file_of_the_user_is_never_written_over(
    edgekv: Edgekv, tiny_path: TinyPath, place: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.kvs"
    edgekv("chat", tiny_path(), *CHAT, "--no-autosave", stdin=lines("Hello", f"/save {mine}"))
    before = mine.read_bytes()
    edgekv("chat", "--load", mine, "--max-tokens", 4, stdin=lines("More"))
    assert mine.read_bytes() == before and said_in(place) == [["Hello", "More"]]
    done = edgekv("chat", tiny_path(), *CHAT, "--autosave", mine, stdin=lines("Another"))
    assert done.code == 2 and "is there already" in done.err and mine.read_bytes() == before
    done = edgekv("chat", "--load", mine, "--autosave", mine, "--max-tokens", 4, stdin=lines("And on"))
    assert done.code == 0 and texts(mine) == ["Hello", "And on"]


def test_a_place_of_ones_own(edgekv: Edgekv, tiny_path: TinyPath, place: Path, tmp_path: Path) -> None:
    mine = tmp_path / "new folder" / "mine.kvs"
    said = lines("Hello", f"/save {mine}", "And on", "/fork", "Branch")
    assert edgekv("chat", tiny_path(), *CHAT, "--autosave", mine, stdin=said).code == 0
    assert texts(mine) == ["Hello", "And on"] and said_in(place) == [["Hello", "And on", "Branch"]]


def test_nothing_to_continue(edgekv: Edgekv) -> None:
    done = edgekv("chat", "--continue", stdin=b"")
    assert done.code == 2 and "nothing to continue" in done.err
    assert edgekv("chat", "--continue", "--load", "1", stdin=b"").code == 2
    assert edgekv("chat", "--continue", "--system", "x", stdin=b"").code == 2


def test_small_unless_the_cache_is_wanted(edgekv: Edgekv, tiny_path: TinyPath, place: Path, tmp_path: Path) -> None:
    """And what was kept with its cache stays so."""
    said = lines("Hello, and some words more that fill the cache " * 6, "/mask user-1")
    edgekv("chat", tiny_path(), *CHAT, stdin=said)
    (small,) = place.iterdir()
    small = small.rename(tmp_path / "small.kvs")
    edgekv("chat", tiny_path(), *CHAT, "--autosave-kv", stdin=said)
    (large,) = place.iterdir()
    assert small.stat().st_size < large.stat().st_size - 50_000
    done = edgekv("chat", "--continue", "--max-tokens", 4, "--json", stdin=lines("/unmask user-1", "More", "/stats"))
    assert done.code == 0 and small.stat().st_size < large.stat().st_size - 50_000
    mine = tmp_path / "mine.kvs"
    mine.write_bytes(large.read_bytes())
    done = edgekv("chat", "--load", mine, "--autosave", mine, "--max-tokens", 4, stdin=lines("More"))
    assert done.code == 0 and small.stat().st_size < mine.stat().st_size - 50_000
    done = edgekv("chat", "--load", small, "--json", stdin=lines("/stats", "/unmask user-1"))
    assert events(done.out, "stats")[0]["evicted"] and events(done.out, "error")


# -- the list --------------------------------------------------------------------------------------------------------


def test_the_list(edgekv: Edgekv, tiny_path: TinyPath, place: Path) -> None:
    assert "no conversation is kept in" in edgekv("chat", "--list").out
    edgekv("chat", tiny_path(), *CHAT, stdin=lines("One \x1b[31m red", "More"))
    edgekv("chat", tiny_path("mamba"), *CHAT, stdin=lines("Two " * 50))
    (place / "broken.kvs").write_bytes(b"PK\x03\x04 and no more")
    (place / "reserved.kvs").touch()
    (place / "notes.txt").write_text("not mine")
    told = json.loads(edgekv("chat", "--list", "--json").out)
    kept = told["conversations"]
    assert told["folder"] == str(place) and [k["turns"] for k in kept] == [0, 2, 4]
    assert kept[0]["problem"] and kept[0]["name"] == "broken"
    assert kept[1]["begins"].endswith("…") and kept[1]["model"] == tiny_path("mamba").name
    said = edgekv("chat", "--list").out
    assert "3 conversations" in said and "edgekv deletes none" in said and "\x1b" not in said
    done = edgekv("chat", "--continue", stdin=lines("/stats"))  # the newest that can be read
    assert done.code == 0 and "mamba" in done.out + done.err


def test_load_takes_a_number_a_name_or_a_path(edgekv: Edgekv, tiny_path: TinyPath, place: Path) -> None:
    edgekv("chat", tiny_path(), *CHAT, stdin=lines("Old"))
    (old,) = place.iterdir()
    edgekv("chat", tiny_path("gemma3"), *CHAT, stdin=lines("New"))
    said = lines("/load", "/load 2", "/system", "/load 1", "/load", f"/load {old.stem}", f"/load {old}", "Go on")
    done = edgekv("chat", tiny_path(), *CHAT, "--json", stdin=said)
    assert done.code == 0, done.out
    assert [Path(e["path"]) == old for e in events(done.out, "loaded")] == [True, False, True, True]
    assert said_in(place) == [["New"], ["Old", "Go on"]]
    for word in ("1", old.stem):
        assert edgekv("chat", "--load", word, stdin=b"").code == 0


# -- trouble ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def chat(tiny_path: TinyPath) -> Iterator[Chat]:
    with Session(tiny_path(), n_ctx=256, n_threads=1) as session:
        yield Chat(session)


def test_a_save_that_fails_leaves_nothing_and_is_tried_again(
    chat: Chat, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    autosave, save = Autosave(), chat.save
    chat.add("user", "Hello")

    def full(*_: object, **__: object) -> int:
        raise FileError("no space left")

    for error in (full, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)):
        monkeypatch.setattr(chat, "save", error)
        with pytest.raises((FileError, KeyboardInterrupt)):
            autosave.save(chat)
        assert not list(place.iterdir())
    monkeypatch.setattr(chat, "save", save)
    autosave.save(chat)
    assert said_in(place) == [["Hello"]]
    before = autosave.path.read_bytes() if autosave.path else b""
    monkeypatch.setattr(chat, "save", full)
    chat.add("assistant", "Hi")
    with pytest.raises(FileError):
        autosave.save(chat)
    assert autosave.path is not None and autosave.path.read_bytes() == before


def test_a_file_that_is_gone_comes_back_under_another_name(chat: Chat, place: Path) -> None:
    autosave = Autosave()
    chat.add("user", "Hello")
    autosave.save(chat)
    assert autosave.path is not None
    autosave.path.unlink()
    chat.add("assistant", "Hi")
    autosave.save(chat)
    assert said_in(place) == [["Hello"]]


def test_no_home(chat: Chat, monkeypatch: pytest.MonkeyPatch, edgekv: Edgekv, tiny_path: TinyPath) -> None:
    """The chat goes on without an autosave, and says so."""
    monkeypatch.setattr(conversations, "state_folder", lambda: None)
    done = edgekv("chat", tiny_path(), *CHAT, stdin=lines("Hello", "/load", "/fork", "Branch"))
    assert done.code == 0 and "no autosave, as there is no home folder" in done.err
    assert "there is no home folder" in edgekv("chat", "--list").out
    assert edgekv("chat", "--continue", stdin=b"").code == 2
    chat.add("user", "Hello")
    with pytest.raises(UsageError, match="no home folder"):
        Autosave().save(chat)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root can be somebody without a home folder")
def test_a_user_without_a_home() -> None:
    script = (
        "import os, pwd, platformdirs.unix; from edgekv.cli.chat.conversations import folder; os.setuid(54321)\n"
        "os.environ.pop('HOME', None); os.environ.pop('XDG_STATE_HOME', None); assert folder() is None, folder()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_folder_that_cannot_be_written(edgekv: Edgekv, tiny_path: TinyPath, place: Path) -> None:
    place.parent.mkdir(parents=True)
    place.write_text("a file where the folder should be")
    done = edgekv("chat", tiny_path(), *CHAT, "--json", stdin=lines("Hello", "And on", "/stats"))
    assert done.code == 0 and len(events(done.out, "answer")) == 2
    assert [e["text"][:34] for e in events(done.out, "note")].count("note: the conversation is not kept") == 1
