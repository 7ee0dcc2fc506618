"""Arms: the ways to go on after a span should count no longer, each a session that stands where the question comes.

All read the same tokens in the same batches: a segment is read by itself, from its own first token on, in every arm.
Arms fork from two sessions that are read once a case: ``common`` has what stands before the first masked segment,
``full`` has everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from edgekv.compare.case import Case
from edgekv.compare.edits import EDITS, Edit
from edgekv.engine import Engine
from edgekv.errors import AuditFailed, UsageError
from edgekv.model import Model, TokenArray
from edgekv.planner import NUM_SINKS
from edgekv.session import Session
from edgekv.spans import runs

_BEHIND_PLACEBO: Final = 16  # tokens, at least
ODD_BATCH: Final = 37  # boundaries nobody would choose, for the noise floor


@dataclass(frozen=True)
class Piece:
    """A segment's tokens, under the span name they are read as."""

    name: str
    tokens: TokenArray
    mask: bool


@dataclass(frozen=True)
class Texts:
    """A case as tokens of one model, its BOS in front where it wants one."""

    pieces: tuple[Piece, ...]
    first_masked: int
    question: TokenArray
    continuation: TokenArray
    seed: int = 0

    @classmethod
    def of(cls, case: Case, model: Model, seed: int) -> Texts:
        def tokens(text: str) -> TokenArray:
            return model.tokenize(text, special=case.special)

        pieces = [Piece(f"s{n}", tokens(s.text), s.mask) for n, s in enumerate(case.segments)]
        own = bool(len(pieces[0].tokens)) and pieces[0].tokens[0] == model.bos  # written out by the user
        if model.bos is not None and not own:
            pieces.insert(0, Piece("begin", np.asarray([model.bos], np.int32), mask=False))
        first = case.first_masked + len(pieces) - len(case.segments)
        return cls(tuple(pieces), first, tokens(case.question), tokens(case.continuation), seed)

    @property
    def before(self) -> Sequence[Piece]:
        return self.pieces[: self.first_masked]

    @property
    def behind(self) -> Sequence[Piece]:
        return self.pieces[self.first_masked :]

    @property
    def visible(self) -> TokenArray:
        """What a restart reads."""
        return np.concatenate([p.tokens for p in self.pieces if not p.mask])

    @property
    def everything(self) -> TokenArray:
        return np.concatenate([p.tokens for p in self.pieces])

    @property
    def masked(self) -> list[str]:
        return [p.name for p in self.pieces if p.mask and len(p.tokens)]

    @property
    def num_tokens(self) -> int:
        return sum(len(p.tokens) for p in self.pieces) + len(self.question)


