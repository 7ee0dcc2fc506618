"""What policies hide, by example and by property; the places of inserted text against edgekv.places."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edgekv.errors import ContextFull, UsageError
from edgekv.places import Places
from edgekv.planner import NUM_SINKS
from edgekv.policies import (
    Chain,
    Cut,
    HideOldest,
    Policy,
    View,
    block_markers,
    clear_thinking,
    clear_tool_uses,
    hide_oldest,
    keep_turns,
    make_room,
    parse,
    sliding_window,
    summarize_oldest,
)
from edgekv.spans import Span, merge

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"


class Talk:
    """A conversation as token indexes in reading order, every message with two delimiters in front and one behind."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.spans: list[Span] = []
        self.places = Places()

    def say(self, role: str, *parts: int | tuple[int, str], tags: str = "", row: int | None = None) -> Span:
        """A turn of these parts: tokens, or tokens with tags; at ``row``, or at the end."""
        start, at = len(self.order), len(self.order) + 2
        for tokens, inner in ((p, "") if isinstance(p, int) else p for p in parts):
            if inner:
                self.spans.append(Span(f"part-{at}", at, at + tokens, role, frozenset(inner.split())))
            at += tokens
        return self._read(Span(f"{role}-{start}", start, at + 1, role, frozenset({"turn", *tags.split()})), row)

    def put(self, row: int, tokens: int, tags: str = "") -> Span:
        """Text that is no turn, in front of what is at ``row``."""
        start = len(self.order)
        return self._read(Span(f"text-{start}", start, start + tokens, "", frozenset(tags.split())), row)

    def _read(self, span: Span, row: int | None) -> Span:
        row = len(self.order) if row is None else row
        self.order[row:row] = range(span.start, span.stop)
        self.places.insert(row, len(span))
        self.spans.append(span)
        return span

    def pin(self, start: int, stop: int) -> None:
        self.spans.append(Span(f"pin-{len(self.spans)}", start, stop, "", frozenset({"pinned"})))

    def view(self, cells: int = 1000, need: int = 0, hidden: set[int] | frozenset[int] = frozenset()) -> View:
        visible = np.array([i for i in self.order if i not in hidden], np.int64)
        return View(tuple(self.spans), visible, cells, cells - len(visible), need)


def chat(exchanges: int, words: int = 7) -> Talk:
    """A system turn of 10 tokens, then exchanges of 10 tokens from the user and 10 from the assistant."""
    talk = Talk()
    talk.say(SYSTEM, 7)
    for _ in range(exchanges):
        talk.say(USER, words)
        talk.say(ASSISTANT, words)
    return talk


def indexes(cuts: tuple[Cut, ...]) -> list[int]:
    return [i for cut in cuts for start, stop in cut.ranges for i in range(start, stop)]


def lines(cuts: tuple[Cut, ...]) -> list[str]:
    """As a dry run shows them."""
    return [f"{c.name} {c.ranges} {c.why}" for c in cuts]


# -- policies by example --------------------------------------------------------------------------------------------


def test_keep_turns() -> None:
    assert lines(keep_turns(2).plan(chat(4).view())) == [
        "user-10 ((10, 20),) exchange 1 of 4; the last 2 stay",
        "assistant-20 ((20, 30),) exchange 1 of 4; the last 2 stay",
        "user-30 ((30, 40),) exchange 2 of 4; the last 2 stay",
        "assistant-40 ((40, 50),) exchange 2 of 4; the last 2 stay",
    ]
    assert keep_turns(4).plan(chat(4).view()) == keep_turns(99).plan(chat(4).view()) == ()


def test_an_exchange_is_all_up_to_the_next_user() -> None:
    talk = Talk()
    talk.say(ASSISTANT, 7)  # a greeting
    for _ in range(2):
        talk.say(USER, 7)
        talk.say(ASSISTANT, 7)
        talk.say(TOOL, (7, "tool_result tool:search"))
        talk.say(ASSISTANT, 7)
    numbers = [cut.why.split(";")[0] for cut in keep_turns(1).plan(talk.view())]
    assert numbers == ["exchange 1 of 3", *["exchange 2 of 3"] * 4]


