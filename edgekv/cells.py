"""Cells: the sequences and cells of one llama.cpp context. Every call is checked in Python before it can abort.

What kills the process inside llama.cpp (a bad sequence id, a shift on M-RoPE, a partial copy of a state, ...) is a
typed error here. Sequence -1, which means *every* sequence to ``seq_rm``, never leaves Python.

Sequences: 0 is scratch, which is empty between calls; 1 is the keeper (see :meth:`Engine.decode`); 2 is aside, where
tokens wait while others are read; sessions take the others.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
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
from .steps import Move

MAX_POS: Final = (1 << 31) - 1
_SLICE_BYTES: Final = 4 * MIB  # of K and V at once outside the cache, so that small boards need little RAM beside it
Blob: TypeAlias = npt.NDArray[np.uint8]
_CELL_EXTRA: Final = 12  # bytes of a llama_kv_cell_ext, which some models' cells have
_ALL: Final = -1  # llama.h: p0 or p1 < 0 is every position


class Cells:
    """The memory of context ``ctx``, with ``num_sequences`` sequences; callers hold the engine's lock.

    ``used`` counts the cells in use, ``peak`` is the most there were since the context began or was compacted.
    """

    def __init__(self, ctx: Any, model: Model, num_sequences: int, close_gaps: Capability, cell_bytes: int) -> None:
        self._ctx = ctx
        self._memory = lib.llama_get_memory(ctx)
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

    @property
    def free(self) -> int:
        return self.size - self.used

    def taken(self, run: CellRun) -> None:
        """A decode or a load put tokens into cells of a sequence."""
        self.used += run.p1 - run.p0
        self.peak = max(self.peak, self.used)
        if self.windowed:
            self._copy(run.seq, KEEPER, run.p0, run.p1)

    # -- cells of one sequence ------------------------------------------------------------------------------------

    def drop(self, run: CellRun, kept: int = 0) -> None:
        """Take cells out of a sequence; all must be held. ``kept`` of them, which others hold too, are not freed."""
        self.remove(run)
        self.used -= run.p1 - run.p0 - kept

    def share(self, run: CellRun, dst: int) -> None:
        """A second sequence holds these cells, too."""
        self.check_mask()
        self._check_range(run)
        self.check_seq(dst)
        self._copy(run.seq, dst, run.p0, run.p1)

    def move(self, step: Move) -> None:
        """Hand cells from one sequence to another, shifted on the way in scratch, where nothing can collide.

        Raises MaskUnsupported where llama.cpp would answer yes and keep the text (recurrent, hybrid), or abort.
        """
        run = CellRun(step.src, step.p0, step.p1)
        if not step.delta:
            self.share(run, step.dst)
            self._leave(run)
            return
        self._check_shift(step.p0, step.p1, step.delta)
        self.share(run, SCRATCH)
        self._leave(run)
        self.shift(SCRATCH, step.p0, step.p1, step.delta)
        moved = CellRun(SCRATCH, step.p0 + step.delta, step.p1 + step.delta)
        self.share(moved, step.dst)
        self._leave(moved)

    def shift(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to positions [p0, p1) of ``seq``; K is rotated at the next decode, over the whole cache.

        Raises MaskUnsupported where llama.cpp cannot shift: it would abort, or rescale every K row.
        """
        self._check_range(CellRun(seq, p0, p1))
        self._check_shift(p0, p1, delta)
        lib.llama_memory_seq_add(self._memory, seq, p0, p1, delta)
        self.pending_shift = True

    def own(self, run: CellRun) -> None:
        """Replace a sequence's cells by copies nobody else holds; another sequence must hold the old ones.

        The way is out of the cache and back in, so no shift may be pending.
        """
        for part, blob in self.copies(run):
            self.put(part._replace(seq=SCRATCH), blob)
            self._leave(part)
            self._copy(SCRATCH, part.seq, part.p0, part.p1)
            self._leave(part._replace(seq=SCRATCH))

    def copies(self, run: CellRun) -> Iterator[tuple[CellRun, Blob]]:
        """Copies of a sequence's cells as llama.cpp writes them, slice by slice; the cells stay. No shift may be
        pending. (llama_state_seq_get_data; by way of scratch, as it takes whole sequences.)"""
        if self.pending_shift:
            raise UsageError("cells cannot be copied while a shift is pending")
        for part in self.slices(run):
            with _llama.uninterrupted():
                self.share(part, SCRATCH)
                try:
                    blob = self.save(SCRATCH)
                finally:
                    self._leave(part._replace(seq=SCRATCH))
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
        """Take cells out of a sequence for good, and out of the keeper too.

        The keeper holds cells of all sequences, so others at the same positions are put back into it.
        """
        self._leave(run)
        if not self.windowed:
            return
        self._leave(run._replace(seq=KEEPER))
        for other in range(self.num_sequences):
            if other != KEEPER:
                self._copy(other, KEEPER, run.p0, run.p1)

    def _copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        lib.llama_memory_seq_cp(self._memory, src, dst, p0, p1)

    def _leave(self, run: CellRun) -> None:
        """Take cells out of a sequence while another one still holds them."""
        self._check_range(run)
        if not lib.llama_memory_seq_rm(self._memory, *run):
            raise DecodeFailed(f"llama.cpp refused to remove positions [{run.p0}, {run.p1}) of sequence {run.seq}")

    # -- whole sequences ------------------------------------------------------------------------------------------

    def replace(self, src: int, dst: int) -> None:
        """Sequence ``dst`` becomes what ``src`` is, recurrent state and all; it shares the cells."""
        self.check_seq(src)
        self.clear(dst)
        self._copy(src, dst, _ALL, _ALL)

    def clear(self, seq: int) -> None:
        """Empty a sequence; the caller counts its cells. Works for every kind of memory."""
        self.check_seq(seq)
        if not self._model.capabilities.mask:
            if not lib.llama_memory_seq_rm(self._memory, seq, _ALL, _ALL):
                raise DecodeFailed(f"llama.cpp refused to empty sequence {seq}")
        elif (end := self.last_position(seq)) >= 0:
            self.remove(CellRun(seq, 0, end + 1))

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
        self._copy(seq, SCRATCH, p0, p0 + width)
        try:
            return self._blob_positions(SCRATCH)[1]
        finally:
            self._leave(CellRun(SCRATCH, p0, p0 + width))

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
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_outputs_max, params.n_seq_max = 256, 32, 32, 2, 2
    params.kv_unified = params.swa_full = True
    params.offload_kqv = params.op_offload = False
    params.n_threads = params.n_threads_batch = 1
    context = lib.llama_init_from_model(model.ptr, params)
    if not context:
        raise DecodeFailed(f"no context to try it in: {_llama.last_messages() or 'no reason given'}")
    try:
        memory, batch = lib.llama_get_memory(context), Batch(_TRIED)
        batch.fill([Chunk(0, 0, np.zeros(_TRIED, np.int32), "none")])
        if code := lib.llama_decode(context, batch.native):
            raise DecodeFailed(f"llama_decode returned {code}")
        layout, blob = _recognised(_saved(context, 0))
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


def _recognised(blob: Blob) -> tuple[Layout, Blob]:
    """The layout under which a blob is that of the positions [0, _TRIED)."""
    wanted, why = np.arange(_TRIED), ""
    for extra in (0, _CELL_EXTRA):
        try:
            held = state_blob.positions(blob, cell_extra=extra)
        except AuditFailed as err:
            why = str(err)
            continue
        if held and all(np.array_equal(cache, wanted) for cache in held):
            return Layout(extra, state_blob.matrices(blob, cell_extra=extra)), blob
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
