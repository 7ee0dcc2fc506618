"""What compare says: words for a divergence, where a mask pays, what leaks, what to do; and what it must not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv.compare import payoff, verdict
from edgekv.compare.statistics import spread, wilson

DATA = Path(__file__).parents[1] / "data"


def turns(ms: float, off: float = 0, n: int = 5) -> dict[str, Any]:
    return {"ttft_ms": spread(list(np.linspace(ms - off, ms + off, n))), "edit_ms": spread([1.0] * n)}


def curve(mask: list[float], restart: list[float], off: float = 0, n: int = 5, span: int = 256) -> list[dict[str, Any]]:
    """Points behind 64, 256 and 1,024 tokens."""
    points = zip((64, 256, 1024), mask, restart, strict=True)
    return [
        {"span": span, "suffix": s, "arms": {"mask": turns(m, off, n), "restart": turns(r, off, n)}}
        for s, m, r in points
    ]


def leak(hits: float, n: int, **more: Any) -> dict[str, Any]:
    return {"accuracy": hits / n, "ci": wilson(hits, n), "chance": 0.1, "n": n, **more}


def against(kld: float, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {"kld_mean": kld, "kld_ci": None if low is None else [low, high], "cases": 8}


@pytest.fixture
def data() -> dict[str, Any]:
    """A run that says: mask and go on."""
    found: dict[str, Any] = json.loads((DATA / "compare.json").read_text("utf-8"))
    found["curve"] = curve([100] * 3, [200, 500, 2000])
    found["workload"].update(tokens_masked=300, tokens_behind=100)
    found["noise"]["vs_restart"]["kld_mean"] = 0.003
    found["arms"]["mask"]["vs_restart"].update(against(0.02, 0.015, 0.025))
    found["arms"]["isolated"]["vs_restart"].update(against(0.003, 0.0025, 0.0035))
    for name, hits in (("full", 100), ("mask", 12), ("restart", 10), ("isolated", 11)):
        found["arms"][name].update(leak=leak(hits, 100), facts=leak(98, 100))
    return found


def decide(data: dict[str, Any]) -> tuple[str, str]:
    data["break_even"] = payoff.break_even(data, "mask")
    return verdict.decide(data)


def test_a_mask_that_is_good_enough(data: dict[str, Any]) -> None:
    advice, said = decide(data)
    assert advice == "mask"
    numbers = "256", "64", "0.10 s", "0.20 s", "2.0 times", "8 cases", "300", "100", "0.0030", "12%"
    assert all(number in said for number in numbers)


# -- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vs", "floor", "said"),
    [
        (against(0.003), 0.003, "too few cases"),
        (against(0.003, 0.002, 0.0044), 0.003, "within noise"),
        (against(0.003, 0.002, 0.0046), 0.003, "less than q4_K_M weights"),
        (against(0.001, 0.0008, 0.0013), 0.0005, "like q8_0 weights"),
        (against(0.02, 0.01, 0.03), 0.003, "less than q4_K_M weights"),
        (against(0.02, 0.01, 0.12), 0.003, "about q4_K_M weights"),
        (against(0.02, 0.003, 0.12), 0.003, "not clear"),
        (against(0.06, 0.04, 0.08), 0.003, "more than q4_K_M weights"),
        (against(0.5, 0.4, 0.8), 0.003, "16x q4_K_M weights"),
        (against(0.29, 0.05, 0.30), 0.2, "the noise is too large"),
    ],
)
def test_words_for_what_was_not_ruled_out(vs: dict[str, Any], floor: float, said: str) -> None:
    assert verdict.words(vs, floor) == said


# -- where a mask pays ------------------------------------------------------------------------------------------------


def even(points: list[dict[str, Any]], masked: float = 300) -> dict[str, Any]:
    return payoff.break_even({"curve": points, "workload": {"tokens_masked": masked, "tokens_behind": 100}}, "mask")


def test_where_a_mask_begins_to_pay() -> None:
    """Between two measured lengths, and no number outside of what was measured."""
    found = even(curve([100] * 3, [64, 136, 1024]))
    assert (found["tokens"], found["range"]) == (pytest.approx(160), [pytest.approx(160)] * 2)
    assert found["said"] == "at about 160 tokens behind 256 masked (160 to 160)"
    assert even(curve([10] * 3, [64, 256, 1024]))["said"] == "below 64 tokens behind 256 masked"
    assert even(curve([100] * 3, [50, 50, 50]))["said"] == "above 1,024 tokens behind 256 masked, if anywhere"
    assert even([]) == {"tokens": None, "range": None, "said": "not measured"}


def test_where_it_begins_is_no_sharper_than_the_turns() -> None:
    found = even(curve([100] * 3, [64, 136, 1024], 9))
    assert found["range"] == [pytest.approx(112), pytest.approx(208)]
    assert found["said"] == "at about 160 tokens behind 256 masked (112 to 208)"
    assert "(below 64 to 156)" in even(curve([100] * 3, [90, 136, 1024], 6))["said"]
    assert "to above 1,024)" in even(curve([100] * 3, [64, 80, 110], 6))["said"]
    assert "below 64 tokens behind 256 masked (124 at the worst)" in even(curve([100] * 3, [101, 136, 1024], 6))["said"]
    assert (
        "below 64 tokens behind 256 masked (above 1,024 at the worst)"
        in even(curve([100] * 3, [101, 101, 101], 6))["said"]
    )


@pytest.mark.parametrize("restart", [[101, 90, 1000], [101, 90, 80]])
def test_no_length_where_the_gain_comes_and_goes(restart: list[float]) -> None:
    assert even(curve([100] * 3, restart)) == {
        "tokens": None,
        "range": None,
        "said": "at no one length, as the timings differ too much",
    }


def test_the_span_is_that_nearest_to_the_cases() -> None:
    both = [*curve([100] * 3, [64, 136, 1024], span=256), *curve([10] * 3, [64, 256, 1024], span=4096)]
    assert "behind 256 masked" in even(both, 300)["said"]
    assert "behind 4,096 masked" in even(both, 3000)["said"]


@pytest.mark.parametrize(("off", "n", "sooner"), [(0, 5, True), (40, 5, True), (60, 5, None), (0, 3, None)])
def test_sooner_is_said_where_no_turn_speaks_against_it(off: float, n: int, sooner: bool | None) -> None:
    (point, *_) = curve([100] * 3, [200] * 3, off, n)
    found = payoff.gain(point, "mask")
    assert found is not None
    assert found.sooner is sooner


def test_equal_arms_are_seldom_called_different() -> None:
    """Twice in 252 with five turns each; here a thousand pairs."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(1000):
        arms = {name: {"ttft_ms": spread(list(rng.normal(100, 10, 5)))} for name in ("mask", "restart")}
        found = payoff.gain({"suffix": 64, "arms": arms}, "mask")
        wrong += found is not None and found.sooner is not None
    assert wrong < 25


