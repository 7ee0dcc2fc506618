"""What compare computes and says, without a model: intervals, words, conditions, texts, the report."""

from __future__ import annotations

import json
import math
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import errors
from edgekv.compare import verdict
from edgekv.compare.case import CHANCE_OF, Case, chatml_style, plain_style
from edgekv.compare.consistency import Against, greedy_match
from edgekv.compare.html import body, render
from edgekv.compare.leak import Answer, Answers, channel_index
from edgekv.compare.prose import Writer
from edgekv.compare.report import Report, check_condition
from edgekv.compare.statistics import draws, mean_ci, quantile_ci, spread, wilson
from edgekv.compare.workloads import NAMES, find
from edgekv.numerics import kl_divergence

DATA = Path(__file__).parents[1] / "data"


# -- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (10, 100, 0.0552, 0.1744),
        (1, 1, 0.2065, 1.0),
    ],
)
def test_wilson_against_published_values(hits: int, n: int, low: float, high: float) -> None:
    found = wilson(hits, n)
    assert found is not None
    assert found == pytest.approx([low, high], abs=1e-4)


def test_intervals_of_nothing() -> None:
    assert wilson(0, 0) is None
    assert spread([]) == {"median": None, "iqr": None, "range": None, "n": 0}
    assert spread([3.0, 1.0, 2.0]) == {"median": 2, "iqr": [1.5, 2.5], "range": [1, 3], "n": 3}
    assert mean_ci([[1.0, 2.0]] * 4) == (1.5, None)  # four cases tell nothing of a fifth
    assert mean_ci([[1.0, 2.0]] * 5) == (1.5, [1.5, 1.5])
    assert math.isnan(mean_ci([])[0])


@pytest.mark.parametrize(("cases", "sigma"), [(6, 0.8), (12, 0.8), (12, 1.2)])
def test_intervals_of_few_skewed_cases_hold_the_mean(cases: int, sigma: float) -> None:
    """Divergences are skewed: of 400 samples of log-normal cases of unequal length, nine in ten intervals hold it."""
    rng, held = np.random.default_rng(1), 0
    for _ in range(400):
        groups = [np.full(rng.integers(20, 40), math.exp(rng.normal(0, sigma))) for _ in range(cases)]
        _, ci = mean_ci(groups)
        assert ci is not None
        held += ci[0] <= math.exp(sigma**2 / 2) <= ci[1]
    assert held / 400 > 0.86


def test_intervals_end_where_the_figure_does() -> None:
    low, high = (
        mean_ci([[1.0] * 9 + [0.0], [1.0] * 10, [1.0] * 10, [0.0] * 10, [1.0] * 10, [1.0] * 10], (0, 1))[1] or ()
    )
    assert 0 <= low < high <= 1


@pytest.mark.parametrize("q", [0.0, 0.3, 0.5, 0.99, 1.0])
def test_quantiles_against_numpy(q: float) -> None:
    groups = [np.random.default_rng(n).normal(n, 1, 7 + n) for n in range(6)]
    value, ci = quantile_ci(groups, q)
    samples = [np.quantile(np.concatenate([groups[i] for i in drawn]), q) for drawn in draws(6)]
    assert value == pytest.approx(np.quantile(np.concatenate(groups), q))
    assert ci == pytest.approx(np.percentile(samples, [2.5, 97.5]))


def test_quantiles_of_little() -> None:
    assert quantile_ci([[3.0]], 0.5) == (3.0, None)
    assert math.isnan(quantile_ci([], 0.5)[0])
    assert quantile_ci([[math.inf]] * 6, 0.5) == (math.inf, [math.inf, math.inf])
    assert mean_ci([[math.inf]] * 6) == (math.inf, None)


def test_cases_are_drawn_whole() -> None:
    """Many tokens of six cases are no more than six cases."""
    few, many = (mean_ci([np.full(n, v) for v in (0, 0, 1, 0, 1, 1)])[1] for n in (1, 1000))
    assert few is not None
    assert few == pytest.approx(many)
    assert few[1] - few[0] > 0.8


# -- distributions ----------------------------------------------------------------------------------------------------


