"""Docs that cannot drift: the README's table of verbs is the docstrings', and every verb says what it costs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import verbs_table

import edgekv
from edgekv import Session

ROOT = Path(__file__).parents[2]


def test_the_readme_s_table_is_what_the_docstrings_say() -> None:
    assert verbs_table.written() == verbs_table.README.read_text("utf-8"), "run scripts/verbs_table.py --write"


@pytest.mark.parametrize("name", verbs_table.VERBS)
def test_a_verb_says_what_it_costs_guarantees_and_raises(name: str) -> None:
    text = inspect.getdoc(getattr(Session, name)) or ""
    assert re.findall(r"^(Cost|Guarantees|Raises)\b", text, re.MULTILINE) == ["Cost", "Guarantees", "Raises"]


def test_errors_named_in_docstrings_exist() -> None:
    for name in verbs_table.VERBS:
        raises = (inspect.getdoc(getattr(Session, name)) or "").split("\nRaises ")[1]
        for error in re.findall(r"\b[A-Z][a-z]+[A-Z]\w+\b", raises):
            assert hasattr(edgekv.errors, error), f"{name} raises {error}?"


def test_every_module_stands_in_the_file_map() -> None:
    """README: a line a file."""
    text = (ROOT / "README.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`(?:edgekv/)?(\w+)(?:\.py|/)`", "\n".join(rows)))
    modules = {p.stem for p in (ROOT / "edgekv").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert modules - {"__init__", "__main__", "_pip"} <= named
