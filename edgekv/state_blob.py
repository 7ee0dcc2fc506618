"""Reads and cuts a llama.cpp state blob of one sequence (llama-kv-cache.cpp, state_write).

Layout: u32 magic, i32 sequence, then per cache: u32 n_stream, u32 cell_count, cell_count x {i32 pos, u32 n_seq,
[12 bytes, see ``cell_extra``], n_seq x i32}, then, unless it holds no cell, u32 v_trans, u32 n_layer, a matrix of K a
layer, and one of V a layer unless the model keeps no V (MLA). A matrix is a row a cell after {i32 type, u64 row bytes};
a transposed V is a column a cell after {i32 type, u32 element bytes, u32 width}.
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
_MOST_CACHES: Final = 4  # llama.cpp's own have three at most


def positions(blob: Bytes, *, cell_extra: int = 0) -> list[npt.NDArray[np.int32]]:
    """Sorted int32 positions, one array a cache (a sliding-window model has two).

    ``cell_extra``: bytes llama.cpp adds to a cell (12 where a cell has more than a position: M-RoPE and others). Raises
    AuditFailed when the blob is not laid out as described.
    """
    return [np.sort(cache.positions) for cache in _caches(blob, cell_extra)]


def first_positions(blob: Bytes) -> npt.NDArray[np.int32]:
    """Sorted int32 positions of the first cache, whatever comes behind it. Raises AuditFailed as above."""
    try:
        return np.sort(_Reader(blob, 0).cache(_BEGIN, has_v=True)[0].positions)
    except (struct.error, IndexError, ValueError) as err:
        raise AuditFailed(f"the state blob is not laid out as this version of edgekv knows it: {err}") from err


def select(blob: Bytes, p0: int, p1: int, *, cell_extra: int = 0) -> Bytes:
    """The same blob with the cells at positions [p0, p1) only. Raises AuditFailed as :func:`positions`."""
    parts = [blob[:_BEGIN]]
    for cache in _caches(blob, cell_extra):
        parts += cache.cut((cache.positions >= p0) & (cache.positions < p1))
    return np.concatenate(parts)


def check_finite(blob: Bytes, *, cell_extra: int = 0) -> None:
    """Raise AuditFailed where a number of K or V is none, or infinite: without flash attention such a cell turns the
    logits of every sequence into NaN, also after it was freed, as 0 * NaN is NaN."""
    for cache in _caches(blob, cell_extra):
        _check_finite(cache)


def check_finite_first(blob: Bytes) -> None:
    """As :func:`check_finite`, of the first cache, whatever comes after it."""
    _check_finite(_Reader(blob, 0).cache(_BEGIN, has_v=True)[0])


def matrices(blob: Bytes, *, cell_extra: int = 0) -> tuple[int, ...]:
    """How many matrices each cache has: fewer where it has no V. Raises AuditFailed as :func:`positions`."""
    return tuple(len(cache.matrices) for cache in _caches(blob, cell_extra))


def same(one: Bytes, other: Bytes, *, cell_extra: int = 0) -> bool:
    """Whether two blobs hold the same positions and the same K and V. Raises AuditFailed as :func:`positions`."""
    pairs = zip(_caches(one, cell_extra), _caches(other, cell_extra), strict=False)
    return len(one) == len(other) and all(
        np.array_equal(a.positions, b.positions)
        and all(np.array_equal(m.values, n.values) for m, n in zip(a.matrices, b.matrices, strict=True))
        for a, b in pairs
    )


def members(begin: Bytes, *, cell_extra: int = 0) -> list[tuple[int, frozenset[int]]]:
    """(position, sequences) of every cell in use, in the order of the cells, from how a state of a whole context begins
    (llama-context.cpp, state_write_data: the architecture's name, then the first cache).

    Raises AuditFailed as :func:`positions`.
    """
    try:
        data = begin.tobytes()
        at = 4 + struct.unpack_from("<I", data)[0]
        _num_streams, num_cells = struct.unpack_from("<II", data, at)
        at, found = at + 8, []
        for _ in range(num_cells):
            pos, num_sequences = struct.unpack_from("<iI", data, at)
            at += 8 + cell_extra
            found.append((pos, frozenset(struct.unpack_from(f"<{num_sequences}i", data, at))))
            at += 4 * num_sequences
        return found
    except struct.error as err:
        raise AuditFailed(
            f"the state of the context is not laid out as this version of edgekv knows it: {err}"
        ) from err


@dataclass(frozen=True)
class _Matrix:
    """What stands in front of it, and uint8 (before, n_cells, bytes a cell): ``before`` is 1, or the width of a
    transposed matrix."""

    head: Bytes
    values: Bytes

    @property
    def kind(self) -> int:
        """ggml's number of its type."""
        return int(struct.unpack_from("<i", self.head.tobytes())[0])


#: ggml's number of a float type -> its size, and the bits that are all set in NaN and infinity.
_FLOATS: Final = {0: ("<u4", 0x7F800000), 1: ("<u2", 0x7C00), 30: ("<u2", 0x7F80)}
#: ggml's number of a quantised type -> bytes a block, which begins with its scale in f16.
_BLOCKS: Final = {8: 34, 2: 18}


def _check_finite(cache: _Cache) -> None:
    for matrix in cache.matrices:
        rows = matrix.values.reshape(-1)
        if matrix.kind in _FLOATS:
            kind, bits = _FLOATS[matrix.kind]
        elif matrix.kind in _BLOCKS and not len(rows) % _BLOCKS[matrix.kind]:
            rows = rows.reshape(-1, _BLOCKS[matrix.kind])[:, :2].reshape(-1)
            kind, bits = _FLOATS[1]
        else:
            raise AuditFailed(f"K or V is of a type that edgekv does not know (ggml's number {matrix.kind})")
        if len(rows) % np.dtype(kind).itemsize:
            raise AuditFailed("K or V is cut in the middle of a number")
        if ((rows.view(kind) & bits) == bits).any():
            raise AuditFailed("a number of K or V is infinite, or none")


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

    def caches(self, at: int = _BEGIN, most: int = _MOST_CACHES) -> list[_Cache]:
        """All from ``at`` to the end. Nothing says whether a cache has V: so it has where the rest then fits."""
        if at == len(self._blob) and most < _MOST_CACHES:
            return []
        if not most:
            raise ValueError(f"more than {_MOST_CACHES} caches")
        try:
            first, end = self.cache(at, has_v=True)
            return [first, *self.caches(end, most - 1)]
        except (struct.error, IndexError, ValueError):
            first, end = self.cache(at, has_v=False)
            return [first, *self.caches(end, most - 1)]

    def cache(self, at: int, *, has_v: bool) -> tuple[_Cache, int]:
        """The cache that begins at ``at``, and where it ends."""
        self._at = at
        num_streams, num_cells = self._numbers("<II")
        if num_streams != 1:
            raise ValueError(f"{num_streams} streams")
        cells = self._take(num_cells * self._cell_bytes).reshape(num_cells, self._cell_bytes)
        if (cells[:, 4:8] != (1, 0, 0, 0)).any():
            raise ValueError("a cell of another number of sequences than one")
        if not num_cells:
            return _Cache(cells, cells.reshape(-1), ()), self._at
        head = self._take(8)
        transposed, num_layers = struct.unpack("<II", head.tobytes())
        matrices = [self._matrix(num_cells, "<iQ") for _ in range(num_layers)]
        if has_v:
            matrices += [self._matrix(num_cells, "<iII" if transposed else "<iQ") for _ in range(num_layers)]
        return _Cache(cells, head, tuple(matrices)), self._at

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