def test_figures_of_tokens_against_plain_loops() -> None:
    """KL, p99, same top, RMS of the change of p, log-likelihood: as llama-perplexity defines them, one by one."""
    rng = np.random.default_rng(0)
    reference, arm = (rng.normal(0, 2, (120, 30)).astype(np.float32) for _ in range(2))
    tokens = rng.integers(0, 30, 120).astype(np.int32)
    against = Against()
    none = tokens[:0]
    against.add((reference, reference[:0]), (arm, arm[:0]), (tokens, none))
    found = against.as_dict()
    klds, tops, dps, dnll = [], [], [], []
    for row_p, row_q, token in zip(reference.tolist(), arm.tolist(), tokens.tolist(), strict=True):
        p, q = ([math.exp(v) / sum(map(math.exp, row)) for v in row] for row in (row_p, row_q))
        klds.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        tops.append(p.index(max(p)) == q.index(max(q)))
        dps.append(q[token] - p[token])
        dnll.append(math.log(p[token]) - math.log(q[token]))
    klds.sort()
    at = 0.99 * 119
    p99 = klds[int(at)] + (at - int(at)) * (klds[int(at) + 1] - klds[int(at)])
    assert found["kld_mean"] == pytest.approx(sum(klds) / 120, rel=1e-5)
    assert found["kld_p99"] == pytest.approx(p99, rel=1e-5)
    assert found["same_top"] == sum(tops) / 120
    assert found["rms_dp"] == pytest.approx(math.sqrt(sum(d * d for d in dps) / 120), rel=1e-5)
    assert found["dnll"] == pytest.approx(sum(dnll) / 120, rel=1e-4)
    assert sum(part["n"] for part in found["kld_by_distance"]) == 120
    assert {found[name] for name in ("kld_ci", "kld_median_ci", "kld_p99_ci", "same_top_ci")} == {None}  # one case


def test_equal_rows_differ_by_nothing() -> None:
    rows = np.random.default_rng(0).normal(0, 2, (40, 30)).astype(np.float32)
    tokens = rows.argmax(axis=1).astype(np.int32)
    against = Against()
    against.add((rows, rows), (rows, rows), (tokens, tokens))
    found = against.as_dict()
    assert (found["kld_mean"], found["same_top"], found["rms_dp"], found["dnll"]) == (0, 1, 0, 0)
    assert found["greedy_match_tokens"] == 40
    tokens[7] += 1
    assert greedy_match(rows, tokens % 30) == 7


def test_cases_stay_together() -> None:
    """One with a true text only, one with a greedy one only, one with neither."""
    rows = np.random.default_rng(0).normal(0, 2, (5, 30)).astype(np.float32)
    tokens, none = rows.argmax(axis=1).astype(np.int32), np.empty(0, np.int32)
    against = Against()
    for texts in ((tokens, none), (none, tokens), (none, none)):
        both = tuple(rows[: len(t)] for t in texts)
        against.add(both, both, texts)  # type: ignore[arg-type]
    found = against.as_dict()
    assert (found["cases"], found["n"]) == (2, 10)
    assert (found["greedy_match_tokens"], found["dnll"]) == (5, 0)
    assert (found["kld_true"], found["kld_greedy"]) == (0, 0)


def test_what_both_texts_begin_with_counts_once() -> None:
    """The true text and the greedy one follow the same token: their first distributions are one."""
    rng = np.random.default_rng(0)
    reference, arm = (rng.normal(0, 2, (2, 5, 30)).astype(np.float32) for _ in range(2))
    reference[1, 0], arm[1, 0] = reference[0, 0], arm[0, 0]
    tokens = np.arange(5, dtype=np.int32)
    against = Against()
    against.add((reference[0], reference[1]), (arm[0], arm[1]), (tokens, tokens))
    found = against.as_dict()
    assert found["n"] == 9
    assert found["kld_by_distance"][0]["n"] == 1
    nine = np.concatenate([kl_divergence(reference[0], arm[0]), kl_divergence(reference[1], arm[1])[1:]])
    assert found["kld_mean"] == pytest.approx(nine.mean())
    assert found["kld_greedy"] == pytest.approx(kl_divergence(reference[1], arm[1]).mean())


def answers(*cases: list[float]) -> Answers:
    """One case a list, with these negative log-likelihoods; below 5 is a hit."""
    return Answers([[Answer(hit=nll < 5, nll=nll, chance=0.1) for nll in case] for case in cases])


def index(restart: list[float], arm: list[float], full: list[float]) -> dict[str, Any]:
    return channel_index(*(answers(*([nll] for nll in each)) for each in (restart, arm, full)))


def test_the_channel_index_runs_from_nothing_to_all() -> None:
    found = [index([8.0] * 5, [arm] * 5, [2.0] * 5) for arm in (8.0, 2.0, 5.0)]
    assert [f["channel_index"] for f in found] == [0, 1, 0.5]
    assert found[2]["channel_index_ci"] == [0.5, 0.5]
    assert index([8.0] * 5, [5.0] * 5, [8.0] * 5) == {"channel_index": None, "channel_index_ci": None}
    assert index([8.0], [5.0], [2.0]) == {"channel_index": 0.5, "channel_index_ci": None}  # one case knows no spread


