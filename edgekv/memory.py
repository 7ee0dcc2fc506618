"""How much RAM a model and its cache take, told before anything is allocated, and how much there is.

Pure arithmetic on GGUF metadata. The cache figure is exact for plain attention (checked against llama.cpp's own
state blobs in the tests); weights and working buffers are estimates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .errors import UsageError

#: name -> (elements a block, bytes a block), from ggml-common.h; the types a KV cache is offered in
KV_BLOCKS: Final[dict[str, tuple[int, int]]] = {"f32": (1, 4), "f16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18)}

#: llama.cpp rounds a context up to this many cells (llama-context.cpp, GGML_PAD)
CELL_STEP: Final = 256

MIB: Final = 1 << 20
_NO_LIMIT: Final = 1 << 62


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes a session needs: the model's weights, its KV cache, and llama.cpp's working buffers."""

    weights: int
    cache: int
    buffers: int
    free: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.buffers

    @property
    def fits(self) -> bool:
        return self.total <= self.free


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


def estimate(header: Mapping[str, Any], file_size: int, n_ctx: int, kv_type: str, n_batch: int) -> MemoryEstimate:
    """What a session with ``n_ctx`` cells would need, against what is free now."""
    arch = header.get("general.architecture", "")
    width = int(header.get(f"{arch}.embedding_length", 0))
    inner = max(_numbers(header.get(f"{arch}.feed_forward_length", 0)))
    cells = cells_for(n_ctx)
    working = n_batch * (8 * width + 3 * inner) * 4 + n_batch * cells * 2 + 48 * MIB
    return MemoryEstimate(
        weights=file_size, cache=cells * kv_bytes_per_token(header, kv_type), buffers=working, free=free_ram()
    )


def largest_context(header: Mapping[str, Any], file_size: int, kv_type: str, n_batch: int) -> int:
    """The largest n_ctx whose estimate fits in free RAM, at most what the model was trained for (0: none)."""
    arch = header.get("general.architecture", "")
    n_ctx = int(header.get(f"{arch}.context_length", 4096))
    spare = estimate(header, file_size, 0, kv_type, n_batch)
    each = kv_bytes_per_token(header, kv_type) + n_batch * 2
    room = max(0, spare.free - spare.total) // max(1, each)
    return min(n_ctx, room // CELL_STEP * CELL_STEP)


def free_ram() -> int:
    """Bytes this process may still take: the machine's, a container's limit and ulimit -v, whichever is least."""
    import psutil

    used = int(psutil.Process().memory_info().vms)
    return min(int(psutil.virtual_memory().available), _cgroup_room(), max(0, _address_limit() - used))


def _address_limit() -> int:
    """ulimit -v in bytes, huge where there is none (or no such thing, as on Windows)."""
    with contextlib.suppress(ImportError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            return soft
    return _NO_LIMIT


def _cgroup_room() -> int:
    """Room below the memory limit of a cgroup (v2), huge where there is none."""
    with contextlib.suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text().rsplit("::", 1)[-1].strip().lstrip("/")
        folder = Path("/sys/fs/cgroup") / group
        limit = int((folder / "memory.max").read_text())
        return max(0, limit - int((folder / "memory.current").read_text()))
    return _NO_LIMIT


def _row_widths(header: Mapping[str, Any]) -> list[int]:
    """Elements of every K row and V row, layer by layer (a layer without attention heads has none)."""
    arch = header.get("general.architecture", "")

    def key(name: str, default: int = 0) -> list[int]:
        return _numbers(header.get(f"{arch}.{name}", default))

    layers = key("block_count")[0]
    heads = max(key("attention.head_count", 1)) or 1
    size = key("embedding_length")[0] // heads
    kv_heads = key("attention.head_count_kv", 0 if f"{arch}.ssm.state_size" in header else heads)
    kv_heads = kv_heads if len(kv_heads) > 1 else kv_heads * layers
    k_size, v_size = key("attention.key_length", size)[0], key("attention.value_length", size)[0]
    return [n * width for n in kv_heads[:layers] for width in (k_size, v_size) if n]


def _numbers(value: Any) -> list[int]:
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]
