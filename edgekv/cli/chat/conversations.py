"""Conversations: the folder where every chat is kept, one file each, and what is in it. Nothing in it is deleted, and
nothing is written over but by the chat it is of.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from edgekv.errors import FileError, UsageError
from edgekv.folders import user_folder
from edgekv.wording import count, printable, size

if TYPE_CHECKING:
    from edgekv.chat import Chat

_ENDING: Final = ".kvs"
_BEGINS: Final = 60  # characters of a first message that a list shows
_PRIVATE: Final = 0o600
_PRIVATE_FOLDER: Final = 0o700
_LARGEST_JSON: Final = 64 << 20

#: (inode, bytes, time of the last change): another one means that somebody else has written the file.
_Seen: TypeAlias = tuple[int, int, int] | None


def state_folder() -> Path | None:
    """This user's folder for what edgekv keeps, None where there is no home."""
    try:
        return user_folder("state", "no conversation is kept")
    except FileError:
        return None


def folder() -> Path | None:
    """Where conversations are kept, None where there is no home."""
    state = state_folder()
    return state and state / "conversations"


def is_mine(path: Path) -> bool:
    """Whether a file lies in the folder."""
    place = folder()
    return place is not None and path.resolve().parent == place.resolve()


# -- what there is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """A file of the folder. ``begins``: the first message of the user. ``problem``: why it cannot be loaded, or ""."""

    path: Path
    changed: datetime
    size: int
    model: str
    turns: int
    begins: str
    problem: str = ""

    @property
    def name(self) -> str:
        return self.path.stem

    def as_dict(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("name", "path", "size", "model", "turns", "begins", "problem")}
        return {**facts, "changed": self.changed.isoformat(timespec="seconds")}

    def __str__(self) -> str:
        return f'"{self.begins}" ({count(self.turns, "turn")}, {self.changed:%Y-%m-%d %H:%M})'


def paths() -> list[Path]:
    """The files of the folder, the newest first. An empty one was reserved by a chat that did not come to write it."""
    found: list[tuple[int, str, Path]] = []
    with contextlib.suppress(OSError):
        for path in place.glob(f"*{_ENDING}") if (place := folder()) else ():
            with contextlib.suppress(OSError):  # it has gone meanwhile
                stat = path.stat()
                if stat.st_size and path.is_file():
                    found.append((stat.st_mtime_ns, path.name, path))
    return [path for *_, path in sorted(found, reverse=True)]


def kept() -> list[Kept]:
    """What is in the folder, the newest first."""
    return [entry for path in paths() if (entry := look(path)) is not None]


def newest() -> Kept | None:
    """The newest conversation that can be loaded."""
    return next((entry for path in paths() if (entry := look(path)) is not None and not entry.problem), None)


class _Model(msgspec.Struct):
    path: str


class _Manifest(msgspec.Struct):
    model: _Model


class _Session(msgspec.Struct):
    memo: str


class _Message(msgspec.Struct):
    role: str
    content: str


class _Turn(msgspec.Struct):
    message: _Message


class _Memo(msgspec.Struct):
    turns: list[_Turn]


def look(path: Path) -> Kept | None:
    """What a file holds, without checking every byte of it; None where it has gone."""
    try:
        stat = path.stat()
    except OSError:
        return None
    changed = datetime.fromtimestamp(stat.st_mtime)
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = msgspec.json.decode(_member(archive, "manifest.json"), type=_Manifest)
            session = msgspec.json.decode(_member(archive, "session.json"), type=_Session)
        turns = msgspec.json.decode(session.memo, type=_Memo).turns
    except Exception as err:  # zipfile raises whatever it stumbles over
        return Kept(path, changed, stat.st_size, "", 0, "", f"it cannot be read: {err}")
    said = next((turn.message.content for turn in turns if turn.message.role == "user"), "")
    line = printable(" ".join(said[: 4 * _BEGINS].split()))
    begins = line if len(line) <= _BEGINS else f"{line[: _BEGINS - 1].rstrip()}…"
    return Kept(path, changed, stat.st_size, Path(manifest.model.path).name, len(turns), begins)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > _LARGEST_JSON:
        raise ValueError(f"{name} is not as edgekv writes it")
    return archive.read(info)


