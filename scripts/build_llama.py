"""Build llama-cpp-python into this Python, without the parts edgekv does not use, and show that it is working.

Standard library only: it runs before anything is installed. Extra CMake options go into CMAKE_ARGS, for example
CMAKE_ARGS="-DGGML_NATIVE=OFF". The full log is kept beside the virtual environment's other files.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

VERSION = "0.3.36"  # the newest this project was tested with; pyproject.toml says what it accepts
LOG = Path(sys.prefix) / "llama-build.log"
BYTES_A_JOB = 1 << 30  # the largest llama.cpp source needs about that much while it compiles
STEP = re.compile(r"^\s*\[(\d+)/(\d+)\]")  # how ninja counts
PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")  # how make counts


def main() -> int:
    if installed() == VERSION:
        print(f"llama-cpp-python {VERSION} is built already")
        return 0
    print(f"building llama.cpp (llama-cpp-python {VERSION}) with {jobs()} jobs; the log is {LOG}", flush=True)
    began = time.monotonic()
    code = build()
    if code == 0:
        print(f"built in {time.monotonic() - began:.0f} s")
    return code


def installed() -> str | None:
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return None


def jobs() -> int:
    """Compilers at once: one a core, fewer where memory is short, as on small boards."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return cores
    return max(1, min(cores, ram // BYTES_A_JOB))


def environment() -> dict[str, str]:
    only = Path(__file__).with_name("llama-only.cmake").resolve()
    options = f"-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_INCLUDE={only} {os.environ.get('CMAKE_ARGS', '')}"
    return {
        **os.environ,
        "CMAKE_ARGS": options.strip(),
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(jobs())),
    }


def build() -> int:
    """Run pip, show how far it is, and on failure the end of its log."""
    command = [sys.executable, "-m", "pip", "install", "--verbose", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", f"llama-cpp-python=={VERSION}"]
    last: deque[str] = deque(maxlen=25)
    show = Progress()
    with (
        LOG.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            log.write(line)
            last.append(line)
            show.line(line)
    show.end()
    if pip.returncode:
        sys.stderr.write("".join(last))
        sys.stderr.write(f"\nthe build failed; the whole log is {LOG}. It needs a C and C++ compiler (gcc or clang).\n")
    return pip.returncode


class Progress:
    """One moving line on a terminal, a line every tenth elsewhere."""

    def __init__(self) -> None:
        self._tenth = 0
        self._drawn = False

    def line(self, text: str) -> None:
        if (percent := fraction(text)) is None:
            return
        if sys.stdout.isatty():
            print(f"\r  compiling {percent:3d} %", end="", flush=True)
            self._drawn = True
        elif percent // 10 > self._tenth:
            self._tenth = percent // 10
            print(f"  compiling {percent} %", flush=True)

    def end(self) -> None:
        if self._drawn:
            print()


def fraction(line: str) -> int | None:
    """The percentage a line of ninja or make tells, None for other lines."""
    if match := STEP.match(line):
        return 100 * int(match[1]) // int(match[2])
    if match := PERCENT.match(line):
        return int(match[1])
    return None


if __name__ == "__main__":
    sys.exit(main())
