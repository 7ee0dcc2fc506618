"""Files that are replaced as a whole, or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

_PRIVATE: Final = 0o600
_numbers: Final = itertools.count()


def replace(path: Path, content: bytes) -> Path:
    """As :func:`writing`, with a content that is there; the file's mode is the umask's."""
    with writing(path) as file:
        file.write(content)
    return path


@contextlib.contextmanager
def writing(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file that is written beside its place, and put there when the block has ended and it is on the disk.

    Whatever fails, what was at ``path`` is still there and nothing is left beside it; what a process left that was
    killed here goes when the next one writes. ``private``: for the owner's eyes only. Raises OSError.
    """
    path = path.resolve()  # what a link points to is replaced, not the link
    _remove_stale(path)
    temporary = path.with_name(f"{_begin_of(path)}{os.getpid()}-{next(_numbers)}.tmp")
    try:
        with open(temporary, "x+b", opener=_private if private else None) as file:  # no link somebody put there
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _begin_of(path: Path) -> str:
    """How the names of its temporary files begin; a long name is cut, as they are longer than it."""
    return f".{path.name[:50]}."


def _private(name: str, flags: int) -> int:
    fd = os.open(name, flags, _PRIVATE)
    if hasattr(os, "fchmod"):
        os.fchmod(fd, _PRIVATE)  # whatever the umask
    return fd


def _remove_stale(path: Path) -> None:
    """Remove what writers of this file left that no longer live."""
    mine = re.compile(re.escape(_begin_of(path)) + r"(\d{1,18})-\d+\.tmp")
    with contextlib.suppress(OSError):
        for entry in list(path.parent.iterdir()):
            found = mine.fullmatch(entry.name)
            with contextlib.suppress(OSError):  # a folder of that name, or another writer was faster
                if found and not _lives(int(found[1]), entry.stat().st_mtime):
                    entry.unlink()


def _lives(pid: int, since: float) -> bool:
    """Whether the process that wrote at that time is still there; a younger one has only got its number."""
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= since
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False


def sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where the system can (Windows cannot open a folder)."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
