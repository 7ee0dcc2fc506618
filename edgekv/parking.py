"""Parking: where the K and V of parked spans wait, in host memory or in a folder.

A blob holds cells of consecutive positions. Sessions and forks hold blobs together; one that nobody holds any more is
dropped. In a folder blobs lie in one file that has no name once it is open: it goes with the process, whatever ends it,
and leaves nothing behind. :meth:`Session.save` is what lasts.
"""

from __future__ import annotations

import contextlib
import tempfile
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ._llama import uninterrupted
from .columns import CellRun
from .errors import DamagedFile, FileError

Bytes = npt.NDArray[np.uint8]


@dataclass
class Blob:
    """K and V of the cells at positions [p0, p1); ``data`` in host memory, else at ``at`` in ``file``."""

    p0: int
    p1: int
    num_bytes: int
    crc: int
    data: Bytes | None = None
    file: PoolFile | None = None
    at: int = 0

    def read(self) -> Bytes:
        """uint8 (num_bytes,). Raises DamagedFile when the folder's file does not give back what was written."""
        if self.data is not None:
            return self.data
        assert self.file is not None
        data = self.file.read(self.at, self.num_bytes)
        if len(data) != self.num_bytes or zlib.crc32(data.data) != self.crc:
            raise DamagedFile(f"parked K and V were changed on disk in {self.file.folder}; evict the span and read it")
        return data


class Parking:
    """The blobs of an engine. ``most``: bytes in host memory; beyond them the blobs that were parked longest ago go to
    ``folder()``, which is asked for only then. None for no limit."""

    def __init__(self, most: int | None, folder: Callable[[], Path]) -> None:
        self._most: Final = most
        self._folder: Final = folder
        self._blobs: OrderedDict[int, Blob] = OrderedDict()  # the least recently used first
        self._holders: weakref.WeakKeyDictionary[object, set[int]] = weakref.WeakKeyDictionary()
        self._files: dict[Path, PoolFile] = {}
        self._next = 0

    # -- parking and back ---------------------------------------------------------------------------------------

    def put(self, run: CellRun, data: Bytes, folder: Path | None = None) -> int:
        """The number of a new blob, in host memory or in ``folder``; hold it, or :meth:`drop_unheld` drops it.

        Raises FileError when a folder cannot take it, or what has to make room for it; then nothing has changed.
        """
        blob = Blob(run.p0, run.p1, len(data), 0, data)
        with uninterrupted():
            if folder is not None:
                self._to_file(blob, folder)
            elif self._most is not None and len(data) > self._most:
                self._to_file(blob, self._folder())
            elif self._most is not None:
                self._make_room(len(data))
            number, self._next = self._next, self._next + 1
            self._blobs[number] = blob
            return number

    def get(self, number: int) -> Blob:
        return self._blobs[number]

    def read(self, number: int) -> Bytes:
        """uint8 (n,): what a blob holds; others leave host memory before it. Raises DamagedFile, FileError."""
        self._blobs.move_to_end(number)
        return self._blobs[number].read()

    def _make_room(self, num_bytes: int) -> None:
        assert self._most is not None
        for blob in list(self._blobs.values()):
            if self._in_memory(self._blobs.values()) + num_bytes <= self._most:
                return
            if blob.data is not None:
                self._to_file(blob, self._folder())

    def _to_file(self, blob: Blob, folder: Path) -> None:
        assert blob.data is not None
        file = self._files.get(folder)
        if file is None:
            file = self._files[folder] = PoolFile(folder)
        blob.at = file.write(blob.data)
        blob.crc, blob.file, blob.data = zlib.crc32(blob.data.data), file, None

    # -- who holds what -----------------------------------------------------------------------------------------

    def hold(self, holder: object, numbers: set[int]) -> None:
        """From now on this session holds these, and no others."""
        self._holders[holder] = numbers
        self.drop_unheld()

    def keep_only(self, held: dict[object, set[int]]) -> None:
        """These sessions hold these blobs, and no other does."""
        self._holders = weakref.WeakKeyDictionary({holder: numbers for holder, numbers in held.items() if numbers})
        self.drop_unheld()

    def release(self, holder: object) -> None:
        self._holders.pop(holder, None)
        self.drop_unheld()

    def drop_unheld(self) -> None:
        held = set().union(*self._holders.values())
        for number in [n for n in self._blobs if n not in held]:
            blob = self._blobs.pop(number)
            if blob.file is not None:
                blob.file.free(blob.at)

    def forget(self) -> None:
        """In a child process: the files are the parent's, and so is what is in them."""
        self._blobs, self._holders, self._files = OrderedDict(), weakref.WeakKeyDictionary(), {}

    def close(self) -> None:
        self._blobs.clear()
        self._holders.clear()
        for file in self._files.values():
            file.close()

    def __bool__(self) -> bool:
        """Whether anything is parked."""
        return bool(self._blobs)

    # -- counting -----------------------------------------------------------------------------------------------

    def num_bytes(self, holder: object) -> tuple[int, int]:
        """(in host memory, in files) of what a session holds."""
        held = [self._blobs[n] for n in self._holders.get(holder, ())]
        in_memory = self._in_memory(held)
        return in_memory, sum(b.num_bytes for b in held) - in_memory

    @staticmethod
    def _in_memory(blobs: Iterable[Blob]) -> int:
        return sum(b.num_bytes for b in blobs if b.data is not None)


class PoolFile:
    """Stretches of bytes in one nameless file of ``folder``, which is made if need be."""

    def __init__(self, folder: Path) -> None:
        self.folder: Final = folder
        with _said(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file: Any = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._taken: dict[int, int] = {}  # where a stretch begins -> where it ends

    def write(self, data: Bytes) -> int:
        """Where the bytes are now."""
        at = self._gap(len(data))
        with _said(self.folder):
            try:
                self._file.seek(at)
                left = data.data
                while len(left):
                    left = left[self._file.write(left) :]
            except OSError:
                self._cut()
                raise
        self._taken[at] = at + len(data)
        return at

    def _gap(self, size: int) -> int:
        """The first place where so many bytes are free."""
        end = 0
        for start, stop in sorted(self._taken.items()):
            if start - end >= size:
                return end
            end = stop
        return end

    def read(self, at: int, size: int) -> Bytes:
        with _said(self.folder):
            self._file.seek(at)
            data, done = np.empty(size, np.uint8), 0
            while done < size and (count := self._file.readinto(data[done:].data)):
                done += count
            return data[:done]

    def free(self, at: int) -> None:
        del self._taken[at]
        self._cut()

    def _cut(self) -> None:
        """The file ends where its last stretch does."""
        with contextlib.suppress(OSError):
            self._file.truncate(max(self._taken.values(), default=0))

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def _said(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise FileError(f"{folder} cannot hold parked spans: {err.strerror or err}; give another folder") from err
