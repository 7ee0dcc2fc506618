"""Docs that cannot drift: the README's table of verbs is the docstrings', and every verb says what it costs."""

from __future__ import annotations

import inspect
import re

import verbs_table

import edgekv
from edgekv import Session


def test_the_readme_s_table_is_what_the_docstrings_say() -> None:
    assert verbs_table.written() == verbs_table.README.read_text("utf-8"), "run scripts/verbs_table.py --write"


def test_a_verb_says_what_it_costs_guarantees_and_raises() -> None:
    for name in verbs_table.VERBS:
        text = inspect.getdoc(getattr(Session, name)) or ""
        found = re.findall(r"^(Cost|Guarantees|Raises)\b", text, re.MULTILINE)
        assert found == ["Cost", "Guarantees", "Raises"], name


def test_errors_named_in_docstrings_exist() -> None:
    for name in verbs_table.VERBS:
        raises = (inspect.getdoc(getattr(Session, name)) or "").split("\nRaises ")[1]
        for error in re.findall(r"\b[A-Z][a-z]+[A-Z]\w+\b", raises):
            assert hasattr(edgekv.errors, error), f"{name} raises {error}?"
