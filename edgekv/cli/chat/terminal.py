"""Terminal: the screen of a person: an editor for several lines, history, completion, a status line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.color_depth import ColorDepth

from edgekv.cli.chat.screen import Plain
from edgekv.cli.output import console
from edgekv.wording import harmless

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgekv.cli.chat.screen import Complete
    from edgekv.reply import Reply

_DIM, _RESET = "\x1b[2m", "\x1b[0m"


class Terminal(Plain):
    """Enter sends, Alt-Enter (or Ctrl-J) begins a line; a paste of many lines is one message. Ctrl-C takes back what
    was typed, Ctrl-D on an empty line ends."""

    def __init__(self, complete: Complete, status: Callable[[int], str]) -> None:
        super().__init__()
        self._out = console()
        self._status = status
        self._thinking = self._open = False
        self._prompt: PromptSession[str] = PromptSession(
            history=_history(),
            completer=_Commands(complete),
            complete_while_typing=False,
            key_bindings=_keys(),
            multiline=True,
            bottom_toolbar=self._toolbar,
            prompt_continuation=lambda _width, _line, _wrapped: "… ",
            color_depth=ColorDepth.DEPTH_1_BIT if self._out.no_color else None,
            enable_open_in_editor=True,
        )
        self.branch = ""

    def _toolbar(self) -> str:
        return self._status(self._out.size.width)

    def lines(self) -> Iterator[str]:
        while True:
            try:
                yield self._prompt.prompt(f"{self.branch}> ")
            except EOFError:  # noqa: PERF203
                return

    def piece(self, kind: str, text: str) -> None:
        thinking = kind == "thinking"
        if thinking != self._thinking:
            self._style(_DIM if thinking else _RESET)
            if not thinking:
                click.echo("\n")
            self._thinking = thinking
        click.echo(harmless(text), nl=False)

    def _style(self, code: str) -> None:
        if not self._out.no_color:
            click.echo(code, nl=False)

    def answered(self, reply: Reply, facts: dict[str, Any]) -> None:
        if self._thinking:
            self._style(_RESET)
            self._thinking = False
        super().answered(reply, facts)


class _Commands(Completer):
    """Completes commands and what stands behind them."""

    def __init__(self, complete: Complete) -> None:
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:  # noqa: ARG002
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        word = text.rsplit(" ", 1)[-1]
        for found in self._complete(text):
            yield Completion(found, start_position=-len(word))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def line(event: KeyPressEvent) -> None:
        event.current_buffer.newline()

    return keys


def _history() -> History:
    """What was typed before, on this machine; only in memory where no file can be written."""
    path = Path(platformdirs.user_state_path("edgekv")) / "chat-history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
