"""Script: what has changed in a text, and which tokens that touches."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgekv.markup import Lexed
from edgekv.script import Hunk, Script, changes

TEXT = st.text(st.sampled_from("ab<>|\n"), max_size=60)


def split(text: str) -> list[str]:
    """Cuts around <>, which stands for a control token here."""
    return [part for part in re.split(r"(<>)", text) if part]


def applied(old: str, hunks: list[Hunk]) -> str:
    for start, stop, text in reversed(hunks):
        old = old[:start] + text + old[stop:]
    return old


def letters(text: str) -> Lexed:
    """A token a letter."""
    return Lexed.of(text, np.arange(len(text), dtype=np.int32), np.arange(1, len(text) + 1))


def test_what_a_text_goes_on_with_is_one_hunk() -> None:
    assert changes("one\n", "one\ntwo\n", split) == [Hunk(4, 4, "two\n")]
    assert changes("same", "same", split) == []


def test_what_is_dropped_in_the_middle_is_one_hunk() -> None:
    old, new = (
        "<>user\nhi<>\n<>assistant\n<t>\nhm\n</t>\n\nyes<>\n",
        "<>user\nhi<>\n<>assistant\nyes<>\n<>user\nand?<>\n",
    )
    gone, tail = changes(old, new, split, anchors=[(old.index("yes"), new.index("yes"))])
    assert old[gone.start : gone.stop] == "<t>\nhm\n</t>\n\n" and not gone.text
    assert tail == Hunk(len(old), len(old), "<>user\nand?<>\n")


def test_a_turn_that_is_put_in_begins_where_turns_begin() -> None:
    """The texts of turns begin alike, so where a new one begins can be said in several ways."""
    old, new = "<>user\none<>\n<>user\ntwo<>\n", "<>user\none<>\n<>user\nnew<>\n<>user\ntwo<>\n"
    begins = len("<>user\none<>\n")
    (hunk,) = changes(old, new, split, seams=[begins], anchors=[(old.index("two"), new.index("two"))])
    assert hunk == Hunk(begins, begins, "<>user\nnew<>\n")


def test_without_an_anchor_all_behind_the_first_difference_is_new() -> None:
    """However much of it is like what stood there: what is at the end must be read as such."""
    old, new = "<>one<>\n", "<>one<><>two<>\n"
    (hunk,) = changes(old, new, split)
    assert hunk == Hunk(len(old) - 1, len(old), "<>two<>\n")


def test_no_control_token_is_cut() -> None:
    assert changes("hi<>", "hi>two<>", split) == [Hunk(2, 4, ">two<>")]


def test_anchors_keep_old_messages_in_their_places() -> None:
    """A text that moves to the end is dropped where it was, however long: what stands around it is not read again."""
    moved = "a long text that moves\n"
    old, new = f"[{moved}hi] yes<>", f"[hi] yes<>[{moved}and]"
    gone, tail = changes(old, new, split, anchors=[(old.index("]"), new.index("]")), (len(old), new.index("<>") + 2)])
    assert old[gone.start : gone.stop] == moved and tail.start == len(old)


@given(TEXT, TEXT, st.lists(st.integers(0, 60)), st.data())
def test_hunks_make_the_new_text_of_the_old(old: str, new: str, seams: list[int], data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(st.integers(0, len(old)), st.integers(0, len(new))), max_size=3))
    anchors = sorted(pairs)
    anchors = [p for n, p in enumerate(anchors) if all(p[0] > q[0] and p[1] > q[1] for q in anchors[:n])]
    hunks = changes(old, new, split, seams, anchors)
    assert applied(old, hunks) == new
    assert all(a.stop <= b.start for a, b in pairwise(hunks))


@given(TEXT, TEXT)
def test_a_script_follows_its_hunks(old: str, new: str) -> None:
    """Text and tokens after every hunk was carried out, as a chat does: the last first."""
    script = Script.empty().appended(letters(old), 0)
    for hunk in reversed(changes(old, new, split)):
        hunk, (first, last) = script.widened(hunk)
        script = script.with_tokens(hunk.start, hunk.stop, letters(hunk.text), 1000, first, last)
    assert script.text == new and len(script) == len(new)
    assert script.ends.tolist() == list(range(1, len(new) + 1))


def test_a_token_across_an_edge_is_replaced_whole() -> None:
    lexed = Lexed.of("one two", np.asarray([1, 2], np.int32), np.asarray([4, 7]))
    script = Script.empty().appended(lexed, 10)
    hunk, tokens = script.widened(Hunk(2, 4, ""))
    assert hunk == Hunk(0, 4, "on") and tokens == (0, 1)
    assert script.inside(4, 7) == (1, 2) and script.inside(2, 7) == (1, 2)
    assert script.inside(0, 3) == (0, 1)  # a space at the edge belongs to its token


def test_other_words_for_the_same_tokens() -> None:
    lexed = Lexed.of("a  b", np.asarray([1, 2, 3], np.int32), np.asarray([1, 3, 4]))
    script = Script.empty().appended(lexed, 0).reworded(Hunk(1, 3, ""))
    assert script.text == "ab" and script.ends.tolist() == [1, 1, 2] and len(script) == 3
