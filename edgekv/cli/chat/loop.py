"""The loop of a chat: a line is a message or a command; an error is said, and nothing is lost. No terminal in here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from edgekv import Model
from edgekv._llama import uninterrupted
from edgekv.chat import Chat
from edgekv.cli.chat import commands
from edgekv.cli.chat.conversations import Autosave, Kept
from edgekv.cli.chat.opening import Opened
from edgekv.cli.chat.screen import Screen
from edgekv.errors import ContextFull, EdgekvError, SessionBroken
from edgekv.reply import Reply
from edgekv.wording import count, mended


@dataclass
class Branch:
    """A chat, and where it is kept; None for nowhere."""

    chat: Chat
    autosave: Autosave | None


@dataclass
class State:
    """What the loop and its commands share, and the owner of all that is open: :meth:`close` closes it.

    branches: the newest fork last; the others wait. model: below all of them. shown: the conversations that were
    listed last. failed: whether an error was reported. noted: the notes that were shown.
    """

    screen: Screen
    model: Model | None = None
    branches: list[Branch] = field(default_factory=list)
    shown: list[Kept] = field(default_factory=list)
    failed: bool = False
    ended: bool = False
    noted: list[str] = field(default_factory=list)

    @property
    def branch(self) -> Branch:
        return self.branches[-1]

    @property
    def chat(self) -> Chat:
        return self.branch.chat

    def go_on_with(self, opened: Opened) -> None:
        """Take another chat in the place of what is open, which is closed."""
        with uninterrupted():
            old = State(self.screen, None if opened.model is self.model else self.model, self.branches)
            self.model, self.branches = opened.model, [Branch(opened.chat, opened.autosave)]
            old.close()

    def close(self) -> None:
        """Close the sessions, then the model."""
        while self.branches:
            self.branches.pop().chat.session.close()
        if self.model is not None:
            self.model.close()

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
        self._unsaved = False  # whether a failed autosave was reported

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
        """One line, to its end; what goes wrong is reported, and what has changed is kept."""
        line = mended(line)
        if not line.strip():
            return
        self._carry_out(line)
        self._note_new()
        self._save()

    def _carry_out(self, line: str) -> None:
        try:
            if line.startswith("/"):
                commands.run(self.state, line)
            else:
                self.ask(line)
        except KeyboardInterrupt:
            unchanged = "nothing was changed" if line.startswith("/") else "the message is not in the conversation"
            self.state.screen.note(f"interrupted: {unchanged}")
        except SessionBroken as err:
            self._failed(f"{err}; /load lists what was saved")
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
        """Show an answer as it comes; Ctrl-C ends it and keeps what was generated."""
        began, screen = time.perf_counter(), self.state.screen
        with contextlib.closing(reply):
            try:
                for kind, piece in reply.pieces():
                    screen.piece(kind, piece)
            except KeyboardInterrupt:
                pass
            except ContextFull as err:
                self._failed(f"{err}. The answer so far stays")
        screen.answered(reply, _facts(reply, time.perf_counter() - began))

    def _note_new(self) -> None:
        for note in self.state.chat.notes:
            if note not in self.state.noted:
                self.state.noted.append(note)
                self.state.screen.note(f"note: {note}")

    def _save(self) -> None:
        """The autosave. Where it fails, as on a full disk, the chat goes on, and the next line tries again."""
        autosave = self.state.branch.autosave
        if autosave is None:
            return
        before = autosave.path
        try:
            autosave.save(self.state.chat)
        except KeyboardInterrupt:
            self.state.screen.note("interrupted: the autosave is the one before")
        except (EdgekvError, OSError) as err:
            if not self._unsaved:
                self.state.screen.note(f"note: the conversation is not kept: {err}")
            self._unsaved = True
        else:
            self._unsaved = False
        if before is not None and autosave.path != before:
            self.state.screen.note(f"note: kept in {autosave.path} from now on: {before} was changed by somebody else")


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
