"""A long conversation in four ways, on tiny models: what is counted, what stops it, what is said of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from edgekv import Model, Settings, errors, longrun
from edgekv.compare import charts
from edgekv.longrun import Figures, Options, Result, Turn, ways
from edgekv.longrun.texts import Dialogue, Frame, messages, said
from edgekv.longrun.ways import WAYS, LlamaCpp, Rereading, Way

TinyPath = Callable[..., Path]
QUICK = Options(turns=14, message_tokens=30, max_tokens=12, settings=Settings(n_ctx=512, n_threads=1))
FULL = 8  # turns that fit: 86 tokens, then 60 a turn


@pytest.fixture(scope="module")
def model(tiny_path: TinyPath) -> Iterator[Model]:
    with Model(tiny_path("llama")) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def result(model: Model) -> Result:
    return longrun.run(model, QUICK)


# -- what is counted --------------------------------------------------------------------------------------------------


def test_a_mask_reads_what_is_new_and_nothing_else(result: Result) -> None:
    found = result.figures()["mask"]
    assert (found.read, found.again) == (found.new, 0)
    assert [turn.read - turn.new for turn in result.turns["mask"]] == [0] * QUICK.turns
    assert found.generated == QUICK.turns * QUICK.max_tokens
    assert len(result.turns["mask"]) == QUICK.turns


@pytest.mark.parametrize("name", ["reread", "llama_cpp"])
def test_a_list_that_is_trimmed_is_read_again(result: Result, name: str) -> None:
    found, turns = result.figures()[name], result.turns[name]
    assert found.new == result.figures()["mask"].new
    assert found.again > 2 * found.new
    assert all(turn.prefilled < 100 for turn in turns[:FULL])
    assert all(turn.prefilled > 300 for turn in turns[FULL:])
    assert found.read - found.again == found.new


def test_all_ways_stay_in_their_cells(result: Result) -> None:
    for turns in result.turns.values():
        assert all(0 < turn.visible <= 512 for turn in turns)
        assert all(0 < turn.ttft_ms <= turn.ms for turn in turns)


def test_summaries_count_to_the_turn_that_waits_for_them(model: Model) -> None:
    options = replace(QUICK, settings=Settings(n_ctx=1024, n_threads=1))
    with ExitStack() as stack:
        way = WAYS["summarise"](Frame(model), options)
        stack.callback(way.close)
        turns = [way.say(message) for message in messages(model, 14, 30, 0)]
    summed = [turn for turn in turns if turn.summaries]
    assert summed
    assert all(turn.new > 60 + 100 for turn in summed)
    assert Figures.of(turns).waited_ms
    assert Figures.of(turns).again <= len(summed)  # an answer that ran out of cells meanwhile


@pytest.mark.parametrize(("trim_to", "times"), [(1.0, 6), (0.5, 1)])
def test_who_trims_more_reads_less_often(model: Model, trim_to: float, times: int) -> None:
    options = replace(QUICK, trim_to=trim_to)
    with ExitStack() as stack:
        way = WAYS["reread"](Frame(model), options)
        stack.callback(way.close)
        turns = [way.say(message) for message in messages(model, 14, 30, 0)]
    assert sum(turn.read - turn.new > 50 for turn in turns) == times


def test_the_ways_see_the_same_text_while_all_of_it_fits(model: Model) -> None:
    frame = Frame(model)
    with ExitStack() as stack:
        opened = {name: WAYS[name](frame, QUICK) for name in ("reread", "llama_cpp")}
        for way in opened.values():
            stack.callback(way.close)
        for message in messages(model, 4, 30, 0):
            for way in opened.values():
                way.say(message)
        ours, theirs = opened["reread"], opened["llama_cpp"]
        assert isinstance(ours, Rereading) and isinstance(theirs, LlamaCpp)
        assert theirs._dialogue.messages == ours._dialogue.messages
        prompt = frame.tokens(theirs._dialogue.messages[:-1])
        assert theirs._llama.input_ids[: len(prompt)].tolist() == prompt.tolist()
        assert theirs._llama.n_ctx() == 512


# -- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8, 9, 40, 133])
def test_messages_are_of_equal_length(model: Model, length: int) -> None:
    made = messages(model, 20, length, 3)
    assert [len(model.tokenize(text)) for text in made] == [length] * 20
    assert made == messages(model, 20, length, 3) != messages(model, 20, length, 4)
    assert all(text == text.strip() for text in made)


def test_new_tokens_are_those_that_a_template_adds(model: Model) -> None:
    frame, talk = Frame(model), list[dict[str, str]]()
    talk = [*frame.begin, said("user", "one")]
    assert frame.num_new("one", first=True) == len(frame.tokens(talk))
    longer = [*talk, said("assistant", "two"), said("user", "three")]
    assert frame.num_new("three", first=False) == len(frame.tokens(longer)) - len(frame.tokens(talk)) - 3


def test_a_dialogue_gives_up_the_oldest_exchange(model: Model) -> None:
    dialogue = Dialogue(Frame(model), 256, 12, 1.0)
    for number in range(9):
        prompt = dialogue.ask(f"question {number}")
        assert len(prompt) + 12 <= 256
        dialogue.answered("x")
    assert [m["role"] for m in dialogue.messages[:3]] == ["system", "user", "assistant"]
    assert dialogue.messages[1]["content"] not in ("question 0", "question 8")
    assert dialogue.messages[-2]["content"] == "question 8"


def test_a_template_without_system_texts_and_one_that_is_none(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    own = str(model.chat_template)
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + own
    for source, system in ((refuses, None), (None, "You are a terse assistant.")):
        monkeypatch.setattr(Model, "chat_template", property(lambda _, s=source: s))
        found = longrun.run(model, QUICK, turns=3)
        assert (Frame(model).system, found.num_turns, found.stopped) == (system, 3, "")


# -- what stops it ----------------------------------------------------------------------------------------------------


def fails_at(monkeypatch: pytest.MonkeyPatch, number: int, failure: BaseException) -> None:
    """The message of that number, counted over all ways, is not answered."""
    right, count = Way.say, iter(range(1000))

    def say(self: Way, message: str) -> Turn:
        if next(count) == number:
            raise failure
        return right(self, message)

    monkeypatch.setattr(Way, "say", say)


def test_an_interrupted_run_keeps_what_is_finished(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_at(monkeypatch, 4 * 2 + 3, KeyboardInterrupt())
    found = longrun.run(model, QUICK)
    assert (found.interrupted, found.num_turns) == (True, 2)
    assert {len(turns) for turns in found.turns.values()} == {2}
    assert "Interrupted" in found.header
    assert json.loads(found.json())["interrupted"] is True


def test_nothing_finished_is_said_so(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_at(monkeypatch, 1, KeyboardInterrupt())
    found = longrun.run(model, QUICK)
    assert "nothing to say" in found.verdict
    assert "<svg" not in found.html()
    assert found.rows()[1][1:5] == ("-", "-", "-", "-")


def test_an_error_ends_it_and_what_is_finished_stays(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_at(monkeypatch, 4, errors.ContextFull("no cell is left"))
    found = longrun.run(model, QUICK)
    assert (found.num_turns, found.stopped) == (1, "turn 2: no cell is left")
    fails_at(monkeypatch, 2, errors.ContextFull("no cell is left"))
    with pytest.raises(errors.ContextFull):
        longrun.run(model, QUICK)


def test_llama_cpp_s_own_failures_are_errors_of_ours(model: Model) -> None:
    with ExitStack() as stack:
        way = LlamaCpp(Frame(model), QUICK)
        stack.callback(way.close)
        way._llama.eval = lambda _tokens: (_ for _ in ()).throw(RuntimeError("llama_decode returned 1"))
        with pytest.raises(errors.DecodeFailed, match="llama_decode returned 1"):
            way.say("hello")


def test_a_context_that_is_refused_is_too_large(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("Failed to create llama_context")

    monkeypatch.setattr(ways._llama, "open_llama", refuse)
    with pytest.raises(errors.TooLarge, match="beside the other contexts"):
        longrun.run(model, QUICK)


def test_a_model_that_cannot_mask_is_refused(tiny_path: TinyPath) -> None:
    with pytest.raises(errors.UsageError, match="recurrent"):
        longrun.run(tiny_path("mamba"), QUICK)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"turns": 0}, "turns must be at least 1"),
        ({"message_tokens": 7}, "at least 8"),
        ({"max_tokens": 0}, "at least 1"),
        ({"trim_to": 0.0}, "trim_to"),
        ({"max_tokens": 300}, "larger n_ctx"),
    ],
)
def test_options_that_make_no_sense(model: Model, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.UsageError, match=said):
        longrun.run(model, QUICK, **changes)


# -- what is said of it -----------------------------------------------------------------------------------------------


def turn(ttft_ms: float, *, read: int = 60, new: int = 60, summaries: int = 0) -> Turn:
    return Turn(ttft_ms, ttft_ms + 500, read - 12, 12, new, 400, summaries)


def made(mask: float = 200, reread: float = 3000, again: int = 900) -> Result:
    """Ten turns alike, then ten when the cache is full."""
    facts = {
        "machine": {"cpu": "a CPU", "threads": 2, "build": {"llama_cpp": "b1"}},
        "model": {"name": "a model", "file": "m.gguf", "kv_type": "f16"},
        "settings": {"cells": 1024, "message_tokens": 40, "max_tokens": 32, "seed": 0, "trim_to": 1.0},
    }
    late = {"mask": turn(mask), "summarise": turn(mask), "reread": turn(reread, read=60 + again)}
    late["llama_cpp"] = late["reread"]
    turns = {name: [turn(200)] * 10 + [late[name]] * 10 for name in WAYS}
    turns["summarise"][12] = turn(5000, read=300, new=300, summaries=1)
    return Result(facts, turns)


def test_figures() -> None:
    found = made().figures()
    assert (found["reread"].early_ms, found["reread"].late_ms, found["reread"].ratio) == (200, 3000, 15)
    assert (found["reread"].worst_ms, found["reread"].median_ms) == (3000, 1600)
    assert (found["reread"].read, found["reread"].new, found["reread"].again) == (10_200, 1200, 9000)
    assert (found["summarise"].summaries, found["summarise"].waited_ms, found["summarise"].again) == (1, 5000, 0)
    few = Figures.of([turn(1), turn(2)])
    assert (few.early_ms, few.late_ms, few.ratio) == (None, 1.5, None)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (made(), ["15.0 times sooner than with trimming", "none of them twice", "88% of them not for the first time"]),
        (made(), ["1 of 20 turns waited 5.00 s for one", "A mask is not a restart"]),
        (made(mask=190, reread=200, again=0), ["about as soon as", "the cache never filled"]),
        (made(mask=3000, reread=300), ["10.0 times later than"]),
    ],
)
def test_the_sentences_say_what_the_figures_say(result: Result, words: list[str]) -> None:
    for part in words:
        assert part in result.verdict


def test_the_header_says_what_a_reader_must_know() -> None:
    found = made()
    assert "Other processes" not in found.header
    assert "Other processes used 40% of the CPUs" in replace(found, others_busy=0.4).header
    assert "Stopped by an error, turn 3: no" in replace(found, stopped="turn 3: no").header


def test_the_object_holds_every_turn(result: Result) -> None:
    told = json.loads(result.json())
    assert told["schema"] == "edgekv.bench-chat/1"
    assert set(told) == {
        "schema", "machine", "model", "settings", "ways", "others_busy", "interrupted", "stopped", "verdict",
    }  # fmt: skip
    assert len(told["model"]["fingerprint"]) == 32
    assert {"cpu", "threads", "build"} <= set(told["machine"])
    assert "llama_cpp" in told["machine"]["build"]
    assert told["settings"]["policies"] == {
        "mask": "hide_oldest(trigger=1.0, target=0.75)",
        "summarise": "summarize_oldest(trigger=0.8, target=0.4, kept=True)",
    }
    assert list(told["ways"]) == list(WAYS)
    for way in told["ways"].values():
        assert {"early_ms", "late_ms", "ratio", "worst_ms", "total_ms", "read", "new", "again", "notes"} <= set(way)
        assert len(way["turns"]) == QUICK.turns
        keys = {"ttft_ms", "ms", "prefilled", "generated", "new", "visible", "summaries"}
        assert all(set(turn) == keys for turn in way["turns"])


def test_the_page_needs_nothing_else(result: Result) -> None:
    page = result.html()
    assert page.startswith("<!doctype html>")
    assert not re.findall(r"https?://|<script|<link|@import|src=|url\(", page)
    drawn = re.findall(r"<svg.*?</svg>", page)
    assert len(drawn) == 2
    for svg in drawn:
        lines = [p.get("d", "") for p in ElementTree.fromstring(svg).iter("path") if p.get("stroke-width") == "2"]
        assert [line.count("L") + 1 for line in lines] == [QUICK.turns] * len(WAYS)
        points = [tuple(map(float, point.split())) for line in lines for point in re.split("[ML]", line) if point]
        assert all(math.isfinite(x) and 62 <= x <= 544 and 14 <= y <= 256 for x, y in points)


@pytest.mark.parametrize(
    ("high", "ticks"), [(60, [0, 10, 20, 30, 40, 50, 60]), (3, [0, 0.5, 1, 1.5, 2, 2.5, 3]), (25_100, [0, 5e3, 25e3])]
)
def test_ticks_are_round_numbers(high: float, ticks: list[float]) -> None:
    found = charts.steps(high)
    assert set(ticks) <= set(found)
    assert len(found) <= 7
    assert high * 0.6 < found[-1] <= high


def test_a_page_of_one_turn_is_drawn(model: Model) -> None:
    assert longrun.run(model, QUICK, turns=1).html().count("<svg") == 2
