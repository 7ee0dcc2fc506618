"""Cell map: which tokens lie in which cells of the cache, in the order of the cells."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import AuditFailed
from .session import Session
from .spans import Span


@dataclass(frozen=True)
class CellMap:
    """index: int64 (n,), the token index of each cell in use, in the order of the cells as far as llama.cpp tells it;
    visible: bool (n,). cells: of the whole cache; other sessions of the engine hold ``others`` of them."""

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
    """Where the tokens of a session lie. Cost: one token may be decoded aside, to let a shift be carried out."""
    with session.lock:
        ledger, engine = session._transcript.ledger, session.engine
        runs = ledger.cell_runs()
        with contextlib.suppress(AuditFailed):
            runs = engine.in_order((ledger.live, *ledger.archives))
        columns = ledger.columns
        rows = {
            (int(seq), int(pos)): row
            for row, (seq, pos, here) in enumerate(zip(columns.seq, columns.pos, columns.in_cells, strict=True))
            if here
        }
        found = [rows[key] for run in runs for pos in range(run.p0, run.p1) if (key := (run.seq, pos)) in rows]
        at = np.asarray(found, np.int64)
        index, visible = ledger.places.indexes_of(at), columns.visible[at]
        return CellMap(index, visible, engine.num_cells, max(0, engine.cells_used - ledger.num_cells))
