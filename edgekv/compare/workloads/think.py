"""think: a reasoning block that is masked before the answer, as chat templates strip it from history."""

from __future__ import annotations

from collections.abc import Iterator

from edgekv.compare.case import Case, Segment, Style
from edgekv.compare.prose import Writer
from edgekv.compare.workloads.canary import Planted


def cases(style: Style, seed: int) -> Iterator[Case]:
    """System, a question, a block between think tags (masked), the short answer, the next question."""
    writer = Writer(seed)
    while True:
        yield _case(style, writer)


def _case(style: Style, writer: Writer) -> Case:
    secret, fact, control = (Planted(writer, what) for what in ("working number", "seat number", "file number"))
    answer = style.turn("assistant", "@").split("@")
    return Case(
        (
            Segment(style.turn("system", "Think first, then answer briefly."), role="system"),
            Segment(style.turn("user", f"{fact.sentence}{writer.passage(2)}What follows from this?") + answer[0]),
            Segment(f"<think>\n{writer.passage(3)}{secret.sentence}{writer.passage(2)}\n</think>\n", mask=True),
            Segment(f"So much is clear. {writer.passage(2)}".strip() + answer[1]),
        ),
        question=style.turn("user", f"{writer.passage(1)}And what now?") + style.opening,
        continuation=f" {writer.passage(3)}".rstrip(),
        secrets=(secret.choice,),
        facts=(fact.choice,),
        controls=(control.choice,),
        special=style.special,
    )
