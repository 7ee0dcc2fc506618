"""Leak: whether the masked text can still be told from what comes after it.

A forced choice among ten: each option's log-probability behind the question, and behind what all options begin with,
is summed over its tokens; the likeliest is the answer. The Wilson interval stands beside the accuracy; chance is one in
ten. The channel index says the same without a threshold: (NLL_restart - NLL_arm) / (NLL_restart - NLL_full) of the
right option, 0 for nothing, 1 for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgekv.compare.case import Choice
from edgekv.compare.statistics import draws, interval, wilson
from edgekv.model import Model, TokenArray
from edgekv.session import Session

_TELLS: Final = 0.05  # nats by which the visible span must make the right option likelier


@dataclass(frozen=True)
class Answer:
    """One choice made: whether it was right, the right option's negative log-likelihood in nats, chance, the part."""

    hit: bool
    nll: float
    chance: float
    part: str = ""


def ask(session: Session, choice: Choice, *, special: bool = False) -> Answer:
    """Read the question in a fork and choose; the session stays as it is.

    What all options begin with is read with the question: it tells nothing, and is not read ten times.
    """
    with session.fork() as fork:
        options = [fork.model.tokenize(option) for option in choice.options]
        shared = _num_shared(options)
        fork.append(np.concatenate([fork.model.tokenize(choice.ask, special=special), options[0][:shared]]))
        scores = [float(fork.score(option[shared:]).sum()) for option in options]
    return Answer(int(np.argmax(scores)) == choice.right, -scores[choice.right], 1 / len(scores), choice.part)


def hopeless(model: Model, choice: Choice) -> tuple[str, str] | None:
    """Two options of which one begins with all tokens of the other: it can never be the likelier one."""
    ordered = sorted((model.tokenize(option).tolist(), option) for option in choice.options)
    return next(((a, b) for (x, a), (y, b) in pairwise(ordered) if y[: len(x)] == x), None)


def _num_shared(options: Sequence[TokenArray]) -> int:
    """Tokens at the start that are the same in all, so that one is left of each."""
    most = min(map(len, options)) - 1
    return next((n for n in range(most) if len({int(option[n]) for option in options}) > 1), most)


@dataclass
class Answers:
    """All answers of one arm to one kind of question, case by case."""

    cases: list[list[Answer]] = field(default_factory=list)

    def extend(self, more: Answers) -> None:
        self.cases += more.cases

    def as_dict(self) -> dict[str, Any]:
        """{"accuracy", "ci", "chance", "n"}, and the same of each part where there are several."""
        found = _summary(self.cases)
        parts = sorted({a.part for case in self.cases for a in case})
        for part in parts if len(parts) > 1 else ():
            found[part or "other"] = _summary([[a for a in case if a.part == part] for case in self.cases])
        return found


def _summary(cases: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """Answers about one text are not independent: the interval is that of as many answers as there are cases."""
    asked = [case for case in cases if case]
    answers = [answer for case in asked for answer in case]
    if not answers:
        return {"accuracy": None, "ci": None, "chance": None, "n": 0}
    accuracy = sum(a.hit for a in answers) / len(answers)
    chance = sum(a.chance for a in answers) / len(answers)
    ci = wilson(accuracy * len(asked), len(asked))
    return {"accuracy": accuracy, "ci": ci, "chance": chance, "n": len(answers)}


def channel_index(restart: Answers, arm: Answers, full: Answers) -> dict[str, Any]:
    """{"channel_index", "channel_index_ci"} over the cases all three were asked in, an interval as in statistics.py.

    None where the visible span makes the right option no likelier than a restart does: there is nothing to divide by.
    """
    nll = np.array([_nll(answers) for answers in (restart, arm, full)])
    index = _index(nll.mean(axis=1))
    drawn = _index(nll[:, draws(nll.shape[1])].mean(axis=2))
    ci = None if np.isnan(drawn).any() else interval(drawn, nll.shape[1])
    return {"channel_index": None if np.isnan(index) else float(index), "channel_index_ci": ci}


def _nll(answers: Answers) -> list[float]:
    return [float(np.mean([a.nll for a in case])) for case in answers.cases if case]


def _index(nll: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    restart, arm, full = nll
    told = np.where(restart - full < _TELLS, np.nan, restart - full)
    return np.asarray((restart - arm) / told)
