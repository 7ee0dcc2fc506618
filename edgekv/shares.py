"""Cells that several sessions hold: how many hold each of them. Pure numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

#: The id of a cell that only one session has ever held.
PRIVATE = -1


class Shares:
    """Reference counts of shared cells. An id is given to a cell when it is first shared, and never again."""

    def __init__(self) -> None:
        self._holders = np.empty(0, np.int32)

    def __bool__(self) -> bool:
        """Whether any cell was ever shared."""
        return len(self._holders) > 0

    def share(self, ids: Ids) -> Ids:
        """One more session holds these cells; those that were private get an id. Returns the ids, int32 (n,)."""
        shared = ids.copy()
        fresh = shared == PRIVATE
        first, count = len(self._holders), int(fresh.sum())
        shared[fresh] = np.arange(first, first + count, dtype=np.int32)
        self._holders = np.concatenate([self._holders, np.ones(count, np.int32)])
        self._holders[shared] += 1
        return shared

    def release(self, ids: Ids) -> None:
        """One session no longer holds these; private ones are passed over."""
        self._holders[ids[ids != PRIVATE]] -= 1

    def elsewhere(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """bool (n,): the cells that another session than the asking one holds too."""
        if not len(self._holders):
            return np.zeros(len(ids), np.bool_)
        return np.asarray((ids != PRIVATE) & (self._holders[ids] > 1))
