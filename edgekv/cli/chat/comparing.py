"""/compare: mask-and-continue against restart, on the conversation there is."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekv.errors import UsageError
from edgekv.markup import Markup
from edgekv.planner import NUM_SINKS

if TYPE_CHECKING:
    from edgekv.chat import Chat
    from edgekv.cli.chat.loop import State
    from edgekv.spans import Target


def compare(state: State, target: Target | None) -> None:
    """Run the experiment on this conversation: its last question, with the target masked. None: the longest turn."""
    from edgekv.cli.compare import drawn
    from edgekv.compare import Options, run

    case, span, behind = case_of(state.chat, target)
    with tempfile.TemporaryDirectory() as folder, state.screen.progress("comparing") as update:
        file = Path(folder) / "conversation.jsonl"
        file.write_text(json.dumps(case), "utf-8")
        options = Options(
            workload=str(file),
            arms=("mask", "mask_auto", "restart"),
            repeat=3,
            suffix=(max(1, behind),),
            span=(max(1, span),),
            settings=state.chat.session.engine.settings,
        )
        report = run(state.chat.session.model, options, watch=lambda _what, done, total: update(done, total))
    state.screen.show("compare", {"report": json.loads(report.json())}, drawn(report))


def case_of(chat: Chat, target: Target | None) -> tuple[dict[str, Any], int, int]:
    """A case of compare made of a chat: its texts, the masked ones marked; then the last question, and what the model
    said to it. Also the tokens masked, and those behind them."""
    asked = [turn for turn in chat.turns if turn.message.role == "user" and turn.read]
    if len(asked) < 2:
        raise UsageError("there is too little to compare: talk first, until something stands in front of a question")
    script, last = chat.script, asked[-1]
    question = int(np.flatnonzero(script.index == last.range[0])[0])
    hidden = _hidden(chat, target, question)
    if not hidden.any() or hidden[:NUM_SINKS].any():
        raise UsageError("name a part in front of the last question, and not the first tokens: /compare user-1")
    cuts = [0, *(np.flatnonzero(np.diff(hidden.astype(np.int8))) + 1).tolist(), question]
    starts = [script.start_of(at) for at in cuts]
    segments = [
        {"text": Markup.plain(script.text[a:b]), "mask": bool(hidden[at])}
        for at, a, b in zip(cuts, starts, starts[1:], strict=False)
    ]
    opened = script.said[question:]
    said = question + int(opened.argmax()) if opened.any() else len(script)
    case = {
        "segments": segments,
        "question": Markup.plain(script.text[starts[-1] : script.start_of(said)]),
        "continuation": Markup.plain(script.text[script.start_of(said) :]),
        "special": True,
    }
    return case, int(hidden.sum()), int((~hidden[hidden.argmax() :]).sum())


def _hidden(chat: Chat, target: Target | None, question: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of the tokens in front of the question are to be masked: the target, what is masked now, or the longest
    turn."""
    index, session = chat.script.index[:question], chat.session
    if target is not None:
        chosen = session.indexes_of(target)
    else:
        now = ~np.isin(index, session.indexes())
        if now.any():
            return np.asarray(now)
        turns = [t for t in chat.turns if t.read and t.message.role != "system" and t.range[1] <= index.max() + 1]
        chosen = session.indexes_of(max(turns, key=lambda turn: turn.range[1] - turn.range[0]).range)
    found = np.isin(index, chosen)
    found[:NUM_SINKS] = False
    return found
