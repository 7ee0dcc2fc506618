"""on_unsupported="recompute": what a memory cannot do is done by reading again, and the receipt says so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgekv import Model, Session, Settings, State, errors, policies
from edgekv.chat import Chat, Options
from helpers import EXACT, cells_in_llama, look, some_tokens

TinyPath = Callable[..., Path]
SIZES = {"head": 20, "middle": 50, "tail": 30}
SETTINGS = replace(EXACT, n_batch=32)


def fill(session: Session) -> Session:
    for name, size in SIZES.items():
        session.append(some_tokens(size, size), name=name)
    return session


@pytest.fixture(params=["mamba", "lfm2"])
def state(request: pytest.FixtureRequest, tiny_path: TinyPath) -> Iterator[Session]:
    with Session(tiny_path(request.param), settings=SETTINGS, on_unsupported="recompute") as session:
        yield fill(session)


@pytest.fixture(params=["yarn", "mrope"])
def fixed(request: pytest.FixtureRequest, tiny_path: TinyPath) -> Iterator[Session]:
    with Session(tiny_path(request.param), settings=SETTINGS, on_unsupported="recompute") as session:
        yield fill(session)


def check_restart(session: Session) -> None:
    """The session equals a fresh prefill of what it shows."""
    look(session)
    with Session(session.model, settings=session.engine.settings) as restart:
        restart.append(session.visible_tokens)
        assert np.abs(restart.logits() - session.logits()).max() < 1e-3


def test_every_edit_of_a_state_is_a_restart(state: Session) -> None:
    receipt = state.mask("middle")
    assert (receipt.prefilled, receipt.influenced, receipt.exact) == (50, 0, True)
    assert "read again from the start" in str(receipt)
    assert state.states(state.span("middle")) == {State.EVICTED: 50}  # no cell waits anywhere
    check_restart(state)
    assert state.unmask("middle").prefilled == 100
    check_restart(state)
    with state.masked("middle"):
        check_restart(state)
    check_restart(state)
    assert state.insert(70, some_tokens(5, 1), name="new").prefilled == 105
    check_restart(state)
    assert state.replace("middle", some_tokens(5, 2)).prefilled == 60
    check_restart(state)
    assert state.evict("tail").prefilled == 30
    check_restart(state)
    state.undo()
    check_restart(state)
    assert state.recompute().prefilled == 0
    assert state.rewind("tail").prefilled == 30
    check_restart(state)
    while True:
        try:
            state.undo()
        except errors.BadState:
            break
        check_restart(state)
    assert state.visible_tokens.tolist() == [t for n in SIZES.values() for t in some_tokens(n, n)]
    state.append(some_tokens(5))
    state.generate(3).finish()
    check_restart(state)


def test_all_may_be_hidden(state: Session) -> None:
    assert state.mask((0, 100), force=True).prefilled == 0
    look(state)
    with pytest.raises(errors.NoLogits):
        state.logits()
    state.unmask("head")
    check_restart(state)


def test_what_stays_impossible_says_so(state: Session) -> None:
    before = look(state)
    with pytest.raises(errors.MaskUnsupported, match="isolated"):
        state.append("a", attend="head")
    with pytest.raises(errors.PinnedTokens):
        state.mask("head")
    assert look(state) == before


def test_a_fork_has_a_state_of_its_own(state: Session) -> None:
    logits = state.logits()
    with state.fork() as fork:
        fork.mask("middle")
        check_restart(fork)
        np.testing.assert_array_equal(state.logits(), logits)
        state.append(some_tokens(3))
        for s in (state, fork):
            check_restart(s)
    assert state.engine.cells_used == state.stats.cells_used


def test_an_interrupted_restart_never_happened(state: Session) -> None:
    def stop(done: int, _total: int) -> None:
        if done >= 32:
            raise KeyboardInterrupt

    before, logits = look(state), state.logits()
    state.progress = stop
    for edit in (lambda: state.mask("middle"), lambda: state.insert(30, "abc"), lambda: state.rewind("tail")):
        with pytest.raises(KeyboardInterrupt):
            edit()
    state.progress = None
    assert look(state) == before
    np.testing.assert_array_equal(state.logits(), logits)
    check_restart(state)


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_without_room_beside_the_old_ones_they_give_way(tiny_path: TinyPath, kind: str) -> None:
    """A full session can be shrunk; and what is interrupted then is read again as it was."""

    def stop(done: int, _total: int) -> None:
        if done >= 64:
            raise KeyboardInterrupt

    settings = replace(SETTINGS, n_ctx=256)
    with Session(tiny_path(kind), settings=settings, on_unsupported="recompute") as session:
        fill(session).append(some_tokens(session.engine.cells_free, 5), name="rest")
        before, logits = look(session), session.logits()
        session.progress = stop
        with pytest.raises(KeyboardInterrupt):
            session.mask("head", force=True)
        session.progress = None
        assert look(session) == before
        np.testing.assert_array_equal(session.logits(), logits)
        assert session.mask("head", force=True).prefilled == 236
        check_restart(session)
        with pytest.raises(errors.ContextFull):
            session.insert(100, some_tokens(30))
        session.rewind("rest")
        check_restart(session)


def test_an_insert_that_cannot_move_the_suffix_reads_it(fixed: Session) -> None:
    receipt = fixed.insert(70, some_tokens(10, 1), name="new")
    assert (receipt.tokens, receipt.prefilled, receipt.unaware) == (10, 40, 0)
    assert "was read again" in str(receipt)
    check_restart(fixed)
    fixed.undo()
    assert fixed.visible_tokens.tolist() == [t for n in SIZES.values() for t in some_tokens(n, n)]
    fixed.recompute()
    check_restart(fixed)


def test_a_longer_text_is_read_with_all_behind_it(fixed: Session) -> None:
    receipt = fixed.replace("middle", some_tokens(60, 1), name="new")
    assert (receipt.verb, receipt.tokens, receipt.prefilled) == ("replace", 50, 90)
    check_restart(fixed)
    assert [r.verb for r in fixed.history] == ["replace"]
    receipt = fixed.undo()
    assert (receipt.undone, receipt.prefilled) == ("replace", 80)
    check_restart(fixed)
    assert [s.name for s in fixed.spans] == list(SIZES)


def test_an_interrupted_replace_never_happened(fixed: Session) -> None:
    def stop(done: int, _total: int) -> None:
        if done >= 32:
            raise KeyboardInterrupt

    before, logits = look(fixed), fixed.logits()
    fixed.progress = stop
    with pytest.raises(KeyboardInterrupt):
        fixed.replace("middle", some_tokens(60, 1))
    fixed.progress = None
    assert look(fixed) == before
    np.testing.assert_array_equal(fixed.logits(), logits)
    assert fixed.history == ()


def test_the_answers_are_two(tiny_path: TinyPath) -> None:
    with pytest.raises(errors.UsageError, match="on_unsupported"):
        Session(tiny_path(), on_unsupported="restart")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    from edgekv import tiny

    folder = tmp_path_factory.mktemp("states")
    return {kind: Model(tiny.write(folder / f"{kind}.gguf", kind)) for kind in ("mamba", "lfm2", "yarn", "mrope")}


def test_masked_tokens_that_lost_their_cells_stay_evicted(fixed: Session) -> None:
    fixed.mask((30, 33))
    fixed.rewind(22)
    receipt = fixed.undo()
    assert any("stay evicted" in note for note in receipt.notes) or not receipt.notes
    fixed.audit()
    assert fixed.engine.cells_used == cells_in_llama(fixed.engine) == fixed.stats.cells_used


VERBS: dict[str, Callable[[Session, int, int], object]] = {
    "append": lambda s, start, length: s.append(some_tokens(length, start)),
    "mask": lambda s, start, length: s.mask((start, min(start + length, len(s.tokens))), force=True),
    "unmask": lambda s, start, length: s.unmask((start, min(start + length, len(s.tokens)))),
    "evict": lambda s, start, length: s.evict((start, min(start + length, len(s.tokens))), force=True),
    "rewind": lambda s, start, _length: s.rewind(start),
    "insert": lambda s, start, length: s.insert(start, some_tokens(length, start)),
    "replace": lambda s, start, length: s.replace((start, min(start + length, len(s.tokens))), some_tokens(length)),
    "undo": lambda s, _start, _length: s.undo(),
    "generate": lambda s, _start, length: s.generate(length % 4).finish(),
}
EDIT = st.tuples(st.sampled_from(sorted(VERBS)), st.integers(0, 80), st.integers(1, 20))


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(edits=st.lists(EDIT, min_size=1, max_size=12))
def test_random_edits_of_a_state(models: dict[str, Model], kind: str, edits: list[tuple[str, int, int]]) -> None:
    with Session(models[kind], settings=SETTINGS, on_unsupported="recompute") as session:
        session.append(some_tokens(30))
        for verb, start, length in edits:
            with contextlib.suppress(errors.UsageError, errors.NoLogits):
                VERBS[verb](session, start, length)
            session.audit()
            assert session.engine.cells_used == session.stats.cells_used
        if len(session.visible_tokens):
            check_restart(session)


@pytest.mark.parametrize("kind", ["yarn", "mrope"])
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(edits=st.lists(EDIT, min_size=1, max_size=12))
def test_random_edits_where_nothing_moves(
    models: dict[str, Model], kind: str, edits: list[tuple[str, int, int]]
) -> None:
    with Session(models[kind], settings=SETTINGS, on_unsupported="recompute") as session:
        session.append(some_tokens(30))
        for verb, start, length in edits:
            with contextlib.suppress(errors.UsageError, errors.NoLogits, errors.MaskUnsupported):
                VERBS[verb](session, start, length)
            session.audit()
            assert session.engine.cells_used == cells_in_llama(session.engine) == session.stats.cells_used
        if len(session.visible_tokens):
            session.recompute()
            check_restart(session)


# -- a chat ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "mask": lambda chat: chat.mask("user-1"),
    "unmask": lambda chat: chat.unmask("user-1"),
    "park": lambda chat: chat.park("user-1"),
    "evict": lambda chat: chat.evict("user-1"),
    "summarize": lambda chat: chat.summarize(),
    "summarize on a fork": lambda chat: chat.summarize(0, kept=False),
    "set_system": lambda chat: chat.set_system("Be brief."),
    "attach": lambda chat: chat.attach("no such file"),
}


@pytest.fixture(scope="module", params=["mamba", "lfm2"])
def talk(request: pytest.FixtureRequest, tiny_path: TinyPath) -> Iterator[Chat]:
    with Session(tiny_path(request.param), settings=Settings(n_ctx=512, n_threads=1)) as session:
        chat = Chat(session, system="Be kind.", options=Options(max_tokens=6))
        for question in ("One?", "Two?", "Three?"):
            chat.ask(question).finish()
        yield chat


@pytest.mark.parametrize("verb", REFUSED)
def test_a_chat_that_cannot_mask_asks_first(talk: Chat, verb: str) -> None:
    """Nothing is generated, evaluated or said; an answer that is open stays so."""
    before, turns, script, notes = look(talk.session), talk.turns, talk.script, talk.notes
    with pytest.raises(errors.MaskUnsupported):
        REFUSED[verb](talk)
    assert (look(talk.session), talk.turns, talk.script, talk.notes) == (before, turns, script, notes)
    reply = talk.ask("And on?")
    next(reply.pieces())
    with pytest.raises(errors.MaskUnsupported):
        REFUSED[verb](talk)
    assert not reply.finished
    assert reply.finish().message == talk.messages[-1]


def test_a_chat_that_cannot_mask_does_what_it_can(talk: Chat) -> None:
    """Pins, forks and a refused undo leave it as it is, and it talks on."""
    before = look(talk.session)
    with pytest.raises(errors.BadState, match="nothing to undo"):
        talk.undo()
    talk.pin("user-1")
    talk.pin("user-1", pinned=False)
    fork = talk.fork()
    assert fork.ask("In the fork?").finish().finished
    fork.session.close()
    assert look(talk.session) == before
    with pytest.raises(errors.UsageError, match="no policy"):
        talk.options = replace(talk.options, policy=policies.summarize_oldest())
    assert talk.options.policy is None


def test_a_chat_without_masks_that_is_full_says_what_helps(tiny_path: TinyPath) -> None:
    with Session(tiny_path("lfm2"), settings=Settings(n_ctx=256, n_threads=1)) as session:
        chat = Chat(session, options=Options(max_tokens=4))
        reply = chat.ask("Tell me more about it, please.").finish()
        while reply.timings.generated and chat.session.engine.cells_free > 60:
            chat.ask("Tell me more about it, please.").finish()
        before = chat.messages
        with pytest.raises(errors.ContextFull, match="begin a new chat, or open with a larger n_ctx"):
            chat.ask("Tell me more about it, please. " * 3)
        assert chat.messages == before


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_summary_where_masks_are_restarts(tiny_path: TinyPath, kind: str, kept: bool) -> None:
    settings = Settings(n_ctx=512, n_threads=1)
    with Session(tiny_path(kind), settings=settings, on_unsupported="recompute") as session:
        chat = Chat(session, options=Options(max_tokens=4, summary_tokens=6))
        for question in ("One?", "Two?", "Three?"):
            chat.ask(question).finish()
        assert chat.summarize(kept=kept)
        visible = session.model.detokenize(session.visible_tokens)
        assert "One?" not in visible and "Three?" in visible and "Summarise" in visible
        assert chat.ask("And on?").finish().finished
