"""Chat templates: what the common families write, what templates can say, and templates that were made to hurt."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.tests
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

import hostile_templates
from edgekv.errors import ModelError, TemplateError, UsageError
from edgekv.template import PLAIN, PLAIN_STOPS, Template
from edgekv.template.filters import FILTERS, GLOBALS, TESTS
from edgekv.template.methods import METHODS

FOLDER = Path(__file__).parents[1] / "data" / "templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
NOW = datetime(2026, 3, 4, 5, 6)
Message = dict[str, Any]


@functools.cache
def load(name: str) -> Template:
    return Template((FOLDER / f"{name}.jinja").read_text("utf-8"), bos="<s>", eos="</s>", now=NOW)


def render(source: str, *messages: Message, **options: Any) -> str:
    return Template(source, now=NOW).render(messages, **options)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "서울"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"city": "도시 🏙"}}}
RESULT = {"role": "tool", "name": "weather", "content": "3 °C"}


# -- families -------------------------------------------------------------------------------------------------------


def test_chatml() -> None:
    text = load("chatml").render([system("짧게."), user("안녕 🙂"), assistant("Hi")], add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\n짧게.<|im_end|>\n<|im_start|>user\n안녕 🙂<|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_llama3_trims_what_is_said() -> None:
    text = load("llama3").render([user("  안녕 🙂\n\n"), assistant("\tHi ")])
    assert text == (
        "<s><|start_header_id|>user<|end_header_id|>\n\n안녕 🙂<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHi<|eot_id|>"
    )


def test_gemma_puts_the_system_text_into_the_first_user_turn() -> None:
    text = load("gemma").render(
        [system("짧게."), user("안녕"), assistant("🙂"), user("그래")], add_generation_prompt=True
    )
    assert text == (
        "<s><start_of_turn>user\n짧게.\n\n안녕<end_of_turn>\n<start_of_turn>model\n🙂<end_of_turn>\n"
        "<start_of_turn>user\n그래<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize("messages", [[user("a"), user("b")], [assistant("a")], [user("a"), system("b")]])
def test_gemma_refuses_roles_that_do_not_alternate(messages: list[Message]) -> None:
    with pytest.raises(TemplateError, match='refuses this conversation: "Conversation roles must alternate'):
        load("gemma").render(messages)


def test_mistral_moves_the_system_text_to_the_last_user_turn() -> None:
    template, first = load("mistral"), [system("짧게."), user("안녕")]
    assert template.render(first) == "<s>[INST] 짧게.\n\n안녕[/INST]"
    text = template.render([*first, assistant("🙂"), user("그래")])
    assert text == "<s>[INST] 안녕[/INST] 🙂</s>[INST] 짧게.\n\n그래[/INST]"


def test_qwen3_keeps_reasoning_only_behind_the_last_question() -> None:
    template = load("qwen3")
    first = [user("2+2?"), assistant("4", reasoning_content="둘과 둘"), RESULT]
    assert "<think>\n둘과 둘\n</think>\n\n4<|im_end|>" in template.render(first)
    assert "둘과 둘" not in template.render([*first, user("3+3?")])
    said = [user("2+2?"), assistant("<think>\n둘\n</think>\n\n4")]
    assert template.render(said).endswith("assistant\n<think>\n둘\n</think>\n\n4<|im_end|>\n")
    assert template.render([*said, user("?")]).count("<think>") == 0


def test_qwen3_thinks_unless_it_is_told_not_to() -> None:
    template = load("qwen3")
    assert template.render([user("?")], add_generation_prompt=True).endswith("<|im_start|>assistant\n")
    text = template.render([user("?")], add_generation_prompt=True, enable_thinking=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_qwen3_tools() -> None:
    text = load("qwen3").render([user("?"), assistant(None, tool_calls=[CALL]), RESULT, RESULT], tools=[TOOL])
    assert text == (
        "<|im_start|>system\n# Tools\n\n<tools>\n"
        '{"type": "function", "function": {"name": "weather", "parameters": {"city": "도시 🏙"}}}\n</tools><|im_end|>\n'
        "<|im_start|>user\n?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "서울"}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3 °C\n</tool_response>\n<tool_response>\n3 °C\n</tool_response><|im_end|>\n"
    )


def test_gptoss_returns_at_the_end_and_ends_in_history() -> None:
    template, messages = load("gptoss"), [system("짧게."), user("안녕"), assistant("🙂", thinking="인사")]
    head = (
        "<|start|>system<|message|>You are a chat model.\nCurrent date: 2026-03-04\n\nReasoning: medium<|end|>"
        "<|start|>developer<|message|># Instructions\n\n짧게.<|end|><|start|>user<|message|>안녕<|end|>"
    )
    analysis = "<|start|>assistant<|channel|>analysis<|message|>인사<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>🙂"
    assert template.render(messages) == f"{head}{analysis}{final}<|return|>"
    text = template.render([*messages, user("?")], add_generation_prompt=True)
    assert text == f"{head}{final}<|end|><|start|>user<|message|>?<|end|><|start|>assistant"
    assert "Reasoning: high" in template.render(messages, reasoning_effort="high")


def test_toolcalls() -> None:
    messages = [system("짧게."), user("?"), assistant("보자", tool_calls=[CALL, CALL]), RESULT]
    call = '<tool_call>{"name": "weather", "arguments": {"city": "서울"}}</tool_call>'
    assert load("toolcalls").render(messages, tools=[TOOL], add_generation_prompt=True) == (
        "<|im_start|>system\n짧게.\n\nYou may call these functions:\n<tools>\n"
        '{"name": "weather", "parameters": {"city": "도시 🏙"}}\n</tools>\n'
        'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one.<|im_end|>\n'
        f"<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n보자\n{call}\n{call}<|im_end|>\n"
        '<|im_start|>tool\n<tool_response>{"name": "weather", "content": "3 °C"}</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


@functools.cache
def bare(source: str) -> jinja2.Template:
    """As Jinja itself reads it, in transformers' settings."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals |= {"raise_exception": refuse, "strftime_now": NOW.strftime}
    return environment.from_string(source)


