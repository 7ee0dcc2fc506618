"""Imports point down: a module imports only from layers below its own, and llama_cpp from one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import edgekv

ROOT = Path(edgekv.__file__).parent

#: top to bottom; modules on one line may import each other only downwards, in the order given
LAYERS = (
    ("cli",),
    ("longrun", "compare", "demo"),
    ("doctor", "inspection", "prompt"),
    ("chat",),
    ("conversation",),
    ("reply", "room", "memos"),
    ("following",),
    ("naming",),
    ("rendering",),
    ("turns", "script", "answers"),
    ("markup", "template", "cellmap"),
    ("prefilling",),
    ("session",),
    ("keeping",),
    ("edits", "saving", "modules"),
    ("render",),
    ("base",),
    ("together",),
    ("generation",),
    ("host",),
    ("transcript",),
    ("snapshot",),
    ("reader", "journal"),
    ("record",),
    ("recovery",),
    ("next_logits",),
    ("policies",),
    ("planner",),
    ("rereads",),
    ("changes",),
    ("ledger",),
    ("layout", "plans"),
    ("sampling",),
    ("engine",),
    ("kv_check",),
    ("batch", "budget", "cells", "parking"),
    ("manifest",),
    ("model",),
    ("_llama", "settings", "state_blob", "fetch", "tiny", "receipts", "tally", "numerics"),
    ("catalog", "capabilities", "memory", "gguf", "_pip"),
    ("columns", "history", "places", "steps", "schema"),
    ("shares", "fair_lock", "store", "files", "wording", "folders", "json_pattern"),
    ("spans",),
    ("errors",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def module_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """The edgekv modules a file imports when it runs, imports for type checkers left out."""
    tree = ast.parse(path.read_text("utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    package = path.parent.relative_to(ROOT.parent).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
            base = package[: len(package) - node.level + 1] if node.level else ()
            parts = [*base, *(node.module or "").split(".")]
            names = [a.name for a in node.names] if [p for p in parts if p] == ["edgekv"] else [""]
            found |= {".".join(p for p in [*parts, name] if p) for name in names}
        elif isinstance(node, ast.Import) and id(node) not in typing_only:
            found |= {a.name for a in node.names}
    return found


FILES = sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT or p.name not in ("__init__.py", "__main__.py"))


def test_every_module_has_a_layer() -> None:
    assert {module_of(p) for p in FILES} == set(RANK)


def test_imports_point_down() -> None:
    for path in FILES:
        mine = module_of(path)
        for name in imports_of(path):
            head, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if head == "edgekv" and other in RANK and other != mine:
                assert RANK[other] >= RANK[mine], f"{path}: {mine} imports {other}, which is above it"


def test_only_one_module_imports_llama_cpp() -> None:
    found = {module_of(p) for p in FILES if any(name.split(".")[0] == "llama_cpp" for name in imports_of(p))}
    assert found == {"_llama"}


def modules_after(code: str) -> set[str]:
    code = f"import sys\n{code}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_is_light() -> None:
    assert not modules_after("import edgekv") & {"llama_cpp", "numpy", "rich", "click", "psutil"}


def test_pure_modules_load_no_engine() -> None:
    """The arithmetic can be used, and tested, where llama.cpp is not built."""
    loaded = modules_after("import edgekv.ledger, edgekv.spans, edgekv.history, edgekv.memory, edgekv.numerics")
    assert "llama_cpp" not in loaded


def test_public_names() -> None:
    """The API a user learns; a name that goes or comes is a decision, and a line in the changelog."""
    assert set(edgekv.__all__) == {
        "Audit", "Capabilities", "Capability", "Chat", "EdgekvError", "Engine", "Generation", "Model",
        "Receipt", "Sampling", "Session", "Settings", "Span", "State", "Stats", "Timings", "__version__",
        "decode_together", "errors", "prefill",
    }  # fmt: skip
    assert all(getattr(edgekv, name) is not None for name in edgekv.__all__)


SESSION = {
    "append", "attach", "audit", "close", "compact", "engine", "evict", "fork", "generate", "history", "indexes",
    "indexes_of", "influenced_by", "insert", "last_edit", "load", "lock", "logits", "logits_over", "mark", "mask",
    "masked", "midway", "model", "park", "progress", "ranges", "recompute", "replace", "rewind", "save", "score",
    "span", "spans", "states", "stats", "stop", "text", "tokens", "undo", "unmark", "unmask", "visible_tokens",
}  # fmt: skip


def test_session_names() -> None:
    assert {n for n in dir(edgekv.Session) if not n.startswith("_")} == SESSION


def test_verbs_have_docstrings() -> None:
    for name in SESSION - {"engine", "lock", "model", "progress"}:
        assert (getattr(edgekv.Session, name).__doc__ or "").strip(), name
