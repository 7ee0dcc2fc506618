"""Changes: the native steps that lead from how the columns are to how they are to be. Pure numpy.

Every plan starts from a copy of the columns in which the tokens have the states they are to have; :meth:`change`
finds the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .columns import NO_BLOB, CellRun, Columns, Flags, State, runs_of
from .errors import MaskUnsupported
from .history import clip
from .layout import return_steps, shift_steps, wanted_positions
from .ledger import Ledger
from .plans import Original, Park, Plan
from .settings import ASIDE
from .shares import PRIVATE
from .spans import Range, runs
from .steps import Drop, Load, Move, Own, Step

NO_SHIFT = (
    "this needs positions to be shifted, which this model cannot do: other tokens have the places by now; rewind to "
    "where those begin and unmask it then, or append the text again"
)


class Changes:
    """Plans for one ledger, which stays as it is."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def change(self, after: Columns, *, gap: str = "", relayout: bool = True, still: int | None = None) -> Plan:
        """The steps that lead to the states and reserved places of ``after``, which is filled in.

        Tokens that become visible come from the sequence and position ``after`` gives for them. The last visible one
        that stays keeps its position, of the rows below ``still`` if that is given.
        """
        now = self._ledger.columns
        edited = tuple(runs(now.state != after.state))
        if not self._ledger.has_cells:
            return self._restart(after, edited, gap)
        after.free_tail()
        parks, parked_originals = self._parks(now.in_cells & after.parked, after)
        loads = self._loads(now.parked & after.in_cells, after)
        after.blob[~after.parked] = NO_BLOB
        chosen = now.in_cells & ~after.in_cells
        originals = tuple(o for o in self._ledger.originals if not chosen[o.row])
        steps: list[Step] = [self._drop(run) for run in now.cell_runs(chosen)]
        steps += [self._drop_original(o) for o in self._ledger.originals if chosen[o.row]]
        arrived = now.visible | now.parked | (after.seq == ASIDE)
        steps += self._archive_steps(arrived & after.where(State.MASKED), after, originals)
        if not relayout:
            return Plan(tuple(steps), after, originals, edited, parked_originals, gap, parks, loads)
        back = tuple(o for o in originals if self._view_is_back(o, after))
        originals = tuple(o for o in originals if o not in back)
        steps += self._lay_out(after, back, still)
        restored = (*parked_originals, *(o.row for o in back))
        return Plan(tuple(steps), after, originals, edited, restored, gap, parks, loads)

    def _restart(self, after: Columns, edited: tuple[Range, ...], gap: str) -> Plan:
        """Where tokens have no cells: the visible ones are read again from the start, the others are gone."""
        after.state[after.where(State.MASKED) | after.parked] = State.EVICTED
        after.reserved[:] = False
        after.pos[after.visible] = np.arange(np.count_nonzero(after.visible), dtype=np.int32)
        after.seq[:], after.cell[:] = self._ledger.live, PRIVATE
        return Plan((), after, (), edited, gap="close" if gap == "keep" else gap)

    def _lay_out(self, after: Columns, back: Sequence[Original], still: int | None) -> list[Step]:
        """Bring the visible tokens to their places; ``back`` are first readings that return."""
        now, live = self._ledger.columns, self._ledger.live
        steps: list[Step] = []
        source = after.copy()  # where the cell of every visible token is now
        arrives = after.visible & ~now.visible
        for o in back:
            steps.append(self._drop(CellRun(int(after.seq[o.row]), int(after.pos[o.row]), int(after.pos[o.row]) + 1)))
            source.pos[o.row], source.seq[o.row], arrives[o.row] = o.pos, o.seq, True
            source.cell[o.row] = after.cell[o.row] = o.cell
        anchors = now.visible & after.visible
        anchors[len(anchors) if still is None else still :] = False
        wanted = wanted_positions(source, anchors, rebase=self._ledger.can_shift)
        moved = after.visible & (wanted != source.pos)
        if moved.any() and not self._ledger.can_shift:
            raise MaskUnsupported(NO_SHIFT)
        if moved.any():
            steps += self._own(moved, source, after)
            steps += shift_steps(live, after.visible & ~arrives, source.pos, wanted)
        if arrives.any():
            steps += return_steps(live, arrives, source, wanted)
        after.pos[after.visible] = wanted[after.visible]
        after.seq[after.visible] = live
        return steps

    def _own(self, moved: Flags, source: Columns, after: Columns) -> list[Step]:
        """Copies of those moved cells that other sessions hold as well."""
        if not self._ledger.shares:
            return []
        shared = moved & self._ledger.shares.elsewhere(source.cell)
        after.cell[shared] = PRIVATE
        return [Own(*run) for run in source.cell_runs(shared)]

    # -- the parts of a change ----------------------------------------------------------------------------------

    def _parks(self, chosen: Flags, after: Columns) -> tuple[tuple[Park, ...], tuple[int, ...]]:
        """Copy chosen tokens' cells; of a token that was read again the first reading, which unmask then brings back.
        Returns the rows of those, too."""
        source, originals = self._ledger.columns.copy(), [o for o in self._ledger.originals if chosen[o.row]]
        for o in originals:
            source.pos[o.row], source.seq[o.row], after.pos[o.row] = o.pos, o.seq, o.pos
        found = [
            Park(CellRun(int(source.seq[i[0]]), int(source.pos[i[0]]), int(source.pos[i[0]]) + len(i)), i)
            for i in runs_of(chosen, source.pos, source.seq)
        ]
        return tuple(found), tuple(o.row for o in originals)

    def _loads(self, chosen: Flags, after: Columns) -> tuple[Load, ...]:
        """Bring chosen parked tokens aside, where none may stand on another: from there the steps take them."""
        loads: list[Load] = []
        for rows in runs_of(chosen, after.pos, after.blob):
            p0 = int(after.pos[rows[0]])
            load = Load(int(after.blob[rows[0]]), p0, p0 + len(rows))
            if any(load.p0 < other.to[1] and other.to[0] < load.p1 for other in loads):
                load = replace(load, delta=max(other.to[1] for other in loads) - p0)
            if load.delta and not self._ledger.can_shift:
                raise MaskUnsupported(NO_SHIFT)
            loads.append(load)
            after.pos[rows], after.seq[rows], after.cell[rows] = after.pos[rows] + load.delta, ASIDE, PRIVATE
        return tuple(loads)

    def _drop(self, run: CellRun, of: Flags | None = None) -> Drop:
        """Take a run of cells, at its place now or, with ``of``, of these rows, out of its sequence."""
        c = self._ledger.columns
        rows = c.cells_at(run) if of is None else of & (c.pos >= run.p0) & (c.pos < run.p1)
        return Drop(*run, kept=int(self._ledger.shares.elsewhere(c.cell[rows]).sum()))

    def _drop_original(self, original: Original) -> Drop:
        kept = self._ledger.shares.elsewhere(np.asarray([original.cell], np.int32))
        return Drop(original.seq, original.pos, original.pos + 1, int(kept[0]))

    def _archive_steps(
        self, chosen: Flags, after: Columns, originals: Sequence[Original], src: int | None = None
    ) -> list[Step]:
        """Move chosen tokens, whose cells are in ``src`` or where ``after`` says, to archives whose ranges are free
        there; sets their seq and pos in ``after``."""
        now = self._ledger.columns
        steps: list[Step] = []
        taken = self._taken_ranges(originals)
        for rows in runs_of(chosen, after.pos, after.seq):
            p0, source = int(after.pos[rows[0]]), int(after.seq[rows[0]]) if src is None else src
            p1 = p0 + len(rows)
            seq, delta = self._find_archive((p0, p1), taken)
            taken[seq].append((p0 + delta, p1 + delta))
            if delta:
                moved = np.zeros(len(now), np.bool_)
                moved[rows] = True
                steps += self._own(moved & now.in_cells, now, after)
            after.seq[rows] = seq
            after.pos[rows] += delta
            steps.append(Move(source, seq, p0, p1, delta))
        return steps

    def _taken_ranges(self, originals: Sequence[Original]) -> dict[int, list[Range]]:
        c = self._ledger.columns
        taken: dict[int, list[Range]] = {seq: [] for seq in self._ledger.archives}
        for run in c.cell_runs(c.where(State.MASKED)):
            taken[run.seq].append((run.p0, run.p1))
        for original in originals:
            taken[original.seq].append((original.pos, original.pos + 1))
        return taken

    def _find_archive(self, wanted: Range, taken: dict[int, list[Range]]) -> tuple[int, int]:
        """(archive, shift) for a run of positions: in place where an archive is free there, else behind its last."""
        for seq, ranges in taken.items():
            if all(wanted[1] <= start or stop <= wanted[0] for start, stop in ranges):
                return seq, 0
        if not self._ledger.can_shift:
            raise MaskUnsupported(
                f"all {len(taken)} archive sequences hold other spans at these positions and this model cannot "
                "shift; evict a masked span, or open the session with more n_archives"
            )
        ends = {seq: max(stop for _, stop in ranges) for seq, ranges in taken.items()}
        seq = min(ends, key=lambda s: ends[s])
        return seq, ends[seq] - wanted[0]

    @staticmethod
    def _view_is_back(original: Original, after: Columns) -> bool:
        if not after.visible[original.row]:
            return False
        return clip(runs(~after.visible), original.row) == original.hidden
