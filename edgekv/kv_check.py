"""Whether a quantised KV cache works on this CPU with this build of llama.cpp: a tiny model says, at its first use.

The tiny model has heads of the sizes that matter, as they choose llama.cpp's code. Its logits over a text with a
quantised cache are compared with those over an f16 one: rounding moves them by a known little, wrong code by nats.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from . import _llama, files, memory, tiny
from ._llama import lib
from .batch import Batch, Chunk
from .errors import DecodeFailed, EdgekvError, TooLarge
from .folders import user_folder
from .model import Model, TokenArray
from .numerics import kl_divergence
from .tiny.gguf import Meta, encode
from .tiny.weights import SHARP, Weights

_TEXT: Final = "The pump at the north gate lost pressure twice, and the spare valve is kept in hall 4."
_SINGLE: Final = 4  # tokens read one by one, as generating does
#: Mean KL, in nats, beyond which a cache of that type is wrong, not rounded: a healthy one is at .001 and .1, one whose
#: keys are turned by a wrong RoPE at 2.3, whatever the head size.
LIMITS: Final = {"q8_0": 0.05, "q4_0": 0.5}
_MOST: Final = 64  # results that are kept

_passed: set[str] = set()  # in this process
_log: Final = logging.getLogger("edgekv")


def note(model: Model, kv_type: str) -> str:
    """What to tell the user of a cache of that type for this model, '' where it works.

    It is tried once on a machine with a build of llama.cpp; that it works is kept in the user's cache folder, where
    there is one. Never raises: a test that cannot be made tells nothing.
    """
    if kv_type not in LIMITS:
        return ""
    sizes = sorted({size for size in memory.head_sizes(model.header) if size})
    return next(filter(None, (_note(kv_type, size) for size in sizes)), "")


def _note(kv_type: str, head_size: int) -> str:
    try:
        key = f"{_machine()} {kv_type} {head_size}"
        if key in _passed or key in _kept():
            return ""
        kl = measure(kv_type, head_size)
    except (EdgekvError, OSError, ValueError) as err:
        _log.debug("a %s cache could not be tried with heads of %d: %s", kv_type, head_size, err)
        return ""
    if not kl <= LIMITS[kv_type]:  # NaN is no pass
        return (
            f"a {kv_type} cache garbles on this CPU with this build of llama.cpp (mean KL {kl:.2g} nats from an f16 "
            f"cache on a test model, at most {LIMITS[kv_type]:g} is rounding): use kv_type='f16', and see edgekv doctor"
        )
    _keep(key)
    return ""


def measure(kv_type: str, head_size: int) -> float:
    """Mean KL, in nats, from an f16 cache to one of that type, on a tiny model with heads of that size.

    inf where logits are not finite. Raises EdgekvError, OSError where llama.cpp cannot open such a cache, or no
    temporary file can be written.
    """
    with (
        tempfile.TemporaryDirectory(prefix="edgekv-") as folder,
        Model(_write(Path(folder) / "tiny.gguf", head_size)) as model,
    ):
        reference, other = _logits(model, "f16"), _logits(model, kv_type)
    return float(kl_divergence(reference, other).mean()) if np.isfinite(other).all() else float("inf")


def _write(path: Path, size: int) -> Path:
    """The tiny llama with 4 heads of another size, over 2 of K and V."""
    meta, tensors = tiny.content("llama")
    new = Weights(0, 0)
    for layer in ("blk.0", "blk.1"):
        new.matrix(f"{layer}.attn_q.weight", 128, 4 * size, SHARP)
        new.matrix(f"{layer}.attn_k.weight", 128, 2 * size, SHARP)
        new.matrix(f"{layer}.attn_v.weight", 128, 2 * size)
        new.matrix(f"{layer}.attn_output.weight", 4 * size, 128, 2.0)
    sizes: Meta = {"llama.attention.key_length": size, "llama.attention.value_length": size}
    path.write_bytes(encode({**meta, **sizes}, {**tensors, **new.tensors}))
    return path


def _logits(model: Model, kv_type: str, rope_freq_base: float = 0.0) -> npt.NDArray[np.float32]:
    """float32 (tokens, n_vocab): what follows each token of the text, the last of them read one by one."""
    tokens = model.tokenize(_TEXT)
    whole = len(tokens) - _SINGLE
    params = _llama.small_context(memory.CELL_STEP, memory.CELL_STEP, n_sequences=1)
    _llama.set_fields(
        params,
        flash_attn_type=lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
        type_k=_llama.kv_type_id(kv_type),
        type_v=_llama.kv_type_id(kv_type),
        rope_freq_base=rope_freq_base,
    )
    ctx = lib.llama_init_from_model(model.ptr, params)
    if not ctx:
        raise TooLarge(f"llama.cpp opened no {kv_type} cache: {_llama.last_messages()}")
    try:
        rows = list(_decode(ctx, model, 0, tokens[:whole]))
        for at in range(whole, len(tokens)):
            rows += _decode(ctx, model, at, tokens[at : at + 1])
        return np.stack(rows)
    finally:
        lib.llama_free(ctx)


def _decode(ctx: Any, model: Model, pos: int, tokens: TokenArray) -> Iterator[npt.NDArray[np.float32]]:
    batch = Batch(len(tokens))
    batch.fill([Chunk(0, pos, tokens, "all")])
    if lib.llama_decode(ctx, batch.native):
        raise DecodeFailed(f"llama_decode failed: {_llama.last_messages()}")
    for row in range(len(tokens)):
        yield np.ctypeslib.as_array(lib.llama_get_logits_ith(ctx, row), (model.n_vocab,)).copy()


# -- what is kept ---------------------------------------------------------------------------------------------------


@cache
def _machine() -> str:
    """Hex digits of what a result holds for: this CPU, and this build of llama.cpp as it uses it."""
    facts = [platform.machine(), platform.processor(), _cpu(), os.environ.get("LLAMA_ATTN_ROT_DISABLE", "")]
    facts += [lib.llama_print_system_info().decode("utf-8", "replace")]
    with contextlib.suppress(metadata.PackageNotFoundError):
        facts.append(metadata.version("llama-cpp-python"))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """What /proc/cpuinfo says of the first CPU, but for what changes from moment to moment; '' where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return ""
    lasting = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant", "Hardware")
    return "\n".join(line for line in first.splitlines() if line.startswith(lasting))


def _record() -> Path:
    """Raises FileError where the user has no folder for it."""
    return user_folder("cache", "kv types are tried in every process") / "kv-types.json"


def _kept() -> list[str]:
    """The newest last. A record that is damaged, or that somebody else wrote, is none."""
    with contextlib.suppress(OSError, EdgekvError, ValueError, RecursionError):
        kept = json.loads(_record().read_text("utf-8"))
        if isinstance(kept, list):
            return [key for key in kept if isinstance(key, str)]
    return []


def _keep(key: str) -> None:
    _passed.add(key)
    with contextlib.suppress(OSError, EdgekvError, ValueError):
        path = _record()
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, json.dumps([*_kept(), key][-_MOST:]).encode())
