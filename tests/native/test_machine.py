"""Random edits of several forks against plain-Python models of them, with an audit of llama.cpp's cells after every
step, and now and then a restart of what is visible to compare with."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plain import HAS_KV, IN_CELLS, NUM_SINKS, TO, Plain

from edgekv import (
    Engine,
    Generation,
    Model,
    Receipt,
    Session,
    Settings,
    State,
    decode_together,
    errors,
    layout,
    prefill,
    tiny,
)
from edgekv.spans import merge
from helpers import cells_in_llama, python

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
PLAN = settings(max_examples=500 if NIGHTLY else 15, stateful_step_count=40, suppress_health_check=list(HealthCheck))
_FOLDER = tempfile.TemporaryDirectory()
_MODELS: dict[str, Model] = {}


def model_of(kind: str) -> Model:
    if kind not in _MODELS:
        _MODELS[kind] = Model(tiny.write(Path(_FOLDER.name) / f"{kind}.gguf", kind))
    return _MODELS[kind]


MODULE = "The bearing is a 6319 C3."


def module_of(kind: str) -> Path:
    """A text read once, behind the model's own first token."""
    path = Path(_FOLDER.name) / f"{kind}.kv"
    if not path.exists():
        prefill(MODULE, path, model_of(kind), settings=PLAIN_CACHE)
    return path


IDS = st.integers(4, 259)
MOST_FORKS = 3
FAR = 200
PLAIN_CACHE = Settings(
    n_ctx=256, n_batch=32, kv_type="f32", flash_attention=False, n_archives=3, n_threads=1, n_sessions=MOST_FORKS
)


def seen_of(session: Session) -> tuple[Any, ...]:
    """What a load must bring back, as JSON has it,."""
    spans = [[s.name, s.start, s.stop, s.role, sorted(s.tags)] for s in session.spans]
    columns = session._ledger.columns
    return (session.tokens.tolist(), columns.state.tolist(), columns.reserved.tolist(), spans, len(session.history))


_LOAD = """
import json, sys
sys.path.insert(0, "tests/native")
from edgekv import Session
from test_machine import seen_of
with Session.load(sys.argv[1], n_threads=1) as session:
    session.audit()
    print(json.dumps(seen_of(session)))
"""


class Actor:
    """A session and the model of it."""

    def __init__(self, session: Session, plain: Plain, name: str = "first") -> None:
        self.session, self.plain, self.name = session, plain, name

    def __repr__(self) -> str:
        return self.name

    @property
    def free(self) -> int:
        return self.session.engine.cells_free

    # -- what the model needs to be told: that one token was read again, or its first reading came back -------------

    def note_reread(self) -> int | None:
        return max(self.plain.visible()) if self.session._transcript.record.needs_reread else None

    def after_reread(self, row: int | None) -> None:
        if row is None:
            return
        before = max((i for i in self.plain.visible() if i < row), default=None)
        for hidden in self.plain.tokens[row if before is None else before + 1 : row]:
            hidden.reserved = False  # it is read right behind the one before it
        token = self.plain.tokens[row]
        if token.original is None and self.session._ledger.has_original(row):
            token.original = token.reading
        changed = {uid for uid, _ in token.reading.saw} != {uid for uid, _ in self.plain.read_now(row).saw}
        if changed or not token.reading.alone:
            token.reading = self.plain.read_now(row)

    def note_restored(self) -> None:
        for i, token in enumerate(self.plain.tokens):
            if token.original is None or self.session._ledger.has_original(i):
                continue
            if token.state == State.VISIBLE:
                token.reading, token.restored = token.original, True
            token.original = None

    def look(self) -> np.ndarray:
        before = self.note_reread()
        logits = self.session.logits()
        self.after_reread(before)
        return logits

    # -- what must hold after every step ----------------------------------------------------------------------------

    def check(self) -> None:
        session, plain = self.session, self.plain
        session.audit()
        assert session.visible_tokens.tolist() == [plain.tokens[i].id for i in plain.visible()]
        assert session._ledger.columns.state.tolist() == [int(t.state) for t in plain.tokens]
        by_uid = sorted(plain.tokens, key=lambda t: t.uid)
        assert session.tokens.tolist() == [t.id for t in by_uid]
        self.check_positions()

    def check_positions(self) -> None:
        """Visible tokens stand in reading order with exactly the reserved places between them."""
        tokens, pos = self.plain.tokens, self.session._ledger.columns.pos
        members = [i for i, t in enumerate(tokens) if t.state == State.VISIBLE or t.reserved]
        seen = [(place, i) for place, i in enumerate(members) if tokens[i].state == State.VISIBLE]
        assert len({int(pos[i]) - place for place, i in seen}) <= 1
        assert all(int(pos[i]) >= place for place, i in seen)

    def check_influence(self, chosen: set[int], told: int) -> None:
        """Never fewer than there are; exactly as many unless a first reading came back meanwhile."""
        really = self.plain.influenced_by(chosen)
        ranges = [(uid, uid + 1) for uid in sorted(self.plain.uids(chosen))]
        found = {self.plain.row(uid) for a, b in self.session.influenced_by(ranges) for uid in range(a, b)}
        assert really <= found
        assert told == len(found)
        if not any(t.restored for t in self.plain.tokens):
            assert really == found


