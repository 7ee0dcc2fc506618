"""Files replaced as a whole, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edgekv import files


def test_a_file_is_there_whole_with_the_umask_s_mode(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    before = os.umask(0o027)
    try:
        assert files.replace(path, b"new") == path
    finally:
        os.umask(before)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("no room"), KeyboardInterrupt()])
def test_what_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)):
        files.replace(path, b"new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        files.replace(tmp_path / "taken", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_what_a_killed_writer_left_goes_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "chat.kvs"
    kill = (
        "import os, sys; from pathlib import Path; from edgekv import files\n"
        "with files.writing(Path(sys.argv[1])) as file:\n    file.write(b'half'); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", kill, path], check=False).returncode == 9
    assert len(list(tmp_path.iterdir())) == 1
    others = [".chat.kvs.1-0.tmp", ".chat.kvs.tmp", ".other.kvs.0123456789abcdef.tmp", "chat.kvs.0123456789abcdef.tmp"]
    for name in others:
        (tmp_path / name).write_text("another program's")
    (tmp_path / ".chat.kvs.0123456789abcdef.tmp").mkdir()
    files.replace(path, b"new")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, path.name, ".chat.kvs.0123456789abcdef.tmp"])


@pytest.mark.skipif(os.name != "posix", reason="there is no flock")
def test_the_file_of_a_writer_that_lives_stays_whatever_its_age(tmp_path: Path) -> None:
    """Neither process ids, which other containers have too, nor clocks say who lives."""
    path = tmp_path / "chat.kvs"
    with files.writing(path) as first:
        first.write(b"first")
        (temporary,) = tmp_path.iterdir()
        os.utime(temporary, (0, 0))
        files.replace(path, b"second")
        assert temporary.exists()
        code = "import sys; from pathlib import Path; from edgekv import files; files.replace(Path(sys.argv[1]), b'3')"
        subprocess.run([sys.executable, "-c", code, path], check=True)
        assert temporary.exists()
        assert path.read_bytes() == b"3"
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_many_writers_of_one_file(tmp_path: Path) -> None:
    """Each succeeds, and one of them is there."""
    path, failed = tmp_path / "chat.kvs", []

    def write(number: int) -> None:
        try:
            for _ in range(20):
                files.replace(path, str(number).encode() * 1000)
        except OSError as err:
            failed.append(err)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert set(path.read_bytes()) in [{ord(str(n))} for n in range(4)]
    assert list(tmp_path.iterdir()) == [path]
