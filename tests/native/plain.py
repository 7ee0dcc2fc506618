"""A session as a person would write it down: a list of tokens in reading order.

It knows nothing of positions, runs, archives, epochs or shared cells. The layout follows from one sentence, and every
token remembers which tokens its K and V came from.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from edgekv import State

NUM_SINKS = 4
IN_CELLS = (State.VISIBLE, State.MASKED)
HAS_KV = (*IN_CELLS, State.PARKED)
TO = {"mask": State.MASKED, "park": State.PARKED, "evict": State.EVICTED}


@dataclass(frozen=True)
class Reading:
    """What a token's K and V come from: the tokens it saw, each in the version of then, whether behind a gap, all that
    those depend on, and whether it was to see no others."""

    saw: frozenset[tuple[int, int]] = frozenset()
    gap: bool = False
    depends: frozenset[int] = frozenset()
    alone: bool = False


@dataclass
class Token:
    uid: int  # its index: the how-manieth token of the session it is
    id: int
    state: State = State.VISIBLE
    reserved: bool = False
    replaced: bool = False  # another text took its place
    reading: Reading = Reading()
    original: Reading | None = None
    restored: bool = False
    version: int = 0


@dataclass
class Undo:
    """What one edit changed: tokens by uid with their state, reserved place and whether replaced, before it."""

    verb: str
    former: dict[int, tuple[State, bool, bool]]


@dataclass
class Plain:
    can_shift: bool
    tokens: list[Token] = field(default_factory=list)
    edits: list[Undo] = field(default_factory=list)

    def fork(self) -> Plain:
        return copy.deepcopy(self)

    # -- looking --------------------------------------------------------------------------------------------------

    def visible(self) -> list[int]:
        return [i for i, t in enumerate(self.tokens) if t.state == State.VISIBLE]

    def row(self, uid: int) -> int:
        return next(i for i, t in enumerate(self.tokens) if t.uid == uid)

    def uids(self, rows: Iterable[int]) -> set[int]:
        return {self.tokens[i].uid for i in rows}

    def rows_between(self, start: int, stop: int) -> set[int]:
        """The rows an index range means: those tokens, and what was inserted between neighbours."""
        rows = {self.row(uid) for uid in range(start, stop)}
        for uid in range(start, stop - 1):
            a, b = self.row(uid), self.row(uid + 1)
            if a < b and all(self.tokens[i].uid > uid + 1 for i in range(a + 1, b)):
                rows |= set(range(a, b))
        return rows

    def read_now(self, row: int, seen: Iterable[int] | None = None, *, alone: bool = False) -> Reading:
        """What the token at ``row`` would come from if it were computed now, seeing ``seen`` (rows)."""
        rows = [i for i in (self.visible() if seen is None else seen) if i < row]
        saw = frozenset((self.tokens[i].uid, self.tokens[i].version) for i in rows)
        gap = any(t.reserved for t in self.tokens[:row])
        depends = frozenset(self.uids(rows)).union(*(self.tokens[i].reading.depends for i in rows))
        return Reading(saw, gap, depends, alone)

    def influenced_by(self, hidden: set[int]) -> set[int]:
        """The rows of visible tokens that depend on these rows."""
        uids = self.uids(hidden)
        return {i for i in self.visible() if i not in hidden and self.tokens[i].reading.depends & uids}

    def is_right_alone(self, row: int) -> bool:
        """An isolated token that saw what is visible still, as it is still."""
        reading = self.tokens[row].reading
        now = {(self.tokens[i].uid, self.tokens[i].version) for i in self.visible()}
        return reading.alone and not reading.gap and reading.saw <= now and not self.depends_on_hidden(row)

    def depends_on_hidden(self, row: int) -> bool:
        hidden = {t.uid for t in self.tokens if t.state != State.VISIBLE}
        return bool(self.tokens[row].reading.depends & hidden)

    def first_inexact(self) -> int:
        """The first visible token that a restart would compute or place otherwise; the number of tokens for none."""
        gap = False
        for row, token in enumerate(self.tokens):
            gap |= token.reserved and not self.can_shift
            if token.state != State.VISIBLE or self.is_right_alone(row):
                continue
            wrong = token.reading.gap or token.reading.saw != self.read_now(row).saw
            if gap or wrong or token.reading.alone or self.depends_on_hidden(row):
                return row
        return len(self.tokens)

    def is_exact(self) -> bool:
        visible = self.visible()
        if not visible or any(t.reserved for t in self.tokens[: visible[-1]]):
            return False
        readings = [(self.tokens[i].reading, self.read_now(i)) for i in visible]
        return all(was.saw == now.saw and not was.gap for was, now in readings)

    # -- reading --------------------------------------------------------------------------------------------------

    def append(self, ids: Sequence[int], seen: Iterable[int] | None = None) -> None:
        self.place(len(self.tokens), ids, seen)

    def attach(self, ids: Sequence[int], attended: Sequence[int]) -> None:
        """A module, which saw the tokens the session begins with, or foreign ones."""
        first = self.visible()[: len(attended)]
        foreign = [self.tokens[i].id for i in first] != list(attended)
        row = len(self.tokens)
        self.append(ids, [] if foreign else first)
        for token in self.tokens[row:]:
            token.reading = replace(token.reading, gap=token.reading.gap or foreign)

    def place(self, row: int, ids: Sequence[int], seen: Iterable[int] | None = None) -> None:
        """New tokens in front of ``row``; ``seen`` are the rows an isolated text is to see, it sees itself, too."""
        new = [Token(len(self.tokens) + n, token) for n, token in enumerate(ids)]
        self.tokens[row:row] = new
        for at in range(row, row + len(new)):
            rows = None if seen is None else [*seen, *range(row, at)]
            self.tokens[at].reading = self.read_now(at, rows, alone=seen is not None)

    def recompute(self, began: int, told: Sequence[int] | None) -> list[int]:
        """Read the visible tokens from row ``began`` on, or those ``told``; isolated ones that are right are left."""
        rows = [i for i in self.visible() if i >= began]
        again = []
        for row in rows:
            if row in told if told is not None else not self.is_right_alone(row):
                again.append(row)
                self.read_again([row])
        return again

    def read_again(self, rows: Iterable[int]) -> None:
        for row in rows:
            token = self.tokens[row]
            token.version += 1
            token.reading, token.original = self.read_now(row), None

    # -- edits ----------------------------------------------------------------------------------------------------

    def free_tail(self) -> None:
        last = max(self.visible(), default=-1)
        for token in self.tokens[last + 1 :]:
            token.reserved = False

    @contextlib.contextmanager
    def noted(self, verb: str) -> Iterator[None]:
        """What the block changes can be undone."""
        before = {t.uid: (t.state, t.reserved, t.replaced) for t in self.tokens}
        yield
        self.free_tail()
        now = {t.uid: (t.state, t.reserved, t.replaced) for t in self.tokens}
        gone = (State.DROPPED, False, False)
        changed = {u: before.get(u, gone) for u in now if before.get(u) != now[u]}
        self.edits += [Undo(verb, changed)] if changed else []

    def hide(self, verb: str, rows: set[int], *, keep: bool) -> None:
        with self.noted(verb):
            for row in rows:
                token = self.tokens[row]
                if token.state == State.VISIBLE:
                    token.reserved = keep
                elif not keep and verb != "mask":
                    token.reserved = False
                token.state = TO[verb]

    def unmask(self, rows: set[int]) -> None:
        with self.noted("unmask"):
            for row in rows:
                token = self.tokens[row]
                token.state, token.reserved, token.replaced = State.VISIBLE, False, False

    def to_unmask(self, rows: set[int]) -> set[int]:
        """The masked and parked ones; a text that was replaced only where nothing else is asked for."""
        masked = {i for i in rows if self.tokens[i].state in (State.MASKED, State.PARKED)}
        others = {i for i in masked if not self.tokens[i].replaced}
        return others or masked

    def rewind(self, row: int) -> None:
        with self.noted("rewind"):
            for token in self.tokens[row:]:
                token.state, token.reserved, token.original = State.DROPPED, False, None

    def insert(self, row: int, ids: Sequence[int], hidden: set[int] | None = None) -> None:
        """Insert, or replace ``hidden``: hidden tokens right behind that keep their place give it to the new ones."""
        with self.noted("replace" if hidden else "insert"):
            for i in hidden or ():
                self.tokens[i].state, self.tokens[i].reserved = State.MASKED, not self.can_shift
                self.tokens[i].replaced = True
            behind = row
            while behind < min(len(self.tokens), row + len(ids)) and self.tokens[behind].reserved:
                self.tokens[behind].reserved = False
                behind += 1
            self.place(row, ids)

    def keep_places(self, former: Iterable[int], before: dict[int, tuple[State, bool]]) -> None:
        """Where nothing can move, dropped tokens leave a gap unless as many others take their places."""
        mine = [t for t in self.tokens if t.uid in former]
        taken = sum(t.state == State.VISIBLE or t.reserved for t in mine)
        if self.can_shift or taken >= sum(s == State.VISIBLE or r for s, r in before.values()):
            return
        for token in mine:
            if token.state == State.DROPPED and before[token.uid][0] == State.VISIBLE:
                token.reserved = True

    def to_read(self) -> list[int]:
        """The rows that an undo would have to read."""
        former = self.edits[-1].former
        rows = [(i, t) for i, t in enumerate(self.tokens) if t.uid in former]
        return [i for i, t in rows if former[t.uid][0] in HAS_KV and t.state not in HAS_KV]

    def to_load(self) -> int:
        """How many tokens an undo would bring back from where they are parked."""
        former = self.edits[-1].former
        return sum(t.uid in former and former[t.uid][0] in IN_CELLS and t.state == State.PARKED for t in self.tokens)

    def undo(self) -> None:
        to_read = self.to_read()
        former = self.edits.pop().former
        before = {t.uid: (t.state, t.reserved) for t in self.tokens if t.uid in former}
        for row, token in enumerate(self.tokens):
            if token.uid not in former or row in to_read:
                continue
            token.state, token.reserved, token.replaced = former[token.uid]
        self.keep_places(former, before)
        self.free_tail()
        hidden = [i for i in to_read if former[self.tokens[i].uid][0] != State.VISIBLE]
        for run in sorted([*_runs([i for i in to_read if i not in hidden]), *_runs(hidden)]):
            for row in run:
                token = self.tokens[row]
                token.state, token.reserved, token.replaced = former[token.uid]
                token.state = State.VISIBLE if row not in hidden or self.can_shift else State.MASKED
                token.restored |= not self.can_shift  # it may have seen more, on the way to its position
            if not self.can_shift:
                for token in self.tokens:
                    if former.get(token.uid, (State.VISIBLE,))[0] != State.VISIBLE:
                        token.reserved = former[token.uid][1]
            self.free_tail()
            self.read_again(run)
            for row in run:
                token = self.tokens[row]
                token.state, token.reserved, token.replaced = former[token.uid]
            self.free_tail()
        for token in self.tokens if to_read else ():
            if token.uid in former:
                token.state, token.reserved, token.replaced = former[token.uid]
        self.free_tail()


def _runs(rows: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for row in rows:
        if runs and runs[-1][-1] == row - 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs
