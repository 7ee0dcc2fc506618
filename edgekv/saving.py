"""Saving: a session into a file, and back. What llama.cpp gets from a file was checked to the last byte before.

Members: manifest.json, session.json (a :class:`~edgekv.snapshot.Snapshot`), logits of the next token, then K and V: a
member a slice of cells, one a blob of parked tokens; or the whole state where a model has no cells. A file without K
and V has the first two only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from . import manifest, render, snapshot, store
from .columns import CellRun, State
from .engine import Engine
from .errors import ContextFull, WrongFile
from .history import View
from .journal import Journal
from .ledger import Ledger
from .manifest import ContextFacts, Manifest, SessionFacts, SpanFacts
from .sampling import Sampling
from .settings import Settings
from .snapshot import Contradiction, Piece, Snapshot
from .store import Content, Stored
from .transcript import Transcript

T = TypeVar("T")
R = TypeVar("R")

#: Called with (cells copied, cells to copy), or (tokens evaluated, tokens to evaluate).
Progress = Callable[[int, int], None]

_SESSION: Final = "session.json"
_NEXT: Final = "logits/next"
_ORIGINAL: Final = "logits/original"
_STATE: Final = "state"


# -- out -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """What a file keeps of a session beside its transcript."""

    sampling: Sampling
    memo: str


def save(path: Path, transcript: Transcript, beside: Beside, progress: Progress | None, *, kv: bool = True) -> int:
    """Write a session to a file, whole or not at all, with its K and V or without; returns its size in bytes. Raises
    FileError."""
    told = progress or (lambda _done, _all: None)
    if kv and transcript.ledger.has_cells:
        transcript.engine.check_copies()
    members = _members(transcript, beside, told) if kv else _members_without_kv(transcript, beside)
    return store.write(path, members, private=True)


def _members_without_kv(transcript: Transcript, beside: Beside) -> Iterator[tuple[str, Content]]:
    ledger, journal = transcript.ledger.without_kv(), transcript.journal
    if ledger.has_cells and not (ledger.can_shift or transcript.restarts):
        journal = Journal(journal.receipts)  # text cannot be evaluated back into the middle
    yield store.MANIFEST, manifest.encode(_describe(transcript, ledger, kv=False))
    yield _SESSION, manifest.encode(_taken(transcript, beside, ledger, journal))


def _members(transcript: Transcript, beside: Beside, progress: Progress) -> Iterator[tuple[str, Content]]:
    record, engine = transcript.record, transcript.engine
    record.next.keep_logits()  # a shift may have to be applied, see Engine.settle
    taken = _snapshot(transcript, beside)
    yield store.MANIFEST, manifest.encode(_describe(transcript, record.ledger))
    yield _SESSION, manifest.encode(taken)
    if taken.next_view is not None:
        yield _NEXT, record.next.array().view(np.uint8)
    if record.original is not None:
        yield _ORIGINAL, record.original[2].view(np.uint8)
    if not record.ledger.has_cells:
        yield _STATE, engine.state(record.live) if record.ledger.num_cells else b""
    yield from _told(_copies(taken, transcript), [*taken.cells, *taken.blobs], progress)


def _copies(taken: Snapshot, transcript: Transcript) -> Iterator[tuple[str, Content]]:
    """K and V, piece by piece, so that they are never in memory as a whole."""
    engine, sequences = transcript.engine, (transcript.ledger.live, *transcript.ledger.archives)
    for i, piece in enumerate(taken.cells):
        for _, blob in engine.copies(CellRun(sequences[piece.number], piece.p0, piece.p1)):
            yield f"cells/{i}", blob
    for piece in taken.blobs:
        yield f"parked/{piece.number}", engine.parking.get(piece.number).read()


def _told(items: Iterable[T], pieces: Sequence[Piece], progress: Progress) -> Iterator[T]:
    """The items, one a piece; ``progress`` hears of each that was used."""
    done, total = 0, sum(piece.p1 - piece.p0 for piece in pieces)
    for item, piece in zip(items, pieces, strict=True):
        yield item
        done += piece.p1 - piece.p0
        progress(done, total)


def _snapshot(transcript: Transcript, beside: Beside) -> Snapshot:
    record, ledger, engine = transcript.record, transcript.ledger, transcript.engine
    held = [(number, engine.parking.get(number)) for number in sorted(ledger.columns.blobs)]
    return _taken(
        transcript,
        beside,
        ledger,
        transcript.journal,
        next_view=record.next.view if record.next.known else None,
        original=None if record.original is None else record.original[:2],
        cells=[part for run in ledger.cell_runs() for part in engine.slices(run)] if ledger.has_cells else (),
        blobs=[Piece(number, blob.p0, blob.p1) for number, blob in held],
    )


def _taken(
    transcript: Transcript,
    beside: Beside,
    ledger: Ledger,
    journal: Journal,
    *,
    next_view: View | None = None,
    original: tuple[int, View] | None = None,
    cells: Sequence[CellRun] = (),
    blobs: Sequence[Piece] = (),
) -> Snapshot:
    return snapshot.take(
        ledger,
        transcript.spans,
        journal,
        tally=transcript.record.tally,
        next_view=next_view,
        original=original,
        cells=cells,
        blobs=blobs,
        restarts=transcript.restarts,
        sampling=beside.sampling,
        memo=beside.memo,
    )


def _describe(transcript: Transcript, ledger: Ledger, *, kv: bool = True) -> Manifest:
    settings, model = transcript.engine.settings, transcript.engine.model
    s = settings
    spans = []
    for span in transcript.spans.ordered():
        here = ledger.places.rows([span.range])
        begins = render.preview(model, ledger.ids[here])
        spans.append(
            SpanFacts(
                span.name, *span.range, span.role, tuple(sorted(span.tags)), _count(ledger.columns.state[here]), begins
            )
        )
    context = ContextFacts(s.n_ctx, s.n_batch, s.n_sessions, s.n_archives, s.parked_limit, s.logits_bytes)
    facts = SessionFacts(context, _count(ledger.columns.state), ledger.num_cells, tuple(spans), kv)
    return manifest.describe(model, settings, session=facts)


def _count(states: npt.NDArray[np.int8]) -> dict[str, int]:
    return {state.name.lower(): n for state in State if (n := int(np.count_nonzero(states == state)))}


# -- and back --------------------------------------------------------------------------------------------------------


def settings_of(facts: Manifest) -> Settings:
    """The settings a session was saved under, but for the threads, which are this machine's."""
    assert facts.session is not None
    context, cache = facts.session.context, facts.cache
    return Settings(
        n_ctx=context.n_ctx,
        n_batch=context.n_batch,
        kv_type=cache.kv_type,
        flash_attention=cache.flash_attention,
        n_sessions=context.n_sessions,
        n_archives=context.n_archives,
        max_parked_bytes=context.max_parked_bytes,
        logits_bytes=context.logits_bytes,
        rope_freq_base=cache.rope_freq_base,
        rope_freq_scale=cache.rope_freq_scale,
    )


