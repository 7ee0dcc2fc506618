"""Nothing is lost: whatever is refused or fails, the session is as it was, and goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import Engine, Model, Sampling, Session, Settings, errors
from helpers import EXACT, TEXT, Look, look, open_tiny, some_tokens

TinyPath = Callable[..., Path]
Logits = np.typing.NDArray[np.float32]


@pytest.fixture(scope="module")
def model(tiny_path: TinyPath) -> Model:
    return Model(tiny_path("llama"))


@pytest.fixture
def session(tiny_path: TinyPath) -> Iterator[Session]:
    """100 tokens in three spans; 512 cells; batches of 32."""
    with open_tiny(tiny_path("llama"), n_batch=32) as session:
        for name, size in (("head", 20), ("middle", 50), ("tail", 30)):
            session.append(some_tokens(size, size), name=name, role=name[0], tags=["all"])
        yield session


def seen(session: Session) -> tuple[Look, Logits]:
    logits = session.logits()  # first: after an edit this reads a token again
    return look(session), logits


def assert_unchanged(session: Session, before: tuple[Look, Logits]) -> None:
    assert look(session) == before[0]
    np.testing.assert_array_equal(session.logits(), before[1])
    assert look(session) == before[0]  # no token was read again for the logits


# ---- a full context -------------------------------------------------------------------------------------------------


def test_context_full_says_what_to_do_and_changes_nothing(session: Session) -> None:
    session.mask("middle")
    before = seen(session)
    for verb in (session.append, session.score, session.logits_over):
        with pytest.raises(errors.ContextFull, match=r"evict masked spans \(50 masked tokens.*larger n_ctx"):
            verb(some_tokens(600))
    assert_unchanged(session, before)
    session.append(some_tokens(50))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mrope"])
@pytest.mark.parametrize("make_room", ["evict", "rewind", "mask and evict"])
def test_filled_to_the_last_cell_then_room_is_made(tiny_path: TinyPath, kind: str, make_room: str) -> None:
    with open_tiny(tiny_path(kind), n_ctx=256, n_batch=32) as session:
        session.append(some_tokens(40), name="head")
        session.append(some_tokens(100, 1), name="old")
        session.append(some_tokens(116, 2), name="new")
        assert session.engine.cells_free == 0
        before = seen(session)
        with pytest.raises(errors.ContextFull):
            session.append([7])
        assert_unchanged(session, before)
        generation = session.generate(5)
        with pytest.raises(errors.ContextFull):
            generation.finish()
        assert (generation.tokens, len(generation.span)) == ([], 0)
        if make_room == "rewind":
            session.rewind("new")
        elif make_room == "evict":
            assert session.evict("old").freed == 100
        else:
            session.mask("old")
            session.audit()  # with a shift pending and no cell to settle it in
            session.unmask("old")
            session.audit()
            session.mask("old")
            session.logits()  # the last token is read again in its own cell
            session.evict("old")
        free = session.engine.cells_free
        session.append(some_tokens(free, 3))
        assert session.engine.cells_free == 0
        session.audit()


def test_a_generation_that_fills_the_context_keeps_what_it_said(session: Session) -> None:
    session.append(some_tokens(session.engine.cells_free - 5))
    generation = session.generate(20, name="said")
    with pytest.raises(errors.ContextFull):
        generation.finish()
    assert len(generation.tokens) == 5
    assert session.tokens[-5:].tolist() == generation.tokens
    assert session.text("said") == generation.text
    session.evict("middle")
    session.generate(5).finish()
    session.audit()


def test_masked_text_back_and_forth_when_full(session: Session) -> None:
    session.append(some_tokens(session.engine.cells_free), name="rest")
    after = session.logits()
    for name in ("middle", "tail"):
        session.mask(name)
        session.audit()
    assert np.abs(session.logits() - after).max() > 0.01
    for name in ("tail", "middle"):
        session.unmask(name)
    look(session)
    assert session.stats.visible == 512


# ---- lengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "lfm2"])
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 64, 65])
def test_prompts_around_a_batch(tiny_path: TinyPath, kind: str, size: int) -> None:
    tokens = some_tokens(10 + size)
    with open_tiny(tiny_path(kind), n_batch=32) as parts, open_tiny(tiny_path(kind), n_batch=512) as whole:
        parts.append(tokens[:10])
        span = parts.append(tokens[10:], name="it")
        whole.append(tokens)
        assert (len(span), len(parts.tokens)) == (size, 10 + size)
        np.testing.assert_allclose(parts.logits(), whole.logits(), atol=0.1)
        look(parts)


def test_an_empty_text_in_an_empty_session(tiny_path: TinyPath) -> None:
    with open_tiny(tiny_path("llama")) as session:
        assert len(session.append("")) == 0
        assert len(session.append([])) == 0
        look(session)
        with pytest.raises(errors.NoLogits):
            session.logits()
        with pytest.raises(errors.UnknownSpan):
            session.mask((0, 1))
        session.rewind(0)
        session.append("a")
        assert session.text("<bos>") == "<|startoftext|>"


def test_after_a_rewind_to_nothing_it_begins_again(tiny_path: TinyPath) -> None:
    with Session(tiny_path("llama"), settings=EXACT) as session:
        session.append(TEXT, name="first")
        expected = session.logits()
        session.rewind(0)
        session.append(TEXT, name="first")
        np.testing.assert_allclose(session.logits(), expected, atol=1e-4)
        session.rewind(0)
        assert session.generate(3).finish().tokens
        look(session)


# ---- targets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "ranges"),
    [
        ("middle", ((20, 70),)),
        ("mid*", ((20, 70),)),
        ("role:m", ((20, 70),)),
        (slice(20, 70), ((20, 70),)),
        (range(20, 70), ((20, 70),)),
        ((20, 70), ((20, 70),)),
        ((np.int64(20), np.int32(70)), ((20, 70),)),
        (["middle", (68, 72), slice(80, 82)], ((20, 72), (80, 82))),
        (("middle", "tail"), ((20, 100),)),
    ],
)
def test_targets(session: Session, target: Any, ranges: tuple[tuple[int, int], ...]) -> None:
    assert session.mask(target).ranges == ranges
    session.audit()
    assert session.unmask(target).ranges == ranges
    session.audit()


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ([], errors.UsageError, "no token"),
        ((5, 5), errors.UsageError, "no token"),
        (slice(7, 7), errors.UsageError, "no token"),
        (slice(20, None), errors.UsageError, "stop given"),
        (slice(20, 40, 2), errors.UsageError, "step 1"),
        ((-5, 3), errors.UsageError, "no range"),
        ((9, 3), errors.UsageError, "no range"),
        ((90, 101), errors.UnknownSpan, "which has 100 tokens"),
        ((20.0, 70.0), errors.UsageError, "no target"),
        (None, errors.UsageError, "no target"),
        (b"middle", errors.UsageError, "no target"),
        ("midle", errors.UnknownSpan, "did you mean 'middle'"),
        ("m", errors.UnknownSpan, "'role:m'"),
        ("all", errors.UnknownSpan, "'tag:all'"),
        ("zzzz", errors.UnknownSpan, "spans: head, middle, tail"),
        ("x*", errors.UnknownSpan, "nothing is called"),
        ("role:zz", errors.UnknownSpan, "nothing is called"),
        ("", errors.UnknownSpan, "nothing is called"),
        ((2, 30), errors.PinnedTokens, "force=True"),
    ],
)
def test_wrong_targets_say_why_and_change_nothing(
    session: Session, target: Any, error: type[errors.UsageError], words: str
) -> None:
    before = seen(session)
    for verb in (session.mask, session.evict):
        with pytest.raises(ValueError, match=words) as raised:
            verb(target)
        assert raised.type is error
    assert_unchanged(session, before)


def test_an_empty_span_is_no_target(session: Session) -> None:
    for verb in (session.mask, session.unmask, session.evict):
        with pytest.raises(errors.UsageError, match="no token"):
            verb(session.append("", name=f"empty-{verb.__name__}"))


def test_verbs_that_do_not_fit(session: Session) -> None:
    before = seen(session)
    with pytest.raises(errors.BadState, match="visible already"):
        session.unmask("middle")
    session.mask("middle", gap="keep")
    with pytest.raises(errors.BadState, match="masked, parked or evicted already"):
        session.mask("middle")
    session.unmask("middle")
    assert_unchanged(session, before)
    session.evict("middle")
    with pytest.raises(errors.BadState, match="append its text again"):
        session.unmask("middle")
    with pytest.raises(errors.BadState, match="no cells"):
        session.evict("middle")
    with pytest.raises(errors.UsageError, match=r"'close' or 'keep'"):
        session.mask("tail", gap="shut")
    with pytest.raises(errors.UsageError, match="100 tokens"):
        session.rewind(101)
    with pytest.raises(errors.UsageError):
        session.rewind(-1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "middle"},
        {"name": "<bos>"},
        {"name": "a*"},
        {"name": "role:x"},
        {"name": "tag:x"},
        {"name": "  "},
    ],
)
def test_wrong_names_change_nothing(session: Session, wrong: dict[str, Any]) -> None:
    before = seen(session)
    with pytest.raises(errors.UsageError):
        session.append("text", **wrong)
    with pytest.raises(errors.UsageError):
        session.generate(3, **wrong)
    assert_unchanged(session, before)


def test_arguments_that_break_late_change_nothing(session: Session) -> None:
    before = seen(session)
    tags: Any
    for tags in (5, [[]]):
        with pytest.raises(TypeError):
            session.append("text", tags=tags)
    assert_unchanged(session, before)
    assert session.append("text", tags="urgent").tags == {"urgent"}


def test_sessions_of_one_engine_are_counted(model: Model) -> None:
    from edgekv import Settings

    with Engine(model, Settings(n_ctx=256, n_sessions=2)) as engine:
        first, second = Session(engine), Session(engine)
        with pytest.raises(errors.UsageError, match="n_sessions"):
            Session(engine)
        with pytest.raises(errors.UsageError, match="settings"):
            Session(engine, n_ctx=512)
        first.append(some_tokens(200))
        with pytest.raises(errors.ContextFull):
            second.append(some_tokens(100))
        first.close()
        second.append(some_tokens(100))
        with Session(engine) as third:
            third.append(some_tokens(100))
            look(third)
        look(second)
        assert engine.cells_used == 100


def test_sinks_are_the_first_tokens_that_are_left(tiny_path: TinyPath) -> None:
    """After everything was dropped, the new first tokens lie at later indexes and are pinned there."""
    with open_tiny(tiny_path()) as session:
        session.append("first words", name="gone")
        session.rewind(0)
        span = session.append("second words")
        with pytest.raises(errors.PinnedTokens):
            session.mask((span.start - 1, span.start + 1))


@pytest.mark.parametrize("grammar", ["", "  \n"])
def test_an_empty_grammar_is_refused(tiny_path: TinyPath, grammar: str) -> None:
    """llama.cpp would generate without any constraint."""
    with open_tiny(tiny_path()) as session:
        session.append("text")
        with pytest.raises(errors.GrammarError):
            session.generate(2, sampling=Sampling(grammar=grammar)).finish()


@pytest.mark.parametrize("wrong", [{"n_ctx": 300.5}, {"n_batch": 0}, {"n_threads": "2"}, {"n_archives": 1 << 31}])
def test_settings_that_make_no_sense(tiny_path: TinyPath, wrong: dict[str, object]) -> None:
    with pytest.raises(errors.UsageError, match="must be a whole number"):
        Session(tiny_path(), settings=Settings(**wrong))  # type: ignore[arg-type]