def test_the_channel_index_s_interval_pairs_the_cases() -> None:
    """Cases differ much, and the arms with them: what counts is how they differ within a case."""
    base = np.linspace(4, 40, 30)
    ci = index(list(base), list(base - 2), list(base - 4))["channel_index_ci"]
    assert ci == pytest.approx([0.5, 0.5])
    wide = index(list(base), list(base - np.resize([0.0, 4.0], 30)), list(base - 4))["channel_index_ci"]
    assert wide[0] < 0.4 < 0.6 < wide[1]


def test_questions_about_one_text_are_not_many_texts() -> None:
    """Twenty questions of one case tell of one case; one of twenty each, of twenty."""
    assert answers(*[[1.0]] * 20).as_dict() == {"accuracy": 1, "ci": wilson(20, 20), "chance": 0.1, "n": 20} | {
        "chance": pytest.approx(0.1)
    }
    many = answers([1.0] * 10 + [9.0] * 10).as_dict()
    assert (many["n"], many["accuracy"], many["ci"]) == (20, 0.5, wilson(0.5, 1))


def test_parts_are_counted_by_themselves() -> None:
    def case(number: int) -> list[Answer]:
        return [Answer(hit=True, nll=1, chance=0.1, part="before"), Answer(number % 2 == 0, 1, 0.1, "behind")]

    found = Answers([case(number) for number in range(10)]).as_dict()
    assert (found["n"], found["accuracy"], found["ci"]) == (20, 0.75, wilson(7.5, 10))
    assert (found["before"]["accuracy"], found["behind"]["accuracy"]) == (1, 0.5)
    assert (found["behind"]["n"], found["behind"]["ci"]) == (10, wilson(5, 10))


# -- texts ------------------------------------------------------------------------------------------------------------


def sentences(case: Case) -> list[str]:
    texts = [s.text for s in case.segments] + [case.question, case.continuation]
    return [s for s in re.findall(r"[A-Z][^.?]*?\b[^.?]*[.?]", " ".join(texts)) if re.search(r"\d|[A-Z].*[A-Z]", s[1:])]


@pytest.mark.parametrize("name", sorted(NAMES))
@pytest.mark.parametrize("style", [plain_style(), chatml_style()], ids=["plain", "chatml"])
def test_no_two_cases_share_what_they_tell(name: str, style: Any) -> None:
    cases = list(islice(find(name)(style, 3), 40))
    assert cases == list(islice(find(name)(style, 3), 40))
    assert cases[0] != next(find(name)(style, 4))
    for case in cases:
        assert any(s.mask for s in case.segments)
        assert not case.segments[0].mask
    told = [set(sentences(case)) for case in cases]
    frame = set.intersection(*told)  # what a workload says in every case: instructions, no content
    for number, one in enumerate(told):
        assert all(not (one - frame) & other for other in told[number + 1 :])


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_secret_stands_in_what_is_masked_and_nowhere_else(name: str) -> None:
    for case in islice(find(name)(plain_style(), 0), 30):
        masked = "".join(s.text for s in case.segments if s.mask)
        visible = "".join(s.text for s in case.segments if not s.mask) + case.question
        for choice in case.secrets:
            code = choice.options[choice.right].strip()
            assert code in masked
            assert code not in visible
        for choice in case.facts:
            assert choice.options[choice.right].strip() in visible
        for choice in case.controls:
            assert choice.options[choice.right].strip() not in masked + visible
        for choice in (*case.secrets, *case.facts, *case.controls):
            assert len(set(choice.options)) == CHANCE_OF


def test_right_answers_are_everywhere_in_the_list() -> None:
    rights = [case.secrets[0].right for case in islice(find("canary")(plain_style(), 0), 300)]
    counts = np.bincount(rights, minlength=CHANCE_OF)
    assert counts.min() > 10


def test_a_writer_never_says_it_twice() -> None:
    writer = Writer(0)
    said = [writer.sentence() for _ in range(3000)]
    assert len(set(said)) == 3000
    assert len({writer.surname() for _ in range(3000)}) == 3000


# -- the user's own file ----------------------------------------------------------------------------------------------


