"""Cell map: which tokens have cells, in the order of the text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .session import Session
from .spans import Span


@dataclass(frozen=True)
class CellMap:
    """index: int64 (n,), the token index of each cell in use, in the order of the text; visible: bool (n,). cells: of
    the whole cache; other sessions of the engine hold ``others`` of them."""

    index: npt.NDArray[np.int64]
    visible: npt.NDArray[np.bool_]
    cells: int
    others: int

    def spans(self, spans: tuple[Span, ...]) -> npt.NDArray[np.int64]:
        """int64 (n,): the number of the innermost of these spans that each cell belongs to, -1 for none."""
        found = np.full(len(self.index), -1)
        for number in sorted(range(len(spans)), key=lambda k: -len(spans[k])):
            here = (self.index >= spans[number].start) & (self.index < spans[number].stop)
            found[here] = number
        return found


def cell_map(session: Session) -> CellMap:
    """Which tokens of a session have cells."""
    with session.lock:
        ledger, engine = session._transcript.ledger, session.engine
        rows = np.flatnonzero(ledger.columns.in_cells)
        index, visible = ledger.places.indexes_of(rows), ledger.columns.visible[rows]
        return CellMap(index, visible, engine.num_cells, max(0, engine.cells_used - ledger.num_cells))
