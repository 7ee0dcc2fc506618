"""Consistency: how near the next-token distributions of two arms are, token by token.

Teacher-forced over the text's true continuation and over the restart's own greedy one. The definitions are those of
llama-perplexity's --kl-divergence (tools/perplexity/perplexity.cpp): KL(reference || arm) in nats, the share of tokens
with the same likeliest one, the root mean square of the change of the probability of the true token.
"""

from __future__ import annotations

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


@dataclass
class Against:
    """All cases of one arm against a reference arm."""

    true: list[Tokens] = field(default_factory=list)
    greedy: list[Tokens] = field(default_factory=list)
    greedy_match: list[int] = field(default_factory=list)

    def extend(self, more: Against) -> None:
        self.true += more.true
        self.greedy += more.greedy
        self.greedy_match += more.greedy_match

    def as_dict(self) -> dict[str, Any]:
        """The figures over all tokens; intervals are bootstrapped over cases. ``kld_by_distance``: means by the
        number of tokens behind the edit, in doublings."""
        both = [*self.true, *self.greedy]
        if not both:
            return {}
        klds = [np.concatenate(parts) for parts in self._by_case("kld")]
        every = np.concatenate(klds)
        mean, ci = mean_ci(klds)
        top, top_ci = mean_ci([np.concatenate(parts) for parts in self._by_case("same_top")])
        dnll, dnll_ci = mean_ci([t.dnll for t in self.true])
        dp = np.concatenate([t.dp for t in both])
        return {
            "n": len(every),
            "cases": len(klds),
            "kld_mean": mean,
            "kld_ci": ci,
            "kld_median": float(np.median(every)),
            "kld_p99": float(np.percentile(every, 99)),
            "same_top": top,
            "same_top_ci": top_ci,
            "rms_dp": float(np.sqrt(np.mean(dp**2))),
            "dnll": dnll if self.true else None,
            "dnll_ci": dnll_ci,
            "greedy_match_tokens": float(np.median(self.greedy_match)) if self.greedy_match else None,
            "kld_by_distance": self._by_distance(),
        }

    def _by_case(self, name: str) -> list[list[npt.NDArray[Any]]]:
        pairs = [[t] for t in self.true] or [[] for _ in self.greedy]
        for parts, tokens in zip(pairs, self.greedy, strict=False):
            parts.append(tokens)
        return [[getattr(t, name) for t in parts] for parts in pairs]

    def _by_distance(self) -> list[dict[str, Any]]:
        stretches = self.true or self.greedy
        longest = max(len(t.kld) for t in stretches)
        edges = [0, *(2**k for k in range(longest.bit_length()) if 2**k < longest), longest]
        found = []
        for a, b in pairwise(edges):
            values = np.concatenate([t.kld[a:b] for t in stretches])
            found.append({"from": a, "to": b, "kld_mean": float(values.mean()), "n": len(values)})
        return found


def greedy_match(arm: Rows, tokens: TokenArray) -> int:
    """How many of the reference's greedy tokens the arm would have said, too, before the first it would not."""
    differs = arm.argmax(axis=1) != tokens
    return int(differs.argmax()) if differs.any() else len(tokens)
