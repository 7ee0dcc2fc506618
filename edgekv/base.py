"""Base: how a session lives: what it opens, what it closes, and when it may be asked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from . import budget, catalog, recovery
from .columns import State
from .engine import Engine
from .errors import ClosedError, SessionBroken, UsageError
from .host import end_open
from .model import Model
from .reader import Progress
from .sampling import GREEDY, Sampling
from .settings import Settings
from .transcript import Transcript

P = ParamSpec("P")
R = TypeVar("R")
B = TypeVar("B", bound="Base")

_ON_UNSUPPORTED: Final = ("refuse", "recompute")


def verb(method: Callable[Concatenate[B, P], R]) -> Callable[Concatenate[B, P], R]:
    """A public verb: one at a time, on an open and sound session.

    A generation that has begun and is not finished ends first, where it is: what was generated stays, and it is not
    run to its end. A verb happens as a whole or not at all, whatever exception arrives at whatever place (see
    :mod:`edgekv.recovery`); where that cannot be, the session is broken and says so.
    """

    @functools.wraps(method)
    def call(self: B, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            self._be_ready()
            return self._transcript.record.whole(functools.partial(method, self, *args, **kwargs))

    return call


class Lease:
    """What sessions opened for themselves: it is closed when the last of them is."""

    def __init__(self) -> None:
        self.stack: Final = contextlib.ExitStack()
        self._holders = 1

    def take(self) -> Lease:
        self._holders += 1
        return self

    def give_back(self) -> None:
        self._holders -= 1
        if not self._holders:
            self.stack.close()


class Base:
    """See :class:`Session`."""

    def __init__(
        self,
        source: str | os.PathLike[str] | Model | Engine = catalog.DEFAULT,
        *,
        n_ctx: int | None = None,
        kv_type: str | None = None,
        n_threads: int | None = None,
        settings: Settings = Settings(),
        memory_budget: int | str | None = None,
        max_parked_bytes: int | str | None = None,
        on_unsupported: str = "refuse",
    ) -> None:
        if on_unsupported not in _ON_UNSUPPORTED:
            raise UsageError(f"on_unsupported is 'refuse' or 'recompute', not {on_unsupported!r}")
        given = {"n_ctx": n_ctx, "kv_type": kv_type, "n_threads": n_threads, "max_parked_bytes": max_parked_bytes}
        changes = {name: value for name, value in given.items() if value is not None}
        limit = None if memory_budget is None else budget.parse_size(memory_budget)
        lease = Lease()
        try:
            engine = _open(source, settings, changes, limit, lease.stack)
            with engine.lock:
                self._begin(recovery.whole(engine, (), functools.partial(_new, engine, on_unsupported)), lease)
        except BaseException:
            lease.stack.close()
            raise

    def _begin(self, transcript: Transcript, lease: Lease) -> None:
        self._lease = lease
        self._closed = False
        self._transcript = transcript
        self._reader = transcript.reader
        self._ledger = transcript.ledger
        self._spans = transcript.spans
        self.sampling: Sampling = GREEDY
        self.memo = ""

    @property
    def engine(self) -> Engine:
        return self._transcript.engine

    @property
    def model(self) -> Model:
        return self.engine.model

    @property
    def lock(self) -> contextlib.AbstractContextManager[object]:
        """The engine's lock; every verb holds it."""
        return self.engine.lock

    def close(self) -> None:
        """Free the cells nobody else holds, and the engine and model once no fork needs them. Closing twice is
        fine."""
        with self.lock:
            nested = recovery.ready(self.engine)
            self.engine.check_idle()
            if not self._closed and not nested:
                recovery.whole(self.engine, (), self._transcript.record.release)
                self._closed = True
                self._lease.give_back()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _be_ready(self) -> None:
        self._check_open()
        nested = recovery.ready(self.engine)
        if broken := self._transcript.record.broken or self.engine.lost:
            raise SessionBroken(broken)
        self.engine.check_idle()
        if not nested:
            self._transcript.record.whole(self._transcript.finish)
            end_open(self._transcript)

    def _look(self) -> None:
        """Before something is told of the session, with the lock held: raises ClosedError; what a verb left that was
        cut short is taken back."""
        self._check_open()
        recovery.ready(self.engine)

    def stop(self) -> bool:
        """End the evaluation of this session that is under way in another thread, inside its batch: the call raises
        Stopped there, and the session is as it was before it; a generation keeps its tokens and is closed.

        Needs no lock. Returns whether there was one; where nothing is under way, nothing is stopped.
        """
        return self.engine.stop(self._transcript.record)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the session was closed; open a new one")
        self.engine.check_open()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._ledger.count(State.VISIBLE)} visible tokens"
        return f"<Session {self.model.path.name}: {state}>"

    @property
    def progress(self) -> Progress | None:
        return self._reader.progress

    @progress.setter
    def progress(self, callback: Progress | None) -> None:
        self._reader.progress = callback


def _new(engine: Engine, on_unsupported: str) -> Transcript:
    transcript = Transcript(engine, restarts=on_unsupported == "recompute")
    transcript.record.begin()
    return transcript


def _open(
    source: Any, settings: Settings, changes: dict[str, Any], limit: int | None, stack: contextlib.ExitStack
) -> Engine:
    if isinstance(source, Engine):
        if changes or settings != Settings() or limit is not None:
            raise UsageError("an engine that is open keeps its settings; give them to Engine(...)")
        return source
    model = source if isinstance(source, Model) else stack.enter_context(Model(source))
    settings = dataclasses.replace(settings, **changes)
    settings.check()
    if limit is not None:
        wanted = {name: changes.get(name) for name in ("n_ctx", "kv_type")}
        settings = budget.fit(model, limit, settings, **wanted).settings
    return stack.enter_context(Engine(model, settings))
