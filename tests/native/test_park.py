"""Parked spans: their K and V leave the cache, wait in memory or in a folder, and come back without being read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgekv import Session, Settings, State, cells, errors, memory
from helpers import look, open_tiny, python, some_tokens

TinyPath = Callable[..., Path]
KINDS = ["llama", "gemma3", "yarn", "mrope"]


def filled(path: Path, **settings: object) -> Session:
    """sys, a, b, c: 10, 60, 30 and 20 tokens."""
    session = open_tiny(path, **settings)  # type: ignore[arg-type]
    for name, count in (("sys", 10), ("a", 60), ("b", 30), ("c", 20)):
        session.append(some_tokens(count, count), name=name)
    return session


@pytest.fixture(params=["ram", "folder"])
def to(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "ram" if request.param == "ram" else str(tmp_path / "parked")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flash_attention", [True, False])
@pytest.mark.parametrize("slice_bytes", [None, 4096])
def test_what_was_parked_comes_back_bit_for_bit(
    tiny_path: TinyPath, to: str, kind: str, flash_attention: bool, slice_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if slice_bytes is not None:
        monkeypatch.setattr(cells, "_SLICE_BYTES", slice_bytes)
    with filled(tiny_path(kind), flash_attention=flash_attention) as session:
        before, logits = look(session), session.logits()
        parked = session.park("a", to, gap="keep")
        assert (parked.tokens, parked.freed, parked.prefilled) == (60, 60, 0)
        assert look(session).cells_used == before.cells_used - 60
        assert session.stats.parked == 60
        read = session.stats.prefilled
        back = session.unmask("a")
        assert (back.tokens, back.prefilled) == (60, 0)
        assert session.stats.prefilled == read
        assert look(session) == before
        assert np.array_equal(session.logits(), logits)
        assert session.stats.parked_bytes == session.stats.parked_on_disk == 0


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_into_a_fragmented_cache(tiny_path: TinyPath, to: str, kind: str) -> None:
    """The only free cells are holes of three, between cells that others hold."""
    with open_tiny(tiny_path(kind), n_ctx=256, kv_type="f32", flash_attention=False) as session:
        session.append(some_tokens(10, 1), name="sys")
        session.append(some_tokens(60, 2), name="a")
        session.append(some_tokens(8, 3), name="b")
        logits = session.logits()
        session.park("a", to, gap="keep")
        session.append(some_tokens(session.engine.cells_free, 4), name="filler")
        start = session.span("filler").start
        session.evict([(i, i + 3) for i in range(start, start + 80, 4)], gap="keep")
        assert session.engine.cells_free == 60
        session.unmask("a")
        assert session.engine.cells_free == 0
        session.audit()
        session.rewind("filler")
        assert np.abs(session.logits() - logits).max() < 1e-4


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_closed_gap_opens_again(tiny_path: TinyPath, to: str, kind: str) -> None:
    with filled(tiny_path(kind), kv_type="f32", flash_attention=False) as session:
        logits = session.logits()
        session.park("a", to)
        session.append(some_tokens(5, 5), name="d")
        session.rewind("d")
        session.unmask("a")
        session.audit()
        assert (
            np.abs(session.logits() - logits).max() < 1e-3
        )  # turned there and back; hiding a token moves logits by about 1


def test_a_part_of_it_comes_back(tiny_path: TinyPath, to: str) -> None:
    with filled(tiny_path("llama")) as session:
        start = session.span("a").start
        session.park("a", to)
        session.unmask((start + 20, start + 30))
        assert session.states(session.span("a")) == {State.VISIBLE: 10, State.PARKED: 50}
        session.audit()
        session.unmask("a")
        assert session.stats.parked == 0
        session.audit()


def test_masked_spans_are_parked_too_and_shown_again(tiny_path: TinyPath, to: str) -> None:
    with filled(tiny_path("llama")) as session:
        logits = session.logits()
        session.mask("a", gap="keep")
        receipt = session.park(["a", "b"], to, gap="keep")
        assert (receipt.tokens, receipt.freed) == (90, 90)
        session.unmask(["a", "b"])
        assert np.array_equal(session.logits(), logits)
        session.audit()


def test_bytes_are_counted_where_they_are(tiny_path: TinyPath, tmp_path: Path) -> None:
    with filled(tiny_path("llama")) as session:
        each = session.model.kv_bytes_per_token("f16")
        receipt = session.park("a")
        assert receipt.parked_bytes == 60 * each
        assert 60 * each <= session.stats.parked_bytes <= 60 * each + 64 * 60
        assert session.stats.parked_on_disk == 0
        session.park("b", tmp_path)
        assert 30 * each <= session.stats.parked_on_disk <= 30 * each + 64 * 30
        assert "90 parked" in str(session)
        assert session.unmask("b").loaded_bytes == 30 * each
        assert session.stats.parked_on_disk == 0


def test_a_folder_is_made_and_holds_no_name(tiny_path: TinyPath, tmp_path: Path) -> None:
    """The file goes with the process, whatever ends it: there is nothing to clean up."""
    folder = tmp_path / "not" / "there" / "yet"
    with filled(tiny_path("llama")) as session:
        session.park("a", folder)
        assert list(folder.iterdir()) == []
        session.unmask("a")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_room_in_the_folder_is_used_again_and_given_back(tiny_path: TinyPath, tmp_path: Path) -> None:
    with filled(tiny_path("llama")) as session:
        session.park("a", tmp_path)
        (file,) = session.engine.parking._files.values()
        full = os.fstat(file._file.fileno()).st_size
        for _ in range(5):
            session.park("b", tmp_path)
            session.unmask("b")
        assert os.fstat(file._file.fileno()).st_size == full
        session.unmask("a")
        assert os.fstat(file._file.fileno()).st_size == 0


def test_undo_of_a_park_and_of_what_came_after(tiny_path: TinyPath, to: str) -> None:
    with filled(tiny_path("llama")) as session:
        before = look(session)
        session.mask("b")
        masked = look(session)
        session.park(["a", "b"], to)
        parked = look(session)
        session.unmask("a")
        session.undo()
        assert look(session).states == parked.states
        session.undo()
        assert look(session).states == masked.states
        session.undo()
        assert look(session).states == before.states


def test_evicted_from_where_it_was_parked(tiny_path: TinyPath, to: str) -> None:
    with filled(tiny_path("llama")) as session:
        session.park("a", to)
        receipt = session.evict("a")
        assert (receipt.tokens, receipt.freed) == (60, 0)
        assert session.stats.parked_bytes == session.stats.parked_on_disk == 0
        assert session.stats.evicted == 60
        with pytest.raises(errors.BadState, match="evicted"):
            session.unmask("a")
        assert session.undo().prefilled == 60  # K and V are gone: it is read, and parked again
        assert session.stats.parked == 60
        session.audit()


def test_forks_hold_what_is_parked_together(tiny_path: TinyPath, to: str) -> None:
    with filled(tiny_path("llama")) as session:
        logits = session.logits()
        session.park("a", to, gap="keep")
        with session.fork() as fork:
            fork.unmask("a")
            assert fork.stats.parked == 0
            assert session.stats.parked == 60
            assert np.abs(fork.logits() - logits).max() < 0.1
            session.audit()
            fork.audit()
        session.unmask("a")
        assert np.abs(session.logits() - logits).max() < 0.1
        session.audit()


def test_what_a_fork_holds_too_is_not_freed(tiny_path: TinyPath) -> None:
    with filled(tiny_path("llama")) as session, session.fork() as fork:
        free = session.engine.cells_free
        assert session.park("a", gap="keep").freed == 0
        assert session.engine.cells_free == free
        fork.evict("a", gap="keep")
        assert session.engine.cells_free == free + 60
        session.unmask("a")
        session.audit()
        fork.audit()


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_a_state_cannot_be_parked(tiny_path: TinyPath, kind: str) -> None:
    with filled(tiny_path(kind)) as session:
        before = look(session)
        with pytest.raises(errors.MaskUnsupported):
            session.park("a")
        assert look(session) == before


def test_wrong_calls_change_nothing(tiny_path: TinyPath, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with filled(tiny_path("llama")) as session:
        session.evict("c")
        before = look(session)
        for error, target, to in (
            (errors.PinnedTokens, "sys", "ram"),
            (errors.UnknownSpan, "nobody", "ram"),
            (errors.BadState, "c", "ram"),
            (errors.FileError, "a", tmp_path / "file"),
            (errors.FileError, "a", tmp_path / "file" / "below"),
        ):
            with pytest.raises(error):
                session.park(target, to)
            assert look(session) == before
        assert session.engine.parking.num_bytes(session._transcript.record) == (0, 0)
        assert not session.engine.parking


def test_memory_that_does_not_hold_it(tiny_path: TinyPath, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with filled(tiny_path("llama")) as session:
        before = look(session)
        monkeypatch.setattr(memory, "free_ram", lambda: 1000)
        with pytest.raises(errors.TooLarge, match="parking"):
            session.park("a")
        assert look(session) == before
        session.park("a", tmp_path)


def test_no_cells_are_free_for_it(tiny_path: TinyPath, to: str) -> None:
    with filled(tiny_path("llama"), n_ctx=256) as session:
        session.park("a", to)
        session.append(some_tokens(session.engine.cells_free - 59), name="d")
        before = look(session)
        with pytest.raises(errors.ContextFull, match="60 cells are needed and 59 are free"):
            session.unmask("a")
        assert look(session) == before
        session.rewind("d")
        session.unmask("a")
        session.audit()


def test_bytes_changed_in_the_folder_are_noticed(tiny_path: TinyPath, tmp_path: Path) -> None:
    with filled(tiny_path("llama")) as session:
        session.park("a", tmp_path)
        (file,) = session.engine.parking._files.values()
        before = look(session)
        for damage in (lambda f: (f.seek(777), f.write(b"\x55\xaa")), lambda f: f.truncate(100)):
            damage(file._file)
            file._file.flush()
            with pytest.raises(errors.DamagedFile, match="evict"):
                session.unmask("a")
            assert look(session) == before
        session.evict("a")
        session.audit()


def test_k_and_v_of_others_never_reach_the_session(tiny_path: TinyPath) -> None:
    """llama.cpp would take them: it checks neither positions nor how many there are."""
    with filled(tiny_path("llama")) as session:
        session.park("a")
        session.park("b")
        a, b = session.engine.parking._blobs.values()
        before = look(session)
        a.data, b.data = b.data, a.data
        with pytest.raises(errors.AuditFailed):
            session.unmask("a")
        assert look(session) == before
        a.data, b.data = b.data, a.data
        assert a.data is not None
        whole, a.data = a.data, a.data[:-8]
        with pytest.raises(errors.AuditFailed):
            session.unmask("a")
        assert look(session) == before
        a.data = whole
        session.unmask(["a", "b"])
        session.audit()


def test_ctrl_c_between_two_slices(tiny_path: TinyPath, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "_SLICE_BYTES", 4096)
    with filled(tiny_path("llama")) as session:
        before, put, calls = look(session), session.engine.parking.put, []

        def interrupted(*args: object) -> int:
            calls.append(args)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return put(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(session.engine.parking, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.park("a", to)
        assert look(session) == before
        assert not session.engine.parking


# -- a budget for what is parked -------------------------------------------------------------------------------------


def test_the_longest_parked_leaves_memory_first(tiny_path: TinyPath, tmp_path: Path) -> None:
    path = tiny_path("llama")
    with filled(path) as probe:
        probe.park("a")
        a = probe.stats.parked_bytes
    with filled(path, max_parked_bytes=a, park_folder=tmp_path) as session:
        session.park("a")
        assert (session.stats.parked_bytes, session.stats.parked_on_disk) == (a, 0)
        session.park("b")
        b = session.stats.parked_bytes
        assert 0 < b < a
        assert session.stats.parked_on_disk == a
        session.park("c")
        assert session.stats.parked_bytes > b  # b and c fit together
        assert session.stats.parked_on_disk == a
        for name in "abc":
            session.unmask(name)
        session.audit()
        assert session.stats.parked_bytes == session.stats.parked_on_disk == 0


def test_the_budget_may_be_text(tiny_path: TinyPath) -> None:
    with Session(tiny_path("llama"), n_ctx=512, max_parked_bytes="64 KiB", settings=Settings(n_threads=1)) as session:
        assert session.engine.settings.parked_limit == 65536
    with pytest.raises(errors.UsageError, match="is not a size"):
        Session(tiny_path("llama"), max_parked_bytes="much")


def test_what_is_larger_than_the_budget_goes_to_the_folder(tiny_path: TinyPath, tmp_path: Path) -> None:
    with filled(tiny_path("llama"), max_parked_bytes=0, park_folder=tmp_path) as session:
        session.park("a")
        assert session.stats.parked_bytes == 0
        assert session.stats.parked_on_disk > 0
        session.unmask("a")
        session.audit()


def test_a_budget_and_no_folder_to_spill_to(tiny_path: TinyPath, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with filled(tiny_path("llama"), max_parked_bytes=40_000, park_folder=tmp_path / "file") as session:
        session.park("a")
        before = look(session)
        with pytest.raises(errors.FileError, match="cannot hold parked spans"):
            session.park("b")
        assert look(session) == before
        session.unmask("a")
        session.audit()


def test_a_full_disk_changes_nothing(tiny_path: TinyPath, tmp_path: Path) -> None:
    """In a process that may write 20,000 bytes to a file."""
    done = python(_FULL_DISK, tiny_path("llama"), tmp_path)
    assert done.stdout.split() == ["FileError", "True", "True"], done.stderr


_FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, "tests/native")
from pathlib import Path
from test_park import filled, look
from edgekv import errors
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with filled(Path(sys.argv[1])) as session:
    before = look(session)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        session.park("a", sys.argv[2])
    except errors.FileError as err:
        print(type(err).__name__)
    print(look(session) == before)
    session.park("c", sys.argv[2])  # which is small enough
    session.unmask("c")
    session.park("a")
    session.unmask("a")
    session.audit()
    print(True)
"""