def test_without_a_system_turn_the_attention_sinks_stay() -> None:
    talk = Talk()
    for _ in range(3):
        talk.say(USER, 7)
    view = talk.view()
    cuts = keep_turns(1).plan(view)
    assert [c.ranges for c in cuts] == [((4, 10),), ((10, 20),)]
    left = view.without(cuts)
    assert left.visible.tolist() == [0, 1, 2, 3, *range(20, 30)]
    assert len(left.exchanges) == 1  # four sinks are no exchange any more


def test_sinks_of_a_text_that_was_put_in_front() -> None:
    talk = Talk()
    talk.say(USER, 7)
    talk.say(USER, 7, row=0)
    talk.say(USER, 7)
    assert keep_turns(1).plan(talk.view())[0] == Cut("user-10", ((14, 20),), "exchange 1 of 3; the last 1 stay")
    assert keep_turns(1).plan(talk.view())[1].ranges == ((4, 10),)


def test_what_is_pinned_stays_and_the_rest_of_its_turn_goes() -> None:
    talk = chat(3)
    talk.pin(12, 15)
    assert keep_turns(2).plan(talk.view())[0].ranges == ((10, 12), (15, 20))


def test_a_pinned_user_turn_still_begins_an_exchange() -> None:
    talk = chat(3)
    talk.pin(30, 40)  # the question of the second exchange
    assert [c.name for c in keep_turns(2).plan(talk.view())] == ["user-10", "assistant-20"]
    assert [c.name for c in keep_turns(1).plan(talk.view())] == ["user-10", "assistant-20", "assistant-40"]


def test_a_pinned_newest_exchange_is_the_newest() -> None:
    talk = chat(2)
    talk.pin(30, 50)
    assert [c.name for c in keep_turns(1).plan(talk.view())] == ["user-10", "assistant-20"]


def test_a_summary_is_no_turn() -> None:
    talk = chat(2)
    summary = talk.say(USER, 7, tags="summary")
    assert [c.name for c in keep_turns(1).plan(talk.view())] == ["user-10", "assistant-20"]
    assert not set(range(*summary.range)) & set(indexes(sliding_window(recent=1).plan(talk.view())))


def test_text_put_into_a_turn_goes_with_it() -> None:
    talk = chat(2)
    talk.put(15, 3)
    view = talk.view(hidden={14, 15, 16})  # replaced by it
    assert keep_turns(1).plan(view)[0].ranges == ((10, 14), (17, 20), (50, 53))


def test_a_range_does_not_take_a_summary_that_stands_in_it() -> None:
    """Places.rows takes what was inserted between two tokens of a range, so a range must end there."""
    talk = chat(2)
    summary = talk.put(15, 3, "summary")
    cuts = keep_turns(1).plan(talk.view())
    assert cuts[0].ranges == ((10, 15), (15, 20))
    rows = talk.places.rows(merge(cuts[0].ranges))
    assert not {talk.order[row] for row in np.flatnonzero(rows)} & set(range(*summary.range))


def test_a_span_of_tokens_that_stand_apart_does_not_take_what_is_between() -> None:
    """Something was put in front of others while a long text was being read."""
    talk = Talk()
    talk.put(0, 10)
    talk.put(10, 5)
    talk.put(6, 2)
    talk.put(17, 3)
    view = dataclasses.replace(talk.view(), spans=(Span("reply", 10, 20, ASSISTANT, frozenset({"turn"})),))
    assert view.visible[view.at(view.spans[0])].tolist() == [15, 16, *range(10, 15), *range(17, 20)]


def test_no_token_is_in_two_cuts() -> None:
    view = chat(1).view()
    one, other = Span("one", 12, 20), Span("other", 15, 25)
    assert [c.ranges for c in view.cuts([(one, ""), (other, ""), (one, "")])] == [((12, 20),), ((20, 25),)]


def test_reading_order_counts_not_the_indexes() -> None:
    talk = chat(2)
    talk.say(USER, 7, row=10)  # put in as the first message, read last
    assert [c.name for c in keep_turns(2).plan(talk.view())] == ["user-50"]


