"""The Korean README cannot drift: its code, commands and figures are the English one's."""

from __future__ import annotations

import re
from pathlib import Path

from edgekv.cli import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
KOREAN = (ROOT / "README.ko.md").read_text("utf-8")

BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def figures(text: str) -> set[str]:
    """Numbers as they are written: 3.44, .033, 2,489, 0600."""
    return set(re.findall(r"(?<![\w.])\d*\.?\d+(?:,\d{3})*(?:\.\d+)?", text))


def test_code_is_the_english_readme_s() -> None:
    blocks = BLOCK.findall(KOREAN)
    assert len(blocks) >= 2
    assert "make demo" in blocks[0] and "make test" in blocks[0]
    assert blocks[0] == BLOCK.findall(README)[0]
    assert all(block in README for block in blocks)


def test_commands_exist() -> None:
    named = set(re.findall(r"`edgekv (\w+)", KOREAN))
    assert {"chat", "demo", "compare"} <= named <= set(COMMANDS)


def test_figures_are_the_english_readme_s() -> None:
    assert figures(BLOCK.sub("", KOREAN)) - figures(README) == set()


def test_files_it_names_are_there() -> None:
    for name in re.findall(r"\b(?:docs|models)/\w+\.md\b", KOREAN):
        assert (ROOT / name).is_file()
