"""Cells that several sessions hold: how many hold each of them. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

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
        holders = np.concatenate([self._holders, np.ones(count, np.int32)])
        holders[shared] += 1
        self._holders = holders
        return shared

    def release(self, ids: Ids) -> None:
        """One session no longer holds these; private ones are passed over."""
        holders = self._holders.copy()  # an edit that is cut short goes back to the old ones
        holders[ids[ids != PRIVATE]] -= 1
        self._holders = holders

    def count(self, held: Sequence[Ids]) -> int:
        """Count the holders again, one an array; returns how many cells those are together."""
        shared = [ids[ids != PRIVATE] for ids in held]
        self._holders = np.zeros_like(self._holders)
        for ids in shared:
            np.add.at(self._holders, ids, 1)
        return sum(len(ids) for ids in held) - sum(map(len, shared)) + int(np.count_nonzero(self._holders))

    def elsewhere(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """bool (n,): the cells that another session than the asking one holds too."""
        if not len(self._holders):
            return np.zeros(len(ids), np.bool_)
        return np.asarray((ids != PRIVATE) & (self._holders[ids] > 1))