def test_sliding_window() -> None:
    """StreamingLLM's sinks and recent; system turns count as neither and stay."""
    talk = Talk()
    talk.put(0, 100)
    (cut,) = sliding_window(sinks=6, recent=20).plan(talk.view())
    assert cut == Cut("window", ((6, 80),), "all but the first 6 and the last 20 visible tokens")
    assert cut.tokens == 74
    assert sliding_window(sinks=0, recent=20).plan(talk.view())[0].ranges == ((NUM_SINKS, 80),)
    assert sliding_window(recent=100).plan(talk.view()) == ()
    assert sliding_window(recent=20).plan(chat(3).view())[0].ranges == ((10, 50),)


def test_hide_oldest_waits_for_the_trigger_and_then_goes_down_to_the_target() -> None:
    view = chat(4).view(cells=100)  # 90 tokens of 100 cells
    assert hide_oldest().plan(view) == ()
    assert hide_oldest().plan(dataclasses.replace(view, need=10)) == ()
    cuts = hide_oldest().plan(dataclasses.replace(view, need=11))  # 101 tokens: down to 75
    assert [c.name for c in cuts] == ["user-10", "assistant-20", "user-30", "assistant-40"]
    assert cuts[0].why == "exchange 1 of 4; down from 101 tokens, with what comes next, to 75"


def test_amounts_are_tokens_or_shares() -> None:
    view = chat(4).view(cells=180)
    assert hide_oldest(trigger=0.25, target=0.2).plan(view) == hide_oldest(trigger=45, target=36).plan(view)
    assert len(hide_oldest(trigger=89, target=70).plan(view)) == 2
    assert hide_oldest(trigger=90, target=70).plan(view) == ()
    assert hide_oldest(trigger=1, target=1.0).plan(view) == ()  # over one token, under the whole cache


def test_the_newest_exchange_is_never_taken() -> None:
    cuts = hide_oldest(trigger=1, target=1).plan(chat(3).view())
    assert max(indexes(cuts)) == 49


def test_summarize_oldest_marks_its_cuts() -> None:
    policy, view = summarize_oldest(kept=False), chat(4).view(cells=100)
    assert not policy.kept and all(c.summarise for c in policy.plan(view))
    plain = hide_oldest(trigger=0.8, target=0.4).plan(view)
    assert policy.plan(view) == tuple(dataclasses.replace(c, summarise=True) for c in plain) != ()


def tools(names: str) -> Talk:
    """A tool turn of 13 tokens, 10 of them its result, for every name."""
    talk = Talk()
    talk.say(SYSTEM, 7)
    talk.say(USER, 7)
    for name in names.split():
        talk.say(TOOL, (10, f"tool_result tool:{name}"))
    return talk


def test_clear_tool_uses() -> None:
    view = tools("search read search read search").view(cells=100)
    assert lines(clear_tool_uses().plan(view)) == [
        "part-22 ((22, 32),) tool result 1 of 5; the last 3 stay",
        "part-35 ((35, 45),) tool result 2 of 5; the last 3 stay",
    ]
    assert len(clear_tool_uses(keep=0).plan(view)) == 5
    assert [c.name for c in clear_tool_uses(exclude=("search",)).plan(view)] == ["part-35"]
    assert clear_tool_uses(trigger=85).plan(view) == ()
    assert len(clear_tool_uses(trigger=85).plan(dataclasses.replace(view, need=1))) == 2


def test_clear_tool_uses_when_it_is_worth_it() -> None:
    view = tools("search read search read search").view(cells=100)
    assert len(clear_tool_uses(clear_at_least=20).plan(view)) == 2
    assert clear_tool_uses(clear_at_least=21).plan(view) == ()
    assert clear_tool_uses(clear_at_least=0.3).plan(view) == ()


