"""What verbs hand back: receipts of edits, timings of generations, counts of a session."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from .spans import Range, Span
from .wording import count, milliseconds, size


@dataclass(frozen=True)
class Receipt:
    """What an edit did and what it cost.

    verb: mask, unmask, park, evict, rewind, insert, replace, attach, recompute, compact, undo. ranges: index ranges
    it changed. tokens: how many. ms: wall time in milliseconds. gap: "close", "keep", or "tail" when nothing visible
    stood behind (the cursor moved back instead). moved: tokens whose position changed. freed: cells given back.
    copied: cells copied, as a fork holds them too. influenced: visible tokens computed while tokens now hidden were
    visible, directly or through others. unaware: visible tokens behind tokens now shown that were computed without
    them. prefilled: tokens read by the edit itself. reread: tokens that will be read again before the next one is
    sampled. reused: visible tokens behind the edit whose K/V was kept, which a restart would have read again.
    parked_bytes: K and V copied out of the cache. loaded_bytes: K and V that came back from where they were parked.
    masked: tokens masked in the whole session afterwards. span: the new text's. undone: the verb that was undone.
    notes: what the user should know.
    """

    verb: str
    ranges: tuple[Range, ...]
    tokens: int
    ms: float
    gap: str = ""
    moved: int = 0
    freed: int = 0
    copied: int = 0
    influenced: int = 0
    unaware: int = 0
    prefilled: int = 0
    reread: int = 0
    reused: int = 0
    masked: int = 0
    parked_bytes: int = 0
    loaded_bytes: int = 0
    span: Span | None = None
    undone: str = ""
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the edit left the session as it would be had the hidden tokens never been read, and the shown ones
        been there from the start.

        Not behind a kept gap: tokens stand further apart there than in a restart.
        """
        return self.influenced == 0 and self.unaware == 0 and self.gap != "keep"

    def then(self, recomputed: Receipt) -> Receipt:
        """This edit and the reading that followed it, as one."""
        return replace(
            self,
            ms=self.ms + recomputed.ms,
            gap="close" if self.gap == "keep" else self.gap,  # reading again closes gaps
            influenced=0,
            unaware=0,
            prefilled=self.prefilled + recomputed.prefilled,
            reread=recomputed.reread,
            reused=0,
            notes=(*self.notes, f"{count(recomputed.prefilled, 'token')} read again"),
        )

    def as_dict(self) -> dict[str, Any]:
        span = None if self.span is None else {**asdict(self.span), "tags": sorted(self.span.tags)}
        return {**asdict(self), "span": span, "exact": self.exact}

    def __str__(self) -> str:
        return " · ".join([f"{self._did()} in {milliseconds(self.ms)}", *self._details()])

    def _did(self) -> str:
        if self.verb == "replace" and self.span is not None:
            return f"replaced {count(self.tokens, 'token')} by {len(self.span):,}"
        noun = "cell" if self.verb == "compact" else "token"
        undone = f" the {self.undone} of" if self.undone else ""
        return f"{_PAST[self.verb]}{undone} {count(self.tokens, noun)}"

    def _details(self) -> list[str]:
        said = {"close": "gap closed", "keep": "gap kept", "tail": "cursor moved back"}
        details = [said[self.gap]] if self.gap else []
        if self.verb in ("mask", "park", "evict", "replace") or self.influenced:
            details.append(self._influence())
        if self.unaware and self.verb != "attach":  # whose note says why
            were = "visible token behind was" if self.unaware == 1 else "visible tokens behind were"
            what = "the new text" if self.span is not None else "it"
            details.append(f"{self.unaware:,} {were} computed without {what}")
        if self.verb == "undo" and self.prefilled:
            details.append(f"{count(self.prefilled, 'token')} read")
        details += [f"{count(self.freed, 'cell')} freed"] if self.freed else []
        details += [f"{size(self.parked_bytes)} parked"] if self.parked_bytes else []
        came = "loaded" if self.verb == "attach" else "brought back"
        details += [f"{size(self.loaded_bytes)} {came}"] if self.loaded_bytes else []
        details += [f"{count(self.copied, 'cell')} copied, as a fork holds them too"] if self.copied else []
        return [*details, *self.notes]

    def _influence(self) -> str:
        if self.exact and self.verb != "replace" and self.prefilled:
            return "exact"
        if not self.influenced:
            return f"{'exact: ' if self.exact else ''}no visible token was computed while it was visible"
        were = "token was" if self.influenced == 1 else "tokens were"
        return f"{self.influenced:,} visible {were} computed while it was visible"


_PAST = {
    "mask": "masked",
    "unmask": "unmasked",
    "park": "parked",
    "attach": "attached",
    "evict": "evicted",
    "rewind": "dropped",
    "insert": "inserted",
    "replace": "replaced",
    "recompute": "read again",
    "compact": "compacted",
    "undo": "undid",
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
            f"{milliseconds(self.ttft_ms)} · read {self.prefilled:,}, read again {self.reread}, "
            f"reused {self.reused:,}, masked {self.masked:,}"
        )


@dataclass(frozen=True)
class Stats:
    """Counts of a session: tokens by state, tokens read and reused since it began, cells and bytes of cache in use.

    reused sums, over all edits, the visible tokens behind the edit that a restart would have read again. cells_used:
    those this session holds, also together with a fork. cells_scanned: about how many cells of the engine decode goes
    over. compact_saves: how many fewer it would be after ``compact``; 0 where it would not pay. parked_bytes: K and V
    of parked tokens in host memory, also together with a fork; parked_on_disk: in a folder.
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
    cells_scanned: int
    compact_saves: int
    kv_bytes_used: int
    parked_bytes: int
    parked_on_disk: int
    cursor: int


@dataclass(frozen=True)
class Audit:
    """What an audit compared: every position of every sequence, and found equal to the ledger."""

    sequences: int
    cells: int
