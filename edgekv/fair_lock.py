"""A lock that lets go: whoever waits gets it before the thread that gave it back may take it again."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any


class FairLock:
    """A re-entrant lock, handed over to a thread that waits.

    threading.RLock is not fair: a generation that gives it back after every token takes it again before the thread
    that waits has woken up, and a stop button may be heeded only behind the last token. Here a thread waits in the
    doorway, which the other one must pass before it takes the lock again.

    Ctrl-C may come between any two bytecodes. ``__exit__`` is therefore the RLock's own, put into a slot, and
    ``__enter__`` gives back what it took when it does not return.
    """

    __slots__ = ("__exit__", "_doorway", "_lock")

    if TYPE_CHECKING:

        def __exit__(self, *_: object) -> None: ...

    def __init__(self) -> None:
        self._doorway = threading.Lock()
        self._lock: Any = threading.RLock()  # Any: _is_owned, which threading.Condition uses, has no type
        self.__exit__ = self._lock.__exit__  # type: ignore[method-assign, assignment]

    def __enter__(self) -> bool:
        acquire = self._lock.acquire
        if self._lock._is_owned():
            try:
                return bool(acquire())
            except BaseException:  # it cannot wait, so Ctrl-C came behind it
                self._lock.release()
                raise
        try:
            with self._doorway:
                return bool(acquire())
        except BaseException:  # Ctrl-C while it waited, or behind that
            if self._lock._is_owned():
                self._lock.release()
            raise
