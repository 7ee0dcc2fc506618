"""Engine: one llama.cpp context: decoding, logits, and the steps of edits. Every call is checked before it can abort.

What kills the process inside llama.cpp (a batch beyond n_batch, logits that do not exist, ...) is a typed error here;
cells.py does the same for sequences and cells.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from . import _llama, kv_check, memory
from ._llama import lib, uninterrupted
from .batch import Batch, Chunk
from .capabilities import Capability
from .cells import MAX_POS, Blob, Call, Cells
from .columns import CellRun
from .errors import (
    AuditFailed,
    BadState,
    ClosedError,
    ContextFull,
    DecodeFailed,
    NoLogits,
    Stopped,
    TooLarge,
    UsageError,
)
from .fair_lock import FairLock
from .model import Model
from .parking import Parking
from .settings import ASIDE, NUM_RESERVED, SCRATCH, Settings
from .shares import Shares
from .steps import Drop, Load, Move, Own, Step

_ABORTED: Final = 2  # llama.h, llama_decode
_STOPPED: Final = "the evaluation was stopped; the session is as it was before the call"
_AT_ONCE: Final = 32  # tokens of a batch that the main thread may decode itself


class _Evaluation:
    """Tokens of ``owner`` that are being evaluated."""

    __slots__ = ("owner", "stopped")

    def __init__(self, owner: object) -> None:
        self.owner, self.stopped = owner, False


_NO_SLOT: Final = 1  # llama_decode: not enough cells are free


class LogitsHolder(Protocol):
    """Somebody who still needs the rows in llama.cpp's buffer when another decode is about to overwrite them."""

    def keep_logits(self) -> None: ...


