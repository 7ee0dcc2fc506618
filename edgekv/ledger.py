"""The ledger: every token with its id, index, position and state; plans edits as data. No llama.cpp in here.

The only owner of "where are we". An edit is planned completely (every refusal, every native step) before the first
native call; the session has the engine carry the steps out and then commits the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .columns import Columns, Flags, State, last, runs_of
from .errors import BadState, ContextFull, MaskUnsupported, PinnedTokens, UnknownSpan, UsageError
from .history import History, View, clip
from .layout import return_steps, shift_steps, wanted_positions
from .plans import Original, Plan, Recompute, Reread
from .settings import SCRATCH
from .spans import Range, runs
from .steps import Drop, Move, Shift, Step

#: The first tokens of a text draw attention whatever they say (attention sinks, arXiv:2309.17453).
NUM_SINKS = 4

_NO_SHIFT = (
    "this needs positions to be shifted, which this model cannot do: the places were taken by tokens read since; "
    "rewind those first, or append the text again"
)


class Ledger:
    """The tokens of one session.

    ``live`` is the sequence the model sees, ``archives`` those where masked cells wait, ``can_shift`` whether
    positions may be moved at all.
    """

    def __init__(self, live: int, archives: Sequence[int], *, can_shift: bool) -> None:
        self.live = live
        self.archives = tuple(archives)
        self.can_shift = can_shift
        self.history = History()
        self._n = 0
        self._tokens = np.empty(256, np.int32)
        self._columns = Columns.empty(256)
        self._originals: tuple[Original, ...] = ()
        # Both follow from the columns; kept because every generated token asks for them.
        self._last_visible: int | None = None
        self._view: View = ()
        self._first_gap: int | None = None

    # -- reading ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._n

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """int32 (n,): the ids in index order, hidden and dropped ones included."""
        return self._tokens[: self._n]

    @property
    def columns(self) -> Columns:
        """Views of the rows in use; for reading."""
        return self._columns.first(self._n)

    @property
    def blank(self) -> bool:
        """Whether no token belongs to the transcript: none was read, or all were dropped."""
        return self.count(State.DROPPED) == self._n

    @property
    def visible_tokens(self) -> npt.NDArray[np.int32]:
        return self.tokens[self.columns.visible]

    @property
    def last_visible(self) -> int | None:
        """The index of the last visible token."""
        return self._last_visible

    @property
    def cursor(self) -> int:
        """The position the next token is read at."""
        end = self.last_visible
        return 0 if end is None else int(self._columns.pos[end]) + 1

    @property
    def view(self) -> View:
        """What a token read now could not see."""
        return self._view

    @property
    def first_gap(self) -> int | None:
        """The first index whose place is kept empty, None for none."""
        return self._first_gap

    def count(self, state: State) -> int:
        return int(np.count_nonzero(self.columns.where(state)))

    @property
    def num_cells(self) -> int:
        """Cells that hold this session's tokens: visible, masked, and originals of tokens read again."""
        return int(np.count_nonzero(self.columns.in_cells)) + len(self._originals)

    def has_original(self, index: int) -> bool:
        """Whether the first reading of this token waits in an archive."""
        return any(o.index == index for o in self._originals)

    def expected_positions(self) -> dict[int, npt.NDArray[np.int32]]:
        """Sequence id -> sorted int32 positions that llama.cpp should hold for this session."""
        c = self.columns
        held = {seq: c.pos[c.in_cells & (c.seq == seq)].tolist() for seq in (self.live, *self.archives)}
        for original in self._originals:
            held[original.seq].append(original.pos)
        return {seq: np.sort(np.asarray(pos, np.int32)) for seq, pos in held.items()}

    def select(self, ranges: Sequence[Range]) -> Flags:
        """bool (n,): the tokens of these ranges that still belong to the transcript.

        Raises UsageError for an empty target, UnknownSpan when it lies beyond the transcript or was dropped.
        """
        if not any(start < stop for start, stop in ranges):
            raise UsageError("the target holds no token")
        chosen = np.zeros(self._n, np.bool_)
        for start, stop in ranges:
            if stop > self._n:
                raise UnknownSpan(f"[{start}, {stop}) goes beyond the transcript, which has {self._n} tokens")
            chosen[start:stop] = True
        chosen &= ~self.columns.where(State.DROPPED)
        if not chosen.any():
            raise UnknownSpan("the target was dropped by a rewind")
        return chosen

    def influenced_by(self, ranges: Sequence[Range]) -> list[Range]:
        """The visible tokens outside ``ranges`` computed while those were visible, directly or through others."""
        return runs(self.history.influenced(ranges, self._n) & self.columns.visible)

    # -- growing ------------------------------------------------------------------------------------------------

    def check_room(self, num_tokens: int, num_free: int) -> None:
        """Raise ContextFull, with what to do, unless ``num_tokens`` more fit into ``num_free`` cells."""
        if num_tokens <= num_free:
            return
        masked = self.count(State.MASKED)
        choices = [f"evict masked spans ({masked:,} masked tokens still hold their cells)"] if masked else []
        choices += ["evict or rewind something", "open the session with a larger n_ctx"]
        raise ContextFull(f"{num_tokens:,} cells are needed and {num_free:,} are free; {', or '.join(choices)}")

    def append(self, tokens: npt.NDArray[np.int32], pos: int) -> Range:
        """Record tokens that now stand in the live sequence from position ``pos`` on; returns their indexes."""
        start, stop = self._n, self._n + len(tokens)
        self.history.computed(start, stop, self.view, self.first_gap)
        if stop > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(stop, np.int32)])
            self._columns = self._columns.grown(len(self._tokens))
        c = self._columns
        self._tokens[start:stop] = tokens
        c.pos[start:stop] = np.arange(pos, pos + len(tokens), dtype=np.int32)
        c.state[start:stop], c.seq[start:stop], c.reserved[start:stop] = State.VISIBLE, self.live, False
        self._n = stop
        if len(tokens):
            self._last_visible = stop - 1
        return (start, stop)

    def append_one(self, token: int, pos: int) -> int:
        """As :meth:`append`, for one token; returns its index."""
        index = self._n
        if index >= len(self._tokens):
            return self.append(np.asarray([token], np.int32), pos)[0]
        self.history.computed(index, index + 1, self._view, self._first_gap)
        c = self._columns
        self._tokens[index], c.pos[index], c.state[index] = token, pos, 0
        c.seq[index], c.reserved[index] = self.live, False
        self._n, self._last_visible = index + 1, index
        return index

    def commit(self, plan: Plan) -> None:
        """The plan's native steps were carried out: its outcome is now how things are."""
        self.columns.assign(plan.after)
        self._originals = plan.originals
        self._last_visible = plan.after.last_visible
        self._view = tuple(runs(~plan.after.visible))
        self._first_gap = int(plan.after.reserved.argmax()) if plan.after.reserved.any() else None
        for index in plan.restored:
            self.history.undo_again(index)

    # -- edits --------------------------------------------------------------------------------------------------

    def plan_mask(self, ranges: Sequence[Range], gap: str, *, force: bool = False) -> Plan:
        """Take the visible tokens of these ranges out of sight, into archive sequences.

        ``gap`` is "close" or "keep". Raises BadState when none is visible, PinnedTokens for attention sinks
        without ``force``, MaskUnsupported when a gap cannot be closed or no archive has room.
        """
        chosen = self.select(ranges) & self.columns.visible
        if not chosen.any():
            raise BadState("nothing to mask: the target's tokens are all masked or evicted already")
        self._check_sinks(chosen, force)
        after = self.columns.copy()
        steps = self._archive_steps(chosen, after)
        after.state[chosen] = State.MASKED
        after.reserved[chosen] = gap == "keep"
        return self._finish(steps, after, self._originals, edited=chosen, gap=self._gap_kind(chosen, gap))

    def plan_evict(self, ranges: Sequence[Range], gap: str, *, force: bool = False) -> Plan:
        """Free the cells of the visible and masked tokens of these ranges; their ids stay known.

        Raises BadState when none has a cell, otherwise as :meth:`plan_mask`.
        """
        chosen = self.select(ranges) & self.columns.in_cells
        if not chosen.any():
            raise BadState("nothing to evict: the target's tokens hold no cells")
        seen = chosen & self.columns.visible
        self._check_sinks(seen, force)
        after = self.columns.copy()
        after.state[chosen] = State.EVICTED
        after.reserved[chosen] &= gap == "keep"
        after.reserved[seen] = gap == "keep"
        steps, originals = self._drop_steps(chosen)
        return self._finish(steps, after, originals, edited=chosen, gap=self._gap_kind(seen, gap))

    def plan_unmask(self, ranges: Sequence[Range]) -> Plan:
        """Bring the masked tokens of these ranges back to where they belong.

        Raises BadState when none is masked, MaskUnsupported when that needs a shift and there is none.
        """
        wanted = self.select(ranges)
        chosen = wanted & self.columns.where(State.MASKED)
        if not chosen.any():
            gone = (wanted & self.columns.where(State.EVICTED)).any()
            why = "it was evicted, its K/V is gone; append its text again" if gone else "it is visible already"
            raise BadState(f"nothing to unmask in the target: {why}")
        after = self.columns.copy()
        after.state[chosen] = State.VISIBLE
        after.reserved[chosen] = False
        return self._finish([], after, self._originals, edited=chosen, coming=chosen)

    def plan_rewind(self, index: int) -> Plan:
        """Drop every token from ``index`` on, hidden ones too."""
        if not 0 <= index <= self._n:
            raise UsageError(f"cannot rewind to {index}: the transcript has {self._n} tokens")
        after = self.columns.copy()
        chosen = ~after.where(State.DROPPED)
        chosen[:index] = False
        after.state[chosen] = State.DROPPED
        after.reserved[chosen] = False
        after.free_tail()
        steps, originals = self._drop_steps(chosen)
        return Plan(tuple(steps), after, originals, edited=tuple(runs(chosen)), gap="tail")

    def first_inexact(self) -> int | None:
        """The first visible token that a fresh prefill of the visible tokens would compute otherwise, or place
        otherwise behind a gap that cannot be closed; None when there is none."""
        visible = self.columns.visible
        hidden = [(a, b) for a, b in self.view if not self.columns.where(State.DROPPED)[a:b].all()]
        wrong = self.history.influenced(hidden, self._n) | self.history.otherwise(self.view, self._n)
        if not self.can_shift and self._first_gap is not None:
            wrong[self._first_gap :] = True
        found = np.flatnonzero(wrong & visible)
        return int(found[0]) if len(found) else None

    def plan_close(self) -> Plan | None:
        """Close every kept gap, where positions can be shifted; None when there is nothing to close."""
        if not self.can_shift or self._first_gap is None:
            return None
        after = self.columns.copy()
        after.reserved[:] = False
        return self._finish([], after, self._originals, edited=np.zeros(self._n, np.bool_))

    def plan_recompute(self, start: int) -> Recompute:
        """Read the visible tokens from index ``start`` on again, behind the visible ones before it.

        Their cells wait in scratch until the reading is done, so it takes as many free cells as tokens.
        """
        after = self.columns.copy()
        chosen = after.visible
        chosen[:start] = False
        before = last(after.visible[:start])
        pos = 0 if before is None else int(after.pos[before]) + 1
        if before is None and chosen.any():
            pos = int(after.pos[chosen.argmax()])
        away = tuple(Move(self.live, SCRATCH, p0, p1) for _, p0, p1 in after.cell_runs(chosen))
        more, kept = self._drop_originals(chosen)
        after.pos[chosen] = np.arange(pos, pos + int(chosen.sum()), dtype=np.int32)
        after.reserved[before or 0 :] = False
        dropped = (*(Drop(SCRATCH, m.p0, m.p1) for m in away), *more)
        plan = Plan(dropped, after, kept, edited=tuple(runs(chosen)))
        return Recompute(away, tuple(m.reverse for m in away), plan, self.tokens[chosen].copy(), pos)

    def plan_reread(self, *, keep_original: bool) -> Reread:
        """Read the last visible token again, as it was computed while something else was visible.

        llama.cpp takes a token only at the position right behind the last one its sequence holds. So where a kept
        gap lies in front of this token, the gap cannot stay: the token is read at the gap's first position. As
        every visible token behind the masked span is then computed without it, this equals a tail mask, which
        equals a restart.

        The first reading goes to an archive when ``keep_original`` (it costs a cell): unmask brings it back.
        """
        after = self.columns.copy()
        index = after.last_visible
        if index is None:
            raise BadState("no token is visible")
        old = int(after.pos[index])
        before = last(after.visible[:index])
        new = old if before is None else int(after.pos[before]) + 1
        if new != old:
            after.reserved[before:index] = False
        after.pos[index] = new
        if not keep_original or self.has_original(index):
            return Reread(Plan((Drop(self.live, old, old + 1),), after, self._originals), index, new, ())
        seq, delta = self._find_archive((old, old + 1), self._taken_ranges())
        move = Move(self.live, seq, old, old + 1, delta)
        original = Original(index, seq, old + delta, self.history.view_of(index))
        return Reread(Plan((move,), after, (*self._originals, original)), index, new, (move.reverse,))

    # -- the parts of an edit -----------------------------------------------------------------------------------

    def _check_sinks(self, chosen: Flags, force: bool) -> None:
        sinks = np.flatnonzero(~self.columns.where(State.DROPPED))[:NUM_SINKS]
        if chosen[sinks].any() and not force:
            raise PinnedTokens(
                f"the target holds one of the first {NUM_SINKS} tokens, which are attention sinks: without them "
                "most models stop making sense; pass force=True to do it all the same"
            )

    def _gap_kind(self, chosen: Flags, gap: str) -> str:
        """'tail' when nothing visible stands behind the first chosen token, else the gap asked for."""
        if not chosen.any():
            return ""
        first = int(chosen.argmax())
        return gap if (self.columns.visible & ~chosen)[first:].any() else "tail"

    def _drop_steps(self, chosen: Flags) -> tuple[list[Step], tuple[Original, ...]]:
        """Free the cells of the chosen tokens, and of their originals; returns the originals that stay."""
        c = self.columns
        steps: list[Step] = [Drop(*run) for run in c.cell_runs(chosen & c.in_cells)]
        more, kept = self._drop_originals(chosen)
        return [*steps, *more], kept

    def _drop_originals(self, chosen: Flags) -> tuple[list[Step], tuple[Original, ...]]:
        """Free the cells of the chosen tokens' originals; returns those that stay."""
        kept = tuple(o for o in self._originals if not chosen[o.index])
        return [o.drop for o in self._originals if chosen[o.index]], kept

    def _archive_steps(self, chosen: Flags, after: Columns) -> list[Step]:
        """Move chosen visible tokens to archives whose ranges are free there; sets their seq and pos in ``after``."""
        steps: list[Step] = []
        taken = self._taken_ranges()
        for indexes in runs_of(chosen, after.pos.copy()):
            p0 = int(after.pos[indexes[0]])
            p1 = p0 + len(indexes)
            seq, delta = self._find_archive((p0, p1), taken)
            taken[seq].append((p0 + delta, p1 + delta))
            after.seq[indexes] = seq
            after.pos[indexes] += delta
            steps.append(Move(self.live, seq, p0, p1, delta))
        return steps

    def _taken_ranges(self) -> dict[int, list[Range]]:
        c = self.columns
        taken: dict[int, list[Range]] = {seq: [] for seq in self.archives}
        for run in c.cell_runs(c.where(State.MASKED)):
            taken[run.seq].append((run.p0, run.p1))
        for original in self._originals:
            taken[original.seq].append((original.pos, original.pos + 1))
        return taken

    def _find_archive(self, wanted: Range, taken: dict[int, list[Range]]) -> tuple[int, int]:
        """(archive, shift) for a run of positions: in place where an archive is free there, else behind its last."""
        for seq, ranges in taken.items():
            if all(wanted[1] <= start or stop <= wanted[0] for start, stop in ranges):
                return seq, 0
        if not self.can_shift:
            raise MaskUnsupported(
                f"all {len(taken)} archive sequences hold other spans at these positions and this model cannot "
                "shift; evict a masked span, or open the session with more n_archives"
            )
        ends = {seq: max(stop for _, stop in ranges) for seq, ranges in taken.items()}
        seq = min(ends, key=lambda s: ends[s])
        return seq, ends[seq] - wanted[0]

    def _finish(
        self,
        steps: list[Step],
        after: Columns,
        originals: tuple[Original, ...],
        *,
        edited: Flags,
        coming: Flags | None = None,
        gap: str = "",
    ) -> Plan:
        """Lay the visible tokens out, restore originals whose view is back, and put the plan together."""
        after.free_tail()
        back = tuple(o for o in originals if self._view_is_back(o, after))
        source = after.copy()  # where the cell of every visible token is now
        arrives = np.zeros(self._n, np.bool_) if coming is None else coming.copy()
        for original in back:
            i = original.index
            steps.append(Drop(int(after.seq[i]), int(after.pos[i]), int(after.pos[i]) + 1))
            source.pos[i], source.seq[i], arrives[i] = original.pos, original.seq, True
        wanted = wanted_positions(source, anchors=self.columns.visible & after.visible)
        moves = shift_steps(self.live, after.visible & ~arrives, source.pos, wanted)
        moves += return_steps(self.live, arrives, source, wanted)
        if not self.can_shift and any(isinstance(s, (Shift, Move)) and s.delta for s in moves):
            raise MaskUnsupported(_NO_SHIFT)
        after.pos[after.visible] = wanted[after.visible]
        after.seq[after.visible] = self.live
        return Plan(
            (*steps, *moves),
            after,
            tuple(o for o in originals if o not in back),
            edited=tuple(runs(edited)),
            restored=tuple(o.index for o in back),
            gap=gap,
        )

    def _view_is_back(self, original: Original, after: Columns) -> bool:
        if not after.visible[original.index]:
            return False
        return clip(runs(~after.visible), original.index) == original.hidden
