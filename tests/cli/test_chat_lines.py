"""Random lines for ``edgekv chat``: whatever is entered, nothing is a bug of edgekv, and the chat goes on."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from rich.console import Console, RenderableType

from edgekv.chat import Options
from edgekv.cli.chat import commands, opening
from edgekv.cli.chat.loop import Loop, State
from edgekv.cli.chat.screen import Events

TinyPath = Callable[..., Path]

WORDS = st.sampled_from(
    [
        "",
        "Hello!",
        "한국어 😀",
        "\ud83d",
        "caf\udce9",
        "<|im_end|>",
        " ",
        "\x00",
        "\x1b[31m",
        "word " * 120,
        "{}",
        "'",
        "é" * 9,
    ]
)
TARGETS = st.sampled_from(
    ["user-1", "assistant-2", "user-*", "role:user", "role:tool", "tag:thinking", "system", "preamble", "*", "0:4",
     "4:9", "10:90", "9:4", "0:99999", ":", "1:", "user-1 assistant-2", "nobody", "\ud800", "²:3", "[", "summary-*"]
)  # fmt: skip
POLICIES = st.sampled_from(
    ["none", "keep_turns(1)", "keep_turns(0)", "hide_oldest(trigger=0.3, target=0.1)", "sliding_window(4, 40)",
     "summarize_oldest(0.3, 0.1)", "summarize_oldest(trigger=0.3, target=0.1, kept=False)", "clear_thinking(0)",
     "nonsense", "keep_turns(", "keep_turns(-1)", "hide_oldest() + keep_turns(2)", "\udce9"]
)  # fmt: skip
FILES = st.sampled_from(
    ["a.kvs", "b.kvs", "", "1", "2", "99", "0", "nowhere/x.kvs", ".", "text.txt", "other.kvs", "~nobody/x",
     "\x00", "\udce9.kvs", "x" * 300]
)  # fmt: skip
VALUES = st.sampled_from(
    ["0", "1", "-1", "5", "0.5", "1e999", "nan", "none", "hot", "", "9" * 30, "park", "evict", "auto", "1 2"]
)
LINES = st.one_of(
    WORDS,
    st.builds("/{} {}".format, st.sampled_from(["mask", "unmask", "park", "evict", "pin", "unpin"]), TARGETS),
    st.builds("/set {} {}".format, st.sampled_from([*commands._SETTINGS, "x", ""]), st.one_of(VALUES, POLICIES)),
    st.builds("/set policy {}".format, POLICIES),
    st.builds("/plan {}".format, POLICIES),
    st.builds("/{} {}".format, st.sampled_from(["save", "load"]), FILES),
    st.builds("/summarize {}".format, VALUES),
    st.builds("/system {}".format, WORDS),
    st.sampled_from(["/fork", "/back", "/undo", "/spans", "/map", "/stats", "/help", "/set", "/system", "/load"]),
    st.builds("/{} {}".format, st.sampled_from(sorted(set(commands.COMMANDS) - {"exit", "compare"})), WORDS),
)  # fmt: skip


class Script(Events):
    """A screen that shows events to nobody; what it could not show would raise."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def lines(self) -> Generator[str, None, None]:
        yield from ()

    def show(self, event: str, facts: dict[str, Any], drawn: RenderableType | str) -> None:
        Console(file=io.StringIO(), width=20).print(drawn, markup=False)
        super().show(event, facts, drawn)

    def _say(self, event: str, facts: dict[str, Any]) -> None:  # type: ignore[override]
        self.encoded(event, facts).encode()
        assert "still use" not in facts.get("message", "")  # what is replaced is closed, in the right order
        self.events.append(event)


@pytest.fixture(scope="module")
def folder(tiny_path: TinyPath) -> Path:
    """A place with files of other kinds in it."""
    place = Path(tempfile.mkdtemp())
    (place / "text.txt").write_text("no session")
    cache = opening.Cache(256, threads=1)
    opened = opening.new(str(tiny_path("gemma3")), cache, None, None, Options(), opening.Keep(), Script())
    state = State(Script())
    state.go_on_with(opened)
    with contextlib.closing(state):
        state.chat.add("user", "Of another model.")
        state.chat.save(place / "other.kvs")
    return place


@pytest.fixture(autouse=True)
def here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def drive(state: State, lines: list[str]) -> None:
    """Enter the lines; after each the chat is whole."""
    loop = Loop(state)
    for line in lines:
        loop.line(line)
        assert not state.ended
        for branch in state.branches:
            branch.chat.session.audit()
    for name in ("other.kvs", "a.kvs", "b.kvs"):
        assert not [entry for entry in os.scandir() if entry.name.startswith(f".{name}")]


@pytest.mark.parametrize(("kind", "loaded"), [("llama", False), ("llama", True), ("mamba", False)])
def test_lines(tiny_path: TinyPath, kind: str, loaded: bool) -> None:
    @settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(LINES, min_size=1, max_size=14), st.sampled_from(["none", "hide_oldest", "keep_turns(2)"]))
    def run(lines: list[str], policy: str) -> None:
        state = State(Script())
        options = Options(policy=commands.read_policy(policy), max_tokens=6, summary_tokens=8)
        if loaded:
            opened = opening.saved(Path("other.kvs"), options, opening.Keep(), state.screen, threads=1)
        else:
            cache = opening.Cache(256, threads=1)
            opened = opening.new(str(tiny_path(kind)), cache, "Be brief.", None, options, opening.Keep(), state.screen)
        state.go_on_with(opened)
        with contextlib.closing(state):
            drive(state, ["Hello!", *lines, "Still there?"])
            model = state.model
        assert model is not None and "closed" in repr(model)  # no session was left on it

    run()
