"""chat: a conversation of many turns, whose old turns are masked."""

from __future__ import annotations

from collections.abc import Iterator

from edgekv.compare.case import Case, Segment, Style
from edgekv.compare.prose import Writer
from edgekv.compare.workloads.canary import Planted


def cases(style: Style, seed: int) -> Iterator[Case]:
    """System, a turn that stays, three old turns to be masked, two recent ones, a question."""
    writer = Writer(seed)
    while True:
        yield _case(style, writer)


def _case(style: Style, writer: Writer) -> Case:
    secret, fact, control = (Planted(writer, what) for what in ("locker number", "room number", "badge number"))
    old = [_exchange(style, writer, f"{writer.passage(2)}What do you make of it?") for _ in range(2)]
    told = _exchange(
        style, writer, f"Remember this. {secret.sentence}".strip(), f"I will remember it. {writer.passage(1)}"
    )
    return Case(
        (
            Segment(style.turn("system", "You are a careful assistant who keeps notes."), role="system"),
            Segment(_exchange(style, writer, f"{fact.sentence}{writer.passage(1)}Please note it.")),
            Segment(old[0] + told + old[1], mask=True),
            Segment(
                _exchange(style, writer, f"{writer.passage(2)}Go on.", f"I have it all noted. {writer.passage(1)}")
            ),
        ),
        question=style.turn("user", f"{writer.passage(1)}What did you note last?") + style.opening,
        continuation=f" {writer.passage(3)}".rstrip(),
        secrets=(secret.choice,),
        facts=(fact.choice,),
        controls=(control.choice,),
        used=True,
        special=style.special,
    )


def _exchange(style: Style, writer: Writer, user: str, assistant: str | None = None) -> str:
    answer = writer.passage(2) if assistant is None else assistant
    return style.turn("user", user.strip()) + style.turn("assistant", answer.strip())