class Machine(RuleBasedStateMachine):
    kind: ClassVar[str] = "llama"

    @initialize(begins=st.booleans())
    def open(self, begins: bool) -> None:
        self.engine = Engine(model_of(self.kind), PLAIN_CACHE)
        session = Session(self.engine)
        self.actors, self.forks, self.processes = [Actor(session, Plain(session.engine.can_shift))], 0, 0
        if begins:  # with the tokens a module was read behind
            session.append(self.attended)
            self.actors[0].plain.append(self.attended)

    @property
    def attended(self) -> list[int]:
        bos = model_of(self.kind).bos
        return [] if bos is None else [bos]

    def teardown(self) -> None:
        for actor in getattr(self, "actors", []):
            actor.session.close()
        if hasattr(self, "engine"):
            self.engine.close()

    def one(self, data: st.DataObject, *, visible: bool = False) -> Actor | None:
        """One of the actors, with visible tokens where that is asked for."""
        fit = [a for a in self.actors if a.plain.visible() or not visible]
        return data.draw(st.sampled_from(fit)) if fit else None

    # -- reading --------------------------------------------------------------------------------------------------

    @rule(data=st.data(), ids=st.lists(IDS, min_size=1, max_size=40))
    def append(self, data: st.DataObject, ids: list[int]) -> None:
        actor = self.one(data)
        assert actor is not None
        try:
            actor.session.append(ids)
        except errors.ContextFull:
            assert actor.free < len(ids)
        else:
            actor.plain.append(ids)

    @rule(data=st.data(), ids=st.lists(IDS, min_size=1, max_size=20))
    def append_alone(self, data: st.DataObject, ids: list[int]) -> None:
        if (actor := self.one(data, visible=True)) is None:
            return
        session, plain = actor.session, actor.plain
        target = self.draw_ranges(data, plain)
        rows = {i for a, b in target for i in plain.rows_between(a, b)}
        rows = {i for i in rows if plain.tokens[i].state != State.DROPPED}
        sinks = [i for i, t in enumerate(plain.tokens) if t.state != State.DROPPED][:NUM_SINKS]
        seen = sorted(i for i in rows.union(sinks) if plain.tokens[i].state == State.VISIBLE)
        try:
            session.append(ids, attend=target)
        except errors.MaskUnsupported:
            assert not plain.can_shift
        except errors.UsageError:  # some of it is not visible, or nothing is left of it
            assert not rows or any(plain.tokens[i].state != State.VISIBLE for i in rows)
        except errors.ContextFull:
            assert actor.free < 2 * len(plain.tokens) + len(ids)  # what is seen may have to be copied
        else:
            plain.append(ids, seen)

    @rule(data=st.data(), count=st.integers(1, 6))
    def generate(self, data: st.DataObject, count: int) -> None:
        if (actor := self.one(data, visible=True)) is None:
            return
        generation = actor.session.generate(count)
        before = actor.note_reread()
        try:
            generation.finish()
        except errors.ContextFull:
            assert actor.free == 0
        actor.after_reread(before)
        actor.plain.append(generation.tokens)

    @rule(count=st.integers(1, 4))
    def generate_together(self, count: int) -> None:
        going: list[tuple[Actor, Generation, int | None]] = [
            (a, a.session.generate(count), a.note_reread()) for a in self.actors if a.plain.visible()
        ]
        if not going:
            return
        began = [g for _, g, _ in going]
        try:
            for _ in decode_together(began):
                pass
        except errors.ContextFull:
            assert going[0][0].free < len(going)
        for actor, generation, before in going:
            if generation.started:
                actor.after_reread(before)
            actor.plain.append(generation.tokens)

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        if (actor := self.one(data, visible=True)) is not None:
            actor.look()

    @rule(data=st.data(), count=st.integers(1, 12))
    def score(self, data: st.DataObject, count: int) -> None:
        if (actor := self.one(data, visible=True)) is None:
            return
        logits = actor.look()
        try:
            assert len(actor.session.score(list(range(4, 4 + count)))) == count
        except errors.ContextFull:
            assert actor.free < count
        assert np.array_equal(actor.session.logits(), logits)

    # -- edits ----------------------------------------------------------------------------------------------------

    @rule(data=st.data(), keep=st.booleans(), verb=st.sampled_from(sorted(TO)))
    def hide(self, data: st.DataObject, keep: bool, verb: str) -> None:
        actor = self.one(data)
        assert actor is not None
        session, plain = actor.session, actor.plain
        if not plain.tokens:
            return
        target = self.draw_ranges(data, plain)
        chosen = self.chosen(plain, target, {"mask": (State.VISIBLE,), "park": IN_CELLS, "evict": HAS_KV}[verb])
        last, cursor = max(plain.visible(), default=-1), session.stats.cursor
        gap = "keep" if keep else "close"
        receipt = self.unless_refused(actor, chosen, lambda: getattr(session, verb)(target, gap=gap, force=True))
        if receipt is None:
            return
        plain.hide(verb, chosen, keep=keep or not plain.can_shift)
        actor.note_restored()
        assert (receipt.tokens, receipt.prefilled) == (len(chosen), 0)
        stays = last not in chosen and last >= 0 and cursor < FAR
        if stays and not plain.tokens[last].restored:  # a first reading has its own place
            assert session.stats.cursor == cursor, "the suffix moved"
        actor.check_influence(chosen, receipt.influenced)

    @rule(data=st.data())
    def unmask(self, data: st.DataObject) -> None:
        actor = self.one(data)
        assert actor is not None
        tokens = actor.plain.tokens
        if not any(t.state in (State.MASKED, State.PARKED) for t in tokens):
            return
        target = self.draw_ranges(data, actor.plain)
        chosen = actor.plain.to_unmask(self.chosen(actor.plain, target, tuple(State)))
        loads = sum(tokens[i].state == State.PARKED for i in chosen)
        if self.unless_refused(actor, chosen, lambda: actor.session.unmask(target), loads) is not None:
            actor.plain.unmask(chosen)
            actor.note_restored()

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        actor = self.one(data)
        assert actor is not None
        total = len(actor.plain.tokens)
        uid = data.draw(st.integers(max(0, total - 30), total))
        row = total if uid == total else actor.plain.row(uid)
        actor.session.rewind(uid)
        actor.plain.rewind(row)

    @rule(data=st.data(), ids=st.lists(IDS, min_size=1, max_size=12))
    def insert(self, data: st.DataObject, ids: list[int]) -> None:
        if (actor := self.one(data, visible=True)) is None:
            return
        session, plain = actor.session, actor.plain
        uid = data.draw(st.integers(0, len(plain.tokens)))
        row = len(plain.tokens) if uid == len(plain.tokens) else plain.row(uid)
        try:
            receipt = session.insert(uid, ids)
        except errors.PinnedTokens:
            assert not any(i < row for i in plain.visible())
        except errors.MaskUnsupported:
            assert not plain.can_shift
        except errors.ContextFull:
            assert actor.free < len(ids) + self.most_copies(actor)
        else:
            plain.insert(row, ids)
            assert receipt.span is not None
            assert (receipt.tokens, receipt.prefilled, len(receipt.span)) == (len(ids),) * 3

    @rule(data=st.data(), ids=st.lists(IDS, min_size=1, max_size=30))
    def replace(self, data: st.DataObject, ids: list[int]) -> None:
        if (actor := self.one(data, visible=True)) is None:
            return
        session, plain = actor.session, actor.plain
        target = self.draw_ranges(data, plain)
        chosen = self.chosen(plain, target, (State.VISIBLE,))
        receipt = self.unless_refused(actor, chosen, lambda: session.replace(target, ids), len(ids))
        if receipt is not None:
            assert (receipt.tokens, receipt.prefilled) == (len(chosen), len(ids))
            plain.insert(min(chosen), ids, chosen)
            actor.note_restored()

    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        actor = self.one(data)
        assert actor is not None
        if not actor.plain.edits:
            with pytest.raises(errors.BadState):
                actor.session.undo()
            return
        edit, reads = actor.plain.edits[-1], len(actor.plain.to_read())
        newest = actor.session.last_edit
        most = reads if actor.plain.can_shift else len(actor.plain.tokens)
        receipt = self.unless_refused(actor, {0}, actor.session.undo, most + actor.plain.to_load())
        if receipt is None:
            if actor.session.last_edit is not newest:  # other tokens have its positions: it is passed over
                assert not actor.plain.can_shift
                actor.plain.edits.pop()
            return
        assert receipt.undone == edit.verb
        assert receipt.prefilled == reads or (receipt.prefilled > reads > 0 and not actor.plain.can_shift)
        actor.plain.undo()
        actor.note_restored()

    @rule(data=st.data())
    def recompute(self, data: st.DataObject) -> None:
        if (actor := self.one(data, visible=True)) is None:
            return
        plain = actor.plain
        try:
            receipt = actor.session.recompute()
        except errors.ContextFull:
            assert actor.free < len(plain.visible()) + self.most_copies(actor)
            receipt = None
        if plain.can_shift and not any(t.reserved for t in self.ledger_reserved(actor)):
            for token in plain.tokens:
                token.reserved = False
        if receipt is None:
            return
        first = plain.first_inexact()
        for token in plain.tokens[max((i for i in plain.visible() if i < first), default=0) :]:
            token.reserved = False
        read = {plain.row(uid) for a, b in receipt.ranges for uid in range(a, b)}
        began = min(read, default=len(plain.tokens))
        assert began <= first
        assert began == first or any(t.restored for t in plain.tokens)
        again = plain.recompute(began, sorted(read) if any(t.restored for t in plain.tokens) else None)
        assert sorted(read) == again
        assert receipt.prefilled == len(read)
        assert plain.first_inexact() == len(plain.tokens)

    def ledger_reserved(self, actor: Actor) -> list[Any]:
        return [t for t, r in zip(actor.plain.tokens, actor.session._ledger.columns.reserved, strict=True) if r]

    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        actor = self.one(data)
        assert actor is not None
        receipt = actor.session.compact()
        assert receipt.tokens == actor.session.engine.cells_used
        assert actor.session.stats.compact_saves == 0

    # -- forks ----------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        actor = self.one(data)
        assert actor is not None
        if len(self.actors) == MOST_FORKS:
            with pytest.raises(errors.UsageError, match="n_sessions"):
                actor.session.fork()
            return
        used = actor.session.engine.cells_used
        self.forks += 1
        self.actors.append(Actor(actor.session.fork(), actor.plain.fork(), f"fork {self.forks}"))
        assert actor.session.engine.cells_used == used

    @rule(data=st.data())
    @precondition(lambda self: len(self.actors) > 1)
    def close(self, data: st.DataObject) -> None:
        actor = self.one(data)
        assert actor is not None
        self.actors.remove(actor)
        actor.session.close()

    # -- files ----------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        actor = self.one(data)
        assert actor is not None
        session, plain = actor.session, actor.plain
        ids, blank = model_of(self.kind).tokenize(MODULE).tolist(), session._ledger.blank
        first = self.attended if blank else []
        try:
            receipt = session.attach(module_of(self.kind))
        except errors.MaskUnsupported:
            assert not plain.can_shift
        except errors.ContextFull:
            assert actor.free < len(first) + len(ids)
        else:
            plain.append(first)
            plain.attach(ids, self.attended)
            assert receipt.tokens == len(ids)

    @rule(data=st.data(), elsewhere=st.integers(0, 40))
    def save_and_load(self, data: st.DataObject, elsewhere: int) -> None:
        """A second session from a file, in this engine, or, now and then, in another process."""
        actor = self.one(data)
        assert actor is not None
        session, path = actor.session, Path(_FOLDER.name) / f"{self.kind}.kvs"
        session.save(path)
        actor.check()
        if not elsewhere and self.processes < 2:
            self.processes += 1
            done = python(_LOAD, path)
            assert json.loads(done.stdout or "null") == list(seen_of(session)), done.stderr
        if len(self.actors) == MOST_FORKS:
            with pytest.raises(errors.UsageError, match="n_sessions"):
                Session.load(path, session.engine)
            return
        used = session.engine.cells_used
        try:
            loaded = Session.load(path, session.engine)
        except errors.ContextFull:
            assert actor.free < session.stats.cells_used
            assert session.engine.cells_used == used
            return
        assert seen_of(loaded) == seen_of(session)
        self.forks += 1
        self.actors.append(Actor(loaded, actor.plain.fork(), f"load {self.forks}"))

    # -- what must hold after every step ----------------------------------------------------------------------------

    @invariant()
    def all_is_as_the_models_say(self) -> None:
        for actor in getattr(self, "actors", []):
            actor.check()

    @invariant()
    def cells_are_counted_rightly(self) -> None:
        if hasattr(self, "actors"):
            engine = self.actors[0].session.engine
            assert engine.cells_used == cells_in_llama(engine)
            if len(self.actors) == 1:
                assert engine.cells_used == self.actors[0].session.stats.cells_used

    @rule(data=st.data())
    def exact_means_a_restart(self, data: st.DataObject) -> None:
        """Where every visible token saw exactly the visible tokens before it, a fresh prefill gives the same."""
        exact = [a for a in self.actors if a.plain.is_exact()]
        if not exact:
            return
        actor = data.draw(st.sampled_from(exact))
        logits = actor.look()
        if not actor.plain.is_exact():
            return
        with Session(actor.session.model, settings=actor.session.engine.settings) as restart:
            restart.append(actor.session.visible_tokens)
            assert np.abs(restart.logits() - logits).max() < 2e-2  # f32; hiding a token moves logits by about 1

    # -- helpers ----------------------------------------------------------------------------------------------------

    def most_copies(self, actor: Actor) -> int:
        """How many cells an edit may have to copy first."""
        return 0 if len(self.actors) == 1 else len(actor.plain.tokens)

    def unless_refused(
        self, actor: Actor, chosen: set[int], edit: Callable[[], Receipt], reads: int = 0
    ) -> Receipt | None:
        """The receipt of an edit, None where it was rightly refused: nothing to do, no shift, or no room."""
        try:
            return edit()
        except errors.MaskUnsupported:
            assert not actor.plain.can_shift
        except errors.UsageError:
            assert not chosen
        except errors.ContextFull:
            assert actor.free < reads + self.most_copies(actor)
        return None

    @staticmethod
    def draw_ranges(data: st.DataObject, plain: Plain) -> list[tuple[int, int]]:
        total = len(plain.tokens)
        starts = data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=3))
        return [(a, min(total, a + data.draw(st.integers(1, 30)))) for a in starts]

    @staticmethod
    def chosen(plain: Plain, ranges: list[tuple[int, int]], states: tuple[State, ...]) -> set[int]:
        rows = {i for a, b in merge(ranges) for i in plain.rows_between(a, b)}
        return {i for i in rows if plain.tokens[i].state in states}


@pytest.mark.parametrize("kind", ["llama", "gemma3", "yarn", "mrope"])
def test_random_edits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "REBASE_AT", FAR)  # so that it happens
    machine = type(f"Machine_{kind}", (Machine,), {"kind": kind}).TestCase
    machine.settings = PLAN
    machine("runTest").runTest()
