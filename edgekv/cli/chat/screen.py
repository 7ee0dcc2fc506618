"""Screens: where a chat's lines come from and where it is shown: a terminal, a pipe, another program."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import click

from edgekv.cli.output import StdinLines, Update, console, plain, progress, talk
from edgekv.wording import harmless

if TYPE_CHECKING:
    from rich.console import RenderableType

    from edgekv.reply import Reply

FENCE = '"""'  # a message of several lines stands between two of these, where there is no editor


class Screen(Protocol):
    """What the loop needs of one."""

    def lines(self) -> Generator[str, None, None]:
        """What a person enters, message by message; ends with the input. Raises KeyboardInterrupt."""

    def piece(self, kind: str, text: str) -> None:
        """A piece of an answer."""

    def answered(self, reply: Reply, facts: dict[str, Any]) -> None:
        """An answer has ended."""

    def show(self, event: str, facts: dict[str, Any], drawn: RenderableType | str) -> None:
        """A result of a command: facts for a program, a drawing for a person."""

    def note(self, text: str) -> None: ...

    def error(self, text: str) -> None: ...

    def progress(self, what: str) -> AbstractContextManager[Update]: ...


def summary_of(reply: Reply) -> str:
    """What an answer cost, in a line."""
    t = reply.timings
    parts = [f"{t.generated:,} tokens", f"{t.tokens_per_s:.0f} tokens/s", f"first after {t.ttft_ms / 1e3:.2f} s"]
    parts += [f"read {t.prefilled:,}", f"read again: {t.reread}"]
    return " · ".join(parts)


class Plain:
    """Lines from a pipe, text to stdout, talk to stderr. Several lines between two lines of three quotes are one
    message."""

    def __init__(self, *, interactive: bool = False) -> None:
        self._interactive = interactive
        self._stdin = StdinLines()

    def lines(self) -> Generator[str, None, None]:
        block: list[str] | None = None
        while line := self._read(block is not None):
            line = line.rstrip("\r\n")
            if line.strip() == FENCE:
                if block is not None:
                    yield "\n".join(block)
                block = [] if block is None else None
            elif block is not None:
                block.append(line)
            else:
                yield line
        if block:
            yield "\n".join(block)

    def _read(self, more: bool) -> str:
        if self._interactive:
            click.echo("… " if more else "> ", nl=False, err=True)
        return self._stdin.next()

    def piece(self, kind: str, text: str) -> None:
        if kind == "text":
            click.echo(harmless(text), nl=False)

    def answered(self, reply: Reply, facts: dict[str, Any]) -> None:  # noqa: ARG002
        click.echo()
        self.note(summary_of(reply))

    def show(self, event: str, facts: dict[str, Any], drawn: RenderableType | str) -> None:  # noqa: ARG002
        console().print(harmless(drawn) if isinstance(drawn, str) else drawn, markup=False)

    def note(self, text: str) -> None:
        talk().print(harmless(text), style="dim", markup=False, soft_wrap=True)

    def error(self, text: str) -> None:
        click.echo(f"error: {harmless(text)}", err=True)

    def progress(self, what: str) -> AbstractContextManager[Update]:
        return progress(what, unit="tokens")


class Events(Plain):
    """A JSON object a line on stdout, for other programs: every one has an "event". What comes in is a line as for a
    pipe, or {"message": TEXT}, which may hold newlines and begin with a slash."""

    def lines(self) -> Generator[str, None, None]:
        while line := self._read(False):
            yield _message(line.rstrip("\r\n"))

    def piece(self, kind: str, text: str) -> None:
        self._say("piece", {"kind": kind, "text": text})

    def answered(self, reply: Reply, facts: dict[str, Any]) -> None:  # noqa: ARG002
        self._say("answer", facts)

    def show(self, event: str, facts: dict[str, Any], drawn: RenderableType | str) -> None:  # noqa: ARG002
        self._say(event, facts)

    def note(self, text: str) -> None:
        self._say("note", {"text": text})

    def error(self, text: str) -> None:
        self._say("error", {"message": text})

    def _say(self, event: str, facts: dict[str, Any]) -> None:
        click.echo(self.encoded(event, facts))

    @staticmethod
    def encoded(event: str, facts: dict[str, Any]) -> str:
        """An event as JSON; in ASCII where the output has another encoding than JSON's UTF-8."""
        ascii_only = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") != "utf8"
        return json.dumps(plain({"event": event, **facts}), ensure_ascii=ascii_only, allow_nan=False)


def _message(line: str) -> str:
    """The text of a line; a message that begins with a slash is told from a command by a space in front of it."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if not isinstance(given, dict) or not isinstance(text := given.get("message"), str):
        return line
    return f" {text}" if text.startswith("/") else text


@dataclass(frozen=True)
class Look:
    """What a terminal asks while a person types: what a word may become, the status line for a width, the prompt."""

    complete: Callable[[str], Iterable[str]]
    status: Callable[[int], str]
    prompt: Callable[[], str]


def open_screen(look: Look, *, as_json: bool) -> Screen:
    """The screen that suits stdin and stdout."""
    if as_json:
        return Events()
    types, shows = _is_terminal(sys.stdin), _is_terminal(sys.stdout)
    if not (types and shows):
        return Plain(interactive=types)
    from edgekv.cli.chat.terminal import Terminal

    return Terminal(look)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()
