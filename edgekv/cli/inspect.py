"""``edgekv inspect``: what a model file is, and whether its cache can be masked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.cli.output import console, json_option, model_argument, print_facts, print_json
from edgekv.errors import UsageError
from edgekv.wording import count, size

if TYPE_CHECKING:
    from rich.table import Table

    from edgekv.inspection import BudgetFigures, Inspection

_CAPABILITIES = {"mask": "mask a span", "close_gaps": "close the gap", "park": "park K/V", "rewind": "rewind"}


@click.command("inspect")
@model_argument
@click.option("--all", "everything", is_flag=True, help="All metadata of the file too.")
@click.option("--budget", metavar="SIZE", help='What a session of that memory_budget gets, such as "256MiB".')
@json_option
def inspect_(model: str, everything: bool, budget: str | None, as_json: bool) -> None:
    """Say what a model, a session file or a KV module is, and what a model's cache can do.

    Of a model also how large a cache fits in the RAM that is free here, for each KV type. NAME|FILE is a model known by
    name (see: edgekv models list; default: smollm2) or the path of a file. Session files and KV modules are checked to
    the last byte, and read without their model.
    """
    from edgekv import memory

    memory.check_program_fits()
    from edgekv.cli.kept import inspect_kept, is_kept

    if is_kept(model):
        _refuse_budget(budget)
        inspect_kept(Path(model), as_json=as_json)
        return
    from edgekv import Model
    from edgekv.inspection import inspect

    with Model(model) as opened:
        facts = inspect(opened, budget)
    if as_json:
        print_json(_as_dict(facts, everything))
    else:
        _print(facts, everything)


def _refuse_budget(budget: str | None) -> None:
    if budget is not None:
        raise UsageError("--budget is told of a model, not of a session file or KV module")


def _as_dict(facts: Inspection, everything: bool) -> dict[str, Any]:
    told = {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}
    metadata = told.pop("metadata")
    told["capabilities"] = facts.capabilities.as_dict()
    return {"schema": "edgekv.inspect/1", **told, **({"metadata": metadata} if everything else {})}


def _print(facts: Inspection, everything: bool) -> None:
    print_facts(_rows(facts))
    out = console()
    out.print()
    if facts.kv[0].bytes_per_token:
        out.print(_table(facts), "")
    print_facts([("RAM", _memory(facts)), *_budget_rows(facts.budget)])
    if everything:
        out.print()
        print_facts((key, " ".join(value.split())) for key, value in facts.metadata.items())


def _rows(facts: Inspection) -> list[tuple[str, str]]:
    chat = "yes, ChatML (edgekv run --chat)" if facts.chatml else "yes" if facts.chat_template else "no, a base model"
    window = f"{facts.sliding_window:,} positions in some layers" if facts.sliding_window else "none"
    begins = f"texts begin with {facts.bos}" if facts.bos is not None else "texts begin without a BOS token"
    return [
        ("model", facts.description),
        ("file", str(facts.path) + (f" and {count(facts.parts - 1, 'more part')}" if facts.parts > 1 else "")),
        ("size", size(facts.size)),
        ("fingerprint", facts.fingerprint),
        ("architecture", facts.arch),
        ("trained for", f"{facts.n_ctx_train:,} tokens of context"),
        ("vocabulary", f"{facts.n_vocab:,} tokens; {begins}"),
        ("chat template", chat),
        ("licence", facts.licence or "not said in the file"),
        ("sliding window", window),
        *_answers(facts),
    ]


def _answers(facts: Inspection) -> Iterator[tuple[str, str]]:
    """A line a capability; a reason is given once."""
    said = set()
    for name, capability in vars(facts.capabilities).items():
        answer = "yes" if capability else "no"
        yield _CAPABILITIES[name], answer if capability.reason in said else f"{answer}: {capability.reason}"
        said.add(capability.reason)
        if name == "close_gaps" and capability:
            yield from _narrower(facts)


def _narrower(facts: Inspection) -> Iterator[tuple[str, str]]:
    """The KV types in which gaps stay open, though the model allows them to be closed."""
    open_gaps = [kv for kv in facts.kv if not kv.close_gaps]
    if open_gaps:
        types = " or ".join(kv.kv_type for kv in open_gaps)
        yield "", f"no with {types}: {open_gaps[0].close_gaps.reason}"


def _table(facts: Inspection) -> Table:
    from rich.table import Table

    from edgekv.inspection import CELLS

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("KV type")
    for title in ("bytes a token", f"{CELLS:,} cells", "largest n_ctx here"):
        table.add_column(title, justify="right")
    for kv in facts.kv:
        table.add_row(kv.kv_type, f"{kv.bytes_per_token:,}", size(kv.bytes_cells), _largest(kv.largest_n_ctx, facts))
    return table


def _largest(n_ctx: int, facts: Inspection) -> str:
    return f"{n_ctx:,}, as trained" if n_ctx == facts.n_ctx_train else f"{n_ctx:,}" if n_ctx else "none fits"


def _memory(facts: Inspection) -> str:
    from edgekv.inspection import CELLS

    first = facts.kv[0]
    rest = f"weights and buffers take about {size(first.bytes_total - first.bytes_cells)}"
    cells = f"{rest} beside {CELLS:,} cells" if first.bytes_per_token else f"{rest} and a state of fixed size; no cells"
    return f"{cells}; {size(facts.ram_free)} are free here"


def _budget_rows(figures: BudgetFigures | None) -> Iterator[tuple[str, str]]:
    """What the budget gives; the parts in the order of a process's life."""
    if figures is None:
        return
    f = figures
    batch = "" if f.n_batch == 512 else f", read {f.n_batch} tokens at a time"
    yield "budget", f"{size(f.limit)} give n_ctx={f.n_ctx:,} in {f.kv_type}{batch}{'; ' if f.note else ''}{f.note}"
    yield "", f"weights {size(f.weights)}, cache {size(f.cache)}, buffers {size(f.buffers)}"
    yield "", f"Python and the libraries {size(f.program)}: at most {size(f.process)} resident in all"
    yield "", f"ulimit -v, which counts address space, must be {size(f.ulimit_v)}; scoring takes {size(f.scoring)} more"
