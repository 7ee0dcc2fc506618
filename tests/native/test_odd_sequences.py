"""What a user does that nobody planned for: edits in odd orders, names taken twice, callbacks that meddle, Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import Session, State, decode_together, errors
from edgekv.record import Record
from helpers import EXACT, cells_in_llama, look, open_tiny, some_tokens

TinyPath = Callable[..., Path]
SIZES = {"head": 20, "middle": 50, "tail": 30}


@pytest.fixture
def session(tiny_path: TinyPath) -> Iterator[Session]:
    with Session(tiny_path(), settings=replace(EXACT, n_batch=16)) as session:
        yield fill(session)


@pytest.fixture
def full(tiny_path: TinyPath) -> Iterator[Session]:
    """256 cells, 100 of them used."""
    with fill(open_tiny(tiny_path(), n_ctx=256)) as session:
        yield session


def fill(session: Session) -> Session:
    for name, size in SIZES.items():
        session.append(some_tokens(size, size), name=name)
    return session


def check_cells(session: Session) -> None:
    session.audit()
    assert session.engine.cells_used == cells_in_llama(session.engine)


# -- no cell left -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edit", [lambda s: s.rewind(95), lambda s: s.mask("middle", gap="keep"), lambda s: s.evict("tail")]
)
def test_a_token_that_a_fork_holds_is_not_read_again_without_a_cell(
    full: Session, edit: Callable[[Session], object]
) -> None:
    with full.fork() as fork:
        fork.append(some_tokens(fork.engine.cells_free, 1))
        edit(full)
        before = look(full)
        with pytest.raises(errors.ContextFull):
            full.logits()
        assert look(full) == before
    assert len(full.logits())
    check_cells(full)


def test_a_copy_for_a_token_read_again_is_counted(tiny_path: TinyPath) -> None:
    with fill(open_tiny(tiny_path(), n_ctx=256, n_archives=1)) as session, session.fork() as fork:
        session.mask((95, 100))
        session.unmask((95, 100))
        fork.append(some_tokens(fork.engine.cells_free - 1, 1))
        session.mask((60, 70), gap="keep")
        with contextlib.suppress(errors.ContextFull):
            session.logits()
        check_cells(session)


def test_a_recompute_without_room_leaves_kept_gaps(full: Session) -> None:
    full.mask("middle", gap="keep")
    full.append(some_tokens(full.engine.cells_free - 10))
    before = look(full)
    with pytest.raises(errors.ContextFull):
        full.recompute()
    assert look(full) == before


# -- callbacks that meddle --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "meddle",
    [
        lambda it: it["fork"].insert(60, some_tokens(7)),
        lambda it: it["fork"].append("a"),
        lambda it: it["session"].close(),
        lambda it: it["fork"].close(),
        lambda it: it["fork"].generate(3).finish(),
        lambda it: it["fork"].fork(),
    ],
    ids=["insert", "append", "close", "close the fork", "generate", "fork"],
)
@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_a_progress_callback_cannot_touch_any_session(
    tiny_path: TinyPath, kind: str, meddle: Callable[[dict[str, Session]], object]
) -> None:
    with Session(tiny_path(kind), settings=replace(EXACT, n_batch=16)) as session, session.fork() as fork:
        fill(session)
        fork.append(some_tokens(70))
        before, logits, other = look(session), session.logits(), look(fork)
        session.progress = lambda *_: meddle({"session": session, "fork": fork})
        with pytest.raises(errors.BadState, match="still reading"):
            session.append(some_tokens(40, 1))
        session.progress = None
        assert (look(session), look(fork)) == (before, other)
        np.testing.assert_array_equal(session.logits(), logits)


# -- Ctrl-C at the worst moment ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def ctrl_c_after_native_steps() -> Iterator[None]:
    """SIGINT arrives when an edit's native steps are done, at the first edit of the block."""
    right, armed = Record.change, [True]

    def change(self: Record, *args: Any, **kwargs: Any) -> Any:
        result = right(self, *args, **kwargs)
        if armed and armed.pop():
            os.kill(os.getpid(), signal.SIGINT)
        return result

    Record.change = change  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        Record.change = right  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "edit",
    [
        lambda s: s.mask("middle"),
        lambda s: s.evict("middle"),
        lambda s: s.rewind("tail"),
        lambda s: s.insert(70, some_tokens(5)),
        lambda s: s.replace("middle", some_tokens(5)),
    ],
    ids=["mask", "evict", "rewind", "insert", "replace"],
)
def test_an_edit_that_is_done_is_in_the_journal(session: Session, edit: Callable[[Session], object]) -> None:
    visible = session.visible_tokens.tolist()
    with ctrl_c_after_native_steps():
        edit(session)
    assert len(session.history) == 1
    session.undo()
    assert session.visible_tokens.tolist() == visible
    check_cells(session)


