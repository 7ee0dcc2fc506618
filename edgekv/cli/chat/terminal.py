"""Terminal: the screen of a person: an editor for several lines, history, completion, a status line."""

from __future__ import annotations

import contextlib
import sys
import termios
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.color_depth import ColorDepth
from rich.text import Text

from edgekv.cli.chat.conversations import state_folder
from edgekv.cli.chat.screen import Plain
from edgekv.cli.chat.wrapping import Wrap
from edgekv.cli.output import console, talk
from edgekv.wording import harmless, mended

if TYPE_CHECKING:
    from edgekv.cli.chat.screen import Look
    from edgekv.reply import Reply

_DIM, _RESET = "\x1b[2m", "\x1b[0m"
_PASTES, _NO_PASTES = "\x1b[?2004h", "\x1b[?2004l"  # whether a paste comes between marks


class Terminal(Plain):
    """Enter sends, Alt-Enter begins a line; a paste of many lines is one message. Ctrl-C takes back what
    was typed, Ctrl-D on an empty line ends."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self._out = console()
        self._look = look
        self._thinking = False
        self._wrap: Wrap | None = None
        self._prompt: PromptSession[str] = PromptSession(
            history=_history(),
            completer=_Commands(look),
            complete_while_typing=False,
            key_bindings=_keys(),
            multiline=True,
            bottom_toolbar=lambda: look.status(self._out.size.width),
            prompt_continuation=lambda _width, _line, _wrapped: "… ",
            color_depth=ColorDepth.DEPTH_1_BIT if self._out.no_color else None,
        )

    def lines(self) -> Generator[str, None, None]:
        with _typed_ahead():
            while (line := self._line()) is not None:
                click.echo(_PASTES, nl=False)  # the editor has turned it off
                yield line

    def _line(self) -> str | None:
        try:
            return self._prompt.prompt(self._look.prompt())
        except EOFError:
            return None

    def piece(self, kind: str, text: str) -> None:
        thinking = kind == "thinking"
        if thinking != self._thinking:
            self._end_part()
            self._style(_DIM if thinking else _RESET)
            click.echo("" if thinking else "\n", nl=not thinking)
            self._thinking = thinking
        self._wrap = self._wrap or Wrap(self._out.size.width)
        click.echo(self._wrap.feed(harmless(text)), nl=False)

    def _end_part(self) -> None:
        if self._wrap is not None:
            click.echo(self._wrap.finish(), nl=False)
        self._wrap = None

    def note(self, text: str) -> None:
        talk().print(harmless(text), style="dim", markup=False)

    def error(self, text: str) -> None:
        talk().print(Text.assemble(("error: ", "red"), harmless(text)))

    def _style(self, code: str) -> None:
        if not self._out.no_color:
            click.echo(code, nl=False)

    def answered(self, reply: Reply, facts: dict[str, Any]) -> None:
        self._end_part()
        if self._thinking:
            self._style(_RESET)
            self._thinking = False
        super().answered(reply, facts)


@contextlib.contextmanager
def _typed_ahead() -> Iterator[None]:
    """What is typed or pasted while an answer comes waits, unseen and as it was typed, for the editor; Ctrl-C works."""
    stream = sys.stdin.fileno()
    before = termios.tcgetattr(stream)
    mode = termios.tcgetattr(stream)
    mode[0] &= ~termios.ICRNL
    mode[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(stream, termios.TCSANOW, mode)
    try:
        yield
    finally:
        click.echo(_NO_PASTES, nl=False)
        termios.tcsetattr(stream, termios.TCSANOW, before)


class _Commands(Completer):
    """Completes commands and what stands behind them."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:  # noqa: ARG002
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        word = text.rsplit(" ", 1)[-1]
        for found in self._look.complete(text):
            yield Completion(found, start_position=-len(word))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")  # not Ctrl-J as well: what is typed ahead of the prompt comes with it for Enter
    def line(event: KeyPressEvent) -> None:
        event.current_buffer.newline()

    return keys


def _history() -> History:
    """What was typed before, on this machine; only in memory where no file can be written."""
    folder = state_folder()
    if folder is None:
        return InMemoryHistory()
    path = folder / "chat-history"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return _History(str(path))


class _History(FileHistory):
    """A file that a full disk does not turn into an end of the chat."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(mended(string))
