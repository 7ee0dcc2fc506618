"""The GGUF v3 container, as ggml's docs/gguf.md describes it: header, key-values, tensor infos, aligned data.

Written by hand because the ``gguf`` package would pull requests, tqdm and PyYAML into a core install.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

Tensor = npt.NDArray[np.float32]
Value = bool | int | float | str | list[str] | list[int] | np.uint16 | np.int32
Meta = dict[str, Value]

ALIGNMENT = 32  # GGUF's default, so the file need not name it
F32 = 0  # ggml's number for the tensor type


def encode(meta: Meta, tensors: dict[str, Tensor]) -> bytes:
    """The whole file. Integers become u32 (those of numpy u16 or i32), floats f32, lists of integers i32."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(meta))
    head += b"".join(_key_value(key, value) for key, value in meta.items())
    data = bytearray()
    for name, tensor in tensors.items():
        head += _tensor_info(name, tensor, len(data))
        raw = tensor.astype("<f4").tobytes()
        data += raw + _padding(len(raw))
    return head + _padding(len(head)) + bytes(data)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Value) -> tuple[int, bytes]:
    """A value as (gguf type, its bytes); bool stands before int because it is one."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, np.uint16):
        return 2, struct.pack("<H", value)
    if isinstance(value, np.int32):
        return 5, struct.pack("<i", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _string(value)
    return 9, _array(value)


def _array(values: list[str] | list[int]) -> bytes:
    kind = 8 if isinstance(values[0], str) else 5  # llama.cpp wants token types as signed integers
    items = [_string(v) if isinstance(v, str) else struct.pack("<i", v) for v in values]
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def _key_value(key: str, value: Value) -> bytes:
    kind, raw = _typed(value)
    return _string(key) + struct.pack("<I", kind) + raw


def _padding(size: int) -> bytes:
    return bytes(-size % ALIGNMENT)


def _tensor_info(name: str, tensor: Tensor, offset: int) -> bytes:
    """ggml counts dimensions from the fastest one, numpy from the slowest: hence reversed."""
    dims = tensor.shape[::-1]
    return _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, F32, offset)
