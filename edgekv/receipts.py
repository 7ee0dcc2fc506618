"""What verbs hand back: receipts of edits, timings of generations, counts of a session."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from .spans import Range


@dataclass(frozen=True)
class Receipt:
    """What an edit did and what it cost.

    verb: mask, unmask, evict, rewind, recompute. ranges: index ranges it changed. tokens: how many. ms: wall time in
    milliseconds.
    gap: "close", "keep", or "tail" when nothing visible stood behind (the cursor moved back instead).
    moved: tokens whose position changed. freed: cells given back.
    influenced: visible tokens computed while the edited ones were visible, directly or through others.
    prefilled: tokens read by the edit itself. reread: tokens that will be read again before the next one is sampled.
    reused: visible tokens behind the edit whose K/V was kept, which a restart would have read again.
    masked: tokens masked in the whole session afterwards. notes: what the user should know.
    """

    verb: str
    ranges: tuple[Range, ...]
    tokens: int
    ms: float
    gap: str = ""
    moved: int = 0
    freed: int = 0
    influenced: int = 0
    prefilled: int = 0
    reread: int = 0
    reused: int = 0
    masked: int = 0
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the session is what it would be had the hidden tokens never been read.

        Not behind a kept gap: tokens stand further apart there than in a restart.
        """
        return self.influenced == 0 and self.gap != "keep"

    def then(self, recomputed: Receipt) -> Receipt:
        """This edit and the reading that followed it, as one."""
        return replace(
            self,
            ms=self.ms + recomputed.ms,
            gap="close" if self.gap == "keep" else self.gap,  # reading again closes gaps
            influenced=0,
            prefilled=self.prefilled + recomputed.prefilled,
            reread=recomputed.reread,
            reused=0,
            notes=(*self.notes, f"{count(recomputed.prefilled, 'token')} read again"),
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "exact": self.exact}

    def __str__(self) -> str:
        return " · ".join([f"{_PAST[self.verb]} {count(self.tokens, 'token')} in {_ms(self.ms)}", *self._details()])

    def _details(self) -> list[str]:
        said = {"close": "gap closed", "keep": "gap kept", "tail": "cursor moved back"}
        details = [said[self.gap]] if self.gap else []
        if self.verb in ("mask", "evict"):
            details.append(self._influence())
        details += [f"{count(self.freed, 'cell')} freed"] if self.freed else []
        return [*details, *self.notes]

    def _influence(self) -> str:
        if not self.influenced:
            return f"{'exact: ' if self.exact else ''}no visible token was computed while it was visible"
        were = "token was" if self.influenced == 1 else "tokens were"
        return f"{self.influenced:,} visible {were} computed while it was visible"


_PAST = {
    "mask": "masked",
    "unmask": "unmasked",
    "evict": "evicted",
    "rewind": "dropped",
    "recompute": "read again",
    "close": "moved up",
}


@dataclass(frozen=True)
class Timings:
    """What a generation cost.

    prefilled: tokens read since the last generation. reused: visible tokens that were in the cache already. masked:
    tokens hidden meanwhile. reread: tokens read a second time because of an edit. generated: tokens sampled.
    prefill_ms: reading the prefilled tokens. ttft_ms: prefill_ms and the time to the first sampled token.
    decode_ms: the rest; tokens_per_s: of that.
    """

    prefilled: int
    reused: int
    masked: int
    reread: int
    generated: int
    prefill_ms: float
    ttft_ms: float
    decode_ms: float

    @property
    def tokens_per_s(self) -> float:
        return (self.generated - 1) / self.decode_ms * 1e3 if self.generated > 1 and self.decode_ms else 0.0

    def __str__(self) -> str:
        return (
            f"{count(self.generated, 'token')}, {self.tokens_per_s:.1f} tokens/s, first token after "
            f"{_ms(self.ttft_ms)} · read {self.prefilled:,}, read again {self.reread}, reused {self.reused:,}, "
            f"masked {self.masked:,}"
        )


@dataclass(frozen=True)
class Stats:
    """Counts of a session: tokens by state, tokens read and reused since it began, cells and bytes of cache in use.

    reused sums, over all edits, the visible tokens behind the edit that a restart would have read again.
    """

    visible: int
    masked: int
    parked: int
    evicted: int
    prefilled: int
    generated: int
    reread: int
    reused: int
    cells_used: int
    cells: int
    kv_bytes_used: int
    cursor: int


@dataclass(frozen=True)
class Audit:
    """What an audit compared: every position of every sequence, and found equal to the ledger."""

    sequences: int
    cells: int


def count(number: int, noun: str) -> str:
    """'1 token', '1,912 tokens'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _ms(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.1f} ms"
