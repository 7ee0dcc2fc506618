"""The demo: one conversation about one report, one edit, four ways to make it, side by side.

The model reads a report, answers and summarises; then the report should no longer count and one more question comes.
Every way to get there is timed from the edit to the first token of the answer, and compared with the restart on the
restart's own continuation. What the numbers leave out is said with them.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from . import numerics, prompt
from .doctor import machine
from .engine import Engine
from .model import Model, TokenArray
from .receipts import Receipt
from .sampling import Sampling
from .session import Session
from .settings import Settings
from .spans import Span

SCHEMA: Final = "edgekv.demo/1"
REPORT: Final = "report"
_ODD_BATCH: Final = 37  # boundaries nobody would choose, for the noise floor
_ANSWERS: Final = Sampling(repeat_penalty=1.1, penalty_last_n=256)  # greedy; small models loop without a penalty

#: Called with (what is being done, done, total).
Watch = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Script:
    """The texts of the demo; ``edgekv/data`` holds them."""

    report: str
    system: str
    report_intro: str
    questions: tuple[str, ...]
    summarise: str
    after: str

    @classmethod
    def load(cls) -> Script:
        data = importlib.resources.files("edgekv") / "data"
        raw = json.loads((data / "demo.json").read_text("utf-8"))
        questions = tuple(str(q["question"]) for q in raw["questions"])
        texts = {name: str(raw[name]) for name in ("system", "report_intro", "summarise", "after")}
        return cls(report=(data / "field_report.txt").read_text("utf-8"), questions=questions, **texts)


@dataclass(frozen=True)
class Plan:
    """How much the demo does. repeat: timings of each arm. continuation: tokens the distributions are compared over."""

    settings: Settings = field(default_factory=Settings)
    repeat: int = 3
    continuation: int = 64
    answer_tokens: int = 96
    summary_tokens: int = 192


@dataclass(frozen=True)
class Trial:
    """One arm made once: the session stands behind the question, its first token known."""

    session: Session
    edit_ms: float
    ttft_ms: float
    tokens_redecoded: int


@dataclass
class Arm:
    """One way to make the edit: its timings, and its next-token logits over the restart's continuation."""

    name: str
    edit_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    tokens_redecoded: int = 0
    cells_used: int = 0
    answer: str = ""
    kld: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    same_top: float = 0.0

    def add(self, trial: Trial) -> None:
        self.edit_ms.append(trial.edit_ms)
        self.ttft_ms.append(trial.ttft_ms)
        self.tokens_redecoded = trial.tokens_redecoded
        self.cells_used = trial.session.stats.cells_used

    def as_dict(self) -> dict[str, Any]:
        return {
            "edit_ms": statistics.median(self.edit_ms),
            "edit_ms_range": [min(self.edit_ms), max(self.edit_ms)],
            "ttft_ms": statistics.median(self.ttft_ms),
            "ttft_ms_range": [min(self.ttft_ms), max(self.ttft_ms)],
            "n": len(self.ttft_ms),
            "tokens_redecoded": self.tokens_redecoded,
            "cells_used": self.cells_used,
            "vs_restart": {**_kld_dict(self.kld), "same_top": self.same_top},
            "answer": self.answer,
        }


