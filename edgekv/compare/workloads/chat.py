"""chat: a conversation of many turns, whose old turns are masked."""

from __future__ import annotations

from edgekv.compare.case import Case, Segment, Style
from edgekv.compare.prose import Writer
from edgekv.compare.workloads.making import Planted, endless


def _case(style: Style, writer: Writer, _number: int) -> Case:
    """System, a turn that stays, three old turns to be masked, a recent one, a question."""
    secret, control = Planted(writer, "locker number"), Planted(writer, "badge number")
    before, behind = Planted(writer, "room number", "before"), Planted(writer, "shelf number", "behind")
    old = [_exchange(style, writer, f"{writer.passage(2)}What do you make of it?") for _ in range(2)]
    told = _exchange(style, writer, f"Remember this. {secret.sentence}", f"I will remember it. {writer.passage(1)}")
    recent = _exchange(
        style,
        writer,
        f"{writer.passage(1)}{behind.sentence}{writer.passage(1)}Go on.",
        f"I have it all noted. {writer.passage(1)}",
    )
    return Case(
        (
            Segment(style.turn("system", "You are a careful assistant who keeps notes."), role="system"),
            Segment(_exchange(style, writer, f"{before.sentence}{writer.passage(1)}Please note it.")),
            Segment(old[0] + told + old[1], mask=True),
            Segment(recent),
        ),
        question=style.turn("user", f"{writer.passage(1)}What did you note last?") + style.opening,
        continuation=f" {writer.passage(3)}".rstrip(),
        secrets=(secret.choice,),
        facts=(before.choice, behind.choice),
        controls=(control.choice,),
        special=style.special,
    )


def _exchange(style: Style, writer: Writer, user: str, assistant: str | None = None) -> str:
    answer = writer.passage(2) if assistant is None else assistant
    return style.turn("user", user.strip()) + style.turn("assistant", answer.strip())


cases = endless(_case)
