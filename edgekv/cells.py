"""Cells: the sequences and cells of one llama.cpp context. Every call is checked in Python before it can abort.

What kills the process inside llama.cpp (a bad sequence id, a shift on M-RoPE, a partial copy of a state, ...) is a
typed error here. Sequence -1, which means *every* sequence to ``seq_rm``, never leaves Python.

Sequences: 0 is scratch, which is empty between calls; 1 is the keeper (see :meth:`Engine.decode`); 2 is aside, where
tokens wait while others are read; sessions take the others.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _llama, state_blob
from ._llama import lib
from .batch import Batch, Chunk
from .capabilities import Capability
from .columns import CellRun
from .errors import AuditFailed, ContextFull, DecodeFailed, MaskUnsupported, UsageError
from .memory import MIB
from .model import Model
from .settings import KEEPER, SCRATCH
from .steps import Drop, Move, Shift

MAX_POS: Final = (1 << 31) - 1
_SLICE_BYTES: Final = 4 * MIB  # of K and V at once outside the cache, so that small boards need little RAM beside it
Blob: TypeAlias = npt.NDArray[np.uint8]
_CELL_EXTRA: Final = 12  # bytes of a llama_kv_cell_ext, which some models' cells have
_ALL: Final = -1  # llama.h: p0 or p1 < 0 is every position
Call: TypeAlias = "functools.partial[Any]"
_CALL: Final = functools.partial.__call__


class Cells:
    """The memory of context ``ctx``, with ``num_sequences`` sequences; callers hold the engine's lock.

    ``used`` counts the cells in use, ``peak`` is the most there were since the context began or was compacted.
    """

    def __init__(self, ctx: Any, model: Model, num_sequences: int, close_gaps: Capability, cell_bytes: int) -> None:
        self._ctx = ctx
        self._memory = lib.llama_get_memory(ctx)
        self._copy = functools.partial(lib.llama_memory_seq_cp, self._memory)
        self._model = model
        self._close_gaps = close_gaps
        self.num_sequences: Final = num_sequences
        self.size: Final[int] = lib.llama_n_ctx(ctx)
        self.windowed: Final = model.n_swa > 0 and bool(model.capabilities.mask)
        self._slice = max(1, _SLICE_BYTES // max(1, cell_bytes))
        if self.windowed:  # the state of a sequence leaves out what lies outside its window
            self._slice = min(self._slice, max(1, model.n_swa // 2))
        self.used = self.peak = 0
        self.pending_shift = False
        self.touched = False  # whether llama.cpp may hold something else than when the verb under way began

    @property
    def free(self) -> int:
        return self.size - self.used

    def taken(self, run: CellRun) -> None:
        """A decode or a load put tokens into cells of a sequence."""
        self.used += run.p1 - run.p0
        self.peak = max(self.peak, self.used)
        if self.windowed:
            self._copy(run.seq, KEEPER, run.p0, run.p1)

    def perform(self, calls: Iterable[Call], used: int = 0, then: Iterable[Call] = ()) -> None:
        """Native calls, ``used`` more cells in use, and ``then``: all of them, with no bytecode in between.

        An exception of a signal handler, or one that another thread sets, arrives between two bytecodes. Here the
        interpreter runs none: ``map`` calls C functions (ctypes, dict methods) from C. So it comes before the first or
        after the last. Raises DecodeFailed when llama.cpp refused to remove cells, after all calls were made.
        """
        counted = functools.partial(self.__dict__.update, used=self.used + used, peak=max(self.peak, self.used + used))
        whole = (*calls, counted, *then)
        self.touched = True
        results = list(map(_CALL, whole))
        if False in results:
            raise DecodeFailed("llama.cpp refused to remove cells")

    # -- cells of one sequence ------------------------------------------------------------------------------------

    def calls(self, step: Drop | Move | Shift) -> tuple[list[Call], int]:
        """The native calls that carry a step out, which was checked, and how many cells more are in use afterwards.

        Cells move by way of scratch, where nothing can collide. Raises MaskUnsupported where llama.cpp would answer
        yes and keep the text (recurrent, hybrid), or abort.
        """
        run = CellRun(step.src if isinstance(step, Move) else step.seq, step.p0, step.p1)
        if isinstance(step, Drop):
            return self._removal(run), step.kept - (run.p1 - run.p0)
        if isinstance(step, Shift):
            return [self._shift(run, step.delta)], 0
        if not step.delta:
            return [*self._sharing(run, step.dst), self._leave(run)], 0
        aside = run._replace(seq=SCRATCH)
        moved = CellRun(SCRATCH, step.p0 + step.delta, step.p1 + step.delta)
        up = [*self._sharing(run, SCRATCH), self._leave(run), self._shift(aside, step.delta)]
        return [*up, *self._sharing(moved, step.dst), self._leave(moved)], 0

    def over(self, move: Move) -> list[Call]:
        """The native calls of a move to where other cells are, which go."""
        there = CellRun(move.dst, move.p0 + move.delta, move.p1 + move.delta)
        return [*self._removal(there), *self.calls(move)[0]]

    def drop(self, run: CellRun, kept: int = 0) -> None:
        """Take cells out of a sequence; all must be held. ``kept`` of them, which others hold too, are not freed."""
        self.perform(*self.calls(Drop(*run, kept)))

    def share(self, run: CellRun, dst: int) -> None:
        """A second sequence holds these cells, too."""
        self.perform(self._sharing(run, dst))

    def move(self, step: Move) -> None:
        """Hand cells from one sequence to another, shifted on the way."""
        self.perform(*self.calls(step))

    def shift(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to positions [p0, p1) of ``seq``; K is rotated at the next decode, over the whole cache.

        Raises MaskUnsupported where llama.cpp cannot shift: it would abort, or rescale every K row.
        """
        self.perform([self._shift(CellRun(seq, p0, p1), delta)])

    def own(self, run: CellRun) -> None:
        """Replace a sequence's cells by copies nobody else holds; another sequence must hold the old ones.

        The way is out of the cache and back in, so no shift may be pending.
        """
        for part, blob in self.copies(run):
            aside = part._replace(seq=SCRATCH)
            self.put(aside, blob)
            self.perform([self._leave(part), *self._sharing(aside, part.seq), self._leave(aside)])

    def copies(self, run: CellRun) -> Iterator[tuple[CellRun, Blob]]:
        """Copies of a sequence's cells as llama.cpp writes them, slice by slice; the cells stay. No shift may be
        pending. (llama_state_seq_get_data; by way of scratch, as it takes whole sequences.)"""
        if self.pending_shift:
            raise UsageError("cells cannot be copied while a shift is pending")
        for part in self.slices(run):
            self.share(part, SCRATCH)
            try:
                blob = self.save(SCRATCH)
            finally:
                self.perform([self._leave(part._replace(seq=SCRATCH))])
            self.check_positions(blob, part.p0, part.p1)  # before anybody relies on the copy
            yield part, blob

    def slices(self, run: CellRun) -> list[CellRun]:
        """The pieces a run is copied in."""
        starts = range(run.p0, run.p1, self._slice)
        return [CellRun(run.seq, p0, min(run.p1, p0 + self._slice)) for p0 in starts]

    def put(self, run: CellRun, blob: Blob) -> None:
        """Copies that :meth:`copies` gave come into free cells of an empty sequence, at the positions they had.

        Raises AuditFailed when the blob holds others, ContextFull when no cells are free; then nothing has changed.
        """
        self.check_blob(blob, run.p0, run.p1)
        self.load(run.seq, blob, run.p1 - run.p0)
        self.taken(run)

    def check_positions(self, blob: Blob, p0: int, p1: int) -> None:
        """Raise AuditFailed unless a blob holds exactly the positions [p0, p1)."""
        held = state_blob.positions(blob, cell_extra=self._layout.cell_extra)
        wanted = np.arange(p0, p1, dtype=np.int32)
        matrices = state_blob.matrices(blob, cell_extra=self._layout.cell_extra)
        if matrices != self._layout.matrices or not all(np.array_equal(cache, wanted) for cache in held):
            raise AuditFailed(f"these K and V are not those of positions [{p0}, {p1})")

    def check_blob(self, blob: Blob, p0: int, p1: int) -> None:
        """As :meth:`check_positions`, and that every number is finite: what llama.cpp gets to load."""
        self.check_positions(blob, p0, p1)
        state_blob.check_finite(blob, cell_extra=self._layout.cell_extra)

    def check_state(self, blob: Blob, num_cells: int) -> None:
        """Raise AuditFailed where a whole state has attention cells, and not those of positions [0, num_cells).

        A recurrent state has none; a hybrid one begins with them (llama-memory-hybrid.cpp, state_write).
        """
        if not self._model.hybrid:
            return
        if not np.array_equal(state_blob.first_positions(blob), np.arange(num_cells)):
            raise AuditFailed(f"this state is not that of {num_cells:,} tokens")
        state_blob.check_finite_first(blob)

    def bounds(self, blob: Blob) -> tuple[int, int]:
        """The first position a blob holds, and the one behind its last."""
        held = state_blob.positions(blob, cell_extra=self._layout.cell_extra)
        if not held or not len(held[0]):
            raise AuditFailed("these K and V are of no position")
        return int(held[0][0]), int(held[0][-1]) + 1

    def cut(self, blob: Blob, p0: int, p1: int) -> Blob:
        """The part of a blob at positions [p0, p1)."""
        return state_blob.select(blob, p0, p1, cell_extra=self._layout.cell_extra)

    @property
    def can_copy(self) -> Capability:
        """Whether cells can be copied out and back, tried out at the first question (milliseconds)."""
        if not self._model.capabilities.park:
            return self._model.capabilities.park
        layout = layout_of(self._model)
        return layout if isinstance(layout, Capability) else self._model.capabilities.park

    def check_copy(self) -> None:
        """Raise MaskUnsupported where cells cannot be copied."""
        if not self.can_copy:
            raise MaskUnsupported(self.can_copy.reason)

    @property
    def _layout(self) -> Layout:
        self.check_copy()
        layout = layout_of(self._model)
        assert isinstance(layout, Layout)
        return layout

    def remove(self, run: CellRun) -> None:
        """Take cells out of a sequence for good, and out of the keeper too; the caller counts them."""
        self.perform(self._removal(run))

    def _removal(self, run: CellRun) -> list[Call]:
        """The keeper holds cells of all sequences, so others at the same positions are put back into it."""
        if not self.windowed:
            return [self._leave(run)]
        others = [seq for seq in range(self.num_sequences) if seq != KEEPER]
        again = [functools.partial(self._copy, other, KEEPER, run.p0, run.p1) for other in others]
        return [self._leave(run), self._leave(run._replace(seq=KEEPER)), *again]

    def _sharing(self, run: CellRun, dst: int) -> list[Call]:
        self.check_mask()
        self._check_range(run)
        self.check_seq(dst)
        return [functools.partial(self._copy, run.seq, dst, run.p0, run.p1)]

    def _leave(self, run: CellRun) -> Call:
        """Takes cells out of a sequence while another one still holds them."""
        self._check_range(run)
        return functools.partial(lib.llama_memory_seq_rm, self._memory, *run)

    def _shift(self, run: CellRun, delta: int) -> Call:
        self._check_range(run)
        self._check_shift(run.p0, run.p1, delta)
        self.pending_shift = True  # before the call: settling what is not pending costs little
        return functools.partial(lib.llama_memory_seq_add, self._memory, *run, delta)

    # -- whole sequences ------------------------------------------------------------------------------------------

    def replacing(self, src: int, dst: int) -> list[Call]:
        """Sequence ``dst`` becomes what ``src`` is, recurrent state and all; it shares the cells."""
        self.check_seq(src)
        return [*self.clearing(dst), functools.partial(self._copy, src, dst, _ALL, _ALL)]

    def clear(self, seq: int) -> None:
        """Empty a sequence; the caller counts its cells. Works for every kind of memory."""
        self.perform(self.clearing(seq))

    def clearing(self, seq: int) -> list[Call]:
        """The native calls of :meth:`clear`."""
        self.check_seq(seq)
        if not self._model.capabilities.mask:
            return [functools.partial(lib.llama_memory_seq_rm, self._memory, seq, _ALL, _ALL)]
        end = self.last_position(seq)
        return self._removal(CellRun(seq, 0, end + 1)) if end >= 0 else []

    def only(self, wanted: Mapping[int, npt.NDArray[np.int32]]) -> set[int]:
        """Take everything out of the cache but the positions ``wanted`` of each sequence (int32, sorted), and count the
        cells again; of a model with states, nothing is taken out. Returns the sequences that lack some of theirs."""
        if not self._model.capabilities.mask:
            ends = {seq: int(pos[-1]) if len(pos) else -1 for seq, pos in wanted.items()}
            for seq in set(range(self.num_sequences)) - ends.keys():
                self.clear(seq)
            return {seq for seq, end in ends.items() if self.last_position(seq) != end}
        held: dict[int, list[int]] = {seq: [] for seq in range(self.num_sequences)}
        for pos, sequences in self.members():
            for seq in sequences:
                held[seq].append(pos)
        calls, lacking = [], set()
        for seq, positions in held.items():
            here, there = np.unique(np.asarray(positions, np.int32)), wanted.get(seq, np.empty(0, np.int32))
            if seq == KEEPER:
                continue
            calls += [self._leave(CellRun(seq, *run)) for run in _runs(np.setdiff1d(here, there))]
            if len(np.setdiff1d(there, here)):
                lacking.add(seq)
        if self.windowed:
            if held[KEEPER]:
                calls.append(self._leave(CellRun(KEEPER, 0, max(held[KEEPER]) + 1)))
            calls += [functools.partial(self._copy, s, KEEPER, 0, MAX_POS) for s in held if s != KEEPER]
        self.perform(calls)
        self.used = len(self.members())
        self.peak = max(self.peak, self.used)
        return lacking

    def last_position(self, seq: int) -> int:
        """The highest position a sequence holds, -1 when it is empty."""
        self.check_seq(seq)
        return int(lib.llama_memory_seq_pos_max(self._memory, seq))

    # -- state ----------------------------------------------------------------------------------------------------

    def save(self, seq: int) -> Blob:
        """uint8 (n,): the state of a sequence as llama.cpp writes it; no shift may be pending. With a window, what lies
        outside it is left out."""
        self.check_seq(seq)
        return _saved(self._ctx, seq)

    def load(self, seq: int, blob: Blob, num_cells: int) -> None:
        """Put a state of ``num_cells`` tokens that :meth:`save` gave into an empty sequence, into any free cells.

        Raises ContextFull where there are not enough, AuditFailed where llama.cpp does not take it as a whole.
        """
        if self.last_position(seq) >= 0:
            raise UsageError(f"sequence {seq} is not empty: a load would lose what it holds")
        if num_cells > self.free:
            raise ContextFull(f"a saved state takes {num_cells:,} cells and {self.free:,} are free")
        _llama.forget_messages()
        self.touched = True
        if lib.llama_state_seq_set_data(self._ctx, _bytes(blob), len(blob), seq) != len(blob):
            self.clear(seq)
            raise AuditFailed(f"llama.cpp does not take this state: {_llama.last_messages() or 'no reason given'}")

    def repack(self) -> None:
        """Put all cells in a row from the first on, in the order they are in; positions and sequences stay.

        By way of the whole state, so it takes as much free memory as the cells in use hold bytes.
        """
        size = lib.llama_state_get_size(self._ctx)
        blob = np.empty(size, np.uint8)
        if lib.llama_state_get_data(self._ctx, _bytes(blob), size) != size:
            raise DecodeFailed("llama.cpp did not give its state; nothing has changed")
        if lib.llama_state_set_data(self._ctx, _bytes(blob), size) != size:
            raise AuditFailed("llama.cpp did not take its own state back; open a new session")
        self.peak = self.used

    def members(self) -> list[tuple[int, frozenset[int]]]:
        """(position, sequences) of every cell in use, in the order of the cells.

        llama.cpp has no call for it. But a state begins with what every cell holds: so a buffer that has room for that,
        and not for K and V, is filled as far as it goes, and refused. Raises AuditFailed where that has changed, or
        where edgekv does not know how cells are written.
        """
        layout = layout_of(self._model)
        if not isinstance(layout, Layout):
            raise AuditFailed(layout.reason)
        most = 256 + self.size * (8 + layout.cell_extra) + 4 * self.size * self.num_sequences
        begin = np.zeros(most, np.uint8)
        with _llama.unsaid():
            lib.llama_state_get_data(self._ctx, _bytes(begin), most)
        return state_blob.members(begin, cell_extra=layout.cell_extra)

    # -- looking --------------------------------------------------------------------------------------------------

    def positions(self, seq: int) -> list[npt.NDArray[np.int32]]:
        """The positions llama.cpp really holds in a sequence, sorted, one int32 array a cache.

        Read from state blobs, as llama.cpp has no call for it: K and V are copied too, so this is for checks. A
        sliding-window model has two caches, and a blob leaves out what lies outside the window of its sequence: so
        the second is read in slices, each copied to scratch, where it is the window.
        """
        caches = self._blob_positions(seq)
        if not self.windowed or len(caches) < 2 or seq == SCRATCH:
            return caches
        width = max(1, self._model.n_swa // 2)
        slices = [self._slice_positions(seq, int(i) * width, width) for i in np.unique(caches[0] // width)]
        return [caches[0], np.concatenate(slices) if slices else caches[1]]

    def _slice_positions(self, seq: int, p0: int, width: int) -> npt.NDArray[np.int32]:
        self.perform([functools.partial(self._copy, seq, SCRATCH, p0, p0 + width)])
        try:
            return self._blob_positions(SCRATCH)[1]
        finally:
            self.perform([self._leave(CellRun(SCRATCH, p0, p0 + width))])

    def _blob_positions(self, seq: int) -> list[npt.NDArray[np.int32]]:
        return state_blob.positions(self.save(seq), cell_extra=self._layout.cell_extra)

    # -- checks ---------------------------------------------------------------------------------------------------

    def check_mask(self) -> None:
        if not self._model.capabilities.mask:
            raise MaskUnsupported(self._model.capabilities.mask.reason)

    def check_seq(self, seq: int) -> None:
        if not 0 <= seq < self.num_sequences:
            raise UsageError(f"sequence {seq} is none of this engine's [0, {self.num_sequences})")

    def _check_shift(self, p0: int, p1: int, delta: int) -> None:
        if not self._close_gaps:
            raise MaskUnsupported(self._close_gaps.reason)
        if p0 + delta < 0 or p1 + delta > MAX_POS:
            raise UsageError(f"a shift by {delta} moves [{p0}, {p1}) out of the range of positions")

    def _check_range(self, run: CellRun) -> None:
        self.check_seq(run.seq)
        if not 0 <= run.p0 < run.p1 <= MAX_POS:
            raise UsageError(f"[{run.p0}, {run.p1}) is no range of positions")


@dataclass(frozen=True)
class Layout:
    """How llama.cpp writes the cells of a model: bytes a cell beyond the usual, and of each cache how many matrices of
    K and V it has."""

    cell_extra: int
    matrices: tuple[int, ...]


_layouts: weakref.WeakKeyDictionary[Model, Layout | Capability] = weakref.WeakKeyDictionary()


def layout_of(model: Model) -> Layout | Capability:
    """How a model's cells are written; why they cannot be copied where edgekv does not understand it. Found out once a
    model, in a small context of its own: some tokens are evaluated, saved, cut, loaded and saved again."""
    found = _layouts.get(model)
    if found is None:
        try:
            found = _try_copying(model)
        except (AuditFailed, DecodeFailed) as err:
            found = Capability(
                False,
                f"edgekv does not know how llama.cpp writes the cells of {model.arch} ({err}): they cannot be parked, "
                "copied or saved; mask works, and save(kv=False)",
            )
        _layouts[model] = found
    return found


_TRIED: Final = 4  # positions


def _try_copying(model: Model) -> Layout:
    """Raises AuditFailed where what comes back is not what was saved, DecodeFailed."""
    context = lib.llama_init_from_model(model.ptr, _llama.small_context(256, 32, n_sequences=2))
    if not context:
        raise DecodeFailed(f"no context to try it in: {_llama.last_messages() or 'no reason given'}")
    try:
        memory, batch = lib.llama_get_memory(context), Batch(_TRIED)
        batch.fill([Chunk(0, 0, np.zeros(_TRIED, np.int32), "none")])
        if code := lib.llama_decode(context, batch.native):
            raise DecodeFailed(f"llama_decode returned {code}")
        blob = _saved(context, 0)
        layout = _recognised(blob)
        part = state_blob.select(blob, 1, _TRIED - 1, cell_extra=layout.cell_extra)
        if lib.llama_state_seq_set_data(context, _bytes(part), len(part), 1) != len(part):
            raise AuditFailed("a part of what it has written is not taken back")
        if not state_blob.same(_saved(context, 1), part, cell_extra=layout.cell_extra):
            raise AuditFailed("what comes back is not what was written")
        if not lib.llama_memory_seq_rm(memory, 1, -1, -1):
            raise AuditFailed("what was loaded cannot be removed")
        return layout
    finally:
        lib.llama_free(context)


def _recognised(blob: Blob) -> Layout:
    """The layout under which a blob is that of the positions [0, _TRIED)."""
    wanted, why = np.arange(_TRIED), ""
    for extra in (0, _CELL_EXTRA):
        try:
            held = state_blob.positions(blob, cell_extra=extra)
        except AuditFailed as err:
            why = str(err)
            continue
        if held and all(np.array_equal(cache, wanted) for cache in held):
            return Layout(extra, state_blob.matrices(blob, cell_extra=extra))
        why = "its positions are others"
    raise AuditFailed(why)


def _saved(context: Any, seq: int) -> Blob:
    """uint8 (n,): the state of a sequence. Raises AuditFailed."""
    size = lib.llama_state_seq_get_size(context, seq)
    blob = np.empty(size, np.uint8)
    if lib.llama_state_seq_get_data(context, _bytes(blob), size, seq) != size:
        raise AuditFailed(f"llama.cpp did not give the state of sequence {seq}")
    return blob


def _bytes(blob: Blob) -> Any:
    return blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _runs(positions: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    """Sorted positions as half-open runs."""
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(positions, cuts) if len(part)]
