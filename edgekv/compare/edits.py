"""Edits: how each arm that masks does it, on a session of its own or on one whose time is taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from edgekv.receipts import Receipt
from edgekv.session import Session
from edgekv.spans import Target
from edgekv.transcript import Hiding

Edit: TypeAlias = Callable[[Session, Target], Receipt]


def _mask(session: Session, target: Target, **how: str) -> Receipt:
    return session.mask(target, **how)  # type: ignore[arg-type]


def _cache_reuse(session: Session, target: Target) -> Receipt:
    """As llama-server --cache-reuse: the span goes, and what stands behind it moves down to what stands before."""
    with session.lock:
        return session._transcript.mask(session._rows(target), Hiding("close", suffix_moves=True))


EDITS: Final[dict[str, Edit]] = {
    "mask": _mask,
    "mask_keep_gap": partial(_mask, gap="keep"),
    "mask_auto": partial(_mask, then="auto"),
    "mask_recompute": partial(_mask, then="recompute"),
    "cache_reuse": _cache_reuse,
}
