"""The layout of positions, and the steps that bring cells there.

The members of a layout are the visible tokens and the masked ones whose place is reserved (``gap="keep"``). They
stand at consecutive positions in index order, and the last visible one stays where it is: so the suffix and the
cursor keep still and earlier tokens move up. Hidden tokens behind the last visible one reserve nothing: masking the
tail moves the cursor back, which equals a restart.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .columns import Columns, Flags, runs_of
from .steps import Move, Shift, Step

Positions = npt.NDArray[np.int32]


def wanted_positions(columns: Columns, anchors: Flags) -> Positions:
    """int32 (n,): the position wanted for every member, others as they are.

    The last of the ``anchors`` (visible tokens that stay) keeps its position; without any, the first visible token
    does. Where the first member would fall below 0, everything moves up.
    """
    wanted = columns.pos.copy()
    members = np.flatnonzero(columns.visible | columns.reserved)
    fixed = np.flatnonzero(anchors[members])
    rank = int(fixed[-1]) if len(fixed) else _first(columns.visible[members])
    if rank < 0:
        return wanted
    start = max(0, int(columns.pos[members[rank]]) - rank)
    wanted[members] = start + np.arange(len(members), dtype=np.int32)
    return wanted


def shift_steps(live: int, staying: Flags, pos: Positions, wanted: Positions) -> list[Step]:
    """Move visible tokens: runs that go up from the last to the first, then those that go down, first to last.

    Tokens keep their order, so in this sequence no run moves onto another.
    """
    delta = np.where(staying, wanted - pos, 0)
    found = [
        Shift(live, int(pos[i[0]]), int(pos[i[0]]) + len(i), int(delta[i[0]]))
        for i in runs_of(staying & (delta != 0), pos, delta)
    ]
    return [*(s for s in reversed(found) if s.delta > 0), *(s for s in found if s.delta < 0)]


def return_steps(live: int, coming: Flags, source: Columns, wanted: Positions) -> list[Step]:
    """Bring hidden cells from their archives to the places wanted for them."""
    delta = wanted - source.pos
    return [
        Move(int(source.seq[i[0]]), live, int(source.pos[i[0]]), int(source.pos[i[0]]) + len(i), int(delta[i[0]]))
        for i in runs_of(coming, source.pos, delta, source.seq)
    ]


def _first(flags: Flags) -> int:
    """The index of the first True, -1 for none."""
    return int(flags.argmax()) if flags.any() else -1
