"""The loop of a chat: a line is a message or a command; an error is said, and nothing is lost. No terminal in here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgekv.chat import Chat
from edgekv.cli.chat import commands
from edgekv.cli.chat.screen import Screen
from edgekv.errors import ContextFull, EdgekvError, SessionBroken
from edgekv.reply import Reply
from edgekv.sampling import Sampling
from edgekv.wording import count


@dataclass
class State:
    """What the loop and its commands share. ``branches``: the newest fork last; the others wait. ``autosave``: the
    file written after each answer, None for none. ``failed``: whether an error was said."""

    branches: list[Chat]
    screen: Screen
    autosave: Path | None = None
    failed: bool = False
    ended: bool = False
    told: list[str] = field(default_factory=list)

    @property
    def chat(self) -> Chat:
        return self.branches[-1]

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """A block whose reading is shown as progress."""
        session = self.chat.session
        with self.screen.progress(what) as session.progress:
            try:
                yield
            finally:
                session.progress = None


class Loop:
    """Reads lines from a screen until they end; :meth:`run` returns the exit code."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._interrupted = False

    def run(self) -> int:
        while True:
            try:
                self._read_lines()
                return int(self.state.failed)
            except KeyboardInterrupt:  # noqa: PERF203 - at the prompt
                if self._interrupted:
                    return int(self.state.failed)
                self._interrupted = True
                self.state.screen.note("Ctrl-C again, Ctrl-D or /exit ends the chat")

    def _read_lines(self) -> None:
        with contextlib.closing(self.state.screen.lines()) as lines:
            for line in lines:
                self._interrupted = False
                self.line(line)
                if self.state.ended:
                    return

    def line(self, line: str) -> None:
        """One line, to its end; what goes wrong is said."""
        if not line.strip():
            return
        try:
            if line.startswith("/"):
                commands.run(self.state, line)
            else:
                self.ask(line)
        except KeyboardInterrupt:
            self.state.screen.note(
                f"interrupted: {'nothing was changed' if line[0] == '/' else 'nothing of it was read'}"
            )
        except SessionBroken as err:
            self._failed(f"{err}; /load brings back what was saved")
        except ContextFull as err:
            self._failed(f"{err}. The conversation is as it was")
        except BrokenPipeError:
            raise  # nobody reads any more
        except (EdgekvError, OSError) as err:
            self._failed(str(err))

    def _failed(self, message: str) -> None:
        self.state.failed = True
        self.state.screen.error(message)

    def ask(self, message: str) -> None:
        """A message and its answer."""
        with self.state.reading("reading"):
            reply = self.state.chat.ask(message)
        self.answer(reply)

    def answer(self, reply: Reply) -> None:
        """Say an answer as it comes; Ctrl-C ends it and keeps what was said."""
        began, screen = time.perf_counter(), self.state.screen
        try:
            for kind, piece in reply.pieces():
                screen.piece(kind, piece)
        except KeyboardInterrupt:
            reply.close()
        except ContextFull as err:
            reply.close()
            self._failed(f"{err}. What was said stays")
        screen.answered(reply, _facts(reply, time.perf_counter() - began))
        self._tell_notes()
        self._save()

    def _tell_notes(self) -> None:
        told = self.state.told
        for note in self.state.chat.notes:
            if note not in told:
                told.append(note)
                self.state.screen.note(f"note: {note}")

    def _save(self) -> None:
        """The autosave; a disk that is full ends it, and not the chat."""
        path = self.state.autosave
        if path is None:
            return
        try:
            self.state.chat.save(path)
        except KeyboardInterrupt:
            self.state.screen.note("interrupted: the autosave is that of the answer before")
        except (EdgekvError, OSError) as err:
            self.state.autosave = None
            self.state.screen.note(f"note: no autosave any more: {err}")


def _facts(reply: Reply, seconds: float) -> dict[str, Any]:
    timings = reply.timings
    return {
        "text": reply.text,
        "reasoning": reply.reasoning,
        "tool_calls": list(reply.tool_calls),
        "finish_reason": reply.finish_reason,
        "timings": {**asdict(timings), "tokens_per_s": timings.tokens_per_s},
        "answer_ms": seconds * 1e3,
        "receipts": [receipt.as_dict() for receipt in reply.receipts],
    }


def status(state: State, width: int) -> str:
    """The status line: cells by state, as much of it as the window has room for."""
    stats, branches = state.chat.session.stats, len(state.branches) - 1
    parts = [
        f"{stats.cells_used:,}/{stats.cells:,} cells",
        f"{stats.visible:,} visible",
        *([f"{stats.masked:,} masked"] if stats.masked else []),
        *([f"{stats.parked:,} parked"] if stats.parked else []),
        *([f"{stats.evicted:,} evicted"] if stats.evicted else []),
        *([count(branches, "fork")] if branches else []),
        str(state.chat.options.policy or "no policy"),
        state.chat.session.model.path.name,
    ]
    return _fitted(parts, width)


def prompt(state: State) -> str:
    forks = len(state.branches) - 1
    return f"fork {forks}> " if forks else "> "


def _fitted(parts: Iterable[str], width: int) -> str:
    line = ""
    for part in parts:
        longer = f"{line} · {part}" if line else f" {part}"
        if len(longer) > width:
            break
        line = longer
    return line


def settings(state: State) -> dict[str, Any]:
    """What /set shows."""
    options, sampling = state.chat.options, state.chat.session.sampling
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
    return {
        **{name: getattr(sampling, name) for name in names},
        "max_tokens": options.max_tokens,
        "policy": str(options.policy or "none"),
        "spill": options.spill,
        "then": options.then,
    }


DEFAULT_SAMPLING = Sampling(temperature=0.7, top_p=0.95, min_p=0.05)
