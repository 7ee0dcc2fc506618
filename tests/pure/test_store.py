"""Store: a file of edgekv's is whole and its own, or refused with the reason; and it is replaced whole or not at
all."""

from __future__ import annotations

import io
import itertools
import os
import random
import struct
import sys
import threading
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edgekv import errors, store
from edgekv.store import Member, Stored
from helpers import python

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="POSIX")
MEMBERS: list[Member] = [
    ("manifest.json", b'{"kind":"session"}'),
    ("cells/0", np.arange(64, dtype=np.uint8)),
    ("logits/next", b"\1\2\3\4"),
    ("state", b""),
]
REFUSED = (errors.NotEdgekvFile, errors.DamagedFile)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file.kv"
    store.write(path, MEMBERS)
    return path


def whole(path: Path) -> dict[str, bytes]:
    """Every member, read and checked."""
    with Stored(path) as stored:
        return {name: stored.read(name).tobytes() for name, _ in MEMBERS if name in stored}


def sealed(data: bytes) -> bytes:
    """A zip, with the checksum that edgekv would write behind it."""
    comment = b"edgekv crc32 " + b"0" * 8
    if not data.endswith(comment):
        data = data[:-2] + struct.pack("<H", len(comment)) + comment
    return data[:-8] + b"%08x" % zlib.crc32(data[:-8])


