"""Wrapping: whole words, whatever pieces a text comes in, and nothing lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from edgekv.cli.chat.wrapping import Wrap

TEXT = st.text(st.sampled_from("ab 한글😀\n-`"), max_size=200)


def wrapped(pieces: list[str], width: int) -> str:
    wrap = Wrap(width)
    return "".join([*map(wrap.feed, pieces), wrap.finish()])


def test_words_stay_whole() -> None:
    assert wrapped(["the quick bro", "wn fox jumps"], 10) == "the quick\nbrown fox\njumps"


def test_wide_characters_count_twice() -> None:
    assert wrapped(["안녕하세요 여러분 반갑습니다"], 18) == "안녕하세요 여러분\n반갑습니다"


def test_code_is_left_alone() -> None:
    code = "```\nfor number in range(10): print(number)\n```\nand then it goes on"
    assert wrapped([code], 12) == "```\nfor number in range(10): print(number)\n```\nand then it\ngoes on"


@given(TEXT, st.integers(1, 30), st.data())
def test_pieces_do_not_matter_and_nothing_is_lost(text: str, width: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = wrapped([text], width)
    assert wrapped(pieces, width) == whole
    assert "".join(whole.split()) == "".join(text.split())


@given(st.lists(st.text(st.sampled_from("ab한"), min_size=1, max_size=4), min_size=1), st.integers(10, 30))
def test_no_line_is_wider_than_the_window(words: list[str], width: int) -> None:
    assert all(cell_len(line) <= width and line.strip() for line in wrapped([" ".join(words)], width).split("\n"))
