"""Snapshots: a whole session as plain data, and back: tokens, states, spans, who saw what, the journal, next logits.

K and V are not in here: a snapshot says which slices of cells and which blobs there are, in the order of their members.
Sequences are numbered from the session's live one: 0 is that, 1 the first archive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from .columns import NO_BLOB, CellRun, Columns, State
from .errors import UsageError
from .history import Epoch, History, View
from .journal import Former, Journal
from .ledger import Ledger
from .places import Places
from .plans import Original
from .receipts import Receipt
from .sampling import Sampling
from .shares import PRIVATE
from .spans import Range, Span, SpanTable
from .tally import Tally

T = TypeVar("T", bound=np.generic)

MAX_POS: Final = (1 << 31) - 1


class Contradiction(Exception):
    """What a snapshot says cannot be; a file that says so was made, not written by edgekv."""


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise Contradiction(what)


@dataclass(frozen=True)
class Table:
    """Columns, each as little-endian bytes; ``seq`` is numbered from the live sequence."""

    pos: bytes
    state: bytes
    seq: bytes
    reserved: bytes
    replaced: bytes
    blob: bytes

    @classmethod
    def of(cls, columns: Columns, sequences: Sequence[int]) -> Table:
        c = columns
        number = np.zeros(max(sequences) + 1, np.int16)
        number[list(sequences)] = np.arange(len(sequences))
        seq = number[np.where(c.in_cells, c.seq, sequences[0])]
        blob = np.where(c.parked, c.blob, NO_BLOB)
        arrays: tuple[npt.NDArray[Any], ...] = (c.pos, c.state, seq, c.reserved, c.replaced, blob)
        return cls(*(_bytes(array) for array in arrays))

    def columns(self, length: int, sequences: Sequence[int]) -> Columns:
        pos, state = _array(self.pos, np.int32, length), _states(self.state, length)
        reserved, replaced = (_array(b, np.int8, length) for b in (self.reserved, self.replaced))
        seq, blob = _array(self.seq, np.int16, length), _array(self.blob, np.int32, length)
        _need(_within(seq, len(sequences)), "a token is in a sequence that is none of its session's")
        _need(_within(pos, MAX_POS), "a token has no position")
        there = np.asarray(sequences, np.int16)[seq]
        cell = np.full(length, PRIVATE, np.int32)
        return Columns(pos, state, there, reserved != 0, cell, replaced != 0, blob)


@dataclass(frozen=True)
class SavedOriginal:
    row: int
    seq: int
    pos: int
    hidden: View


@dataclass(frozen=True)
class FormerRun:
    """Tokens of consecutive indexes [start, stop) that were alike before an edit."""

    start: int
    stop: int
    state: int
    reserved: bool
    replaced: bool


@dataclass(frozen=True)
class SavedFormer:
    """An edit that can be undone: how its tokens were before it, and which spans there were. Its receipt is the one of
    that ``number``, or, where the journal has dropped it (-1), its own; spans are ranges of
    ``Snapshot.former_spans``."""

    number: int
    receipt: Receipt | None
    runs: tuple[FormerRun, ...]
    spans: tuple[Range, ...]

    def former(self, snapshot: Snapshot) -> tuple[Receipt, Former]:
        """Raises Contradiction."""
        length, receipts, table = len(snapshot), snapshot.receipts, snapshot.former_spans
        receipt = self.receipt if self.number < 0 else receipts[self.number] if self.number < len(receipts) else None
        if receipt is None:
            raise Contradiction("an edit has no receipt")
        for run in self.runs:
            _need(0 <= run.start < run.stop <= length, "an edit speaks of tokens that are not there")
            _need(0 <= run.state < len(State), "a token is in no known state")
        _need(sum(run.stop - run.start for run in self.runs) <= length, "an edit has a token twice")
        indexes = Places.exactly([(run.start, run.stop) for run in self.runs])
        columns, at = Columns.dropped(len(indexes)), 0
        for run in self.runs:
            here = slice(at, at := at + run.stop - run.start)
            columns.state[here], columns.reserved[here], columns.replaced[here] = run.state, run.reserved, run.replaced
        _need(all(0 <= a < b <= len(table) for a, b in self.spans), "an edit speaks of spans that are not there")
        return receipt, Former(indexes, columns, tuple(span for a, b in self.spans for span in table[a:b]))


def _save_undo(journal: Journal) -> tuple[tuple[SavedFormer, ...], tuple[Span, ...]]:
    """The edits that can be undone, and the table of their spans: neighbours have nearly all of them in common."""
    number_of = {id(receipt): i for i, receipt in enumerate(journal.receipts)}
    table: dict[Span, int] = {}
    saved = []
    for receipt, former in journal.edits:
        number = number_of.get(id(receipt), -1)
        places = np.asarray([table.setdefault(span, len(table)) for span in former.spans], np.int64)
        own = receipt if number < 0 else None
        saved.append(SavedFormer(number, own, tuple(_former_runs(former)), tuple(_stretches(places))))
    return tuple(saved), tuple(table)


def _former_runs(former: Former) -> Iterator[FormerRun]:
    c = former.columns
    for rows in _alike(former.indexes, c.state, c.reserved, c.replaced):
        first = rows.start
        start, state = int(former.indexes[first]), int(c.state[first])
        stop = start + rows.stop - first
        yield FormerRun(start, stop, state, bool(c.reserved[first]), bool(c.replaced[first]))


def _stretches(numbers: npt.NDArray[np.int64]) -> list[Range]:
    return [(int(numbers[r.start]), int(numbers[r.start]) + len(r)) for r in _alike(numbers)]


def _alike(numbers: npt.NDArray[np.int64], *same: npt.NDArray[Any]) -> list[range]:
    """Where numbers count up by one and the other columns do not change."""
    if not len(numbers):
        return []
    cut = np.diff(numbers) != 1
    for column in same:
        cut |= column[1:] != column[:-1]
    ends = [0, *(np.flatnonzero(cut) + 1).tolist(), len(numbers)]
    return [range(a, b) for a, b in pairwise(ends)]


@dataclass(frozen=True)
class SavedSampling:
    """A Sampling whose biases are text, as JSON knows no infinity."""

    sampling: Sampling
    logit_bias: tuple[tuple[int, str], ...] | None

    @classmethod
    def of(cls, sampling: Sampling) -> SavedSampling:
        bias = sampling.logit_bias
        told = None if bias is None else tuple((int(token), repr(float(value))) for token, value in bias.items())
        return cls(replace(sampling, logit_bias=None), told)

    def restored(self) -> Sampling:
        """Raises Contradiction."""
        if self.logit_bias is None:
            return self.sampling
        try:
            return replace(self.sampling, logit_bias={token: float(value) for token, value in self.logit_bias})
        except ValueError as err:
            raise Contradiction(f"a bias is no number: {err}") from err


@dataclass(frozen=True)
class Piece:
    """K and V of positions [p0, p1): of sequence ``number``, or of blob ``number``."""

    number: int
    p0: int
    p1: int


@dataclass(frozen=True)
class Snapshot:
    """``index_of``: row -> index, None while they are the same. next_view: what was hidden when the next logits were
    computed, None where there are none; original: the row and view of logits that wait for their token."""

    ids: bytes
    table: Table
    index_of: bytes | None
    originals: tuple[SavedOriginal, ...]
    epochs: tuple[Epoch, ...]
    spans: tuple[Span, ...]
    span_counter: int
    receipts: tuple[Receipt, ...]
    undo: tuple[SavedFormer, ...]
    former_spans: tuple[Span, ...]
    tally: Tally
    next_view: View | None
    original: tuple[int, View] | None
    cells: tuple[Piece, ...]
    blobs: tuple[Piece, ...]
    restarts: bool
    sampling: SavedSampling
    memo: str = ""

    def __len__(self) -> int:
        return len(self.ids) // 4

    def ledger_into(self, ledger: Ledger, n_vocab: int, *, kv: bool) -> None:
        """Fill an empty ledger; blobs keep the numbers of ``blobs``. ``kv``: whether K and V come with it. Raises
        Contradiction; then the ledger is not to be used."""
        n, sequences = len(self), (ledger.live, *ledger.archives)
        ids, columns = _array(self.ids, np.int32, n), self.table.columns(n, sequences)
        _need(_within(ids, n_vocab), "a token is outside the vocabulary")
        waits = columns.where(State.MASKED) | columns.parked
        hidden_kv = bool(waits.any() or self.originals)
        _need((kv and ledger.has_cells) or not hidden_kv, "masked or parked tokens without K and V")
        places = None if self.index_of is None else _array(self.index_of, np.int64, n)
        _need(places is None or np.array_equal(np.sort(places), np.arange(n)), "two tokens have one index")
        _check_sequences(columns, ledger.live)
        self._check_ranges(n)
        self._check_words()
        self._check_blobs(columns)
        ledger.restore(
            ids,
            columns,
            Places.of(n, places),
            tuple(
                Original(o.row, sequences[o.seq], o.pos, o.hidden) for o in self._checked_originals(columns, sequences)
            ),
            History(self.epochs),
        )
        if not kv:
            self._check_restart(columns)
        elif ledger.has_cells:
            self._check_cells(ledger, sequences)

    def _check_restart(self, columns: Columns) -> None:
        """The visible tokens can be evaluated one after another from position 0 on."""
        pos = columns.pos[columns.visible]
        _need(np.array_equal(pos, np.arange(len(pos))) and not columns.reserved.any(), "its tokens leave gaps")
        _need(not self.cells and not self.blobs, "K and V that are not in the file")
        _need(self.next_view is None and self.original is None, "logits that are not in the file")

    def _checked_originals(self, columns: Columns, sequences: Sequence[int]) -> Iterator[SavedOriginal]:
        _need(len({o.row for o in self.originals}) == len(self.originals), "a token has two first readings")
        for o in self.originals:
            there = 0 <= o.row < len(self) and 0 < o.seq < len(sequences) and 0 <= o.pos < MAX_POS
            _need(there and bool(columns.in_cells[o.row]), "a first reading is nowhere")
            yield o

    def _check_ranges(self, n: int) -> None:
        """All ranges of rows and indexes lie in the transcript, and views are sorted."""
        views = [o.hidden for o in self.originals] + [e.hidden for e in self.epochs]
        views += [v for v in (self.next_view, self.original and self.original[1]) if v is not None]
        computed = [r for e in self.epochs for r in e.computed]
        spans = [s.range for s in (*self.spans, *self.former_spans)]
        for start, stop in (*computed, *spans, *(r for view in views for r in view)):
            _need(0 <= start <= stop <= n, "a range lies outside the transcript")
        for view in views:
            _need(all(a[1] <= b[0] for a, b in pairwise(view)), "what was hidden is out of order")
        _need(all(e.gap is None or -1 <= e.gap <= n for e in self.epochs), "a gap lies outside the transcript")
        _need(self.original is None or 0 <= self.original[0] < n, "logits wait for no token")

    def _check_words(self) -> None:
        """The names of spans are such as a target can mean, and receipts can be read."""
        names = SpanTable()
        try:
            for span in self.spans:
                names.add(span)
            for receipt in (*self.receipts, *(u.receipt for u in self.undo if u.receipt is not None)):
                str(receipt)
        except UsageError as err:
            raise Contradiction(str(err)) from err
        except KeyError as err:
            raise Contradiction(f"a receipt of {err}") from err

    def _check_blobs(self, columns: Columns) -> None:
        """Every parked token lies in a blob."""
        _need([b.number for b in self.blobs] == sorted({b.number for b in self.blobs}), "two blobs have one number")
        for blob in self.blobs:
            _need(0 <= blob.p0 < blob.p1 < MAX_POS and blob.p1 - blob.p0 <= len(self), "a blob is nowhere")
        held = {b.number: b for b in self.blobs}
        for number in columns.blobs:
            _need(number in held, "a parked token is in no blob")
            pos = columns.pos[columns.parked & (columns.blob == number)]
            _need(bool(pos.min() >= held[number].p0 and pos.max() < held[number].p1), "a parked token is in no blob")

    def _check_cells(self, ledger: Ledger, sequences: Sequence[int]) -> None:
        """The slices hold exactly the cells of the ledger."""
        held: dict[int, list[npt.NDArray[np.int32]]] = {seq: [] for seq in sequences}
        for piece in self.cells:
            _need(0 <= piece.number < len(sequences) and 0 <= piece.p0 < piece.p1 < MAX_POS, "a slice is nowhere")
        _need(sum(piece.p1 - piece.p0 for piece in self.cells) == ledger.num_cells, "a cell too many or too few")
        for piece in self.cells:
            held[sequences[piece.number]].append(np.arange(piece.p0, piece.p1, dtype=np.int32))
        for seq, wanted in ledger.expected_positions().items():
            there = np.sort(np.concatenate([np.empty(0, np.int32), *held[seq]]))
            _need(np.array_equal(there, wanted), "its cells are not those of its tokens")
            _need(bool((np.diff(wanted) > 0).all()), "two tokens have one cell")


def _check_sequences(columns: Columns, live: int) -> None:
    """Visible tokens are in the live sequence, in order, masked ones are not."""
    lives = columns.seq == live
    _need(bool(lives[columns.visible].all()), "a visible token is in an archive")
    _need(not lives[columns.where(State.MASKED)].any(), "a masked token is in no archive")
    _need(bool((np.diff(columns.pos[columns.visible]) > 0).all()), "its tokens are out of order")


def journal_of(snapshot: Snapshot) -> Journal:
    """Its receipts, and the edits that can be undone. Raises Contradiction."""
    return Journal(snapshot.receipts, [undo.former(snapshot) for undo in snapshot.undo])


def take(
    ledger: Ledger,
    spans: SpanTable,
    journal: Journal,
    *,
    tally: Tally,
    next_view: View | None,
    original: tuple[int, View] | None,
    cells: Sequence[CellRun],
    blobs: Sequence[Piece],
    restarts: bool,
    sampling: Sampling,
    memo: str,
) -> Snapshot:
    """What a session is now; ``cells`` are the slices its K and V are copied in."""
    sequences = (ledger.live, *ledger.archives)
    number = {seq: i for i, seq in enumerate(sequences)}
    index_of = ledger.places.index_of
    undo, former_spans = _save_undo(journal)
    return Snapshot(
        ids=_bytes(ledger.ids),
        table=Table.of(ledger.columns, sequences),
        index_of=None if index_of is None else _bytes(index_of),
        originals=tuple(SavedOriginal(o.row, number[o.seq], o.pos, o.hidden) for o in ledger.originals),
        epochs=tuple(ledger.history.epochs),
        spans=spans.ordered(),
        span_counter=spans.counter,
        receipts=journal.receipts,
        undo=undo,
        former_spans=former_spans,
        tally=tally,
        next_view=next_view,
        original=original,
        cells=tuple(Piece(number[run.seq], run.p0, run.p1) for run in cells),
        blobs=tuple(blobs),
        restarts=restarts,
        sampling=SavedSampling.of(sampling),
        memo=memo,
    )


def _bytes(array: npt.NDArray[Any]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def _array(data: bytes, dtype: type[T], length: int) -> npt.NDArray[T]:
    _need(len(data) == length * np.dtype(dtype).itemsize, "its columns are not of one length")
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype)


def _states(data: bytes, length: int) -> npt.NDArray[np.int8]:
    state = _array(data, np.int8, length)
    _need(_within(state, len(State)), "a token is in no known state")
    return state


def _within(values: npt.NDArray[Any], stop: int) -> bool:
    return not len(values) or bool(values.min() >= 0 and values.max() < stop)
