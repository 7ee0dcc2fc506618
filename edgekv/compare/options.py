"""Options: what a comparison runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from edgekv.compare import arms as arms_module
from edgekv.compare.arms import DEFAULT, OF_SUMMARY
from edgekv.compare.cost import Lengths
from edgekv.compare.workloads import DEFAULT_CASES, FEW, NAMES
from edgekv.errors import UsageError
from edgekv.settings import Settings

SUMMARY_TOKENS: Final = 96  # of a model's summary, at most


@dataclass(frozen=True)
class Options:
    """What to run. cases: None for what suits the workload. compared: cases whose distributions are compared too
    (the others are only asked). repeat: of each timing. suffix, span: tokens, of the curve. tokens: of the restart's
    own continuation. most: of the true one that are compared."""

    workload: str = "canary"
    arms: tuple[str, ...] = ()
    cases: int | None = None
    compared: int = FEW
    repeat: int = 5
    suffix: tuple[int, ...] = (16, 64, 256, 1024)
    span: tuple[int, ...] = (512,)
    tokens: int = 48
    most: int = 256
    seed: int = 0
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        for name in ("cases", "compared", "repeat", "tokens", "most"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        if not self.suffix or not self.span or min(*self.suffix, *self.span) < 1:
            raise UsageError("suffix and span are one or more lengths of at least 1 token")

    @property
    def num_cases(self) -> int | None:
        """None for all there are, in the user's own file."""
        return self.cases or (DEFAULT_CASES.get(self.workload, FEW) if self.workload in NAMES else None)

    @property
    def arm_names(self) -> tuple[str, ...]:
        return arms_module.check(self.arms or (OF_SUMMARY if self.workload == "summary" else DEFAULT))

    @property
    def points(self) -> list[Lengths]:
        return [Lengths(span, suffix) for span in self.span for suffix in self.suffix]
