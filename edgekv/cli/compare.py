"""``edgekv compare``: the experiment, on the user's own model, text and CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv import files
from edgekv.cli.output import console, model_argument, progress, talk
from edgekv.errors import UsageError
from edgekv.memory import KV_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group, RenderableType

    from edgekv.compare import Options, Report

_HELP = """Measure mask-and-continue against restart, on your model, text and CPU.

    \b
    edgekv compare smollm2 --workload chat --html report.html
    edgekv compare my.gguf --workload my-cases.jsonl --fail-if "mask.vs_restart.kld_mean > 0.1"

    The same tokens go through several arms: masked, masked with the gap kept, cut out, read again. Three things come
    side by side: what each costs, how near its next tokens are to a restart's, and what still leaks of the masked text.
    stdout is an overview; --html, --json and --csv hold every figure with its interval, beside the noise floor.

    Workloads: canary (a code that is asked for afterwards), chat, tools, think, summary, or a file: .jsonl with
    {"segments": [{"text", "mask": true}, ...], "question"} a line, or .txt with the masked part between lines
    <<<mask and mask>>>. Ctrl-C ends it and reports what is finished.
    """


class Lengths(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Whole numbers with commas between."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of whole numbers such as 16,64,256", param, ctx)


@click.command(help=_HELP)
@model_argument
@click.option("--workload", default="canary", show_default=True, metavar="NAME|FILE", help="What is read and asked.")
@click.option("--arms", metavar="A,B,...", help="Arms to run; full and restart always do.  [default: all that matter]")
@click.option("--cases", type=click.IntRange(1), help="Cases.  [default: 100 of canary, else 12]")
@click.option(
    "--compared", type=click.IntRange(1), default=12, show_default=True, help="Cases compared token by token."
)
@click.option("--repeat", type=click.IntRange(1), default=5, show_default=True, help="Of each timing.")
@click.option(
    "--suffix", type=Lengths(), default="16,64,256,1024", show_default=True, help="Tokens behind, of the curve."
)
@click.option("--span", type=Lengths(), default="512", show_default=True, help="Tokens masked, of the curve.")
@click.option("--json", "json_to", metavar="FILE", help="Write the figures, - for stdout instead of the report.")
@click.option("--html", "html_to", metavar="FILE", help="Write the report as one HTML file.")
@click.option("--csv", "csv_to", metavar="FILE", help="Write a line an arm.")
@click.option("--fail-if", metavar="EXPR", help='Exit with 1 where it holds: "mask.vs_restart.kld_mean > 0.1".')
@click.option("--seed", type=int, default=0, show_default=True, help="Other texts and draws.")
@click.option(
    "--ctx", type=click.IntRange(1), default=4096, show_default=True, help="Cells of your sessions, for timing."
)
@click.option("--kv-type", type=click.Choice(list(KV_BLOCKS)), default="f16", show_default=True, help="Of the cache.")
@click.option("--threads", type=click.IntRange(1), help="[default: the physical cores, or a container's CPU quota]")
def compare(
    model: str, json_to: str | None, html_to: str | None, csv_to: str | None, fail_if: str | None, **given: Any
) -> int:
    from edgekv.compare.report import check_condition

    if fail_if is not None:
        check_condition(fail_if)
    wanted = [
        (path, kind) for path, kind in ((json_to, "json"), (html_to, "html"), (csv_to, "csv")) if path is not None
    ]
    for path, kind in wanted:
        check_writable(path, kind)
    report = _measure(model, _options(given))
    if json_to == "-":
        click.echo(report.json(), nl=False)
    else:
        _show(report)
    write_all([(Path(path), getattr(report, kind)()) for path, kind in wanted if path != "-"])
    return _code(report, fail_if)


def _code(report: Report, fail_if: str | None) -> int:
    """130 for a run that was interrupted, 1 for one that an error stopped or where the condition holds."""
    if report.data["interrupted"]:
        return 130
    if fail_if is not None and report.holds(fail_if):
        talk().print(f"--fail-if holds: {fail_if}", markup=False, soft_wrap=True)
        return 1
    return int(bool(report.data["stopped"]))


def _options(given: dict[str, Any]) -> Options:
    from edgekv.compare import Options
    from edgekv.settings import Settings

    settings = Settings(n_ctx=given.pop("ctx"), kv_type=given.pop("kv_type"), n_threads=given.pop("threads"))
    arms = tuple(filter(None, (given.pop("arms") or "").split(",")))
    return Options(settings=settings, arms=arms, **given)


def _measure(model: str, options: Options) -> Report:
    from edgekv import compare

    with progress("comparing", unit="%", eta=True) as update:
        return compare.run(model, options, watch=lambda _what, done, total: update(done, total))


def check_writable(name: str, kind: str) -> None:
    """Raise UsageError for a place where no file can be, before minutes are spent on measuring."""
    path = Path(name)
    if name == "-" and kind != "json":
        raise UsageError(f"--{kind} - is not possible: stdout is for the overview, or for --json -; name a file")
    if name != "-" and (path.is_dir() or not path.parent.is_dir()):
        raise UsageError(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'there is no such folder'}")


def write_all(texts: Sequence[tuple[Path, str]]) -> None:
    """Write what can be written; raises UsageError for the rest."""
    failed = [said for path, text in texts if (said := _written(path, text))]
    if failed:
        raise UsageError(f"cannot write {'; '.join(failed)}")


def _written(path: Path, text: str) -> str:
    """What went wrong, or nothing."""
    try:
        files.replace(path, text.encode())
    except OSError as err:
        return f"{path}: {err.strerror or err}"
    talk().print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
    return ""


def _show(report: Report) -> None:
    console().print(drawn(report))


def drawn(report: Report) -> Group:
    """The three blocks as tables, the verdict last: it is what stays on the screen."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from edgekv.compare.tables import header, overview

    parts: list[RenderableType] = [Text(header(report.data), style="dim")]
    for title, rows in overview(report.data):
        table = Table(
            box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left", title_style="bold"
        )
        for n, name in enumerate(rows[0]):
            table.add_column(name, justify="right" if n else "left", no_wrap=True)
        for row in rows[1:]:
            table.add_row(*row)
        parts.append(table)
    return Group(*parts, Text(report.verdict, style="bold"))
