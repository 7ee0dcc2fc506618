"""insert, replace, isolated spans and undo: what is read, what moves, and what is as it was when something fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgekv import Session, Settings, State, errors
from helpers import EXACT, look, open_tiny, some_tokens

TinyPath = Callable[..., Path]
SIZES = {"head": 20, "middle": 50, "tail": 30}


@pytest.fixture(params=["llama", "gemma3"])
def session(request: pytest.FixtureRequest, tiny_path: TinyPath) -> Iterator[Session]:
    with Session(tiny_path(request.param), settings=replace(EXACT, n_batch=16)) as session:
        yield fill(session)


@pytest.fixture(params=["yarn", "mrope"])
def fixed(request: pytest.FixtureRequest, tiny_path: TinyPath) -> Iterator[Session]:
    """A session whose positions cannot be shifted."""
    with Session(tiny_path(request.param), settings=EXACT) as session:
        yield fill(session)


def fill(session: Session) -> Session:
    for name, size in SIZES.items():
        session.append(some_tokens(size, size), name=name)
    return session


def restart(session: Session, tokens: np.ndarray) -> np.ndarray:
    with Session(session.model, settings=session.engine.settings) as fresh:
        fresh.append(tokens)
        return fresh.logits()


def difference_from_restart(session: Session) -> float:
    return float(np.abs(restart(session, session.visible_tokens) - session.logits()).max())


def test_an_inserted_text_stands_in_its_place(session: Session) -> None:
    new = some_tokens(12, 7)
    before = session.tokens
    receipt = session.insert(70, new, name="new", role="note", tags=["x"])
    assert session.span("new").range == (100, 112)  # indexes are never given twice, nor change
    assert receipt.span == session.span("new")
    assert (receipt.tokens, receipt.prefilled, receipt.unaware, receipt.influenced) == (12, 12, 30, 0)
    assert not receipt.exact
    assert "30 visible tokens behind were computed without the new text" in str(receipt)
    assert session.tokens.tolist() == [*before, *new]
    assert session.visible_tokens.tolist() == [*before[:70], *new, *before[70:]]
    assert session.text("new") == session.model.detokenize(new)
    session.audit()
    assert difference_from_restart(session) > 0.05
    assert session.recompute().prefilled == 30
    assert difference_from_restart(session) < 2e-2


def test_a_text_inserted_at_the_end_is_appended(session: Session) -> None:
    receipt = session.insert(100, some_tokens(8, 1))
    assert receipt.exact
    assert receipt.moved == 0
    assert difference_from_restart(session) < 2e-2
    assert session.recompute().prefilled == 0


def test_the_new_tokens_see_what_stands_before_them(session: Session) -> None:
    """Behind hidden text, too: they see what is visible."""
    session.mask("middle")
    session.insert(70, some_tokens(10, 9), name="new")
    session.mask("tail")
    wanted = restart(session, np.concatenate([some_tokens(20, 20), some_tokens(10, 9)]))
    assert np.abs(session.logits() - wanted).max() < 2e-2
    session.audit()


def test_a_span_around_holds_what_was_put_into_it(session: Session) -> None:
    session.insert(40, some_tokens(5, 3), name="inner")
    assert session.states(session.span("middle")) == {State.VISIBLE: 55}
    receipt = session.mask("middle")
    assert receipt.ranges == ((20, 70), (100, 105))
    assert session.states(session.span("inner")) == {State.MASKED: 5}
    session.unmask("inner")
    assert session.states(session.span("middle")) == {State.VISIBLE: 5, State.MASKED: 50}
    session.audit()


def test_a_summary_takes_the_place_of_a_text(session: Session) -> None:
    old, cursor = session.text("middle"), session.stats.cursor
    receipt = session.replace("middle", some_tokens(10, 5), name="summary")
    assert (receipt.verb, receipt.tokens, receipt.prefilled, receipt.gap) == ("replace", 50, 10, "close")
    assert (receipt.influenced, receipt.unaware) == (30, 30)
    assert str(receipt).startswith("replaced 50 tokens by 10 in")
    assert session.stats.cursor == cursor  # earlier tokens move up by the difference, the suffix keeps still
    assert receipt.moved == 20 + 10
    tokens = [*some_tokens(20, 20), *some_tokens(10, 5), *some_tokens(30, 30)]
    assert session.visible_tokens.tolist() == tokens
    assert session.text("middle") == old
    assert session.recompute().prefilled == 30
    assert difference_from_restart(session) < 2e-2
    session.audit()


def test_a_longer_text_opens_the_layout(session: Session) -> None:
    session.replace("middle", some_tokens(90, 5))
    session.audit()
    session.recompute()
    assert difference_from_restart(session) < 2e-2


def test_the_first_text_may_be_replaced(session: Session) -> None:
    """The new tokens are the attention sinks then."""
    receipt = session.replace("head", some_tokens(6, 1))
    assert receipt.tokens == 20
    session.recompute()
    assert difference_from_restart(session) < 2e-2
    session.audit()


def test_undo_of_a_replace_brings_the_old_text_back(session: Session) -> None:
    logits = session.logits()
    session.replace("middle", some_tokens(10, 5), name="summary")
    assert np.abs(session.logits() - logits).max() > 0.05
    receipt = session.undo()
    assert (receipt.undone, receipt.prefilled, receipt.freed) == ("replace", 0, 11)  # ten, and the second reading
    assert np.abs(session.logits() - logits).max() < 2e-2  # bit-exact up to the rotation there and back
    assert [s.name for s in session.spans] == list(SIZES)
    with pytest.raises(errors.UnknownSpan):
        session.text("summary")
    session.audit()


def test_where_nothing_can_move_a_shorter_text_takes_the_gap(fixed: Session) -> None:
    before, visible, logits = look(fixed), fixed.visible_tokens, fixed.logits()
    for long in (lambda: fixed.replace("middle", some_tokens(51)), lambda: fixed.insert(30, some_tokens(1))):
        with pytest.raises(errors.MaskUnsupported, match="shift"):
            long()
    assert look(fixed) == before
    receipt = fixed.replace("middle", some_tokens(20, 5))
    assert (receipt.gap, receipt.moved) == ("keep", 0)
    fixed.undo()
    assert fixed.visible_tokens.tolist() == visible.tolist()
    np.testing.assert_array_equal(fixed.logits(), logits)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda s: s.insert(-1, "a"), errors.UsageError),
        (lambda s: s.insert(101, "a"), errors.UsageError),
        (lambda s: s.insert(0, "a"), errors.PinnedTokens),
        (lambda s: s.insert(50, ""), errors.UsageError),
        (lambda s: s.insert(50, "a", name="head"), errors.UsageError),
        (lambda s: s.insert(50, [1 << 20]), errors.UsageError),
        (lambda s: s.insert(50, some_tokens(600)), errors.ContextFull),
        (lambda s: s.replace("nobody", "a"), errors.UnknownSpan),
        (lambda s: s.replace("middle", ""), errors.UsageError),
        (lambda s: s.replace((50, 50), "a"), errors.UsageError),
        (lambda s: s.append("a", attend="nobody"), errors.UnknownSpan),
        (lambda s: s.append("a", attend=[]), errors.UsageError),
        (lambda s: s.undo(), errors.BadState),
    ],
)
def test_a_call_that_makes_no_sense_changes_nothing(
    session: Session, call: Callable[[Session], object], error: type[Exception]
) -> None:
    before, logits = look(session), session.logits()
    with pytest.raises(error):
        call(session)
    assert look(session) == before
    np.testing.assert_array_equal(session.logits(), logits)
    assert session.history == ()


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    "edit",
    [
        lambda s: s.insert(70, some_tokens(40, 1), name="new"),
        lambda s: s.replace("middle", some_tokens(40, 1), name="new"),
        lambda s: s.append(some_tokens(40, 1), name="new", attend="middle"),
    ],
    ids=["insert", "replace", "attend"],
)
def test_an_interrupted_reading_never_happened(session: Session, edit: Callable[[Session], object]) -> None:
    def stop(done: int, _total: int) -> None:
        if done >= 32:
            raise Stop

    before, logits = look(session), session.logits()
    session.progress = stop
    with pytest.raises(Stop):
        edit(session)
    session.progress = None
    assert look(session) == before
    np.testing.assert_array_equal(session.logits(), logits)
    assert session.history == ()
    edit(session)
    session.audit()


def test_an_isolated_span_is_masked_exactly(session: Session) -> None:
    isolated = session.append(some_tokens(40, 8), name="isolated", attend="head")
    assert session.influenced_by("middle") == [(70, 100)]
    assert session.influenced_by("head") == [(20, 140)]
    session.rewind("tail")
    with pytest.raises(errors.UnknownSpan):
        session.text(isolated)
    isolated = session.append(some_tokens(40, 8), name="isolated", attend="head")
    receipt = session.mask("middle")
    assert receipt.exact
    assert difference_from_restart(session) < 2e-2
    session.audit()


def test_two_isolated_spans_are_masked_exactly_one_by_one(session: Session) -> None:
    session.rewind("middle")
    for name, seed in (("one", 1), ("two", 2)):
        session.append(some_tokens(40, seed), name=name, attend="head")
    for name, other in (("one", 2), ("two", 1)):
        with session.masked(name) as receipt:
            assert receipt.exact
            wanted = restart(session, np.concatenate([some_tokens(20, 20), some_tokens(40, other)]))
            assert np.abs(session.logits() - wanted).max() < 2e-2


def test_an_isolated_span_sees_spans_that_stand_apart_as_if_they_were_together(session: Session) -> None:
    """Copies of them are brought together, and dropped again."""
    used = session.stats.cells_used
    session.append(some_tokens(10, 4), name="isolated", attend=["head", "tail"])
    assert session.stats.cells_used == used + 10
    session.mask("middle")
    session.mask("tail", then="none")
    session.unmask("tail")
    wanted = restart(session, np.concatenate([some_tokens(n, n) for n in (20, 30)] + [some_tokens(10, 4)]))
    session.recompute()
    assert np.abs(session.logits() - wanted).max() < 2e-2
    session.audit()


def test_a_recompute_leaves_isolated_spans_that_are_right(session: Session) -> None:
    session.append(some_tokens(40, 8), name="isolated", attend="head")
    session.append(some_tokens(10, 9), name="end")
    session.mask("middle")
    receipt = session.recompute()
    assert receipt.ranges == ((70, 100), (140, 150))
    assert receipt.prefilled == 40
    assert session.influenced_by("middle") == []
    session.audit()
    assert session.recompute().prefilled == 0
    session.mask("head", force=True)  # what it attended to is gone: it is read as any other text
    assert session.recompute().ranges == ((70, 150),)
    assert difference_from_restart(session) < 2e-2


def test_hidden_spans_cannot_be_attended_to(session: Session) -> None:
    session.mask("middle")
    before = look(session)
    with pytest.raises(errors.BadState, match="unmask"):
        session.append("a", attend="middle")
    assert look(session) == before


def test_undo_goes_back_edit_by_edit(session: Session) -> None:
    states, logits = [look(session).states], [session.logits()]
    edits: list[Callable[[], object]] = [
        lambda: session.mask("middle"),
        lambda: session.insert(70, some_tokens(5, 1)),
        lambda: session.evict((75, 80)),
        lambda: session.unmask("middle"),
        lambda: session.replace((30, 40), some_tokens(5, 2)),
        lambda: session.rewind(90),
    ]
    for edit in edits:
        edit()
        states.append(look(session).states)
        logits.append(session.logits())
    verbs = [r.verb for r in session.history]
    assert verbs == ["mask", "insert", "evict", "unmask", "replace", "rewind"]
    for n, verb in reversed(list(enumerate(verbs))):
        receipt = session.undo()
        assert receipt.undone == verb
        assert receipt.prefilled == {"evict": 5, "rewind": 10}.get(verb, 0)
        session.audit()
        visible = {s: n for s, n in look(session).states if s != State.DROPPED}
        assert visible == {s: n for s, n in states[n] if s != State.DROPPED}
    assert [r.verb for r in session.history[-6:]] == ["undo"] * 6
    with pytest.raises(errors.BadState):
        session.undo()
    assert session.visible_tokens.tolist() == [t for n in SIZES.values() for t in some_tokens(n, n)]
    session.recompute(0)
    assert np.abs(session.logits() - logits[0]).max() < 2e-2


def test_undo_reads_what_is_gone_again(session: Session) -> None:
    logits = session.logits()
    session.mask((20, 40))
    session.evict((20, 70))  # masked tokens and visible ones
    receipt = session.undo()
    assert (receipt.undone, receipt.prefilled) == ("evict", 50)
    assert session.states(session.span("middle")) == {State.VISIBLE: 30, State.MASKED: 20}
    session.undo()
    session.audit()
    assert session.recompute(0).prefilled == 100
    assert np.abs(session.logits() - logits).max() < 2e-2


def test_undo_of_a_rewind_brings_spans_back(session: Session) -> None:
    logits = session.logits()
    spans = session.spans
    session.rewind(50)
    assert [s.name for s in session.spans] == ["head", "middle"]
    session.undo()
    assert session.spans == spans
    assert np.abs(session.logits() - logits).max() < 2e-2
    session.rewind(50)
    session.append("other", name="tail")
    session.undo()
    assert {s.name for s in session.spans} == {"head", "middle", "tail", "tail-1"}
    session.audit()


def test_undo_without_room_changes_nothing(tiny_path: TinyPath) -> None:
    with fill(open_tiny(tiny_path(), n_ctx=256)) as session:
        session.evict("middle")
        session.append(some_tokens(session.engine.cells_free - 10))
        before = look(session)
        with pytest.raises(errors.ContextFull):
            session.undo()
        assert look(session) == before


def test_a_mask_and_the_reading_after_it_are_undone_together(session: Session) -> None:
    session.mask("middle", then="recompute")
    assert [r.verb for r in session.history] == ["mask"]
    receipt = session.undo()
    assert (receipt.undone, receipt.tokens) == ("mask", 50)
    assert receipt.unaware == 30
    session.audit()


def test_the_bos_stays_the_first(tiny_path: TinyPath) -> None:
    with Session(tiny_path(), settings=Settings(n_ctx=256, n_threads=1)) as session:
        session.append("hello there", name="a")
        with pytest.raises(errors.PinnedTokens):
            session.insert(0, "b")
        session.insert(1, "b")
        session.audit()
        assert session.text((0, len(session.tokens))).endswith("bhello there")
