"""Sessions as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .wording import count, printable, size, states

if TYPE_CHECKING:
    from .model import Model, TokenArray
    from .session import Session
    from .spans import Span


_PREVIEW = 48


def session_table(session: Session, width: int = 0) -> str:
    """The spans and their states, a line each, and a line of totals; fitted to ``width`` columns unless that is 0."""
    rows = [("span", "role", "tokens", "state", "text"), *(_row(session, s) for s in session.spans)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    room = max(8, width - sum(widths) - 8) if width else _PREVIEW
    lines = [_line(row, widths, min(room, _PREVIEW)) for row in rows]
    stats = session.stats
    parked = f", {stats.parked:,} parked ({size(stats.parked_bytes + stats.parked_on_disk)})" if stats.parked else ""
    totals = (
        f"{count(stats.visible, 'token')} visible, {stats.masked:,} masked{parked}, {stats.evicted:,} evicted",
        f"{stats.cells_used:,} of {stats.cells:,} cells, {stats.kv_bytes_used / 1e6:,.1f} MB of KV in use",
    )
    line = " · ".join(totals)
    return "\n".join([*lines, *(totals if width and len(line) > width else [line])])


def _line(row: tuple[str, ...], widths: list[int], room: int) -> str:
    text = row[4] if len(row[4]) <= room else row[4][: room - 1] + "…"
    return "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), text]).rstrip()


def _row(session: Session, span: Span) -> tuple[str, str, str, str, str]:
    state = states(states_of(session, span))
    begins = preview(session.model, session.tokens[span.start : span.stop])
    return (span.name, span.role or "-", f"[{span.start}, {span.stop})", state, begins)


def states_of(session: Session, span: Span) -> dict[str, int]:
    """How many of a span's tokens are in which state, by its name."""
    return {state.name.lower(): number for state, number in session.states(span).items()}


def preview(model: Model, tokens: TokenArray) -> str:
    """The beginning of a text; what a terminal would act on is shown as U+FFFD."""
    most = 4 * _PREVIEW  # a token may be a quarter of a character
    text = " ".join(model.detokenize(tokens[:most]).split())
    return printable(text)
