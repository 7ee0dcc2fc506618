"""Setup: the cases of a run as tokens of its model, looked at before minutes are spent on them."""

from __future__ import annotations

from itertools import islice
from typing import Final

from edgekv.compare import leak
from edgekv.compare.arms import Texts, placebo_span
from edgekv.compare.case import chatml_style, plain_style
from edgekv.compare.options import Options
from edgekv.compare.workloads import find
from edgekv.errors import UsageError
from edgekv.model import Model
from edgekv.planner import NUM_SINKS
from edgekv.prompt import has_chatml


class Setup:
    """What is run: ``cases`` and their ``texts``, the arms' ``names``, and ``notes`` that a reader must know.

    Raises UsageError for a model whose memory cannot be masked, and for a case that no arm could play.
    """

    def __init__(self, model: Model, options: Options) -> None:
        if not model.capabilities.mask:
            raise UsageError(f"there is nothing to compare: {model.capabilities.mask.reason}")
        self.model: Final = model
        self.options: Final = options
        self.closes_gaps: Final = bool(model.close_gaps(options.settings.kv_type))
        style = chatml_style() if has_chatml(model) else plain_style()
        self.cases: Final = list(islice(find(options.workload)(style, options.seed), options.num_cases))
        self.texts: Final = [Texts.of(case, model, options.seed + number) for number, case in enumerate(self.cases)]
        self._check_cases()
        self.names: Final = tuple(n for n in options.arm_names if self._possible(n))
        self.notes: Final = [*self._absent(), *self._too_long()]

    def work(self, number: int) -> int:
        """About how long a case takes, in tokens read: choices are asked in every arm, and the first are compared."""
        case, texts, arms = self.cases[number], self.texts[number], len(self.names)
        asked = (len(case.secrets) + len(case.facts)) * arms + len(case.controls)
        work = 2 * texts.num_tokens + 70 * asked
        if number < self.options.compared:
            forced = min(len(texts.continuation), self.options.most) + self.options.tokens
            work += (arms + 4) * (forced + texts.num_tokens // 2 + 100) + 6 * self.options.tokens
        return work

    def _possible(self, arm: str) -> bool:
        """Whether this model's memory and these texts can play it: without shifts nothing moves."""
        if arm == "placebo":
            return all(placebo_span(texts)[1] for texts in self.texts)
        return arm not in ("mask_keep_gap", "isolated", "cache_reuse") or self.closes_gaps

    def _absent(self) -> list[str]:
        """Arms that were wanted and are not there, and what their names do not say here."""
        left = [n for n in self.options.arm_names if n not in self.names]
        moving, notes = [n for n in left if n != "placebo"], []
        if not self.closes_gaps:
            without = f", and there is no {', '.join(moving)}" if moving else ""
            notes.append(
                f"{self.model.close_gaps(self.options.settings.kv_type).reason}: every mask keeps its gap{without}"
            )
        if "placebo" in left:
            notes.append("No other stretch of visible text is long enough to be masked as a placebo")
        return notes

    def _too_long(self) -> list[str]:
        """What a reader must know where texts are longer than the model can follow: so is no arm there."""
        longest, trained = max(texts.num_tokens for texts in self.texts), self.model.n_ctx_train
        if not trained or longest <= trained:
            return []
        return [f"A case reads {longest:,} tokens, more than the {trained:,} this model was trained on"]

    def _check_cases(self) -> None:
        """Raise UsageError, with the case, for what no arm could play: better now than after minutes."""
        for number, (case, texts) in enumerate(zip(self.cases, self.texts, strict=True), 1):
            if sum(len(p.tokens) for p in texts.before) < NUM_SINKS:
                raise UsageError(f"case {number}: at least {NUM_SINKS} tokens must stand in front of what is masked")
            for choice in case.choices:
                if pair := leak.hopeless(self.model, choice):
                    raise UsageError(
                        f"case {number}: the option {pair[1]!r} begins with the option {pair[0]!r}, so it "
                        "could never be the likelier one; end both with the same mark"
                    )