# -- what leaks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("full", "mask", "restart", "n", "said", "advice"),
    [
        (100, 12, 10, 100, "No direct recall was seen", "mask"),
        (100, 60, 10, 100, "still decodable", "mask with recompute"),
        (12, 12, 10, 100, "Too small to tell", "mask"),
        (8, 2, 1, 8, "Too few cases", "mask"),
        (1, 1, 1, 1, "Too few cases", "mask"),  # whatever its size
        (35, 16, 10, 100, "Too few cases", "mask"),  # of what could be found at all, a quarter is not ruled out
        (60, 55, 50, 100, "what stays visible tells them", "mask"),
    ],
)
def test_what_leaks(data: dict[str, Any], full: int, mask: int, restart: int, n: int, said: str, advice: str) -> None:
    for name, hits in (("full", full), ("mask", mask), ("restart", restart)):
        data["arms"][name]["leak"] = leak(hits, n)
    found, text = decide(data)
    assert (found, said in text) == (advice, True)
    assert ("What leaks is not known" in text) == (advice == "mask" and "No direct" not in said)


def test_a_leak_of_the_cases_that_lean_on_the_code(data: dict[str, Any]) -> None:
    """Few enough that the whole looks like chance."""
    data["arms"]["mask"]["leak"] = leak(16, 100, used=leak(13, 50), unused=leak(3, 50))
    data["arms"]["restart"]["leak"] = leak(9, 100, used=leak(4, 50), unused=leak(5, 50))
    advice, said = decide(data)
    assert advice == "mask with recompute"
    assert "where the text behind leans on them: 26% of 50 codes are found, by a restart 8%" in said


