"""The ledger: every token with its id, index, position and state; plans edits as data. No llama.cpp in here.

The only owner of "where are we". An edit is planned completely (every refusal, every native step) before the first
native call; the session has the engine carry the steps out and then commits the plan.

Layout. The members of a layout are the visible tokens and the masked ones whose place is reserved (``gap="keep"``).
They stand at consecutive positions in index order, and the last visible one stays where it is: so the suffix and the
cursor keep still and earlier tokens move up. Hidden tokens behind the last visible one reserve nothing: masking the
tail rewinds the cursor, which equals a restart.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import BadState, ContextFull, MaskUnsupported, PinnedTokens, UnknownSpan, UsageError
from .history import History, View, clip
from .spans import Range, runs
from .steps import Drop, Move, Shift, Step

#: The first tokens of a text draw attention whatever they say (attention sinks, arXiv:2309.17453).
NUM_SINKS = 4

Flags: TypeAlias = npt.NDArray[np.bool_]


class State(enum.IntEnum):
    """Where a token's K and V are."""

    VISIBLE = 0  # in the live sequence
    MASKED = 1  # in an archive sequence
    PARKED = 2  # in host memory or a file
    EVICTED = 3  # gone; the token is known
    DROPPED = 4  # gone, and the token no longer belongs to the transcript


@dataclass
class Columns:
    """One row a token; ``seq`` is the archive of a masked token, ``reserved`` whether it keeps its place."""

    pos: npt.NDArray[np.int32]
    state: npt.NDArray[np.int8]
    seq: npt.NDArray[np.int16]
    reserved: Flags

    def copy(self) -> Columns:
        return Columns(self.pos.copy(), self.state.copy(), self.seq.copy(), self.reserved.copy())

    @property
    def visible(self) -> Flags:
        return self.state == State.VISIBLE


@dataclass(frozen=True)
class Original:
    """The first reading of a token that was read again under a mask, kept so that unmask is exact.

    ``seq`` and ``pos`` say where its cell waits, ``hidden`` what it could not see.
    """

    index: int
    seq: int
    pos: int
    hidden: View


@dataclass(frozen=True)
class Plan:
    """An edit worked out: native ``steps`` in order, and the ledger ``after`` them."""

    steps: tuple[Step, ...]
    after: Columns
    originals: tuple[Original, ...]
    edited: tuple[Range, ...] = ()
    restored: tuple[int, ...] = ()
    num_edited: int = 0
    num_moved: int = 0
    gap: str = ""

    @property
    def num_freed(self) -> int:
        return sum(s.cells for s in self.steps if isinstance(s, Drop))