def test_clear_thinking_counts_turns_that_have_any() -> None:
    talk = Talk()
    talk.say(USER, 7)
    talk.say(ASSISTANT, (3, "thinking"), 2, (3, "thinking"), 1)
    talk.say(ASSISTANT, (3, "thinking"), 1)
    talk.say(ASSISTANT, 7)
    view = talk.view()
    assert lines(clear_thinking().plan(view)) == [
        "part-12 ((12, 15),) turn 1 of 2 with thinking; the last 1 stay",
        "part-17 ((17, 20),) turn 1 of 2 with thinking; the last 1 stay",
    ]
    assert clear_thinking(2).plan(view) == ()
    assert len(clear_thinking(0).plan(view)) == 3


def test_thinking_in_no_turn_stands_for_itself() -> None:
    talk = Talk()
    talk.put(0, 10)
    talk.put(10, 5, "thinking")
    talk.put(15, 5, "thinking")
    assert indexes(clear_thinking().plan(talk.view())) == list(range(10, 15))


def test_composition_runs_in_order_on_what_is_left() -> None:
    talk = Talk()
    talk.say(SYSTEM, 7)
    for _ in range(3):
        talk.say(USER, 7)
        talk.say(ASSISTANT, (4, "thinking"), 3)
    both = clear_thinking() + keep_turns(2)
    assert [c.ranges for c in both.plan(talk.view())] == [((22, 26),), ((42, 46),), ((10, 20),), ((20, 22), (26, 30))]
    assert str(both) == "clear_thinking(keep=1) + keep_turns(2)"
    assert (both + both).parts == (clear_thinking(1), keep_turns(2)) * 2
    with pytest.raises(TypeError):
        both + 3  # type: ignore[operator]


def test_a_policy_of_ones_own() -> None:
    class HideTurn(Policy):
        def plan(self, view: View) -> tuple[Cut, ...]:
            return view.cuts((turn, "because") for turn in view.tagged("turn")[1:2])

    cuts = (HideTurn() + keep_turns(1)).plan(chat(2).view())
    assert [c.name for c in cuts] == ["user-10", "assistant-20"]
    assert str(HideTurn()) == "hide_turn()"


# -- block markers --------------------------------------------------------------------------------------------------

MEMENTO = block_markers("<|block_start|>", "<|block_end|>", "<|summary_start|>", "<|summary_end|>")
SHORT = {"S": MEMENTO.start, "E": MEMENTO.end, "(": MEMENTO.summary_start, ")": MEMENTO.summary_end}


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("aSbEc(d)e", ["SbE"]),
        ("SaE(b)SdE(c)", ["SaE", "SdE"]),
        ("SaE", []),
        ("SaE(b", []),
        ("Sa(b)E", []),
        ("(b)SaE", []),
        ("SaSbE(c)", ["SbE"]),
        ("SaSbE(c)E(d)", ["SbE"]),
        ("SaESbE(c)", ["SbE"]),
        ("SaE(bSc)", []),
        ("SaE(bScE)", []),
        ("EaE)b(S(E", []),
        ("SaEE((b)(c))", ["SaE"]),
        ("", []),
    ],
)
def test_finished_blocks(text: str, blocks: list[str]) -> None:
    long = "".join(SHORT.get(c, c) for c in text)
    expected = ["".join(SHORT.get(c, c) for c in block) for block in blocks]
    assert [long[a:b] for a, b in MEMENTO.finished(long)] == expected


def test_finished_since() -> None:
    markers = block_markers("[", "]", "(", ")")
    assert markers.finished("[a](b)[c](d)") == [(0, 3), (6, 9)]
    assert markers.finished("[a](b)[c](d)", after=6) == [(6, 9)]
    assert markers.finished("[a](b)[c](d)", after=5) == [(0, 3), (6, 9)]
    assert markers.finished("[a](b)[c](d)", after=12) == []
    assert markers.plan(chat(3).view()) == ()


def test_one_marker_may_begin_as_another_does() -> None:
    assert block_markers("<", "<<", "<<<", "<<<<").finished("< a << b <<< c <<<< d") == [(0, 6)]


