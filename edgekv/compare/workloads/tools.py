"""tools: an agent's transcript, whose long tool results are masked once they have been answered from."""

from __future__ import annotations

import json

from edgekv.compare.case import Case, Segment, Style
from edgekv.compare.prose import Writer
from edgekv.compare.workloads.making import Planted, endless


def _case(style: Style, writer: Writer, _number: int) -> Case:
    """Task, a tool call, its result (masked), what the agent concluded, the next call and its result, a question."""
    secret, control = Planted(writer, "order number"), Planted(writer, "invoice number")
    before, behind = Planted(writer, "desk number", "before"), Planted(writer, "gate number", "behind")
    place = writer.place()
    concluded = f"The order number of {secret.owner} is in the log. {writer.passage(1)}".strip()
    weather = json.dumps({"place": place, "celsius": writer.number(2, 30), "note": behind.sentence.strip()})
    return Case(
        (
            Segment(style.turn("system", "You are an agent. Call tools, then answer."), role="system"),
            Segment(
                style.turn("user", f"{before.sentence}Find out what happened at {place}.") + _call(style, "log", place)
            ),
            Segment(_result(style, writer, secret.sentence), mask=True, role="tool"),
            Segment(style.turn("assistant", concluded) + _call(style, "weather", place)),
            Segment(style.turn("user", f"Tool result: {weather}")),
        ),
        question=style.turn("user", "Sum up what you know, in three sentences.") + style.opening,
        continuation=f" {writer.passage(3)}".rstrip(),
        secrets=(secret.choice,),
        facts=(before.choice, behind.choice),
        controls=(control.choice,),
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


cases = endless(_case)
