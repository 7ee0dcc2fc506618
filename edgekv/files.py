"""Files that are replaced as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def replace(path: Path, content: bytes) -> Path:
    """Write a file beside its place and put it there when it is whole and on the disk; its mode is the umask's.

    Whatever fails, what was at ``path`` is still there and nothing is left beside it. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return path


def sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where the system can (Windows cannot open a folder)."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
