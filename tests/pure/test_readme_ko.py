"""The Korean README cannot drift: its code, commands and figures are the English one's, its limits as many."""

from __future__ import annotations

import re
from pathlib import Path

from edgekv.cli import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
KOREAN = (ROOT / "README.ko.md").read_text("utf-8")

BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def section(text: str, heading: str) -> str:
    _, found, rest = text.partition(f"\n## {heading}\n")
    assert found, f"there is no section {heading!r}"
    return rest.partition("\n## ")[0]


def limits(text: str) -> list[str]:
    return re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE)


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


def test_each_limit_has_its_counterpart() -> None:
    english, korean = section(README, "What a mask is not"), section(KOREAN, "마스크의 한계")
    assert len(limits(english)) >= 8
    assert len(limits(korean)) == len(limits(english))
    codes = [re.findall(r"`[^`]+`", BLOCK.sub("", text)) for text in (english, korean)]
    assert set(codes[1]) <= set(codes[0])
    assert {"`recompute`", "`evict`", "`park`", '`then="auto"`', "`attend=`", "`force=True`"} <= set(codes[1])


def test_figures_are_the_english_readme_s() -> None:
    assert figures(BLOCK.sub("", KOREAN)) - figures(README) == set()


def test_the_two_link_to_each_other_at_the_top() -> None:
    assert "(README.ko.md)" in README.partition("\n## ")[0]
    assert "(README.md)" in KOREAN.partition("\n## ")[0]


def test_files_it_names_are_there() -> None:
    for name in re.findall(r"\b(?:docs|models)/\w+\.md\b", KOREAN):
        assert (ROOT / name).is_file()
