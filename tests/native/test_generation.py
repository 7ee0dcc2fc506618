"""A generation: how it ends, what it leaves in the session, and other verbs before it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import Sampling, Session, errors
from helpers import EXACT, TEXT, byte_tokens, look, open_tiny, some_tokens

TinyPath = Callable[..., Path]


@pytest.fixture
def session(tiny_path: TinyPath) -> Iterator[Session]:
    with Session(tiny_path("llama"), settings=EXACT) as session:
        session.append(TEXT, name="prompt")
        yield session


def says(text: str, **more: Any) -> Sampling:
    """Sampling that can only say ``text``, then end."""
    return Sampling(grammar=f'root ::= "{text}"', **more)


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_finish_reasons(session: Session) -> None:
    assert session.generate(9, sampling=says("ok")).finish().finish_reason == "end"
    assert session.generate(3).finish().finish_reason == "length"
    assert session.generate(9, sampling=says("one. two"), stop=".").finish().finish_reason == "stop"
    generation = session.generate(9)
    assert generation.finish_reason is None
    shown = next(generation)
    generation.close()
    generation.close()
    assert generation.finish_reason == "closed"
    assert shown + "".join(generation) == generation.text


def test_no_tokens_at_all(session: Session) -> None:
    before = session.logits()
    generation = session.generate(0, name="nothing")
    assert (list(generation), generation.text, generation.tokens) == ([], "", [])
    assert (generation.finish_reason, len(generation.span)) == ("length", 0)
    np.testing.assert_array_equal(session.logits(), before)
    for wrong in ({"max_tokens": -1}, {"stop": ""}, {"stop": ["a", ""]}):
        with pytest.raises(errors.UsageError):
            session.generate(**wrong)  # type: ignore[arg-type]


def test_the_pieces_are_the_text_and_the_text_is_in_the_session(session: Session) -> None:
    generation = session.generate(40, name="said")
    pieces = list(generation)
    assert "".join(pieces) == generation.text
    assert len(generation.tokens) == len(generation.span) == 40
    assert session.tokens[-40:].tolist() == generation.tokens
    assert session.model.detokenize(generation.tokens) == generation.text


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("hello world", "lo w", "hel"),  # across tokens
        ("hello world", ["zzz", "world", "wor"], "hello "),
        ("hello", "h", ""),
        ("aaab", "aab", "a"),  # a false start inside the stop string
        ("the end the end", " the", "the end"),
        ("말하기 한국어", "한", "말하기 "),  # a character of three byte tokens
        ("말하기 한국어", "국", "말하기 한"),
        ("a 😀 b", "😀", "a "),
        ("hello", "world", "hello"),
        ("hello wor", "world", "hello wor"),  # held back, then shown
    ],
)
def test_stop_strings(session: Session, text: str, stop: Any, left: str) -> None:
    length = len(session.tokens)
    generation = session.generate(60, sampling=says(text), stop=stop, name="said")
    assert "".join(generation) == left
    assert generation.text == left
    assert generation.finish_reason == ("end" if left == text else "stop")
    assert session.model.detokenize(generation.tokens) == left
    if left:
        assert session.text("said") == left
    look(session)
    expected = session.logits()
    assert len(session.generate(2).finish().tokens) == 2
    session.rewind(length)  # the same text read plainly leads to the same
    session.append(np.asarray(generation.tokens, np.int32))
    np.testing.assert_allclose(session.logits(), expected, atol=1e-4)


@pytest.mark.parametrize(("stop", "left"), [("h", "a t"), (" th", "a"), ("e e", "a th"), ("the", "a ")])
def test_a_stop_string_inside_a_token(session: Session, stop: str, left: str) -> None:
    the = int(session.model.tokenize(" the")[0])
    generation = session.generate(60, sampling=says("a the end", logit_bias={the: 50.0}), stop=stop, name="said")
    assert generation.text == left
    assert session.text("said") == left
    assert session.model.detokenize(generation.tokens) == left
    look(session)


def test_a_stop_string_where_nothing_can_be_rewound(tiny_path: TinyPath) -> None:
    with open_tiny(tiny_path("mamba")) as session:
        session.append(TEXT)
        generation = session.generate(60, sampling=says("one. two"), stop=". ")
        assert "".join(generation) == generation.text == "one"
        look(session)
        session.append("on")
        session.generate(3).finish()


# ---- before the end -------------------------------------------------------------------------------------------------

VERBS: dict[str, Callable[[Session], object]] = {
    "append": lambda s: s.append("on", name="after"),
    "mask": lambda s: s.mask((10, 20)),
    "rewind": lambda s: s.rewind(30),
    "score": lambda s: s.score("on"),
    "logits": lambda s: s.logits(),
    "generate": lambda s: s.generate(3).text,
    "text": lambda s: s.text("prompt"),
    "audit": lambda s: s.audit(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_another_verb_ends_a_generation_where_it_is(session: Session, verb: str) -> None:
    generation = session.generate(50, name="said")
    shown = next(generation) + next(generation)
    tokens = list(generation.tokens)
    VERBS[verb](session)
    assert generation.finish_reason == "closed"
    assert shown + "".join(generation) == generation.text  # held back until it was clear how it ends
    assert generation.tokens == tokens
    start = generation.span.start
    assert session.tokens[start : start + len(tokens)].tolist() == tokens
    look(session)


@pytest.mark.parametrize("verb", VERBS)
def test_a_generation_that_never_began_begins_from_what_is_there_then(session: Session, verb: str) -> None:
    generation = session.generate(5, name="said")
    VERBS[verb](session)
    assert (generation.finish_reason, generation.tokens) == (None, [])
    with session.fork() as fork:
        expected = fork.generate(5).finish().tokens
    assert generation.finish().tokens == expected
    assert generation.finish_reason == "length"
    assert session.text("said") == session.model.detokenize(expected)
    look(session)


def test_another_generation_that_begins_ends_one_where_it_is(session: Session) -> None:
    first, second = session.generate(50, name="first"), session.generate(50, name="second")
    next(first)
    next(second)
    assert (first.finish_reason, second.finish_reason) == ("closed", None)
    assert first.span.stop == second.start_index
    assert next(first, None) is None
    look(session)


def test_the_name_of_a_generation_is_looked_at_again_when_it_begins(session: Session) -> None:
    generation = session.generate(5, name="said")
    session.append("on", name="said")
    with pytest.raises(errors.UsageError, match="a span named 'said' exists"):
        next(generation)
    assert generation.finish_reason == "closed"
    look(session)


def test_a_generation_that_cannot_start_leaves_nothing(session: Session) -> None:
    before = look(session)
    generation = session.generate(5, sampling=Sampling(grammar="root ::= ("), name="said")
    with pytest.raises(errors.GrammarError):
        next(generation)
    assert generation.finish_reason == "closed"
    assert generation.text == ""
    with pytest.raises(errors.BadState, match="no span"):
        _ = generation.span
    assert look(session) == before
    assert session.generate(5, name="said").finish().finish_reason == "length"


def test_closed_before_it_started(session: Session) -> None:
    generation = session.generate(5, name="said")
    generation.close()
    assert (generation.text, len(generation.span)) == ("", 0)
    look(session)


def test_the_session_closed_while_a_generation_is_open(tiny_path: TinyPath) -> None:
    session = open_tiny(tiny_path("llama"))
    session.append(TEXT)
    generation = session.generate(50)
    shown = next(generation)
    session.close()
    assert shown + "".join(generation) == generation.text
    assert (generation.finish_reason, len(generation.span)) == ("closed", len(generation.tokens))


def test_the_same_seed_says_the_same(session: Session) -> None:
    sampling = Sampling(temperature=1.0, top_k=40, top_p=0.9, seed=7)
    start = len(session.tokens)
    first = session.generate(20, sampling=sampling, name="a").finish()
    session.rewind(start)
    drawn = session.generate(20, sampling=Sampling(temperature=1.0), name="b").finish()
    session.rewind(start)
    second = session.generate(20, sampling=sampling, name="c").finish()
    assert first.tokens == second.tokens != drawn.tokens
    session.rewind(start)
    assert drawn.seed is not None
    again = session.generate(20, sampling=Sampling(temperature=1.0, seed=drawn.seed)).finish()
    assert again.tokens == drawn.tokens


def test_penalties_count_visible_tokens_only(session: Session) -> None:
    """A token only the hidden span holds is as likely as without penalties; one that is visible is not."""
    rare = some_tokens(1, 5)
    session.append(np.repeat(rare, 40), name="noise")
    penalised = Sampling(presence_penalty=1e6, logit_bias={int(rare[0]): 1e3})
    assert session.generate(1, sampling=penalised).finish().tokens != rare.tolist()
    session.rewind(session.span("noise").stop)
    session.mask("noise")
    assert session.generate(1, sampling=penalised).finish().tokens == rare.tolist()


# ---- characters of several tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["한국어", "aé😀", "日本"])
def test_text_never_ends_inside_a_character_and_goes_on_with_it(session: Session, text: str) -> None:
    """Each number of tokens before a cut: both texts together are what was sampled, and no U+FFFD is in them."""
    data = byte_tokens(text.encode())
    start = len(session.tokens)
    for cut in range(1, len(data)):
        parts = []
        for tokens in (data[:cut], data[cut:]):
            said = ""
            for token in tokens:
                generation = session.generate(1, sampling=Sampling(logit_bias={token: 1e6}))
                said += generation.text
                assert generation.tokens == [token]
            parts.append(said)
        assert "".join(parts) == text
        assert parts[0] == text.encode()[:cut].decode("utf-8", "ignore")
        session.rewind(start)


def test_bytes_that_are_no_character_are_shown_as_such(session: Session) -> None:
    """A continuation that does not fit, and a lead byte that text follows."""
    for data in (b"a\x80", b"\xed\x95"):
        for token in byte_tokens(data):
            session.generate(1, sampling=Sampling(logit_bias={token: 1e6})).finish()
    assert session.generate(1, sampling=Sampling(logit_bias={byte_tokens(b"x")[0]: 1e6})).text == "\ufffdx"


def test_a_stop_string_after_a_character_begun_before(session: Session) -> None:
    han = "한".encode()
    session.append(byte_tokens(han[:2]))
    bias = dict.fromkeys(byte_tokens(han[2:]), 1e6)
    assert session.generate(1, sampling=Sampling(logit_bias=bias), stop="한").text == ""
    session.append(byte_tokens(b"ok"))
    session.audit()


# ---- what a Sampling refuses -----------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"logit_bias": {5: value}} for value in (NAN, INF, 1e30, "1", True, None)),
        *({"logit_bias": {token: 1.0}} for token in ("5", -1, True, 5.0, None)),
        {"logit_bias": [5]},
        *(
            {name: value}
            for name in ("temperature", "top_p", "min_p", "typical")
            for value in (NAN, -1, INF, "1", True)
        ),
        *(
            {name: value}
            for name in ("repeat_penalty", "presence_penalty", "frequency_penalty")
            for value in (NAN, INF, "1")
        ),
        *({name: value} for name in ("top_k", "penalty_last_n", "seed") for value in (-1, 2**32, 1.5, "1", True)),
        {"repeat_penalty": 1e-30},
        {"grammar": b"root"},
    ],
    ids=str,
)
def test_a_sampling_out_of_range_is_refused_where_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError):
        Sampling(**wrong)


def test_a_bias_that_does_not_fit_the_vocabulary_touches_nothing(session: Session) -> None:
    before = look(session)
    n_vocab = session.model.n_vocab
    for bias in ({n_vocab: 1.0}, dict.fromkeys(range(n_vocab), -INF)):
        with pytest.raises(errors.UsageError):
            session.generate(3, sampling=Sampling(logit_bias=bias))
    assert look(session) == before


def test_a_sampling_keeps_the_bias_it_was_made_with() -> None:
    bias = {np.int32(5): np.float32(1.0)}
    sampling = Sampling(logit_bias=bias)  # type: ignore[arg-type]
    bias[np.int32(6)] = np.float32(NAN)
    assert sampling.logit_bias == {5: 1.0}


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1.0])
def test_a_grammar_and_a_bias_that_leave_nothing_are_stuck(session: Session, temperature: float) -> None:
    a = {t: -INF for t in range(session.model.n_vocab) if b"a" in session.model.piece(t)}
    generation = session.generate(5, sampling=Sampling(temperature, top_k=3, grammar='root ::= "a"', logit_bias=a))
    with pytest.raises(errors.GrammarStuck):
        generation.finish()
    session.audit()
