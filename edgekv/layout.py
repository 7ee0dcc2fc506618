"""The layout of positions, and the steps that bring cells there.

The members of a layout are the visible tokens and the hidden ones whose place is reserved (``gap="keep"``). They
stand at consecutive positions in reading order, and the last visible one stays where it is: so the suffix and the
cursor keep still and earlier tokens move up. Hidden tokens behind the last visible one reserve nothing: masking the
tail moves the cursor back, which equals a restart.

As earlier tokens only move up, positions grow with every token ever read. RoPE turns by angles that grow with them,
in float32: so where the last position passes ``REBASE_AT``, the layout begins at 0 again.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from .columns import Columns, Flags, runs_of
from .steps import Move, Shift, Step

Positions = npt.NDArray[np.int32]

REBASE_AT: Final = 1 << 17


def wanted_positions(columns: Columns, anchors: Flags, *, rebase: bool = True) -> Positions:
    """int32 (n,): the position wanted for every member, others as they are.

    The last of the ``anchors`` (visible tokens that stay) keeps its position; without any, the first visible token
    does. Where the first member would fall below 0, everything moves up; ``rebase``: where the last one would pass
    ``REBASE_AT``, everything moves down.
    """
    wanted = columns.pos.copy()
    members = np.flatnonzero(columns.visible | columns.reserved)
    fixed = np.flatnonzero(anchors[members])
    rank = int(fixed[-1]) if len(fixed) else _first(columns.visible[members])
    if rank < 0:
        return wanted
    start = max(0, int(columns.pos[members[rank]]) - rank)
    if rebase and start + len(members) > REBASE_AT:
        start = 0
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
    """Bring cells from where they wait to the places wanted for them."""
    delta = wanted - source.pos
    return [
        Move(int(source.seq[i[0]]), live, int(source.pos[i[0]]), int(source.pos[i[0]]) + len(i), int(delta[i[0]]))
        for i in runs_of(coming, source.pos, delta, source.seq)
    ]


def _first(flags: Flags) -> int:
    """The index of the first True, -1 for none."""
    return int(flags.argmax()) if flags.any() else -1
