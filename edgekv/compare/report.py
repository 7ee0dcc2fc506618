"""The report: what a run found, as one dictionary (schema ``edgekv.compare/1``) that everything else is drawn from."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from edgekv.compare import payoff, verdict
from edgekv.compare.arms import SAME_COST
from edgekv.compare.cost import BEFORE, Lengths, Timing
from edgekv.compare.leak import Answers, channel_index
from edgekv.compare.options import SUMMARY_TOKENS, Options
from edgekv.compare.results import Results
from edgekv.compare.run import Run
from edgekv.errors import UsageError

SCHEMA: Final = "edgekv.compare/1"
_CONDITION: Final = re.compile(r"\s*([\w.]+)\s*(<=|>=|<|>|==|!=)\s*(-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*")
_FLAT: Final = ("kld_mean", "kld_median", "kld_p99", "same_top", "rms_dp", "dnll", "greedy_match_tokens")


@dataclass(frozen=True)
class Report:
    """Everything a run found. ``print`` it, write :meth:`html`, or read ``data``."""

    data: dict[str, Any]

    @classmethod
    def of(cls, run: Run) -> Report:
        return cls(_data(run))

    @cached_property
    def verdict(self) -> str:
        return str(self.data["verdict"])

    def json(self) -> str:
        return json.dumps(_finite(self.data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def csv(self) -> str:
        """A line an arm: median timings, means against the restart, the leak."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["arm", "edit_ms", "ttft_ms", "tokens_redecoded", *_FLAT, "leak_accuracy", "leak_n"])
        for name, arm in self.data["arms"].items():
            vs, leak = arm["vs_restart"], arm["leak"]
            timed = [(arm[key] or {}).get("median") for key in ("edit_ms", "ttft_ms")]
            row = [
                name,
                *timed,
                arm["tokens_redecoded"],
                *(vs.get(k) for k in _FLAT),
                leak.get("accuracy"),
                leak.get("n"),
            ]
            writer.writerow(["" if value is None else value for value in row])
        return out.getvalue()

    def markdown(self) -> str:
        from edgekv.compare.markdown import render

        return render(self.data)

    def html(self) -> str:
        from edgekv.compare.html import render

        return render(self.data)

    def _repr_html_(self) -> str:
        from edgekv.compare.html import body

        return body(self.data)

    def __str__(self) -> str:
        return self.markdown()

    def holds(self, expression: str) -> bool:
        """Whether conditions such as "mask.vs_restart.kld_mean > 0.1 or mask.leak.accuracy > .2" hold.

        A path begins at an arm or at the top of the data. Raises UsageError for what it cannot read, and for a figure
        that was not measured: a condition that can never hold would look like a pass.
        """
        # Every condition is looked up, also where another one has decided: none may name what is not there.
        held = [[self._one(part) for part in either.split(" and ")] for either in expression.split(" or ")]
        return any(all(parts) for parts in held)

    def _one(self, condition: str) -> bool:
        path, op, limit = _parse(condition)
        value = self._value(path)
        return {
            "<": value < limit,
            ">": value > limit,
            "<=": value <= limit,
            ">=": value >= limit,
            "==": value == limit,
            "!=": value != limit,
        }[op]

    def _value(self, path: str) -> float:
        first = path.split(".")[0]
        here: Any = self.data["arms"] if first in self.data["arms"] else self.data
        for name in path.split("."):
            if not isinstance(here, dict) or name not in here:
                known = ", ".join(sorted(map(str, here))) if isinstance(here, dict) else "nothing below it"
                raise UsageError(f"{path!r}: there is no {name!r}; there is {known}")
            here = here[name]
        if isinstance(here, bool) or not isinstance(here, (int, float)):
            raise UsageError(f"{path!r} was not measured in this run, or is no number")
        return float(here)


def check_condition(expression: str) -> None:
    """Raise UsageError for an expression that cannot be read, before anything is run."""
    for part in re.split(r" and | or ", expression):
        _parse(part)


def _parse(condition: str) -> tuple[str, str, float]:
    found = _CONDITION.fullmatch(condition)
    if found is None:
        raise UsageError(f"{condition.strip()!r} is no condition: write PATH OP NUMBER, mask.vs_restart.kld_mean > 0.1")
    return found[1], found[2], float(found[3])


