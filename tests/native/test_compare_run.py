"""compare on tiny models: right by construction, and the planted mistakes it must notice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import Model, Receipt, Session, Settings, compare, errors
from edgekv.compare import arms, cost, leak, resident
from edgekv.compare.arms import Stage, Texts, placebo_span
from edgekv.compare.case import Choice, plain_style
from edgekv.compare.cost import Lengths
from edgekv.compare.options import Options
from edgekv.compare.run import Run
from edgekv.compare.workloads import find

TinyPath = Callable[..., Path]
EXACT = Settings(n_ctx=256, n_threads=1, kv_type="f32", flash_attention=False)
QUICK = Options(cases=2, compared=2, repeat=1, suffix=(32, 48), span=(64,), tokens=12, settings=EXACT)


@pytest.fixture(params=["llama", "gemma3", "yarn"])
def model(request: pytest.FixtureRequest, tiny_path: TinyPath) -> Iterator[Model]:
    with Model(tiny_path(request.param)) as loaded:
        yield loaded


@pytest.fixture
def llama(tiny_path: TinyPath) -> Iterator[Model]:
    with Model(tiny_path("llama")) as loaded:
        yield loaded


FEWER = (("llama", "summary"), ("gemma3", "canary"), ("gemma3", "summary"), ("yarn", "canary"), ("yarn", "summary"))
WORKLOADS = [
    ("llama", "canary"),
    *(
        pytest.param(*both, marks=pytest.mark.slow)
        for both in (("llama", "chat"), ("llama", "think"), ("llama", "tools"), *FEWER)
    ),
]


@pytest.fixture(scope="module")
def quick(tiny_path: TinyPath) -> tuple[compare.Report, list[tuple[int, int]]]:
    """A run on the llama, and what was told of its progress."""
    told: list[tuple[int, int]] = []
    with Model(tiny_path("llama")) as model:
        return compare.run(model, QUICK, watch=lambda _what, done, total: told.append((done, total))), told


@pytest.mark.parametrize(("model", "workload"), WORKLOADS, indirect=["model"])
def test_right_by_construction(model: Model, workload: str) -> None:
    """A restart is 0 from itself, reading in isolation or all of it again is a restart, and hiding nothing is not."""
    wanted = ("mask", "mask_recompute", "isolated") if workload != "summary" else ()
    data = compare.run(model, replace(QUICK, workload=workload, arms=wanted)).data
    kld = {name: arm["vs_restart"]["kld_mean"] for name, arm in data["arms"].items()}
    assert kld["restart"] == 0
    assert data["arms"]["full"]["vs_full"]["kld_mean"] == 0
    assert kld["full"] > 0.02
    for name in {"mask_recompute", "isolated", "summary_clean", "summary_restart"} & set(kld):
        assert kld[name] < 1e-3
    assert data["noise"]["vs_restart"]["kld_mean"] < 1e-3
    assert data["arms"]["restart"]["vs_restart"]["same_top"] == 1
    assert (data["workload"]["cases"], data["workload"]["compared"]) == (2, 2)


def test_every_arm_costs_what_it_reads(llama: Model, quick: tuple[compare.Report, object]) -> None:
    data = quick[0].data
    read = {name: arm["tokens_redecoded"] for name, arm in data["arms"].items()}
    assert read["mask"] == read["mask_keep_gap"] == read["cache_reuse"] == read["full"] == 0
    assert read["restart"] == read["mask_auto"] == 48
    assert read["restart_cold"] == 48 + cost.BEFORE
    assert data["arms"]["isolated"]["n"] == data["arms"]["placebo"]["n"] == 0  # not timed, and nobody else's times
    assert {p["suffix"] for p in data["curve"]} == {32, 48}
    for arm in (a for a in data["arms"].values() if a["n"]):
        assert arm["ttft_ms"]["n"] == 1
        assert arm["kv_bytes"] == arm["cells_used"] * llama.kv_bytes_per_token("f32")
        assert arm["rss_peak_bytes"] > 1e6
        assert arm["decode_tps"]["n"] == arm["decode_compacted_tps"]["n"] == 1


def test_timing_leaves_the_session_where_it_was(model: Model) -> None:
    """An arm that moved something would make the next one slower, or wrong."""
    lengths = Lengths(64, 32)
    tokens = np.arange(4, 260, dtype=np.int32)
    point = cost.Point(model, cost.settings_for(lengths, EXACT), tokens, lengths)
    session = point.session
    before, logits = session.visible_tokens.tolist(), session.logits()
    names = [n for n in cost.TIMED if n != "mask_keep_gap" or session.engine.can_shift]
    for name in names if session.engine.can_shift else ("full", "mask", "restart", "restart_cold"):
        point.take(name, cost.Timing(), decode=True)
        assert session.visible_tokens.tolist() == before
        assert np.abs(session.logits() - logits).max() < 1e-2
        session.audit()
    point.close()


@pytest.mark.slow
def test_the_control_sits_at_chance(llama: Model) -> None:
    """And so does everything on a model that knows nothing: it is told so, not that nothing leaks."""
    options = Options(
        cases=20, compared=1, repeat=1, suffix=(16,), span=(16,), tokens=4, settings=EXACT, arms=("mask",)
    )
    data = compare.run(llama, options).data
    low, high = data["controls"]["ci"]
    assert low <= 0.1 <= high
    assert data["controls"]["n"] == 20
    assert "Too small to tell" in data["verdict"]


def test_what_all_options_begin_with_is_read_once_and_decides_nothing(llama: Model) -> None:
    """The same answer as from each option's whole log-probability."""
    options = tuple(f" the {code}" for code in ("1201", "1202", "13", "9"))
    with Session(llama, settings=EXACT) as session:
        session.append("Notes of the week, as they were told.")
        answer = leak.ask(session, Choice("The code is", options, 2))
        session.append("The code is")
        whole = [float(session.score(option).sum()) for option in options]
        shared = float(session.score(" the ").sum())
    assert answer.hit is (int(np.argmax(whole)) == 2)
    assert answer.nll == pytest.approx(shared - whole[2], abs=1e-3)
    assert answer.chance == 0.25


