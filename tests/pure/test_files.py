"""Files replaced as a whole, or not at all."""

from __future__ import annotations

import os
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
