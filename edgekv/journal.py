"""The journal: what a session's edits did, and what it takes to undo them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .columns import Columns
from .ledger import Ledger
from .receipts import Receipt
from .spans import Range, Span

_LENGTH: Final = 1000  # edits kept


@dataclass(frozen=True)
class Former:
    """How the tokens of an edit were before it: a row of ``columns`` for each index, and the spans there were."""

    indexes: npt.NDArray[np.int64]
    columns: Columns
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, ledger: Ledger, rows: npt.NDArray[np.bool_], spans: tuple[Span, ...]) -> Former:
        chosen = np.flatnonzero(rows)
        return cls(ledger.places.indexes_of(chosen), ledger.columns.take(chosen), spans)

    @classmethod
    def none(cls, indexes: Range, spans: tuple[Span, ...]) -> Former:
        """Of tokens that were not there."""
        count = indexes[1] - indexes[0]
        return cls(np.arange(*indexes), Columns.dropped(count), spans)

    def and_(self, other: Former) -> Former:
        both = np.concatenate([self.indexes, other.indexes])
        return Former(both, self.columns.with_rows(len(self.columns), other.columns), self.spans)

    def rows(self, ledger: Ledger) -> npt.NDArray[np.int64]:
        """Where those tokens stand now."""
        return ledger.places.rows_of(self.indexes)


class Journal:
    """Receipts in order, and how to undo the edits among them, the newest first."""

    def __init__(self, receipts: Iterable[Receipt] = (), edits: Iterable[tuple[Receipt, Former]] = ()) -> None:
        self._receipts = tuple(receipts)[-_LENGTH:]
        self._undo = tuple(edits)[-_LENGTH:]

    def copy(self) -> Journal:
        return Journal(self._receipts, self._undo)

    @property
    def edits(self) -> tuple[tuple[Receipt, Former], ...]:
        """Those that can be undone, the oldest first."""
        return self._undo

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        return self._receipts

    def kept(self) -> tuple[tuple[Receipt, ...], tuple[tuple[Receipt, Former], ...]]:
        """What it is now."""
        return self._receipts, self._undo

    def restore_kept(self, before: tuple[tuple[Receipt, ...], tuple[tuple[Receipt, Former], ...]]) -> None:
        self._receipts, self._undo = before

    def add(self, receipt: Receipt, former: Former | None = None) -> Receipt:
        """Note an edit; one without ``former`` cannot be undone, and is passed over."""
        self._receipts = (*self._receipts, receipt)[-_LENGTH:]
        if former is not None:
            self._undo = (*self._undo, (receipt, former))[-_LENGTH:]
        return receipt

    def merge(self, number: int, receipt: Receipt) -> Receipt:
        """The newest ``number`` receipts become one, to be undone at once."""
        parts, undo = self._receipts[-number:], self._undo
        formers: list[Former] = []
        for part in reversed(parts):
            if undo and undo[-1][0] is part:
                formers.append(undo[-1][1])
                undo = undo[:-1]
        if formers:
            undo = (*undo, (receipt, functools.reduce(Former.and_, reversed(formers))))
        self._receipts, self._undo = (*self._receipts[:-number], receipt), undo
        return receipt

    def forget(self, number: int) -> None:
        """The newest receipts are of edits that came to nothing."""
        self._receipts = self._receipts[: len(self._receipts) - number]

    def newest(self) -> tuple[Receipt, Former] | None:
        return self._undo[-1] if self._undo else None

    def pass_over(self) -> None:
        """The newest edit cannot be undone: the one before it is the next to be."""
        self._undo = self._undo[:-1]

    def undone(self, receipt: Receipt) -> Receipt:
        """The newest edit was undone, says ``receipt``."""
        self._receipts, self._undo = (*self._receipts, receipt)[-_LENGTH:], self._undo[:-1]
        return receipt