def test_a_leak_below_the_threshold(data: dict[str, Any]) -> None:
    """No code is the likeliest, yet half of what the span told of it is left."""
    data["arms"]["mask"]["leak"].update(channel_index=0.45, channel_index_ci=[0.38, 0.52])
    advice, said = decide(data)
    assert (advice, "38%-52% of what it told" in said) == ("mask with recompute", True)


def test_a_leak_that_was_not_asked(data: dict[str, Any]) -> None:
    data["arms"]["mask"]["leak"] = {}
    advice, said = decide(data)
    assert advice == "mask"
    assert said.endswith("Mask and go on. What leaks is not known.")


@pytest.mark.parametrize(("behind", "way"), [(40, 'then="auto", which reads the 40 tokens'), (100, 'then="recompute"')])
def test_the_cure_for_a_leak_is_one(data: dict[str, Any], behind: float, way: str) -> None:
    """then="auto" reads nothing behind more than 64 tokens."""
    data["arms"]["mask"]["leak"] = leak(60, 100)
    data["workload"]["tokens_behind"] = behind
    advice, said = decide(data)
    assert advice == "mask with recompute"
    assert way in said


def test_lost_facts_are_told(data: dict[str, Any]) -> None:
    data["arms"]["mask"]["facts"] = leak(60, 100)
    advice, said = decide(data)
    assert advice == "mask with recompute"
    assert "It finds 60% of the facts that stayed visible, a restart 98%." in said


# -- what to do -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "off", "n", "advice", "said"),
    [
        (500, 0, 5, "restart", "times later"),
        (190, 20, 5, "restart", "was not seen to answer sooner"),
        (100, 0, 1, "measure more", "was not seen to answer sooner than a restart (n 1)"),
    ],
)
def test_a_mask_that_is_no_sooner_is_not_advised(
    data: dict[str, Any], mask: float, off: float, n: int, advice: str, said: str
) -> None:
    data["curve"] = curve([mask] * 3, [200] * 3, off, n)
    found, text = decide(data)
    assert (found, said in text) == (advice, True)


def test_one_length_is_looked_at_too(data: dict[str, Any]) -> None:
    data["curve"] = curve([500] * 3, [200] * 3)[:1]
    assert decide(data)[0] == "restart"


def test_the_speed_told_is_that_near_the_cases_lengths(data: dict[str, Any]) -> None:
    """Not that of the longest suffix: any ratio can be had by choosing it."""
    data["workload"]["tokens_behind"] = 300
    assert (
        "256 behind, the nearest lengths timed, mask gave its first token after 0.10 s, a restart after 0.50 s"
        in decide(data)[1]
    )


@pytest.mark.parametrize("vs", [against(0.004), against(0.02, 0.003, 0.12)])
def test_few_cases_decide_nothing(data: dict[str, Any], vs: dict[str, Any]) -> None:
    data["arms"]["mask"]["vs_restart"].update(vs)
    assert decide(data)[0] == "measure more"


def test_a_mask_that_is_too_far_off(data: dict[str, Any]) -> None:
    data["arms"]["mask"]["vs_restart"].update(against(0.2, 0.1, 0.3))
    assert decide(data)[0] == "isolate"
    data["arms"]["isolated"]["leak"] = leak(60, 100)
    assert decide(data)[0] == "mask with recompute"


@pytest.mark.parametrize(
    ("arm", "advice"), [("mask_auto", "mask with recompute"), ("isolated", "isolate"), ("mask_keep_gap", "mask")]
)
def test_the_arm_that_is_judged_is_the_one_advised(data: dict[str, Any], arm: str, advice: str) -> None:
    arms = data["arms"]
    data["arms"] = {"full": arms["full"], arm: arms["mask"], "restart": arms["restart"]}
    for point in data["curve"]:
        point["arms"][arm] = point["arms"].pop("mask")
    data["break_even"] = payoff.break_even(data, arm)
    found, said = verdict.decide(data)
    assert found == advice
    assert f"the nearest lengths timed, {arm} gave" in said


def test_a_run_without_a_mask(data: dict[str, Any]) -> None:
    data["arms"] = {name: data["arms"][name] for name in ("full", "restart")}
    assert decide(data)[0] == "measure more"


def test_nothing_measured_says_so(data: dict[str, Any]) -> None:
    data["curve"] = []
    data["arms"]["mask"].update(vs_restart={}, leak={}, facts={})
    advice, said = decide(data)
    assert advice == "measure more"
    for part in ("mask was not timed", "How near it is to a restart was not measured", "leaks was not asked"):
        assert part in said
