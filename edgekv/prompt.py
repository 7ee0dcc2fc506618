"""A prompt made of named parts: texts from files, as tokens, and everything that can be refused before they are read.

    NAME=FILE --load--> Part --a writer--> Piece --> Prompt --read--> Session

Reading costs seconds to minutes; a mistaken name, an unmaskable part or too small a context is told before it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from . import memory
from .errors import ContextFull, UsageError
from .ledger import Ledger
from .planner import Planner
from .receipts import Timings
from .spans import Span, SpanTable
from .wording import count, decoded

if TYPE_CHECKING:
    from .model import Model, TokenArray
    from .reader import Progress
    from .session import Session

QUESTION: Final = "question"
ANSWER: Final = "answer"
SYSTEM: Final = "system"  # a part of this name is the system turn of a chat
_BEGIN: Final = "<begin>"  # the span of the model's BOS token
_IM_START: Final = "<|im_start|>"
_IM_END: Final = "<|im_end|>"


# -- texts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A named text."""

    name: str
    text: str


def load(specs: Iterable[str], stdin: Callable[[], bytes]) -> list[Part]:
    """The texts that ``NAME=FILE`` (or ``NAME=-`` for what ``stdin`` reads) name, in order.

    Raises UsageError for a specification that makes no sense or data that is no text, OSError for the file.
    """
    pairs = [_split(spec) for spec in specs]
    if [source for _, source in pairs].count("-") > 1:
        raise UsageError("only one part can come from standard input")
    check_names(name for name, _ in pairs)
    return [Part(name, text_of(source, stdin)) for name, source in pairs]


def text_of(source: str, stdin: Callable[[], bytes]) -> str:
    """The text in a file, or, for "-", in what ``stdin`` returns; see :func:`edgekv.wording.decoded`.

    Raises UsageError, OSError.
    """
    return decoded(stdin(), "standard input") if source == "-" else decoded(Path(source).read_bytes(), source)


def check_names(names: Iterable[str]) -> None:
    """Raise UsageError for a name given twice, or one no span can have."""
    table = SpanTable()
    for name in names:
        if any(span.name == name for span in table.ordered()):
            raise UsageError(f"two parts are called {name!r}; every part needs a name of its own")
        if not name.isprintable():
            raise UsageError(f"{name!r} cannot name a part: it holds characters that cannot be printed")
        table.add(Span(name, 0, 0))


def _split(spec: str) -> tuple[str, str]:
    name, equals, source = spec.partition("=")
    if not (name and equals and source):
        raise UsageError(f"a part is NAME=FILE (or NAME=- for standard input), not {spec!r}")
    return name, source


# -- tokens ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Tokens that become one span."""

    name: str
    role: str
    tokens: TokenArray


#: (name, role, text) -> the piece that is read
Writer: TypeAlias = Callable[[str, str, str], Piece]


def plain(model: Model, *, special: bool = False) -> Writer:
    """Texts as they are; ``special`` lets control tokens in them act as such."""
    return lambda name, role, text: Piece(name, role, model.tokenize(text, special=special))


def has_chatml(model: Model) -> bool:
    """Whether the model's own chat template speaks ChatML."""
    return _IM_START in (model.chat_template or "")


def chatml(model: Model) -> Writer:
    """Texts as ChatML turns: a control token in a text stays text. Raises UsageError where the model has no ChatML."""
    start, end = (model.tokenize(mark, special=True) for mark in (_IM_START, _IM_END))
    if not has_chatml(model) or len(start) != 1 or len(end) != 1:
        raise UsageError(
            f"{model.path.name} has no ChatML template; write its own template into the parts and read it as special"
        )

    def turn(name: str, role: str, text: str) -> Piece:
        says = role or "user"
        tokens = [start, model.tokenize(f"{says}\n{text}"), end, model.tokenize("\n")]
        if name == QUESTION:
            tokens += [start, model.tokenize("assistant\n")]
        return Piece(name, says, np.concatenate(tokens))

    return turn