@dataclass(frozen=True)
class Reread:
    """A plan to read token ``index`` again at ``pos``."""

    plan: Plan
    index: int
    pos: int
    undo: tuple[Step, ...]


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
        self._columns = _empty_columns(256)
        self._originals: tuple[Original, ...] = ()

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
        c, n = self._columns, self._n
        return Columns(c.pos[:n], c.state[:n], c.seq[:n], c.reserved[:n])

    @property
    def visible(self) -> Flags:
        return self.columns.visible

    @property
    def visible_tokens(self) -> npt.NDArray[np.int32]:
        return self.tokens[self.visible]

    def count(self, state: State) -> int:
        return int(np.count_nonzero(self.columns.state == state))

    @property
    def num_cells(self) -> int:
        """Cells that hold this session's tokens: visible, masked, and originals of re-read tokens."""
        return self.count(State.VISIBLE) + self.count(State.MASKED) + len(self._originals)

    @property
    def num_originals(self) -> int:
        return len(self._originals)

    @property
    def last_visible(self) -> int | None:
        """The index of the last visible token."""
        return _last(self.visible)

    @property
    def cursor(self) -> int:
        """The position the next token is read at."""
        last = self.last_visible
        return 0 if last is None else int(self.columns.pos[last]) + 1

    @property
    def view(self) -> View:
        """What a token read now could not see."""
        return tuple(runs(~self.visible))

    def expected_positions(self) -> dict[int, npt.NDArray[np.int32]]:
        """Sequence id -> sorted int32 positions that llama.cpp should hold for this session."""
        c = self.columns
        held = {self.live: c.pos[c.visible]}
        masked = c.state == State.MASKED
        for seq in self.archives:
            extra = [o.pos for o in self._originals if o.seq == seq]
            held[seq] = np.concatenate([c.pos[masked & (c.seq == seq)], np.asarray(extra, np.int32)])
        return {seq: np.sort(pos) for seq, pos in held.items()}

    def select(self, ranges: Sequence[Range]) -> Flags:
        """bool (n,): the tokens of these ranges that still belong to the transcript.

        Raises UsageError for an empty target, UnknownSpan when it lies beyond the transcript or was dropped.
        """
        chosen = np.zeros(self._n, np.bool_)
        if not any(start < stop for start, stop in ranges):
            raise UsageError("the target holds no token")
        for start, stop in ranges:
            if stop > self._n:
                raise UnknownSpan(f"[{start}, {stop}) goes beyond the transcript, which has {self._n} tokens")
            chosen[start:stop] = True
        chosen &= self.columns.state != State.DROPPED
        if not chosen.any():
            raise UnknownSpan("the target was dropped by a rewind")
        return chosen

    def influenced_by(self, ranges: Sequence[Range]) -> list[Range]:
        """The visible tokens outside ``ranges`` computed while those were visible, directly or through others."""
        return runs(self.history.influenced(ranges, self._n) & self.visible)

    # -- growing ------------------------------------------------------------------------------------------------

    def check_room(self, num_tokens: int, num_free: int) -> None:
        """Raise ContextFull unless ``num_tokens`` more fit into ``num_free`` cells."""
        if num_tokens <= num_free:
            return
        masked = self.count(State.MASKED)
        choices = ["rewind", "open the session with a larger n_ctx"]
        if self.count(State.VISIBLE):
            choices.insert(0, "evict a span")
        if masked:
            choices.insert(0, f"evict masked spans ({masked:,} tokens are masked and still hold cells)")
        raise ContextFull(
            f"{num_tokens:,} tokens need as many cells and {num_free:,} are free; {', or '.join(choices)}"
        )

    def append(self, tokens: npt.NDArray[np.int32], pos: int) -> Range:
        """Record tokens that now stand in the live sequence from position ``pos`` on; returns their indexes."""
        start, stop = self._n, self._n + len(tokens)
        self.history.computed(start, stop, self.view)
        self._reserve(stop)
        self._tokens[start:stop] = tokens
        c = self._columns
        c.pos[start:stop] = np.arange(pos, pos + len(tokens), dtype=np.int32)
        c.state[start:stop] = State.VISIBLE
        c.seq[start:stop] = -1
        c.reserved[start:stop] = False
        self._n = stop  # last: an interrupt before this line leaves the ledger as it was
        return (start, stop)

    def _reserve(self, size: int) -> None:
        if size <= len(self._tokens):
            return
        extra = max(size, 2 * len(self._tokens)) - len(self._tokens)
        self._tokens = np.concatenate([self._tokens, np.empty(extra, np.int32)])
        more, c = _empty_columns(extra), self._columns
        self._columns = Columns(
            np.concatenate([c.pos, more.pos]),
            np.concatenate([c.state, more.state]),
            np.concatenate([c.seq, more.seq]),
            np.concatenate([c.reserved, more.reserved]),
        )

    def commit(self, plan: Plan) -> None:
        """The plan's native steps were carried out: its outcome is now how things are."""
        n = self._n
        self._columns.pos[:n] = plan.after.pos
        self._columns.state[:n] = plan.after.state
        self._columns.seq[:n] = plan.after.seq
        self._columns.reserved[:n] = plan.after.reserved
        self._originals = plan.originals
        for index in plan.restored:
            self.history.undo_again(index)

    # -- edits --------------------------------------------------------------------------------------------------

    def plan_mask(self, ranges: Sequence[Range], gap: str, *, force: bool = False) -> Plan:
        """Take the visible tokens of these ranges out of sight, into archive sequences.

        ``gap`` is "close" or "keep". Raises BadState when none is visible, PinnedTokens for attention sinks
        without ``force``, MaskUnsupported when a gap cannot be closed or no archive has room.
        """
        chosen = self.select(ranges) & self.visible
        if not chosen.any():
            raise BadState("nothing to mask: the target's tokens are all masked or evicted already")
        self._check_sinks(chosen, force)
        after = self.columns.copy()
        after.state[chosen] = State.MASKED
        after.reserved[chosen] = gap == "keep"
        steps = list(self._archive_steps(chosen, after))
        return self._finish(steps, chosen, after, gap=self._gap_kind(chosen, gap))

    def plan_evict(self, ranges: Sequence[Range], gap: str, *, force: bool = False) -> Plan:
        """Free the cells of the visible and masked tokens of these ranges; their ids stay known."""
        old = self.columns
        chosen = self.select(ranges) & ((old.state == State.VISIBLE) | (old.state == State.MASKED))
        if not chosen.any():
            raise BadState("nothing to evict: the target's tokens hold no cells")
        was_visible = chosen & old.visible
        self._check_sinks(was_visible, force)
        after = old.copy()
        after.state[chosen] = State.EVICTED
        after.reserved[was_visible] = gap == "keep"
        if gap == "close":
            after.reserved[chosen] = False
        steps = [*self._drop_steps(chosen), *self._drop_originals(chosen)]
        originals = tuple(o for o in self._originals if not chosen[o.index])
        return self._finish(steps, chosen, after, gap=self._gap_kind(was_visible, gap), originals=originals)

    def plan_unmask(self, ranges: Sequence[Range]) -> Plan:
        """Bring the masked tokens of these ranges back to where they belong.

        Raises BadState when none is masked, MaskUnsupported when that needs a shift and there is none.
        """
        chosen = self.select(ranges) & (self.columns.state == State.MASKED)
        if not chosen.any():
            raise BadState(self._why_not_unmask(ranges))
        after = self.columns.copy()
        after.state[chosen] = State.VISIBLE
        after.reserved[chosen] = False
        return self._finish([], chosen, after, returning=chosen)

    def plan_rewind(self, index: int) -> Plan:
        """Drop every token from ``index`` on, hidden ones too."""
        if not 0 <= index <= self._n:
            raise UsageError(f"cannot rewind to {index}: the transcript has {self._n} tokens")
        after = self.columns.copy()
        chosen = np.zeros(self._n, np.bool_)
        chosen[index:] = after.state[index:] != State.DROPPED
        steps = [*self._drop_steps(chosen), *self._drop_originals(chosen)]
        after.state[chosen] = State.DROPPED
        after.reserved[chosen] = False
        originals = tuple(o for o in self._originals if not chosen[o.index])
        _free_tail(after)
        return Plan(
            tuple(steps), after, originals, edited=tuple(runs(chosen)), num_edited=int(chosen.sum()), gap="tail"
        )

    def plan_reread(self, *, keep_original: bool) -> Reread:
        """Read the last visible token again, as it was computed while something else was visible.

        llama.cpp takes a token only at the position right behind the last one its sequence holds. So where a kept
        gap lies in front of this token, the gap cannot stay: the token is read at the gap's first position. As
        every visible token behind the masked span is then computed without it, this equals a tail mask, which
        equals a restart.

        The first reading goes to an archive when ``keep_original`` (it costs a cell): unmask brings it back.
        """
        index = self.last_visible
        if index is None:
            raise BadState("no token is visible")
        after = self.columns.copy()
        old_pos = int(after.pos[index])
        before = _last(after.visible[:index])
        new_pos = old_pos if before is None else int(after.pos[before]) + 1
        after.reserved[0 if before is None else before + 1 : index] &= new_pos == old_pos
        after.pos[index] = new_pos
        originals = self._originals
        away: tuple[Step, ...] = (Drop(self.live, old_pos, old_pos + 1),)
        undo: tuple[Step, ...] = ()
        if keep_original and not any(o.index == index for o in originals):
            seq, delta = self._find_archive((old_pos, old_pos + 1), self._taken_ranges())
            view = self.history.view_of(index)
            originals += (Original(index, seq, old_pos + delta, view),)
            away = (Move(self.live, seq, old_pos, old_pos + 1, delta),)
            undo = (Move(seq, self.live, old_pos + delta, old_pos + delta + 1, -delta),)
        return Reread(Plan(away, after, originals, edited=((index, index + 1),)), index, new_pos, undo)

    def has_original(self, index: int) -> bool:
        """Whether the first reading of this token waits in an archive."""
        return any(o.index == index for o in self._originals)

    # -- the parts of an edit -----------------------------------------------------------------------------------

    def _check_sinks(self, chosen: Flags, force: bool) -> None:
        if chosen[:NUM_SINKS].any() and not force:
            raise PinnedTokens(
                f"the target holds one of the first {NUM_SINKS} tokens, which are attention sinks: without them "
                "most models stop making sense; pass force=True to do it all the same"
            )

    def _gap_kind(self, chosen: Flags, gap: str) -> str:
        """"tail" when nothing visible stands behind the first chosen token, else the gap asked for."""
        if not chosen.any():
            return ""
        first = int(chosen.argmax())
        return gap if (self.visible & ~chosen)[first:].any() else "tail"

    def _why_not_unmask(self, ranges: Sequence[Range]) -> str:
        state = self.columns.state[self.select(ranges)]
        if (state == State.EVICTED).any():
            return "nothing to unmask: the target was evicted, its K/V is gone; append its text again"
        return "nothing to unmask: the target is visible already"

    def _drop_steps(self, chosen: Flags) -> Iterator[Step]:
        """Free the cells of chosen visible and masked tokens, newest positions first."""
        c = self.columns
        for seq, p0, p1 in reversed(self._position_runs(chosen & c.visible, None)):
            yield Drop(seq, p0, p1)
        for seq, p0, p1 in self._position_runs(chosen & (c.state == State.MASKED), c.seq):
            yield Drop(seq, p0, p1)

    def _drop_originals(self, chosen: Flags) -> Iterator[Step]:
        return (Drop(o.seq, o.pos, o.pos + 1) for o in self._originals if chosen[o.index])

    def _archive_steps(self, chosen: Flags, after: Columns) -> Iterator[Step]:
        """Move chosen visible tokens to the first archive whose ranges are free there; sets their seq and pos."""
        taken = self._taken_ranges()
        for indexes in self._runs_of(chosen):
            p0 = int(after.pos[indexes[0]])
            p1 = p0 + len(indexes)
            seq, delta = self._find_archive((p0, p1), taken)
            taken[seq].append((p0 + delta, p1 + delta))
            after.seq[indexes] = seq
            after.pos[indexes] += delta
            yield Move(self.live, seq, p0, p1, delta)

    def _taken_ranges(self) -> dict[int, list[Range]]:
        c = self.columns
        taken: dict[int, list[Range]] = {seq: [] for seq in self.archives}
        for seq, p0, p1 in self._position_runs(c.state == State.MASKED, c.seq):
            taken[seq].append((p0, p1))
        for original in self._originals:
            taken[original.seq].append((original.pos, original.pos + 1))
        return taken

    def _find_archive(self, wanted: Range, taken: dict[int, list[Range]]) -> tuple[int, int]:
        """(archive, shift) for a run of positions: in place where an archive is free there, else behind its last."""
        for seq, ranges in taken.items():
            if all(wanted[1] <= start or stop <= wanted[0] for start, stop in ranges):
                return seq, 0
        if not self.can_shift or not taken:
            raise MaskUnsupported(
                f"all {len(taken)} archive sequences hold other spans at these positions and this model cannot "
                "shift; evict a masked span, or open the session with more n_archives"
            )
        seq = min(taken, key=lambda s: max(stop for _, stop in taken[s]))
        return seq, max(stop for _, stop in taken[seq]) - wanted[0]

    def _finish(
        self,
        steps: list[Step],
        chosen: Flags,
        after: Columns,
        *,
        gap: str = "",
        returning: Flags | None = None,
        originals: tuple[Original, ...] | None = None,
    ) -> Plan:
        """Lay the visible tokens out, restore originals whose view is back, and put the plan together."""
        originals = self._originals if originals is None else originals
        _free_tail(after)
        back = [o for o in originals if self._view_is_back(o, after)]
        source = after.copy()  # where every visible token's cell is now, original readings first
        come = np.zeros(len(chosen), np.bool_) if returning is None else returning.copy()
        for original in back:
            i = original.index
            steps.append(Drop(self.live if after.seq[i] < 0 else int(after.seq[i]), int(after.pos[i]), int(after.pos[i]) + 1))
            source.pos[i], source.seq[i], come[i] = original.pos, original.seq, True
        wanted = _layout(source, anchors=self.visible & after.visible)
        steps += self._shift_steps(after.visible & ~come, source.pos, wanted)
        steps += self._return_steps(come, source, wanted)
        after.pos[after.visible] = wanted[after.visible]
        after.seq[after.visible] = -1
        return Plan(
            tuple(steps),
            after,
            tuple(o for o in originals if o not in back),
            edited=tuple(runs(chosen)),
            restored=tuple(o.index for o in back),
            num_edited=int(chosen.sum()),
            num_moved=sum(s.p1 - s.p0 for s in steps if not isinstance(s, Drop) and s.delta),
            gap=gap,
        )

    def _view_is_back(self, original: Original, after: Columns) -> bool:
        if not after.visible[original.index]:
            return False
        return clip(tuple(runs(~after.visible)), original.index) == original.hidden

    def _shift_steps(self, staying: Flags, pos: npt.NDArray[np.int32], wanted: npt.NDArray[np.int32]) -> list[Step]:
        """Runs that go up from the last to the first, then those that go down from the first to the last.

        Tokens keep their order, so in this sequence no run moves onto another.
        """
        delta = np.where(staying, wanted - pos, 0)
        found = [
            Shift(self.live, int(pos[i[0]]), int(pos[i[0]]) + len(i), int(delta[i[0]]))
            for i in self._runs_of(staying & (delta != 0), pos, delta)
        ]
        if found and not self.can_shift:
            raise MaskUnsupported(_NO_SHIFT)
        return [*(s for s in reversed(found) if s.delta > 0), *(s for s in found if s.delta < 0)]

    def _return_steps(self, come: Flags, source: Columns, wanted: npt.NDArray[np.int32]) -> list[Step]:
        """Bring hidden cells back from their archives to the places laid out for them."""
        delta = wanted - source.pos
        found = [
            Move(int(source.seq[i[0]]), self.live, int(source.pos[i[0]]), int(source.pos[i[0]]) + len(i), int(delta[i[0]]))
            for i in self._runs_of(come, source.pos, delta, source.seq)
        ]
        if any(move.delta for move in found) and not self.can_shift:
            raise MaskUnsupported(_NO_SHIFT)
        return list(found)

    def _runs_of(self, chosen: Flags, pos: npt.NDArray[np.int32] | None = None, *same: npt.NDArray[np.generic]) -> list[npt.NDArray[np.intp]]:
        """The chosen indexes, split wherever positions are not consecutive or one of the ``same`` columns changes."""
        indexes = np.flatnonzero(chosen)
        pos = self.columns.pos if pos is None else pos
        cut = np.diff(pos[indexes]) != 1
        for column in same:
            cut |= column[indexes][1:] != column[indexes][:-1]
        return [part for part in np.split(indexes, np.flatnonzero(cut) + 1) if len(part)]

    def _position_runs(self, chosen: Flags, seq: npt.NDArray[np.int16] | None) -> list[tuple[int, int, int]]:
        """(sequence, p0, p1) of the chosen tokens; ``seq`` None means the live sequence."""
        pos = self.columns.pos
        parts = self._runs_of(chosen) if seq is None else self._runs_of(chosen, pos, seq)
        return [
            (self.live if seq is None else int(seq[i[0]]), int(pos[i[0]]), int(pos[i[0]]) + len(i)) for i in parts
        ]


