"""Room: what a chat's policy decided is carried out, and cells are made free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from . import policies
from .columns import State
from .errors import BadState, ContextFull, MaskUnsupported
from .planner import NUM_SINKS
from .policies import Cut, Policy, View
from .receipts import Receipt
from .session import Session
from .spans import Range, Target
from .turns import TURN
from .wording import count

_AT_ONCE: Final = 8  # a share of the cache: as much is made free at a time, so that it happens seldom


class Room:
    """Hides in ``session`` what a policy names, and frees cells of what is hidden. ``hidden``: int64, ascending, the
    indexes that a policy or the template hid; what a person hid is not among them."""

    def __init__(self, session: Session, spill: str = "evict") -> None:
        self._session: Final = session
        self.spill = spill
        self.hidden: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def fork(self, session: Session) -> Room:
        other = Room(session, self.spill)
        other.hidden = self.hidden
        return other

    def view(self, need: int = 0, *, opens: bool = False) -> View:
        session, engine, ledger = self._session, self._session.engine, self._session._transcript.ledger
        shared = ledger.columns.visible & ledger.shares.elsewhere(ledger.columns.cell)
        return View(
            session.spans,
            session.indexes(),
            engine.num_cells,
            engine.cells_free + len(self._freeable()),
            need,
            opens,
            ledger.places.indexes_of(np.flatnonzero(shared)),
            engine.cells_used - ledger.num_own_cells,
        )

    def _freeable(self) -> npt.NDArray[np.int64]:
        """The indexes of masked tokens whose cells no fork holds, in reading order."""
        ledger = self._session._transcript.ledger
        masked = ledger.columns.where(State.MASKED)
        return ledger.places.indexes_of(np.flatnonzero(masked & ~ledger.shares.elsewhere(ledger.columns.cell)))

    def plan(self, policy: Policy | None, need: int, reserve: int = 0, *, opens: bool) -> tuple[Cut, ...]:
        """What to hide so that ``need`` cells are free, and ``reserve`` more where that can be; ``opens`` as in View.
        Raises ContextFull, with what helps."""
        view = self.view(need, opens=opens)
        if policy is not None:
            return policies.make_room(policy, view, reserve)
        if view.free >= need:
            return ()
        room = f"{count(need, 'cell')} are needed, and {view.free:,} of {view.cells:,} can be made free"
        mask = self._session.model.capabilities.mask
        if not mask:
            raise ContextFull(f"{room}: {mask.reason}; begin a new chat, or open with a larger n_ctx")
        policies.make_room(policies.NONE, view)  # raises where no policy would help
        raise ContextFull(f"{room}, as this chat hides nothing by itself; give it a policy, such as hide_oldest()")

    def hide_cuts(self, cuts: Iterable[Cut], then: str = "none") -> list[Receipt]:
        return self.hide((i for cut in cuts for a, b in cut.ranges for i in range(a, b)), then=then)

    def hide(self, indexes: Iterable[int], *, then: str = "none", refresh_last: bool = True) -> list[Receipt]:
        """Hide those of these tokens that are visible, but sinks. ``then``, ``refresh_last``: as in Session.mask."""
        wanted = np.unique(np.fromiter(indexes, np.int64))
        here = np.setdiff1d(np.intersect1d(wanted, self._session.indexes()), self._sinks)
        if not len(here):
            return []
        target, gap = self._session.ranges(here), self._gap
        with self._session.lock:
            before = self._session.last_edit
            try:
                return [self._session.mask(target, gap=gap, then=then, refresh_last=refresh_last)]
            except MaskUnsupported:  # no archive has room for them, and they cannot be moved to where there is some
                return [self._session.evict(target)]
            except ContextFull:
                edit = self._session.last_edit
                if edit is None or edit is before:
                    raise
                return [edit]  # masked, and no room to evaluate again what comes after
            finally:
                self.hidden = np.union1d(self.hidden, np.setdiff1d(here, self._session.indexes()))

    @property
    def _gap(self) -> str:
        """How to hide: to close a gap, cells that a fork holds too are copied first, which takes free ones."""
        return "keep" if len(self.view().shared) else "close"

    @property
    def _sinks(self) -> npt.NDArray[np.int64]:
        """The first tokens, and those that are the first in view."""
        return np.concatenate([np.arange(NUM_SINKS), self._session.indexes()[:NUM_SINKS]])

    def but_sinks(self, target: Target) -> Target:
        """A target without sinks; as it is where it is nothing else, which the session refuses."""
        index = self._session.indexes_of(target)
        left = np.setdiff1d(index, self._sinks)
        return self._session.ranges(left) if 0 < len(left) < len(index) else target

    def mine(self, ranges: Iterable[Range]) -> None:
        """What the template hid."""
        index = [np.arange(a, b) for a, b in ranges]
        self.hidden = np.union1d(self.hidden, np.concatenate(index)) if index else self.hidden
        self.shown()

    def shown(self) -> None:
        """What is visible is hidden no longer."""
        self.hidden = np.setdiff1d(self.hidden, self._session.indexes())

    def _oldest(self, num: int) -> npt.NDArray[np.int64]:
        """The first tokens whose cells can be given up, at least that many, up to the end of a turn."""
        masked = self._freeable()
        last = masked[num - 1 : num]
        ends = [s.stop for s in self._session.spans if TURN in s.tags and len(last) and s.start <= last[0] < s.stop]
        return masked if not ends else masked[(np.arange(len(masked)) < num) | (masked < min(ends))]

    def free(self, num: int, least: int = 0) -> list[Receipt]:
        """Give up cells of hidden tokens, those in front first, until ``num`` are free or none is left; where not
        even ``least`` would be free, none is given up."""
        engine, receipts = self._session.engine, list[Receipt]()
        missing = num - engine.cells_free
        if missing <= 0 or engine.cells_free + len(self._freeable()) < least:
            return receipts
        chosen = self._oldest(max(missing, engine.num_cells // _AT_ONCE))
        by_hand, gap = ~np.isin(chosen, self.hidden), self._gap
        for index, verb in ((chosen[by_hand], "park"), (chosen[~by_hand], self.spill)):
            if len(index):
                with contextlib.suppress(BadState):
                    ranges = self._session.ranges(index)
                    hide = self._session.park if verb == "park" else self._session.evict
                    receipts.append(hide(ranges, gap=gap))
        return receipts