@given(st.text("SE() a", max_size=60), st.integers(-5, 65))
def test_blocks_are_whole_and_in_order_whatever_the_text(text: str, after: int) -> None:
    blocks = block_markers("S", "E", "(", ")").finished(text, after)
    for a, b in blocks:
        assert re.fullmatch(r"S[^SE]*E", text[a:b])
        summary = re.match(r"[^S(]*\([^S)]*\)", text[b:])
        assert summary and b + summary.end() > after
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(blocks))


# -- arguments and texts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: keep_turns(0), "n is a whole number of at least 1, not 0"),
        (lambda: keep_turns(True), "not True"),
        (lambda: keep_turns(2.0), "not 2.0"),  # type: ignore[arg-type]
        (lambda: sliding_window(sinks=-1), "sinks is a whole number of at least 0"),
        (lambda: sliding_window(recent=0), "recent is a whole number of at least 1"),
        (lambda: hide_oldest(trigger=0), "trigger is a number of tokens, or a share"),
        (lambda: hide_oldest(trigger=1.5), "trigger is a number"),
        (lambda: hide_oldest(target=float("nan")), "target is a number"),
        (lambda: hide_oldest(trigger=0.5, target=0.6), "target 0.6 is above trigger 0.5"),
        (lambda: hide_oldest(trigger=500, target=600), "above"),
        (lambda: hide_oldest(trigger=0.7), "above"),
        (lambda: summarize_oldest(trigger=0.3), "above"),
        (lambda: summarize_oldest(kept=1), "kept is True or False"),  # type: ignore[arg-type]
        (lambda: clear_thinking(-1), "keep"),
        (lambda: clear_tool_uses(keep=-1), "keep"),
        (lambda: clear_tool_uses(trigger="half"), "trigger"),  # type: ignore[arg-type]
        (lambda: clear_tool_uses(clear_at_least=-1), "clear_at_least"),
        (lambda: clear_tool_uses(exclude="search"), "exclude is a tuple"),  # type: ignore[arg-type]
        (lambda: clear_tool_uses(exclude=(1,)), "exclude is a tuple"),  # type: ignore[arg-type]
        (lambda: block_markers("a", "b", "c", "c"), "four different"),
        (lambda: block_markers("", "b", "c", "d"), "four different"),
        (lambda: block_markers(1, "b", "c", "d"), "four different"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments(make: Callable[[], Policy], what: str) -> None:
    with pytest.raises(UsageError, match=re.escape(what)):
        make()


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("keep_turns(8)", keep_turns(8)),
        (" keep_turns(n=8) + clear_thinking(keep=1) ", keep_turns(8) + clear_thinking()),
        ("keep_turns(8) + (clear_thinking() + sliding_window)", keep_turns(8) + clear_thinking() + sliding_window()),
        ("clear_thinking", clear_thinking(1)),
        ("clear_tool_uses(4000, exclude=('a', 'b'))", clear_tool_uses(4000, exclude=("a", "b"))),
        ("summarize_oldest(target=0.3, kept=False)", summarize_oldest(target=0.3, kept=False)),
        (r"block_markers('<\u00e9>', '</b>', '<s>', '</s>')", block_markers("<é>", "</b>", "<s>", "</s>")),
    ],
)
def test_parse(text: str, policy: Policy) -> None:
    assert parse(text) == policy


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("keep_turn(8)", "no policy is called 'keep_turn'; there is keep_turns"),
        ("KeepTurns(8)", "there is keep_turns"),
        ("xyzzy", "there is sliding_window, keep_turns, hide_oldest, summarize_oldest"),
        ("keep_turns", "keep_turns does not fit keep_turns(n: int)"),
        ("keep_turns(m=3)", "keep_turns(m=3) does not fit keep_turns(n: int)"),
        ("keep_turns(0)", "keep_turns(0) does not fit keep_turns(n: int): n is a whole number of at least 1, not 0"),
        ("clear_thinking(1, 2)", "does not fit clear_thinking(keep: int = 1)"),
        ("hide_oldest(**{'target': 1})", "does not fit hide_oldest(trigger: Amount = 1.0, target: Amount = 0.75)"),
        ("keep_turns(*[3])", "does not fit"),
        ("keep_turns(3 + 4)", "does not fit"),
        ("keep_turns(open('/etc/passwd'))", "does not fit"),
        ("keep_turns({[]: 1})", "does not fit"),
        ("clear_tool_uses(exclude=['a'])", "exclude is a tuple"),
        ("keep_turns(8) - clear_thinking()", "no policy is called"),
        ("__import__('os').system('true')", "no policy is called"),
        ("(lambda: 3)()", "no policy is called"),
        ("", "write 'keep_turns(8)'"),
        ("keep_turns(8) +", "is no policy"),
        ("keep_turns(n=1, n=2)", "does not fit"),
        ("keep_turns(8)\0", "is no policy"),
        ("\ud800", "is no policy"),
        ("(" * 1000, "is no policy"),
        ("+".join(["clear_thinking"] * 100_000), "is no policy"),
    ],
)
def test_what_is_no_policy(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=re.escape(what)):
        parse(text)


