"""Rereads: plans to read tokens a second time, in place. Pure numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .changes import Changes
from .columns import CellRun, Columns, Flags, State, last, runs_of
from .errors import BadState
from .plans import Original, Part, Plan, Recompute, Reread
from .settings import ASIDE
from .shares import PRIVATE
from .spans import runs
from .steps import Move, Own, Step


class Rereads(Changes):
    """See :class:`Planner`."""

    def recompute(self, row: int) -> Recompute:
        """Read the visible tokens from ``row`` on again, behind the visible ones before it.

        Their cells wait aside until the reading is done, so it takes as many free cells as tokens. An isolated span
        that is right as it is is not read.
        """
        return self._recompute(self._ledger.columns.copy(), row)

    def insert_and_recompute(self, row: int, tokens: npt.NDArray[np.int32], hide: Flags | None) -> Recompute:
        """Read new tokens in front of ``row`` and all visible ones behind it, where nothing can be shifted; ``hide``,
        at or behind ``row``, is masked."""
        trial = self._ledger.trial()
        trial.open_rows(row, tokens)
        after = trial.columns.copy()
        after.state[row : row + len(tokens)], after.seq[row : row + len(tokens)] = State.VISIBLE, trial.live
        if hide is not None:
            hidden = np.concatenate([hide[:row], np.zeros(len(tokens), np.bool_), hide[row:]])
            after.state[hidden], after.replaced[hidden] = State.MASKED, True
        return Rereads(trial)._recompute(after, row)

    def back_and_recompute(self, rows: npt.NDArray[np.int64], former: Columns) -> Recompute:
        """As :meth:`back`, where that would need a shift and there is none: all from the first of them is read.

        Tokens that were masked or parked and have no K and V any more stay evicted; those that have are masked, or
        stay parked.
        """
        now = self._ledger.columns
        after = now.copy()
        hidden = former.where(State.MASKED) | former.parked
        after.state[rows], after.reserved[rows], after.replaced[rows] = former.state, False, former.replaced
        after.state[rows[hidden]] = np.where(
            now.in_cells, State.MASKED, np.where(now.parked, State.PARKED, State.EVICTED)
        )[rows[hidden]]
        return self._recompute(after, int(rows.min()))

    def _recompute(self, after: Columns, row: int) -> Recompute:
        """Read what is visible in ``after`` from ``row`` on; ``after`` may show and drop tokens there, too."""
        ledger = self._ledger
        now, chosen, held = ledger.columns, after.visible, ledger.columns.visible
        chosen[:row], held[:row] = False, False
        before = last(after.visible[:row])
        pos = int(after.pos[before]) + 1 if before is not None else int(now.pos[held.argmax()]) if held.any() else 0
        wanted = after.pos.copy()
        wanted[chosen] = np.arange(pos, pos + np.count_nonzero(chosen), dtype=np.int32)
        right = chosen & held & ~ledger.inexact() & (wanted == now.pos)
        keep = ledger.history.still_alone(right, row)
        parts = tuple(self._part(i, wanted, held, keep) for i in runs_of(chosen, wanted, keep))
        read, gone = chosen & ~keep, now.in_cells & ~keep
        gone[:row] = False
        gone &= held | read
        hide = held & after.where(State.MASKED)
        gone &= ~hide
        kept = tuple(o for o in ledger.originals if not gone[o.row])
        aside = held & gone
        steps: list[Step] = [self._drop(CellRun(ASIDE, p0, p1), aside) for _, p0, p1 in now.cell_runs(aside)]
        steps += [self._drop(run) for run in now.cell_runs(gone & ~held)]
        steps += [self._drop_original(o) for o in ledger.originals if gone[o.row]]
        steps += self._archive_steps(hide, after, kept, ASIDE)
        after.pos[chosen], after.cell[read], after.seq[read] = wanted[chosen], PRIVATE, ledger.live
        after.reserved[before or 0 :] = False
        plan = Plan(tuple(steps), after, kept, tuple(runs(chosen)))
        leaving = tuple(Move(ASIDE, ledger.live, p0, p1) for _, p0, p1 in now.cell_runs(held & ~chosen))
        return Recompute(parts, leaving, plan, tuple(runs(read)))

    def _part(self, rows: npt.NDArray[np.intp], wanted: npt.NDArray[np.int32], held: Flags, keep: Flags) -> Part:
        mine = np.zeros(len(held), np.bool_)
        mine[rows] = True
        runs_held = self._ledger.columns.cell_runs(mine & held)
        back = tuple(Move(ASIDE, self._ledger.live, p0, p1) for _, p0, p1 in runs_held)
        return Part(self._ledger.ids[rows].copy(), int(wanted[rows[0]]), back, bool(keep[rows[0]]))

    def reread(self, *, keep_original: bool) -> Reread:
        """Read the last visible token again, as it was computed while something else was visible.

        llama.cpp takes a token only at the position right behind the last one its sequence holds. So where a kept
        gap lies in front of this token, the gap cannot stay: the token is read at the gap's first position. As
        every visible token behind the masked span is then computed without it, this equals a tail mask, which
        equals a restart.

        The first reading goes to an archive when ``keep_original`` (it costs a cell): unmask brings it back.
        """
        ledger = self._ledger
        after = ledger.columns.copy()
        row = after.last_visible
        if row is None:
            raise BadState("no token is visible")
        old = int(after.pos[row])
        before = last(after.visible[:row])
        new = old if before is None else int(after.pos[before]) + 1
        if new != old:
            after.reserved[before:row] = False
        cell = int(after.cell[row])
        after.pos[row], after.cell[row] = new, PRIVATE
        if not keep_original or ledger.has_original(row):
            drop = self._drop(CellRun(ledger.live, old, old + 1))
            return Reread(Plan((drop,), after, ledger.originals), row, new, ())
        seq, delta = self._find_archive((old, old + 1), self._taken_ranges(ledger.originals))
        move = Move(ledger.live, seq, old, old + 1, delta)
        own: tuple[Step, ...] = ()
        if delta and ledger.shares.elsewhere(ledger.columns.cell[row : row + 1]).any():
            own, cell = (Own(ledger.live, old, old + 1),), PRIVATE
        original = Original(row, seq, old + delta, ledger.history.view_of(row), cell)
        return Reread(Plan((*own, move), after, (*ledger.originals, original)), row, new, (move.reverse,))