def _kld_dict(kld: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Mean over the compared positions, with its spread, in nats."""
    quartiles = [float(q) for q in np.percentile(kld, [25, 50, 75])]
    return {"kld_mean": float(kld.mean()), "kld_quartiles": quartiles, "n": len(kld)}


@dataclass(frozen=True)
class Format:
    """How turns are written: in ChatML where the model's own template speaks it, else as plain text.

    Control tokens stand only in the frame; what is between them is read as text.
    """

    model: Model
    chat: bool

    @classmethod
    def of(cls, model: Model) -> Format:
        return cls(model, prompt.has_chatml(model))

    @property
    def stop(self) -> tuple[str, ...]:
        return () if self.chat else ("\nQuestion:",)

    def opening(self, system: str) -> TokenArray:
        """Everything in front of the report."""
        bos = [] if self.model.bos is None else [self.model.bos]
        if not self.chat:
            return self._join(bos, self._text(f"{system}\n\n"))
        mark = self._frame("<|im_start|>system\n")
        return self._join(bos, mark, self._text(system), self._frame("<|im_end|>\n<|im_start|>user\n"))

    def question(self, text: str, *, first: bool = False) -> TokenArray:
        """From where the last turn ended to where the answer begins; the first one stands in the report's turn."""
        if not self.chat:
            return self._text(f"\nQuestion: {text}\nAnswer:")
        front = self._text("\n\n") if first else self._frame("<|im_start|>user\n")
        return self._join(front, self._text(text), self._frame("<|im_end|>\n<|im_start|>assistant\n"))

    @property
    def answer_end(self) -> TokenArray:
        return self._frame("<|im_end|>\n" if self.chat else "\n")

    def _frame(self, text: str) -> TokenArray:
        return self.model.tokenize(text, special=True)

    def _text(self, text: str) -> TokenArray:
        return self.model.tokenize(text)

    @staticmethod
    def _join(*parts: Iterable[int] | TokenArray) -> TokenArray:
        return np.concatenate([np.asarray(p, np.int32) for p in parts])


class Demo:
    """Runs it step by step: :meth:`read_report`, :meth:`talk`, :meth:`compare`, then :meth:`as_dict`."""

    def __init__(self, model: Model, plan: Plan = Plan(), watch: Watch = lambda *_: None) -> None:
        self.model = model
        self.plan = plan
        self.script = Script.load()
        self.format = Format.of(model)
        self.arms = {name: Arm(name) for name in ("mask", "mask_keep_gap", "restart", "restart_cold")}
        self.noise = np.empty(0, np.float64)
        self.receipt: Receipt | None = None
        self.watch = watch
        self._context = 0  # tokens of the conversation when the edit is made
        self._closing = ExitStack()
        self._continuation: TokenArray = np.empty(0, np.int32)
        self._reference: npt.NDArray[np.float32] = np.empty((0, 0), np.float32)

    def __enter__(self) -> Demo:
        self.base = self._closing.enter_context(Session(self.model, settings=self.plan.settings))
        self._other = self._closing.enter_context(Engine(self.model, self.plan.settings))
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    # -- the conversation ---------------------------------------------------------------------------------------

    def read_report(self) -> Span:
        """The opening and the report, as spans of their own, so that the report alone can be masked."""
        self.base.append(self.format.opening(self.script.system), name="system", role="system")
        self.base.progress = lambda done, total: self.watch("reading the report", done, total)
        report = self.base.append(f"{self.script.report_intro}\n\n{self.script.report}", name=REPORT, role="user")
        self.base.progress = None
        return report

    def talk(self) -> Iterator[tuple[str, str]]:
        """(question, answer) one after the other, the summary last: everything that is read after the report."""
        asked = [*self.script.questions, self.script.summarise]
        for number, question in enumerate(asked):
            self.watch("answering questions", number, len(asked))
            name = "summary" if question is asked[-1] else f"answer-{number + 1}"
            tokens = self.plan.summary_tokens if question is asked[-1] else self.plan.answer_tokens
            self.base.append(self.format.question(question, first=not number), name=f"{name}-asked", role="user")
            yield question, self._answer(self.base, tokens, name)
            self.base.append(self.format.answer_end, role="control")
        self.watch("answering questions", len(asked), len(asked))

    def _answer(self, session: Session, max_tokens: int, name: str | None = None) -> str:
        return session.generate(max_tokens, sampling=_ANSWERS, stop=self.format.stop, name=name).text.strip()

    # -- the edit, four ways ------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Make every arm ``repeat`` times, in turn; the first time also compare its distributions."""
        report, tokens = self.base.span(REPORT), self.base.tokens
        self._context = len(tokens)
        prefix, suffix = tokens[: report.start], tokens[report.stop :]
        question = self.format.question(self.script.after)
        again = np.concatenate([suffix, question])
        ways: dict[str, Callable[[], AbstractContextManager[Trial]]] = {
            "restart": lambda: self._restarted(prefix, again, len(suffix)),
            "restart_cold": lambda: self._restarted(
                prefix[:0], np.concatenate([prefix, again]), len(prefix) + len(suffix)
            ),
            "mask_keep_gap": lambda: self._masked(report, question, "keep"),
            "mask": lambda: self._masked(report, question, "close"),
        }
        total, done = len(ways) * self.plan.repeat + 1, 0
        for repeat in range(self.plan.repeat):
            for name, way in ways.items():
                self.watch("comparing four ways", done, total)
                with way() as trial:
                    self.arms[name].add(trial)
                    if not repeat:
                        self._compare(self.arms[name], trial.session)
                done += 1
        self.watch("comparing four ways", done, total)
        self._measure_noise(np.concatenate([prefix, again]))
        self.watch("comparing four ways", total, total)

    @contextmanager
    def _masked(self, report: Span, question: TokenArray, gap: str) -> Iterator[Trial]:
        """The conversation itself with its report masked; put back as it was afterwards."""
        base, began = self.base, time.perf_counter()
        self.receipt = base.mask(report, gap=gap)
        edited = time.perf_counter()
        reread = base.stats.reread
        asked = base.append(question)
        base.logits().argmax()
        ended = time.perf_counter()
        yield Trial(base, (edited - began) * 1e3, (ended - began) * 1e3, base.stats.reread - reread)
        base.rewind(asked)
        base.unmask(report)

    @contextmanager
    def _restarted(self, reused: TokenArray, read: TokenArray, num_again: int) -> Iterator[Trial]:
        """A new session; ``reused`` is in its cache already, ``read`` is read against the clock."""
        with Session(self._other) as session:
            if len(reused):
                session.append(reused)
            began = time.perf_counter()
            session.append(read)
            session.logits().argmax()
            yield Trial(session, 0.0, (time.perf_counter() - began) * 1e3, num_again)

    def _compare(self, arm: Arm, session: Session) -> None:
        """Distributions over the restart's own continuation, and the answer this arm gives."""
        if arm.name == "restart":
            banned = Sampling(logit_bias=dict.fromkeys(self.model.end_tokens, -math.inf))
            generation = session.generate(self.plan.continuation, sampling=banned)
            self._continuation = np.asarray(generation.finish().tokens, np.int32)
            session.rewind(generation.span)
            self._reference = session.logits_over(self._continuation)
        logits = session.logits_over(self._continuation)
        arm.kld = numerics.kl_divergence(self._reference, logits)
        arm.same_top = float(numerics.same_top(self._reference, logits).mean())
        arm.answer = self._answer(session, self.plan.answer_tokens)

    def _measure_noise(self, tokens: TokenArray) -> None:
        """The restart again with other batch boundaries: what differs between two runs that should be equal."""
        odd = replace(self.plan.settings, n_batch=_ODD_BATCH)
        self._other.close()
        with Session(self.model, settings=odd) as session:
            session.append(tokens)
            self.noise = numerics.kl_divergence(self._reference, session.logits_over(self._continuation))

    # -- the figures --------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Everything measured, as ``edgekv demo --json`` prints it."""
        report = self.base.span(REPORT)
        assert self.receipt is not None
        return {
            "schema": SCHEMA,
            "model": {"file": self.model.path.name, "fingerprint": self.model.fingerprint},
            "machine": measured_on(self.plan.settings),
            "tokens": {
                "context": self._context,
                "masked": len(report),
                "suffix": self._context - report.stop,
                "influenced": self.receipt.influenced,
            },
            "noise": _kld_dict(self.noise),
            "arms": {name: arm.as_dict() for name, arm in self.arms.items()},
        }

    def verdict(self) -> str:
        """One plain sentence on what was saved and what it cost."""
        mask, restart = self.arms["mask"], self.arms["restart"]
        saved, paid = statistics.median(mask.ttft_ms), statistics.median(restart.ttft_ms)
        assert self.receipt is not None
        return (
            f"Masking answered after {saved / 1e3:.2f} s instead of {paid / 1e3:.2f} s, {paid / saved:.0f} times "
            f"sooner, with {mask.tokens_redecoded} tokens read again instead of {restart.tokens_redecoded:,}; it cost "
            f"a mean KL divergence of {mask.kld.mean():.3f} nats from the restart, where two equal restarts differ by "
            f"{self.noise.mean():.3f}, because {self.receipt.influenced:,} visible tokens were computed while the "
            "report was visible and still carry what they took from it, and it freed no memory."
        )


def measured_on(settings: Settings) -> dict[str, Any]:
    """What the figures were measured on."""
    return {"cpu": machine.machine()["cpu"], "threads": settings.threads, "kv_type": settings.kv_type}
