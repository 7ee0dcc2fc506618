"""How a context is opened: sizes, types, threads, and the sequences set aside."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from . import memory
from .errors import UsageError
from .folders import user_folder
from .wording import num_bytes

SCRATCH: Final = 0  # for what the engine builds aside; empty between its calls
KEEPER: Final = 1  # holds every cell of a sliding-window model, see Engine.decode
ASIDE: Final = 2  # where tokens wait while others are read, and where text for the middle is read
NUM_RESERVED: Final = 3
_MAX_SEQUENCES: Final = 256  # llama-cparams.h: LLAMA_MAX_SEQ
_MAX_THREADS: Final = 512  # ggml.h: GGML_MAX_N_THREADS; far beyond it llama.cpp dies of a stack overflow


@dataclass(frozen=True)
class Settings:
    """How a context is opened.

    n_ctx: cells, rounded up to 256. n_batch: tokens a decode call. kv_type:
    f32, f16, q8_0 or q4_0. n_threads: None for the physical cores this process may use, or the whole CPUs of a
    container's quota where those are fewer. n_sessions, n_archives: sequences set aside; sessions and forks share the
    cells, and an archive takes masked spans whose positions do not overlap. rope_freq_base, rope_freq_scale: of RoPE, 0
    for the model's own. max_parked_bytes (or text such as "64MiB"): parked spans beyond it go to ``park_folder``, those
    parked longest ago first; None for no limit, and for a folder of the user's cache. logits_bytes: logits a decode may
    keep, see max_outputs; fewer make scoring slower.

    edgekv runs on the CPU: there is no setting for a GPU, also where llama.cpp was built with support for one.
    """

    n_ctx: int = 4096
    n_batch: int = 512
    kv_type: str = "f16"
    n_threads: int | None = None
    flash_attention: bool = True
    n_sessions: int = 5  # up to 32 sequences cost no memory, see max_outputs
    n_archives: int = 4
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    max_parked_bytes: int | str | None = None
    park_folder: str | os.PathLike[str] | None = None
    logits_bytes: int = 32 * memory.MIB

    def n_sequences(self, n_archives: int | None = None) -> int:
        """Sequences of a context whose sessions have so many archives each, by default those set."""
        return NUM_RESERVED + self.n_sessions * (1 + (self.n_archives if n_archives is None else n_archives))

    def check(self) -> None:
        """Raise UsageError, with the remedy, for values llama.cpp would refuse or not survive."""
        memory.check_kv_type(self.kv_type)
        for name in ("n_ctx", "n_batch", "n_sessions", "n_archives", "logits_bytes"):
            _check_number(name, getattr(self, name), (1 << 31) - 1)
        if self.n_threads is not None:
            _check_number("n_threads", self.n_threads, _MAX_THREADS)
        if self.n_sequences() > _MAX_SEQUENCES:
            raise UsageError(f"{self.n_sequences()} sequences are wanted, llama.cpp has {_MAX_SEQUENCES}")
        _ = self.parked_limit
        for name in ("rope_freq_base", "rope_freq_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be a number above 0, or 0 for the model's own")
        if self.kv_type.startswith("q") and not self.flash_attention:
            raise UsageError(f"kv_type {self.kv_type} needs flash attention; use f16 or leave flash attention on")

    @property
    def parked_limit(self) -> int | None:
        """``max_parked_bytes`` as a number. Raises UsageError."""
        return None if self.max_parked_bytes is None else num_bytes(self.max_parked_bytes)

    @property
    def spill_folder(self) -> Path:
        """Where parked spans go that host memory has no room for; not /tmp, which may be memory itself.

        Raises FileError where none was given and the user has no home folder.
        """
        if self.park_folder is not None:
            return Path(self.park_folder)
        return user_folder("cache", "give Settings(park_folder=...) for parked spans") / "parked"

    @property
    def threads(self) -> int:
        return self.n_threads or default_threads()

    def max_outputs(self, n_vocab: int) -> int:
        """Rows of logits one decode may keep: ``logits_bytes`` worth, at least one for every sequence.

        llama.cpp aborts with fewer rows than sequences, also where a batch is smaller than that.
        """
        return max(self.n_sequences(), min(self.n_batch, max(8, self.logits_bytes // (4 * n_vocab))))


def _check_number(name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise UsageError(f"{name} must be a whole number from 1 to {most:,}, not {value!r}")


def default_threads() -> int:
    """Threads that llama.cpp is fastest with here: with more of them than CPUs they wait for each other."""
    quota = cpu_quota()
    return physical_cores() if quota is None else max(1, min(physical_cores(), int(quota)))


def cpu_quota(system: Path = Path("/")) -> float | None:
    """CPUs a container's quota (cgroup v1 or v2) leaves this process, such as 0.5; None for no quota.

    system: where /proc and /sys are.
    """
    quotas = []
    for folder in memory.cgroup_folders("cpu", system):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quotas.append(_quota_in(folder))
    return min((q for q in quotas if q > 0), default=None)


def _quota_in(folder: Path) -> float:
    """Raises OSError where that folder has no quota file, ValueError where the quota is "max"; negative for none."""
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
    else:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return int(quota) / int(period)


def physical_cores() -> int:
    """Physical cores this process may run on; threads beyond those slow llama.cpp down."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))
