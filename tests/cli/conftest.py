"""Commands as a user runs them: in this process where that is enough, else as processes with pipes and signals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgekv import cli, settings

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def edgekv(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """``edgekv("run", "--ask", "...", stdin=b"")``, through the real error boundary, on one thread."""
    monkeypatch.setattr(settings, "physical_cores", lambda: 1)
    for name in ("EDGEKV_DEBUG", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*args: object, stdin: bytes = b"") -> Done:
        result = CliRunner().invoke(cli.cli, [str(a) for a in args], input=stdin, prog_name="edgekv")
        return Done(result.exit_code, result.stdout, result.stderr)

    return invoke


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.Popen[bytes]]:
    """The same as a process of its own, with pipes."""

    def popen(*args: object, env: Mapping[str, str] | None = None, **pipes: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "edgekv", *map(str, args)]
        around = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        piped = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
        return subprocess.Popen(command, env=around, cwd=ROOT, **piped)

    monkeypatch.delenv("EDGEKV_DEBUG", raising=False)
    return popen
