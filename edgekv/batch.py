"""Chunks of tokens, and the llama_batch they are laid out in."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from . import _llama
from ._llama import lib
from .model import TokenArray


@dataclass(frozen=True)
class Chunk:
    """Tokens for one sequence, from position ``pos`` on; ``outputs`` says which rows of logits to keep."""

    seq: int
    pos: int
    tokens: TokenArray
    outputs: str = "last"  # "none", "last" or "all"


_FIRST: Final = frozenset({0})


class Batch:
    """The arrays of a llama_batch, owned by numpy and filled in place."""

    def __init__(self, size: int) -> None:
        self._token = np.zeros(size, np.int32)
        self._pos = np.zeros(size, np.int32)
        self._seq = np.zeros(size, np.int32)
        self._logits = np.zeros(size, np.int8)
        self.outputs: frozenset[int] = frozenset()  # batch indexes whose logits are kept
        self._num_seq = np.ones(size, np.int32)  # 0 would be a segmentation fault
        self._seq_at = np.uintp(self._seq.ctypes.data) + np.arange(size, dtype=np.uintp) * np.uintp(4)
        self.native = _llama.set_fields(
            lib.llama_batch(),
            n_tokens=0,
            token=self._token.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            pos=self._pos.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self._num_seq.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=ctypes.cast(self._seq_at.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, chunks: Sequence[Chunk]) -> list[int]:
        """Lay the chunks out one after the other; returns the index of each one's last token."""
        at = 0
        ends: list[int] = []
        rows: list[int] = []
        for chunk in chunks:
            end = at + len(chunk.tokens)
            self._token[at:end] = chunk.tokens
            self._pos[at:end] = np.arange(chunk.pos, chunk.pos + end - at)
            self._seq[at:end] = chunk.seq
            rows += {"none": (), "last": (end - 1,), "all": range(at, end)}[chunk.outputs]
            ends.append(end - 1)
            at = end
        self._logits[:at] = 0
        self._logits[rows] = 1
        self.native.n_tokens = at
        self.outputs = frozenset(rows)
        return ends

    def fill_one(self, seq: int, pos: int, token: int) -> None:
        """Lay out one token whose logits are kept."""
        self._token[0], self._pos[0], self._seq[0], self._logits[0] = token, pos, seq, 1
        self.native.n_tokens = 1
        self.outputs = _FIRST