@pytest.mark.parametrize(
    ("options", "shared"),
    [(["abc", "abd"], 2), (["ab", "abd"], 1), (["a", "b"], 0), (["x", "xy", "xyz"], 0), (["aab", "aac", "ad"], 1)],
)
def test_something_is_left_of_every_option(options: list[str], shared: int) -> None:
    assert leak._num_shared([np.frombuffer(o.encode(), np.uint8).astype(np.int32) for o in options]) == shared


# -- planted mistakes -------------------------------------------------------------------------------------------------


def test_a_mask_that_does_nothing_is_noticed(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any, **__: Any) -> Receipt:
        return Receipt("mask", (), 0, 0.0)

    monkeypatch.setattr(Session, "mask", nothing)
    monkeypatch.setattr(cost, "TIMED", ())
    with pytest.raises(errors.AuditFailed, match="the arm 'mask' shows"):
        compare.run(llama, QUICK)


def test_a_restart_that_keeps_the_span_is_noticed(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps(stage: Stage) -> Session:
        session = stage.common.fork()
        arms.append(session, stage.texts.behind)
        return session

    monkeypatch.setitem(arms.ARMS, "restart", keeps)
    with pytest.raises(errors.AuditFailed, match="the arm 'restart' shows"):
        compare.run(llama, QUICK)


def test_arms_that_read_otherwise_are_noticed(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def cold(stage: Stage) -> Session:
        session = Session(stage.engine)
        session.append(stage.texts.visible[::-1].copy())
        return session

    monkeypatch.setitem(arms.ARMS, "restart_cold", cold)
    with pytest.raises(errors.AuditFailed):
        compare.run(llama, QUICK)


# -- Ctrl-C and nonsense ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 3])
def test_what_is_finished_counts(llama: Model, after: int) -> None:
    calls: list[str] = []

    def watch(what: str, done: int, total: int) -> None:
        assert 0 < done <= total
        calls.append(what)
        if len(calls) == after:
            raise KeyboardInterrupt

    data = compare.run(llama, replace(QUICK, cases=4), watch=watch).data
    assert data["interrupted"]
    assert len(data["curve"]) == min(2, after // 2)
    assert all(arm["ttft_ms"]["n"] for point in data["curve"] for arm in point["arms"].values())
    assert data["workload"]["cases"] == max(0, after - 4)
    assert compare.Report(data).html()
    assert "Interrupted" in str(compare.Report(data))


def test_progress_ends_where_it_said(quick: tuple[compare.Report, list[tuple[int, int]]]) -> None:
    told = quick[1]
    assert told == sorted(told)
    assert told[-1][0] >= 0.98 * told[-1][1]


@pytest.mark.parametrize(
    "changes",
    [{"cases": 0}, {"repeat": 0}, {"suffix": ()}, {"span": (0,)}, {"workload": "nothing"}, {"arms": ("mask", "magic")}],
)
def test_options_that_make_no_sense(llama: Model, changes: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError):
        compare.run(llama, **changes)


def test_a_state_has_nothing_to_compare(tiny_path: TinyPath) -> None:
    with pytest.raises(errors.UsageError, match="recurrent"):
        compare.run(tiny_path("mamba"))


def test_the_placebo_hides_other_text_of_the_same_length(llama: Model) -> None:
    for seed in range(5):
        texts = Texts.of(next(find("chat")(plain_style(), seed)), llama, seed)
        start, stop = placebo_span(texts)
        flags = np.concatenate([np.full(len(p.tokens), not p.mask) for p in texts.pieces])
        assert flags[start:stop].all()
        assert start >= 4
        assert stop - start <= int((~flags).sum())


def one_case(tmp_path: Path, **more: Any) -> str:
    """A file of one case."""
    segments = [
        {"text": "Some words in front. "},
        {"text": "Gone, as it is masked. ", "mask": True},
        {"text": "Behind."},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"segments": segments, "question": "And then? ", **more}))
    return str(path)


def test_a_placebo_is_no_tail(llama: Model) -> None:
    """A masked tail is a restart: it would differ by nothing, whatever a mask does."""
    for name in ("canary", "chat", "tools", "think"):
        texts = Texts.of(next(find(name)(plain_style(), 0)), llama, 0)
        _, stop = placebo_span(texts)
        assert 0 < stop <= len(texts.everything) - 16


def test_texts_without_room_for_a_placebo_go_without(llama: Model, tmp_path: Path) -> None:
    segments = [{"text": "abcd"}, {"text": "Gone, as it is masked. ", "mask": True}, {"text": "Behind."}]
    tokens = len(llama.tokenize("abcd")) + 1
    run = Run(llama, replace(QUICK, workload=one_case(tmp_path, segments=segments)))
    assert placebo_span(run.setup.texts[0]) == ((0, 0) if tokens <= 4 else (4, tokens))
    run = Run(llama, replace(QUICK, workload=one_case(tmp_path, segments=[{"text": "abc"}, *segments[1:]])))
    assert "placebo" not in run.names
    assert run.setup.notes == ["No other stretch of visible text is long enough to be masked as a placebo"]


def test_the_lengths_of_mask_and_placebo_are_told(quick: tuple[compare.Report, object]) -> None:
    report = quick[0]
    work = report.data["workload"]
    assert work["placebo_masked"] <= work["tokens_masked"]
    assert work["placebo_behind"] >= 16
    assert f"(placebo: {work['placebo_masked']:.0f} and {work['placebo_behind']:.0f})" in str(report)


@pytest.mark.parametrize(("arms", "absent"), [((), "mask_keep_gap, cache_reuse, isolated"), (("mask",), "")])
def test_kept_gaps_are_told_whatever_was_asked_for(tiny_path: TinyPath, arms: tuple[str, ...], absent: str) -> None:
    with Model(tiny_path("yarn")) as model:
        (note,) = Run(model, replace(QUICK, arms=arms)).setup.notes
    assert "every mask keeps its gap" in note
    assert note.endswith(absent)
    assert ("there is no" in note) is bool(absent)


def test_options_that_could_never_win_are_refused(llama: Model, tmp_path: Path) -> None:
    choice = {"ask": "It is", "options": [" 1", " 10", " 2"], "right": 0}
    with pytest.raises(errors.UsageError, match=r"case 1: the option ' 10' begins with the option ' 1'"):
        Run(llama, replace(QUICK, workload=one_case(tmp_path, secrets=[choice])))


def test_a_text_that_begins_with_its_own_bos_gets_no_second_one(llama: Model, tmp_path: Path) -> None:
    assert llama.bos is not None
    words = f"{llama.detokenize([llama.bos])}Some words. "
    segments = [{"text": words}, {"text": "Gone. ", "mask": True}, {"text": "Behind."}]
    for special in (True, False):
        path = one_case(tmp_path, segments=segments, special=special)
        texts = Texts.of(next(find(path)(plain_style(), 0)), llama, 0)
        assert texts.everything.tolist().count(llama.bos) == 1
        assert texts.masked == ["s1"]


def test_changes_go_before_options(llama: Model) -> None:
    data = compare.run(llama, QUICK, cases=1, arms=["mask"]).data
    assert data["workload"]["cases"] == 1
    assert set(data["arms"]) == {"full", "mask", "restart"}
    assert data["curve"][0]["span"] == 64


def test_a_turn_that_was_cut_short_counts_for_no_arm(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, right = [0], cost.Point.take

    def take(self: cost.Point, arm: str, timing: cost.Timing, *, decode: bool) -> None:
        taken[0] += 1
        if taken[0] == 12:  # of three arms, in the fourth turn
            raise KeyboardInterrupt
        right(self, arm, timing, decode=decode)

    monkeypatch.setattr(cost.Point, "take", take)
    data = compare.run(llama, QUICK, arms=["mask"], repeat=5).data
    arms = data["curve"][0]["arms"]
    assert {name: (a["ttft_ms"]["n"], a["edit_ms"]["n"]) for name, a in arms.items()} == dict.fromkeys(arms, (2, 2))


def test_a_restart_reads_suffix_and_question_in_one_go(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = Lengths(64, 32)
    tokens = np.arange(4, 260, dtype=np.int32)
    point = cost.Point(llama, cost.settings_for(lengths, EXACT), tokens, lengths)
    read: list[int] = []
    right = Session.append

    def append(self: Session, text: Any, **how: Any) -> Any:
        read.append(len(text))
        return right(self, text, **how)

    monkeypatch.setattr(Session, "append", append)
    for arm, first in (("restart", 32 + 16), ("restart_cold", cost.BEFORE + 32 + 16), ("mask", 16)):
        read.clear()
        point.take(arm, cost.Timing(), decode=False)
        assert read[0] == first
    point.close()


@pytest.mark.slow
def test_the_placebo_is_measured_by_its_own_restart(llama: Model) -> None:
    """It hides as much as the mask does; against the mask's restart it would differ by its content."""
    data = compare.run(llama, replace(QUICK, arms=("mask", "placebo"), cases=3, compared=3)).data
    placebo, full = (data["arms"][n]["vs_restart"]["kld_mean"] for n in ("placebo", "full"))
    assert placebo < full
    assert data["arms"]["placebo"]["leak"] == {}


def test_facts_before_and_behind_are_asked_everywhere_and_the_control_once(llama: Model) -> None:
    data = compare.run(llama, replace(QUICK, cases=2, compared=1)).data
    for name in set(data["arms"]) - {"placebo"}:
        assert [data["arms"][name]["facts"][part]["n"] for part in ("before", "behind")] == [2, 2]
        assert data["arms"][name]["leak"]["n"] == 2
    assert data["controls"]["n"] == 2


@pytest.mark.parametrize(("trained", "said"), [(64, ["more than the 64 this model was trained on"]), (4096, [])])
def test_texts_longer_than_it_was_trained_on_are_told(tiny_path: TinyPath, trained: int, said: list[str]) -> None:
    with Model(tiny_path("llama", n_ctx_train=trained)) as model:
        notes = Run(model, QUICK).setup.notes
    assert len(notes) == len(said)
    assert all(what in note for what, note in zip(said, notes, strict=True))


def test_peak_memory_is_counted_anew_for_every_arm() -> None:
    """Where the system lets it, what an earlier arm took does not stand in a later one's figure."""
    resident.count_anew()
    before = resident.peak()
    block = np.ones(1 << 25)  # 256 MiB
    during = resident.peak()
    del block
    resident.count_anew()
    assert during - before > 200e6
    if resident._CLEAR.exists():
        assert during - resident.peak() > 200e6


@pytest.mark.slow
def test_both_floors_are_noise(llama: Model) -> None:
    noise = compare.run(llama, QUICK).data["noise"]
    assert noise["vs_restart"]["kld_mean"] < 1e-3
    assert noise["vs_full"]["kld_mean"] < 1e-3


def test_an_error_keeps_what_was_finished(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Stage.__init__

    def second_fails(self: Stage, engine: Any, texts: Texts) -> None:
        if texts.seed == 1:
            raise errors.ContextFull("no cell is free")
        right(self, engine, texts)

    monkeypatch.setattr(Stage, "__init__", second_fails)
    data = compare.run(llama, replace(QUICK, cases=3)).data
    assert data["workload"]["cases"] == 1
    assert data["stopped"] == "case 2: no cell is free"
    assert "Stopped by an error, case 2: no cell is free" in str(compare.Report(data))


def test_a_run_repeats_itself(llama: Model) -> None:
    run = Run(llama, replace(QUICK, cases=1)), Run(llama, replace(QUICK, cases=1))
    found = [compare.Report.of(r).data["arms"]["mask"]["vs_restart"] for r in run if r.all()]
    assert found[0] == found[1]