def test_a_share_of_numpy_is_written_as_a_number() -> None:
    assert str(hide_oldest(trigger=np.float64(0.5), target=100)) == "hide_oldest(trigger=0.5, target=100)"


def beyond(policy: Policy, view: View, reserve: int = 0) -> list[str]:
    """The names of what goes though the policy does not ask for it."""
    cuts = make_room(policy, view, reserve)
    assert cuts[: len(policy.plan(view))] == policy.plan(view) and view.without(cuts).free >= view.need
    return [cut.name for cut in cuts if cut.beyond]


def test_what_goes_when_a_rule_makes_too_little_room() -> None:
    view = chat(4).view(cells=100, need=50)  # 90 tokens: a system turn of 10, exchanges of 20
    assert beyond(keep_turns(2), view) == []
    assert beyond(keep_turns(3), view) == ["user-30", "assistant-40"]
    assert beyond(clear_thinking(), view) == ["user-10", "assistant-20", "user-30", "assistant-40"]
    assert beyond(keep_turns(3), dataclasses.replace(view, need=30), reserve=20) == []  # a reserve is a wish
    assert beyond(keep_turns(1), dataclasses.replace(view, need=80, opens=True)) == ["user-70", "assistant-80"]


def test_a_reserve_is_had_where_room_has_to_be_made_anyway() -> None:
    view = chat(4).view(cells=100, need=15)
    assert len(make_room(keep_turns(9), view)) == 2
    assert len(make_room(keep_turns(9), view, 20)) == 4
    assert len(make_room(keep_turns(9), view, 2000)) == 2


def test_of_the_exchange_that_goes_on_the_middle_goes() -> None:
    view = tools("a b c d").view(cells=100, need=50)  # 10 of the system, 10 of the user, 13 each
    assert beyond(hide_oldest(), view) == ["tool-20", "tool-33"]
    with pytest.raises(ContextFull, match=r"68 cells are needed, and 67 of 100 .*at most about 67 tokens"):
        make_room(hide_oldest(), dataclasses.replace(view, need=68))
    assert len(beyond(hide_oldest(), dataclasses.replace(view, need=90, opens=True))) == 5


def test_a_summary_goes_last() -> None:
    talk = chat(2)
    talk.say(USER, 7, tags="summary")
    talk.say(ASSISTANT, 7, tags="summary")
    view = dataclasses.replace(talk.view(cells=70, need=40), opens=True)
    names = ["user-10", "assistant-20", "user-30", "assistant-40"]
    assert beyond(keep_turns(2), view) == names
    assert beyond(keep_turns(2), dataclasses.replace(view, need=41)) == [*names, "user-50", "assistant-60"]


