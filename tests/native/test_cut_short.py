"""An exception between any two bytecodes of a verb: the session is as before it or as after it, or says it is broken.

A signal handler that raises, an exception that another thread sets, Ctrl-C and MemoryError arrive between bytecodes.
Here a trace function raises at the k-th bytecode of edgekv that a verb runs, for k spread over all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import edgekv
from edgekv import Engine, Model, Session, Settings, Span, errors, recovery
from helpers import some_tokens

TinyPath = Callable[..., Path]
_HOME = str(Path(edgekv.__file__).parent)
_SPREAD = 4  # places a verb in the default tier


class Hit(BaseException):
    """What arrives."""


class Tracer:
    """Counts the bytecodes of edgekv that run in this thread, and raises at the k-th. again: a second exception comes
    so many bytecodes later, while the first is dealt with."""

    def __init__(self, at: int = 0, again: int = 0) -> None:
        self.count, self.at, self.again = 0, at, again

    def __enter__(self) -> Tracer:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(_HOME) or path.endswith(
            ("fair_lock.py", "_llama.py")
        ):  # that one knows where Python really looks
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self.at and self.again:
                _set_async()
            elif self.count == self.at:
                raise Hit
            elif self.again and self.count == self.at + self.again:
                _set_async()
        return self._trace


def _set_async() -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(Hit))


@pytest.fixture(scope="module", params=["llama", "gemma3", "mamba"])
def engine(request: pytest.FixtureRequest, tiny_path: TinyPath) -> Iterator[Engine]:
    settings = Settings(n_ctx=256, n_batch=16, kv_type="f32", flash_attention=False, n_threads=1)
    with Model(tiny_path(request.param)) as model, Engine(model, settings) as engine:
        yield engine


def begin(engine: Engine) -> Session:
    session = Session(engine, on_unsupported="recompute")
    for name, size in (("head", 8), ("middle", 10), ("tail", 20)):
        session.append(some_tokens(size, size), name=name)
    return session


def masked(session: Session) -> None:
    session.mask("middle")


def parked(session: Session) -> None:
    session.park("middle")


def evicted(session: Session) -> None:
    session.evict("middle")


def replaced(session: Session) -> None:
    session.replace("middle", some_tokens(6, 5), name="new")


def nothing(_session: Session) -> None:
    pass


VERBS: dict[str, tuple[Callable[[Session], object], Callable[[Session], object]]] = {
    "append": (nothing, lambda s: s.append(some_tokens(40, 1), name="more")),
    "append one batch": (masked, lambda s: s.append(some_tokens(5, 1), name="more")),
    "isolated": (nothing, lambda s: s.append(some_tokens(20, 1), name="more", attend="middle")),
    "mask": (nothing, lambda s: s.mask("middle")),
    "mask, kept": (nothing, lambda s: s.mask("middle", gap="keep")),
    "unmask": (masked, lambda s: s.unmask("middle")),
    "insert": (nothing, lambda s: s.insert("tail", some_tokens(20, 2), name="new")),
    "replace": (nothing, lambda s: s.replace("middle", some_tokens(18, 2), name="new")),
    "park": (nothing, lambda s: s.park("middle")),
    "bring back": (parked, lambda s: s.unmask("middle")),
    "evict": (masked, lambda s: s.evict("middle")),
    "rewind": (nothing, lambda s: s.rewind("tail")),
    "recompute": (masked, lambda s: s.recompute()),
    "undo a mask": (masked, lambda s: s.undo()),
    "undo an evict": (evicted, lambda s: s.undo()),
    "undo a replace": (replaced, lambda s: s.undo()),
    "logits": (masked, lambda s: s.logits()),
    "score": (nothing, lambda s: s.score(some_tokens(40, 3))),
    "compact": (evicted, lambda s: s.compact()),
    "mark": (nothing, lambda s: s.mark((3, 9), "tail")),
    "fork": (masked, lambda s: s.fork().close()),
}


def seen(session: Session) -> Any:
    """What a session is; an audit first."""
    session.audit()
    tokens = session.tokens
    states = {int(k): v for k, v in session.states(Span("all", 0, len(tokens))).items()}
    return tokens.tolist(), session.spans, states, session.stats.cells_used, session.stats.cursor, len(session.history)


def cut(
    engine: Engine, before: Callable[[Session], object], verb: Callable[[Session], object], at: int, again: int
) -> Any:
    """A session after a verb that was cut short there: what it is, and its next logits; None where it is broken."""
    session = begin(engine)
    before(session)
    tracer = Tracer(at, again)
    try:
        with contextlib.suppress(Hit), tracer:
            verb(session)
    finally:
        sys.settrace(None)
    with contextlib.suppress(Hit):  # one that was set and has not arrived
        for _ in range(100):
            nothing(session)
    try:
        state, logits = seen(session), session.logits()
        session.append([280], name="on")
        session.audit()
        return state, logits
    except errors.SessionBroken:
        return None
    finally:
        session.close()
        gc.collect()
        with engine.lock:
            recovery.ready(engine)  # a fork that nobody got is taken back
        assert engine.cells_used == 0, f"cells are lost at {at}, {again}"


def check(engine: Engine, name: str, places: int | None, again: int = 0) -> None:
    before, verb = VERBS[name]
    with begin(engine) as session:
        before(session)
        first, first_logits = seen(session), session.logits()
    with begin(engine) as session:
        before(session)
        with Tracer() as tracer:
            verb(session)
        last, last_logits = seen(session), session.logits()
    step = 1 if places is None else max(1, tracer.count // places)
    for at in range(1, tracer.count + 1, step):
        found = cut(engine, before, verb, at, again and again + at % 97)
        if found is None:
            raise AssertionError(f"broken at {at} of {tracer.count}")
        state, logits = found
        assert state in (first, last), f"neither before nor after, at {at} of {tracer.count}"
        both = ((first, first_logits), (last, last_logits))
        near = [np.abs(logits - expected).max() < 1e-3 for s, expected in both if s == state]
        assert any(near), f"other logits at {at} of {tracer.count}"


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_is_whole_or_nothing(engine: Engine, name: str) -> None:
    if not engine.model.capabilities.mask and name in ("isolated", "evict"):
        pytest.skip("nothing of a state can be seen alone, and what is masked is evicted")
    check(engine, name, _SPREAD)


@pytest.mark.slow
@pytest.mark.parametrize("again", [0, 40])
@pytest.mark.parametrize("name", VERBS)
def test_at_every_place(engine: Engine, name: str, again: int) -> None:
    if not engine.model.capabilities.mask and name in ("isolated", "evict"):
        pytest.skip("nothing of a state can be seen alone, and what is masked is evicted")
    check(engine, name, None, again)
