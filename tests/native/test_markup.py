"""Markup: rendered texts as llama.cpp tokenizes them, and what a person spelled as the letters it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgekv import Model
from edgekv.markup import MARK, Markup

TinyPath = Callable[..., Path]
CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|", "|>"]
TEXT = st.lists(
    st.one_of(st.sampled_from(CONTROL), st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)), max_size=8
).map("".join)
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def models(tiny_path: TinyPath, request: pytest.FixtureRequest) -> Iterator[list[Model]]:
    """A tiny vocabulary, and a real one where it is on disk."""
    opened = [Model(tiny_path()), Model(request.getfixturevalue("smollm2_path"))]
    yield opened
    for model in opened:
        model.close()


@QUICK
@given(TEXT)
def test_a_text_is_read_as_llama_cpp_reads_it(models: list[Model], text: str) -> None:
    for model in models:
        lexed = Markup(model).lex(text.replace(MARK, ""))
        assert lexed.ids.tolist() == model.tokenize(lexed.text, special=True).tolist()
        assert len(lexed.ends) == len(lexed.ids) and (np.diff(lexed.ends) >= 0).all()
        assert not len(lexed.ends) or lexed.ends[-1] == len(lexed.text)


@QUICK
@given(TEXT)
def test_nothing_that_is_escaped_acts(models: list[Model], text: str) -> None:
    for model in models:
        markup = Markup(model)
        lexed = markup.lex(markup.escape(text))
        assert not set(lexed.ids.tolist()) & set(model.control_tokens.values())
        known = model.detokenize(model.tokenize(text.replace(MARK, "\ufffd")))  # a small vocabulary lacks some bytes
        assert model.detokenize(lexed.ids) == known
        assert markup.plain(lexed.text) == text.replace(MARK, "\ufffd")


@QUICK
@given(TEXT, TEXT)
def test_what_a_template_writes_acts_beside_it(models: list[Model], text: str, other: str) -> None:
    for model in models:
        markup, end = Markup(model), "<|im_end|>"
        lexed = markup.lex(markup.escape(text) + end + markup.escape(other) + end)
        assert lexed.ids.tolist().count(model.control_tokens[end]) == 2


@QUICK
@given(st.lists(st.integers(0, 279), max_size=12))
def test_what_a_model_said_is_a_text_of_its_tokens(models: list[Model], ids: list[int]) -> None:
    """Control tokens it sampled act; text it spelled like one does not; cut characters are no reason to fail."""
    for model in models:
        lexed = Markup(model).said(np.asarray(ids, np.int32))
        assert lexed.ids.tolist() == ids
        assert len(lexed.ends) == len(ids) and (not ids or lexed.ends[-1] == len(lexed.text))
        control = [t for t in ids if t in model.control_tokens.values()]
        again = [t for t in Markup(model).lex(lexed.text).ids.tolist() if t in model.control_tokens.values()]
        assert again == control
