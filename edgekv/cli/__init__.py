"""The ``edgekv`` command: a table of commands that load when used, and the one error boundary of them all.

Exit codes: 0 done, 1 an error (said on stderr), 2 a wrong call, 130 interrupted; a command that returns an
int chooses its own. stdout carries results only. ``EDGEKV_DEBUG=1`` adds the traceback. Nothing here may
import llama_cpp, numpy or rich: ``edgekv --help`` answers at once, and works where those are broken.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import io
import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import click

from edgekv.errors import EdgekvError, UsageError

# name -> (where the command is, the first sentence of its help: a test compares)
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("edgekv.cli.demo:demo", "Show the whole idea in a minute, on a small model"),
    "compare": (
        "edgekv.cli.compare:compare",
        "Measure mask-and-continue against restart, on your model, text and CPU",
    ),
    "bench": ("edgekv.cli.bench:bench", "Measure long conversations, beside the other ways to lead them"),
    "chat": ("edgekv.cli.chat:chat", "Talk with a model, offline, for as long as you like"),
    "run": ("edgekv.cli.run:run", "Read files as named parts, hide some of them, ask a question"),
    "prefill": (
        "edgekv.cli.prefill:prefill",
        "Read a text once, into a KV module that sessions attach without reading it",
    ),
    "inspect": (
        "edgekv.cli.inspect:inspect_",
        "Say what a model, a session file or a KV module is, and what a model's cache can do",
    ),
    "models": ("edgekv.cli.models:models", "List, fetch and find the models known by name"),
    "doctor": ("edgekv.cli.doctor:doctor", "Check that edgekv and llama.cpp work here"),
}

_EPILOG = """\b
Environment:
  EDGEKV_MODELS=FOLDER  where model files lie
  EDGEKV_DEBUG=1        show the traceback of an error
  NO_COLOR=1            no colours"""


class Commands(click.Group):
    """Reads COMMANDS, imports a command only to run it, and turns every exception into an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"no command is called {args[0]!r}{meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, f"{short}.") for name, (_, short) in COMMANDS.items()])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Never returns: the exit code is raised as SystemExit."""
        kwargs["standalone_mode"] = False
        sys.exit(_guarded(lambda: super(Commands, self).main(*args, **kwargs)))


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib import metadata  # slow to import

        try:
            click.echo(f"edgekv {metadata.version('edgekv')}")
        except metadata.PackageNotFoundError:
            click.echo("edgekv (not installed: running from a folder)")
        ctx.exit()


@click.group(
    cls=Commands,
    invoke_without_command=True,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Say which.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Edit what a local model may look at, without reading its context again."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """The console entry point; never returns."""
    cli(prog_name="edgekv")


def _guarded(run: Callable[[], object]) -> int:
    """The exit code of ``run``; what it raised is said on stderr first."""
    codecs.register_error("edgekv", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a narrow encoding costs a character, not the answer
            stream.reconfigure(errors="edgekv")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _note
            result = run()
        if sys.stdout:
            sys.stdout.flush()  # here, where a closed pipe or a full disk can still be answered
        return result if isinstance(result, int) else 0
    except BaseException as exc:
        code = _exit_code(exc)
        if os.environ.get("EDGEKV_DEBUG") == "1":
            import traceback

            traceback.print_exc()
        _say(exc)
        return code


#: What stands for characters of our own tables and sentences where the encoding has none of them.
_ASCII: Final = {"·": "-", "…": "...", "█": "#", "▒": "%", "▫": "o", "—": "-", "–": "-", "→": "->", "×": "x", "±": "+-"}


def _in_ascii(err: UnicodeError) -> tuple[str, int]:
    """An error handler for output: signs of ours become ASCII ones, other characters their escapes."""
    if not isinstance(err, UnicodeEncodeError):
        raise err
    if (sign := _ASCII.get(err.object[err.start])) is not None:
        return sign, err.start + 1
    err.end = err.start + 1
    return codecs.backslashreplace_errors(err)  # type: ignore[return-value]


def _note(message: Warning | str, *_: object, **__: object) -> None:
    """A warning, as a note on stderr."""
    with contextlib.suppress(OSError):
        click.echo(f"note: {message}", err=True)


def _exit_code(exc: BaseException) -> int:
    if isinstance(exc, SystemExit):
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    if isinstance(exc, (click.Abort, KeyboardInterrupt)):
        return 130
    if isinstance(exc, click.ClickException):
        return exc.exit_code
    return 2 if isinstance(exc, UsageError) else 1


def _say(exc: BaseException) -> None:
    if isinstance(exc, OSError):
        _abandon_stdout()
    if message := _message(exc):
        with contextlib.suppress(OSError):  # stderr may be gone too
            click.echo(message, err=True)


def _message(exc: BaseException) -> str:
    if isinstance(exc, (SystemExit, BrokenPipeError)):
        return ""
    if isinstance(exc, (click.Abort, KeyboardInterrupt)):
        return "interrupted"
    if isinstance(exc, click.ClickException):
        return _click_message(exc)
    if isinstance(exc, OSError):
        where = f"{exc.filename}: " if exc.filename is not None else ""
        return f"error: {where}{exc.strerror or exc}"
    if isinstance(exc, (EdgekvError, ImportError)):
        return f"error: {exc}"
    if isinstance(exc, MemoryError):
        return "error: out of memory"
    return f"error: {type(exc).__name__}: {exc} (a bug in edgekv; EDGEKV_DEBUG=1 shows where)"


def _click_message(exc: click.ClickException) -> str:
    if type(exc).__name__ == "NoArgsIsHelpError":  # by name: click has it since 8.2
        return exc.format_message()
    message = exc.format_message()
    context = getattr(exc, "ctx", None)
    hint = f"\ntry: {context.command_path} --help" if context else ""
    return f"error: {message}{hint}"


def _abandon_stdout() -> None:
    """Let the interpreter's last flush succeed: what is buffered has nowhere to go."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        out = sys.stdout.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)