def test_a_file_of_cases(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    segments = [{"text": "before "}, {"role": "tool", "text": "secret", "mask": True}, {"text": "after"}]
    choice = {"ask": "a", "options": ["x", "y"], "right": 1}
    lines = [{"segments": segments, "question": "?"}, {"segments": segments, "secrets": [choice]}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    first, second = find(str(path))(plain_style(), 0)
    assert [s.mask for s in first.segments] == [False, True, False]
    assert first.question == "User: ?\nAssistant:"
    assert [s.text for s in first.segments] == ["before ", "Tool: secret\n", "after"]
    assert second.secrets[0].right == 1


def test_a_line_of_a_file_ends_at_its_newline_only(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    text = "a\u2028b\u0085c"
    line = {"segments": [{"text": text}, {"text": "b", "mask": True}]}
    path.write_text(json.dumps(line, ensure_ascii=False) + "\n", "utf-8")
    (case,) = find(str(path))(plain_style(), 0)
    assert case.segments[0].text == text


def test_a_conversation_is_written_as_the_model_s_turns(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    segments = [{"role": "user", "text": "a"}, {"role": "tool", "text": "b", "mask": True}]
    path.write_text(json.dumps({"segments": segments, "question": "c"}))
    (case,) = find(str(path))(chatml_style(), 0)
    assert [s.text for s in case.segments] == ["<|im_start|>user\na<|im_end|>\n", "<|im_start|>tool\nb<|im_end|>\n"]
    assert case.question == "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert case.special


def test_a_text_with_markers(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("before\n<<<mask\nsecret\nlines\nmask>>>\nafter\n")
    (case,) = find(str(path))(plain_style(), 0)
    assert [(s.text, s.mask) for s in case.segments] == [
        ("before\n", False),
        ("secret\nlines\n", True),
        ("after\n", False),
    ]


_TWO = '"segments": [{"text": "a"}, {"text": "b", "mask": true}]'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", "{", "line 1"),
        ("a.jsonl", "\n{}", "line 2: 'segments' is missing"),
        ("a.jsonl", '{"segments": [{"text": "a"}]}', "mask"),
        ("a.jsonl", '{"segments": [{"text": "a", "mask": true}]}', "in front of it"),
        ("a.jsonl", '{"segments": [], "answer": 1}', "unknown key 'answer'"),
        ("a.jsonl", f'{{{_TWO}, "secrets": [{{"ask": "", "options": ["x"], "right": 0}}]}}', "two or more"),
        ("a.jsonl", f'{{{_TWO}, "secrets": [{{"ask": "", "options": ["x", ""], "right": 0}}]}}', "none empty"),
        ("a.jsonl", '{"segments": [{"text": "a", "masks": true}]}', "unknown key 'masks'"),
        ("a.jsonl", '{"segments": [{"text": "a", "mask": "false"}]}', "'mask' is true or false, not \"false\""),
        ("a.jsonl", '{"segments": [{"text": null}]}', "'text' is a text, not null"),
        ("a.jsonl", '{"segments": [{"mask": true}]}', "'text' is missing"),
        ("a.jsonl", f'{{{_TWO}, "question": null}}', "'question' is a text, not null"),
        ("a.jsonl", f'{{{_TWO}, "special": 1}}', "'special' is true or false, not 1"),
        ("a.jsonl", "", "no case"),
        ("a.jsonl", "[1]", "line 1"),
        ("a.txt", "no marks", "<<<mask"),
        ("a.txt", "mask>>>\n<<<mask\n", "<<<mask"),
        ("a.txt", "<<<mask\nx\nmask>>>\n", "in front of it"),
        ("a.txt", "<<<mask".encode("utf-16-le"), "is not text"),
    ],
)  # fmt: skip
def test_a_file_that_is_none(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(errors.UsageError, match=re.escape(said)):
        list(find(str(path))(plain_style(), 0))


def test_a_workload_that_is_none() -> None:
    with pytest.raises(errors.UsageError, match="canary, chat"):
        find("nothing")


# -- what it says -----------------------------------------------------------------------------------------------------


def report(**changes: Any) -> dict[str, Any]:
    data = json.loads((DATA / "compare.json").read_text("utf-8"))
    data.update(changes)
    return data


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("mask.vs_restart.kld_mean > 0", True),
        ("mask.vs_restart.kld_mean > 5", False),
        ("restart.vs_restart.kld_mean == 0 and mask.n >= 1", True),
        ("mask.n < 0 or noise.vs_restart.kld_mean < 1", True),
        ("workload.cases != 2", True),
    ],
)
def test_conditions(expression: str, holds: bool) -> None:
    assert Report(report()).holds(expression) is holds


@pytest.mark.parametrize(
    "expression", ["", "mask", "mask > ", "mask.vs_restart.kld_mean > x", "import os", "a > 1 and"]
)
def test_conditions_that_are_none(expression: str) -> None:
    with pytest.raises(errors.UsageError, match="no condition"):
        check_condition(expression)


def test_every_condition_is_looked_up() -> None:
    """Also where another one has decided: a misspelt path would never fail."""
    for expression in ("mask.n > 99 and nosuch.thing > 1", "mask.n > 0 or mask.leak.acuracy > 0"):
        with pytest.raises(errors.UsageError, match="there is no"):
            Report(report()).holds(expression)


@pytest.mark.parametrize("number", ["1.2.3", "1e", "-", "."])
def test_numbers_that_are_none(number: str) -> None:
    with pytest.raises(errors.UsageError, match="no condition"):
        check_condition(f"mask.n > {number}")


def test_infinity_is_told_and_drawn() -> None:
    """Where an arm rules out a token that the restart allows."""
    data = report()
    data["arms"]["mask"]["vs_restart"]["kld_mean"] = math.inf
    data["arms"]["mask"]["vs_restart"]["kld_by_distance"][0].update(kld_mean=math.inf, kld_ci=None)
    assert json.loads(Report(data).json())["arms"]["mask"]["vs_restart"]["kld_mean"] == "inf"
    assert "inf" in Report(data).markdown()
    assert Report(data).html().count("<svg") == 3
    assert Report(data).holds("mask.vs_restart.kld_mean > 5")


@pytest.mark.parametrize("path", ["mask.vs_restart.kld", "nothing.n", "mask.vs_restart", "model.name", "interrupted"])
def test_a_condition_on_what_was_not_measured_is_no_pass(path: str) -> None:
    with pytest.raises(errors.UsageError):
        Report(report()).holds(f"{path} > 0")


def test_the_page_needs_nothing_else() -> None:
    page = render(report())
    assert not re.findall(r"https?://|<script|<link|@import|src=|url\(", page)
    assert page.count("<svg") == 3
    assert "prefers-color-scheme:dark" in page
    assert "nan" not in page.lower().replace("nanos", "")
    assert body(report()) in page
    assert Report(report())._repr_html_() == body(report())


def test_markdown_and_csv_hold_every_arm() -> None:
    found = Report(report())
    assert found.markdown() == str(found)
    for name in found.data["arms"]:
        assert f"\n{name}," in found.csv()
    assert json.loads(found.json()) == found.data


def test_the_overview_fits_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is cut off at 80 columns, also where the numbers are long."""
    from edgekv.cli.compare import _show

    monkeypatch.setenv("COLUMNS", "80")
    data = report()
    data["arms"]["mask_keep_gap"]["vs_restart"].update(kld_mean=1.23456, kld_ci=[1.0, 2.0], kld_p99=12.345)
    for arm in data["arms"].values():
        arm["decode_tps"] = {"median": 120.4, "iqr": [110.0, 130.0], "n": 3}  # a tiny model's have a digit more
    data["arms"]["mask_keep_gap"]["ttft_ms"] = {"median": 100e3, "iqr": [99e3, 101e3], "n": 10}
    _show(Report(data))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    for name in data["arms"]:
        assert f"\n {name} " in out


def test_the_greedy_text_is_told_against_its_author_only() -> None:
    """vs_full holds no number of tokens: the greedy text is the restart's."""
    arm = report()["arms"]["mask"]
    assert arm["vs_restart"]["greedy_match_tokens"] is not None
    assert arm["vs_full"]["greedy_match_tokens"] is None


def test_the_documented_schema_is_the_report_s() -> None:
    """Every key of a report stands in docs/compare.md, and what stands there is a key, or one of its short words."""
    schema = (DATA.parents[1] / "docs" / "compare.md").read_text("utf-8").split("## JSON")[1].split("```")[1]
    told = set(re.findall(r'"(\w+)"', schema))

    def keys(value: Any, at: str) -> set[str]:
        if isinstance(value, list):
            return set().union(*(keys(one, at) for one in value))
        if not isinstance(value, dict) or at in ("machine", "settings"):
            return set()
        own = set() if at == "arms" else set(value)
        return own.union(*(keys(one, name) for name, one in value.items()))

    assert keys(report(), "") == told


def test_a_run_that_was_cut_short_still_has_a_report() -> None:
    data = report(curve=[], interrupted=True, break_even={"tokens": None, "said": "not measured"})
    for arm in data["arms"].values():
        arm.update(vs_restart={}, vs_full={}, leak={}, facts={}, n=0, edit_ms=None, ttft_ms=None, decode_tps=None)
    data.update(noise={"vs_restart": {}, "vs_full": {}}, controls={})
    data["workload"].update(cases=0, tokens_masked=None, tokens_behind=None)
    data["advice"], data["verdict"] = verdict.decide(data)
    assert "Interrupted" in Report(data).markdown()
    assert "<svg" not in Report(data).html()
    assert data["advice"] == "measure more"