def zipped(members: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


GOOD = [("manifest.json", b"{}"), ("cells/0", b"K and V")]
CENTRAL = b"PK\1\2"
END = b"PK\5\6"


def patched(at: int, layout: str, value: int, *, member: int = 1) -> bytes:
    """A sealed zip whose central directory says something else about a member."""
    data = bytearray(zipped(GOOD))
    start = -1
    for _ in range(member + 1):
        start = data.index(CENTRAL, start + 1)
    struct.pack_into("<" + layout, data, start + at, value)
    return sealed(bytes(data))


def with_zip64(size: int, offset: int) -> bytes:
    """The second member says in a zip64 field where it lies and how large it is."""
    data = zipped(GOOD)
    second = data.index(CENTRAL, data.index(CENTRAL) + 1)
    end = data.index(END)
    entry = bytearray(data[second:end])
    struct.pack_into("<II", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<I", entry, 42, 0xFFFFFFFF)
    extra = struct.pack("<HHQQQ", 1, 24, size, size, offset)
    struct.pack_into("<H", entry, 30, len(extra))
    tail = bytearray(data[end:])
    struct.pack_into("<I", tail, 12, end - data.index(CENTRAL) + len(extra))
    return sealed(data[:second] + bytes(entry) + extra + bytes(tail))


# ---- what is written is what is read --------------------------------------------------------------------------------


def test_what_was_written_is_read(path: Path) -> None:
    assert whole(path) == {name: bytes(content) for name, content in MEMBERS}
    assert path.stat().st_size == store.write(path, MEMBERS)
    with zipfile.ZipFile(path) as archive:  # any unzip program can look into it
        assert archive.testzip() is None
    with Stored(path) as stored, pytest.raises(errors.DamagedFile, match="it has no cells/7"):
        stored.read("cells/7")


def test_a_member_beyond_what_a_plain_zip_can_hold(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 50)
    store.write(path, MEMBERS)
    monkeypatch.undo()
    assert whole(path) == {name: bytes(content) for name, content in MEMBERS}


# ---- damage ---------------------------------------------------------------------------------------------------------


def test_truncated_anywhere(path: Path) -> None:
    for size in reversed(range(path.stat().st_size)):
        os.truncate(path, size)
        with pytest.raises(REFUSED, match=r"file\.kv"):
            Stored(path)


@POSIX
def test_every_bit_counts(path: Path) -> None:
    data = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for at, bit in itertools.product(range(len(data)), range(8)):
            os.pwrite(file.fileno(), bytes([data[at] ^ 1 << bit]), at)
            with pytest.raises(errors.DamagedFile, match="bytes of it were changed"):
                Stored(path)
            os.pwrite(file.fileno(), data[at : at + 1], at)
    assert path.read_bytes() == data


def test_bytes_before_behind_and_between(path: Path) -> None:
    data = path.read_bytes()
    for changed in (b"\0" + data, data + b"\0", data[:99] + b"\0" + data[99:], data + data, data[::-1]):
        path.write_bytes(changed)
        with pytest.raises(REFUSED):
            Stored(path)


@pytest.mark.parametrize("content", [b"", b"PK", b"GGUF" + bytes(99), b"{}", zipped(GOOD[1:]), bytes(1 << 20)])
def test_another_kind_of_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(errors.NotEdgekvFile, match="neither a session file nor a KV module"):
        Stored(path)


def test_changed_while_it_is_open(path: Path) -> None:
    content = np.full(1 << 16, 7, np.uint8)
    store.write(path, [MEMBERS[0], *((f"cells/{i}", content) for i in range(3))])
    with Stored(path) as stored:
        data = bytearray(path.read_bytes())
        data[1 << 15] ^= 1
        path.write_bytes(data)
        with pytest.raises(errors.DamagedFile, match="its member cells/0 was changed"):
            stored.read("cells/0")
        assert stored.read("cells/1").tobytes() == content.tobytes()
        path.write_bytes(data[:100])
        with pytest.raises(errors.DamagedFile, match="its member cells/2 was changed"):
            stored.read("cells/2")
        path.unlink()
        with pytest.raises(errors.DamagedFile):
            stored.read("cells/0")
    with pytest.raises(errors.FileError, match="No such file"):
        Stored(path)


# ---- a right checksum, and a zip that was made to hurt --------------------------------------------------------------

HOSTILE = {
    "a path up": (zipped([*GOOD, ("../x", b"x")]), "none that edgekv writes"),
    "an absolute path": (zipped([*GOOD, ("/etc/x", b"x")]), "none that edgekv writes"),
    "a path up inside": (zipped([*GOOD, ("cells/../../x", b"x")]), "none that edgekv writes"),
    "a drive": (zipped([*GOOD, ("c:\\x", b"x")]), "none that edgekv writes"),
    "a folder": (zipped([*GOOD, ("cells/", b"")]), "none that edgekv writes"),
    "an escape sequence": (zipped([*GOOD, ("\x1b[2J", b"")]), "none that edgekv writes"),
    "deflated": (zipped(GOOD, zipfile.ZIP_DEFLATED), "none that edgekv writes"),
    "lzma": (zipped(GOOD, zipfile.ZIP_LZMA), "none that edgekv writes"),
    "encrypted": (patched(8, "H", 1), "none that edgekv writes"),
    "the manifest is not first": (zipped(GOOD[::-1]), "neither a session file|not those of an edgekv file"),
    "no member": (zipped([]), "not those of an edgekv file"),
    "larger than the file": (patched(24, "I", 1 << 30), "does not lie in it"),
    "both sizes larger": (with_zip64(1 << 30, 0), "does not lie in it"),
    "64 bits of size": (with_zip64((1 << 64) - 1, 43), "does not lie in it|no zip file"),
    "64 bits of offset": (with_zip64(7, (1 << 64) - 1), "does not lie in it|no zip file"),
    "63 bits of offset": (with_zip64(7, (1 << 63) - 1), "does not lie in it|no zip file"),
    "one size differs": (patched(20, "I", 6), "does not lie in it"),
    "behind the end": (patched(42, "I", 1 << 20), "does not lie in it"),
    "in another member": (patched(42, "I", 0), "does not lie in it"),
    "another compression": (patched(10, "H", 99), "none that edgekv writes"),
    "another version": (patched(6, "H", 99), "no zip file"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_zip_that_was_made_to_hurt(path: Path, name: str) -> None:
    data, why = HOSTILE[name]
    path.write_bytes(sealed(data))
    with pytest.raises(REFUSED, match=why):
        Stored(path)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_one_name_twice(path: Path) -> None:
    path.write_bytes(sealed(zipped([*GOOD, GOOD[1]])))
    with pytest.raises(errors.DamagedFile, match="not those of an edgekv file"):
        Stored(path)


def test_a_zip_bomb_is_not_unpacked(path: Path) -> None:
    bomb = zipped([GOOD[0], ("cells/0", bytes(64 << 20))], zipfile.ZIP_DEFLATED)
    path.write_bytes(sealed(bomb))
    tracemalloc.start()
    try:
        with pytest.raises(errors.DamagedFile):
            Stored(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_random_central_directories(path: Path) -> None:
    """Whatever the directory says: refused, or every member lies in the file and has its checksum."""
    rng = random.Random(7)
    good = zipped(GOOD)
    outcomes = set()
    for _ in range(600):
        data = bytearray(good)
        for _ in range(rng.choice([1, 1, 2, 5])):
            data[rng.randrange(good.index(CENTRAL), len(data))] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        with path.open("r+b") as file:  # much faster than a new file
            file.truncate(file.write(sealed(bytes(data))))
        try:
            outcomes.add(len(whole(path)))
        except REFUSED as err:
            outcomes.add(type(err).__name__)
    assert {"DamagedFile", 2} <= outcomes


# ---- no file, or none of its own ------------------------------------------------------------------------------------


def unusable(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "away").symlink_to(tmp_path / "missing/x")
    os.mkfifo(tmp_path / "fifo")
    yield tmp_path, "is a folder"
    yield tmp_path / "fifo", "no file that can be"
    yield Path("/dev/zero"), "no file that can be"
    yield Path("/dev/full"), "no file that can be"
    yield Path("/dev/null"), "no file that can be"
    yield tmp_path / "missing/x", "No such file"
    yield tmp_path / "file/x", "Not a directory"
    yield tmp_path / "loop", "loop"
    yield tmp_path / "away", "No such file"
    yield tmp_path / ("x" * 300), "too long"
    yield tmp_path / "a\0b", "null"


@POSIX
def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    for path, why in unusable(tmp_path):
        kind = os.lstat(path).st_mode if "\0" not in str(path) and len(path.name) < 300 and os.path.lexists(path) else 0
        for call in (Stored, lambda path: store.write(path, MEMBERS)):
            with pytest.raises(errors.FileError, match=f"(?i){why}"):
                call(path)
        assert not kind or os.lstat(path).st_mode == kind
    assert sorted(os.listdir(tmp_path)) == ["away", "fifo", "file", "loop"]


@POSIX
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become nobody")
def test_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[: len(tmp_path.parents) - 2]:
        parent.chmod(parent.stat().st_mode | 0o055)
    path = tmp_path / "file.kv"
    store.write(path, MEMBERS, private=True)
    code = """
import os, sys
from pathlib import Path
from edgekv import errors, store
path = Path(sys.argv[1])
os.setgid(65534); os.setuid(65534)
for call in (store.Stored, lambda p: store.write(p, [("manifest.json", b"{}")])):
    try: call(path)
    except errors.FileError as err: print(err)
"""
    done = python(code, path)
    assert done.stdout.count("Permission denied") == 2, done.stderr
    assert whole(path) == {name: bytes(content) for name, content in MEMBERS}


# ---- writing --------------------------------------------------------------------------------------------------------


def failing(error: BaseException) -> Iterator[Member]:
    yield from MEMBERS[:2]
    raise error


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("no"), OSError(28, "No space left"), MemoryError()]
)
def test_what_fails_half_way_leaves_the_old_file(path: Path, error: BaseException) -> None:
    before = path.read_bytes()
    with pytest.raises(errors.FileError if isinstance(error, OSError) else type(error)):
        store.write(path, failing(error))
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@POSIX
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277, 0o777])
def test_private_whatever_the_umask(path: Path, umask: int) -> None:
    path.chmod(0o644)
    before = os.umask(umask)
    try:
        store.write(path, MEMBERS, private=True)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


@POSIX
def test_a_link_stays_and_what_it_leads_to_is_replaced(path: Path) -> None:
    folder = path.parent / "links"
    folder.mkdir()
    link, dangling = folder / "link.kv", folder / "dangling.kv"
    link.symlink_to(path)
    dangling.symlink_to(path.parent / "new.kv")
    for at in (link, dangling):
        store.write(at, MEMBERS[:1])
        assert at.is_symlink()
        assert list(whole(at)) == ["manifest.json"]
    assert sorted(os.listdir(path.parent)) == ["file.kv", "links", "new.kv"]


@POSIX
def test_nothing_is_written_through_a_link_beside_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder others can write to, somebody may guess the name of the temporary file."""
    from edgekv import files

    precious = path.parent / "precious"
    precious.write_text("mine")
    names = iter(["a" * 16, "b" * 16])
    monkeypatch.setattr(files.secrets, "token_hex", lambda _size: next(names))
    planted = path.with_name(f".file.kv.{'a' * 16}.tmp")
    planted.symlink_to(precious)
    with pytest.raises(errors.FileError, match="exists"):
        store.write(path, MEMBERS)
    store.write(path, MEMBERS[:1])
    assert precious.read_text() == "mine"
    assert list(whole(path)) == ["manifest.json"]


def test_two_threads_write_one_path(path: Path) -> None:
    contents = [bytes([i]) * (1 << 18) for i in (1, 2)]
    wrong: list[object] = []

    def repeat(content: bytes) -> Callable[[], None]:
        def run() -> None:
            try:
                for _ in range(10):
                    store.write(path, [("manifest.json", b"{}"), ("cells/0", content)])
                    with Stored(path) as stored:
                        assert stored.read("cells/0").tobytes() in contents
            except BaseException as err:
                wrong.append(err)

        return run

    threads = [threading.Thread(target=repeat(content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert os.listdir(path.parent) == [path.name]
