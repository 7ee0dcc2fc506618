"""Reads and cuts a llama.cpp state blob of one sequence (llama-kv-cache.cpp, state_write).

Layout: u32 magic, i32 sequence, then per cache: u32 n_stream, u32 cell_count, cell_count x {i32 pos, u32 n_seq,
[12 bytes with M-RoPE], n_seq x i32}, then, unless it holds no cell, u32 v_trans, u32 n_layer, and a matrix of K and one
of V a layer. A matrix is a row a cell behind {i32 type, u64 row bytes}; a transposed V is a column a cell behind
{i32 type, u32 element bytes, u32 width}.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .errors import AuditFailed

Bytes = npt.NDArray[np.uint8]

_BEGIN: Final = 8  # magic and sequence


def positions(blob: Bytes, *, cell_extra: int = 0) -> list[npt.NDArray[np.int32]]:
    """Sorted int32 positions, one array a cache (a sliding-window model has two).

    ``cell_extra``: bytes llama.cpp adds to a cell (12 with M-RoPE). Raises AuditFailed when the blob is not laid
    out as described.
    """
    return [np.sort(cache.positions) for cache in _caches(blob, cell_extra)]


def first_positions(blob: Bytes) -> npt.NDArray[np.int32]:
    """Sorted int32 positions of the first cache, whatever comes behind it. Raises AuditFailed as above."""
    try:
        return np.sort(_Reader(blob, 0).cache().positions)
    except (struct.error, IndexError, ValueError) as err:
        raise AuditFailed(f"the state blob is not laid out as this version of edgekv knows it: {err}") from err


def select(blob: Bytes, p0: int, p1: int, *, cell_extra: int = 0) -> Bytes:
    """The same blob with the cells at positions [p0, p1) only. Raises AuditFailed as :func:`positions`."""
    parts = [blob[:_BEGIN]]
    for cache in _caches(blob, cell_extra):
        parts += cache.cut((cache.positions >= p0) & (cache.positions < p1))
    return np.concatenate(parts)


@dataclass(frozen=True)
class _Matrix:
    """What stands in front of it, and uint8 (before, n_cells, bytes a cell): ``before`` is 1, or the width of a
    transposed matrix."""

    head: Bytes
    values: Bytes


@dataclass(frozen=True)
class _Cache:
    """uint8 (n_cells, bytes a cell) of cells, what stands behind them, and the matrices."""

    cells: Bytes
    head: Bytes
    matrices: tuple[_Matrix, ...]

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        return np.ascontiguousarray(self.cells[:, :4]).view(np.int32).reshape(-1)

    def cut(self, chosen: npt.NDArray[np.bool_]) -> list[Bytes]:
        counts = np.frombuffer(struct.pack("<II", 1, int(chosen.sum())), np.uint8)
        if not chosen.any():
            return [counts]
        parts = [counts, self.cells[chosen].reshape(-1), self.head]
        for matrix in self.matrices:
            parts += [matrix.head, matrix.values[:, chosen].reshape(-1)]
        return parts


def _caches(blob: Bytes, cell_extra: int) -> list[_Cache]:
    try:
        return _Reader(blob, cell_extra).caches()
    except (struct.error, IndexError, ValueError) as err:
        raise AuditFailed(f"the state blob is not laid out as this version of edgekv knows it: {err}") from err


class _Reader:
    def __init__(self, blob: Bytes, cell_extra: int) -> None:
        self._blob = blob
        self._at = _BEGIN
        self._cell_bytes = 12 + cell_extra

    def caches(self) -> list[_Cache]:
        found = []
        while self._at < len(self._blob):
            found.append(self.cache())
        return found

    def cache(self) -> _Cache:
        num_streams, num_cells = self._numbers("<II")
        if num_streams != 1:
            raise ValueError(f"{num_streams} streams")
        cells = self._take(num_cells * self._cell_bytes).reshape(num_cells, self._cell_bytes)
        if (cells[:, 4:8] != (1, 0, 0, 0)).any():
            raise ValueError("a cell of another number of sequences than one")
        if not num_cells:
            return _Cache(cells, cells.reshape(-1), ())
        head = self._take(8)
        transposed, num_layers = struct.unpack("<II", head.tobytes())
        keys = [self._matrix(num_cells, "<iQ") for _ in range(num_layers)]
        values = [self._matrix(num_cells, "<iII" if transposed else "<iQ") for _ in range(num_layers)]
        return _Cache(cells, head, (*keys, *values))

    def _matrix(self, num_cells: int, layout: str) -> _Matrix:
        head = self._take(struct.calcsize(layout))
        _kind, size, *width = struct.unpack(layout, head.tobytes())
        columns = width[0] if width else 1
        return _Matrix(head, self._take(size * columns * num_cells).reshape(columns, num_cells, size))

    def _numbers(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)).tobytes())

    def _take(self, size: int) -> Bytes:
        if size > len(self._blob) - self._at:
            raise ValueError(f"{len(self._blob)} bytes, and {size} more are wanted at {self._at}")
        self._at += size
        return self._blob[self._at - size : self._at]
