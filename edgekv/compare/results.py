"""Results: what a comparison has measured so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgekv.compare.consistency import Against
from edgekv.compare.cost import Lengths, Timing
from edgekv.compare.leak import Answers


@dataclass
class Results:
    """What was measured."""

    timings: dict[Lengths, dict[str, Timing]] = field(default_factory=dict)
    vs_restart: dict[str, Against] = field(default_factory=dict)
    vs_full: dict[str, Against] = field(default_factory=dict)
    secrets: dict[str, Answers] = field(default_factory=dict)
    facts: dict[str, Answers] = field(default_factory=dict)
    controls: dict[str, Answers] = field(default_factory=dict)
    cases: int = 0
    compared: int = 0
    lengths: list[tuple[int, int]] = field(default_factory=list)  # tokens of a case: masked, behind the mask
    placebos: list[tuple[int, int]] = field(default_factory=list)  # the same of the placebo
    interrupted: bool = False
    stopped: str = ""  # by which error

    def add(self, case: Results) -> None:
        """All of a case that was finished, so that every arm has the same cases."""
        for what in ("vs_restart", "vs_full", "secrets", "facts", "controls"):
            mine = getattr(self, what)
            for name, more in getattr(case, what).items():
                mine.setdefault(name, type(more)()).extend(more)
        self.cases, self.compared = self.cases + case.cases, self.compared + case.compared
        self.lengths += case.lengths
        self.placebos += case.placebos
