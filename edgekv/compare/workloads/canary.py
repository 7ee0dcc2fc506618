"""canary: a random code in the masked passage, asked for afterwards; half the time the text behind it leans on it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from edgekv.compare.case import CHANCE_OF, Case, Choice, Segment, Style
from edgekv.compare.prose import Writer


def cases(_style: Style, seed: int) -> Iterator[Case]:
    """Notes; a code in the middle ones. Options are ten codes of the same form, drawn together."""
    writer = Writer(seed)
    return (_case(writer, used=number % 2 == 1) for number in count())


def _case(writer: Writer, *, used: bool) -> Case:
    secret, fact, control = (Planted(writer, what) for what in ("access code", "box number", "bus number"))
    before = f"Notes of the week.\n{writer.passage(2)}{fact.sentence}{writer.passage(2)}"
    span = f"{writer.passage(2)}{secret.sentence}{writer.passage(2)}"
    lean = f"{secret.owner} has just read the access code aloud, and it was right. " if used else writer.passage(1)
    return Case(
        (Segment(before), Segment(span, mask=True), Segment(lean + writer.passage(2))),
        question="Then this was noted. ",
        continuation=writer.passage(4),
        secrets=(secret.choice,),
        facts=(fact.choice,),
        controls=(control.choice,),
        used=used,
    )


class Planted:
    """A fact that a sentence states and a choice asks for; its owner has a name nobody else has."""

    def __init__(self, writer: Writer, what: str) -> None:
        codes = writer.codes(CHANCE_OF)
        right = writer.number(0, CHANCE_OF - 1)
        self.owner = f"{writer.name()} {writer.surname()}"
        self.sentence = f"The {what} of {self.owner} is {codes[right]}. "
        self.choice = Choice(f"The {what} of {self.owner} is", tuple(f" {code}" for code in codes), right)
