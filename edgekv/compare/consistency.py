"""Consistency: how near the next-token distributions of two arms are, token by token.

Teacher-forced over the text's true continuation and over the restart's own greedy one. The definitions are those of
llama-perplexity's --kl-divergence (tools/perplexity/perplexity.cpp): KL(reference || arm) in nats, the share of tokens
with the same likeliest one, the root mean square of the change of the probability of the true token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgekv import numerics
from edgekv.compare.statistics import Interval, mean_ci, quantile_ci
from edgekv.model import TokenArray

Rows = npt.NDArray[np.float32]
_KLD: Final = (0.0, math.inf)


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
    def parts(self) -> list[tuple[int, Tokens]]:
        """(from which token on it counts, text): both begin with the same distribution, which counts once."""
        found = [t for t in (self.true, self.greedy) if t is not None]
        return list(enumerate(found))


@dataclass
class Against:
    """All cases of one arm against a reference arm."""

    cases: list[OfCase] = field(default_factory=list)

    def add(
        self,
        reference: tuple[Rows, Rows],
        rows: tuple[Rows, Rows],
        texts: tuple[TokenArray, TokenArray],
        *,
        author: bool = True,
    ) -> None:
        """A case: logits over the true text and over the greedy one, either of which may be empty.

        author: the greedy text is the reference's own, so how far the arm says it, too, tells how long they agree.
        """
        found = [Tokens.between(r, a, t) if len(t) else None for r, a, t in zip(reference, rows, texts, strict=True)]
        match = greedy_match(rows[1], texts[1]) if found[1] and author else None
        if any(found):
            self.cases.append(OfCase(found[0], found[1], match))

    def extend(self, more: Against) -> None:
        self.cases += more.cases

    def as_dict(self) -> dict[str, Any]:
        """The figures over all tokens; intervals are bootstrapped over cases. ``kld_by_distance``: means by the
        number of tokens behind the question, in doublings."""
        if not self.cases:
            return {}
        kld = self._by_case("kld")
        square, square_ci = mean_ci([dp**2 for dp in self._by_case("dp")], (0, 1))
        return {
            "n": sum(map(len, kld)),
            "cases": len(self.cases),
            **_named("kld_mean", "kld_ci", mean_ci(kld, _KLD)),
            **_named("kld_true", "kld_true_ci", mean_ci([c.true.kld for c in self.cases if c.true], _KLD)),
            **_named("kld_greedy", "kld_greedy_ci", mean_ci([c.greedy.kld for c in self.cases if c.greedy], _KLD)),
            **_named("kld_median", "kld_median_ci", quantile_ci(kld, 0.5)),
            **_named("kld_p99", "kld_p99_ci", quantile_ci(kld, 0.99)),
            **_named("same_top", "same_top_ci", mean_ci(self._by_case("same_top"), (0, 1))),
            "rms_dp": math.sqrt(square),
            "rms_dp_ci": square_ci and [math.sqrt(end) for end in square_ci],
            **_named("dnll", "dnll_ci", mean_ci([c.true.dnll for c in self.cases if c.true])),
            **_named("greedy_match_tokens", "greedy_match_ci", quantile_ci(self._matches, 0.5)),
            "kld_by_distance": self._by_distance(),
        }

    @property
    def _matches(self) -> list[list[float]]:
        return [[c.match] for c in self.cases if c.match is not None]

    def _by_case(self, name: str) -> list[npt.NDArray[Any]]:
        return [np.concatenate([getattr(t, name)[at:] for at, t in c.parts]) for c in self.cases]

    def _by_distance(self) -> list[dict[str, Any]]:
        longest = max(len(t.kld) for c in self.cases for _, t in c.parts)
        edges = [0, *(2**k for k in range(longest.bit_length()) if 2**k < longest), longest]
        found = []
        for a, b in pairwise(edges):
            groups = [np.concatenate([t.kld[max(a, at) : b] for at, t in c.parts]) for c in self.cases]
            values = _named("kld_mean", "kld_ci", mean_ci(groups, _KLD))
            found.append({"from": a, "to": b, **values, "n": sum(map(len, groups))})
        return found


def _named(value: str, ci: str, found: tuple[float, Interval]) -> dict[str, Any]:
    """A figure and its interval under their names; null where nothing was measured."""
    return {value: None if math.isnan(found[0]) else found[0], ci: found[1]}


def greedy_match(arm: Rows, tokens: TokenArray) -> int:
    """How many of the reference's greedy tokens the arm would have said, too, before the first it would not."""
    differs = arm.argmax(axis=1) != tokens
    return int(differs.argmax()) if differs.any() else len(tokens)
