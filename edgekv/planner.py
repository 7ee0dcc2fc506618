"""The planner: edits worked out completely, every refusal included, before anything is touched. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .changes import NO_SHIFT
from .columns import CellRun, Columns, Flags, State, last
from .errors import BadState, MaskUnsupported, PinnedTokens
from .plans import Arrival, Plan
from .rereads import Rereads
from .settings import ASIDE
from .shares import PRIVATE
from .spans import Range, runs
from .steps import Drop, Shift

#: The first tokens of a text draw attention whatever they say (attention sinks, arXiv:2309.17453).
NUM_SINKS = 4


class Planner(Rereads):
    """Plans for one ledger, which stays as it is."""

    # -- edits --------------------------------------------------------------------------------------------------

    def mask(self, rows: Flags, gap: str, *, force: bool = False, suffix_moves: bool = False) -> Plan:
        """Take the visible ones of these rows out of sight, into archive sequences.

        ``gap`` is "close" or "keep"; ``suffix_moves`` closes it by moving what stands behind down. Raises BadState
        when none is visible, PinnedTokens for attention sinks without ``force``, MaskUnsupported when a gap cannot be
        closed or no archive has room.
        """
        chosen = rows & self._ledger.columns.visible
        if not chosen.any():
            raise BadState("nothing to mask: the target's tokens are all masked, parked or evicted already")
        self._check_sinks(chosen, force)
        after = self._ledger.columns.copy()
        after.state[chosen] = State.MASKED
        after.reserved[chosen] = gap == "keep"
        still = int(chosen.argmax()) if suffix_moves else None
        return self.change(after, gap=self._gap_kind(chosen, gap), still=still)

    def evict(self, rows: Flags, gap: str, *, force: bool = False) -> Plan:
        """Give up the K and V of the visible, masked and parked ones of these rows; their ids stay known.

        Raises BadState when none has any, otherwise as :meth:`mask`.
        """
        columns = self._ledger.columns
        chosen = rows & (columns.in_cells | columns.parked)
        if not chosen.any():
            raise BadState("nothing to evict: the target's tokens hold no cells")
        return self._take_out(chosen, State.EVICTED, gap, force=force)

    def park(self, rows: Flags, gap: str, *, force: bool = False) -> Plan:
        """Copy K and V of the visible and masked ones of these rows out of the cache, and free their cells.

        Raises as :meth:`evict`.
        """
        chosen = rows & self._ledger.columns.in_cells
        if not chosen.any():
            raise BadState("nothing to park: the target's tokens hold no cells")
        return self._take_out(chosen, State.PARKED, gap, force=force)

    def _take_out(self, chosen: Flags, to: State, gap: str, *, force: bool) -> Plan:
        seen = chosen & self._ledger.columns.visible
        self._check_sinks(seen, force)
        after = self._ledger.columns.copy()
        after.state[chosen] = to
        after.reserved[chosen] &= gap == "keep"
        after.reserved[seen] = gap == "keep"
        return self.change(after, gap=self._gap_kind(seen, gap))

    def unmask(self, rows: Flags) -> Plan:
        """Bring the masked and parked ones of these rows back to where they belong.

        A text that another one replaced comes back only where nothing else is asked for. Raises BadState when none is
        hidden, MaskUnsupported when that needs a shift and there is none.
        """
        columns = self._ledger.columns
        gone = columns.where(State.EVICTED)
        chosen = rows & (columns.where(State.MASKED) | columns.parked if self._ledger.has_cells else gone)
        if not chosen.any():
            evicted, shown = "it was evicted, its K/V is gone; append its text again", "it is visible already"
            raise BadState(f"nothing to unmask in the target: {evicted if (rows & gone).any() else shown}")
        if (rows & ~columns.replaced).any() and (chosen & ~columns.replaced).any():
            chosen &= ~columns.replaced
        after = columns.copy()
        after.state[chosen] = State.VISIBLE
        after.reserved[chosen], after.replaced[chosen] = False, False
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
        after.state[hidden], after.replaced[hidden] = State.MASKED, True
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

        Tokens whose K and V are gone stay as they are.
        """
        after = self._ledger.columns.copy()
        had = former.in_cells | former.parked
        has = (after.in_cells | after.parked)[rows]
        possible = has | ~had if self._ledger.has_cells else np.ones(len(rows), np.bool_)
        after.state[rows[possible]] = former.state[possible]
        after.reserved[rows[possible]] = former.reserved[possible]
        after.replaced[rows[possible]] = former.replaced[possible]
        self._keep_places(after, rows)
        return self.change(after)

    def _keep_places(self, after: Columns, rows: npt.NDArray[np.int64]) -> None:
        """Where nothing can be shifted, the place of a text that is dropped stays empty unless others come there."""
        now = self._ledger.columns
        places = np.count_nonzero((after.visible | after.reserved)[rows]) - np.count_nonzero(now.reserved[rows])
        dropped = now.visible[rows] & after.where(State.DROPPED)[rows]
        if not self._ledger.can_shift and places < np.count_nonzero(now.visible[rows]):
            after.reserved[rows[dropped]] = True

    def read_back(self, run: Range, rows: npt.NDArray[np.int64], former: Columns) -> Arrival:
        """Evaluate evicted or dropped tokens again, where they stand: all of the run were visible, or all hidden.
        ``former`` says how ``rows``, which include the run, were.

        Where nothing can be shifted they come to the positions they had. Raises MaskUnsupported where others hold
        those, or no known token stands right before them.
        """
        row, stop = run
        now = self._ledger.columns
        after, mine = now.copy(), (rows >= row) & (rows < stop)
        if not self._ledger.can_shift:
            hidden = ~former.visible
            after.reserved[rows[hidden]] = former.reserved[hidden]
        after.reserved[row:stop] = former.reserved[mine]
        after.replaced[row:stop] = former.replaced[mine]
        tokens, seen = self._ledger.ids[row:stop].copy(), now.visible[:row].copy()
        state = State.VISIBLE if former.visible[mine][0] else State.MASKED
        if self._ledger.can_shift:
            return self._arrive(after, row, tokens, seen, opened=False, state=state)
        pos = int(former.pos[mine][np.argmin(rows[mine])])
        lead = self._lead_to(pos, seen)
        return self._arrive(after, row, tokens, seen, opened=False, state=state, lead=lead)

    def _lead_to(self, pos: int, seen: Flags) -> list[int]:
        """The rows to evaluate first, so that the next token comes to ``pos``: llama.cpp takes tokens only right after
        the last position a sequence holds. Hidden cells on the way are made ``seen``, which spares their evaluation;
        they were seen before they were hidden.
        """
        now, lead = self._ledger.columns, list[int]()
        before = last(seen)
        end = int(now.pos[before]) + 1 if before is not None else 0
        place, masked = now.pos[: len(seen)], now.where(State.MASKED)[: len(seen)]
        known = ~now.where(State.DROPPED)[: len(seen)] & ~seen
        for at in range(pos - 1, end - 1, -1):
            here = place == at
            if (here & masked).any():
                seen |= masked & (place >= end) & (place <= at)
                return lead
            row = last(here & known)
            if row is None:
                raise MaskUnsupported(NO_SHIFT)
            lead.insert(0, row)
        return lead

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
        state: State = State.VISIBLE,
        lead: Sequence[int] = (),
    ) -> Arrival:
        """Tokens that are evaluated aside, after those of the rows ``lead``, and come to ``row`` in that ``state``;
        ``seen`` is what they see of the rows before it."""
        stop, now = row + len(tokens), self._ledger.columns
        held = now.cell_runs(np.concatenate([seen, np.zeros(len(now) - row, np.bool_)]))
        close_up, pos = _close_up(held) if alone else ((), max((run.p1 for run in held), default=0))
        begin = pos + len(lead)
        after.state[row:stop] = state
        after.pos[row:stop] = np.arange(begin, begin + len(tokens), dtype=np.int32)
        after.seq[row:stop], after.cell[row:stop] = ASIDE, PRIVATE
        plan = self.change(after, gap=gap)
        if lead:
            plan = replace(plan, steps=(Drop(ASIDE, pos, begin), *plan.steps))
            tokens, seen[list(lead)] = np.concatenate([self._ledger.ids[list(lead)], tokens]), True
        hidden = tuple(runs(np.concatenate([~seen, np.zeros(stop - row, np.bool_), ~after.visible[stop:]])))
        return Arrival(row, tokens, pos, tuple(held), close_up, plan, hidden, opened, alone, len(lead))

    @staticmethod
    def _give_way(after: Columns, row: int, count: int) -> None:
        """Hidden tokens right behind the new ones give their reserved places to them."""
        behind = row + count
        free = behind
        while free < min(len(after), behind + count) and after.reserved[free]:
            free += 1
        after.reserved[behind:free] = False

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


def _close_up(held: Sequence[CellRun]) -> tuple[tuple[Shift, ...], int]:
    """Shifts that bring runs of one sequence together behind the first, and the position behind the last."""
    shifts: list[Shift] = []
    end = held[0].p1 if held else 0
    for run in held[1:]:
        if run.p0 != end:
            shifts.append(Shift(ASIDE, run.p0, run.p1, end - run.p0))
        end += run.p1 - run.p0
    return tuple(shifts), end
