"""What workloads are made of: facts to be asked for, and cases without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import TypeAlias

from edgekv.compare.case import CHANCE_OF, Case, Choice, Style
from edgekv.compare.prose import Writer

#: (how turns are written, seed) -> cases without end
Workload: TypeAlias = Callable[[Style, int], Iterator[Case]]


def endless(make: Callable[[Style, Writer, int], Case]) -> Workload:
    """A workload of what ``make`` makes of a style, one writer for all cases, and the case's number."""

    def cases(style: Style, seed: int) -> Iterator[Case]:
        writer = Writer(seed)
        return (make(style, writer, number) for number in count())

    return cases


class Planted:
    """A fact that a sentence states and a choice asks for; its owner has a name nobody else has.

    Options are ten codes of the same form, drawn together.
    """

    def __init__(self, writer: Writer, what: str, part: str = "") -> None:
        codes = writer.codes(CHANCE_OF)
        right = writer.number(0, CHANCE_OF - 1)
        self.owner = f"{writer.name()} {writer.surname()}"
        self.sentence = f"The {what} of {self.owner} is {codes[right]}. "
        self.choice = Choice(f"The {what} of {self.owner} is", tuple(f" {code}" for code in codes), right, part)