GIVEN = {"bos_token": "<s>", "eos_token": "</s>", "tools": None}
ROLES = st.sampled_from(["user", "assistant", "system", "tool"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=20)}), min_size=1, max_size=6)


@pytest.mark.parametrize("name", NAMES)
@given(messages=MESSAGES, add=st.booleans())
def test_the_sandbox_writes_what_jinja_writes(name: str, messages: list[Message], add: bool) -> None:
    template = load(name)
    try:
        wanted: str | None = bare(template.source).render(messages=messages, add_generation_prompt=add, **GIVEN)
    except jinja2.TemplateError:
        wanted = None
    if wanted is None:
        with pytest.raises(TemplateError):
            template.render(messages, add_generation_prompt=add)
    else:
        assert template.render(messages, add_generation_prompt=add) == wanted


# -- the plain template ---------------------------------------------------------------------------------------------


def test_plain() -> None:
    messages = [system("짧게."), user("안녕 🙂"), assistant("Hi"), system("Longer."), {"role": "tool", "content": "3"}]
    assert Template(PLAIN).render(messages, add_generation_prompt=True) == (
        "짧게.\n\nUser: 안녕 🙂\nAssistant: Hi\nSystem: Longer.\nTool: 3\nAssistant:"
    )


def test_plain_takes_parts_and_calls() -> None:
    parts = [{"type": "text", "text": "안"}, {"type": "image"}, {"type": "text", "text": "녕"}]
    messages = [{"role": "user", "content": parts}, assistant(None, tool_calls=[{"name": "f"}])]
    assert Template(PLAIN).render(messages) == 'User: 안녕\nAssistant:  [{"name": "f"}]\n'


