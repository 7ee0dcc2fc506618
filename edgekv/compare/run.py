"""A run: cost at every point, then case after case, arm after arm; what is finished counts, whatever stops it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

import numpy as np

from edgekv._llama import uninterrupted
from edgekv.compare import arms as arms_module
from edgekv.compare import cost, leak
from edgekv.compare.arms import ALWAYS, DEFAULT, OF_SUMMARY, SAME_COST, Piece, Stage, Texts, placebo_span
from edgekv.compare.case import Case, Style, chatml_style, plain_style
from edgekv.compare.consistency import Against, Rows
from edgekv.compare.cost import Lengths, Timing
from edgekv.compare.leak import Answers
from edgekv.compare.prose import Writer
from edgekv.compare.workloads import DEFAULT_CASES, FEW, NAMES, find
from edgekv.engine import Engine
from edgekv.errors import AuditFailed, EdgekvError, UsageError
from edgekv.model import Model, TokenArray
from edgekv.planner import NUM_SINKS
from edgekv.prompt import has_chatml
from edgekv.session import Session
from edgekv.settings import Settings

SUMMARY_TOKENS: Final = 96

#: Called with (what is being done, work done, work in all); a unit of work is about a token read.
Watch = Callable[[str, int, int], None]


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


@dataclass
class Results:
    """What was measured."""

    timings: dict[Lengths, dict[str, Timing]] = field(default_factory=dict)
    vs_restart: dict[str, Against] = field(default_factory=dict)
    vs_full: dict[str, Against] = field(default_factory=dict)
    secrets: dict[str, Answers] = field(default_factory=dict)
    facts: dict[str, Answers] = field(default_factory=dict)
    controls: dict[str, Answers] = field(default_factory=dict)
    cases: int = 0
    compared: int = 0
    lengths: list[tuple[int, int]] = field(default_factory=list)  # tokens of a case: masked, behind the mask
    placebos: list[tuple[int, int]] = field(default_factory=list)  # the same of the placebo
    interrupted: bool = False
    stopped: str = ""  # by which error

    def add(self, case: Results) -> None:
        """All of a case that was finished, so that every arm has the same cases."""
        for mine, its in ((self.vs_restart, case.vs_restart), (self.vs_full, case.vs_full)):
            for name, against in its.items():
                mine.setdefault(name, Against()).extend(against)
        for kept, new in ((self.secrets, case.secrets), (self.facts, case.facts), (self.controls, case.controls)):
            for name, answers in new.items():
                kept.setdefault(name, Answers()).extend(answers)
        self.cases, self.compared = self.cases + case.cases, self.compared + case.compared
        self.lengths += case.lengths
        self.placebos += case.placebos


class Run:
    """One run on a model; :meth:`all` does it, ``results`` holds what is there so far."""

    def __init__(self, model: Model, options: Options = Options(), watch: Watch = lambda *_: None) -> None:
        if not model.capabilities.mask:
            raise UsageError(f"there is nothing to compare: {model.capabilities.mask.reason}")
        self.model, self.options, self.watch = model, options, watch
        self.results = Results()
        self.style: Style = chatml_style() if has_chatml(model) else plain_style()
        self._cases = list(islice(find(options.workload)(self.style, options.seed), options.num_cases))
        self._texts = [Texts.of(case, model, options.seed + number) for number, case in enumerate(self._cases)]
        self._check_cases()
        self.names = tuple(n for n in options.arm_names if self._possible(n))
        self.notes = [*self._notes(), *self._too_long()]
        self._done, self._total = 0, self._work()

    def _possible(self, arm: str) -> bool:
        """Whether this model's memory and these texts can play it: without shifts nothing moves."""
        if arm == "placebo":
            return all(placebo_span(texts)[1] for texts in self._texts)
        return arm not in ("mask_keep_gap", "isolated", "cache_reuse") or self.closes_gaps

    @property
    def closes_gaps(self) -> bool:
        return bool(self.model.close_gaps(self.options.settings.kv_type))

    def _notes(self) -> list[str]:
        """What a reader must know of arms that are not there, or not what their names say."""
        left, notes = [n for n in self.options.arm_names if n not in self.names], []
        if not self.closes_gaps:
            why, absent = (
                self.model.close_gaps(self.options.settings.kv_type).reason,
                [n for n in left if n != "placebo"],
            )
            notes.append(
                f"{why}: every mask keeps its gap" + (f", and there is no {', '.join(absent)}" if absent else "")
            )
        if "placebo" in left:
            notes.append("No other stretch of visible text is long enough to be masked as a placebo")
        return notes

    def _too_long(self) -> list[str]:
        """What a reader must know where texts are longer than the model can follow: so is no arm there."""
        longest, trained = max(texts.num_tokens for texts in self._texts), self.model.n_ctx_train
        if not trained or longest <= trained:
            return []
        return [f"A case reads {longest:,} tokens, more than the {trained:,} this model was trained on"]

    def _check_cases(self) -> None:
        """Raise UsageError, with the case, for what no arm could play: better now than after minutes."""
        for number, (case, texts) in enumerate(zip(self._cases, self._texts, strict=True), 1):
            if sum(len(p.tokens) for p in texts.before) < NUM_SINKS:
                raise UsageError(f"case {number}: at least {NUM_SINKS} tokens must stand in front of what is masked")
            for choice in (*case.secrets, *case.facts, *case.controls):
                if pair := leak.hopeless(self.model, choice):
                    raise UsageError(
                        f"case {number}: the option {pair[1]!r} begins with the option {pair[0]!r}, so it "
                        "could never be the likelier one; end both with the same mark"
                    )

    def _work(self) -> int:
        points = sum(p.work(self.options.repeat) for p in self.options.points)
        return points + sum(self._case_work(texts, number) for number, texts in enumerate(self._texts))

    def _case_work(self, texts: Texts, number: int) -> int:
        compared = number < self.options.compared
        read = texts.num_tokens + 50 * len(self.names)
        return read + (compared and (2 * self.options.tokens + 64) * len(self.names) + texts.num_tokens)

    def all(self) -> Results:
        """Measure. Ctrl-C ends it and keeps what is finished."""
        try:
            self._measure_cost()
            for number, case in enumerate(self._cases):
                self._measure_case(number, case)
        except KeyboardInterrupt:
            self.results.interrupted = True
        except AuditFailed:
            raise  # no figure of this run can be believed
        except EdgekvError as err:
            if not self.results.timings and not self.results.cases:
                raise
            self.results.stopped = f"case {self.results.cases + 1}: {err}" if self.results.timings else str(err)
        return self.results

    def _step(self, what: str, work: int) -> None:
        self._done += work
        self.watch(what, min(self._done, self._total), self._total)

    # -- cost ---------------------------------------------------------------------------------------------------

    def _measure_cost(self) -> None:
        timed = tuple(n for n in cost.TIMED if n in self.names or n in {SAME_COST.get(a) for a in self.names})
        longest = max(self.options.points, key=lambda p: p.num_tokens)
        for lengths in self.options.points:
            tokens = self.model.tokenize(Writer(self.options.seed).passage(max(40, lengths.num_tokens // 12)))
            point = cost.Point(self.model, cost.settings_for(lengths, self.options.settings), tokens, lengths)
            with contextlib.closing(point):
                share = lengths.work(self.options.repeat) // (self.options.repeat + 1)
                decode = lengths == longest
                for timings in cost.measure(point, timed, self.options.repeat, decode=decode):
                    if timings:  # the first turn warms up
                        self.results.timings[lengths] = timings
                    self._step(f"timing, {lengths.span} masked, {lengths.suffix} behind", share)

    # -- cases --------------------------------------------------------------------------------------------------

    def _measure_case(self, number: int, case: Case) -> None:
        texts = self._texts[number]
        settings = replace(
            self.options.settings,
            n_ctx=self._room(case, texts),
            n_sessions=6,
            n_archives=2,
        )
        with Engine(self.model, settings) as engine:
            if case.summarise:
                texts = self._with_summary(engine, case, texts)
            found = Results(cases=1)
            with contextlib.closing(Stage(engine, texts)) as stage:
                if number < self.options.compared:
                    self._compare(stage, found)
                self._ask(stage, case, found)
        behind = sum(len(p.tokens) for p in texts.behind if not p.mask)
        found.lengths.append((sum(len(p.tokens) for p in texts.pieces if p.mask), behind))
        start, stop = placebo_span(texts)
        found.placebos.append((stop - start, len(texts.everything) - stop))
        with uninterrupted():
            self.results.add(found)
        self._step(f"case {number + 1} of {len(self._cases)}", self._case_work(texts, number))

    def _room(self, case: Case, texts: Texts) -> int:
        """Cells for a case: everything, a restart beside it, copies of what moves, and what is read behind."""
        behind = 4 * (self.options.tokens + self.options.most) + _longest_ask(self.model, case)
        return 4 * texts.num_tokens + behind + 512

    def _with_summary(self, engine: Engine, case: Case, texts: Texts) -> Texts:
        """The texts with the model's own summary behind what it sums up."""
        with contextlib.closing(Stage(engine, texts)) as stage, stage.full.fork() as session:
            ask = self.model.tokenize(case.summarise, special=case.special)
            session.append(ask)
            said = session.generate(SUMMARY_TOKENS).finish().tokens
        end = self.model.tokenize("<|im_end|>\n" if case.special else "\n", special=case.special)
        summary = np.concatenate([ask, np.asarray(said, np.int32), end])
        return replace(texts, pieces=(*texts.pieces, Piece("summary", summary, mask=False)))

    # -- consistency --------------------------------------------------------------------------------------------

    def _compare(self, stage: Stage, found: Results) -> None:
        true = stage.texts.continuation[: self.options.most]
        greedy, references = self._references(stage, true)
        for name in (*arms_module.NOISE, *sorted(self.names, key=lambda n: n == "placebo")):
            with stage.play(name) as session:
                rows = self._rows(session, stage.texts.question, true, greedy)
            if name == "placebo":  # it hides other text, so its restart is another one
                with stage.play("placebo_restart") as session:
                    references[0] = self._rows(session, stage.texts.question, true, greedy)
            own = name != "placebo"
            found.vs_restart.setdefault(name, Against()).add(references[0], rows, (true, greedy), author=own)
            found.vs_full.setdefault(name, Against()).add(references[1], rows, (true, greedy), author=False)
        found.compared = int(bool(len(true) or len(greedy)))

    def _references(self, stage: Stage, true: TokenArray) -> tuple[TokenArray, list[tuple[Rows, Rows]]]:
        """The restart's own continuation, and the logits of restart and full over it and over the true text."""
        with stage.play("restart") as session, session.fork() as ahead:
            if len(stage.texts.question):
                ahead.append(stage.texts.question)
            greedy = np.asarray(ahead.generate(self.options.tokens).finish().tokens, np.int32)
        references = []
        for name in ALWAYS[::-1]:
            with stage.play(name) as session:
                references.append(self._rows(session, stage.texts.question, true, greedy))
        return greedy, references

    @staticmethod
    def _rows(session: Session, question: TokenArray, true: TokenArray, greedy: TokenArray) -> tuple[Rows, Rows]:
        """Over both texts, behind the question: nothing is read again that a user's session would not."""
        if len(question):
            session.append(question)
        return session.logits_over(true), session.logits_over(greedy)

    # -- leak ---------------------------------------------------------------------------------------------------

    def _ask(self, stage: Stage, case: Case, found: Results) -> None:
        """Every arm but the placebo; nothing tells the controls' answers in any of them, so one arm is enough."""
        for name in (n for n in self.names if n != "placebo"):
            kinds = [(case.secrets, found.secrets), (case.facts, found.facts)]
            if name == "restart":
                kinds.append((case.controls, found.controls))
            if any(choices for choices, _ in kinds):
                with stage.play(name) as session:
                    for choices, kept in kinds:
                        answers = [leak.ask(session, choice, special=case.special) for choice in choices]
                        kept[name] = Answers([answers] if answers else [])


def _longest_ask(model: Model, case: Case) -> int:
    """Tokens of the longest question with its longest option."""
    choices = (*case.secrets, *case.facts, *case.controls)
    return max(
        (len(model.tokenize(c.ask)) + max(len(model.tokenize(o)) for o in c.options) for c in choices), default=0
    )
