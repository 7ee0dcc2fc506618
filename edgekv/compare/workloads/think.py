"""think: a reasoning block that is masked before the answer, as chat templates strip it from history."""

from __future__ import annotations

from edgekv.compare.case import Case, Segment, Style
from edgekv.compare.prose import Writer
from edgekv.compare.workloads.making import Planted, endless


def _case(style: Style, writer: Writer, _number: int) -> Case:
    """System, a question, a block between think tags (masked), the short answer, the next question."""
    secret, control = Planted(writer, "working number"), Planted(writer, "file number")
    before, behind = Planted(writer, "seat number", "before"), Planted(writer, "desk number", "behind")
    answer = style.turn("assistant", "@").split("@")
    return Case(
        (
            Segment(style.turn("system", "Think first, then answer briefly."), role="system"),
            Segment(style.turn("user", f"{before.sentence}{writer.passage(2)}What follows from this?") + answer[0]),
            Segment(f"<think>\n{writer.passage(3)}{secret.sentence}{writer.passage(2)}\n</think>\n", mask=True),
            Segment(f"So much is clear. {writer.passage(1)}{behind.sentence}{writer.passage(1)}".strip() + answer[1]),
        ),
        question=style.turn("user", f"{writer.passage(1)}And what now?") + style.opening,
        continuation=f" {writer.passage(3)}".rstrip(),
        secrets=(secret.choice,),
        facts=(before.choice, behind.choice),
        controls=(control.choice,),
        special=style.special,
    )


cases = endless(_case)