def test_room_that_cannot_be_made() -> None:
    """The message names the one thing that helps."""
    talk = chat(2)
    with pytest.raises(ContextFull) as error:
        make_room(keep_turns(1), talk.view(cells=60, need=51))
    assert str(error.value) == (
        "51 cells are needed, and 30 of 60 can be made free; send less at once (at most about 30 tokens), or open with "
        "a larger n_ctx, of at least 81"
    )
    with pytest.raises(ContextFull, match="; send less at once, or open with a larger n_ctx, of at least 90"):
        make_room(keep_turns(1), talk.view(cells=60, need=80, hidden=set(range(10, 50))))
    talk.pin(30, 50)
    with pytest.raises(ContextFull, match=r"pinned text holds 20; unpin pin-\d+$"):
        make_room(keep_turns(1), dataclasses.replace(talk.view(cells=60, need=45), opens=True))
    shared = np.arange(10, 30)
    view = dataclasses.replace(chat(2).view(cells=60, need=31), opens=True, shared=shared, elsewhere=20)
    with pytest.raises(ContextFull, match="other sessions on this engine hold 20; close a fork"):
        make_room(hide_oldest(), view)


# -- properties -----------------------------------------------------------------------------------------------------

PARTS = st.sampled_from(["", "", "thinking", "tool_result tool:a", "tool_result tool:b", "pinned"])
TURNS = st.tuples(
    st.sampled_from([SYSTEM, USER, USER, ASSISTANT, ASSISTANT, TOOL]),
    st.lists(st.tuples(st.integers(1, 4), PARTS), max_size=3),
    st.sampled_from(["", "", "", "", "pinned", "summary"]),
    st.booleans(),
)


@st.composite
def talks(draw: st.DrawFn) -> tuple[Talk, View]:
    """Turns, some of them put in front of others later, texts put anywhere, and any tokens hidden."""
    talk = Talk()
    for role, parts, tags, in_front in draw(st.lists(TURNS, max_size=8)):
        starts = [talk.order.index(s.start) for s in talk.spans if "turn" in s.tags]
        row = draw(st.sampled_from(starts)) if in_front and starts else None
        talk.say(role, *parts, tags=tags, row=row)
    for tokens, tags in draw(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["", "summary", "pinned"])))):
        talk.put(draw(st.integers(0, len(talk.order))), tokens, tags)
    hidden = draw(st.sets(st.integers(0, max(0, len(talk.order) - 1)), max_size=10))
    spare, need = draw(st.integers(0, 20)), draw(st.integers(0, 60))
    return talk, talk.view(len(talk.order) + spare, need, hidden)


SHARES = st.floats(0.0001, 1)
AMOUNTS = st.integers(1, 80) | SHARES
OLDEST = st.tuples(AMOUNTS, AMOUNTS).filter(lambda a: isinstance(a[0], int) != isinstance(a[1], int) or a[1] <= a[0])
WINDOWS = st.builds(sliding_window, st.integers(0, 10), st.integers(1, 30))
KEEPS = st.builds(keep_turns, st.integers(1, 5))
CLEARS = st.builds(clear_thinking, st.integers(0, 3)) | st.builds(
    clear_tool_uses, AMOUNTS, st.integers(0, 3), st.integers(0, 8) | SHARES, st.sampled_from([(), ("a",), ("a", "b")])
)
SUMMARIES = st.tuples(OLDEST, st.booleans()).map(lambda a: summarize_oldest(a[0][0], a[0][1], a[1]))
HIDES = OLDEST.map(lambda a: hide_oldest(*a)) | SUMMARIES
SINGLE = WINDOWS | KEEPS | CLEARS | HIDES | st.just(MEMENTO)
ANY = SINGLE | st.lists(SINGLE, min_size=2, max_size=4).map(lambda p: Chain(tuple(p)))


@given(talks(), ANY)
def test_cuts_are_visible_disjoint_and_leave_alone_what_they_must(talk: tuple[Talk, View], policy: Policy) -> None:
    view = talk[1]
    cuts = policy.plan(view)
    gone = indexes(cuts)
    assert len(gone) == len(set(gone)) and set(gone) <= set(view.visible.tolist())
    assert not set(gone) & ({*range(NUM_SINKS)} | set(view.visible[:NUM_SINKS].tolist()))
    for span in view.spans:
        if span.tags & {"pinned", "summary"} or span.role == SYSTEM:
            assert not set(gone) & set(range(*span.range))
    for cut in cuts:
        assert cut.tokens and list(cut.ranges) == merge(cut.ranges)


