"""Where a token stands in the text. Pure numpy.

An *index* is given to a token when it is read, counts up and is never reused. A *row* is its place in reading order.
The two are the same until text is inserted in the middle: it gets new indexes, and rows between the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .spans import Range, runs

T = TypeVar("T", bound=np.generic)
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]


class Places:
    """The indexes of ``n`` tokens in reading order, and back."""

    def __init__(self) -> None:
        self._n = 0
        self._index_of: Numbers | None = None  # row -> index; None while they are the same
        self._row_of: Numbers = np.empty(0, np.int64)

    def __len__(self) -> int:
        return self._n

    @classmethod
    def of(cls, n: int, index_of: Numbers | None) -> Places:
        """Of ``n`` tokens whose indexes, row by row, are those; None: the same as the rows."""
        places = cls()
        places._n, places._index_of = n, index_of
        if index_of is not None:
            places._row_of = np.empty(n, np.int64)
            places._row_of[index_of] = np.arange(n)
        return places

    @property
    def index_of(self) -> Numbers | None:
        """int64 (n,): the index of each row; None while they are the same."""
        return self._index_of

    def copy(self) -> Places:
        other = Places()
        other._n, other._index_of, other._row_of = self._n, self._index_of, self._row_of  # replaced, never changed
        return other

    def append(self, count: int) -> None:
        """Tokens read at the end."""
        if self._index_of is not None:
            self._insert(self._n, count)
        else:
            self._n += count

    def insert(self, row: int, count: int) -> None:
        """Tokens read into the text, in front of ``row``."""
        if self._index_of is None and row < self._n:
            self._index_of = np.arange(self._n)
        if self._index_of is None:
            self._n += count
        else:
            self._insert(row, count)

    def _insert(self, row: int, count: int) -> None:
        assert self._index_of is not None
        new = np.arange(self._n, self._n + count)
        index_of = np.concatenate([self._index_of[:row], new, self._index_of[row:]])
        row_of = np.empty(len(index_of), np.int64)
        row_of[index_of] = np.arange(len(index_of))
        self._n, self._index_of, self._row_of = len(index_of), index_of, row_of

    def row(self, index: int) -> int:
        """The row of an index; the end of the text for the index the next token will get."""
        return index if self._index_of is None or index == self._n else int(self._row_of[index])

    def rows_of(self, indexes: Numbers) -> Numbers:
        """The row of each index."""
        return indexes if self._index_of is None else self._row_of[indexes]

    def indexes_of(self, rows: Numbers) -> Numbers:
        """The index of each row."""
        return rows if self._index_of is None else self._index_of[rows]

    @staticmethod
    def exactly(ranges: Sequence[Range]) -> Numbers:
        """The indexes of ranges, and nothing that was inserted between them."""
        return np.concatenate([np.arange(a, b) for a, b in ranges]) if ranges else np.empty(0, np.int64)

    def rows(self, ranges: Sequence[Range]) -> Flags:
        """bool (n,): the rows of these indexes, and of what was inserted between two of them that had been
        neighbours: a stretch of text keeps what is put into it."""
        chosen = np.zeros(self._n, np.bool_)
        for start, stop in ranges:
            if self._index_of is None:
                chosen[start:stop] = True
            else:
                self._choose(chosen, start, stop)
        return chosen

    def _choose(self, chosen: Flags, start: int, stop: int) -> None:
        assert self._index_of is not None
        rows = self._row_of[start:stop]
        chosen[rows] = True
        for i in np.flatnonzero(np.diff(rows) > 1):
            between = self._index_of[rows[i] + 1 : rows[i + 1]]
            if between.min() > start + i + 1:
                chosen[rows[i] + 1 : rows[i + 1]] = True

    def ranges(self, chosen: Flags) -> list[Range]:
        """The index ranges of rows, sorted and disjoint."""
        if self._index_of is None:
            return runs(chosen)
        by_index = np.zeros(self._n, np.bool_)
        by_index[self._index_of[chosen]] = True
        return runs(by_index)

    def by_index(self, column: npt.NDArray[T]) -> npt.NDArray[T]:
        """A column of rows, in the order of the indexes."""
        return column if self._index_of is None else column[self._row_of]
