"""Every example is short, and is run by a test."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_each_is_run() -> None:
    spec = importlib.util.spec_from_file_location("examples_run", ROOT / "tests" / "real" / "test_examples.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.FACTS) == {path.name for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.name))
def test_it_is_short_says_what_it_shows_and_stands_alone(path: Path) -> None:
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 70
    assert f"python examples/{path.name} [MODEL]" in (ast.get_docstring(tree) or "")
    froms = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert froms <= {"edgekv", "edgekv.chat", "typing"}  # what a user installs, and no helpers of ours
