"""Cost: from the edit to the first token of the answer, by the length of the span and of what stands behind it.

Arms take turns on one session, which is brought back to where it stood after each; the first turn warms up and does
not count. No arm runs in a fork: its cells would be copied before they move, and the original's stand in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from edgekv.compare import resident
from edgekv.compare.edits import EDITS
from edgekv.compare.statistics import spread
from edgekv.engine import Engine
from edgekv.model import Model, TokenArray
from edgekv.session import Session
from edgekv.settings import Settings

BEFORE: Final = 256  # tokens in front of the span
QUESTION: Final = 16
DECODED: Final = 24  # tokens generated behind the question where decode speed is measured

TIMED: Final = ("full", *EDITS, "restart", "restart_cold")


@dataclass(frozen=True)
class Lengths:
    """One point of the curve, in tokens."""

    span: int
    suffix: int

    @property
    def num_tokens(self) -> int:
        return BEFORE + self.span + self.suffix

    def work(self, repeat: int) -> int:
        """Tokens read when it is measured, for the progress bar."""
        again = 2 * (self.span + 2 * self.suffix) + BEFORE + 3 * self.suffix
        return self.num_tokens + (repeat + 1) * (again + 8 * QUESTION)


_TAKEN: Final = ("edit_ms", "ttft_ms", "decode_tps", "decode_compacted_tps")


@dataclass
class Timing:
    """One arm at one point."""

    edit_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    decode_tps: list[float] = field(default_factory=list)
    decode_compacted_tps: list[float] = field(default_factory=list)
    tokens_redecoded: int = 0
    cells_used: int = 0
    kv_bytes: int = 0
    rss_peak_bytes: int = 0

    def then(self, turn: Timing) -> Timing:
        """With one more turn; what does not vary is the newest, of memory it is the most."""
        return replace(
            turn,
            **{name: getattr(self, name) + getattr(turn, name) for name in _TAKEN},
            rss_peak_bytes=max(self.rss_peak_bytes, turn.rss_peak_bytes),
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "edit_ms": spread(self.edit_ms),
            "ttft_ms": spread(self.ttft_ms),
            "decode_tps": spread(self.decode_tps),
            "decode_compacted_tps": spread(self.decode_compacted_tps),
            "tokens_redecoded": self.tokens_redecoded,
            "cells_used": self.cells_used,
            "kv_bytes": self.kv_bytes,
            "rss_peak_bytes": self.rss_peak_bytes,
        }


class Point:
    """The texts of one point in a session, on an engine of their own."""

    def __init__(self, model: Model, settings: Settings, tokens: TokenArray, lengths: Lengths) -> None:
        self.lengths = lengths
        ends = np.cumsum([BEFORE, lengths.span, lengths.suffix, QUESTION])
        self.before, self.span, self.suffix, self.question = np.split(np.resize(tokens, ends[-1]), ends[:-1])
        with ExitStack() as on_error:
            self.engine = on_error.enter_context(Engine(model, settings))
            self.session = on_error.enter_context(Session(self.engine))
            self.session.append(self.before)
            self.session.append(self.span, name="span")
            self.session.append(self.suffix, name="suffix")
            self.session.logits()
            on_error.pop_all()

    def close(self) -> None:
        self.session.close()
        self.engine.close()

    # -- one turn of an arm -------------------------------------------------------------------------------------

    def take(self, arm: str, timing: Timing, *, decode: bool) -> None:
        """Make the edit, read the question, draw a token; then all is as before."""
        self.engine.settle()
        resident.count_anew()
        began = time.perf_counter()
        if arm in ("restart", "restart_cold"):
            self._restarted(arm, timing, began, decode=decode)
        else:
            self._edited(arm, timing, began, decode=decode)

    def _edited(self, arm: str, timing: Timing, began: float, *, decode: bool) -> None:
        session, length = self.session, len(self.session.tokens)
        read_again = EDITS[arm](session, "span").prefilled if arm in EDITS else 0
        timing.edit_ms.append((time.perf_counter() - began) * 1e3)
        self._answer(session, timing, began, decode=decode)
        timing.tokens_redecoded = read_again
        session.rewind(length)
        if read_again:  # what was read again knows nothing of the span
            session.rewind("suffix")
        if arm != "full":
            session.unmask("span")
        if read_again:
            session.append(self.suffix, name="suffix")
        session.logits()

    def _restarted(self, arm: str, timing: Timing, began: float, *, decode: bool) -> None:
        """In the session itself, as a user would; span and suffix are read again when the clock has stopped."""
        session = self.session
        session.rewind("span" if arm == "restart" else 0)
        timing.edit_ms.append((time.perf_counter() - began) * 1e3)
        again = [self.before, self.suffix] if arm == "restart_cold" else [self.suffix]
        start = self._answer(session, timing, began, decode=decode, read_with=again)
        timing.tokens_redecoded = sum(map(len, again))
        session.rewind(start + timing.tokens_redecoded - self.lengths.suffix)
        session.append(self.span, name="span")
        session.append(self.suffix, name="suffix")
        session.logits()

    def _answer(
        self, session: Session, timing: Timing, began: float, *, decode: bool, read_with: Sequence[TokenArray] = ()
    ) -> int:
        """Read the question, in one go with what a restart reads, and draw its first token; the index it began at."""
        start = session.append(np.concatenate([*read_with, self.question])).start
        session.logits().argmax()
        timing.ttft_ms.append((time.perf_counter() - began) * 1e3)
        stats = session.stats
        timing.cells_used, timing.kv_bytes = stats.cells_used, stats.kv_bytes_used
        timing.decode_tps += _speed(session) if decode else []
        timing.rss_peak_bytes = max(timing.rss_peak_bytes, resident.peak())
        if decode:
            session.compact()
            timing.decode_compacted_tps += _speed(session)
        return start


def _speed(session: Session) -> list[float]:
    """Tokens a second of a short generation; nothing where it ended at once."""
    return [speed] if (speed := session.generate(DECODED).timings.tokens_per_s) else []


def measure(point: Point, arms: tuple[str, ...], repeat: int, *, decode: bool) -> Iterator[dict[str, Timing]]:
    """Turn after turn, the arms in an order that goes round; yields what is known after each turn, nothing after the
    first, which warms up. A turn that is cut short counts for no arm."""
    timings = {arm: Timing() for arm in arms}
    for turn in range(repeat + 1):
        taken = {arm: Timing() for arm in arms}
        for number in range(len(arms)):
            arm = arms[(number + turn) % len(arms)]
            point.take(arm, taken[arm], decode=decode)
        if turn:
            timings = {arm: timings[arm].then(taken[arm]) for arm in arms}
        yield timings if turn else {}


def settings_for(lengths: Lengths, base: Settings) -> Settings:
    """As many cells as the user's session has, and no fewer than are needed: closing a gap rotates K over all of
    them, so a mask's first token takes longer in a large context."""
    cells = lengths.num_tokens + lengths.suffix + 2 * QUESTION + 2 * DECODED + 64
    return replace(base, n_ctx=max(cells, base.n_ctx), n_sessions=1)
