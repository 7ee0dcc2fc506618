"""Leak: whether the masked text can still be told from what comes after it.

A forced choice among ten: each option's log-probability behind the question is summed over its tokens, the likeliest
is the answer. The Wilson interval stands beside the accuracy; chance is one in ten. The channel index says the same
without a threshold: (NLL_restart - NLL_arm) / (NLL_restart - NLL_full) of the right option, 0 for nothing, 1 for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgekv.compare.case import Choice
from edgekv.compare.statistics import wilson
from edgekv.session import Session


@dataclass(frozen=True)
class Answer:
    """One choice made: whether it was right, the right option's negative log-likelihood in nats, and chance."""

    hit: bool
    nll: float
    chance: float


def ask(session: Session, choice: Choice, *, special: bool = False) -> Answer:
    """Read the question in a fork and choose; the session stays as it is."""
    with session.fork() as fork:
        fork.append(fork.model.tokenize(choice.ask, special=special))
        scores = [float(fork.score(option).sum()) for option in choice.options]
    return Answer(int(np.argmax(scores)) == choice.right, -scores[choice.right], 1 / len(choice.options))


@dataclass
class Answers:
    """All answers of one arm to one kind of question; ``used`` tells of each whether the text leaned on it."""

    each: list[Answer] = field(default_factory=list)
    used: list[bool] = field(default_factory=list)

    def add(self, answer: Answer, *, used: bool) -> None:
        self.each.append(answer)
        self.used.append(used)

    def extend(self, more: Answers) -> None:
        self.each += more.each
        self.used += more.used

    def as_dict(self) -> dict[str, Any]:
        """{"accuracy", "ci", "chance", "n"}, and the same for cases whose later text leaned on the secret or not."""
        found = _summary(self.each)
        for name, wanted in (("used", True), ("unused", False)):
            part = [a for a, used in zip(self.each, self.used, strict=True) if used is wanted]
            if part and len(part) < len(self.each):
                found[name] = _summary(part)
        return found


def _summary(answers: Sequence[Answer]) -> dict[str, Any]:
    hits, n = sum(a.hit for a in answers), len(answers)
    chance = float(np.mean([a.chance for a in answers])) if n else None
    return {"accuracy": hits / n if n else None, "ci": wilson(hits, n), "chance": chance, "n": n}


def channel_index(restart: Answers, arm: Answers, full: Answers) -> float | None:
    """Over all cases; None where the visible span makes the right option no likelier than a restart does."""
    nll = [float(np.mean([a.nll for a in answers.each])) for answers in (restart, arm, full) if answers.each]
    if len(nll) < 3 or nll[0] - nll[2] < 0.05:
        return None
    return (nll[0] - nll[1]) / (nll[0] - nll[2])
