"""Sessions as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .receipts import count

if TYPE_CHECKING:
    from .session import Session
    from .spans import Span


def session_table(session: Session) -> str:
    """The spans and their states, a line each, and a line of totals."""
    rows = [("span", "role", "tokens", "state", "text"), *(_row(session, s) for s in session.spans)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]).rstrip() for row in rows]
    stats = session.stats
    totals = (
        f"{count(stats.visible, 'token')} visible, {stats.masked:,} masked, {stats.evicted:,} evicted · "
        f"{stats.cells_used:,} of {stats.cells:,} cells, {stats.kv_bytes_used / 1e6:,.1f} MB of KV in use"
    )
    return "\n".join([*lines, totals])


def _row(session: Session, span: Span) -> tuple[str, str, str, str, str]:
    states = session.states(span)
    if len(states) == 1:
        state = next(iter(states)).name.lower()
    else:
        state = ", ".join(f"{n:,} {s.name.lower()}" for s, n in states.items()) or "empty"
    return (span.name, span.role or "-", f"[{span.start}, {span.stop})", state, _preview(session, span))


def _preview(session: Session, span: Span, width: int = 48) -> str:
    tokens = session.tokens[span.start : min(span.stop, span.start + width)]
    text = " ".join(session.model.detokenize(tokens).split())
    return text if len(text) <= width else text[: width - 1] + "…"
