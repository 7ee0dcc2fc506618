"""Reads the head of a GGUF file without llama.cpp: is it one, what is it, how large will its cache be.

Format: ggml's docs/gguf.md (v2, v3, little-endian). Only numbers, strings and arrays of numbers before the
tokenizer's tables are kept; that is all the memory estimate needs, and it takes a millisecond instead of walking
through a quarter of a million vocabulary strings.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, Final

from .errors import DamagedModel, NotGGUF

MAGIC: Final = b"GGUF"
TENSOR_COUNT: Final = "GGUF.tensor_count"  # gguf-py's name for what stands in front of the metadata
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_LONGEST: Final = 1 << 26  # no key or value of a sane file is longer; a damaged length would ask for terabytes


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata before the tokenizer's tables: ``{"general.architecture": "llama", ...}``.

    Raises NotGGUF for another kind of file or a big-endian one, DamagedModel when the file ends inside the header.
    """
    path = Path(path)
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise NotGGUF(_other_kind(path))
        try:
            return _Reader(file).metadata()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError, RecursionError) as err:
            raise DamagedModel(f"{path} ends or breaks inside its header; fetch or copy it again") from err


def _other_kind(path: Path) -> str:
    from .store import is_ours  # zipfile is slow to import

    if is_ours(path):
        return f"{path} is a session file or KV module, not a model: Session.load takes the one, attach the other"
    return f"{path} is not a GGUF file (it does not begin with 'GGUF'); convert it with llama.cpp first"


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def metadata(self) -> dict[str, Any]:
        version, tensors, count = self._unpack("IQQ")
        if version not in (2, 3):
            raise NotGGUF(f"{self._file.name} has GGUF version {version}; 2 and 3 are supported, little-endian")
        found: dict[str, Any] = {TENSOR_COUNT: tensors}
        for _ in range(count):
            key = self._string()
            if key == "tokenizer.ggml.tokens" and f"{found.get('general.architecture')}.block_count" in found:
                break
            found[key] = self._value(self._unpack("I")[0])
        return found

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        return struct.unpack(layout, self._file.read(struct.calcsize(layout)))

    def _string(self) -> str:
        return self._take(self._unpack("Q")[0]).decode("utf-8")

    def _take(self, length: int) -> bytes:
        if length > _LONGEST:
            raise struct.error("a length beyond any sane file")
        data = self._file.read(length)
        if len(data) < length:
            raise struct.error("the file ends here")
        return data

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        item, count = self._unpack("IQ")
        if item in (_STRING, _ARRAY):
            return [self._value(item) for _ in range(min(count, _LONGEST))]
        layout = f"<{count}{_SCALARS[item]}"
        return list(struct.unpack(layout, self._take(struct.calcsize(layout))))
