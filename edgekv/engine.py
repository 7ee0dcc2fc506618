"""Engine: one llama.cpp context, its sequences and cells. Every call is checked in Python before it can abort.

What kills the process inside llama.cpp (a bad sequence id, a batch beyond n_batch, a shift on M-RoPE, logits that do
not exist, ...) is a typed error here. Sequence -1, which means *every* sequence to ``seq_rm``, never leaves Python.

Sequences: 0 is scratch, for building things aside; 1 is the keeper (see :meth:`Engine.decode`); sessions take the
others.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from . import _llama, memory, state_blob
from ._llama import lib
from .batch import Batch, Chunk
from .columns import CellRun
from .errors import AuditFailed, ClosedError, ContextFull, DecodeFailed, MaskUnsupported, NoLogits, TooLarge, UsageError
from .model import Model
from .settings import KEEPER, NUM_RESERVED, SCRATCH, Settings
from .steps import Drop, Move, Shift, Step

_MAX_POS: Final = (1 << 31) - 1


class LogitsHolder(Protocol):
    """Somebody who still needs the rows in llama.cpp's buffer when another decode is about to overwrite them."""

    def keep_logits(self) -> None: ...


class Engine:
    """A context on ``model``. All verbs hold ``lock``; close it before the model.

    Raises TooLarge, before anything is allocated, when the cache would not fit in free RAM.
    """

    def __init__(self, model: Model, settings: Settings = Settings()) -> None:
        settings.check()
        self.model: Final = model
        self.settings: Final = settings
        self.lock: Final = threading.RLock()
        self.close_gaps: Final = model.close_gaps(settings.kv_type)
        self.can_shift: Final = bool(self.close_gaps)
        self._refuse_too_large()
        self.max_outputs: Final = settings.max_outputs(model.n_vocab)
        self._ctx = self._open()
        self._memory = lib.llama_get_memory(self._ctx)
        self.num_cells: Final[int] = lib.llama_n_ctx(self._ctx)
        self.n_batch: Final[int] = lib.llama_n_batch(self._ctx)
        self.cells_used = 0
        self._windowed: Final = model.n_swa > 0
        self._free_sequences = list(range(NUM_RESERVED, settings.n_sequences))
        self._batch = Batch(self.n_batch)
        self._outputs: frozenset[int] = frozenset()
        self._holder: weakref.ref[LogitsHolder] | None = None
        self._pending_shift = False
        model.count_engine(+1)
        self._free = weakref.finalize(self, _free_context, self._ctx, model)

    def _refuse_too_large(self) -> None:
        s = self.settings
        n_batch = min(s.n_batch, memory.cells_for(s.n_ctx))
        need = self.model.estimate(s.n_ctx, s.kv_type, n_batch)
        if need.cache + need.buffers > need.free:
            room = memory.largest_context(self.model.header, 0, s.kv_type, n_batch)
            raise TooLarge(
                f"a cache of {s.n_ctx:,} cells in {s.kv_type} needs {need.cache / 1e6:,.0f} MB and "
                f"{need.free / 1e6:,.0f} MB are free; n_ctx={room} would fit, or kv_type='q8_0'"
            )

    def _open(self) -> Any:
        s = self.settings
        _llama.forget_messages()
        params = lib.llama_context_default_params()
        params.n_ctx = memory.cells_for(s.n_ctx)
        # One micro-batch a decode: a call that fails leaves nothing of itself behind (llama-context.cpp, decode).
        params.n_batch = params.n_ubatch = min(s.n_batch, params.n_ctx)
        params.n_seq_max = s.n_sequences
        params.n_outputs_max = self.max_outputs
        params.n_threads = params.n_threads_batch = s.threads
        params.flash_attn_type = 1 if s.flash_attention else 0
        params.type_k = params.type_v = _llama.KV_TYPE_IDS[s.kv_type]
        params.kv_unified = True  # several streams: a partial seq_cp aborts
        params.swa_full = True  # else hidden cells block a window's recycling
        params.offload_kqv = params.op_offload = False
        ctx = lib.llama_init_from_model(self.model.ptr, params)
        if not ctx:
            raise TooLarge(f"llama.cpp could not open the context: {_llama.last_messages() or 'no reason given'}")
        return ctx

    # -- life ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the context; closing twice is fine."""
        with self.lock:
            self._free()

    @property
    def closed(self) -> bool:
        return not self._free.alive

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ctx(self) -> Any:
        """The native llama_context pointer; raises ClosedError after close()."""
        self._check_open()
        return self._ctx

    def _check_open(self) -> None:
        if not self._free.alive:
            raise ClosedError("the engine was closed; open a new session")

    def take_sequences(self) -> list[int]:
        """Sequence ids for one more session: its live sequence, then its archives."""
        with self.lock:
            self._check_open()
            count = 1 + self.settings.n_archives
            if len(self._free_sequences) < count:
                raise UsageError(
                    f"this engine was opened for {self.settings.n_sessions} session(s); open it with more n_sessions"
                )
            taken, self._free_sequences = self._free_sequences[:count], self._free_sequences[count:]
            return taken

    def give_back(self, sequences: Iterable[int], num_cells: int) -> None:
        """Empty these sequences, which held ``num_cells`` cells, and take them back."""
        with self.lock:
            if self.closed:
                return
            for seq in sequences:
                self._remove(seq, 0, _MAX_POS)
                self._free_sequences.append(seq)
            self.cells_used -= num_cells

    # -- decode -------------------------------------------------------------------------------------------------

    @property
    def cells_free(self) -> int:
        return self.num_cells - self.cells_used

    def decode(self, chunks: Sequence[Chunk], holder: LogitsHolder | None = None) -> list[int]:
        """Read chunks of several sequences in one batch; returns the batch index of each chunk's last token.

        ``holder`` is told to keep its logits before a later decode overwrites them. Raises ContextFull when no cell
        is free (nothing changed), DecodeFailed when llama.cpp failed (the chunks were taken out again), UsageError
        for a batch llama.cpp would refuse.

        On sliding-window models llama.cpp takes any cell outside the window for free when exactly one sequence
        holds it, also with ``swa_full``: masked spans and closed gaps would lose their cells (llama-kv-cache.cpp,
        find_slot). So there every cell is held by a second sequence as well, the keeper.
        """
        with self.lock:
            self._check_open()
            self._check_chunks(chunks)
            ends = self._batch.fill(chunks)
            self._run([CellRun(c.seq, c.pos, c.pos + len(c.tokens)) for c in chunks], holder)
            return ends

    def decode_one(self, seq: int, pos: int, token: int, holder: LogitsHolder) -> None:
        """Read one token and keep its logits, at batch index 0; otherwise as :meth:`decode`.

        The path of every generated token: what Python touches between two decodes has left the CPU's caches, so it
        touches little.
        """
        with self.lock:
            self._check_open()
            self._check_place(seq, pos, 1)
            self._batch.fill_one(seq, pos, self.model.check_token(token))
            self._run((CellRun(seq, pos, pos + 1),), holder)

    def _run(self, runs: Sequence[CellRun], holder: LogitsHolder | None) -> None:
        """Decode the batch as it is filled, into cells at these places."""
        previous = self._holder() if self._holder is not None else None
        if previous is not None and previous is not holder:
            previous.keep_logits()
        self._holder, self._outputs = None, frozenset()
        code = lib.llama_decode(self._ctx, self._batch.native)
        self._pending_shift = False
        if code:
            self._take_back(runs, code)
        for seq, p0, p1 in runs:
            self.cells_used += p1 - p0
            if self._windowed:
                self._copy(seq, KEEPER, p0, p1)
        self._outputs = self._batch.outputs
        self._holder = weakref.ref(holder) if holder is not None else None

    def _check_chunks(self, chunks: Sequence[Chunk]) -> None:
        total = sum(len(c.tokens) for c in chunks)
        if not chunks or any(not len(c.tokens) for c in chunks):
            raise UsageError("nothing to decode: every chunk needs at least one token")
        if total > self.n_batch:
            raise UsageError(f"{total} tokens are more than one batch holds ({self.n_batch})")
        if sum(len(c.tokens) if c.outputs == "all" else 1 for c in chunks) > self.max_outputs:
            raise UsageError(f"more than {self.max_outputs} rows of logits in one batch")
        if len({c.seq for c in chunks}) < len(chunks):
            raise UsageError("one chunk a sequence")
        for chunk in chunks:
            self.model.check_range(chunk.tokens)
            self._check_place(chunk.seq, chunk.pos, len(chunk.tokens))

    def _check_place(self, seq: int, pos: int, count: int) -> None:
        """llama.cpp takes tokens only right behind the last position their sequence holds."""
        self._check_seq(seq)
        newest = lib.llama_memory_seq_pos_max(self._memory, seq)
        if (newest >= 0 and pos != newest + 1) or not 0 <= pos < _MAX_POS - count:
            raise UsageError(f"sequence {seq} continues at position {newest + 1}, not at {pos}")

    def _take_back(self, runs: Sequence[CellRun], code: int) -> None:
        if code == 1:
            wanted = sum(p1 - p0 for _, p0, p1 in runs)
            raise ContextFull(f"{wanted} tokens need as many cells and llama.cpp has none free")
        if self.model.capabilities.rewind:  # else a state: what it took in cannot be taken out again
            for seq, p0, _ in runs:
                self._remove(seq, p0, _MAX_POS)
        raise DecodeFailed(f"llama_decode returned {code}: {_llama.last_messages() or 'no reason given'}")

    # -- logits -------------------------------------------------------------------------------------------------

    def check_row(self, row: int) -> int:
        """Raise NoLogits unless batch index ``row`` of the last decode kept its logits."""
        self._check_open()
        if row not in self._outputs:
            raise NoLogits(f"the last decode kept no logits at batch index {row}")
        return row

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """float32 (n_vocab,): a copy of the logits at batch index ``row`` of the last decode."""
        rows = self.logit_rows([row])
        return rows.reshape(-1)

    def logit_rows(self, rows: Sequence[int]) -> npt.NDArray[np.float32]:
        """float32 (len(rows), n_vocab): copies of several rows."""
        with self.lock:
            out = np.empty((len(rows), self.model.n_vocab), np.float32)
            for i, row in enumerate(rows):
                pointer = lib.llama_get_logits_ith(self._ctx, self.check_row(row))
                if not pointer:
                    raise NoLogits(f"llama.cpp has no logits at batch index {row}")
                out[i] = np.ctypeslib.as_array(pointer, (self.model.n_vocab,))
            return out

    # -- sequences ----------------------------------------------------------------------------------------------

    def apply(self, steps: Iterable[Step]) -> None:
        """Carry out the steps of a plan in order. Each is checked before llama.cpp sees it."""
        with self.lock:
            self._check_open()
            for step in steps:
                self._apply_step(step)

    def _apply_step(self, step: Step) -> None:
        if isinstance(step, Drop):
            self.drop(step.seq, step.p0, step.p1)
        elif isinstance(step, Shift):
            self.shift(step.seq, step.p0, step.p1, step.delta)
        else:
            self.move(step)

    def drop(self, seq: int, p0: int, p1: int) -> None:
        """Free the cells of one sequence at positions [p0, p1); all of them must be held."""
        with self.lock:
            self._remove(seq, p0, p1)
            self.cells_used -= p1 - p0

    def move(self, step: Move) -> None:
        """Hand cells from one sequence to another, shifted on the way in scratch, where nothing can collide.

        Raises MaskUnsupported where llama.cpp would answer yes and keep the text (recurrent, hybrid), or abort.
        """
        with self.lock:
            if not self.model.capabilities.mask:
                raise MaskUnsupported(self.model.capabilities.mask.reason)
            self._check_range(step.src, step.p0, step.p1)
            self._check_seq(step.dst)
            if not step.delta:
                self._copy(step.src, step.dst, step.p0, step.p1)
                self._leave(step.src, step.p0, step.p1)
                return
            self._check_shift(step.p0, step.p1, step.delta)
            self._copy(step.src, SCRATCH, step.p0, step.p1)
            self._leave(step.src, step.p0, step.p1)
            self.shift(SCRATCH, step.p0, step.p1, step.delta)
            p0, p1 = step.p0 + step.delta, step.p1 + step.delta
            self._copy(SCRATCH, step.dst, p0, p1)
            self._leave(SCRATCH, p0, p1)

    def shift(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to positions [p0, p1) of ``seq``; K is rotated at the next decode, over the whole cache.

        Raises MaskUnsupported where llama.cpp cannot shift: it would abort, or rescale every K row.
        """
        with self.lock:
            self._check_range(seq, p0, p1)
            self._check_shift(p0, p1, delta)
            lib.llama_memory_seq_add(self._memory, seq, p0, p1, delta)
            self._pending_shift = True

    def _copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        lib.llama_memory_seq_cp(self._memory, src, dst, p0, p1)

    def _leave(self, seq: int, p0: int, p1: int) -> None:
        """Take cells out of a sequence while another one still holds them."""
        self._check_range(seq, p0, p1)
        if not lib.llama_memory_seq_rm(self._memory, seq, p0, p1):
            raise DecodeFailed(f"llama.cpp refused to remove positions [{p0}, {p1}) of sequence {seq}")

    def _remove(self, seq: int, p0: int, p1: int) -> None:
        """Take cells out of a sequence for good, and out of the keeper too.

        The keeper holds cells of all sequences, so others at the same positions are put back into it.
        """
        self._leave(seq, p0, p1)
        if not self._windowed:
            return
        self._leave(KEEPER, p0, p1)
        for other in range(NUM_RESERVED, self.settings.n_sequences):
            self._copy(other, KEEPER, p0, p1)

    def _check_seq(self, seq: int) -> None:
        if not 0 <= seq < self.settings.n_sequences:
            raise UsageError(f"sequence {seq} is none of this engine's [0, {self.settings.n_sequences})")

    def _check_shift(self, p0: int, p1: int, delta: int) -> None:
        if not self.can_shift:
            raise MaskUnsupported(self.close_gaps.reason)
        if p0 + delta < 0 or p1 + delta > _MAX_POS:
            raise UsageError(f"a shift by {delta} moves [{p0}, {p1}) out of the range of positions")

    def _check_range(self, seq: int, p0: int, p1: int) -> None:
        self._check_open()
        self._check_seq(seq)
        if not 0 <= p0 < p1 <= _MAX_POS:
            raise UsageError(f"[{p0}, {p1}) is no range of positions")

    # -- looking ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Have pending shifts applied: state read before that is corrupt (llama.cpp applies them in llama_decode).

        One token is decoded in scratch and removed. With no cell free the decode is refused, after it has shifted.
        """
        with self.lock:
            self._check_open()
            if not self._pending_shift:
                return
            token = np.zeros(1, np.int32)
            try:
                self.decode([Chunk(SCRATCH, 0, token, "none")])
            except ContextFull:
                self._pending_shift = False
                return
            self.drop(SCRATCH, 0, 1)

    def last_position(self, seq: int) -> int:
        """The highest position a sequence holds, -1 when it is empty."""
        with self.lock:
            self._check_open()
            self._check_seq(seq)
            return int(lib.llama_memory_seq_pos_max(self._memory, seq))

    def positions(self, seq: int) -> list[npt.NDArray[np.int32]]:
        """The positions llama.cpp really holds in a sequence, sorted, one int32 array a cache.

        Read from state blobs, as llama.cpp has no call for it: K and V are copied too, so this is for checks. A
        sliding-window model has two caches, and a blob leaves out what lies outside the window of its sequence: so
        the second is read in slices, each copied to scratch, where it is the window.
        """
        with self.lock:
            self._check_seq(seq)
            self.settle()
            caches = self._blob_positions(seq)
            if len(caches) < 2 or seq == SCRATCH:
                return caches
            width = max(1, self.model.n_swa // 2)
            slices = [self._slice_positions(seq, int(i) * width, width) for i in np.unique(caches[0] // width)]
            return [caches[0], np.concatenate(slices) if slices else caches[1]]

    def _slice_positions(self, seq: int, p0: int, width: int) -> npt.NDArray[np.int32]:
        self._copy(seq, SCRATCH, p0, p0 + width)
        try:
            return self._blob_positions(SCRATCH)[1]
        finally:
            self._leave(SCRATCH, p0, p0 + width)

    def _blob_positions(self, seq: int) -> list[npt.NDArray[np.int32]]:
        size = lib.llama_state_seq_get_size(self.ctx, seq)
        buffer = np.empty(max(1, size), np.uint8)
        pointer = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if lib.llama_state_seq_get_data(self._ctx, pointer, size, seq) != size:
            raise AuditFailed(f"llama.cpp did not give the state of sequence {seq}")
        return state_blob.positions(buffer.data[:size], cell_extra=12 if self.model.has_mrope else 0)


def _free_context(ctx: Any, model: Model) -> None:
    """Runs once, at close() or when the engine is collected; ``model`` is held so that it goes second."""
    lib.llama_free(ctx)
    model.count_engine(-1)
