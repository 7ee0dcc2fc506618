"""A run: cost at every point, then case after case, arm after arm; what is finished counts, whatever stops it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from edgekv._llama import uninterrupted
from edgekv.compare import arms as arms_module
from edgekv.compare import cost, leak
from edgekv.compare.arms import ALWAYS, SAME_COST, Piece, Stage, Texts, placebo_span
from edgekv.compare.case import Case
from edgekv.compare.consistency import Against, Rows
from edgekv.compare.leak import Answers
from edgekv.compare.options import SUMMARY_TOKENS, Options
from edgekv.compare.prose import Writer
from edgekv.compare.results import Results
from edgekv.compare.setup import Setup
from edgekv.engine import Engine
from edgekv.errors import AuditFailed, EdgekvError
from edgekv.model import Model, TokenArray
from edgekv.session import Session

#: Called with (what is being done, work done, work in all); a unit of work is about a token read.
Watch = Callable[[str, int, int], None]


class Run:
    """One run on a model; :meth:`all` does it, ``results`` holds what is there so far."""

    def __init__(self, model: Model, options: Options = Options(), watch: Watch = lambda *_: None) -> None:
        self.model, self.options, self.watch = model, options, watch
        self.setup = Setup(model, options)
        self.names = self.setup.names
        self.results = Results()
        self._done, self._total = 0, self._work()

    def _work(self) -> int:
        points = sum(p.work(self.options.repeat) for p in self.options.points)
        return points + sum(map(self.setup.work, range(len(self.setup.cases))))

    def all(self) -> Results:
        """Measure. Ctrl-C ends it and keeps what is finished."""
        try:
            self._measure_cost()
            for number, case in enumerate(self.setup.cases):
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
        texts = self.setup.texts[number]
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
        self._step(f"case {number + 1} of {len(self.setup.cases)}", self.setup.work(number))

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
    return max(
        (len(model.tokenize(c.ask)) + max(len(model.tokenize(o)) for o in c.options) for c in case.choices), default=0
    )