def load(
    stored: Stored,
    facts: Manifest,
    engine: Engine,
    finish: Callable[[Transcript, Beside], R],
    progress: Progress | None = None,
) -> R:
    """A session on ``engine`` as it was when it was saved; returns what ``finish`` makes of it.

    Raises WrongFile, DamagedFile, ContextFull (not enough free cells), UsageError (no free session); then nothing has
    changed.
    """
    manifest.check(stored, facts, engine.model, engine.settings)
    if facts.session is not None and facts.session.kv and engine.model.capabilities.mask:
        engine.check_copies()
    engine.reading = True
    try:
        saved = manifest.decode(stored, _SESSION, Snapshot)
        beside, journal = Beside(saved.sampling.restored(), saved.memo), snapshot.journal_of(saved)
        transcript = Transcript(engine, restarts=saved.restarts, journal=journal)
        with stored.held_to():
            _fill(stored, facts, saved, transcript, progress or (lambda _done, _all: None))
        result = finish(transcript, beside)
        transcript.record.begin()
        return result
    except Contradiction as err:
        raise stored.damaged(f"its parts contradict each other: {err}") from err
    finally:
        engine.reading = False


def _fill(stored: Stored, facts: Manifest, saved: Snapshot, transcript: Transcript, progress: Progress) -> None:
    assert facts.session is not None
    record, engine, kv = transcript.record, transcript.engine, facts.session.kv
    _check_archives(stored, saved, transcript)
    saved.ledger_into(record.ledger, engine.model.n_vocab, kv=kv)
    if record.ledger.num_cells > engine.cells_free:
        raise ContextFull(
            f"{stored.path} takes {record.ledger.num_cells:,} cells and {engine.cells_free:,} are free; open it with a "
            f"larger n_ctx, or close other sessions"
        )
    if saved.blobs and engine.settings.parked_limit is None:
        engine.check_copy(sum(blob.p1 - blob.p0 for blob in saved.blobs), "bringing back what was parked")
    next_logits = _logits(stored, _NEXT, saved.next_view, engine)
    original = _logits(stored, _ORIGINAL, saved.original, engine)
    record.spans.fill(saved.spans, saved.span_counter)
    record.tally.fill(saved.tally)
    record.tally.end_generation()  # what the other process evaluated costs this one nothing
    if not kv:
        transcript.reader.progress = progress
        transcript.reader.refill()
        transcript.reader.progress = None
    elif record.ledger.has_cells:
        _load_cells(stored, saved, transcript, progress)
    elif record.ledger.num_cells:
        engine.load_state(record.live, stored.read(_STATE), record.ledger.num_cells)
    if next_logits is not None and saved.next_view is not None:
        record.next.in_copy(next_logits, saved.next_view)
    if original is not None and saved.original is not None:
        record.original = (*saved.original, original)


def _check_archives(stored: Stored, saved: Snapshot, transcript: Transcript) -> None:
    most = max((piece.number for piece in saved.cells), default=0)
    if most > len(transcript.ledger.archives):
        raise WrongFile(f"{stored.path} uses {most} archive sequences; open it with n_archives={most} or more")


def _load_cells(stored: Stored, saved: Snapshot, transcript: Transcript, progress: Progress) -> None:
    record, engine = transcript.record, transcript.engine
    numbers: dict[int, int] = {}

    def load() -> Iterator[None]:
        sequences = (record.ledger.live, *record.ledger.archives)
        for i, piece in enumerate(saved.cells):
            engine.load(CellRun(sequences[piece.number], piece.p0, piece.p1), stored.read(f"cells/{i}"))
            yield
        for blob in saved.blobs:
            data = stored.read(f"parked/{blob.number}")
            engine.check_blob(data, blob.p0, blob.p1)
            numbers[blob.number] = engine.parking.put(CellRun(0, blob.p0, blob.p1), data)
            yield

    for _ in _told(load(), [*saved.cells, *saved.blobs], progress):
        pass
    record.ledger.columns.renumber_blobs(numbers)
    engine.parking.hold(record, record.ledger.columns.blobs)


def _logits(stored: Stored, name: str, wanted: object, engine: Engine) -> npt.NDArray[np.float32] | None:
    if wanted is None:
        return None
    data = stored.read(name)
    if len(data) != 4 * engine.model.n_vocab:
        raise stored.damaged(f"{name} is of another vocabulary")
    return data.view(np.float32)