def append(session: Session, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        session.append(piece.tokens, name=piece.name)


class Stage:
    """The two sessions of a case, on ``engine``; close it to free their cells."""

    def __init__(self, engine: Engine, texts: Texts) -> None:
        self.engine, self.texts = engine, texts
        self.common = Session(engine)
        append(self.common, texts.before)
        self.full = self.common.fork()
        append(self.full, texts.behind)

    def close(self) -> None:
        self.full.close()
        self.common.close()

    @contextmanager
    def play(self, arm: str) -> Iterator[Session]:
        """The session of an arm, as long as the block lasts.

        Raises AuditFailed where it shows other tokens than it is to: a comparison of the wrong things would look fine.
        """
        with ARMS[arm](self) as session:
            self._check(arm, session)
            yield session

    def _check(self, arm: str, session: Session) -> None:
        shown, everything = session.visible_tokens, self.texts.everything
        if arm in ("placebo", "placebo_restart"):
            start, stop = placebo_span(self.texts)
            wanted = np.delete(everything, np.s_[start:stop])
        else:
            wanted = everything if arm in ("full", "noise_full") else self.texts.visible
        if not np.array_equal(shown, wanted):
            raise AuditFailed(f"the arm {arm!r} shows {len(shown)} tokens and should show {len(wanted)} others")


Arm: TypeAlias = Callable[[Stage], Session]


def _full(stage: Stage) -> Session:
    return stage.full.fork()


def _edited(edit: Edit) -> Arm:
    def arm(stage: Stage) -> Session:
        with ExitStack() as on_error:
            session = on_error.enter_context(stage.full.fork())
            edit(session, stage.texts.masked)
            on_error.pop_all()
            return session

    return arm


def _isolated(stage: Stage) -> Session:
    """What stands behind the mask never saw it: each piece attends to the visible ones before it."""
    session = stage.common.fork()
    seen = [p.name for p in stage.texts.before]
    for piece in stage.texts.behind:
        session.append(piece.tokens, name=piece.name, attend=None if piece.mask else seen)
        seen += [] if piece.mask else [piece.name]
    session.mask(stage.texts.masked)
    return session


def _restart(stage: Stage) -> Session:
    session = stage.common.fork()
    append(session, [p for p in stage.texts.behind if not p.mask])
    return session


def _restart_cold(stage: Stage) -> Session:
    session = Session(stage.engine)
    append(session, [p for p in stage.texts.pieces if not p.mask])
    return session


def _noise(stage: Stage) -> Session:
    """The restart again, read with other batch boundaries: what differs now is noise."""
    return _in_odd_batches(stage, stage.texts.visible)


def _noise_full(stage: Stage) -> Session:
    """Everything again, likewise."""
    return _in_odd_batches(stage, stage.texts.everything)


def _in_odd_batches(stage: Stage, tokens: TokenArray) -> Session:
    session = Session(stage.engine)
    for at in range(0, len(tokens), ODD_BATCH):
        session.append(tokens[at : at + ODD_BATCH])
    return session


def _placebo(stage: Stage) -> Session:
    """Another stretch is masked, as long as the span if there is one, and the span stays."""
    return _edited(lambda session, _: session.mask(placebo_span(stage.texts)))(stage)


def _placebo_restart(stage: Stage) -> Session:
    """What the placebo is compared with: all but that stretch, read from token 0."""
    start, stop = placebo_span(stage.texts)
    session, done = Session(stage.engine), 0
    for piece in stage.texts.pieces:
        kept = [t for at, t in enumerate(piece.tokens.tolist(), done) if not start <= at < stop]
        done += len(piece.tokens)
        session.append(kept)
    return session


def placebo_span(texts: Texts) -> tuple[int, int]:
    """A stretch of visible tokens, as long as what is masked if there is one, behind the attention sinks.

    Some tokens stand behind it: a masked tail is a restart, and would differ by nothing. (0, 0) where none fits.
    """
    flags = np.concatenate([np.full(len(p.tokens), not p.mask) for p in texts.pieces])
    wanted = int(np.count_nonzero(~flags))
    flags[:NUM_SINKS] = flags[-_BEHIND_PLACEBO:] = False
    start, stop = _longest_run(flags)
    length = min(wanted, stop - start)
    start += int(np.random.default_rng(texts.seed).integers(stop - start - length + 1))
    return (start, start + length) if length else (0, 0)


def _longest_run(flags: npt.NDArray[np.bool_]) -> tuple[int, int]:
    return max(runs(flags), key=lambda r: r[1] - r[0], default=(0, 0))


ARMS: Final[dict[str, Arm]] = {
    "full": _full,
    **{name: _edited(edit) for name, edit in EDITS.items()},
    "isolated": _isolated,
    "restart": _restart,
    "restart_cold": _restart_cold,
    "summary_mask": _edited(EDITS["mask"]),
    "summary_clean": _edited(EDITS["mask_recompute"]),
    "summary_restart": _restart_cold,
    "placebo": _placebo,
    "placebo_restart": _placebo_restart,
    "noise": _noise,
    "noise_full": _noise_full,
}

#: What the arms are compared with and measured by; nobody asks for these.
NOISE: Final = ("noise", "noise_full")
_BESIDE: Final = frozenset({*NOISE, "placebo_restart"})


#: Arms of a run unless others are asked for; restart, full and noise are always there.
DEFAULT: Final = (
    *("full", "mask", "mask_keep_gap", "mask_auto", "isolated", "cache_reuse"),
    *("restart", "restart_cold", "placebo"),
)
OF_SUMMARY: Final = ("full", "summary_mask", "summary_clean", "summary_restart", "restart")
ALWAYS: Final = ("full", "restart")

#: The arm whose edit and reading are the same, for the cost of those that have another name.
SAME_COST: Final = {
    "summary_mask": "mask",
    "summary_clean": "mask_recompute",
    "summary_restart": "restart_cold",
}


def check(names: Sequence[str]) -> tuple[str, ...]:
    """The arms to run, in the order of ARMS. Raises UsageError for one that does not exist."""
    known = [name for name in ARMS if name not in _BESIDE]
    if wrong := [name for name in names if name not in known]:
        raise UsageError(f"no arm {wrong[0]!r}; there are {', '.join(known)}")
    return tuple(name for name in known if name in names or name in ALWAYS)
