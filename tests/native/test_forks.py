"""Forks: two sessions on the same cells that do not notice each other, and decode in one batch."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_threads import together

from edgekv import Engine, Model, Sampling, Session, decode_together, errors
from edgekv._llama import lib
from helpers import EXACT, cells_in_llama, look, open_tiny, some_tokens

TinyPath = Callable[..., Path]
SIZES = {"head": 20, "middle": 50, "tail": 30}


@pytest.fixture(params=["llama", "gemma3", "yarn", "mrope"])
def session(request: pytest.FixtureRequest, tiny_path: TinyPath) -> Iterator[Session]:
    with Session(tiny_path(request.param), settings=replace(EXACT, n_batch=32)) as session:
        yield fill(session)


@pytest.fixture(params=["mamba", "lfm2"])
def state(request: pytest.FixtureRequest, tiny_path: TinyPath) -> Iterator[Session]:
    with Session(tiny_path(request.param), settings=replace(EXACT, n_batch=32)) as session:
        yield fill(session)


def fill(session: Session) -> Session:
    for name, size in SIZES.items():
        session.append(some_tokens(size, size), name=name)
    return session


def story(session: Session) -> np.ndarray:
    """Edits that move, hide, drop and read."""
    session.mask("middle")
    session.append(some_tokens(9, 1))
    session.generate(3).finish()
    session.unmask((20, 40))
    session.rewind(105)
    return session.logits()


def test_a_fork_is_the_session_it_came_from(session: Session) -> None:
    session.mask((30, 40))
    logits, cells = session.logits(), session.engine.cells_used
    with session.fork() as fork:
        assert look(fork) == look(session)
        assert fork.spans == session.spans
        np.testing.assert_array_equal(fork.logits(), logits)
        assert session.engine.cells_used == cells
        assert [r.verb for r in fork.history] == ["mask"]
        fork.undo()
        np.testing.assert_array_equal(session.logits(), logits)
        look(session)
        look(fork)


def test_neither_notices_the_other(session: Session) -> None:
    """One does all it can, the other stands still; then the other does the same, and comes to the same."""
    before, logits = look(session), session.logits()
    with session.fork() as fork:
        expected = story(fork)
        assert replace(look(session), cells_free=before.cells_free) == before
        np.testing.assert_array_equal(session.logits(), logits)
        assert np.abs(story(session) - expected).max() < 2e-2
        for s in (session, fork):
            s.audit()
        assert session.engine.cells_used == cells_in_llama(session.engine)


def test_what_would_move_under_the_other_is_copied(tiny_path: TinyPath) -> None:
    with fill(Session(tiny_path(), settings=EXACT)) as session:
        with session.fork() as fork:
            receipt = fork.mask("middle")
            assert (receipt.moved, receipt.copied) == (20, 20)
            assert "20 cells copied, as a fork holds them too" in str(receipt)
            assert session.engine.cells_used == 120
            assert session.mask("tail").copied == 0  # nothing moves
            assert session.unmask("tail").copied == 0
            receipt = session.mask("middle")
            assert (receipt.moved, receipt.copied) == (20, 0)  # the fork has left those behind
        look(session)
        assert session.engine.cells_used == 100 + int(session._ledger.has_original(99))


def test_a_copy_that_finds_no_room_changes_nothing(tiny_path: TinyPath) -> None:
    with fill(open_tiny(tiny_path(), n_ctx=256)) as session, session.fork() as fork:
        session.append(some_tokens(session.engine.cells_free - 10))
        before, other = look(fork), look(session)
        with pytest.raises(errors.ContextFull, match="close a fork"):
            fork.mask("middle")
        assert (look(fork), look(session)) == (before, other)
        assert fork.mask("middle", gap="keep").copied == 0


def test_closing_frees_what_nobody_else_holds(session: Session) -> None:
    forks = [session.fork() for _ in range(4)]
    with pytest.raises(errors.UsageError, match="n_sessions"):
        session.fork()
    for number, fork in enumerate(forks):
        fork.append(some_tokens(10, number))
    assert session.engine.cells_used == 140
    session.close()
    assert forks[0].engine.cells_used == 140
    for left, fork in zip((130, 120, 110), forks, strict=False):
        fork.audit()
        fork.generate(2).finish()
        fork.close()
        fork.close()
        assert forks[3].engine.cells_used == left == cells_in_llama(forks[3].engine)
    forks[3].audit()
    assert not forks[3].engine.closed
    forks[3].close()
    assert forks[3].engine.closed


def test_an_engine_of_the_caller_s_stays_open(tiny_path: TinyPath) -> None:
    with Model(tiny_path()) as model, Engine(model, EXACT) as engine:
        session = fill(Session(engine))
        session.fork().close()
        session.close()
        assert not engine.closed
        assert engine.cells_used == 0 == cells_in_llama(engine)


def test_evicted_cells_are_free_when_the_last_lets_go(session: Session) -> None:
    with session.fork() as fork:
        assert session.evict("middle").freed == 0
        assert session.engine.cells_used >= 100
        assert fork.evict("middle").freed == 50
        look(fork)
    look(session)


def test_a_fork_of_a_state(state: Session) -> None:
    """A recurrent state is copied when one of the two goes on."""
    logits, cells = state.logits(), state.engine.cells_used
    with state.fork() as fork:
        np.testing.assert_array_equal(fork.logits(), logits)
        assert state.engine.cells_used == cells
        fork.append(some_tokens(9, 1))
        state.append(some_tokens(9, 1))
        np.testing.assert_allclose(fork.logits(), state.logits(), atol=1e-5)
        for s in (state, fork):
            look(s)
    assert state.engine.cells_used == cells + 9
    look(state)


@pytest.mark.parametrize("seed", range(2))
def test_together_each_says_what_it_would_say_alone(session: Session, seed: int) -> None:
    sampling = Sampling(temperature=1.0, seed=seed)
    said = []
    for in_step in (False, True):
        forks = [session.fork() for _ in range(4)]
        for number, fork in enumerate(forks):
            fork.append(some_tokens(5 + number, 10 * seed + number))
        going = [f.generate(6 + n, sampling=sampling, name="said") for n, f in enumerate(forks)]
        pieces: list[list[str]] = [[] for _ in forks]
        if in_step:
            for number, piece in decode_together(going):
                pieces[number].append(piece)
            assert ["".join(p) for p in pieces] == [g.text for g in going]
        said.append([g.finish().tokens for g in going])
        assert [g.finish_reason for g in going] == ["length"] * 4
        for fork, generation in zip(forks, going, strict=True):
            assert fork.span("said") == generation.span
            assert fork.tokens[generation.span.start :].tolist() == generation.tokens
            look(fork)
            fork.close()
    assert said[0] == said[1]


def test_together_in_one_batch_a_step(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    forks, sizes, decode = [session.fork() for _ in range(4)], list[int](), lib.llama_decode

    def counted(ctx: object, batch: Any) -> int:
        sizes.append(batch.n_tokens)
        return int(decode(ctx, batch))

    monkeypatch.setattr(lib, "llama_decode", counted)
    list(decode_together([fork.generate(16) for fork in forks]))
    assert sizes == [4] * 16
    for fork in forks:
        fork.close()


def test_together_with_edits_between(session: Session) -> None:
    """One after an edit, so that its last token is read again; one with a stop string; one that is full."""
    with session.fork() as other, session.fork() as third:
        alone = [session.fork(), third.fork()]
        for s in (other, alone[0]):
            s.mask("middle")
        stop = alone[1].generate(8).finish().text[3:5]
        expected = [alone[0].generate(8).finish().tokens, stop]
        for s in alone:
            s.close()
        going = [other.generate(8), third.generate(8, stop=stop), session.generate(0)]
        list(decode_together(going))
        assert going[0].tokens == expected[0]
        assert going[1].finish_reason == "stop"
        assert stop not in going[1].text
        assert going[2].tokens == []
        assert going[0].timings.reread == 1
        for s in (session, other, third):
            look(s)


def test_left_half_read_they_stay_where_they_are(session: Session) -> None:
    with session.fork() as fork:
        going = [session.generate(20), fork.generate(20)]
        running = decode_together(going)
        for _ in range(4):
            next(running)
        session.append("on")
        assert going[0].finish_reason == "closed"
        list(running)  # the other one goes on
        assert going[1].finish_reason == "length"
        for s in (session, fork):
            look(s)


def test_together_without_room(tiny_path: TinyPath) -> None:
    with fill(open_tiny(tiny_path(), n_ctx=256)) as session, session.fork() as fork:
        session.append(some_tokens(session.engine.cells_free - 5))
        going = [session.generate(20), fork.generate(20)]
        with pytest.raises(errors.ContextFull):
            list(decode_together(going))
        assert [len(g.tokens) for g in going] == [2, 2]
        assert [g.finish_reason for g in going] == ["closed"] * 2
        for s in (session, fork):
            look(s)


def test_one_that_fails_leaves_the_others_their_token(session: Session) -> None:
    ban = dict.fromkeys(session.model.tokenize("b").tolist(), float("-inf"))
    stuck = Sampling(grammar='root ::= "b"', logit_bias=ban)  # nothing can be said
    with session.fork() as fork:
        going = [session.generate(3), fork.generate(3, sampling=stuck)]
        with pytest.raises(errors.GrammarStuck):
            list(decode_together(going))
        assert [len(g.tokens) for g in going] == [1, 0]
        list(decode_together(going))
        assert len(going[0].tokens) == 3
        for s in (session, fork):
            look(s)


def test_what_cannot_decode_together(session: Session, tiny_path: TinyPath) -> None:
    with Session(tiny_path(), settings=EXACT) as stranger:
        stranger.append("a")
        one = session.generate(3)
        for wrong in ([], [one, stranger.generate(3)], [one, one]):
            with pytest.raises(errors.UsageError):
                list(decode_together(wrong))
        assert one.finish().tokens


def test_forks_in_threads(session: Session) -> None:
    """Each in a thread of its own, one of them closed in another thread than it was made in."""
    expected = story(forked := session.fork())
    forked.close()
    forks = [session.fork() for _ in range(3)]

    def work(fork: Session) -> np.ndarray:
        logits = story(fork)
        fork.close()
        return logits

    open_one = session.generate(50)
    next(open_one)
    for found in together(*(lambda f=f: work(f) for f in forks), lambda: story(session)):
        assert np.abs(np.asarray(found) - expected).max() < 2e-2 or open_one.tokens
    assert session.engine.cells_used == cells_in_llama(session.engine)
    look(session)


def test_a_fork_closed_while_another_thread_generates(session: Session) -> None:
    fork, going = session.fork(), session.generate(60)
    together(lambda: going.finish(), fork.close, lambda: [session.model.tokenize("a") for _ in range(50)])
    assert len(going.tokens) == 60
    look(session)


def test_a_fork_nobody_keeps(session: Session) -> None:
    """A generation keeps what it reads into."""
    generation = session.fork().generate(5)
    gc.collect()
    assert len(generation.finish().tokens) == 5
    session.audit()


def test_async_for(session: Session) -> None:
    expected = session.fork().generate(12).finish().tokens
    ticks = []

    async def tick() -> None:
        while True:
            ticks.append(1)
            await asyncio.sleep(0)

    async def main() -> str:
        ticking = asyncio.create_task(tick())
        text = "".join([piece async for piece in session.generate(12, name="said")])
        ticking.cancel()
        return text

    text = asyncio.run(main())
    generated = session.tokens[session.span("said").start :].tolist()
    assert generated == expected
    assert text == session.model.detokenize(generated)
    assert len(ticks) > 5, "the event loop stood still"
    look(session)


def test_async_that_is_cancelled(session: Session) -> None:
    generation = session.generate(1000)

    async def main() -> None:
        task = asyncio.create_task(read())
        while len(generation.tokens) < 5:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def read() -> None:
        async for _ in generation:
            pass

    asyncio.run(main())
    said = list(generation.tokens)
    session.append("on")
    assert generation.finish_reason in ("closed", "length")
    assert generation.tokens[: len(said)] == said
    look(session)


def test_async_two_at_once(session: Session) -> None:
    with session.fork() as fork:
        alone = [session.fork(), fork.fork()]
        expected = [s.generate(8).finish().text for s in alone]
        for s in alone:
            s.close()

        async def say(s: Session) -> str:
            return "".join([piece async for piece in s.generate(8)])

        async def main() -> list[str]:
            return list(await asyncio.gather(say(session), say(fork)))

        assert asyncio.run(main()) == expected
