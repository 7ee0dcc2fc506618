"""Ctrl-C and other exceptions at bad moments: all of a verb has happened, or nothing."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgekv import Session, errors
from edgekv._llama import uninterrupted
from helpers import TEXT, ctrl_c, ctrl_c_at, look, open_tiny, places_in, some_tokens

TinyPath = Callable[..., Path]
Logits = np.typing.NDArray[np.float32]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")


@pytest.fixture(params=["llama", "gemma3", "mrope"])
def session(request: pytest.FixtureRequest, tiny_path: TinyPath) -> Iterator[Session]:
    with open_tiny(tiny_path(request.param), n_batch=16) as session:
        session.append(TEXT, name="prompt")
        yield session


class Stop(Exception):
    pass


def stop(*_: object) -> None:
    raise Stop


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("at", [16, 40])
@pytest.mark.parametrize(("fault", "error"), [(ctrl_c, KeyboardInterrupt), (stop, Stop)])
def test_an_append_that_is_interrupted_never_happened(
    session: Session, fault: Callable[..., None], error: type[BaseException], at: int, masked: bool
) -> None:
    if masked:
        session.mask((10, 20))
    logits = session.logits()
    before = look(session)
    prefilled = session.stats.prefilled
    session.progress = lambda done, _total: fault() if done >= at else None
    with pytest.raises(error):
        session.append(some_tokens(40), name="more")
    session.progress = None
    assert look(session) == before
    np.testing.assert_array_equal(session.logits(), logits)
    assert look(session) == before  # nothing had to be read again
    assert session.stats.prefilled == prefilled
    session.append(some_tokens(40), name="more")
    session.generate(3).finish()
    look(session)


def test_the_progress_of_an_append(session: Session) -> None:
    told: list[tuple[int, int]] = []
    session.progress = lambda *both: told.append(both)
    session.append(some_tokens(40))
    session.append("")
    assert told == [(16, 40), (32, 40), (40, 40)]


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
@pytest.mark.parametrize("before", ["", "abc"])
def test_a_state_that_cannot_be_rewound_comes_back_from_its_copy(tiny_path: TinyPath, kind: str, before: str) -> None:
    with open_tiny(tiny_path(kind), n_batch=16) as session, open_tiny(tiny_path(kind), n_batch=16) as untouched:
        for s in (session, untouched):
            s.append(before)
        was = look(session)
        session.progress = ctrl_c
        with pytest.raises(KeyboardInterrupt):
            session.append(some_tokens(40))
        session.progress = None
        assert look(session) == was
        for s in (session, untouched):
            s.append(some_tokens(20, 1))
        np.testing.assert_array_equal(session.logits(), untouched.logits())
        look(session)


@pytest.mark.parametrize(("fault", "error"), [(ctrl_c, KeyboardInterrupt), (stop, Stop)])
def test_a_generation_keeps_what_it_said(
    session: Session, fault: Callable[..., None], error: type[BaseException]
) -> None:
    generation = session.generate(50, name="said")
    with pytest.raises(error):  # noqa: PT012
        for _ in generation:
            if len(generation.tokens) >= 5:
                fault()
    said = list(generation.tokens)
    assert len(said) == 5
    session.append("on", name="next")
    assert generation.finish_reason == "closed"
    assert session.tokens[generation.span.start : generation.span.stop].tolist() == said
    assert generation.text == session.model.detokenize(said)
    look(session)


def test_ctrl_c_inside_a_step_waits_for_its_end(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that was being read is in the text and in the cache, and the generation has ended."""
    read_one = session._reader.read_one

    def interrupted(token: int) -> int:
        index = read_one(token)
        if len(generation.tokens) == 3:
            ctrl_c()
        return index

    monkeypatch.setattr(session._reader, "read_one", interrupted)
    generation = session.generate(50)
    with pytest.raises(KeyboardInterrupt):
        generation.finish()
    assert generation.finish_reason == "closed"
    assert len(generation.tokens) == 4
    assert session.tokens[-4:].tolist() == generation.tokens
    look(session)


def test_an_interrupted_score_leaves_nothing_though_its_error_is_kept(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback keeps its frames alive, as an interactive Python does: the cells must go all the same."""
    session.engine.max_outputs = 8  # type: ignore[misc]  # many small batches, so that there is a middle
    before, expected = look(session), session.score(some_tokens(40))
    calls: list[int] = []

    def interrupted(logits: Logits, _tokens: object) -> Logits:
        calls.append(len(logits))
        if len(calls) == 3:
            ctrl_c()
        return logits[:, 0]

    with monkeypatch.context() as patch:
        patch.setattr("edgekv.numerics.log_probabilities", interrupted)
        try:
            session.score(some_tokens(40))
        except KeyboardInterrupt as err:
            kept = err
    assert kept.__traceback__ is not None
    assert calls == [1, 8, 8]
    assert look(session) == before
    np.testing.assert_array_equal(session.score(some_tokens(40)), expected)


def test_ctrl_c_is_held_back_and_then_handed_on() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with uninterrupted(), uninterrupted():
            ctrl_c()
            ctrl_c()
            reached.append("end")
        reached.append("behind")
    assert reached == ["end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


VERBS: dict[str, Callable[[Session], object]] = {
    "append": lambda s: s.append(some_tokens(40, 2), name="new"),
    "generate": lambda s: s.generate(5, name="new").finish(),
    "mask": lambda s: s.mask((30, 40), gap="keep"),
    "unmask": lambda s: s.unmask((20, 26)),
    "park": lambda s: s.park((30, 40), gap="keep"),
    "evict": lambda s: s.evict((30, 40), gap="keep"),
    "replace": lambda s: s.replace((50, 60), some_tokens(5, 3)),
    "undo": lambda s: s.undo(),
    "score": lambda s: s.score(some_tokens(30, 4)),
    "logits": lambda s: s.logits(),
    "rewind": lambda s: s.rewind(50),
}


@pytest.mark.parametrize("verb", VERBS)
def test_ctrl_c_at_any_line(session: Session, verb: str) -> None:
    """All of a verb has happened, or nothing; of a generation, what it said so far."""
    do, few = VERBS[verb], session.model.path.name != "llama-0.gguf"
    session.append(some_tokens(30), name="later")
    session.mask((20, 26), gap="keep")
    origin = look(session)
    with session.fork() as fork:
        places = places_in(lambda: refused_or(do, fork), 3 if few else 8)
        after = look(fork)
    for line in places:
        with session.fork() as fork:
            before = look(fork)
            with contextlib.suppress(KeyboardInterrupt), ctrl_c_at(line):
                refused_or(do, fork)
            now = look(fork)
            if verb == "generate":
                assert len(now.tokens) >= len(before.tokens) and now.tokens == after.tokens[: len(now.tokens)]
            else:
                # Copies of cells that a fork shares may be there already: they change nothing by themselves.
                assert replace(now, cells_free=0) in [replace(seen, cells_free=0) for seen in (before, after)], line
            fork.append("on")
            fork.generate(2).finish()
            look(fork)
        assert look(session) == origin


def refused_or(do: Callable[[Session], object], session: Session) -> None:
    with contextlib.suppress(errors.MaskUnsupported):
        do(session)
