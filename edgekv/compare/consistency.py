"""Consistency: how near the next-token distributions of two arms are, token by token.

Teacher-forced over the text's true continuation and over the restart's own greedy one. The definitions are those of
llama-perplexity's --kl-divergence (tools/perplexity/perplexity.cpp): KL(reference || arm) in nats, the share of tokens
with the same likeliest one, the root mean square of the change of the probability of the true token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv import numerics
from edgekv.compare.statistics import mean_ci
from edgekv.model import TokenArray

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Tokens:
    """What two arms differ by over one stretch of text, a value a token, the first right behind the edit."""

    kld: npt.NDArray[np.float64]
    same_top: npt.NDArray[np.bool_]
    dp: npt.NDArray[np.float64]
    dnll: npt.NDArray[np.float64]

    @classmethod
    def between(cls, reference: Rows, arm: Rows, tokens: TokenArray) -> Tokens:
        """``reference`` and ``arm`` float32 (n, n_vocab): row i predicts tokens[i]."""
        log_p = numerics.log_probabilities(reference, tokens)
        log_q = numerics.log_probabilities(arm, tokens)
        return cls(
            numerics.kl_divergence(reference, arm),
            numerics.same_top(reference, arm),
            np.exp(log_q) - np.exp(log_p),
            log_p - log_q,
        )


@dataclass(frozen=True)
class OfCase:
    """One case: over the text's true continuation and over the restart's own, where there is one."""

    true: Tokens | None
    greedy: Tokens | None
    match: int | None

    @property
    def parts(self) -> list[Tokens]:
        return [t for t in (self.true, self.greedy) if t is not None]


@dataclass
class Against:
    """All cases of one arm against a reference arm."""

    cases: list[OfCase] = field(default_factory=list)

    def add(self, reference: tuple[Rows, Rows], rows: tuple[Rows, Rows], texts: tuple[TokenArray, TokenArray]) -> None:
        """A case: logits over the true text and over the greedy one, either of which may be empty."""
        found = [Tokens.between(r, a, t) if len(t) else None for r, a, t in zip(reference, rows, texts, strict=True)]
        if any(found):
            self.cases.append(OfCase(found[0], found[1], greedy_match(rows[1], texts[1]) if found[1] else None))

    def extend(self, more: Against) -> None:
        self.cases += more.cases

    def as_dict(self) -> dict[str, Any]:
        """The figures over all tokens; intervals are bootstrapped over cases. ``kld_by_distance``: means by the
        number of tokens behind the question, in doublings."""
        if not self.cases:
            return {}
        true = [c.true.dnll for c in self.cases if c.true is not None]
        matches = [c.match for c in self.cases if c.match is not None]
        every = np.concatenate(self._by_case("kld"))
        mean, ci = mean_ci(self._by_case("kld"))
        top, top_ci = mean_ci(self._by_case("same_top"))
        square, square_ci = mean_ci([dp**2 for dp in self._by_case("dp")])
        dnll, dnll_ci = mean_ci(true)
        return {
            "n": len(every),
            "cases": len(self.cases),
            "kld_mean": mean,
            "kld_ci": ci,
            "kld_median": float(np.median(every)),
            "kld_p99": float(np.percentile(every, 99)),
            "same_top": top,
            "same_top_ci": top_ci,
            "rms_dp": math.sqrt(square),
            "rms_dp_ci": square_ci and [math.sqrt(end) for end in square_ci],
            "dnll": dnll if true else None,
            "dnll_ci": dnll_ci,
            "greedy_match_tokens": float(np.median(matches)) if matches else None,
            "kld_by_distance": self._by_distance(),
        }

    def _by_case(self, name: str) -> list[npt.NDArray[Any]]:
        return [np.concatenate([getattr(t, name) for t in c.parts]) for c in self.cases]

    def _by_distance(self) -> list[dict[str, Any]]:
        stretches = [t.kld for c in self.cases for t in c.parts]
        longest = max(map(len, stretches))
        edges = [0, *(2**k for k in range(longest.bit_length()) if 2**k < longest), longest]
        found = []
        for a, b in pairwise(edges):
            values = np.concatenate([kld[a:b] for kld in stretches])
            found.append({"from": a, "to": b, "kld_mean": float(values.mean()), "n": len(values)})
        return found


def greedy_match(arm: Rows, tokens: TokenArray) -> int:
    """How many of the reference's greedy tokens the arm would have said, too, before the first it would not."""
    differs = arm.argmax(axis=1) != tokens
    return int(differs.argmax()) if differs.any() else len(tokens)
