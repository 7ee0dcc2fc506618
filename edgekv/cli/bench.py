"""``edgekv bench``: whole conversations against the clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.cli.compare import check_writable, write_all
from edgekv.cli.output import console, model_argument, progress

if TYPE_CHECKING:
    from rich.table import Table

    from edgekv.longrun import Result


@click.group(invoke_without_command=True)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure long conversations, beside the other ways to lead them."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


_HELP = """Lead one long conversation in four ways, turn and turn about.

    \b
    edgekv bench chat smollm2 --turns 60 --plot chat.html

    The same messages, in a cache that is soon too small for them: a chat that hides its oldest turns; one that sums
    them up first; a list of messages that is trimmed and read again, as wrappers do; llama_cpp.Llama on the same list.
    Of every turn: how long the first token takes, and how many tokens are read.

    stdout is a table and what it says; --json holds every turn. Ctrl-C ends it and reports what is finished.
    """


@bench.command(help=_HELP)
@model_argument
@click.option("--turns", type=click.IntRange(1), default=60, show_default=True, help="Messages, each with an answer.")
@click.option("--n-ctx", type=click.IntRange(1), default=1024, show_default=True, help="Cells of each way's cache.")
@click.option("--message-tokens", type=click.IntRange(8), default=40, show_default=True, help="Of every message.")
@click.option("--max-tokens", type=click.IntRange(1), default=32, show_default=True, help="Of an answer, at most.")
@click.option(
    "--trim-to",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="How much of the cache trimmed lists of messages may fill; less trims more, and less often.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Other messages.")
@click.option("--threads", type=click.IntRange(1), help="[default: the physical cores, or a container's CPU quota]")
@click.option("--json", "json_to", metavar="FILE", help="Write every turn, - for stdout instead of the table.")
@click.option("--plot", "plot_to", metavar="FILE", help="Write charts and table as one HTML file.")
def chat(model: str, json_to: str | None, plot_to: str | None, **given: Any) -> int:
    for path, kind in ((json_to, "json"), (plot_to, "plot")):
        if path is not None:
            check_writable(path, kind)
    result = _measure(model, given)
    if json_to == "-":
        click.echo(result.json(), nl=False)
    else:
        _show(result)
    written = [(json_to, result.json), (plot_to, result.html)]
    write_all([(Path(path), text()) for path, text in written if path not in (None, "-")])
    return 130 if result.interrupted else int(bool(result.stopped))


def _measure(model: str, given: dict[str, Any]) -> Result:
    from edgekv import longrun
    from edgekv.settings import Settings

    settings = Settings(n_ctx=given.pop("n_ctx"), n_threads=given.pop("threads"))
    with progress("chatting", unit="%", eta=True) as update:
        return longrun.run(model, longrun.Options(settings=settings, **given), watch=update)


def _show(result: Result) -> None:
    from rich.text import Text

    out = console()
    out.print(Text(result.header, style="dim"))
    out.print()
    out.print(_table(result))
    out.print()
    for name, notes in result.notes.items():
        for note in notes:
            out.print(Text(f"{name}: {note}", style="dim"))
    out.print(Text(result.verdict, style="bold"))


def _table(result: Result) -> Table:
    from rich.table import Table

    head, *rows = result.rows()
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for number, title in enumerate(head):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
