"""A check is a function that looks and says; a finding is what it said, or how it failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Says:
    """What a check saw: a sentence, and figures for the JSON twin."""

    message: str
    status: Status = "ok"
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A name, and what looks."""

    name: str
    look: Callable[[], Says]


@dataclass(frozen=True)
class Finding:
    """What came of a check; ms: how long it took."""

    name: str
    status: Status
    message: str
    ms: float
    figures: dict[str, Any]


class Wrong(Exception):
    """What a check raises when something is not as promised."""


def expect(holds: object, otherwise: str) -> None:
    """Raise Wrong unless it holds."""
    if not holds:
        raise Wrong(otherwise)


def carry_out(check: Check) -> Finding:
    """Run a check; an exception of any kind is a failure, and named."""
    began = time.perf_counter()
    try:
        says = check.look()
    except Wrong as err:
        says = Says(str(err), "failed")
    except Exception as err:  # whatever it is, it is news of this machine
        says = Says(f"{type(err).__name__}: {err}", "failed")
    return Finding(check.name, says.status, says.message, (time.perf_counter() - began) * 1e3, says.figures)