@given(MESSAGES.flatmap(lambda m: st.tuples(st.just(m), st.integers(0, len(m)))))
def test_plain_only_appends(drawn: tuple[list[Message], int]) -> None:
    messages, count = drawn
    template = Template(PLAIN)
    whole = template.render(messages)
    assert whole.startswith(template.render(messages[:count]))
    if messages[count : count + 1] and messages[count]["role"] == "assistant":
        assert whole.startswith(template.render(messages[:count], add_generation_prompt=True))
    assert all(message["content"] in whole for message in messages)


def test_a_plain_stop_is_how_a_turn_begins() -> None:
    roles = ("user", "assistant", "system", "tool")
    turns = [f"\n{Template(PLAIN).render([user('?'), {'role': role, 'content': '!'}])}" for role in roles]
    assert all(stop in turn for stop, turn in zip(PLAIN_STOPS, turns, strict=True))


# -- what templates can say -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ {'b': '서울 🙂 <&>', 'a': none}|tojson }}", '{"b": "서울 🙂 <&>", "a": null}'),
        ("{{ {'b': 1, 'a': '서'}|tojson(ensure_ascii=true, sort_keys=true) }}", '{"a": "\\uc11c", "b": 1}'),
        ("{{ [1, 2]|tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ {'a': [1]}|tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{{ '[1, {\"a\": null}]'|from_json }}", "[1, {'a': None}]"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% for i in [0, 1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% for i in [0, 1, 2] %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}", "0"),
        ("{% for i in [1, 2, 3] if i is odd %}{{ loop.index ~ i }}{{ '' if loop.last else ',' }}{% endfor %}", "11,23"),
        ("{% for a, b in {'x': 1}.items() %}{{ a ~ b }}{% else %}none{% endfor %}", "x1"),
        ("{% macro f(a, b='!') %}<{{ a }}{{ b }}>{% endmacro %}{{ f('x') }}{{ f('y', b='?') }}", "<x!><y?>"),
        ("{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}x{% endcall %}", "[x]"),
        ("{% set ns = namespace(n=0) %}{% for i in range(4) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "6"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x|upper }}{% filter trim %}  b {% endfilter %}", "A1b"),
        ("{% set l = [] %}{% set _ = l.append('a') %}{% set _ = l.append('b') %}{{ l.pop(0) }}{{ l }}", "a['b']"),
        ("{{ 'a-b'.split('-') }}{{ 'abc'[::-1] }}{{ 'abc'[1:] }}{{ [1, 2][-1:] }}", "['a', 'b']cbabc[2]"),
        ("{{ 'x %s %d' % ('a', 2) }}{{ '%.1f'|format(1.25) }}{{ '{} {n:>3}'.format(1, n=2) }}", "x a 21.21   2"),
        ("{{ 'a' in {'a': 1} }}{{ 'b' not in 'abc' }}{{ 1 < 2 < 3 }}{{ 3 in [1, 2] }}", "TrueFalseTrueFalse"),
        ("{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 3 }}{{ -1 + 2 }}{{ 'ab' * 2 }}{{ [1] + [2] }}", "3181abab[1, 2]"),
        ("{{ [3, 1, 2]|sort|join('-') }}{{ {'b': 1, 'a': 2}|dictsort }}{{ [1, 2]|sum }}", "1-2-3[('a', 2), ('b', 1)]3"),
        ("{{ ['a', 'A', 'b']|unique|list }}{{ [1, 3]|max }}{{ ' x '|trim }}{{ 'x'|safe + '<' }}", "['a', 'b']3xx<"),
        ("{{ [{'a': {'b': 1}}]|map(attribute='a.b')|list }}{{ ['x']|map('upper')|first }}", "[1]X"),
        ("{{ [{'r': 1}, {'r': 2}]|selectattr('r', 'equalto', 2)|list }}{{ none|select|list }}", "[{'r': 2}][]"),
        ("{{ 'a\nb'|indent(2) }}{{ 'a'|indent('> ', true) }}{{ 'abcabc'|replace('b', '', 1) }}", "a\n  b> aacabc"),
        ("{{ '3'|int + 1 }}{{ 'x'|int(7) }}{{ '1.5'|float }}{{ 2.567|round(1) }}{{ -3|abs }}", "471.52.63"),
        ("{{ undefined_thing }}{{ undefined_thing|default('d') }}{{ undefined_thing is defined }}", "dFalse"),
        ("{{ strftime_now('%d %b %Y') }}", "04 Mar 2026"),
        ("{{ 'a&b'|e }}{{ 'straße'|title }}{{ {} is mapping }}{{ 'A' is upper }}", "a&amp;bStraßeTrueTrue"),
        ("{{ {'items': 1}['items'] }}{{ {'items': 1}.get('items') }}{{ {'a': 1}.get('b', 2) }}", "112"),
        ("{{ bos_token }}{{ tools is none }}{{ add_generation_prompt }}", "TrueFalse"),
    ],
)  # fmt: skip
def test_what_templates_use_works(source: str, wanted: str) -> None:
    assert render(source) == wanted


