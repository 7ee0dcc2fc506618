"""Random edits against a plain-Python model of them, with an audit of llama.cpp's cells after every step.

The model knows nothing of positions runs, archives or epochs: it keeps a list of tokens with their state, works out
the layout from the one-sentence rule, and remembers for every token the set of tokens its K and V depend on.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgekv import Model, Receipt, Session, Settings, State, errors, tiny

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
PLAN = settings(
    max_examples=500 if NIGHTLY else 50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    phases=(
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
        *((Phase.shrink,) if NIGHTLY else ()),
    ),  # shrinking takes minutes
)
_FOLDER = tempfile.TemporaryDirectory()
_MODELS: dict[str, Model] = {}


def model_of(kind: str) -> Model:
    if kind not in _MODELS:
        _MODELS[kind] = Model(tiny.write(Path(_FOLDER.name) / f"{kind}.gguf", kind))
    return _MODELS[kind]


@dataclass(frozen=True)
class Reading:
    """What a token's K and V come from: the tokens it saw, each in the version of then, whether behind a gap, and all
    that those depend on."""

    saw: frozenset[tuple[int, int]] = frozenset()
    gap: bool = False
    depends: frozenset[int] = frozenset()


@dataclass
class Token:
    id: int
    state: State = State.VISIBLE
    reserved: bool = False
    reading: Reading = Reading()
    original: Reading | None = None
    restored: bool = False
    version: int = 0


@dataclass
class Plain:
    """The transcript, as a person would write it down."""

    tokens: list[Token] = field(default_factory=list)

    def visible(self) -> list[int]:
        return [i for i, t in enumerate(self.tokens) if t.state == State.VISIBLE]

    def read_now(self, index: int) -> Reading:
        """What token ``index`` would come from if it were computed now."""
        seen = frozenset(i for i in self.visible() if i < index)
        saw = frozenset((i, self.tokens[i].version) for i in seen)
        gap = any(t.reserved for t in self.tokens[:index])
        return Reading(saw, gap, seen.union(*(self.tokens[i].reading.depends for i in seen)))

    def append(self, ids: list[int]) -> None:
        for token in ids:
            self.tokens.append(Token(token))
            self.tokens[-1].reading = self.read_now(len(self.tokens) - 1)

    def free_tail(self) -> None:
        last = max(self.visible(), default=-1)
        for token in self.tokens[last + 1 :]:
            token.reserved = False

    def influenced_by(self, hidden: set[int]) -> set[int]:
        return {i for i in self.visible() if i not in hidden and self.tokens[i].reading.depends & hidden}


class Machine(RuleBasedStateMachine):
    kind: ClassVar[str] = "llama"

    @initialize()
    def open(self) -> None:
        plan = Settings(n_ctx=256, n_batch=32, kv_type="f32", flash_attention=False, n_archives=3, n_threads=1)
        self.session = Session(model_of(self.kind), settings=plan)
        self.plain = Plain()

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.close()

    # -- verbs ----------------------------------------------------------------------------------------------------

    @rule(ids=st.lists(st.integers(4, 259), min_size=1, max_size=40))
    def append(self, ids: list[int]) -> None:
        try:
            self.session.append(ids)
        except errors.ContextFull:
            assert self.free < len(ids)
        else:
            self.plain.append(ids)

    @rule(count=st.integers(1, 6))
    @precondition(lambda self: self.plain.visible())
    def generate(self, count: int) -> None:
        generation = self.session.generate(count)
        before = self.note_reread()
        try:
            generation.finish()
        except errors.ContextFull:
            assert self.free == 0
        self.after_reread(before)
        self.plain.append(generation.tokens)

    @rule()
    @precondition(lambda self: self.plain.visible())
    def look(self) -> None:
        before = self.note_reread()
        self.session.logits()
        self.after_reread(before)

    @rule(count=st.integers(1, 12))
    @precondition(lambda self: self.plain.visible())
    def score(self, count: int) -> None:
        before = self.note_reread()
        logits = self.session.logits()
        self.after_reread(before)
        try:
            assert len(self.session.score(list(range(4, 4 + count)))) == count
        except errors.ContextFull:
            assert self.free < count
        assert np.array_equal(self.session.logits(), logits)

    @rule(data=st.data(), gap=st.sampled_from(["close", "keep"]), verb=st.sampled_from(["mask", "evict"]))
    @precondition(lambda self: self.plain.tokens)
    def hide(self, data: st.DataObject, gap: str, verb: str) -> None:
        target = self.draw_ranges(data)
        chosen = self.chosen(target, (State.VISIBLE,) if verb == "mask" else (State.VISIBLE, State.MASKED))
        last = max(self.plain.visible(), default=-1)
        cursor = self.session.stats.cursor
        receipt = self.unless_refused(chosen, lambda: getattr(self.session, verb)(target, gap=gap, force=True))
        if receipt is None:
            return
        gap = gap if self.can_shift else "keep"
        for i in chosen:
            token = self.plain.tokens[i]
            if token.state == State.VISIBLE:
                token.reserved = gap == "keep"
            elif gap == "close":
                token.reserved = False
            token.state = State.MASKED if verb == "mask" else State.EVICTED
        self.plain.free_tail()
        self.note_restored()
        assert receipt.tokens == len(chosen)
        assert receipt.prefilled == 0
        if last not in chosen and last >= 0:
            assert self.session.stats.cursor == cursor, "the suffix moved"
        self.check_influence(chosen, receipt.influenced)

    @rule(data=st.data())
    @precondition(lambda self: any(t.state == State.MASKED for t in self.plain.tokens))
    def unmask(self, data: st.DataObject) -> None:
        target = self.draw_ranges(data)
        chosen = self.chosen(target, (State.MASKED,))
        if self.unless_refused(chosen, lambda: self.session.unmask(target)) is None:
            return
        for i in chosen:
            self.plain.tokens[i].state = State.VISIBLE
            self.plain.tokens[i].reserved = False
        self.plain.free_tail()
        self.note_restored()

    @rule(data=st.data())
    @precondition(lambda self: self.plain.tokens)
    def rewind(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(max(0, len(self.plain.tokens) - 30), len(self.plain.tokens)))
        self.session.rewind(index)
        for token in self.plain.tokens[index:]:
            token.state, token.reserved, token.original = State.DROPPED, False, None
        self.plain.free_tail()

    @rule()
    @precondition(lambda self: self.plain.visible())
    def recompute(self) -> None:
        first = self.first_inexact()
        try:
            receipt = self.session.recompute()
        except errors.ContextFull:
            assert self.free < len(self.plain.visible())
            receipt = None
        if receipt is not None or self.can_shift:
            for token in self.plain.tokens:
                token.reserved = False
        if receipt is None:
            return
        began = receipt.ranges[0][0] if receipt.ranges else len(self.plain.tokens)
        assert began <= first
        assert began == first or any(t.restored for t in self.plain.tokens)
        again = [i for i in self.plain.visible() if i >= began]
        assert receipt.prefilled == len(again)
        for i in again:
            self.plain.tokens[i].version += 1
            self.plain.tokens[i].reading, self.plain.tokens[i].original = self.plain.read_now(i), None
        assert self.is_exact()

    def first_inexact(self) -> int:
        """The first visible token that a restart would compute or place otherwise; the number of tokens for none."""
        tokens = self.plain.tokens
        hidden = {i for i, t in enumerate(tokens) if t.state in (State.MASKED, State.EVICTED)}
        gap = False
        for i, token in enumerate(tokens):
            gap |= token.reserved and not self.can_shift
            if token.state == State.VISIBLE and (
                gap
                or token.reading.gap
                or token.reading.saw != self.plain.read_now(i).saw
                or token.reading.depends & hidden
            ):
                return i
        return len(tokens)

    # -- what the model needs to be told: that one token was read again, or its first reading came back -------------

    def note_reread(self) -> int | None:
        return max(self.plain.visible()) if self.session._transcript.record.needs_reread else None

    def after_reread(self, index: int | None) -> None:
        if index is None:
            return
        before = max((i for i in self.plain.visible() if i < index), default=None)
        for hidden in self.plain.tokens[index if before is None else before + 1 : index]:
            hidden.reserved = False  # it is read right behind the one before it
        token = self.plain.tokens[index]
        if token.original is None and self.session._ledger.has_original(index):
            token.original = token.reading
        token.reading = self.plain.read_now(index)

    def note_restored(self) -> None:
        for i, token in enumerate(self.plain.tokens):
            if token.original is None or self.session._ledger.has_original(i):
                continue
            if token.state == State.VISIBLE:
                token.reading, token.restored = token.original, True
            token.original = None

    # -- what must hold after every step ----------------------------------------------------------------------------

    @invariant()
    def cells_are_what_the_ledger_says(self) -> None:
        if hasattr(self, "session"):
            self.session.audit()
            assert self.session.engine.cells_used == self.session._ledger.num_cells

    @invariant()
    def visible_tokens_are_the_model_s(self) -> None:
        if not hasattr(self, "session"):
            return
        ids = [self.plain.tokens[i].id for i in self.plain.visible()]
        assert self.session._ledger.visible_tokens.tolist() == ids
        states = [int(t.state) for t in self.plain.tokens]
        assert self.session._ledger.columns.state.tolist() == states

    @invariant()
    def positions_follow_the_rule(self) -> None:
        """Visible tokens stand in index order with exactly the reserved places between them."""
        if not hasattr(self, "session") or not self.plain.visible():
            return
        pos = self.session._ledger.columns.pos
        members = [i for i, t in enumerate(self.plain.tokens) if t.state == State.VISIBLE or t.reserved]
        first = next(n for n, i in enumerate(members) if self.plain.tokens[i].state == State.VISIBLE)
        start = int(pos[members[first]]) - first
        assert start >= 0
        for place, i in enumerate(members):
            if self.plain.tokens[i].state == State.VISIBLE:
                assert pos[i] == start + place

    @rule()
    @precondition(lambda self: self.plain.visible() and self.is_exact())
    def exact_means_a_restart(self) -> None:
        """Where every visible token saw exactly the visible tokens before it, a fresh prefill gives the same."""
        before = self.note_reread()
        logits = self.session.logits()
        self.after_reread(before)
        if not self.is_exact():
            return
        with Session(self.session.model, settings=self.session.engine.settings) as restart:
            restart.append(self.session._ledger.visible_tokens)
            assert np.abs(restart.logits() - logits).max() < 2e-2  # f32; hiding a token moves logits by about 1

    def is_exact(self) -> bool:
        visible = self.plain.visible()
        if any(t.reserved for t in self.plain.tokens[: visible[-1]]):
            return False
        readings = [(self.plain.tokens[i].reading, self.plain.read_now(i)) for i in visible]
        return all(was.saw == now.saw and not was.gap for was, now in readings)

    def check_influence(self, chosen: set[int], told: int) -> None:
        """Never fewer than there are; exactly as many unless a first reading came back meanwhile."""
        really = self.plain.influenced_by(chosen)
        found = {i for a, b in self.session.influenced_by(self.as_ranges(chosen)) for i in range(a, b)}
        assert really <= found
        assert told == len(found)
        if not any(t.restored for t in self.plain.tokens):
            assert really == found

    def unless_refused(self, chosen: set[int], edit: Callable[[], Receipt]) -> Receipt | None:
        """The receipt of an edit, None where it was rightly refused: nothing to do, or a shift that cannot be."""
        try:
            return edit()
        except errors.MaskUnsupported:
            assert not self.can_shift
        except errors.UsageError:
            assert not chosen
        return None

    # -- helpers ----------------------------------------------------------------------------------------------------

    @property
    def can_shift(self) -> bool:
        return self.session.engine.can_shift

    @property
    def free(self) -> int:
        return self.session.engine.cells_free

    def draw_ranges(self, data: st.DataObject) -> list[tuple[int, int]]:
        total = len(self.plain.tokens)
        starts = data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=3))
        return [(a, min(total, a + data.draw(st.integers(1, 30)))) for a in starts]

    def chosen(self, ranges: list[tuple[int, int]], states: tuple[State, ...]) -> set[int]:
        return {i for a, b in ranges for i in range(a, b) if self.plain.tokens[i].state in states}

    @staticmethod
    def as_ranges(indexes: set[int]) -> list[tuple[int, int]]:
        return [(i, i + 1) for i in sorted(indexes)]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "yarn", "mrope"])
def test_random_edits(kind: str) -> None:
    machine = type(f"Machine_{kind}", (Machine,), {"kind": kind}).TestCase
    machine.settings = PLAN
    machine("runTest").runTest()
