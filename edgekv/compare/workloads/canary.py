"""canary: a random code in the masked passage, asked for afterwards; half the time the text behind it leans on it."""

from __future__ import annotations

from edgekv.compare.case import Case, Segment, Style
from edgekv.compare.prose import Writer
from edgekv.compare.workloads.making import Planted, endless


def _case(_style: Style, writer: Writer, number: int) -> Case:
    """Notes; a code in the middle ones, a fact in those before and in those behind."""
    used = number % 2 == 1
    secret = Planted(writer, "access code", "used" if used else "unused")
    before, behind = Planted(writer, "box number", "before"), Planted(writer, "seat number", "behind")
    control = Planted(writer, "bus number")
    lean = f"{secret.owner} has just read the access code aloud, and it was right. " if used else writer.passage(1)
    return Case(
        (
            Segment(f"Notes of the week.\n{writer.passage(2)}{before.sentence}{writer.passage(2)}"),
            Segment(f"{writer.passage(2)}{secret.sentence}{writer.passage(2)}", mask=True),
            Segment(f"{lean}{writer.passage(1)}{behind.sentence}{writer.passage(1)}"),
        ),
        question="Then this was noted. ",
        continuation=writer.passage(4),
        secrets=(secret.choice,),
        facts=(before.choice, behind.choice),
        controls=(control.choice,),
    )


cases = endless(_case)
