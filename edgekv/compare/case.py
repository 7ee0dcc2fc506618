"""A case: the texts of one experiment, and what is asked about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

CHANCE_OF: Final = 10  # options of a forced choice


@dataclass(frozen=True)
class Segment:
    """A stretch of text; ``mask``: it is to count no longer when the question comes."""

    text: str
    mask: bool = False
    role: str = ""


@dataclass(frozen=True)
class Choice:
    """A forced choice: ``ask`` is read, then the likeliest of ``options`` is the answer; ``right`` is its index.

    part: what is also counted by itself: secrets that the text behind the mask "used" (it leans on them, without
    telling them) or left "unused", facts that stand "before" the masked text or "behind" it.
    """

    ask: str
    options: tuple[str, ...]
    right: int
    part: str = ""


@dataclass(frozen=True)
class Case:
    """Segments are read in order; then the masked ones are to count no longer, and ``question`` comes.

    continuation: what the text really goes on with behind the question, for its log-likelihood. secrets: about masked
    segments. facts: about what stays visible. controls: nothing that was read tells the answer. summarise: where it
    is given, the model sums the masked segments up, and its summary stands behind them. special: control tokens in the
    texts act as such.
    """

    segments: tuple[Segment, ...]
    question: str
    continuation: str = ""
    secrets: tuple[Choice, ...] = ()
    facts: tuple[Choice, ...] = ()
    controls: tuple[Choice, ...] = ()
    summarise: str = ""
    special: bool = False

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All that is asked."""
        return (*self.secrets, *self.facts, *self.controls)

    @property
    def first_masked(self) -> int:
        """The number of segments in front of the first masked one, which every arm shares."""
        return next(i for i, segment in enumerate(self.segments) if segment.mask)


#: (role, text) -> the text of a turn
Turn: TypeAlias = Callable[[str, str], str]


@dataclass(frozen=True)
class Style:
    """How turns are written: as the model's ChatML, or in plain words; ``opening`` begins the model's own turn."""

    turn: Turn
    opening: str
    special: bool


def plain_style() -> Style:
    return Style(lambda role, text: f"{role.capitalize()}: {text}\n", "Assistant:", special=False)


def chatml_style() -> Style:
    return Style(lambda role, text: f"<|im_start|>{role}\n{text}<|im_end|>\n", "<|im_start|>assistant\n", special=True)
