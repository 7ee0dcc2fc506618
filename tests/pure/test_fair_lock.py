"""The engine's lock: fair, re-entrant, and given back whenever Ctrl-C comes."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest

from edgekv.fair_lock import FairLock


def free(lock: FairLock) -> bool:
    """Whether another thread would get it at once."""
    got: list[bool] = []

    def take() -> None:
        got.append(not lock._doorway.locked() and lock._lock.acquire(blocking=False))
        if got[0]:
            lock._lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]


def test_it_is_taken_again_by_the_thread_that_has_it() -> None:
    lock = FairLock()
    with lock, lock:
        assert not free(lock)
    assert free(lock)


def test_whoever_waits_is_next() -> None:
    """The thread that gives it back and takes it again a thousand times comes behind the one that waits."""
    lock, order, waiting = FairLock(), [], threading.Event()

    def wait() -> None:
        waiting.set()
        with lock:
            order.append("waited")

    with lock:
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        while not lock._doorway.locked():
            pass
    for _ in range(1000):
        with lock:
            order.append("again")
    thread.join()
    assert order[0] == "waited"


@pytest.mark.parametrize("at", range(1, 12))
def test_ctrl_c_anywhere_leaves_it_free(at: int) -> None:
    """Raised where Python runs signal handlers: at the start of a function of Python's, and behind one of C's."""
    lock, seen = FairLock(), 0

    def interrupt(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal seen
        if event in ("call", "c_return"):
            seen += 1
            if seen == at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    try:
        sys.setprofile(interrupt)
        with lock, lock:
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    assert free(lock)
