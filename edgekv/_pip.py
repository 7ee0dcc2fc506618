"""Downloading one wheel with the pip of this Python, watching it while it works.

pip does the network part so that the user's own index, proxy, mirror and credential settings apply.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from edgekv.errors import FetchFailed

_COMMAND = ["-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input"]
_POLL_S = 0.1
_TAIL_LINES = 4


def check_pip() -> None:
    """Raises FetchFailed, with the way out, when this Python has no pip."""
    if importlib.util.find_spec("pip") is None:
        raise FetchFailed(f"this Python has no pip to download with; run: {sys.executable} -m ensurepip")


def download(package: str, tmp: Path, watch: Callable[[int], None]) -> Path:
    """The wheel of ``package`` ("name==version"), somewhere in ``tmp``.

    ``watch`` gets the bytes that have arrived, about ten times a second, also while none arrive.
    Raises FetchFailed with pip's last lines. pip has ended when this returns or raises.
    """
    room = Path(tempfile.mkdtemp(prefix="pip-", dir=tmp))
    out, log = room / "out", tmp / "pip.log"
    with log.open("wb") as talk:
        code = _wait(_start(package, room, out, talk.fileno()), lambda: watch(_bytes_in(room)))
    wheels = list(out.glob("*.whl"))
    if code or len(wheels) != 1:
        raise FetchFailed(f"pip could not download {package}. It said:\n{_tail(log)}")
    return wheels[0]


def _start(package: str, room: Path, out: Path, talk: int) -> subprocess.Popen[bytes]:
    """pip streams into TMPDIR first: in our folder that is the right disk, can be watched, and vanishes."""
    environ = {
        **os.environ,
        "TMPDIR": str(room),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_PROGRESS_BAR": "off",
    }
    command = [sys.executable, *_COMMAND, "-d", str(out), package]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=talk, stderr=talk, env=environ)


def _wait(pip: subprocess.Popen[bytes], tick: Callable[[], None]) -> int:
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return pip.wait(_POLL_S)
            tick()
    finally:
        if pip.poll() is None:
            pip.kill()
            pip.wait()


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip removes files while we look
                total += Path(root, name).stat().st_size
    return total


def _tail(log: Path) -> str:
    text = log.read_text("utf-8", errors="replace")
    lines = [f"  {line.rstrip()}" for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-_TAIL_LINES:]) or "  (nothing)"