def test_a_chat_keeps_its_date() -> None:
    template = Template("{{ strftime_now('%H:%M:%S.%f') }}")
    assert template.render([]) == template.render([]) == template.now.strftime("%H:%M:%S.%f")


def test_tools_that_are_none() -> None:
    source = "{{ tools is none }}{{ bos_token }}{{ eos_token }}"
    assert Template(source, bos="<s>", eos="</s>").render([], tools=[]) == "True<s></s>"


def test_the_template_gets_copies() -> None:
    messages = [{"role": "user", "content": ["a"]}]
    render("{% set _ = messages[0].content.append('b') %}", *messages)
    assert messages == [{"role": "user", "content": ["a"]}]


def test_mentions_tells_what_is_read() -> None:
    source = """{# comment #}{% set stored = 1 %}{% if thinking %}{{ message.reasoning_content }}{{ m['item'] }}
        {{ m.get('got') }}{{ xs|map(attribute='a.b')|list }}{{ xs|selectattr('role', 'eq', 'word') }}text{% endif %}
        {% if enable_thinking is defined %}{{ tools|tojson }}{% endif %}{{ 'quoted' }}"""
    template = Template(source)
    read = ("thinking", "reasoning_content", "item", "got", "a", "b", "role", "enable_thinking", "tools", "message")
    assert all(template.mentions(name) for name in read)
    assert not any(template.mentions(name) for name in ("comment", "stored", "text", "quoted", "word", "reasoning"))


def test_mentions_of_the_families() -> None:
    found = {name for name in NAMES if load(name).mentions("tools")}
    assert found == {"qwen3", "toolcalls"}
    assert [n for n in NAMES if load(n).mentions("reasoning_content") or load(n).mentions("thinking")] == [
        "gptoss",
        "qwen3",
    ]
    assert [n for n in NAMES if load(n).mentions("enable_thinking")] == ["qwen3"]


def test_threads_render_one_template_at_once() -> None:
    template = load("qwen3")
    wrong: list[str] = []

    def work(number: int) -> None:
        messages = [user(f"question {number}"), assistant(f"answer {number}")] * 5
        wanted = template.render(messages)
        wrong.extend(f"thread {number}" for _ in range(40) if template.render(messages) != wanted)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_long_chat_is_within_the_budget() -> None:
    messages = [system("Terse.")] + [user("lorem ipsum " * 50), assistant("짧은 답 🙂 " * 50)] * 1000
    assert load("qwen3").render(messages).count("lorem ipsum") == 50_000


# -- errors ---------------------------------------------------------------------------------------------------------