def test_a_masked_block_that_is_interrupted_at_once_shows_again(session: Session) -> None:
    with ctrl_c_after_native_steps(), session.masked("middle"):
        pass
    assert session.states(session.span("middle")) == {State.VISIBLE: 50}


@pytest.mark.parametrize("kind", ["yarn", "mrope"])
def test_a_replace_by_reading_is_done_or_not(tiny_path: TinyPath, kind: str) -> None:
    with Session(tiny_path(kind), settings=EXACT, on_unsupported="recompute") as session:
        fill(session)
        visible = session.visible_tokens.tolist()
        with ctrl_c_after_native_steps():
            session.replace("middle", some_tokens(60, 1), name="new")
        assert [r.verb for r in session.history] == ["replace"]
        assert session.states(session.span("middle")) == {State.MASKED: 50}
        session.undo()
        assert session.visible_tokens.tolist() == visible
        check_cells(session)


# -- names and targets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["tool[search]", "a*", "role:x", "tag:y", "?", "role:role:", "  "])
def test_any_role_will_do(session: Session, role: str) -> None:
    span = session.append("hello", role=role)
    assert session.text(span.name) == "hello"
    assert session.generate(2, role=role).span.role == role
    assert session.insert(70, "abc", role=role).span is not None


def test_a_text_between_two_spans_belongs_to_neither(session: Session) -> None:
    session.insert(70, some_tokens(5), name="note")
    assert session.mask(["middle", "tail"]).tokens == 80
    assert session.states(session.span("note")) == {State.VISIBLE: 5}
    session.unmask(["middle", "tail"])
    session.rewind(["tail", "note"])
    assert [s.name for s in session.spans] == ["head", "middle"]


def test_a_masked_block_shows_only_what_it_hid(session: Session) -> None:
    session.insert(40, some_tokens(5), name="note")
    session.mask("note")
    with session.masked("middle"):
        session.insert(75, "abc")
    assert session.states(session.span("note")) == {State.MASKED: 5}


def test_replaced_text_comes_back_only_by_itself(session: Session) -> None:
    session.replace((30, 40), some_tokens(5), name="new")
    session.mask("middle")
    assert session.unmask("middle").tokens == 45
    assert session.unmask((30, 40)).tokens == 10
    session.audit()


def test_a_new_text_may_take_the_old_one_s_name(session: Session) -> None:
    session.replace("middle", "brief", name="middle")
    assert session.text("middle") == "brief"
    assert session.text("middle-1") == session.model.detokenize(some_tokens(50, 50))
    session.replace("middle", "briefer", name="middle")
    assert session.text("middle") == "briefer"
    session.undo()
    assert session.text("middle") == "brief"
    session.undo()
    assert [s.name for s in session.spans] == list(SIZES)
    assert session.text("middle") == session.model.detokenize(some_tokens(50, 50))


def test_names_after_undo_are_not_doubled(session: Session) -> None:
    session.mask("middle")
    session.rewind("tail")
    session.append("new", name="tail")
    session.undo()
    session.undo()
    assert sorted(s.name for s in session.spans) == ["head", "middle", "tail", "tail-1"]


def test_a_span_that_was_dropped_is_no_place_to_rewind_to(session: Session) -> None:
    tail = session.span("tail")
    session.rewind(tail)
    session.append("more")
    before = look(session)
    with pytest.raises(errors.UnknownSpan):
        session.rewind(tail)
    with pytest.raises(errors.UsageError):
        session.rewind(True)
    assert look(session) == before


