"""summary: the model sums a document up, the document is masked, and the talk goes on with the summary."""

from __future__ import annotations

from collections.abc import Iterator

from edgekv.compare.case import Case, Segment, Style
from edgekv.compare.prose import Writer
from edgekv.compare.workloads.canary import Planted


def cases(style: Style, seed: int) -> Iterator[Case]:
    """System, a document (masked once summed up), a question about it."""
    writer = Writer(seed)
    while True:
        yield _case(style, writer)


def _case(style: Style, writer: Writer) -> Case:
    secret, control = (Planted(writer, what) for what in ("access code", "bus number"))
    document = f"{writer.passage(5)}{secret.sentence}{writer.passage(5)}".strip()
    return Case(
        (
            Segment(style.turn("system", "You are a careful assistant."), role="system"),
            Segment(style.turn("user", f"Read this report.\n{document}"), mask=True),
        ),
        question=style.turn("user", "Name the people and places that matter, and say why.") + style.opening,
        continuation=f" {writer.passage(3)}".rstrip(),
        secrets=(secret.choice,),
        controls=(control.choice,),
        used=True,
        summarise=style.turn("user", "Sum the report up in three sentences.") + style.opening,
        special=style.special,
    )