def test_a_template_error_is_about_the_model() -> None:
    assert issubclass(TemplateError, ModelError)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for x in y %}", r"cannot be read: Unexpected end of template.*\(line 1\); give another template"),
        ("a\n\n{{ x y }}", r"cannot be read: expected token .* \(line 3\)"),
        ("{{ x|nosuch }}", "cannot be read: No filter named 'nosuch'"),
        ("a\n{{ x.y.z }}", r"cannot render this conversation: 'x' is undefined \(line 2\); give another template"),
        ("{{ 1 + 'x' }}", "unsupported operand"),
        ("{% for x in none %}{% endfor %}", "it loops over None"),
        ("{{ raise_exception('no \x1b[31m\nway ' ~ 'x' * 999) }}", r'refuses .*: "no \ufffd\[31m way x{187}\.\.\."'),
        ("{{ raise_exception }}", "it uses a partial"),
        ("x" * 256_001, "256,001 characters"),
        ("{% set x = 1 %}{{ x() }}", "it calls an int"),
    ],
)  # fmt: skip
def test_errors_are_one_line_that_says_what_to_do(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words) as caught:
        render(source, user("?"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("bad", [b"bytes", {1, 2}, object(), {1: 2}, 1j, len])
def test_data_that_is_not_plain_is_the_callers_mistake(bad: Any) -> None:
    with pytest.raises(UsageError, match="in messages, tools or options"):
        render("", {"role": "user", "content": bad})
    with pytest.raises(UsageError, match="in messages, tools or options"):
        render("", option=bad)


def test_messages_inside_themselves_are_the_callers_mistake() -> None:
    message: Message = {"role": "user"}
    message["content"] = [message]
    with pytest.raises(UsageError, match="nested"):
        render("", message)


# -- hostile templates ----------------------------------------------------------------------------------------------


def test_nothing_of_python_is_seen() -> None:
    for name, source in hostile_templates.HARMLESS.items():
        assert set(render(source, user("?"))) <= set("[]Undefined, "), name


def test_the_lists_of_what_can_be_called_are_closed() -> None:
    """One more is a decision: it has to pay for what it makes."""
    assert set(GLOBALS) == {"range", "dict", "namespace", "raise_exception"}
    assert set(FILTERS) == {
        "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format",
        "from_json", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject",
        "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title",
        "tojson", "trim", "unique", "upper",
    }  # fmt: skip
    assert set(TESTS) - set(jinja2.tests.TESTS) == set()
    assert set(jinja2.tests.TESTS) - set(TESTS) == {"filter", "test", "escaped"}
    assert {kind.__name__: sorted(names) for kind, names in METHODS.items()} == {
        "str": [
            "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isdecimal",
            "isdigit", "islower", "isnumeric", "isspace", "isupper", "join", "lower", "lstrip", "removeprefix",
            "removesuffix", "replace", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase",
            "title", "upper",
        ],
        "dict": ["get", "items", "keys", "values"],
        "list": ["append", "pop"],
        "LoopContext": ["changed", "cycle"],
    }  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and limits of memory")
@pytest.mark.parametrize(
    "tier", ["chosen", *(pytest.param(tier, marks=pytest.mark.slow) for tier in ("hostile", "heavy"))]
)
def test_templates_that_were_made_to_hurt(tier: str) -> None:
    """Refused in one line, with little memory; what is only heavy may also be paid for."""
    command = [sys.executable, hostile_templates.__file__, tier]
    outcomes = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert set(outcomes) == set(hostile_templates.TIERS[tier])
    fine = "TemplateError: (the|a) chat template " + ("|a text of " if tier == "heavy" else "")
    for name, outcome in outcomes.items():
        assert re.match(fine, outcome["said"]), (name, outcome)
        assert len(outcome["said"]) < 400 and outcome["said"].isprintable(), (name, outcome)
        assert "there is no memory" not in outcome["said"], (name, outcome)
        assert outcome["megabytes"] < 300, (name, outcome)


def test_the_next_render_has_a_budget_of_its_own() -> None:
    for name in ("double", "macro", "loops side by side"):
        with pytest.raises(TemplateError):
            render(hostile_templates.HOSTILE[name], user("?"))
    assert render("{{ 'x' * 1000000 }}") == "x" * 1_000_000
