"""KV modules: a text that was read once, in a file; any session of the same model takes it in without reading it.

A module's tokens saw only what they were told to: the model's first token, and what ``attend`` gave. In a session that
begins with the same tokens they are what an isolated append would have read there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from . import manifest, render, store
from .columns import NO_BLOB, CellRun, State
from .errors import MaskUnsupported
from .history import View
from .ledger import Ledger
from .manifest import Manifest, ModuleFacts
from .model import TokenArray
from .receipts import Receipt
from .settings import ASIDE
from .snapshot import MAX_POS, Piece
from .spans import Range, Span, runs
from .steps import Load, Move
from .store import Content, Stored
from .transcript import Transcript
from .wording import count

_MODULE: Final = "module.json"


@dataclass(frozen=True)
class Module:
    """``ids``: of its tokens; ``attended``: of those they saw, which stood in front of them from position 0 on;
    ``pieces``: positions of each slice of K and V. Both little-endian int32."""

    ids: bytes
    attended: bytes
    pieces: tuple[Piece, ...]


# -- out -------------------------------------------------------------------------------------------------------------


def write(path: Path, transcript: Transcript, indexes: Range, name: str) -> int:
    """Write a span, which stands at the end of a session that was only read, to a file; returns its size."""
    return store.write(path, _members(transcript, indexes, name))


def _members(transcript: Transcript, indexes: Range, name: str) -> Iterator[tuple[str, Content]]:
    ledger, engine = transcript.ledger, transcript.engine
    (start, stop), ids = indexes, ledger.ids
    run = CellRun(ledger.live, int(ledger.columns.pos[start]), int(ledger.columns.pos[stop - 1]) + 1)
    parts = engine.slices(run)
    begins = render.preview(engine.model, ids[start:stop])
    facts = ModuleFacts(name, stop - start, start, run.p0, begins)
    yield store.MANIFEST, manifest.encode(manifest.describe(engine.model, engine.settings, module=facts))
    pieces = tuple(Piece(i, part.p0, part.p1) for i, part in enumerate(parts))
    little = ids.astype("<i4")
    yield _MODULE, manifest.encode(Module(little[start:stop].tobytes(), little[:start].tobytes(), pieces))
    for i, (_, blob) in enumerate(engine.copies(run)):
        yield f"cells/{i}", blob


# -- in --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """A module whose file was checked: its tokens, those they saw, and where K and V are in the file."""

    stored: Stored
    name: str
    ids: TokenArray
    attended: TokenArray
    pieces: Sequence[Piece]

    @property
    def pos(self) -> int:
        return self.pieces[0].p0

    def misses(self, ledger: Ledger) -> str:
        """Why its tokens are not what they would be in this session; '' when they are."""
        if np.array_equal(ledger.visible_tokens[: len(self.attended)], self.attended):
            return ""
        behind = count(len(self.attended), "token")
        return f"it was read behind {behind} that this session does not begin with; recompute reads it again"

    def hidden(self, ledger: Ledger) -> View:
        """What its tokens did not see of a session's: all but the first ones, where those are the same."""
        seen = np.zeros(len(ledger), np.bool_)
        if not self.misses(ledger):
            seen[np.flatnonzero(ledger.columns.visible)[: len(self.attended)]] = True
        return tuple(runs(~seen))


def read(stored: Stored, facts: Manifest, transcript: Transcript) -> Opened:
    """Check a module against the engine it is for. Raises WrongFile, DamagedFile, MaskUnsupported."""
    engine = transcript.engine
    manifest.check(stored, facts, engine.model, engine.settings)
    module = manifest.decode(stored, _MODULE, Module)
    ids, attended = (_tokens(stored, data, engine.model.n_vocab) for data in (module.ids, module.attended))
    ends = [*(piece.p1 for piece in module.pieces[:-1])]
    fits = all(piece.p0 == end for piece, end in zip(module.pieces[1:], ends, strict=True))
    fits &= all(0 <= piece.p0 < piece.p1 < MAX_POS for piece in module.pieces)
    if not (fits and len(ids) and module.pieces and module.pieces[-1].p1 - module.pieces[0].p0 == len(ids)):
        raise stored.damaged("its K and V are not those of its tokens")
    assert facts.module is not None
    return Opened(stored, facts.module.name, ids, attended, module.pieces)


def _tokens(stored: Stored, data: bytes, n_vocab: int) -> TokenArray:
    if len(data) % 4:
        raise stored.damaged("its tokens are cut")
    ids = np.frombuffer(data, "<i4").astype(np.int32)
    if len(ids) and not (ids.min() >= 0 and ids.max() < n_vocab):
        raise stored.damaged("a token is outside the vocabulary")
    return ids


def check_room(opened: Opened, transcript: Transcript, first: TokenArray) -> None:
    """Raise ContextFull or MaskUnsupported where the module cannot come behind what is there and ``first``."""
    engine, pos = transcript.engine, transcript.ledger.cursor + len(first)
    if pos != opened.pos and not engine.can_shift:
        raise MaskUnsupported(
            f"the module stands at position {opened.pos} and would come to {pos}: "
            f"{engine.close_gaps.reason}; append its text instead"
        )
    transcript.reader.check_room(len(first) + len(opened.ids))


def check_cells(opened: Opened, transcript: Transcript) -> None:
    """Raise DamagedFile unless K and V are those of its positions."""
    with opened.stored.held_to():
        for piece in opened.pieces:
            transcript.engine.check_blob(opened.stored.read(f"cells/{piece.number}"), piece.p0, piece.p1)


def attach(opened: Opened, transcript: Transcript, register: Callable[[Range], Span], began: float) -> Receipt:
    """Bring a module's cells behind what is there, all of them or nothing; ``began``: on time.perf_counter().

    Raises DamagedFile, and as :func:`check_room`.
    """
    check_room(opened, transcript, opened.ids[:0])
    record, ledger, pos = transcript.record, transcript.ledger, transcript.ledger.cursor
    misses, stop = opened.misses(ledger), opened.pos + len(opened.ids)
    record.next.keep_logits()
    loads = (([Load(NO_BLOB, p.p0, p.p1)], opened.stored.read(f"cells/{p.number}")) for p in opened.pieces)

    def commit() -> Receipt:
        indexes = ledger.append_alone(opened.ids, pos, opened.hidden(ledger), foreign=bool(misses))
        record.next.clear()
        return Receipt(
            "attach",
            (indexes,),
            len(opened.ids),
            (time.perf_counter() - began) * 1e3,
            moved=len(opened.ids) if pos != opened.pos else 0,
            loaded_bytes=transcript.engine.kv_bytes(len(opened.ids)),
            reread=1,
            unaware=len(opened.ids) if misses else 0,
            masked=ledger.count(State.MASKED),
            span=register(indexes),
            notes=(misses,) if misses else (),
        )

    with opened.stored.held_to():
        record.load(loads)
    return record.change([Move(ASIDE, ledger.live, opened.pos, stop, pos - opened.pos)], commit)
