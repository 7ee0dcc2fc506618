"""Record: what a session holds (ledger, spans, counts, next logits) and the engine that holds its cells.

Readers and edits change ledger and cells through it. Whatever fails, the two say the same afterwards, or the record is
marked broken with a message that says how to go on.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from . import recovery
from .batch import Chunk
from .cells import Blob, Call
from .columns import State
from .engine import Engine
from .errors import AuditFailed, DecodeFailed, EdgekvError, SessionBroken
from .history import View, view_with_rows
from .ledger import Ledger
from .next_logits import NextLogits
from .planner import Planner
from .plans import Arrival, Plan
from .receipts import Audit
from .settings import ASIDE, SCRATCH
from .spans import SpanTable
from .steps import Load, Move, Own, Step
from .tally import Tally

if TYPE_CHECKING:
    from .generation import Generation
    from .journal import Journal

R = TypeVar("R")


class Record:
    """The tokens of one session on ``engine``; callers hold the engine's lock."""

    def __init__(self, engine: Engine, of: Record | None = None) -> None:
        self.engine: Final = engine
        self.sequences: Final = engine.take_sequences()
        self.live: Final = self.sequences[0]
        self.journal: Journal | None = None
        self.generation: Generation | None = None  # the one that has begun, and may go on
        self.next = NextLogits(engine)
        self.original: tuple[int, View, npt.NDArray[np.float32]] | None = None
        self.broken = ""
        self.released = False
        self.tally: Final = Tally()
        self.spans: Final[SpanTable] = SpanTable() if of is None else of.spans.copy()
        self.ledger: Final[Ledger] = self._new_ledger() if of is None else self._fork(of)

    def begin(self) -> None:
        """From now on it is one of the engine's: until then its sequences are taken back with the verb that made it."""
        owners = {**self.engine.owners, self.live: weakref.ref(self)}
        self.engine.apply((), [partial(setattr, self.engine, "owners", owners), *recovery.stands(self.engine)])

    def _new_ledger(self) -> Ledger:
        engine = self.engine
        has_cells = bool(engine.model.capabilities.mask)
        live, archives = self.live, self.sequences[1:]
        return Ledger(live, archives, can_shift=engine.can_shift, has_cells=has_cells, shares=engine.shares)

    def _fork(self, of: Record) -> Ledger:
        if of.ledger.has_cells:
            for mine, its in zip(self.sequences, of.sequences, strict=True):
                self.engine.share([run for run in of.ledger.cell_runs() if run.seq == its], mine)
        elif of.ledger.num_cells:
            self.engine.replace(of.live, self.live)
        if of.next.known and of.next.view is not None:
            self.next.in_copy(of.next.array(), of.next.view)
        self.original = of.original
        self.engine.parking.hold(self, of.ledger.columns.blobs)
        return of.ledger.fork(self.live, self.sequences[1:])

    @property
    def plan(self) -> Planner:
        """Plans of edits from how things are now."""
        return Planner(self.ledger)

    def release(self) -> None:
        """Free the cells that nobody else holds, and give the sequences back."""
        self.engine.touch()
        self.released = True
        self.engine.give_back(self.sequences, self.ledger.num_own_cells)
        self.ledger.release()
        self.engine.parking.release(self)

    # -- whole or nothing ---------------------------------------------------------------------------------------

    def whole(self, work: Callable[[], R], *others: recovery.Keeps) -> R:
        """See :func:`recovery.whole`."""
        return recovery.whole(self.engine, (self,), work, others)

    def change(self, steps: Sequence[Step], commit: Callable[[], R], then: Iterable[Call] = ()) -> R:
        """An edit: ``commit`` changes the ledger and the rest, and then its native steps are carried out, all at once.

        The steps were checked by the planner; one that fails all the same breaks the session. Raises SessionBroken.
        """
        steps = self._own_first(steps)
        result = commit()
        try:
            self.engine.apply(steps, [*then, *recovery.stands(self.engine)])
        except DecodeFailed as err:
            self.broken = f"an edit failed half way ({err}); open a new session and append what you need"
            raise SessionBroken(self.broken) from err
        if self.engine.parking:
            self.engine.parking.hold(self, self.ledger.columns.blobs)
        return result

    def _own_first(self, steps: Sequence[Step]) -> Sequence[Step]:
        """Copies of cells that others hold too, which change nothing by themselves, come first where there is room."""
        self.engine.check_steps(steps)
        owned = [step for step in steps if isinstance(step, Own)]
        if sum(step.p1 - step.p0 for step in owned) > self.engine.cells_free:
            return steps
        self.engine.apply(owned)
        return [step for step in steps if not isinstance(step, Own)]

    def move_aside(self, steps: Sequence[Step], back: Sequence[Move]) -> None:
        """Carry out steps that are no whole edit yet; ``back`` reverses them, should none come of it."""
        unit = self.engine.unit
        then = [] if unit is None else [partial(setattr, unit, "inverse", tuple(back))]
        self.engine.apply(self._own_first(steps), then)

    def copy_state(self) -> None:
        """A copy of a state that cannot be rewound waits aside, should what follows come to nothing."""
        unit = self.engine.unit
        then = [] if unit is None else [partial(setattr, unit, "checkpoint", True)]
        self.engine.replace(self.live, ASIDE, then)

    def kept(self) -> tuple[Any, ...]:
        """What it is now."""
        things = (self.ledger, self.spans, self.tally, self.next, *((self.journal,) if self.journal else ()))
        mine = {"next": self.next, "original": self.original, "generation": self.generation}
        return mine, [(thing, thing.kept()) for thing in things]

    def restore_kept(self, before: tuple[Any, ...]) -> None:
        mine, things = before
        vars(self).update(mine)
        for thing, was in things:
            thing.restore_kept(was)

    def heal(self) -> None:
        """Cells of this session are gone. A state is computed again from its text."""
        if self.ledger.has_cells:
            self.broken = self.broken or recovery.LOST
            return
        tokens = self.ledger.visible_tokens
        try:
            self.engine.clear(self.live, 0)
            for at in range(0, len(tokens), self.engine.n_batch):
                self.engine.decode([Chunk(self.live, at, tokens[at : at + self.engine.n_batch], "none")])
        except EdgekvError as err:
            self.broken = f"the text could not be read again ({err}); open a new session and append what you need"

    def commit(self, plan: Plan) -> None:
        """As Ledger.commit; logits whose first reading is gone are given up."""
        waited = self.original is not None and self.ledger.has_original(self.original[0])
        self.ledger.commit(plan)
        if waited and self.original is not None:
            row = self.original[0]
            if not self.ledger.has_original(row) and row not in plan.restored:
                self.original = None

    @contextlib.contextmanager
    def parked(self, plan: Plan, folder: Path | None) -> Iterator[None]:
        """Copies of the cells a plan parks go to ``folder`` or to host memory, and ``plan.after`` says which blob holds
        them. What the block has not committed is dropped again. Raises FileError, TooLarge."""
        parking = self.engine.parking
        if plan.parks:
            self.engine.check_copies()
        if folder is None and plan.parks and self.engine.settings.parked_limit is None:
            self.engine.check_copy(plan.num_parked, "parking in memory")
        try:
            for park in plan.parks:
                for part, blob in self.engine.copies(park.run):
                    here = park.rows[part.p0 - park.run.p0 : part.p1 - park.run.p0]
                    plan.after.blob[here] = parking.put(part, blob, folder)
            yield
        finally:
            parking.drop_unheld()

    def load(self, loads: Iterable[tuple[Sequence[Load], Blob]]) -> None:
        """Parked K and V come aside: of each blob some stretches. Raises ContextFull, AuditFailed, and what reading
        the blobs raises."""
        for some, blob in loads:
            self.engine.load_some(ASIDE, some, blob)

    def read_parked(self, plan: Plan) -> Iterator[tuple[Sequence[Load], Blob]]:
        """What a plan loads, blob by blob, each read and checked when it is asked for."""
        by_blob: dict[int, list[Load]] = {}
        for load in plan.loads:
            by_blob.setdefault(load.blob, []).append(load)
        return ((loads, self.engine.parking.read(number)) for number, loads in by_blob.items())

    def commit_arrival(self, arrival: Arrival) -> None:
        """As Ledger.commit_arrival; what is known of logits and their views follows the new rows."""
        self.ledger.commit_arrival(arrival)
        if not arrival.opened:
            return
        row, count = arrival.row, len(arrival.tokens)
        if self.next.view is not None:
            self.next.view = view_with_rows(self.next.view, row, count)
        if self.original is not None:
            at, view, logits = self.original
            self.original = (at + count * (at >= row), view_with_rows(view, row, count), logits)

    def forget_from(self, row: int) -> None:
        """Tokens from ``row`` on were dropped."""
        self.spans.keep_only(self.ledger.places.by_index(~self.ledger.columns.where(State.DROPPED)))
        self.ledger.history.truncate(row)
        if self.ledger.has_cells:  # else all was read again
            self.next.clear()

    def restore_logits(self) -> None:
        """Where the first reading of the last token is visible again, its logits are, too."""
        if self.original is None:
            return
        row, view, logits = self.original
        if self.ledger.columns.state[row] == State.DROPPED:
            self.original = None
        elif row == self.ledger.last_visible and view == self.ledger.view and not self.ledger.has_original(row):
            self.next.in_copy(logits, view)
            self.original = None

    @property
    def needs_reread(self) -> bool:
        """Whether the last visible token will be read again before the next is sampled."""
        return self.ledger.last_visible is not None and not self.next.fresh(self.ledger.view)

    # -- checking -----------------------------------------------------------------------------------------------

    def audit(self) -> Audit:
        """Compare what llama.cpp holds with the ledger, position by position. Raises AuditFailed."""
        expected = self.ledger.expected_positions()
        none = np.empty(0, np.int32)
        for seq, wanted in {**expected, SCRATCH: none, ASIDE: none}.items():
            self._audit_sequence(seq, wanted)
        self._audit_blobs()
        if self.engine.cells_used < self.ledger.num_cells:
            raise AuditFailed(f"{self.engine.cells_used} cells counted, the ledger holds {self.ledger.num_cells}")
        return Audit(len(expected), sum(len(p) for p in expected.values()))

    def _audit_blobs(self) -> None:
        """Every parked token lies in a blob, at its position."""
        columns = self.ledger.columns
        for number in columns.blobs:
            blob, pos = self.engine.parking.get(number), columns.pos[columns.parked & (columns.blob == number)]
            if pos.min() < blob.p0 or pos.max() >= blob.p1:
                raise AuditFailed(f"blob {number} holds [{blob.p0}, {blob.p1}), the ledger has others in it")

    def _audit_sequence(self, seq: int, wanted: npt.NDArray[np.int32]) -> None:
        if not (self.ledger.has_cells and self.engine.can_copy):  # only where it ends can be told
            end = int(wanted[-1]) if len(wanted) else -1
            if self.engine.last_position(seq) != end:
                raise AuditFailed(f"sequence {seq} ends at {self.engine.last_position(seq)}, the ledger says {end}")
            return
        for held in self.engine.positions(seq):
            if not np.array_equal(held, wanted):
                raise AuditFailed(_difference(seq, held, wanted))


def _difference(seq: int, held: Sequence[int] | npt.NDArray[np.int32], wanted: npt.NDArray[np.int32]) -> str:
    extra, missing = np.setdiff1d(held, wanted), np.setdiff1d(wanted, held)
    return (
        f"sequence {seq}: llama.cpp holds {len(held)} cells, the ledger {len(wanted)}; "
        f"only in llama.cpp: {extra[:8].tolist()}, only in the ledger: {missing[:8].tolist()}"
    )
