"""Tokens counted: since a session began, and since its last generation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class Turn:
    """What happened since the last generation ended."""

    prefilled: int = 0
    reread: int = 0
    prefill_s: float = 0.0
    visible: int = 0
    masked: int = 0

    @property
    def reused(self) -> int:
        """Visible tokens that were in the cache before this turn's reading."""
        return max(0, self.visible - self.prefilled)


@dataclass
class Tally:
    """Totals of a session, and the turn under way."""

    prefilled: int = 0
    generated: int = 0
    reread: int = 0
    reused: int = 0
    turn: Turn = field(default_factory=Turn)

    def fill(self, other: Tally) -> None:
        """Be what another tally was."""
        vars(self).update(vars(other))

    def kept(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What it is now. (Plain dicts: every generated token asks.)"""
        return dict(vars(self)), dict(vars(self.turn))

    def restore_kept(self, before: tuple[dict[str, Any], dict[str, Any]]) -> None:
        mine, turn = before
        vars(self).update(mine)
        vars(self.turn).update(turn)

    def read(self, num_tokens: int, seconds: float) -> None:
        self.prefilled += num_tokens
        self.turn.prefilled += num_tokens
        self.turn.prefill_s += seconds

    def read_again(self) -> None:
        self.reread += 1
        self.turn.reread += 1

    def begin_generation(self, visible: int, masked: int) -> None:
        self.turn.visible, self.turn.masked = visible, masked

    def end_generation(self) -> Turn:
        """The turn that ends here; the next begins."""
        ended, self.turn = replace(self.turn), Turn()
        return ended