_NO_SHIFT = (
    "this needs positions to be shifted, which this model cannot do: the places were taken by tokens read since; "
    "rewind those first, or append the text again"
)


def _empty_columns(size: int) -> Columns:
    return Columns(
        np.empty(size, np.int32), np.empty(size, np.int8), np.empty(size, np.int16), np.empty(size, np.bool_)
    )


def _last(flags: Flags) -> int | None:
    """The index of the last True."""
    if not flags.any():
        return None
    return len(flags) - 1 - int(flags[::-1].argmax())


def _free_tail(columns: Columns) -> None:
    """Hidden tokens behind the last visible one reserve no place."""
    last = _last(columns.visible)
    columns.reserved[0 if last is None else last + 1 :] = False


def _layout(columns: Columns, anchors: Flags) -> npt.NDArray[np.int32]:
    """int32 (n,): the position wanted for every member (visible or reserved), others as they are.

    Members stand consecutively and the last anchor keeps its position, unless the first would fall below 0.
    """
    wanted = columns.pos.copy()
    members = np.flatnonzero(columns.visible | columns.reserved)
    anchored = np.flatnonzero((anchors if anchors.any() else columns.visible)[members])
    if not len(anchored):
        return wanted
    rank = int(anchored[-1] if anchors.any() else anchored[0])
    start = max(0, int(columns.pos[members[rank]]) - rank)
    wanted[members] = start + np.arange(len(members), dtype=np.int32)
    return wanted
