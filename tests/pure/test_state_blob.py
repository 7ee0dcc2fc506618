"""State blobs made by hand: with V and without, one cache and several, cells with more than a position; and garbage."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pytest

from edgekv import errors, state_blob

Bytes = npt.NDArray[np.uint8]
F16, Q8_0 = 1, 8


def cache(
    positions: list[int],
    *,
    has_v: bool = True,
    transposed: bool = False,
    extra: int = 0,
    kind: int = F16,
    value: float = 1.0,
    layers: int = 2,
) -> bytes:
    """A cache of two layers, rows of 32 numbers."""
    out = struct.pack("<II", 1, len(positions))
    for pos in positions:
        out += struct.pack("<iI", pos, 1) + b"x" * extra + struct.pack("<i", 0)
    if not positions:
        return out
    numbers = np.full(32, value, np.float16).tobytes()
    row = numbers if kind == F16 else np.float16(value).tobytes() + bytes(32)
    out += struct.pack("<II", int(transposed), layers)
    k = struct.pack("<iQ", kind, len(row)) + row * len(positions)
    v = struct.pack("<iII", F16, 2, 32) + numbers * len(positions) if transposed else k
    return out + k * layers + v * layers * has_v


def blob(*caches: bytes) -> Bytes:
    return np.frombuffer(struct.pack("<Ii", 0x1234, 0) + b"".join(caches), np.uint8)


LAYOUTS = {
    "plain": ([cache([0, 1, 2, 3])], 0),
    "transposed": ([cache([3, 1, 0, 2], transposed=True)], 0),
    "quantised": ([cache([0, 1, 2, 3], kind=Q8_0)], 0),
    "no V": ([cache([0, 1, 2, 3], has_v=False)], 0),
    "no V, transposed": ([cache([0, 1, 2, 3], has_v=False, transposed=True)], 0),
    "more than a position": ([cache([0, 1, 2, 3], extra=12)], 12),
    "two caches": ([cache([0, 1, 2, 3]), cache([0, 1, 2, 3])], 0),
    "two caches, one with V": ([cache([0, 1, 2, 3], has_v=False), cache([0, 1, 2, 3])], 0),
    "three caches": ([cache([0, 1, 2, 3], has_v=h) for h in (False, False, True)], 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_understood(name: str) -> None:
    caches, extra = LAYOUTS[name]
    whole = blob(*caches)
    held = state_blob.positions(whole, cell_extra=extra)
    assert [h.tolist() for h in held] == [[0, 1, 2, 3]] * len(caches)
    state_blob.check_finite(whole, cell_extra=extra)
    part = state_blob.select(whole, 1, 3, cell_extra=extra)
    assert [h.tolist() for h in state_blob.positions(part, cell_extra=extra)] == [[1, 2]] * len(caches)
    assert state_blob.same(part, state_blob.select(whole, 1, 3, cell_extra=extra), cell_extra=extra)
    assert not state_blob.same(part, whole, cell_extra=extra)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_cut_is_refused(name: str) -> None:
    """Wherever it is cut, it is not taken for all of it; after K, or after a cache, it is one of fewer matrices."""
    caches, extra = LAYOUTS[name]
    whole = blob(*caches)
    for stop in range(len(whole)):
        try:
            held = state_blob.matrices(whole[:stop], cell_extra=extra)
        except errors.AuditFailed:
            continue
        assert sum(held) < sum(state_blob.matrices(whole, cell_extra=extra))


@pytest.mark.parametrize("kind", [F16, Q8_0])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("transposed", [False, True])
def test_numbers_that_are_none(kind: int, value: float, transposed: bool) -> None:
    whole = blob(cache([0, 1]), cache([0, 1], kind=kind, value=value, transposed=transposed))
    assert len(state_blob.positions(whole)) == 2
    with pytest.raises(errors.AuditFailed, match="infinite, or none"):
        state_blob.check_finite(whole)


def test_a_type_that_is_not_known() -> None:
    with pytest.raises(errors.AuditFailed, match="type that edgekv does not know"):
        state_blob.check_finite(blob(cache([0], kind=77)))


def test_garbage() -> None:
    random = np.random.RandomState(1)
    whole = blob(*LAYOUTS["two caches, one with V"][0])
    for _ in range(500):
        changed = whole.copy()
        changed[random.randint(0, len(whole), 3)] = random.randint(0, 256, 3)
        try:
            state_blob.select(changed, 1, 3)
            state_blob.check_finite(changed)
        except errors.AuditFailed:
            pass
    for made in (blob(), blob(*[cache([])] * 10_000), blob(*[cache([0], has_v=False, layers=1)] * 2_000)):
        with pytest.raises(errors.AuditFailed):
            state_blob.positions(made)
