"""``edgekv prefill``: read a text once, into a file that sessions attach."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from edgekv.cli.output import json_option, model_option, print_facts, print_json, progress, stdin_bytes
from edgekv.errors import UsageError
from edgekv.memory import KV_BLOCKS
from edgekv.wording import size

_STDIN = "-"


@click.command("prefill")
@click.argument("file", metavar="FILE|-")
@click.option("-o", "--output", metavar="FILE", help="Where to write.  [default: FILE with .kv for its ending]")
@click.option(
    "--attend", metavar="FILE", help="The text that sessions begin with, such as a system prompt: it is seen."
)
@model_option
@click.option(
    "--kv-type", type=click.Choice(list(KV_BLOCKS)), default="f16", show_default=True, help="Of the sessions."
)
@click.option("--threads", type=click.IntRange(1), help="[default: the physical cores, or a container's CPU quota]")
@json_option
def prefill(
    file: str, output: str | None, attend: str | None, model: str, kv_type: str, threads: int | None, as_json: bool
) -> None:
    """Read a text once, into a KV module that sessions attach without reading it.

    FILE is a text in UTF-8, "-" standard input. In Python, session.attach("manual.kv") takes the module into a session
    of the same model and KV type, at any position. Its tokens see those of --attend, and nothing else of a session.
    """
    from edgekv import Settings
    from edgekv import prefill as read_once
    from edgekv.prompt import text_of

    if file == _STDIN and output is None:
        raise UsageError("say where to write what standard input gives: --output FILE")
    if file == attend == _STDIN:
        raise UsageError("only one text can come from standard input")
    if output is None and not Path(file).name:
        raise UsageError(f"{file!r} is no file to read")
    path = Path(output) if output is not None else Path(file).with_suffix(".kv")
    if path.resolve() in {Path(text).resolve() for text in (file, attend) if text is not None}:
        raise UsageError(f"{path} is one of the texts; say where to write: --output FILE")
    text, seen = text_of(file, stdin_bytes), "" if attend is None else text_of(attend, stdin_bytes)
    with progress("reading", unit="tokens") as update:
        settings = Settings(kv_type=kv_type, n_threads=threads)
        done = read_once(text, path, model, attend=seen, settings=settings, progress=update)
    if as_json:
        print_json({"schema": "edgekv.prefill/1", **asdict(done)})
        return
    print_facts(
        [
            ("module", f"{done.path}, named {done.name}"),
            ("tokens", f"{done.tokens:,} behind {done.attended:,} that they see"),
            ("size", size(done.size)),
            ("read", f"{done.read_ms / 1e3:.2f} s ({done.tokens / done.read_ms * 1e3:,.0f} tokens/s)"),
            ("written", f"{done.write_ms / 1e3:.2f} s"),
        ]
    )
