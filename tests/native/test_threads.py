"""Threads: two sessions on one engine, one session from two threads, close under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgekv import Engine, Model, Session, errors
from helpers import EXACT, TEXT, look, some_tokens

TinyPath = Callable[..., Path]
TWO = replace(EXACT, n_ctx=1024, n_batch=32, n_sessions=2)


class Failing(threading.Thread):
    """A thread whose exception is raised by join()."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.error: BaseException | None = None
        self.result: object = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as err:
            self.error = err


def together(*works: Callable[[], object]) -> list[object]:
    threads = [Failing(work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive(), "deadlock"
        if thread.error is not None:
            raise thread.error
    return [thread.result for thread in threads]


def story(session: Session, seed: int) -> tuple[list[int], np.ndarray]:
    """Reads, generates, masks and shows; returns every token said and the last logits."""
    said: list[int] = []
    session.append(TEXT)
    for round in range(4):
        span = session.append(some_tokens(40 + 10 * round, seed + round), name=f"t{round}")
        said += session.generate(8).finish().tokens
        session.mask(span)
        for _ in (generation := session.generate(8)):
            session.model.tokenize(TEXT)
        said += generation.tokens
        if round % 2:
            session.unmask(span)
        said.append(int(session.score(some_tokens(20, seed)).argmin()))
    return said, session.logits()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_two_sessions_in_two_threads_do_as_each_would_alone(tiny_path: TinyPath, kind: str) -> None:
    with Model(tiny_path(kind)) as model:
        alone = []
        for seed in (10, 20):
            with Engine(model, TWO) as engine:
                alone.append(story(Session(engine), seed))
        with Engine(model, TWO) as engine:
            first, second = Session(engine), Session(engine)
            both = together(lambda: story(first, 10), lambda: story(second, 20))
            for session, (said, logits), expected in zip((first, second), both, alone, strict=True):  # type: ignore[misc]
                assert said == expected[0]
                np.testing.assert_allclose(logits, expected[1], atol=1e-2)
                look(session)
            assert engine.cells_used == first.stats.cells_used + second.stats.cells_used


def test_generations_of_two_sessions_can_alternate(tiny_path: TinyPath) -> None:
    with Model(tiny_path("llama")) as model:
        alone = []
        for seed in (1, 2):
            with Session(model, settings=EXACT) as session:
                session.append(some_tokens(50, seed))
                alone.append(session.generate(20).finish().tokens)
        with Engine(model, TWO) as engine:
            sessions = [Session(engine), Session(engine)]
            for session, seed in zip(sessions, (1, 2), strict=True):
                session.append(some_tokens(50, seed))
            generations = [session.generate(20) for session in sessions]
            open_ones = list(generations)
            while open_ones:
                open_ones = [g for g in open_ones if next(g, None) is not None]
            assert [g.tokens for g in generations] == alone


def test_another_thread_reads_in_turn(tiny_path: TinyPath) -> None:
    """Its decode overwrites the logits of the other session; they must have been kept."""
    with Model(tiny_path("llama")) as model, Engine(model, TWO) as engine:
        first, second = Session(engine), Session(engine)
        first.append(some_tokens(70, 1), name="it")
        expected = first.logits()
        together(lambda: second.append(some_tokens(15, 2)))
        np.testing.assert_array_equal(first.logits(), expected)
        look(first)
        look(second)


def test_one_session_from_two_threads(tiny_path: TinyPath) -> None:
    """Verbs take turns; each is whole."""
    with Session(tiny_path("llama"), settings=replace(TWO, n_ctx=2048)) as session:
        session.append(TEXT)
        tokens = [some_tokens(37, seed) for seed in range(2)]

        def read(which: int) -> list[tuple[int, int]]:
            return [session.append(tokens[which]).range for _ in range(15)]

        ranges = together(lambda: read(0), lambda: read(1))
        for which, own in enumerate(ranges):
            for start, stop in own:  # type: ignore[attr-defined]
                assert session.tokens[start:stop].tolist() == tokens[which].tolist()
        look(session)


def test_a_long_generation_lets_others_in(tiny_path: TinyPath) -> None:
    """Whoever waits gets the lock behind the token that is being read, not behind the last one."""
    with Session(tiny_path("llama"), settings=TWO) as session:
        session.append(TEXT)
        generation = session.generate(900)
        going, seen = threading.Event(), []

        def listen() -> None:
            for _ in generation:
                going.set()

        def look_in() -> None:
            assert going.wait(600)
            for _ in range(5):
                with session.lock:
                    seen.append(len(generation.tokens))

        together(listen, look_in)
        assert len(generation.tokens) == 900
        assert seen[-1] < 900  # it was let in five times before the generation had ended


@pytest.mark.parametrize("how", ["append", "close"])
def test_a_generation_in_one_thread_ended_by_another(tiny_path: TinyPath, how: str) -> None:
    with Session(tiny_path("llama"), settings=replace(TWO, n_ctx=8192)) as session:
        session.append(TEXT)
        generation = session.generate(8000, name="said")
        going = threading.Event()

        def listen() -> str:
            text = ""
            for piece in generation:
                text += piece
                going.set()
            return text

        def meddle() -> None:
            assert going.wait(600)
            if how == "close":
                generation.close()
            session.append("stop", name="after")

        text, _ = together(listen, meddle)
        assert generation.finish_reason == "closed"
        assert generation.text == text
        assert session.span("after").start == generation.span.stop
        look(session)


def test_closed_while_another_thread_works(tiny_path: TinyPath) -> None:
    for _ in range(5):
        session = Session(tiny_path("llama"), settings=TWO)
        going = threading.Event()

        def work(session: Session = session, going: threading.Event = going) -> str:
            try:
                while True:
                    session.rewind(0)
                    session.append("on and on")
                    session.generate(3).finish()
                    going.set()
            except errors.ClosedError:
                return "closed"

        def close(session: Session = session, going: threading.Event = going) -> None:
            assert going.wait(600)
            session.close()

        assert together(work, close)[0] == "closed"


def test_an_open_generation_holds_no_lock(tiny_path: TinyPath) -> None:
    with Model(tiny_path("llama")) as model, Engine(model, TWO) as engine:
        first, second = Session(engine), Session(engine)
        first.append(TEXT)
        generation = first.generate(50)
        next(generation)
        together(lambda: second.append(TEXT), lambda: second.generate(3).finish())
        assert generation.finish_reason is None
        assert len(generation.finish().tokens) == 50
