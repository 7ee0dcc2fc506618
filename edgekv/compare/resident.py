"""Peak resident memory: of an arm where the system can count anew (Linux), else of the process so far."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Final

import psutil

_CLEAR: Final = Path("/proc/self/clear_refs")  # proc(5): writing 5 sets the high-water mark to what is resident now
_STATUS: Final = Path("/proc/self/status")


def count_anew() -> None:
    """From here on :func:`peak` is the most since now, where the system lets a process do that."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")


def peak() -> int:
    """Bytes: the most resident memory since :func:`count_anew`, or of the process; what is resident now where no
    system call tells."""
    with contextlib.suppress(OSError):
        if found := re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text("ascii")):
            return int(found[1]) * 1024
    memory = psutil.Process().memory_info()
    return int(getattr(memory, "peak_wset", memory.rss))  # Windows keeps the process's peak
