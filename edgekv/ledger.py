"""The ledger: every token with its id, place, position and state. No llama.cpp in here.

The only owner of "where are we". The planner works an edit out completely (every refusal, every native step) before
the first native call; the session has the engine carry the steps out and then commits the plan here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .columns import NO_BLOB, CellRun, Columns, Flags, State
from .errors import ContextFull, UnknownSpan, UsageError
from .history import History, View, view_with_rows
from .places import Places
from .plans import Arrival, Original, Plan
from .settings import KEEPER
from .shares import PRIVATE, Ids, Shares
from .spans import Range, runs


class Ledger:
    """The tokens of one session, a row each in reading order.

    ``live`` is the sequence the model sees, ``archives`` those where masked cells wait, ``can_shift`` whether
    positions may be moved at all, ``has_cells`` whether a token has a cell (not in a recurrent state), ``shares`` the
    cells that other sessions of the engine hold too.
    """

    def __init__(
        self,
        live: int,
        archives: Sequence[int],
        *,
        can_shift: bool,
        has_cells: bool = True,
        shares: Shares | None = None,
    ) -> None:
        self.live = live
        self.archives = tuple(archives)
        self.can_shift = can_shift
        self.has_cells = has_cells
        self.shares = Shares() if shares is None else shares
        self.history = History()
        self.places = Places()
        self.originals: tuple[Original, ...] = ()
        self._n = 0
        self._ids = np.empty(256, np.int32)
        self._columns = Columns.empty(256)
        self._rows: Columns | None = None  # views of those in use, made when asked for
        # These follow from the columns; kept because every generated token asks for them.
        self._last_visible: int | None = None
        self._view: View = ()
        self._first_gap: int | None = None

    # -- reading ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._n

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """int32 (n,): the token ids in reading order, hidden and dropped ones included; for reading."""
        return self._ids[: self._n]

    @property
    def columns(self) -> Columns:
        """Views of the rows in use; for reading."""
        if self._rows is None:
            self._rows = self._columns.first(self._n)
        return self._rows

    @property
    def blank(self) -> bool:
        """Whether no token belongs to the transcript: none was read, or all were dropped."""
        return self.count(State.DROPPED) == self._n

    @property
    def visible_tokens(self) -> npt.NDArray[np.int32]:
        return self.ids[self.columns.visible]

    @property
    def last_visible(self) -> int | None:
        """The row of the last visible token."""
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
        """The first row whose place is kept empty, None for none."""
        return self._first_gap

    def count(self, state: State) -> int:
        return int(np.count_nonzero(self.columns.where(state)))

    @property
    def num_cells(self) -> int:
        """Cells that hold this session's tokens: visible, masked, and originals of tokens read again."""
        return int(np.count_nonzero(self.columns.in_cells)) + len(self.originals)

    @property
    def num_own_cells(self) -> int:
        """Those of them that no other session holds."""
        return self.num_cells - int(self.shares.elsewhere(self._cell_ids(self.columns, self.originals)).sum())

    def has_original(self, row: int) -> bool:
        """Whether the first reading of this token waits in an archive."""
        return any(o.row == row for o in self.originals)

    def cell_runs(self) -> list[CellRun]:
        """Where all cells of this session are."""
        c = self.columns
        return [*c.cell_runs(c.in_cells), *(CellRun(o.seq, o.pos, o.pos + 1) for o in self.originals)]

    def expected_positions(self) -> dict[int, npt.NDArray[np.int32]]:
        """Sequence id -> sorted int32 positions that llama.cpp should hold for this session."""
        c = self.columns
        held = {seq: c.pos[c.in_cells & (c.seq == seq)].tolist() for seq in (self.live, *self.archives)}
        for original in self.originals:
            held[original.seq].append(original.pos)
        return {seq: np.sort(np.asarray(pos, np.int32)) for seq, pos in held.items()}

    def select(self, ranges: Sequence[Range]) -> Flags:
        """bool (n,): the rows of these index ranges that still belong to the transcript.

        Raises UsageError for an empty target, UnknownSpan when it lies beyond the transcript or was dropped.
        """
        if not any(start < stop for start, stop in ranges):
            raise UsageError("the target holds no token")
        for start, stop in ranges:
            if stop > self._n:
                raise UnknownSpan(f"[{start}, {stop}) goes beyond the transcript, which has {self._n} tokens")
        chosen = self.places.rows(ranges) & ~self.columns.where(State.DROPPED)
        if not chosen.any():
            raise UnknownSpan("the target was dropped by a rewind or an undo")
        return chosen

    def influenced_by(self, rows: Flags) -> Flags:
        """bool (n,): the visible tokens outside ``rows`` computed while those were visible, directly or through
        others."""
        return self.history.influenced(runs(rows), self._n) & self.columns.visible

    def inexact(self) -> Flags:
        """bool (n,): the visible tokens that a fresh prefill of the visible tokens would compute otherwise, or place
        otherwise behind a gap that cannot be closed."""
        wrong = self.history.influenced(self.view, self._n) | self.history.otherwise(self.view, self._n)
        if not self.can_shift and self._first_gap is not None:
            wrong[self._first_gap :] = True
        return wrong & self.columns.visible

    # -- growing ------------------------------------------------------------------------------------------------

    def check_room(self, num_cells: int, num_free: int) -> None:
        """Raise ContextFull, with what to do, unless ``num_free`` cells are enough."""
        if num_cells <= num_free:
            return
        masked = self.count(State.MASKED)
        choices = [f"evict masked spans ({masked:,} masked tokens still hold their cells)"] if masked else []
        choices += ["evict or rewind something", "open the session with a larger n_ctx"]
        raise ContextFull(f"{num_cells:,} cells are needed and {num_free:,} are free; {', or '.join(choices)}")

    def append(self, tokens: npt.NDArray[np.int32], pos: int) -> Range:
        """Record tokens that now stand in the live sequence from position ``pos`` on; returns their indexes."""
        self.history.computed(self._n, self._n + len(tokens), self.view, self.first_gap)
        return self._append(tokens, pos)

    def append_alone(self, tokens: npt.NDArray[np.int32], pos: int, hidden: View, *, foreign: bool) -> Range:
        """As :meth:`append`, of tokens that did not see what is ``hidden``. ``foreign``: they saw others, which are not
        here, so that a fresh prefill would compute all of them otherwise."""
        gap = self._n - 1 if foreign else self.first_gap
        self.history.computed_alone(self._n, self._n + len(tokens), hidden, gap)
        return self._append(tokens, pos)

    def _append(self, tokens: npt.NDArray[np.int32], pos: int) -> Range:
        start, stop = self._n, self._n + len(tokens)
        if stop > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(stop, np.int32)])
            self._columns = self._columns.grown(len(self._ids))
        c = self._columns
        self._ids[start:stop] = tokens
        c.pos[start:stop] = np.arange(pos, pos + len(tokens), dtype=np.int32)
        c.state[start:stop], c.seq[start:stop] = State.VISIBLE, self.live
        c.reserved[start:stop], c.cell[start:stop], c.replaced[start:stop] = False, PRIVATE, False
        c.blob[start:stop] = NO_BLOB
        self._n, self._rows = stop, None
        self.places.append(len(tokens))
        if len(tokens):
            self._last_visible = stop - 1
        return (start, stop)

    def append_one(self, token: int, pos: int) -> int:
        """As :meth:`append`, for one token; returns its index."""
        row = self._n
        if row >= len(self._ids):
            return self.append(np.asarray([token], np.int32), pos)[0]
        self.history.computed(row, row + 1, self._view, self._first_gap)
        c = self._columns
        self._ids[row], c.pos[row], c.state[row] = token, pos, 0
        c.seq[row], c.reserved[row], c.cell[row], c.replaced[row] = self.live, False, PRIVATE, False
        c.blob[row] = NO_BLOB
        self._n, self._rows, self._last_visible = row + 1, None, row
        self.places.append(1)
        return row

    def open_rows(self, row: int, tokens: npt.NDArray[np.int32]) -> None:
        """Make rows for tokens in front of ``row``; until a plan says more they belong to nobody."""
        count = len(tokens)
        self._columns = self.columns.with_rows(row, Columns.dropped(count, self.live))
        self._ids = np.concatenate([self.ids[:row], tokens, self.ids[row:]])
        self._n, self._rows = self._n + count, None
        self.places.insert(row, count)
        self.history.insert(row, count)
        self.originals = tuple(
            replace(o, row=o.row + count * (o.row >= row), hidden=view_with_rows(o.hidden, row, count))
            for o in self.originals
        )
        self._follow()

    # -- changing -----------------------------------------------------------------------------------------------

    def commit(self, plan: Plan) -> None:
        """The plan's native steps were carried out: its outcome is now how things are."""
        before = self._cell_ids(self.columns, self.originals) if self.shares else None
        columns = self._columns.copy()  # the old ones stay as they are, for an edit that is cut short
        columns.first(self._n).assign(plan.after)
        self._columns, self._rows = columns, None
        self.originals = plan.originals
        if before is not None:
            self.shares.release(np.setdiff1d(before, self._cell_ids(self.columns, self.originals)))
        self._follow()
        for row in plan.restored:
            self.history.undo_again(row)

    def commit_arrival(self, arrival: Arrival) -> None:
        """The tokens were read and brought into the text: they and the edit around them are now how things are."""
        if arrival.opened:
            self.open_rows(arrival.row, arrival.tokens)
        self.commit(arrival.plan)
        gap = self.first_gap if self.first_gap is not None and self.first_gap < arrival.row else None
        if arrival.alone:
            self.history.computed_alone(arrival.row, arrival.stop, arrival.hidden, gap)
        else:
            self.history.recomputed([(arrival.row, arrival.stop)], arrival.hidden, gap)

    def _follow(self) -> None:
        columns = self.columns
        self._last_visible = columns.last_visible
        self._view = tuple(runs(~columns.visible))
        self._first_gap = int(columns.reserved.argmax()) if columns.reserved.any() else None

    @staticmethod
    def _cell_ids(columns: Columns, originals: Sequence[Original]) -> Ids:
        ids = [o.cell for o in originals]
        return np.concatenate([columns.cell[columns.in_cells], np.asarray(ids, np.int32)])

    def _have_cells(self, rows: npt.NDArray[np.intp], cells: Ids | int) -> None:
        columns = self._columns.copy()
        columns.cell[rows] = cells
        self._columns, self._rows = columns, None

    @property
    def cell_ids(self) -> Ids:
        """The ids of all cells of this session."""
        return self._cell_ids(self.columns, self.originals)

    def own_alone(self, members: Mapping[tuple[int, int], frozenset[int]]) -> None:
        """Cells that no other session holds, as ``members`` says by sequence and position, are this one's alone."""
        mine = {self.live, *self.archives, KEEPER}
        c = self.columns
        shared = np.flatnonzero(c.in_cells & (c.cell != PRIVATE))
        alone = [row for row in shared if members.get((int(c.seq[row]), int(c.pos[row])), mine) <= mine]
        self._have_cells(np.asarray(alone, np.intp), PRIVATE)
        self.originals = tuple(
            replace(o, cell=PRIVATE) if members.get((o.seq, o.pos), mine) <= mine else o for o in self.originals
        )

    def kept(self) -> tuple[dict[str, Any], ...]:
        """What it is now: its arrays are replaced and not written to, but for rows beyond those in use."""
        newest = self.history.epochs[-1:]
        epochs = {"epochs": list(self.history.epochs)}
        return (
            dict(vars(self)),
            dict(vars(self.places)),
            dict(vars(self.shares)),
            epochs,
            dict(vars(newest[0])) if newest else {},
        )

    def restore_kept(self, before: tuple[dict[str, Any], ...]) -> None:
        mine, places, shares, epochs, newest = before
        vars(self).update(mine)
        vars(self.places).update(places)
        vars(self.shares).update(shares)
        self.history.epochs = list(epochs["epochs"])
        if newest:
            vars(self.history.epochs[-1]).update(newest)

    def release(self) -> None:
        """The session ends: it no longer holds the cells it shares."""
        self.shares.release(self._cell_ids(self.columns, self.originals))

    def restore(
        self,
        ids: npt.NDArray[np.int32],
        columns: Columns,
        places: Places,
        originals: tuple[Original, ...],
        history: History,
    ) -> None:
        """Be what another ledger was."""
        self._n, self._ids, self._columns, self._rows = len(ids), ids, columns, None
        self.places, self.originals, self.history = places, originals, history
        self._follow()

    # -- copies -------------------------------------------------------------------------------------------------

    def without_kv(self) -> Ledger:
        """A copy as it will be once its visible tokens are evaluated again, first to last, from position 0 on: there
        are no gaps, and masked and parked tokens are evicted."""
        other = self.trial()
        c = other.columns
        c.state[c.where(State.MASKED) | c.parked] = State.EVICTED
        c.pos[c.visible] = np.arange(np.count_nonzero(c.visible), dtype=np.int32)
        c.reserved[:], c.cell[:], c.blob[:] = False, PRIVATE, NO_BLOB
        other.originals = ()
        other._follow()
        other.history = History()
        other.history.recomputed(runs(c.visible), other.view)
        return other

    def trial(self) -> Ledger:
        """A copy to try things on."""
        other = copy.copy(self)
        other.history, other.places = self.history.copy(), self.places.copy()
        other._ids, other._columns, other._rows = self.ids.copy(), self.columns.copy(), None
        return other

    def fork(self, live: int, archives: Sequence[int]) -> Ledger:
        """The ledger of a second session on the same cells, in sequences of its own."""
        held = np.flatnonzero(self.columns.in_cells)
        self._have_cells(held, self.shares.share(self.columns.cell[held]))
        c = self.columns
        ids = self.shares.share(np.asarray([o.cell for o in self.originals], np.int32)).tolist()
        self.originals = tuple(replace(o, cell=cell) for o, cell in zip(self.originals, ids, strict=True))
        other = self.trial()
        other.live, other.archives = live, tuple(archives)
        theirs = dict(zip((self.live, *self.archives), (live, *archives), strict=True))
        for mine, its in theirs.items():
            other._columns.seq[c.seq == mine] = its
        other.originals = tuple(replace(o, seq=theirs[o.seq]) for o in self.originals)
        return other
