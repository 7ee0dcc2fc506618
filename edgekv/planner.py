"""The planner: edits worked out completely, as data, from what the ledger says. Pure numpy.

Every plan starts from a copy of the columns in which the tokens have the states they are to have; :meth:`change`
finds the native steps that lead there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .columns import CellRun, Columns, Flags, State, last, runs_of
from .errors import BadState, MaskUnsupported, PinnedTokens
from .history import clip
from .layout import return_steps, shift_steps, wanted_positions
from .ledger import Ledger
from .plans import Arrival, Original, Part, Plan, Recompute, Reread
from .settings import ASIDE
from .shares import PRIVATE
from .spans import Range, runs
from .steps import Drop, Move, Own, Shift, Step

#: The first tokens of a text draw attention whatever they say (attention sinks, arXiv:2309.17453).
NUM_SINKS = 4

_NO_SHIFT = (
    "this needs positions to be shifted, which this model cannot do: the places were taken by tokens read since; "
    "rewind those first, or append the text again"
)


class Planner:
    """Plans for one ledger, which stays as it is."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    # -- edits --------------------------------------------------------------------------------------------------

    def mask(self, ranges: Sequence[Range], gap: str, *, force: bool = False) -> Plan:
        """Take the visible tokens of these ranges out of sight, into archive sequences.

        ``gap`` is "close" or "keep". Raises BadState when none is visible, PinnedTokens for attention sinks
        without ``force``, MaskUnsupported when a gap cannot be closed or no archive has room.
        """
        chosen = self._ledger.select(ranges) & self._ledger.columns.visible
        if not chosen.any():
            raise BadState("nothing to mask: the target's tokens are all masked or evicted already")
        self._check_sinks(chosen, force)
        after = self._ledger.columns.copy()
        after.state[chosen] = State.MASKED
        after.reserved[chosen] = gap == "keep"
        return self.change(after, gap=self._gap_kind(chosen, gap))

    def evict(self, ranges: Sequence[Range], gap: str, *, force: bool = False) -> Plan:
        """Free the cells of the visible and masked tokens of these ranges; their ids stay known.

        Raises BadState when none has a cell, otherwise as :meth:`mask`.
        """
        chosen = self._ledger.select(ranges) & self._ledger.columns.in_cells
        if not chosen.any():
            raise BadState("nothing to evict: the target's tokens hold no cells")
        seen = chosen & self._ledger.columns.visible
        self._check_sinks(seen, force)
        after = self._ledger.columns.copy()
        after.state[chosen] = State.EVICTED
        after.reserved[chosen] &= gap == "keep"
        after.reserved[seen] = gap == "keep"
        return self.change(after, gap=self._gap_kind(seen, gap))

    def unmask(self, ranges: Sequence[Range]) -> Plan:
        """Bring the masked tokens of these ranges back to where they belong.

        Raises BadState when none is masked, MaskUnsupported when that needs a shift and there is none.
        """
        wanted, columns = self._ledger.select(ranges), self._ledger.columns
        gone = columns.where(State.EVICTED)
        chosen = wanted & (columns.where(State.MASKED) if self._ledger.has_cells else gone)
        if not chosen.any():
            evicted = "it was evicted, its K/V is gone; append its text again"
            why = evicted if (wanted & gone).any() else "it is visible already"
            raise BadState(f"nothing to unmask in the target: {why}")
        after = columns.copy()
        after.state[chosen] = State.VISIBLE
        after.reserved[chosen] = False
        return self.change(after)

    def rewind(self, row: int) -> Plan:
        """Drop every token from ``row`` on, hidden ones too."""
        after = self._ledger.columns.copy()
        chosen = ~after.where(State.DROPPED)
        chosen[:row] = False
        after.state[chosen] = State.DROPPED
        after.reserved[chosen] = False
        return self.change(after, gap="tail", relayout=False)

    def close(self) -> Plan | None:
        """Close every kept gap, where positions can be shifted; None when there is nothing to close."""
        if not self._ledger.can_shift or self._ledger.first_gap is None:
            return None
        after = self._ledger.columns.copy()
        after.reserved[:] = False
        return self.change(after)

    def change(self, after: Columns, *, gap: str = "", relayout: bool = True) -> Plan:
        """The steps that lead to the states and reserved places of ``after``, which is filled in.

        Tokens that become visible come from the sequence and position ``after`` gives for them.
        """
        now = self._ledger.columns
        edited = tuple(runs(now.state != after.state))
        if not self._ledger.has_cells:
            return self._restart(after, edited, gap)
        after.free_tail()
        chosen = now.in_cells & ~after.in_cells
        originals = tuple(o for o in self._ledger.originals if not chosen[o.row])
        steps: list[Step] = [self._drop(run) for run in now.cell_runs(chosen)]
        steps += [self._drop_original(o) for o in self._ledger.originals if chosen[o.row]]
        steps += self._archive_steps(now.visible & after.where(State.MASKED), after, originals)
        if not relayout:
            return Plan(tuple(steps), after, originals, edited, gap=gap)
        back = tuple(o for o in originals if self._view_is_back(o, after))
        originals = tuple(o for o in originals if o not in back)
        steps += self._lay_out(after, back)
        return Plan(tuple(steps), after, originals, edited, tuple(o.row for o in back), gap)

    def _restart(self, after: Columns, edited: tuple[Range, ...], gap: str) -> Plan:
        """Where tokens have no cells: the visible ones are read again from the start, the others are gone."""
        after.state[after.where(State.MASKED)] = State.EVICTED
        after.reserved[:] = False
        after.pos[after.visible] = np.arange(np.count_nonzero(after.visible), dtype=np.int32)
        after.seq[:], after.cell[:] = self._ledger.live, PRIVATE
        return Plan((), after, (), edited, gap="close" if gap == "keep" else gap)

    def _lay_out(self, after: Columns, back: Sequence[Original]) -> list[Step]:
        """Bring the visible tokens to their places; ``back`` are first readings that return."""
        now, live = self._ledger.columns, self._ledger.live
        steps: list[Step] = []
        source = after.copy()  # where the cell of every visible token is now
        arrives = after.visible & ~now.visible
        for o in back:
            steps.append(self._drop(CellRun(int(after.seq[o.row]), int(after.pos[o.row]), int(after.pos[o.row]) + 1)))
            source.pos[o.row], source.seq[o.row], arrives[o.row] = o.pos, o.seq, True
            source.cell[o.row] = after.cell[o.row] = o.cell
        rebase = self._ledger.can_shift
        wanted = wanted_positions(source, now.visible & after.visible, rebase=rebase)
        moved = after.visible & (wanted != source.pos)
        if moved.any() and not self._ledger.can_shift:
            raise MaskUnsupported(_NO_SHIFT)
        steps += self._own(moved, source, after)
        steps += shift_steps(live, after.visible & ~arrives, source.pos, wanted)
        steps += return_steps(live, arrives, source, wanted)
        after.pos[after.visible] = wanted[after.visible]
        after.seq[after.visible] = live
        return steps

    def _own(self, moved: Flags, source: Columns, after: Columns) -> list[Step]:
        """Copies of those moved cells that other sessions hold as well."""
        shared = moved & self._ledger.shares.elsewhere(source.cell)
        after.cell[shared] = PRIVATE
        return [Own(*run) for run in source.cell_runs(shared)]

    # -- text for the middle ------------------------------------------------------------------------------------

    def insert(self, row: int, tokens: npt.NDArray[np.int32], hide: Flags | None = None) -> Arrival:
        """Read new tokens into the text in front of ``row``, the suffix not again; ``hide`` is masked with them.

        Places that stand empty right behind take them in first. Raises MaskUnsupported where the suffix would have
        to move and cannot.
        """
        trial = self._ledger.trial()
        seen = trial.columns.visible.copy()
        seen[row:] = False
        trial.open_rows(row, tokens)
        hidden = np.zeros(len(trial), np.bool_)
        if hide is not None:
            seen &= ~hide[: len(seen)]
            hidden[:row], hidden[row + len(tokens) :] = hide[:row], hide[row:]
        after = trial.columns.copy()
        after.state[hidden] = State.MASKED
        after.reserved[hidden] = not trial.can_shift
        self._give_way(after, row, len(tokens))
        gap = "" if hide is None else "close" if trial.can_shift else "keep"
        return Planner(trial)._arrive(after, row, tokens, seen[:row], opened=True, gap=gap)

    def append_alone(self, tokens: npt.NDArray[np.int32], attend: Flags) -> Arrival:
        """Read new tokens at the end that see ``attend`` only, which is visible."""
        trial = self._ledger.trial()
        row = len(trial)
        trial.open_rows(row, tokens)
        return Planner(trial)._arrive(trial.columns.copy(), row, tokens, attend, opened=True, alone=True)

    def back(self, rows: npt.NDArray[np.intp], former: Columns) -> Plan:
        """Give rows the states and reserved places they had, where that needs no reading.

        Tokens whose cells are gone stay as they are.
        """
        after = self._ledger.columns.copy()
        had_cells = former.in_cells
        possible = after.in_cells[rows] | ~had_cells if self._ledger.has_cells else np.ones(len(rows), np.bool_)
        after.state[rows[possible]] = former.state[possible]
        after.reserved[rows[possible]] = former.reserved[possible]
        self._keep_places(after, rows)
        return self.change(after)

    def _keep_places(self, after: Columns, rows: npt.NDArray[np.int64]) -> None:
        """Where nothing can be shifted, the place of a text that is dropped stays empty unless others come there."""
        now = self._ledger.columns
        places = np.count_nonzero((after.visible | after.reserved)[rows]) - np.count_nonzero(now.reserved[rows])
        dropped = now.visible[rows] & after.where(State.DROPPED)[rows]
        if not self._ledger.can_shift and places < np.count_nonzero(now.visible[rows]):
            after.reserved[rows[dropped]] = True

    def read_back(self, rows: Range) -> Arrival:
        """Read evicted or dropped tokens again, where they stand."""
        row, stop = rows
        seen = self._ledger.columns.visible[:row].copy()
        after = self._ledger.columns.copy()
        after.reserved[row:stop] = False
        return self._arrive(after, row, self._ledger.ids[row:stop].copy(), seen, opened=False)

    def _arrive(
        self,
        after: Columns,
        row: int,
        tokens: npt.NDArray[np.int32],
        seen: Flags,
        *,
        opened: bool,
        alone: bool = False,
        gap: str = "",
    ) -> Arrival:
        """Tokens that are read aside and come to ``row``; ``seen`` is what they see of the rows before it."""
        stop, now = row + len(tokens), self._ledger.columns
        held = now.cell_runs(np.concatenate([seen, np.zeros(len(now) - row, np.bool_)]))
        close_up, pos = _close_up(held) if alone else ((), held[-1].p1 if held else 0)
        after.state[row:stop] = State.VISIBLE
        after.pos[row:stop] = np.arange(pos, pos + len(tokens), dtype=np.int32)
        after.seq[row:stop], after.cell[row:stop] = ASIDE, PRIVATE
        plan = self.change(after, gap=gap)
        hidden = tuple(runs(np.concatenate([~seen, np.zeros(len(tokens), np.bool_), ~after.visible[stop:]])))
        return Arrival(row, tokens, pos, tuple(held), close_up, plan, hidden, opened, alone)

    @staticmethod
    def _give_way(after: Columns, row: int, count: int) -> None:
        """Hidden tokens right behind the new ones give their reserved places to them."""
        behind = row + count
        free = behind
        while free < min(len(after), behind + count) and after.reserved[free]:
            free += 1
        after.reserved[behind:free] = False

    # -- reading again ------------------------------------------------------------------------------------------

    def recompute(self, row: int) -> Recompute:
        """Read the visible tokens from ``row`` on again, behind the visible ones before it.

        Their cells wait aside until the reading is done, so it takes as many free cells as tokens. An isolated span
        that is right as it is is not read.
        """
        return self._recompute(self._ledger.columns.copy(), row)

    def insert_and_recompute(self, row: int, tokens: npt.NDArray[np.int32]) -> Recompute:
        """Read new tokens in front of ``row`` and all visible ones behind it, where nothing can be shifted."""
        trial = self._ledger.trial()
        trial.open_rows(row, tokens)
        after = trial.columns.copy()
        after.state[row : row + len(tokens)], after.seq[row : row + len(tokens)] = State.VISIBLE, trial.live
        return Planner(trial)._recompute(after, row)

    def back_and_recompute(self, rows: npt.NDArray[np.int64], former: Columns) -> Recompute:
        """As :meth:`back`, where that would need a shift and there is none: all from the first of them is read."""
        after = self._ledger.columns.copy()
        after.state[rows], after.reserved[rows] = former.state, False
        hiding = self._ledger.columns.visible & after.where(State.MASKED)
        if hiding.any():
            raise MaskUnsupported(_NO_SHIFT)
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
        dropped = [self._drop(CellRun(ASIDE, p0, p1), held & ~keep) for _, p0, p1 in now.cell_runs(held & ~keep)]
        dropped += [self._drop(run) for run in now.cell_runs(gone & ~held)]
        dropped += [self._drop_original(o) for o in ledger.originals if gone[o.row]]
        kept = tuple(o for o in ledger.originals if not gone[o.row])
        after.pos[chosen], after.cell[read], after.seq[read] = wanted[chosen], PRIVATE, ledger.live
        after.reserved[before or 0 :] = False
        plan = Plan(tuple(dropped), after, kept, tuple(runs(chosen)))
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

    # -- the parts of an edit -----------------------------------------------------------------------------------

    def _check_sinks(self, chosen: Flags, force: bool) -> None:
        if chosen[self.sinks].any() and not force:
            raise PinnedTokens(
                f"the target holds one of the first {NUM_SINKS} tokens, which are attention sinks: without them "
                "most models stop making sense; pass force=True to do it all the same"
            )

    @property
    def sinks(self) -> npt.NDArray[np.intp]:
        """The rows of the first tokens of the text."""
        return np.flatnonzero(~self._ledger.columns.where(State.DROPPED))[:NUM_SINKS]

    def _gap_kind(self, chosen: Flags, gap: str) -> str:
        """'tail' when nothing visible stands behind the first chosen token, else the gap asked for."""
        if not chosen.any():
            return ""
        first = int(chosen.argmax())
        return gap if (self._ledger.columns.visible & ~chosen)[first:].any() else "tail"

    def _drop(self, run: CellRun, of: Flags | None = None) -> Drop:
        """Take a run of cells, at its place now or, with ``of``, of these rows, out of its sequence."""
        c = self._ledger.columns
        rows = (c.in_cells & (c.seq == run.seq)) if of is None else of
        rows = rows & (c.pos >= run.p0) & (c.pos < run.p1)
        return Drop(*run, kept=int(self._ledger.shares.elsewhere(c.cell[rows]).sum()))

    def _drop_original(self, original: Original) -> Drop:
        kept = self._ledger.shares.elsewhere(np.asarray([original.cell], np.int32))
        return Drop(original.seq, original.pos, original.pos + 1, int(kept[0]))

    def _archive_steps(self, chosen: Flags, after: Columns, originals: Sequence[Original]) -> list[Step]:
        """Move chosen visible tokens to archives whose ranges are free there; sets their seq and pos in ``after``."""
        now = self._ledger.columns
        steps: list[Step] = []
        taken = self._taken_ranges(originals)
        for rows in runs_of(chosen, now.pos):
            p0 = int(now.pos[rows[0]])
            p1 = p0 + len(rows)
            seq, delta = self._find_archive((p0, p1), taken)
            taken[seq].append((p0 + delta, p1 + delta))
            if delta:
                moved = np.zeros(len(now), np.bool_)
                moved[rows] = True
                steps += self._own(moved, now, after)
            after.seq[rows] = seq
            after.pos[rows] += delta
            steps.append(Move(self._ledger.live, seq, p0, p1, delta))
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


def _close_up(held: Sequence[CellRun]) -> tuple[tuple[Shift, ...], int]:
    """Shifts that bring runs of one sequence together behind the first, and the position behind the last."""
    shifts: list[Shift] = []
    end = held[0].p1 if held else 0
    for run in held[1:]:
        if run.p0 != end:
            shifts.append(Shift(ASIDE, run.p0, run.p1, end - run.p0))
        end += run.p1 - run.p0
    return tuple(shifts), end
