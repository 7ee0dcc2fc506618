"""Reads the positions out of a llama.cpp state blob of one sequence (llama-kv-cache.cpp, state_write).

Layout: u32 magic, i32 sequence, then per cache: u32 n_stream, u32 cell_count, cell_count x {i32 pos, u32 n_seq,
[12 bytes with M-RoPE], n_seq x i32}, then the K and V rows, whose lengths stand in front of them.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from .errors import AuditFailed


def positions(blob: memoryview, *, cell_extra: int = 0) -> list[npt.NDArray[np.int32]]:
    """Sorted int32 positions, one array a cache (a sliding-window model has two).

    ``cell_extra``: bytes llama.cpp adds to a cell (12 with M-RoPE). Raises AuditFailed when the blob is not laid
    out as described.
    """
    try:
        return _Reader(blob, cell_extra).caches()
    except (struct.error, IndexError, ValueError) as err:
        raise AuditFailed(f"the state blob is not laid out as this version of edgekv knows it: {err}") from err


class _Reader:
    def __init__(self, blob: memoryview, cell_extra: int) -> None:
        self._blob = blob
        self._at = 8  # behind magic and sequence
        self._cell_extra = cell_extra

    def caches(self) -> list[npt.NDArray[np.int32]]:
        found = []
        while self._at < len(self._blob):
            found.append(self._cells())
            if len(found[-1]):
                self._skip_rows(len(found[-1]))
        if self._at != len(self._blob):
            raise ValueError(f"{len(self._blob)} bytes, but its rows end at {self._at}")
        return found

    def _cells(self) -> npt.NDArray[np.int32]:
        num_streams, num_cells = self._take("<II")
        if num_streams != 1:
            raise ValueError(f"{num_streams} streams")
        stride = 12 + self._cell_extra
        raw = np.frombuffer(self._blob[self._at : self._at + num_cells * stride], np.int32)
        cells = raw.reshape(num_cells, stride // 4)
        if num_cells and (cells[:, 1] != 1).any():
            raise ValueError("a cell of another number of sequences than one")
        self._at += num_cells * stride
        return np.sort(cells[:, 0])

    def _skip_rows(self, num_cells: int) -> None:
        """K rows {i32 type, u64 row bytes, rows} a layer, then the V rows, transposed or not."""
        transposed, num_layers = self._take("<II")
        for _ in range(num_layers):
            self._skip_matrix(num_cells)
        for _ in range(num_layers):
            if transposed:
                _kind, element, width = self._take("<iII")
                self._at += element * width * num_cells
            else:
                self._skip_matrix(num_cells)

    def _skip_matrix(self, num_cells: int) -> None:
        _kind, row = self._take("<iQ")
        self._at += row * num_cells

    def _take(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self._blob, self._at)
        self._at += struct.calcsize(layout)
        return values