@dataclass(frozen=True)
class Prompt:
    """What is read: parts, then the question behind the mask (None: there is none)."""

    parts: tuple[Piece, ...]
    question: Piece | None = None

    @property
    def num_tokens(self) -> int:
        asked = len(self.question.tokens) if self.question else 0
        return asked + sum(len(p.tokens) for p in self.parts)

    def num_behind(self, masks: Sequence[str]) -> int:
        """Tokens of the parts behind the first masked one, which may be read again. Raises UnknownSpan."""
        ledger, spans = self._rehearsal(can_shift=True)
        starts = [start for start, _ in spans.resolve(list(masks))] if masks else []
        return len(ledger) - min(starts, default=len(ledger))

    def cells(self, max_tokens: int, n_ctx: int | None, spare: int = 0) -> int:
        """The n_ctx to open: room for all of it, an answer and ``spare``. Raises ContextFull when ``n_ctx`` has
        none."""
        answer = max_tokens if self.question else 0
        need = memory.cells_for(self.num_tokens + answer + spare + 1)  # 1: a token read again
        if n_ctx is not None and need > memory.cells_for(n_ctx):
            raise ContextFull(
                f"{count(self.num_tokens, 'token')} to read and {max_tokens:,} to answer need n_ctx={need}, "
                f"not {n_ctx}; give more cells, less text or a smaller max_tokens"
            )
        return n_ctx or need

    def rehearse(self, masks: Sequence[str], gap: str, *, force: bool, can_shift: bool) -> None:
        """Plan the mask on a ledger without a model, so that what it would refuse is refused before reading.

        Raises UnknownSpan, UsageError, PinnedTokens as :meth:`Session.mask` would.
        """
        ledger, spans = self._rehearsal(can_shift=can_shift)
        if masks:
            Planner(ledger).mask(ledger.select(spans.resolve(list(masks))), gap if can_shift else "keep", force=force)

    def _rehearsal(self, *, can_shift: bool) -> tuple[Ledger, SpanTable]:
        """A ledger and spans as they will be when the parts are read."""
        ledger, spans = Ledger(0, [1], can_shift=can_shift), SpanTable()
        for part in self.parts:
            start, stop = ledger.append(part.tokens, ledger.cursor)
            spans.add(Span(part.name, start, stop, part.role))
        return ledger, spans


def compose(model: Model, write: Writer, parts: Iterable[Part], question: str | None) -> Prompt:
    """The tokens of parts and question, with the model's BOS in front where it wants one."""
    bos = [] if model.bos is None else [Piece(_BEGIN, "control", np.asarray([model.bos], np.int32))]
    pieces = [write(part.name, SYSTEM if part.name == SYSTEM else "", part.text) for part in parts]
    asked = None if question is None else write(QUESTION, "user", question)
    return Prompt((*bos, *pieces), asked)


# -- reading --------------------------------------------------------------------------------------------------------


def read(session: Session, pieces: Sequence[Piece], progress: Progress | None = None) -> float:
    """Read pieces into spans of their names; ``progress`` counts over all of them. Returns milliseconds."""
    began, done, total = time.perf_counter(), 0, sum(len(p.tokens) for p in pieces)
    with contextlib.ExitStack() as after:
        after.callback(setattr, session, "progress", session.progress)
        for piece in pieces:
            if progress is not None:
                session.progress = _counting(progress, done, total)
            session.append(piece.tokens, name=piece.name, role=piece.role)
            done += len(piece.tokens)
    return (time.perf_counter() - began) * 1e3


def _counting(progress: Progress, before: int, total: int) -> Progress:
    return lambda done, _: progress(before + done, total)


def from_question_on(timings: Timings, question: Piece, reused: int, question_ms: float) -> Timings:
    """Timings of the first answer, counted from the question on: ``reused`` visible tokens had been read before it."""
    return replace(
        timings,
        prefilled=len(question.tokens),
        reused=reused,
        prefill_ms=question_ms,
        ttft_ms=timings.ttft_ms - timings.prefill_ms + question_ms,
    )