def find(word: str, shown: list[Kept]) -> Path:
    """The file that a word means: its number in a list that was shown, its path, or its name in the folder.

    Raises UsageError for a number that is not in the list.
    """
    path, place = Path(os.path.expanduser(word)), folder()
    if word.isascii() and word.isdecimal():
        if 1 <= (number := int(word[:9])) <= len(shown):
            return shown[number - 1].path
        if not path.exists():
            listed = f"they go from 1 to {len(shown)}" if shown else "none is listed"
            raise UsageError(f"no conversation has the number {word[:9]}: {listed}")
    named = place and place / (word if word.endswith(_ENDING) else f"{word}{_ENDING}")
    with contextlib.suppress(OSError, ValueError):
        if named and not path.exists() and named.parent == place and named.is_file():
            return named
    return path


# -- as a list -------------------------------------------------------------------------------------------------------


def facts(entries: list[Kept]) -> dict[str, Any]:
    return {"folder": folder(), "conversations": [entry.as_dict() for entry in entries]}


def summary(entries: list[Kept]) -> str:
    """How many there are, how large they are, and where."""
    place = folder()
    if not entries:
        return f"no conversation is kept in {place}" if place else "there is no home folder to keep conversations in"
    total = size(sum(entry.size for entry in entries))
    return f"{count(len(entries), 'conversation')}, {total}, in {place}; edgekv deletes none of them"


# -- keeping one -----------------------------------------------------------------------------------------------------


class Autosave:
    """Keeps one conversation in a file of its own.

    ``path``: the file, None for a new one in the folder once there is something to keep. ``seen``: as the file was
    when the conversation was loaded from it, None where there must be none yet. Where somebody else has written
    the file meanwhile, the conversation is kept in a new one. ``kv``: keep the cache, too.
    """

    def __init__(self, path: Path | None = None, *, seen: _Seen = None, kv: bool = False) -> None:
        self.path = path
        self.kv, self._seen = kv, seen
        self._saved: object = None

    def another(self, chat: Chat) -> Autosave:
        """For a branch that begins as that chat is: it gets a file once there is something of its own in it."""
        other = Autosave(kv=self.kv)
        other.begin_with(chat)
        return other

    def begin_with(self, chat: Chat) -> None:
        """Nothing is new in the chat as it is now."""
        self._saved = _state(chat)

    def wrote(self, path: Path) -> None:
        """This chat has written that file by itself."""
        if self.path is not None and path.resolve() == self.path.resolve():
            self._seen = seen(path)

    def save(self, chat: Chat) -> None:
        """Write what is new, if anything is. Raises FileError, OSError, UsageError (no folder), as Chat.save."""
        if _state(chat) == self._saved or not any(turn.message.role != "system" for turn in chat.turns):
            return
        with contextlib.ExitStack() as stack:
            path = self._place(stack)
            try:
                chat.save(path, kv=self.kv)
                self._saved = _state(chat)
            finally:
                self.path, self._seen = path, seen(path)
                if self._seen is not None and not self._seen[1]:  # only reserved
                    path.unlink(missing_ok=True)
                    self._seen = None

    def _place(self, stack: contextlib.ExitStack) -> Path:
        """The file to write, which is nobody else's; another chat that goes on with it is kept out meanwhile."""
        path = self.path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            mine = stack.enter_context(_locked(path)) and (now := seen(path)) == self._seen
            if mine and (now is not None or _reserve(path)):
                return path
        return _fresh()


def _state(chat: Chat) -> object:
    return chat.turns, chat.session.stats


def seen(path: Path) -> _Seen:
    """How a file is now, None where it is not."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _fresh() -> Path:
    """A new file in the folder, which nobody else can have."""
    place = folder()
    if place is None:
        raise UsageError(
            "there is no home folder here to keep conversations in; name a file: --autosave FILE, or /save FILE"
        )
    place.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
    while not _reserve(path := place / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}{_ENDING}"):
        pass
    return path


def _reserve(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _PRIVATE))
    except FileExistsError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the file that is there against other writers; False where another one holds it."""
    try:
        import fcntl  # not on Windows, where only the comparison is left
    except ImportError:
        yield True
        return
    with contextlib.ExitStack() as stack:
        free = True
        with contextlib.suppress(FileNotFoundError):
            file = stack.enter_context(path.open("rb"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                free = False
            except OSError:
                pass  # a file system without locks
        yield free