def _data(run: Run) -> dict[str, Any]:
    results, options = run.results, run.options
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": _machine(run),
        "model": {
            "name": run.model.description,
            "file": run.model.path.name,
            "fingerprint": run.model.fingerprint,
            "kv_type": options.settings.kv_type,
            "closes_gaps": run.setup.closes_gaps,
        },
        "settings": _settings(options),
        "workload": _workload(run),
        "noise": {
            "vs_restart": _against(results, "noise", "vs_restart"),
            "vs_full": _against(results, "noise_full", "vs_full"),
        },
        "arms": {name: _arm(run, name) for name in run.names},
        "controls": _answers(results.controls, "restart"),
        "curve": [_point(lengths, timings) for lengths, timings in results.timings.items()],
        "interrupted": results.interrupted,
        "stopped": results.stopped,
        "notes": run.setup.notes,
    }
    data["break_even"] = payoff.break_even(data, verdict.masking_arm(data["arms"]) or "mask")
    data["advice"], data["verdict"] = verdict.decide(data)
    return data


def _finite(value: Any) -> Any:
    """The same with infinities as text, which JSON has not: a token one arm rules out is infinitely far."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _machine(run: Run) -> dict[str, Any]:
    from edgekv.doctor import machine

    facts = dict(machine.machine())
    facts["threads"] = run.options.settings.threads
    return {**facts, "build": dict(machine.build())}


def _settings(options: Options) -> dict[str, Any]:
    s = options.settings
    return {
        "repeat": options.repeat,
        "seed": options.seed,
        "greedy_tokens": options.tokens,
        "true_tokens": options.most,
        "summary_tokens": SUMMARY_TOKENS,
        "before": BEFORE,
        "n_ctx": s.n_ctx,
        "n_batch": s.n_batch,
        "flash_attention": s.flash_attention,
    }


def _workload(run: Run) -> dict[str, Any]:
    masked, behind = _means(run.results.lengths)
    placebo = _means(run.results.placebos) if "placebo" in run.names else (None, None)
    return {
        "name": run.options.workload,
        "cases": run.results.cases,
        "compared": run.results.compared,
        "tokens_masked": masked,
        "tokens_behind": behind,
        "placebo_masked": placebo[0],
        "placebo_behind": placebo[1],
    }


def _means(lengths: list[tuple[int, int]]) -> tuple[float | None, float | None]:
    if not lengths:
        return None, None
    return sum(a for a, _ in lengths) / len(lengths), sum(b for _, b in lengths) / len(lengths)


def _against(results: Results, arm: str, reference: str) -> dict[str, Any]:
    found = getattr(results, reference).get(arm)
    return found.as_dict() if found is not None else {}


def _arm(run: Run, name: str) -> dict[str, Any]:
    results = run.results
    timing = _longest(results, SAME_COST.get(name, name))
    cost: dict[str, Any] = timing.as_dict() if timing else dict.fromkeys(Timing().as_dict())
    leak = _answers(results.secrets, name)
    if leak:
        leak.update(channel_index(*(results.secrets[n] for n in ("restart", name, "full"))))
    return {
        "n": len(timing.ttft_ms) if timing else 0,
        **cost,
        "vs_restart": _against(results, name, "vs_restart"),
        "vs_full": _against(results, name, "vs_full"),
        "leak": leak,
        "facts": _answers(results.facts, name),
    }


def _answers(kept: dict[str, Answers], arm: str) -> dict[str, Any]:
    return kept[arm].as_dict() if arm in kept and kept[arm].cases else {}


def _longest(results: Results, arm: str) -> Timing | None:
    """The arm at the longest point that was measured."""
    points = [lengths for lengths, timings in results.timings.items() if arm in timings]
    return results.timings[max(points, key=lambda p: p.num_tokens)][arm] if points else None


def _point(lengths: Lengths, timings: dict[str, Timing]) -> dict[str, Any]:
    arms = {name: {"ttft_ms": t.as_dict()["ttft_ms"], "edit_ms": t.as_dict()["edit_ms"]} for name, t in timings.items()}
    return {"span": lengths.span, "suffix": lengths.suffix, "arms": arms}