class Engine:
    """A context on ``model``. All verbs hold ``lock``; close it before the model.

    ``notes``: what the user should know of it, a sentence each; each is a warning too. A quantised cache is tried at
    its first use on a machine, see :mod:`edgekv.kv_check`.

    Raises TooLarge, before anything is allocated, when the cache would not fit in free RAM.
    """

    def __init__(self, model: Model, settings: Settings = Settings()) -> None:
        settings.check()
        self.model: Final = model
        self.settings: Final = settings
        self.lock = FairLock()
        self._inherited = False
        self.close_gaps: Final = model.close_gaps(settings.kv_type)
        self.can_shift: Final = bool(self.close_gaps)
        self._refuse_too_large()
        self.notes: Final = tuple(filter(None, [kv_check.note(model, settings.kv_type)]))
        for note in self.notes:
            warnings.warn(note, stacklevel=3)
        # A state takes memory for every sequence, and cannot be masked.
        self._num_archives: Final = settings.n_archives if model.capabilities.mask else 0
        self._num_sequences: Final = settings.n_sequences(self._num_archives)
        self.max_outputs: Final = settings.max_outputs(model.n_vocab)
        self._ctx = self._open()
        self._cell_bytes: Final = model.kv_bytes_per_token(settings.kv_type)
        self._cells = Cells(self._ctx, model, self._num_sequences, self.close_gaps, self._cell_bytes)
        self.num_cells: Final[int] = self._cells.size
        self.n_batch: Final[int] = lib.llama_n_ubatch(self._ctx)
        self.shares: Final = Shares()
        self.parking: Final = Parking(settings.parked_limit, lambda: settings.spill_folder)
        self.lost = ""  # why no session on this engine can go on
        self.reading = False  # while a session reads and its progress callback may run
        self.aborted = 0  # decodes that ended inside a batch
        self.serial = 0  # of the newest decode, whose logits are in the buffer
        self.unit: Any = None  # of recovery: how things were before the verb that is under way, or was cut short
        self.owners: dict[int, weakref.ref[Any]] = {}  # live sequence -> the record whose cells it holds
        self._running: _llama.Job | None = None
        self._abort = _llama.AbortFlag()
        self._evaluating: _Evaluation | None = None  # see stop()
        self._free_sequences = list(range(NUM_RESERVED, self._num_sequences))
        self._batch = Batch(self.n_batch)
        self._outputs: frozenset[int] = frozenset()
        self._holders: tuple[weakref.ref[LogitsHolder], ...] = ()
        model.count_engine(+1)
        self._free = weakref.finalize(self, _free_context, self._ctx, model)
        self._abort.install(self._ctx)
        _llama.opened.add(self)

    def _refuse_too_large(self) -> None:
        s = self.settings
        n_batch = min(s.n_batch, memory.cells_for(s.n_ctx))
        outputs = s.max_outputs(self.model.n_vocab)
        need = self.model.estimate(s.n_ctx, s.kv_type, n_batch, outputs, flash_attention=s.flash_attention)
        if need.cache + need.buffers > need.free:
            room = memory.largest_context(
                self.model.header, 0, s.kv_type, n_batch, outputs, flash_attention=s.flash_attention
            )
            raise TooLarge(
                f"a cache of {s.n_ctx:,} cells in {s.kv_type} needs {need.cache / 1e6:,.0f} MB and "
                f"{need.free / 1e6:,.0f} MB are free; n_ctx={room} would fit, or kv_type='q8_0'"
            )

    def _open(self) -> Any:
        s = self.settings
        _llama.forget_messages()
        n_ctx = memory.cells_for(s.n_ctx)
        kv_type, flash = _llama.kv_type_id(s.kv_type), "ENABLED" if s.flash_attention else "DISABLED"
        params = _llama.set_fields(
            lib.llama_context_default_params(),
            n_ctx=n_ctx,
            # One micro-batch a decode: a call that fails leaves nothing of itself behind (llama-context.cpp, decode).
            # Only settle() asks for more, and is refused.
            n_batch=n_ctx,
            n_ubatch=min(s.n_batch, n_ctx),
            n_seq_max=self._num_sequences,
            n_outputs_max=self.max_outputs,
            n_threads=s.threads,
            n_threads_batch=s.threads,
            flash_attn_type=getattr(lib, f"LLAMA_FLASH_ATTN_TYPE_{flash}"),
            type_k=kv_type,
            type_v=kv_type,
            kv_unified=True,  # several streams: a partial seq_cp aborts
            swa_full=True,  # else hidden cells block a window's recycling
            rope_freq_base=s.rope_freq_base,  # 0: the model's own
            rope_freq_scale=s.rope_freq_scale,
            offload_kqv=False,
            op_offload=False,
        )
        ctx = lib.llama_init_from_model(self.model.ptr, params)
        if not ctx:
            raise TooLarge(f"llama.cpp could not open the context: {_llama.last_messages() or 'no reason given'}")
        return ctx

    # -- life ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the context; closing twice is fine."""
        with self.lock:
            self.idle()
            self._free()
            self.parking.close()

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
        self.check_open()
        return self._ctx

    def check_open(self) -> None:
        """Raise ClosedError after close(), and in a child process."""
        if not self._free.alive:
            raise ClosedError(
                f"the engine {_llama.INHERITED}" if self._inherited else "the engine was closed; open a new session"
            )

    def inherit(self) -> None:
        """In a child process: the context, the lock and the files of parked spans are the parent's."""
        self._inherited, self.lock, self.unit, self._running = True, FairLock(), None, None
        self._free.detach()
        self.parking.forget()

    def check_idle(self) -> None:
        """Raise BadState while a session on this engine reads: its progress callback can touch none of them."""
        if self.reading:
            raise BadState("a session on this engine is still reading; its progress callback cannot touch any of them")

    def stop(self, owner: object = None) -> bool:
        """End the evaluation that is under way, inside its batch: it raises Stopped, and its session is as before the
        call. From any thread, without the lock; ``owner``: only where it is this record's. Returns whether there was
        one."""
        evaluation = self._evaluating
        if evaluation is None or owner not in (None, evaluation.owner):
            return False
        evaluation.stopped = True
        self._abort.set()
        return True

    def evaluate_for(self, owner: object) -> None:
        """From now on :meth:`stop` ends what ``owner`` evaluates; None: nobody does."""
        self._evaluating = None if owner is None else _Evaluation(owner)
        self._abort.clear()

    def check_stopped(self) -> None:
        """Raise Stopped where :meth:`stop` was called: between two batches."""
        if self._evaluating is not None and self._evaluating.stopped:
            raise Stopped(_STOPPED)

    def take_sequences(self) -> list[int]:
        """Sequence ids for one more session: its live sequence, then its archives."""
        with self.lock:
            self.check_open()
            count = 1 + self._num_archives
            if len(self._free_sequences) < count:
                raise UsageError(
                    f"this engine was opened for {self.settings.n_sessions} sessions and forks, and all are in use; "
                    "close one, or open it with more n_sessions"
                )
            taken, self._free_sequences = self._free_sequences[:count], self._free_sequences[count:]
            return taken

    def give_back(self, sequences: Iterable[int], num_cells: int) -> None:
        """Empty these sequences, of whose cells ``num_cells`` are free then, and take them back."""
        with self.lock:
            if self.closed:
                return
            calls = [call for seq in sequences for call in self._cells.clearing(seq)]
            free = [*self._free_sequences, *sequences]
            self._cells.perform(calls, -num_cells, [partial(self.__dict__.update, _free_sequences=free)])

    # -- for recovery -------------------------------------------------------------------------------------------

    @property
    def touched(self) -> bool:
        """Whether llama.cpp may hold something else than when ``unit`` began."""
        return self._cells.touched

    def touch(self) -> None:
        """It may."""
        self._cells.touched = True

    def untouch(self) -> None:
        """It does not: a unit begins."""
        self._cells.touched = False

    def untouched(self) -> list[Call]:
        """The call after which it does not."""
        return [partial(self._cells.__dict__.update, touched=False)]

    def idle(self) -> None:
        """Until no decode runs that was left running in another thread; nobody reads."""
        if self._running is not None:
            self._abort.set()
            self._running.cancel()
            self._running = None
        self.reading = False
        self.evaluate_for(None)

    def bring_back(self, moves: Iterable[Move], then: Iterable[Call]) -> None:
        """Carry out moves, over what was read in their places."""
        with self.lock:
            calls = [call for move in moves for call in self.cells.over(move)]
            self.cells.perform(calls, 0, then)

    def become_aside(self, seq: int, then: Iterable[Call]) -> None:
        """A sequence is again what its copy aside is."""
        self.become(ASIDE, seq, 0, then)

    def hold_only(self, wanted: Mapping[int, npt.NDArray[np.int32]]) -> set[int]:
        """See :meth:`Cells.only`."""
        with self.lock:
            return self.cells.only(wanted)

    def members(self) -> dict[tuple[int, int], frozenset[int]]:
        """(sequence, position) -> the sequences that hold that cell."""
        with self.lock:
            return {(seq, pos): held for pos, held in self.cells.members() for seq in held}

    def empty_but(self, sequences: set[int]) -> None:
        """Nothing is in any other sequence of a session."""
        with self.lock:
            for seq in set(range(NUM_RESERVED, self._num_sequences)) - sequences:
                self.cells.clear(seq)

    def free_but(self, sequences: set[int]) -> None:
        """All other sequences are free for new sessions."""
        self._free_sequences = [seq for seq in range(NUM_RESERVED, self._num_sequences) if seq not in sequences]

    def checked(self, num_cells: int) -> None:
        """llama.cpp holds what the ledgers say, ``num_cells`` cells."""
        if self._cells.touched:
            self._cells.used = num_cells
        self._cells.touched = False

    @property
    def cells(self) -> Cells:
        """Raises ClosedError after close()."""
        self.check_open()
        return self._cells

    # -- decode -------------------------------------------------------------------------------------------------

    @property
    def cells_used(self) -> int:
        """Cells that hold a token, each counted once however many sessions share it."""
        return self._cells.used

    @property
    def cells_free(self) -> int:
        return self._cells.free

    @property
    def has_holes(self) -> bool:
        """Whether free cells may lie between those in use."""
        return self._cells.peak > self._cells.used

    @property
    def cells_scanned(self) -> int:
        """About how many cells decode goes over: the most that were in use at once since the engine was opened or
        compacted, in steps of 256 (llama-kv-cache.cpp, get_n_kv).

        Too high where the last cells were dropped, as after a rewind.
        """
        return _padded(self._cells.peak)

    @property
    def compact_saves(self) -> int:
        """How many cells fewer that would be after :meth:`compact`; 0 where it would not pay."""
        return self.cells_scanned - _padded(self._cells.used)

    def decode(self, chunks: Sequence[Chunk], holders: Sequence[LogitsHolder] = ()) -> list[int]:
        """Read chunks of several sequences in one batch; returns the batch index of each chunk's last token.

        ``holders`` are told to keep their logits before a later decode overwrites them. Raises ContextFull when no cell
        is free (nothing changed), DecodeFailed when llama.cpp failed (the chunks were taken out again), UsageError
        for a batch llama.cpp would refuse.

        On sliding-window models llama.cpp takes any cell outside the window for free when exactly one sequence
        holds it, also with ``swa_full``: masked spans and closed gaps would lose their cells (llama-kv-cache.cpp,
        find_slot). So there every cell is held by a second sequence as well, the keeper.
        """
        with self.lock:
            self.check_open()
            self._check_chunks(chunks)
            ends = self._batch.fill(chunks)
            self._run([CellRun(c.seq, c.pos, c.pos + len(c.tokens)) for c in chunks], holders)
            return ends

    def decode_one(self, seq: int, pos: int, token: int, holder: LogitsHolder, owner: object) -> None:
        """Read one token and keep its logits, at batch index 0; otherwise as :meth:`decode`.

        The path of every generated token: what Python touches between two decodes has left the CPU's caches, so it
        touches little.
        """
        with self.lock:
            self.check_open()
            self._check_place(seq, pos, 1)
            self._batch.fill_one(seq, pos, self.model.check_token(token))
            self.evaluate_for(owner)
            self._run((CellRun(seq, pos, pos + 1),), (holder,))

    def _run(self, runs: Sequence[CellRun], holders: Sequence[LogitsHolder]) -> None:
        """Decode the batch as it is filled, into cells at these places."""
        self._keep_logits(holders)
        self._cells.touched = True
        self.serial += 1
        code = self._decode_native()
        self._cells.pending_shift = False
        if code:
            self._take_back(runs, code)
        for run in runs:
            self._cells.taken(run)
        self._outputs = self._batch.outputs
        self._holders = tuple(map(weakref.ref, holders))

    def _decode_native(self) -> int:
        """llama_decode, in another thread where it may take long and this is the main thread.

        Python runs signal handlers in the main thread, between bytecodes: Ctrl-C, or a handler that raises, would wait
        for the end of the batch. So the main thread waits for the other one, and an exception aborts the decode.
        """
        apart = _llama.forked and self.settings.threads > 1
        if not apart and (self._batch.native.n_tokens <= _AT_ONCE or not _llama.in_main_thread()):
            return int(lib.llama_decode(self._ctx, self._batch.native))
        self._running = job = _llama.Job(lib.llama_decode, self._ctx, self._batch.native)
        with self._abort.on_ctrl_c():
            try:
                job.start()
                job.wait()
            except BaseException:
                self.idle()
                raise
        self._running = None
        return int(job.result)

    def _keep_logits(self, but: Sequence[LogitsHolder]) -> None:
        """The logits are about to be overwritten: those who still need theirs copy them."""
        for ref in self._holders:
            holder = ref()
            if holder is not None and holder not in but:
                holder.keep_logits()
        self._holders, self._outputs = (), frozenset()

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
        newest = self._cells.last_position(seq)
        if (newest >= 0 and pos != newest + 1) or not 0 <= pos < MAX_POS - count:
            raise UsageError(f"sequence {seq} continues at position {newest + 1}, not at {pos}")

    def _take_back(self, runs: Sequence[CellRun], code: int) -> None:
        """llama.cpp takes the tokens of a batch that failed out again; a state has then lost what was before them."""
        if code == _NO_SLOT:
            wanted = sum(p1 - p0 for _, p0, p1 in runs)
            raise ContextFull(f"{wanted} tokens need as many cells and llama.cpp has none free")
        if self.model.capabilities.mask:
            for run in runs:
                self._cells.remove(run)
        if code == _ABORTED:
            self.aborted += 1
            self._abort.clear()
            _llama.raise_if_interrupted()
            raise Stopped(_STOPPED)
        raise DecodeFailed(f"llama_decode returned {code}: {_llama.last_messages() or 'no reason given'}")

    # -- logits -------------------------------------------------------------------------------------------------

    def check_row(self, row: int) -> int:
        """Raise NoLogits unless batch index ``row`` of the last decode kept its logits."""
        self.check_open()
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

    def apply(self, steps: Iterable[Step], then: Iterable[Call] = ()) -> None:
        """Carry out the steps of a plan in order, then the calls; each is checked before llama.cpp sees it.

        What comes after the last Own happens with no bytecode in between, see :meth:`Cells.perform`.
        """
        with self.lock:
            cells = self.cells
            calls: list[Call] = []
            used = 0
            for step in steps:
                if isinstance(step, Own):
                    cells.perform(calls, used)
                    calls, used = [], 0
                    self.settle()
                    cells.own(CellRun(step.seq, step.p0, step.p1))
                else:
                    more, change = cells.calls(step)
                    calls, used = calls + more, used + change
            cells.perform(calls, used, then)

    def drop(self, seq: int, p0: int, p1: int) -> None:
        """Free the cells of one sequence at positions [p0, p1); all of them must be held, and by nobody else."""
        self.apply([Drop(seq, p0, p1)])

    def share(self, runs: Iterable[CellRun], dst: int) -> None:
        """A second sequence holds these cells, too."""
        with self.lock:
            cells = self.cells
            for run in runs:
                cells.share(run, dst)

    def replace(self, src: int, dst: int, then: Iterable[Call] = ()) -> None:
        """Sequence ``dst`` becomes what ``src`` is, recurrent state and all, and what it held is dropped.

        The two share cells from then on; what was dropped is not counted as free, see :meth:`clear`.
        """
        with self.lock:
            self.cells.perform(self.cells.replacing(src, dst), 0, then)

    def become(self, src: int, dst: int, num_cells: int, then: Iterable[Call] = ()) -> None:
        """As :meth:`replace`, and ``src`` is empty then; ``num_cells`` cells of what ``dst`` held are free."""
        with self.lock:
            calls = [*self.cells.replacing(src, dst), *self.cells.clearing(src)]
            self.cells.perform(calls, -num_cells, then)

    def clear(self, seq: int, num_cells: int, then: Iterable[Call] = ()) -> None:
        """Empty a sequence, of whose cells ``num_cells`` are free then. Works for every kind of memory."""
        with self.lock:
            self.cells.perform(self.cells.clearing(seq), -num_cells, then)

    def settle(self) -> None:
        """Have pending shifts applied: state read before that is corrupt (llama.cpp applies them in llama_decode).

        A decode that asks for as many cells as there are is refused, after it has applied them. So no cell is written,
        and what is evaluated next comes to the cells that it would have come to.
        """
        with self.lock, uninterrupted():
            cells = self.cells
            if not cells.pending_shift:
                return
            self._keep_logits(())
            batch = Batch(self.num_cells)
            batch.fill([Chunk(SCRATCH, 0, np.zeros(self.num_cells, np.int32), "none")])
            with _llama.unsaid():
                code = lib.llama_decode(self._ctx, batch.native)
            if code != _NO_SLOT:
                cells.clear(SCRATCH)
                raise DecodeFailed(f"llama_decode returned {code} where it was to apply a shift")
            cells.pending_shift = False

    @property
    def can_copy(self) -> Capability:
        """Whether cells can be parked, copied for a fork and saved: what this model's memory was seen to do."""
        with self.lock:
            return self.cells.can_copy

    def check_copies(self) -> None:
        """Raise MaskUnsupported where cells cannot be copied."""
        with self.lock:
            self.cells.check_copy()

    def check_steps(self, steps: Iterable[Step]) -> None:
        """Raise MaskUnsupported where one of them copies cells and cells cannot be copied."""
        if any(isinstance(step, Own) for step in steps):
            self.check_copies()

    def copies(self, run: CellRun) -> Iterator[tuple[CellRun, Blob]]:
        """Copies of K and V of these cells, slice by slice; the cells stay."""
        self.settle()
        return self._cells.copies(run)

    def slices(self, run: CellRun) -> list[CellRun]:
        """The pieces :meth:`copies` copies a run in."""
        return self._cells.slices(run)

    def state(self, seq: int) -> Blob:
        """The whole state of a sequence, of any kind of memory; with a window without what lies outside it."""
        with self.lock:
            cells = self.cells
            self.settle()
            return cells.save(seq)

    def load_state(self, seq: int, blob: Blob, num_cells: int) -> None:
        """A state of ``num_cells`` tokens, from position 0 on, comes into an empty sequence, all or nothing.

        Raises ContextFull, AuditFailed (it is another one).
        """
        with self.lock, uninterrupted():
            cells = self.cells
            cells.check_state(blob, num_cells)
            cells.load(seq, blob, num_cells)
            if cells.last_position(seq) != num_cells - 1:
                cells.clear(seq)
                raise AuditFailed("the state ends at another position than its tokens")
            cells.used += num_cells
            cells.peak = max(cells.peak, cells.used)

    def check_blob(self, blob: Blob, p0: int, p1: int) -> None:
        """Raise AuditFailed unless a blob holds K and V of exactly the positions [p0, p1)."""
        self._cells.check_blob(blob, p0, p1)

    def load(self, run: CellRun, blob: Blob, delta: int = 0) -> None:
        """Copies of cells come into free cells of a sequence, shifted by ``delta``; all of them or nothing.

        By way of scratch, as a load empties its sequence first. Raises ContextFull, AuditFailed (it holds others).
        """
        with self.lock, uninterrupted():
            cells = self.cells
            cells.put(run._replace(seq=SCRATCH), blob)
            if delta:
                cells.shift(SCRATCH, run.p0, run.p1, delta)
            cells.move(Move(SCRATCH, run.seq, run.p0 + delta, run.p1 + delta))

    def load_some(self, seq: int, loads: Sequence[Load], blob: Blob) -> None:
        """Stretches of one blob come into free cells of a sequence, each shifted by its delta; all or nothing.

        Where there is room, the blob is loaded as a whole and the rest of it dropped: cutting it costs as much as it is
        long, for every stretch. Raises as :meth:`load`.
        """
        with self.lock, uninterrupted():
            cells = self.cells
            first, last = cells.bounds(blob)
            if any(load.p0 < first or load.p1 > last for load in loads):
                raise AuditFailed(f"these K and V are those of positions [{first}, {last}), and others are wanted")
            if len(loads) > 1 and last - first <= cells.free and not any(load.delta for load in loads):
                cells.put(CellRun(SCRATCH, first, last), blob)
                for load in loads:
                    cells.move(Move(SCRATCH, seq, load.p0, load.p1))
                cells.clear(SCRATCH)
                cells.used -= last - first - sum(load.p1 - load.p0 for load in loads)
                return
            for load in loads:
                whole = (load.p0, load.p1) == (first, last)
                part = blob if whole else cells.cut(blob, load.p0, load.p1)
                self.load(CellRun(seq, load.p0, load.p1), part, load.delta)

    def compact(self) -> None:
        """Put the cells in use in a row, so that decode scans no others. Positions and sequences stay.

        Raises TooLarge when free RAM does not hold a copy of what they hold, before anything is touched.
        """
        with self.lock:
            cells = self.cells
            self.settle()
            self.check_copy(cells.used, "compacting")
            self._keep_logits(())
            try:
                cells.repack()
            except AuditFailed as err:
                self.lost = str(err)
                raise

    def kv_bytes(self, num_cells: int) -> int:
        """Bytes of K and V in so many cells."""
        return self._cell_bytes * num_cells

    def check_copy(self, num_cells: int, doing: str) -> None:
        """Raise TooLarge unless free RAM holds a copy of so many cells."""
        size, free = self.kv_bytes(num_cells), memory.free_ram()
        if size > free:
            raise TooLarge(f"{doing} copies {size / 1e6:,.0f} MB of cells and {free / 1e6:,.0f} MB are free")

    def last_position(self, seq: int) -> int:
        """The highest position a sequence holds, -1 when it is empty."""
        with self.lock:
            cells = self.cells
            return cells.last_position(seq)

    def positions(self, seq: int) -> list[npt.NDArray[np.int32]]:
        """The positions llama.cpp really holds in a sequence; see :meth:`Cells.positions`."""
        with self.lock:
            cells = self.cells
            cells.check_seq(seq)
            self.settle()
            return cells.positions(seq)


def _padded(num_cells: int) -> int:
    return -(-num_cells // 256) * 256


def _free_context(ctx: Any, model: Model) -> None:
    """Runs once, at close() or when the engine is collected; ``model`` is held so that it goes second."""
    lib.llama_free(ctx)
    model.count_engine(-1)
