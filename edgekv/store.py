"""Store: edgekv's own files: one zip, not compressed, a manifest first, and a checksum over every byte of it.

The zip's comment, its very end, holds the CRC-32 of all that stands in front of it: no bit can flip unseen, not even
one that zip readers pass over. Nothing is unpacked, and no name in a file is ever used as a path. Members are read
one by one when they are asked for, each checked again by its own CRC-32: a file that is changed meanwhile is noticed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from . import files
from .errors import AuditFailed, DamagedFile, FileError, NotEdgekvFile

Content: TypeAlias = "bytes | npt.NDArray[np.uint8]"
Member: TypeAlias = "tuple[str, Content]"

MANIFEST: Final = "manifest.json"
_NAME: Final = re.compile(r"[a-z0-9]+([./-][a-z0-9]+)*")
_BEGIN: Final = b"PK\3\4"
_MODEL: Final = b"GGUF"
_COMMENT: Final = b"edgekv crc32 "
_END: Final = len(_COMMENT) + 8  # and eight hex digits
_CHUNK: Final = 1 << 20
_LOCAL_HEADER: Final = struct.Struct("<26xHH")  # zip: the lengths of name and extra field in front of a member
_LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)


def write(path: Path, members: Iterable[Member], *, private: bool = False) -> int:
    """Write a file whole or not at all; returns its size. The first member is the manifest.

    ``private``: for the owner's eyes only. Raises FileError: a folder, no permission, the disk is full, ...
    """
    with _said(path, "written"):
        if (kind := _kind(path)) and not stat.S_ISREG(kind):
            raise FileError(f"{path} is a folder, or no file that can be replaced; give the path of a file")
        if kind and _begins_with(path, _MODEL):
            raise FileError(f"{path} is a model; give the path of another file")
        return _write(path, members, private=private)


def _kind(path: Path) -> int:
    """The st_mode of what the path leads to, 0 where that is nothing. Raises OSError, FileError."""
    try:
        return path.resolve().stat().st_mode
    except FileNotFoundError:
        return 0
    except (ValueError, RuntimeError) as err:  # a NUL character; a loop of links, before Python 3.13
        raise FileError(f"{str(path)!r} cannot be the path of a file: {err}") from err


class _Archive(zipfile.ZipFile):
    """A zip that is not finished when something has failed: trying to would hide what it was."""

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.fp = None
        self.close()


def _write(path: Path, members: Iterable[Member], *, private: bool) -> int:
    with files.writing(path, private=private) as file:
        with _Archive(file, "w", zipfile.ZIP_STORED) as archive:
            for name, content in members:
                assert _NAME.fullmatch(name)
                info = zipfile.ZipInfo(name, _LONG_AGO)
                info.file_size = len(content)  # zipfile has to know beforehand where that is beyond 2 GB
                with archive.open(info, "w") as member:
                    member.write(content if isinstance(content, bytes) else content.data)
            archive.comment = _COMMENT + b"0" * 8
        size = int(file.seek(0, os.SEEK_END))
        crc = _crc(file, size - 8)
        file.write(b"%08x" % crc)
        return size


def _crc(file: BinaryIO, size: int) -> int:
    """CRC-32 of the first ``size`` bytes; the file stands behind them afterwards."""
    crc = 0
    file.seek(0)
    while size and (chunk := file.read(min(size, _CHUNK))):
        crc, size = zlib.crc32(chunk, crc), size - len(chunk)
    return crc


def is_ours(path: Path) -> bool:
    """Whether it is worth opening as an edgekv file: a zip. Raises FileError."""
    with _said(path, "read"):
        return _begins_with(path, _BEGIN)


def _begins_with(path: Path, begin: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(begin)) == begin


_BEGINNING: Final = 30 + len(MANIFEST)


class Stored:
    """An edgekv file that is whole. Use it as a context manager.

    Raises NotEdgekvFile, DamagedFile, FileError (no such file, a folder, no permission).
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        with _said(path, "read"):
            if (kind := _kind(path)) and not stat.S_ISREG(kind):
                raise FileError(f"{path} is a folder, or no file that can be kept; give the path of a file")
            self._file: BinaryIO = path.open("rb")
        try:
            with _said(path, "read"):
                self.size: Final[int] = os.fstat(self._file.fileno()).st_size
                self._check_whole()
                self._members = dict(self._find_members())
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _check_whole(self) -> None:
        begin = self._file.read(_BEGINNING)
        self._file.seek(max(0, self.size - _END))
        end = self._file.read(_END)
        ours_first = begin.startswith(_BEGIN) and begin.endswith(MANIFEST.encode())
        if not (ours_first or end.startswith(_COMMENT)):
            raise NotEdgekvFile(f"{self.path} is neither a session file nor a KV module of edgekv")
        if end != _COMMENT + b"%08x" % _crc(self._file, self.size - 8):
            raise self.damaged("it is truncated, or bytes of it were changed")

    def damaged(self, why: str) -> DamagedFile:
        """The error to raise for this file."""
        return DamagedFile(f"{self.path} is damaged: {why}; take another copy")

    @contextlib.contextmanager
    def held_to(self) -> Iterator[None]:
        """A block in which K and V that are not what this file says are its fault."""
        try:
            yield
        except AuditFailed as err:
            raise self.damaged(f"K and V are not what they are said to be: {err}") from err

    def _find_members(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """(name, (where it begins, size, CRC-32)) of each member; all of them lie in the file, one behind another.

        The checksum was right, so what fails here was made to fail: a member that is compressed (a zip bomb), that
        lies in another one, or that has the name of a path.
        """
        try:
            infos = zipfile.ZipFile(self._file).infolist()
        except Exception as err:  # zipfile raises whatever it stumbles over
            raise self.damaged(f"it is no zip file ({err})") from err
        if not infos or infos[0].filename != MANIFEST or len({i.filename for i in infos}) < len(infos):
            raise self.damaged("its members are not those of an edgekv file")
        end = 0
        for info in infos:
            if not _NAME.fullmatch(info.filename) or info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise self.damaged(f"its member {info.filename[:80]!r} is none that edgekv writes")
            begin = self._begin_of(info)
            if info.file_size != info.compress_size or info.header_offset < end or begin + info.file_size > self.size:
                raise self.damaged(f"its member {info.filename!r} does not lie in it")
            end = begin + info.file_size
            yield info.filename, (begin, info.file_size, info.CRC)

    def _begin_of(self, info: zipfile.ZipInfo) -> int:
        if not 0 <= info.header_offset <= self.size - _LOCAL_HEADER.size:
            raise self.damaged(f"its member {info.filename!r} does not lie in it")
        self._file.seek(info.header_offset)
        header = self._file.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size:
            raise self.damaged("it became shorter while it was read")
        name, extra = _LOCAL_HEADER.unpack(header)
        return info.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """uint8 (n,): a member. Raises DamagedFile."""
        if name not in self._members:
            raise self.damaged(f"it has no {name}")
        begin, size, crc = self._members[name]
        data = np.empty(size, np.uint8)
        with _said(self.path, "read"):
            self._file.seek(begin)
            count = self._file.readinto(data.data)  # type: ignore[attr-defined]
        if count != size or zlib.crc32(data.data) != crc:
            raise self.damaged(f"its member {name} was changed")
        return data


@contextlib.contextmanager
def _said(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise FileError(f"{path} cannot be {done}: {err.strerror or err}; what was there is unchanged") from err
