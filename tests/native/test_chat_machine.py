"""Random conversations: whatever is said, hidden, brought back, forked, saved and summed up, text and tokens agree."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_chat import FAMILIES, TinyPath, check, family, open_chat

from edgekv import Session, policies
from edgekv.chat import Chat
from edgekv.errors import BadState, ContextFull, MaskUnsupported, PinnedTokens, TemplateError, UnknownSpan

TEXTS = st.one_of(
    st.sampled_from(
        ["Hello!", "<think>\nhm\n</think>\n\nyes", "a<|im_end|>b", "한국어 😀", " spaces ", "\n\nlines\n", "[INST]"]
    ),
    st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=40),
)
POLICIES = ["hide_oldest()", "keep_turns(2)", "sliding_window(4, 120)", "summarize_oldest(0.6, 0.3)",
            "summarize_oldest(0.6, 0.3, kept=False)", "clear_thinking(keep=0)",
            "clear_tool_uses(trigger=1, keep=1) + hide_oldest()"]  # fmt: skip


class Conversation(RuleBasedStateMachine):
    path: Path

    @initialize(
        name=st.sampled_from(FAMILIES),
        system=st.sampled_from([None, "You are terse.", "한국어로\n\n답하세요"]),
        policy=st.sampled_from(POLICIES),
        spill=st.sampled_from(["evict", "park"]),
    )
    def begin(self, name: str, system: str | None, policy: str, spill: str) -> None:
        self.name, self.forks = name, list[Chat]()
        self.chat = open_chat(
            self.path, family(name), n_ctx=512, system=system, policy=policies.parse(policy), spill=spill,
            summary_tokens=16, max_tokens=6,
        )  # fmt: skip

    def teardown(self) -> None:
        if hasattr(self, "chat"):
            for chat in (*self.forks, self.chat):
                chat.session.close()

    @property
    def turn_names(self) -> list[str]:
        return [turn.name for turn in self.chat.turns if turn.read]

    @rule(question=TEXTS, answer=TEXTS)
    def exchange(self, question: str, answer: str) -> None:
        """Both are given, or the second is refused and the first stays."""
        self.refused_or(lambda: self.chat.add("user", question))
        if self.chat.turns and self.chat.messages[-1].role == "user":
            self.refused_or(lambda: self.chat.add("assistant", answer))

    @rule(question=TEXTS)
    def ask(self, question: str) -> None:
        self.refused_or(lambda: self.chat.ask(question).finish())

    @rule(question=TEXTS)
    def ask_and_stop(self, question: str) -> None:
        def some() -> None:
            next(self.chat.ask(question).pieces(), None)

        self.refused_or(some)

    def refused_or(self, verb: object) -> None:
        """A message that is refused leaves all messages as they were."""
        before = self.chat.messages
        try:
            verb()  # type: ignore[operator]
        except (ContextFull, TemplateError, MaskUnsupported):
            assert self.chat.messages[: len(before)] == before

    @precondition(lambda self: self.name in ("qwen3", "toolcalls") and len(self.chat.turns) > 1)
    @rule(result=TEXTS)
    def tool(self, result: str) -> None:
        self.refused_or(lambda: self.chat.add("tool", result, name="look"))

    @precondition(lambda self: self.turn_names)
    @rule(verb=st.sampled_from(["mask", "unmask", "park", "evict"]), data=st.data())
    def edit(self, verb: str, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from([*self.turn_names, "role:user", "role:assistant", "*"]))
        before = self.chat.session.visible_tokens.tolist()
        try:
            getattr(self.chat, verb)(target)
        except (BadState, PinnedTokens, UnknownSpan, ContextFull):
            assert self.chat.session.visible_tokens.tolist() == before

    @precondition(lambda self: self.turn_names)
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        self.chat.pin(data.draw(st.sampled_from(self.turn_names)), pinned=pinned)

    @rule()
    def undo(self) -> None:
        with contextlib.suppress(BadState, ContextFull, MaskUnsupported):
            self.chat.undo()

    @rule(text=TEXTS)
    def another_system_text(self, text: str) -> None:
        self.refused_or(lambda: self.chat.set_system(text))

    @rule(kept=st.booleans())
    def summarize(self, kept: bool) -> None:
        with contextlib.suppress(ContextFull, TemplateError):
            self.chat.summarize(1, kept=kept)

    @precondition(lambda self: len(self.forks) < 2)
    @rule()
    def fork(self) -> None:
        self.forks.append(self.chat.fork())

    @precondition(lambda self: self.forks)
    @rule()
    def go_on_in_the_fork(self) -> None:
        self.chat, self.forks[-1] = self.forks[-1], self.chat

    @precondition(lambda self: self.forks)
    @rule()
    def close_the_fork(self) -> None:
        self.forks.pop().session.close()

    @precondition(lambda self: not self.forks)
    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.chat.save(Path(folder) / "chat.kvs")
            session = Session.load(Path(folder) / "chat.kvs", n_threads=1)
        again = Chat.load(session, options=self.chat.options)
        assert again.turns == self.chat.turns and again.script.text == self.chat.script.text
        self.chat.session.close()
        self.chat = again

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "chat"):
            return
        for chat in (self.chat, *self.forks):
            with contextlib.suppress(ContextFull, TemplateError):  # no room for the end of a turn, say
                check(chat)
            chat.session.audit()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_conversations(tiny_path: TinyPath, kind: str) -> None:
    run(tiny_path(kind), 15, 12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3", "yarn"])
def test_long_conversations(tiny_path: TinyPath, kind: str) -> None:
    run(tiny_path(kind), 300, 40)


def run(path: Path, examples: int, steps: int) -> None:
    machine = type("OnModel", (Conversation,), {"path": path})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
