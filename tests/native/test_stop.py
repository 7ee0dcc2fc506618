"""Ctrl-C, handlers that raise, and stop() end an evaluation inside a batch; nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import Session, _llama, errors
from helpers import look, open_tiny, some_tokens

TinyPath = Callable[..., Path]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")


class Late(Exception):
    pass


def late(*_: object) -> None:
    raise Late


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, late)
    yield
    signal.signal(signal.SIGUSR1, before)


#: how it is ended, from another thread, and what is raised
ENDS: dict[str, tuple[Callable[[Session], object], type[BaseException]]] = {
    "stop": (lambda s: s.stop(), errors.Stopped),
    "engine": (lambda s: s.engine.stop(), errors.Stopped),
    "ctrl-c": (lambda _s: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt),
    "handler": (lambda _s: os.kill(os.getpid(), signal.SIGUSR1), Late),
}


def in_a_batch(
    session: Session, end: Callable[[Session], object], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Any]:
    """From now on the second decode goes on only when ``end`` was called and the flag is up: it ends inside its batch.
    Returns a function that tells the codes of the decodes."""
    decode, codes = _llama.lib.llama_decode, []

    def slow(ctx: Any, batch: Any) -> int:
        if len(codes) == 1:
            threading.Thread(target=end, args=(session,)).start()
            while not session.engine._abort.is_set:
                threading.Event().wait(0.001)
        codes.append(int(decode(ctx, batch)))
        return codes[-1]

    monkeypatch.setattr(_llama.lib, "llama_decode", slow)
    return lambda: codes


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "lfm2"])
@pytest.mark.parametrize("how", ENDS)
def test_an_evaluation_ends_inside_a_batch(
    tiny_path: TinyPath, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    end, error = ENDS[how]
    with open_tiny(tiny_path(kind), n_batch=64) as session, open_tiny(tiny_path(kind), n_batch=64) as untouched:
        for s in (session, untouched):
            s.append(some_tokens(20))
        before = look(session)
        with monkeypatch.context() as patch:
            codes = in_a_batch(session, end, patch)
            with pytest.raises(error):
                session.append(some_tokens(150, 1))
            assert codes()[:2] == [0, 2]
        assert look(session) == before
        for s in (session, untouched):
            s.append(some_tokens(150, 2))
        np.testing.assert_array_equal(session.logits(), untouched.logits())
        look(session)


def test_nothing_is_stopped_where_nothing_is_evaluated(tiny_path: TinyPath) -> None:
    with open_tiny(tiny_path("llama")) as session:
        assert not session.stop()
        session.append(some_tokens(100))
        assert not session.stop()
        assert not session.engine.stop()
        session.generate(3).finish()


@pytest.mark.real
def test_a_real_model_stops_inside_a_batch() -> None:
    tokens = list(range(1000, 1512))
    with Session("smollm2", n_ctx=1024, n_threads=1) as session, Session("smollm2", n_ctx=1024, n_threads=1) as other:
        for s in (session, other):
            s.append(tokens[:16])
        before, engine = look(session), session.engine

        def stop() -> None:  # once the decode has been handed over, which takes seconds to its end
            while engine._running is None:
                threading.Event().wait(0.001)
            session.stop()

        threading.Thread(target=stop).start()
        with pytest.raises(errors.Stopped):
            session.append(tokens)
        assert engine.aborted == 1
        assert look(session) == before
        for s in (session, other):
            s.append(tokens[:40])
        np.testing.assert_array_equal(session.logits(), other.logits())


# ---- a closed session ---------------------------------------------------------------------------------------------

CLOSED: dict[str, Callable[[Session], object]] = {
    "tokens": lambda s: s.tokens,
    "visible_tokens": lambda s: s.visible_tokens,
    "spans": lambda s: s.spans,
    "span": lambda s: s.span("text"),
    "stats": lambda s: s.stats,
    "indexes": lambda s: s.indexes(),
    "indexes_of": lambda s: s.indexes_of("text"),
    "ranges": lambda s: s.ranges(np.arange(3)),
    "last_edit": lambda s: s.last_edit,
    "history": lambda s: s.history,
    "states": lambda s: s.states(SPAN[0]),
    "append": lambda s: s.append("x"),
    "mask": lambda s: s.mask("text"),
    "generate": lambda s: s.generate(3),
    "logits": lambda s: s.logits(),
    "score": lambda s: s.score("x"),
    "fork": lambda s: s.fork(),
    "audit": lambda s: s.audit(),
    "save": lambda s: s.save("never"),
    "undo": lambda s: s.undo(),
}
SPAN: list[Any] = []


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_session_tells_nothing(tiny_path: TinyPath, name: str) -> None:
    with open_tiny(tiny_path("llama")) as session:
        SPAN[:] = [session.append("some text", name="text")]
    with pytest.raises(errors.ClosedError, match="closed"):
        CLOSED[name](session)
    assert "closed" in repr(session)
    assert not session.stop()
    session.close()


def test_messages_are_those_of_the_thread() -> None:
    """An exception never quotes what another engine's thread was told."""

    def other() -> None:
        _llama._on_log(4, b"theirs\n", None)

    _llama.forget_messages()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert _llama.last_messages() == ""
    _llama._on_log(4, b"ours\n", None)
    assert _llama.last_messages() == "ours"
