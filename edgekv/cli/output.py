"""What all commands print with: results on stdout, talk on stderr, JSON, progress, shared options.

rich is imported by the functions that draw, not at the top: a command that prints JSON does not pay for it.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
import math
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

import click
from click.shell_completion import CompletionItem

from edgekv.catalog import DEFAULT, entries
from edgekv.errors import UsageError
from edgekv.wording import encoding_of, mended, printable, size

if TYPE_CHECKING:
    from rich.console import Console

Update = Callable[[int, int], None]
Unit = Literal["B", "%", "tokens", "steps", ""]  # "%": the counts themselves mean nothing to a reader
F = TypeVar("F", bound=Callable[..., Any])

_PIPED_WIDTH = 160  # wide enough that a table keeps one row a line for grep
_BAR_AFTER_S = 0.5
_PLAIN_STEP = 10  # percent
_PLAIN_FIRST_S = 1.0
_PLAIN_EVERY_S = 2.0
_PLAIN_SILENCE_S = 15.0


def console() -> Console:
    """For results, on stdout; plain text when piped."""
    return _console(stderr=False)


def talk() -> Console:
    """For notes and progress, on stderr."""
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _PIPED_WIDTH
    return made


def stdin_bytes() -> bytes:
    """All of standard input; a person at a terminal is told how to end it."""
    if sys.stdin is None:
        raise UsageError("standard input is closed: there is nothing to read from it")
    if sys.stdin.isatty():
        talk().print("reading from the terminal; end with Ctrl-D on a line of its own", style="dim")
    return sys.stdin.buffer.read()


class StdinLines:
    """Standard input, line by line as it comes: UTF-8, or what a byte order mark announces; other bytes are U+FFFD."""

    def __init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None
        self._text = ""
        self._ended = False

    def next(self) -> str:
        """The next line with its line feed; the last may have none, and after it comes ""."""
        while "\n" not in self._text and not self._ended:
            data = b"" if sys.stdin is None else _bytes_of_stdin().readline()
            if self._decoder is None:
                self._decoder = codecs.getincrementaldecoder(encoding_of(data))("replace")
            self._text += self._decoder.decode(data, final=not data)
            self._ended = not data
        line, found, self._text = self._text.partition("\n")
        return line + found


def _bytes_of_stdin() -> BinaryIO:
    return sys.stdin.buffer


def print_json(obj: object) -> None:
    """One JSON value and a newline on stdout. NaN and infinities become null; dataclasses and paths work."""
    click.echo(json.dumps(plain(obj), indent=2, allow_nan=False))


def plain(obj: Any) -> Any:
    """``obj`` in the types JSON has. Raises TypeError where there is no honest way."""
    if isinstance(obj, float):
        return float(obj) if math.isfinite(obj) else None
    if obj is None or isinstance(obj, int):
        return obj
    if isinstance(obj, str):
        return mended(obj)
    if isinstance(obj, dict):
        return {mended(str(key)): plain(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [plain(value) for value in obj]
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {field.name: plain(getattr(obj, field.name)) for field in dataclasses.fields(obj)}
    if isinstance(obj, os.PathLike):
        return plain(os.fspath(obj))
    if hasattr(obj, "tolist"):  # numpy's scalars and arrays, without importing numpy
        return plain(obj.tolist())
    raise TypeError(f"{type(obj).__name__} has no JSON form")


def print_facts(rows: Iterable[tuple[str, str]]) -> None:
    """Lines of a name and what there is to say, on stdout.

    On a terminal the saying wraps beside the name's column; piped, a fact stays one line, for grep.
    """
    from rich.text import Text

    facts, out = list(rows), console()
    indent = max((len(name) for name, _ in facts), default=0) + 2
    width = out.width - indent if out.is_terminal or "COLUMNS" in os.environ else sys.maxsize
    for name, value in facts:
        wrapped = textwrap.wrap(printable(value), max(20, width), break_long_words=False, break_on_hyphens=False)
        said = f"\n{' ' * indent}".join(wrapped)
        out.print(Text.assemble((name.ljust(indent), "bold"), said), soft_wrap=True)


@contextlib.contextmanager
def progress(description: str, total: int = 0, unit: Unit = "", *, eta: bool = False) -> Iterator[Update]:
    """Yield ``update(done, total)``; total 0: unknown. On stderr: a bar on a terminal, else plain lines. ``eta``: with
    an estimate of the time that is left.

    The first plain line comes after 1 s, then one every 10 %, never within 2 s of the last, and after 15 s of
    silence in any case; work that ends within the first second prints nothing.
    """
    if sys.stderr and sys.stderr.isatty():
        with _bar(description, total, unit, eta=eta) as update:
            yield update
    else:
        lines = PlainProgress(description, unit, eta=eta)
        yield lines.update
        lines.close()


@contextlib.contextmanager
def _bar(description: str, total: int, unit: Unit, *, eta: bool) -> Iterator[Update]:
    from rich import progress as rp

    amount = {"B": rp.DownloadColumn(), "%": rp.TaskProgressColumn()}.get(unit) or rp.MofNCompleteColumn()
    columns = (
        rp.SpinnerColumn(),
        rp.TextColumn("{task.description}"),
        rp.BarColumn(),
        amount,
        rp.TimeElapsedColumn(),
        *((rp.TextColumn("left:"), rp.TimeRemainingColumn()) if eta else ()),
    )
    drawn = rp.Progress(*columns, console=talk(), transient=True)
    task = drawn.add_task(description, total=total or None)
    timer = threading.Timer(_BAR_AFTER_S, drawn.start)  # what is done by then needs no bar
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total: drawn.update(task, completed=done, total=total or None)
    finally:
        timer.cancel()
        timer.join()  # or it would begin to draw behind our back
        drawn.stop()


class PlainProgress:
    """Progress for logs and pipes; ``clock`` and ``write`` are there for tests."""

    def __init__(
        self,
        description: str,
        unit: Unit = "",
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] | None = None,
        *,
        eta: bool = False,
    ) -> None:
        self._eta = eta
        self._description, self._unit, self._clock = description, unit, clock
        self._write = write or (lambda line: click.echo(line, err=True))
        self._began_s = self._last_s = clock()
        self._step = 0  # the last tenth that was printed
        self._pending: tuple[int, int] | None = None  # told to us but not printed
        self._printed = False

    def update(self, done: int, total: int) -> None:
        silent_s = self._clock() - self._last_s
        step = done * 100 // total // _PLAIN_STEP if total else 0
        self._pending = (done, total)
        first = not self._printed and silent_s >= _PLAIN_FIRST_S
        if first or (step > self._step and silent_s >= _PLAIN_EVERY_S) or silent_s >= _PLAIN_SILENCE_S:
            self._step = step
            self._print()

    def close(self) -> None:
        """The last figure, if a reader has seen earlier ones."""
        if self._printed and self._pending:
            self._print()

    def _print(self) -> None:
        done, total = self._pending or (0, 0)
        self._pending, self._printed, self._last_s = None, True, self._clock()
        amount = f"{self._amount(done)} of {self._amount(total)}" if total else self._amount(done)
        percent = f"{done * 100 // total} %" if total else ""
        shown = [percent] if self._unit == "%" else [percent, amount]
        shown += [self._left(done, total)] if self._eta else []
        self._write(f"{self._description}: {', '.join(filter(None, shown))}")

    def _left(self, done: int, total: int) -> str:
        """As if it went on as fast as so far; nothing before there is something to go by."""
        if not 0 < done < total:
            return ""
        seconds = (self._clock() - self._began_s) * (total - done) / done
        return f"about {seconds:.0f} s left" if seconds < 100 else f"about {seconds / 60:.0f} min left"

    def _amount(self, count: int) -> str:
        return size(count) if self._unit == "B" else f"{count:,} {self._unit}".rstrip()


def complete_model(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For shell completion: the names of the manifest, then files."""
    names = [CompletionItem(entry.name) for entry in entries() if entry.name.startswith(incomplete)]
    return [*names, CompletionItem(incomplete, type="file")]


class Words(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A text for a model, from an argument that may be no UTF-8."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002
        return mended(str(value))


_MODEL_HELP = "A model known by name (see: edgekv models list) or the path of a GGUF file."


def json_option(function: F) -> F:
    """``--json``, as the parameter ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")(function)


def model_option(function: F) -> F:
    """``-m/--model``, as the parameter ``model``: a str for ``catalog.resolve``."""
    return click.option(
        "-m",
        "--model",
        metavar="NAME|FILE",
        default=DEFAULT,
        show_default=True,
        help=_MODEL_HELP,
        shell_complete=complete_model,
    )(function)


def model_argument(function: F) -> F:
    """An optional ``[NAME|FILE]``, as the parameter ``model``: a str for ``catalog.resolve``."""
    return click.argument(
        "model", metavar="[NAME|FILE]", default=DEFAULT, required=False, shell_complete=complete_model
    )(function)