def test_places_may_be_spans(session: Session) -> None:
    session.insert("tail", some_tokens(3), name="note")
    assert session.span("note").start == 100
    assert session.recompute("tail").ranges == ((70, 100),)


def test_a_rewind_to_the_end_is_no_edit(session: Session) -> None:
    session.mask("middle")
    assert session.rewind(100).tokens == 0
    assert session.undo().undone == "mask"


def test_insert_needs_a_text_to_be_put_into(tiny_path: TinyPath) -> None:
    with open_tiny(tiny_path()) as session, pytest.raises(errors.UsageError, match="append"):
        session.insert(0, "hello")


def test_a_span_that_ended_on_a_stop_string_stays_whole(session: Session) -> None:
    ahead = session.fork().generate(12).finish().text
    stop = ahead[5:7]
    generation = session.generate(12, stop=stop, name="said").finish()
    assert generation.finish_reason == "stop"
    session.append("next", name="next")
    session.rewind("next")
    assert session.text("said") == generation.text
    session.mask("said")
    assert len(session.visible_tokens) == 100


# -- receipts ---------------------------------------------------------------------------------------------------------


def test_the_budget_counts_what_would_be_read(session: Session) -> None:
    session.mask((20, 30))
    session.append(some_tokens(5, 1))
    receipt = session.mask((90, 95), then="auto", budget=20)
    assert receipt.prefilled == 0  # not the few behind this mask, but all behind the first
    assert session.mask((80, 85), then="auto", budget=200).prefilled > 60


def test_a_recompute_of_a_part_is_not_exact(session: Session) -> None:
    session.mask("middle")
    receipt = session.recompute(90)
    assert (receipt.prefilled, receipt.influenced, receipt.exact) == (
        10,
        30,
        False,
    )  # read again from tokens that had seen it
    assert session.recompute().exact


def test_a_mask_that_was_read_after_says_so_once(session: Session) -> None:
    text = str(session.mask("middle", then="recompute"))
    assert "exact · 30 tokens read again" in text
    assert "no visible token" not in text


def test_history_tells_what_mask_returned(session: Session) -> None:
    receipt = session.mask("middle", refresh_last=False)
    assert session.history[-1] == receipt
    assert receipt.reread == 0


def test_influence_of_nothing(session: Session) -> None:
    with pytest.raises(errors.UnknownSpan):
        session.influenced_by((1000, 2000))


# -- together and elsewhere -------------------------------------------------------------------------------------------


def test_one_that_ends_in_another_thread(session: Session) -> None:
    with session.fork() as fork:
        going = [session.generate(5), fork.generate(5)]
        running = decode_together(going)
        next(running)
        thread = threading.Thread(target=lambda: [g.finish() for g in going])
        thread.start()
        thread.join()
        list(running)
        assert [len(g.tokens) for g in going] == [5, 5]


def test_those_at_their_length_need_no_cell(full: Session) -> None:
    with full.fork() as fork:
        full.append(some_tokens(full.engine.cells_free - 4, 1))
        going = [full.generate(2), fork.generate(2)]
        list(decode_together(going))
        assert [g.finish_reason for g in going] == ["length"] * 2


def test_tokens_read_while_another_thread_inserts(session: Session) -> None:
    stop, errors_seen = threading.Event(), []

    def look_on() -> None:
        try:
            while not stop.is_set():
                session.tokens, session.visible_tokens, session.stats  # noqa: B018
        except Exception as err:
            errors_seen.append(err)

    thread = threading.Thread(target=look_on)
    thread.start()
    for _ in range(40):
        session.insert(70, some_tokens(3))
        session.undo()
    stop.set()
    thread.join()
    assert not errors_seen


def test_a_piece_is_not_lost_when_waiting_is_given_up(session: Session) -> None:
    expected = session.fork().generate(30).finish().text

    async def main() -> str:
        said, generation = "", session.generate(30)
        with contextlib.suppress(StopAsyncIteration):
            while True:
                with contextlib.suppress(asyncio.TimeoutError):
                    said += await asyncio.wait_for(anext(generation), 0.0005)
        return said

    assert asyncio.run(main()) == expected
