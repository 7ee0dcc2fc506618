"""How much RAM a model and its cache take, told before anything is allocated, and how much there is.

Pure arithmetic on GGUF metadata. The cache figure is exact for plain attention (checked against llama.cpp's own
state blobs in the tests). Weights, buffers and the program itself are upper bounds, measured against SmolLM2, Gemma 3
and the tiny models on Linux: a process that fills its cache and generates takes 0.75 to 1 times what is said here.

What is promised for which limit: ``MemoryEstimate.process`` is resident memory, what a board has and what a container
(memory cgroup) counts. ``ulimit -v`` counts address space: thread stacks, OpenBLAS's and glibc's reserves too, of
which most is never touched. ``MemoryEstimate.address_space`` is the limit that is enough there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .errors import TooLarge, UsageError

#: name -> (elements a block, bytes a block), from ggml-common.h; the types a KV cache is offered in
KV_BLOCKS: Final[dict[str, tuple[int, int]]] = {"f32": (1, 4), "f16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18)}

#: llama.cpp rounds a context up to this many cells (llama-context.cpp, GGML_PAD)
CELL_STEP: Final = 256

MIB: Final = 1 << 20

#: Python, numpy, llama.cpp's code and edgekv, resident: 54 MiB measured, most of it in files that may be shared
PROGRAM: Final = 60 * MIB
#: bytes of llama.cpp's tables for one token of the vocabulary: 180 (SentencePiece) to 292 (BPE with its merges)
VOCABULARY: Final = 300
#: address space llama.cpp needs beside the file to open it, and again to be asked what it can do
OPENING: Final = 32 * MIB

SEQUENCES: Final = 28  # of the default settings; llama.cpp keeps a row of logits for each
_FIXED: Final = 6 * MIB  # graphs, work areas of the threads, the ledger of edgekv
_PROGRAM_SPACE: Final = 136 * MIB  # address space of all that with one OpenBLAS thread: 127 measured
_BLAS_SPACE: Final = 40 * MIB  # of every further OpenBLAS thread: 32 for its buffer, 8 for its stack
_ARENA: Final = 64 * MIB  # glibc reserves it for a thread's first malloc (HEAP_MAX_SIZE); it does without if it must
_LOADING: Final = 36 * MIB  # llama.cpp's backend, and what it maps only while it reads a file
_NO_LIMIT: Final = 1 << 62


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes a session needs, at most, to read, generate and edit in a cache that is full.

    weights: the file, llama.cpp's vocabulary tables and what it repacked. cache: K and V. buffers: llama.cpp's and
    edgekv's working memory. program: Python and the libraries. free: what there is here, see :func:`free_ram`.
    scoring: what ``score()`` and ``logits_over()`` take on top while they run; in no total.
    """

    weights: int
    cache: int
    buffers: int
    free: int
    program: int = PROGRAM
    scoring: int = 0

    @property
    def total(self) -> int:
        """What the session adds to a Python process: weights, cache and buffers."""
        return self.weights + self.cache + self.buffers

    @property
    def process(self) -> int:
        """Resident memory of a process that does nothing else: what a memory budget and a container limit hold."""
        return self.total + self.program

    @property
    def fits(self) -> bool:
        return self.total <= self.free

    def address_space(self, n_threads: int) -> int:
        """The ``ulimit -v`` such a process needs, in bytes, with that many threads of llama.cpp; on Linux."""
        # Long batches are decoded in a thread of their own, and each thread that decodes has helpers of its own.
        # glibc reserves an arena twice over for a moment, to align it.
        threads = (2 * n_threads - 1) * (_stack() + _ARENA) + _ARENA
        return program_space() + _LOADING + min(self.weights // 4, 32 * MIB) + self.total + threads


def kv_bytes_per_token(header: Mapping[str, Any], kv_type: str) -> int:
    """Bytes of K and V that one token holds over all layers; 0 for models without attention cells."""
    block, size = KV_BLOCKS[check_kv_type(kv_type)]
    return sum((width + block - 1) // block * size for width in _row_widths(header))


def check_kv_type(kv_type: str) -> str:
    if kv_type not in KV_BLOCKS:
        raise UsageError(f"kv_type {kv_type!r} is unknown; choose {', '.join(KV_BLOCKS)}")
    return kv_type


def cells_for(n_ctx: int) -> int:
    """The number of cells llama.cpp makes of a wanted context length."""
    return -(-n_ctx // CELL_STEP) * CELL_STEP


def check_head_size(header: Mapping[str, Any], kv_type: str) -> bool:
    """Whether llama.cpp can make a cache of that type: a head is a whole number of blocks (llama-context.cpp)."""
    block, _ = KV_BLOCKS[check_kv_type(kv_type)]
    return all(size % block == 0 for size in head_sizes(header))


def estimate(
    header: Mapping[str, Any],
    file_size: int,
    n_ctx: int,
    kv_type: str,
    n_batch: int,
    n_outputs: int = SEQUENCES,
    *,
    flash_attention: bool = True,
    free: int | None = None,
) -> MemoryEstimate:
    """What a session with ``n_ctx`` cells would need, against what is free now.

    n_outputs: rows of logits a decode keeps, by default one for each sequence. free: to ask for it only once.
    """
    cells = cells_for(n_ctx)
    logits = 4 * _key(header, "vocab_size") * n_outputs
    layers = _layer_bytes(header, cells, n_batch, flash_attention)
    shifted = cells * max(_row_widths(header), default=0) * 8 if kv_type.startswith("q") else 0
    return MemoryEstimate(
        weights=file_size,
        cache=cells * kv_bytes_per_token(header, kv_type),
        buffers=max(layers, logits, shifted) + logits + 128 * cells + _FIXED,
        free=free_ram() if free is None else free,
        scoring=4 * logits,
    )


def _layer_bytes(header: Mapping[str, Any], cells: int, n_batch: int, flash_attention: bool) -> int:
    """llama.cpp's compute buffer while it is in a layer: activations, the mask, and without flash attention K times Q.

    The factors are the smallest round ones above what it reserves for the models of the tests. It rounds a batch up to
    a multiple of the sequences.
    """
    width, heads = _key(header, "embedding_length"), _key(header, "attention.head_count")
    queries = max(width, heads * _key(header, "attention.key_length"))
    mask = cells * (2 if flash_attention else 4) * (2 if _key(header, "attention.sliding_window") else 1)
    scores = 0 if flash_attention else cells * heads * 4
    return (n_batch + SEQUENCES) * (4 * (4 * width + 4 * queries + 3 * _inner(header)) + mask + scores)


def _inner(header: Mapping[str, Any]) -> int:
    """The widest activation between two layers: of the feed-forward part, its experts or a state-space block."""
    experts = _key(header, "expert_feed_forward_length") * _key(header, "expert_used_count")
    return max(_key(header, "feed_forward_length"), experts, 2 * _key(header, "ssm.inner_size"))


def largest_context(
    header: Mapping[str, Any],
    file_size: int,
    kv_type: str,
    n_batch: int,
    n_outputs: int = 0,
    *,
    flash_attention: bool = True,
) -> int:
    """The largest n_ctx whose estimate fits in free RAM, at most what the model was trained for (0: none)."""
    free, most = free_ram(), _key(header, "context_length") or 4096

    def fits(n_ctx: int) -> bool:
        need = estimate(
            header, file_size, n_ctx, kv_type, n_batch, n_outputs, flash_attention=flash_attention, free=free
        )
        return need.fits

    return largest_that(most, fits)


def largest_that(most: int, fits: Callable[[int], bool]) -> int:
    """The largest n_ctx up to ``most``, in steps of 256 cells, that fits; 0 when none does. Fewer cells need less."""
    low, high = 0, -(-most // CELL_STEP)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(min(most, middle * CELL_STEP)) else (low, middle - 1)
    return min(most, low * CELL_STEP)


# -- what there is ------------------------------------------------------------------------------------------------


def room_to_load(header: Mapping[str, Any], file_size: int) -> int:
    """Free bytes before a model is loaded: less below ulimit -v, where the tables of the file are mapped twice a while.

    900 bytes for a token of the vocabulary were measured at most; it is not always told in the header.
    """
    tables = 3 * VOCABULARY * _key(header, "vocab_size") or 64 * MIB
    return min(free_ram(), max(0, address_room() - OPENING - min(file_size, tables)))


def free_ram() -> int:
    """Bytes this process may still take: the machine's, a container's limit and ulimit -v, whichever is least."""
    import psutil

    return min(int(psutil.virtual_memory().available), _cgroup_room(), address_room())


def check_program_fits() -> None:
    """Raise TooLarge where ``ulimit -v`` has no room for numpy and llama.cpp, which would end the process."""
    limit, need = _address_limit(), program_space()
    if limit < need:
        raise TooLarge(
            f"ulimit -v is {limit / 1e6:,.0f} MB and Python with numpy and llama.cpp needs {need / 1e6:,.0f} MB of "
            "address space before any model is opened; raise it, or set OPENBLAS_NUM_THREADS=1"
        )


def program_space() -> int:
    """Address space of Python and the libraries, in bytes: more with every thread OpenBLAS starts."""
    return _PROGRAM_SPACE + (_blas_threads() - 1) * _BLAS_SPACE


def _blas_threads() -> int:
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name, "").strip().isdigit():
            return max(1, min(_cpus(), int(os.environ[name])))
    return min(64, _cpus())  # numpy's OpenBLAS is built for 64


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def address_room() -> int:
    """Bytes of address space below ulimit -v, the stacks of llama.cpp's threads and some heap set aside."""
    limit = _address_limit()
    if limit == _NO_LIMIT:
        return limit
    import psutil

    used = int(psutil.Process().memory_info().vms)
    return max(0, limit - used - (_cpus() - 1) * _stack() - 8 * MIB)


def _address_limit() -> int:
    """ulimit -v in bytes, huge where there is none (or no such thing, as on Windows)."""
    return _soft_limit("RLIMIT_AS") or _NO_LIMIT


def _stack() -> int:
    """Address space of a new thread's stack: ulimit -s, 8 MiB where that is unlimited."""
    return _soft_limit("RLIMIT_STACK") or 8 * MIB


def _soft_limit(name: str) -> int:
    with contextlib.suppress(ImportError, AttributeError):
        import resource

        soft, _ = resource.getrlimit(getattr(resource, name))
        return 0 if soft == resource.RLIM_INFINITY else soft
    return 0


def _cgroup_room() -> int:
    """Room below the memory limits of this process's cgroups (v1 and v2) and all above them; huge with no limit."""
    rooms = [_NO_LIMIT]
    for folder in cgroup_folders("memory"):
        with contextlib.suppress(OSError, ValueError):
            rooms.append(_room_in(folder))
    return min(rooms)


def cgroup_folders(controller: str, system: Path = Path("/")) -> Iterator[Path]:
    """Where the limits of a controller ("memory", "cpu") are, in version 1 and 2: of this process's group, and of all
    above it. In a container the host's path is not there, and the root has the container's own.

    system: where /proc and /sys are.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = system / "sys/fs/cgroup" / (controller if controllers else "")
            folder = root / group.lstrip("/")
            yield from (folder, *(above for above in folder.parents if above.is_relative_to(root)))


def _room_in(folder: Path) -> int:
    """Raises OSError where that folder has no limit file, ValueError where the limit is "max"."""
    v2 = (folder / "memory.max").exists()
    limit = int((folder / ("memory.max" if v2 else "memory.limit_in_bytes")).read_text())
    used = int((folder / ("memory.current" if v2 else "memory.usage_in_bytes")).read_text())
    return max(0, limit - used + _reclaimable((folder / "memory.stat").read_text()))


def _reclaimable(stat: str) -> int:
    """Bytes of files that were read and that nobody has mapped: the kernel drops them when room is wanted."""
    told = {name: int(value) for name, _, value in (line.partition(" ") for line in stat.splitlines())}
    prefix = "total_" if "total_inactive_file" in told else ""  # v1: with the groups below
    files = told.get(f"{prefix}inactive_file", 0) + told.get(f"{prefix}active_file", 0)
    mapped = told.get(f"{prefix}mapped_file", told.get("file_mapped", 0))
    return max(0, files - mapped)


# -- what the metadata says ------------------------------------------------------------------------------------------


def _key(header: Mapping[str, Any], name: str, default: int = 0) -> int:
    """The largest value of one of the architecture's own keys, which some give layer by layer."""
    return max(_numbers(header.get(f"{header.get('general.architecture', '')}.{name}", default)), default=default)


def head_sizes(header: Mapping[str, Any]) -> tuple[int, int]:
    """Elements of one K head and one V head; MLA keeps no V (llama_hparams::is_mla)."""
    size = _key(header, "embedding_length") // (_key(header, "attention.head_count") or 1)
    if _key(header, "attention.key_length_mla") and _key(header, "attention.value_length_mla"):
        return _key(header, "attention.key_length") or size, 0
    return _key(header, "attention.key_length") or size, _key(header, "attention.value_length") or size


def _row_widths(header: Mapping[str, Any]) -> list[int]:
    """Elements of every K row and V row, layer by layer (a layer without attention heads has none)."""
    arch = header.get("general.architecture", "")
    layers = _numbers(header.get(f"{arch}.block_count", 0))[0]
    heads = _key(header, "attention.head_count") or 1
    given = header.get(f"{arch}.attention.head_count_kv", 0 if f"{arch}.ssm.state_size" in header else heads)
    kv_heads = given if isinstance(given, list) and len(given) > 1 else _numbers(given) * layers
    return [int(n) * width for n in kv_heads[:layers] for width in head_sizes(header) if n]


def _numbers(value: Any) -> list[int]:
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]