@given(talks(), ANY)
def test_a_cut_as_a_target_selects_its_tokens_and_no_other_visible_one(talk: tuple[Talk, View], policy: Policy) -> None:
    places, order, view = talk[0].places, np.array(talk[0].order, np.int64), talk[1]
    for cut in policy.plan(view):
        chosen = set(order[places.rows(merge(cut.ranges))].tolist())
        assert chosen & set(view.visible.tolist()) == set(indexes((cut,)))


@given(talks(), st.data())
def test_a_span_is_where_places_say(talk: tuple[Talk, View], data: st.DataObject) -> None:
    places, order = talk[0].places, np.array(talk[0].order, np.int64)
    view = talk[0].view()
    assume(view.spans)
    span = data.draw(st.sampled_from(view.spans))
    assert np.flatnonzero(places.rows([span.range])).tolist() == view.at(span).tolist()
    assert set(range(*span.range)) <= set(order[view.at(span)].tolist())


@given(talks(), ANY)
def test_plans_are_the_same_every_time_and_change_nothing(talk: tuple[Talk, View], policy: Policy) -> None:
    view = talk[1]
    before = view.visible.copy()
    fresh = dataclasses.replace(view)
    assert policy.plan(view) == policy.plan(view) == policy.plan(fresh)
    assert (view.visible == before).all()


@given(talks(), SINGLE)
def test_a_second_plan_finds_nothing_more(talk: tuple[Talk, View], policy: Policy) -> None:
    view = talk[1]
    assert policy.plan(view.without(policy.plan(view))) == ()


@given(talks(), HIDES)
def test_hide_oldest_reaches_its_target_or_leaves_one_exchange(talk: tuple[Talk, View], policy: HideOldest) -> None:
    view = talk[1]
    left = view.without(policy.plan(view))
    reached = left.used <= max(view.amount(policy.trigger), view.amount(policy.target))
    assert reached or len(left.exchanges) <= 1
    assert view.exchanges[-1:] == left.exchanges[-1:]


@given(talks(), st.integers(1, 5))
def test_keep_turns_keeps_the_newest_as_they_are(talk: tuple[Talk, View], n: int) -> None:
    view = talk[1]
    assert view.without(keep_turns(n).plan(view)).exchanges == view.exchanges[-n:]


@given(talks(), st.lists(SINGLE, min_size=2, max_size=4))
def test_composition_is_one_after_the_other(talk: tuple[Talk, View], policies: list[Policy]) -> None:
    view, cuts = talk[1], list[Cut]()
    for policy in policies:
        more = policy.plan(view)
        cuts += more
        view = view.without(more)
    assert sum(policies[1:], policies[0]).plan(talk[1]) == tuple(cuts)


@given(talks(), ANY, st.booleans())
def test_room_is_made_or_refused(talk: tuple[Talk, View], policy: Policy, opens: bool) -> None:
    view = dataclasses.replace(talk[1], opens=opens)
    plan = policy.plan(view)
    try:
        cuts = make_room(policy, view)
    except ContextFull:
        left = view.without(plan)
        assert left.without(left.cut_for_need()).free < view.need
        return
    assert view.without(cuts).free >= view.need and cuts[: len(plan)] == plan
    assert all(cut.beyond for cut in cuts[len(plan) :]) and (
        len(cuts) == len(plan) or view.without(plan).free < view.need
    )
    gone = indexes(cuts)
    assert len(gone) == len(set(gone)) and set(gone) <= set(view.visible.tolist())
    for span in view.spans:
        if "pinned" in span.tags or span.role == SYSTEM:
            assert not set(gone) & set(range(*span.range))


@given(ANY | st.builds(block_markers, *(st.text().map(c.__add__) for c in "abcd")))
def test_text_and_policy_are_the_same(policy: Policy) -> None:
    assert parse(str(policy)) == policy
    assert str(parse(str(policy))) == str(policy)


@given(st.text("keptursn_cla()+=,. 8'", max_size=30) | st.text(max_size=20))
def test_parse_raises_nothing_else(text: str) -> None:
    with contextlib.suppress(UsageError):
        parse(text)
