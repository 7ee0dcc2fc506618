"""edgekv demo: mask-and-continue against restart, on one report and this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from edgekv.cli.models import fetch_with_bar
from edgekv.cli.output import console, json_option, model_argument, print_json, progress, talk
from edgekv.wording import count

if TYPE_CHECKING:
    from rich.table import Table

    from edgekv.demo import Demo

_TITLES = {
    "mask": "mask, gap closed",
    "mask_keep_gap": "mask, gap kept",
    "restart": "restart, prefix reused",
    "restart_cold": "restart from token 0",
}


@click.command()
@model_argument
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(1), help="Timings of each way.")
@click.option("--n-ctx", default=4096, show_default=True, type=click.IntRange(1), help="Cells of the KV cache.")
@click.option("--threads", type=click.IntRange(1), help="[default: the physical cores, or a container's CPU quota]")
@json_option
def demo(model: str, repeat: int, n_ctx: int, threads: int | None, as_json: bool) -> None:
    """Show the whole idea in a minute, on a small model.

    The model reads a field report, answers questions about it and sums it up. Then the report should no longer count,
    and one more question is asked: four ways to get there, timed and compared side by side.
    """
    _fetch_if_missing(model)
    from edgekv.demo import Demo, Plan
    from edgekv.model import Model
    from edgekv.settings import Settings

    plan = Plan(settings=Settings(n_ctx=n_ctx, n_threads=threads), repeat=repeat)
    with Model(model) as loaded, Demo(loaded, plan) as run:
        _tell(run, quiet=as_json)
        if as_json:
            print_json(run.as_dict())
        else:
            _print_results(run)


def _fetch_if_missing(model: str) -> None:
    from edgekv import catalog

    for entry in catalog.entries():
        if entry.name == model and entry.state() != "present":
            talk().print(f"{model} is not on this disk yet; fetching it once ({entry.fetch_command})", soft_wrap=True)
            fetch_with_bar(entry)


def _tell(run: Demo, *, quiet: bool) -> None:
    """The story, as it happens: on stdout, or on stderr when stdout is JSON."""
    from rich.markup import escape

    out = talk() if quiet else console()
    with _watched(run, "reading the report"):
        report = run.read_report()
    out.print(
        f"[bold]{escape(run.model.description)}[/] read a field report of {len(report):,} tokens. A model this small "
        "gets some answers wrong, with the report and without; what counts is how near the ways come to each other.\n"
    )
    for question, answer in _answers(run):
        out.print(f"[dim]?[/] {_escape(question)}")
        out.print(f"  {_escape(answer.strip())}\n")
    with _watched(run, "comparing four ways"):
        run.compare()
    out.print(f"Now the report is masked. {run.receipt}", markup=False, highlight=False)
    out.print(f"[dim]?[/] {_escape(run.script.after)}")
    for name in ("mask", "restart"):
        out.print(f"  [dim]{_TITLES[name]}:[/] {_escape(run.arms[name].answer)}")
    out.print()


@contextlib.contextmanager
def _watched(run: Demo, description: str) -> Iterator[None]:
    """A progress bar that the demo's steps move."""
    with progress(description, unit="%") as update:
        run.watch = lambda _what, done, total: update(done, total)
        yield
    run.watch = lambda *_: None


def _answers(run: Demo) -> list[tuple[str, str]]:
    with _watched(run, "answering questions"):
        return list(run.talk())


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text))


def _print_results(run: Demo) -> None:
    found = run.as_dict()
    tokens = found["tokens"]
    out = console()
    out.print(
        f"{tokens['context']:,} tokens of conversation, {tokens['masked']:,} of them the report, "
        f"{tokens['suffix']:,} behind it. From the edit to the first token of the next answer:\n"
    )
    out.print(_table(found))
    out.print(_footnote(found), style="dim")
    out.print(run.verdict(), markup=False)


def _footnote(found: dict[str, Any]) -> str:
    mask, machine = found["arms"]["mask"], found["machine"]
    return (
        f"\nFirst token: median of {mask['n']}, least-most. KL divergence (mean, nats) and same top token: against the "
        f"restart, over {mask['vs_restart']['n']} tokens of its own continuation. Noise floor "
        f"{found['noise']['kld_mean']:.4f}: the restart again with other batch boundaries. "
        f"{machine['cpu']}, {count(machine['threads'], 'thread')}, {machine['kv_type']} KV.\n"
    )


def _table(found: dict[str, Any]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for title in ("edit", "first token", "read again", "cells", "KL div.", "same top"):
        table.add_column(title, justify="right")
    for name, title in _TITLES.items():
        arm = found["arms"][name]
        low, high = arm["ttft_ms_range"]
        table.add_row(
            title,
            f"{arm['edit_ms']:.1f} ms" if arm["edit_ms"] else "-",
            f"{arm['ttft_ms'] / 1e3:.2f} s ({low / 1e3:.2f}-{high / 1e3:.2f})",
            f"{arm['tokens_redecoded']:,}",
            f"{arm['cells_used']:,}",
            f"{arm['vs_restart']['kld_mean']:.4f}",
            f"{arm['vs_restart']['same_top']:.0%}",
        )
    return table
