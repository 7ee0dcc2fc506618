"""A chat goes on: whatever was said, the next short message is read, or the error names what helps, and it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from test_chat import LONG, check, family

from edgekv import Engine, Model, Sampling, Session, Settings, policies
from edgekv.chat import Chat, Options
from edgekv.errors import BadState, ContextFull, MaskUnsupported, PinnedTokens, TemplateError, UnknownSpan, UsageError

TinyPath = Callable[..., Path]
TALKS_ON = Sampling(logit_bias={t: float("-inf") for t in (0, 1, 2, 3)})
POLICIES = [
    "hide_oldest()", "hide_oldest(0.9, 0.2)", "keep_turns(1)", "keep_turns(8)", "sliding_window(4, 60)",
    "sliding_window(4, 4000)", "clear_tool_uses()", "clear_thinking(keep=0)", "block_markers('a', 'b', 'c', 'd')",
    "summarize_oldest()", "summarize_oldest(0.6, 0.3, kept=False)", "clear_tool_uses(keep=0) + keep_turns(3)",
    "none",
]  # fmt: skip
SIZES = st.sampled_from([1, 10, 60, 120, 300])
SAY = st.tuples(st.sampled_from(["ask", "ask", "user", "tool", "assistant", "system"]), SIZES, SIZES)
EDIT = st.tuples(st.sampled_from(["pin", "mask", "evict", "park", "unmask"]), st.integers(0, 9), st.just(0))
OTHER = st.tuples(st.sampled_from(["undo", "summarize", "fork", "unpin"]), st.just(0), st.just(0))
STEPS = st.lists(SAY | SAY | EDIT | OTHER, min_size=1, max_size=8)


class Talk:
    """A chat whose steps are drawn."""

    def __init__(self, chat: Chat) -> None:
        self.chat, self.forks = chat, list[Chat]()

    def close(self) -> None:
        for chat in (self.chat, *self.forks):
            chat.session.close()

    def step(self, verb: str, size: int, answer: int) -> None:
        chat, text = self.chat, (LONG * 5)[:size]
        if verb == "ask":
            chat.ask(text, max_tokens=answer, sampling=TALKS_ON).finish()
        elif verb == "system":
            chat.set_system(text)
        elif verb in ("user", "tool", "assistant"):
            chat.add(verb, text)
        elif verb == "undo":
            chat.undo()
        elif verb == "summarize":
            chat.summarize()
        elif verb == "fork" and not self.forks:
            self.forks.append(chat.fork())
        elif verb == "unpin":
            chat.pin("*", pinned=False)
        elif chat.turns and verb != "fork":
            getattr(chat, verb)(chat.turns[size % len(chat.turns)].name)

    def helped(self, why: str) -> bool:
        """Do what an error says; whether it is to be tried again."""
        if found := re.search(r"unpin (.*)$", why):
            self.chat.pin(found[1].split(", "), pinned=False)
        elif "close a fork" in why:
            assert self.forks
            while self.forks:
                self.forks.pop().session.close()
        elif "give it a policy, such as hide_oldest()" in why:
            self.chat.options = Options(policy=policies.hide_oldest(), max_tokens=8)
        else:
            self.begin_larger(int(re.search(r"n_ctx, of at least ([\d,]+)$", why)[1].replace(",", "")))  # type: ignore[index]
            return False
        return True

    def begin_larger(self, n_ctx: int) -> None:
        """What fills the cache is the system text; with that much more room the same is accepted."""
        chat = self.chat
        assert not self.forks
        system = next((m.content for m in chat.messages if m.role == "system"), None)
        assert system is not None and len(system) > 20
        with Session(chat.session.model, settings=Settings(n_ctx=n_ctx, n_threads=1)) as session:
            other = Chat(session, template=chat.template.source, system=system, options=chat.options)
            assert other.ask("hi", max_tokens=1).finish().finished


def goes_on(talk: Talk) -> None:
    """A short message is read and answered, at the latest when all that was named was done."""
    for _ in range(4):
        try:
            reply = talk.chat.ask("hi", max_tokens=2, sampling=TALKS_ON).finish()
        except ContextFull as err:  # noqa: PERF203
            if not talk.helped(str(err)):
                return
        except TemplateError:  # two messages of a person in a row, say
            return
        else:
            assert reply.timings.generated
            return
    raise AssertionError("what the errors named did not help")


def run(model: Model, name: str, n_ctx: int, policy: str, options: dict[str, object], steps: list[tuple]) -> None:
    chosen = None if policy == "none" else policies.parse(policy)
    with Engine(model, Settings(n_ctx=n_ctx, n_threads=1)) as engine:
        chat = Chat(
            Session(engine), template=family(name), system="Be terse." if name == "chatml" else None,
            options=Options(policy=chosen, summary_tokens=12, max_tokens=8, **options),  # type: ignore[arg-type]
        )  # fmt: skip
        talk = Talk(chat)
        try:
            for step in steps:
                before = chat.messages
                try:
                    talk.step(*step)
                except (ContextFull, TemplateError):
                    assert chat.messages[: len(before)] == before
                except (BadState, PinnedTokens, UnknownSpan, UsageError, MaskUnsupported):
                    assert step[0] not in ("ask", "user", "tool", "assistant")
                chat.session.audit()
                goes_on(talk)
            for fork in talk.forks:
                fork.session.close()
            check(chat)
        finally:
            talk.close()


CASES = st.tuples(
    st.sampled_from([96, 160, 256]),
    st.sampled_from(POLICIES),
    st.fixed_dictionaries({"spill": st.sampled_from(["evict", "park"]), "then": st.sampled_from(["none", "auto"])}),
    STEPS,
)


@pytest.fixture(scope="module")
def models(tiny_path: TinyPath) -> Callable[[str], Model]:
    opened: dict[str, Model] = {}

    def model(kind: str) -> Model:
        if kind not in opened:
            opened[kind] = Model(tiny_path(kind))
        return opened[kind]

    return model


def goes_on_whatever_is_said(model: Model, name: str, examples: int) -> None:
    @settings(
        max_examples=examples, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None,
        phases=[Phase.generate],  # shrinking takes minutes
    )  # fmt: skip
    @given(CASES)
    def test(case: tuple[int, str, dict[str, object], list[tuple]]) -> None:
        run(model, name, *case)

    test()


@pytest.mark.parametrize(("kind", "name"), [("llama", "chatml"), ("yarn", "chatml"), ("llama", "qwen3")])
def test_a_chat_goes_on(models: Callable[[str], Model], kind: str, name: str) -> None:
    goes_on_whatever_is_said(models(kind), name, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chatml", "qwen3", "gptoss", "mistral", "gemma", "llama3", "toolcalls"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "yarn", "mrope"])
def test_a_chat_goes_on_for_long(models: Callable[[str], Model], kind: str, name: str) -> None:
    goes_on_whatever_is_said(models(kind), name, 100)
