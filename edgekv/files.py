"""Files that are replaced as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_PRIVATE: Final = 0o600


def replace(path: Path, content: bytes) -> Path:
    """As :func:`writing`, with a content that is there; the file's mode is the umask's."""
    with writing(path) as file:
        file.write(content)
    return path


@contextlib.contextmanager
def writing(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file that is written beside its place, and put there when the block has ended and it is on the disk.

    Whatever fails, what was at ``path`` is still there and nothing is left beside it. What a process left that was
    killed here goes when the next one writes, where the system can tell that nobody writes it any more (flock).
    ``private``: for the owner's eyes only. Raises OSError.
    """
    path = path.resolve()  # what a link points to is replaced, not the link
    _remove_stale(path)
    written = False
    while not written:
        temporary = path.with_name(f"{_begin_of(path)}{secrets.token_hex(8)}.tmp")  # nobody else has that name
        try:
            with open(temporary, "x+b", opener=_private if private else None) as file:
                _lock(file.fileno(), wait=True)
                if fcntl is not None and not os.fstat(file.fileno()).st_nlink:
                    continue  # another writer took it for a stale one before it was locked
                yield file
                file.flush()
                os.fsync(file.fileno())
                if fcntl is not None:  # the lock is held until nobody can take it for a stale one
                    os.replace(temporary, path)
            if fcntl is None:  # Windows does not rename an open file
                os.replace(temporary, path)
            written = True
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def _lock(fd: int, *, wait: bool) -> bool:
    """Whether this process alone holds the file now. Some file systems cannot tell: then nobody does."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return True
    except OSError:
        return False


def _begin_of(path: Path) -> str:
    """How the names of its temporary files begin; a long name is cut, as they are longer than it."""
    return f".{path.name[:50]}."


def _private(name: str, flags: int) -> int:
    fd = os.open(name, flags, _PRIVATE)
    if hasattr(os, "fchmod"):
        os.fchmod(fd, _PRIVATE)  # whatever the umask
    return fd


def _remove_stale(path: Path) -> None:
    """Remove the temporary files of this file that no writer holds."""
    mine = re.compile(re.escape(_begin_of(path)) + r"[0-9a-f]{16}\.tmp")
    with contextlib.suppress(OSError):
        for entry in list(path.parent.iterdir()):
            if mine.fullmatch(entry.name):
                with contextlib.suppress(OSError):  # a folder of that name, or another writer was faster
                    _remove_unheld(entry)


def _remove_unheld(entry: Path) -> None:
    if fcntl is None or not stat.S_ISREG(entry.lstat().st_mode):
        return
    fd = os.open(entry, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if _lock(fd, wait=False):
            entry.unlink()
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where the system can (Windows cannot open a folder)."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
