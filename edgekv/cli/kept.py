"""What ``edgekv inspect`` says of a session file or a KV module. No model is opened, and llama.cpp is not loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from edgekv.cli.output import console, print_facts, print_json
from edgekv.wording import count, printable, size, states

if TYPE_CHECKING:
    from edgekv.manifest import Manifest, SessionFacts


def is_kept(source: str) -> bool:
    """Whether that is the path of a file edgekv writes, or of one that begins like it."""
    from edgekv import store

    path = Path(source)
    return path.is_file() and store.is_ours(path)


def inspect_kept(path: Path, *, as_json: bool) -> None:
    """Check every byte of a file and say what it holds. Raises NotEdgekvFile, DamagedFile, WrongFile."""
    from edgekv import manifest
    from edgekv.store import Stored

    with Stored(path) as stored:
        facts, num_bytes = manifest.read(stored), stored.size
    if as_json:
        told = {name: value for name, value in asdict(facts).items() if value is not None}
        print_json({"schema": "edgekv.inspect-file/1", "path": path, "size": num_bytes, **told})
        return
    print_facts(_rows(path, num_bytes, facts))
    if facts.session is not None and facts.session.spans:
        _print_spans(facts.session)


def _rows(path: Path, num_bytes: int, facts: Manifest) -> list[tuple[str, str]]:
    cache, model = facts.cache, facts.model
    kind = "session" if facts.session is not None else "KV module"
    rope = ", RoPE changed" if cache.rope_freq_base or cache.rope_freq_scale else ""
    by = f"edgekv {facts.edgekv}, llama-cpp-python {facts.llama_cpp_python}, {facts.machine}"
    return [
        ("file", str(path)),
        ("kind", f"{kind}, format {facts.format}; every byte was checked"),
        ("size", size(num_bytes)),
        ("written", f"{facts.written} by {by}"),
        ("model", f"{model.path} ({model.arch}, fingerprint {model.fingerprint})"),
        ("cache", f"{cache.kv_type}, flash attention {'on' if cache.flash_attention else 'off'}{rope}"),
        *_contents(facts),
    ]


def _contents(facts: Manifest) -> list[tuple[str, str]]:
    if (session := facts.session) is not None:
        tokens = ", ".join(f"{n:,} {state}" for state, n in session.tokens.items()) or "none"
        room = f"{count(session.cells, 'cell')} of the {session.context.n_ctx:,} there were"
        return [("tokens", tokens), ("takes", room)]
    module = facts.module
    assert module is not None
    others = f"{count(module.attended, 'other')}, with which a session should begin"
    behind = f"read behind {others}" if module.attended else "read on their own"
    return [("name", module.name), ("tokens", f"{module.tokens:,}, {behind}"), ("text", module.begins)]


def _print_spans(session: SessionFacts) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("span", "role", "tags", "tokens", "state"):
        table.add_column(title)
    table.add_column("text", overflow="ellipsis", no_wrap=True)
    for span in session.spans:
        row = (
            span.name,
            span.role or "-",
            ", ".join(span.tags) or "-",
            f"[{span.start}, {span.stop})",
            states(span.states),
        )
        table.add_row(*(Text(printable(cell)) for cell in (*row, span.begins)))
    out = console()
    out.print()
    out.print(table)
