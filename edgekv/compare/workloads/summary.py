"""summary: the model sums a document up, the document is masked, and the talk goes on with the summary."""

from __future__ import annotations

from edgekv.compare.case import Case, Segment, Style
from edgekv.compare.prose import Writer
from edgekv.compare.workloads.making import Planted, endless


def _case(style: Style, writer: Writer, _number: int) -> Case:
    """System, what stays, a document (masked once summed up), a question about it."""
    secret, control = (Planted(writer, what) for what in ("access code", "bus number"))
    before = Planted(writer, "room number", "before")
    document = f"{writer.passage(5)}{secret.sentence}{writer.passage(5)}".strip()
    return Case(
        (
            Segment(style.turn("system", "You are a careful assistant."), role="system"),
            Segment(style.turn("user", f"Note first. {before.sentence}".strip()) + style.turn("assistant", "Noted.")),
            Segment(style.turn("user", f"Read this report.\n{document}"), mask=True),
        ),
        question=style.turn("user", "Name the people and places that matter, and say why.") + style.opening,
        continuation=f" {writer.passage(3)}".rstrip(),
        secrets=(secret.choice,),
        facts=(before.choice,),
        controls=(control.choice,),
        summarise=style.turn("user", "Sum the report up in three sentences.") + style.opening,
        special=style.special,
    )


cases = endless(_case)
