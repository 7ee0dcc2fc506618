"""tools: an agent's transcript, whose long tool results are masked once they have been answered from."""

from __future__ import annotations

import json
from collections.abc import Iterator

from edgekv.compare.case import Case, Segment, Style
from edgekv.compare.prose import Writer
from edgekv.compare.workloads.canary import Planted


def cases(style: Style, seed: int) -> Iterator[Case]:
    """Task, a tool call, its result (masked), what the agent concluded, the next call and its result, a question."""
    writer = Writer(seed)
    while True:
        yield _case(style, writer)


def _case(style: Style, writer: Writer) -> Case:
    secret, fact, control = (Planted(writer, what) for what in ("order number", "desk number", "invoice number"))
    place = writer.place()
    return Case(
        (
            Segment(style.turn("system", "You are an agent. Call tools, then answer."), role="system"),
            Segment(
                style.turn("user", f"{fact.sentence}Find out what happened at {place}.") + _call(style, "log", place)
            ),
            Segment(_result(style, writer, secret.sentence), mask=True, role="tool"),
            Segment(
                style.turn(
                    "assistant", f"The order number of {secret.owner} is in the log. {writer.passage(1)}".strip()
                )
                + _call(style, "weather", place)
            ),
            Segment(
                style.turn("user", f"Tool result: {json.dumps({'place': place, 'celsius': writer.number(2, 30)})}")
            ),
        ),
        question=style.turn("user", "Sum up what you know, in three sentences.") + style.opening,
        continuation=f" {writer.passage(3)}".rstrip(),
        secrets=(secret.choice,),
        facts=(fact.choice,),
        controls=(control.choice,),
        used=True,
        special=style.special,
    )


def _call(style: Style, tool: str, place: str) -> str:
    return style.turn("assistant", f"Call {tool}({json.dumps({'place': place})})")


def _result(style: Style, writer: Writer, planted_sentence: str) -> str:
    rows = [
        {"time": f"{writer.number(0, 23):02}:{writer.number(0, 59):02}", "text": writer.sentence()} for _ in range(6)
    ]
    rows[writer.number(1, 4)]["text"] = planted_sentence.strip()
    return style.turn("user", "Tool result: " + "\n".join(json.dumps(row) for row in rows))
