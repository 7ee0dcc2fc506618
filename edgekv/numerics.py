"""Comparing next-token distributions, in float64, in small blocks: a vocabulary may have 262,144 entries a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import UsageError

Logits: TypeAlias = npt.NDArray[np.floating[Any]]

_BLOCK: Final = 1 << 20  # elements worked on at a time: 8 MiB a temporary


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    """float64, shape as given: natural log-probabilities along the last axis. -inf stays -inf, its token is banned."""
    wide = np.asarray(logits, np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def log_probabilities(logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """float64 (n,): the natural log-probability of tokens[i] under row i, without those of all other tokens."""
    out = logits[np.arange(len(tokens)), tokens].astype(np.float64)
    for block in _blocks(logits):
        top = logits[block].max(axis=1, keepdims=True)
        out[block] -= top[:, 0] + np.log(np.exp(logits[block] - top, dtype=np.float64).sum(axis=1))
    return out


def kl_divergence(reference: Logits, other: Logits) -> npt.NDArray[np.float64]:
    """float64 (n,): KL(reference || other) of each row of two (n, n_vocab) arrays of logits, in nats.

    The sum over the vocabulary of p_ref * (log p_ref - log p_other), which is what llama-perplexity's
    --kl-divergence reports, without its 16-bit rounding of the reference. 0 for equal rows, never negative (rounding
    is cut off), inf where ``other`` rules out a token that ``reference`` allows. Raises UsageError for other shapes.
    """
    out = np.empty(_check(reference, other), np.float64)
    for block in _blocks(reference):
        log_p, log_q = log_softmax(reference[block]), log_softmax(other[block])
        p = np.exp(log_p)
        with np.errstate(invalid="ignore"):  # 0 * (-inf - -inf), replaced by its limit
            out[block] = np.where(p == 0, 0.0, p * (log_p - log_q)).sum(axis=1)
    return np.maximum(out, 0.0)


def same_top(reference: Logits, other: Logits) -> npt.NDArray[np.bool_]:
    """bool (n,): whether both rows have the same most likely token (the first of equals counts)."""
    _check(reference, other)
    return np.asarray(reference.argmax(axis=1) == other.argmax(axis=1))


def _check(reference: Logits, other: Logits) -> int:
    """The number of rows; raises UsageError unless both are (n, n_vocab) with a vocabulary."""
    if reference.ndim != 2 or reference.shape != other.shape or not reference.shape[1]:
        raise UsageError(f"two (n, n_vocab) arrays are needed, not {reference.shape} and {other.shape}")
    return int(reference.shape[0])


def _blocks(rows: Logits) -> Iterator[slice]:
    step = max(1, _BLOCK // rows.shape[1])
    return (slice(at, at + step) for at in range(0, rows.shape[0], step))
