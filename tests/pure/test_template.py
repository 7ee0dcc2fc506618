"""Chat templates: what the common families write, and templates that were made to hurt.

As a program this file renders every hostile template in a process of its own, with a limit of memory and of time, and
prints what became of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgekv.errors import ModelError, TemplateError, UsageError
from edgekv.template import PLAIN, PLAIN_STOPS, Template

FOLDER = Path(__file__).parents[1] / "data" / "templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
NOW = datetime(2026, 3, 4, 5, 6)
Message = dict[str, Any]


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
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "서울"}}\n</tool_call><|im_end|>\n'
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


def bare(source: str, variables: dict[str, Any]) -> str:
    """What Jinja itself makes of a template, in transformers' settings."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals |= {"raise_exception": refuse, "strftime_now": NOW.strftime}
    return environment.from_string(source).render({"bos_token": "<s>", "eos_token": "</s>", "tools": None, **variables})


ROLES = st.sampled_from(["user", "assistant", "system", "tool"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=20)}), min_size=1, max_size=6)


@pytest.mark.parametrize("name", NAMES)
@given(messages=MESSAGES, add=st.booleans())
def test_the_sandbox_writes_what_jinja_writes(name: str, messages: list[Message], add: bool) -> None:
    template = load(name)
    try:
        wanted: str | None = bare(template.source, {"messages": messages, "add_generation_prompt": add})
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
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "023"),
        ("{% for i in range(6) if i is odd %}{{ loop.index }}{{ i }}{{ ',' if not loop.last }}{% endfor %}", "11,23,35"),
        ("{% for a, b in {'x': 1}.items() %}{{ a ~ b }}{% else %}none{% endfor %}", "x1"),
        ("{% macro f(a, b='!') %}<{{ a }}{{ b }}>{% endmacro %}{{ f('x') }}{{ f('y', b='?') }}", "<x!><y?>"),
        ("{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}x{% endcall %}", "[x]"),
        ("{% set ns = namespace(n=0) %}{% for i in range(4) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "6"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x|upper }}{% filter trim %}  b {% endfilter %}", "A1b"),
        ("{% set l = [] %}{% set _ = l.append('a') %}{% set _ = l.append('b') %}{{ l.pop(0) }}{{ l }}", "a['b']"),
        ("{{ 'a-b'.split('-') }}{{ 'abc'[::-1] }}{{ 'abc'[1:] }}{{ [1, 2, 3][-2:] }}{{ 'abc'[0] }}", "['a', 'b']cbabc[2, 3]a"),
        ("{{ 'x %s %d' % ('a', 2) }}{{ '%.1f'|format(1.25) }}{{ '{} {n:>3}'.format(1, n=2) }}", "x a 21.21   2"),
        ("{{ 'a' in {'a': 1} }}{{ 'b' not in 'abc' }}{{ 1 < 2 < 3 }}{{ 3 in [1, 2] }}", "TrueFalseTrueFalse"),
        ("{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 3 }}{{ -1 + 2 }}{{ 'ab' * 2 }}{{ [1] + [2] }}", "3181abab[1, 2]"),
        ("{{ [3, 1, 2]|sort|join('-') }}{{ {'b': 1, 'a': 2}|dictsort }}{{ [1, 2]|sum }}", "1-2-3[('a', 2), ('b', 1)]3"),
        ("{{ ['a', 'A', 'b']|unique|list }}{{ [1, 3]|max }}{{ ' x '|trim }}{{ 'x'|safe + '<' }}", "['a', 'b']3xx<"),
        ("{{ [{'a': {'b': 1}}]|map(attribute='a.b')|list }}{{ ['x']|map('upper')|first }}", "[1]X"),
        ("{{ [{'r': 1}, {'r': 2}]|selectattr('r', 'equalto', 2)|list }}{{ none|selectattr('r')|list }}", "[{'r': 2}][]"),
        ("{{ 'a\nb'|indent(2) }}{{ 'a'|indent('> ', true) }}{{ 'abcabc'|replace('b', '', 1) }}", "a\n  b> aacabc"),
        ("{{ '3'|int + 1 }}{{ 'x'|int(7) }}{{ '1.5'|float }}{{ 2.567|round(1) }}{{ -3|abs }}", "471.52.6-3"),
        ("{{ undefined_thing }}{{ undefined_thing|default('d') }}{{ undefined_thing is defined }}", "dFalse"),
        ("{{ strftime_now('%d %b %Y') }}", "04 Mar 2026"),
        ("{{ 'a&b'|e }}{{ 'straße'|title }}{{ 'x' is string }}{{ {} is mapping }}{{ 'A' is upper }}", "a&amp;bStraßeTrueTrueTrue"),
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


def test_a_long_chat_renders_quickly() -> None:
    messages = [system("Terse.")] + [user("lorem ipsum " * 50), assistant("짧은 답 🙂 " * 50)] * 1500
    began = time.monotonic()
    for name in NAMES:
        assert load(name).render(messages).count("lorem ipsum") == 75_000
    assert time.monotonic() - began < 20  # a second or two; a budget that is too small refuses


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
        ("{{ raise_exception('no \x1b[31m\nway ' ~ 'x' * 999) }}", r'refuses .*: "no \ufffd\[31m way x{100,190}\.\.\."; '),
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

GROW = "{% set ns = namespace(s='SEED') %}{% for i in range(99) %}{% set ns.s = STEP %}{% endfor %}"
#: ``big`` is a text of 20 million characters, made within the budget.
BIG = "{% set big = 'x' * 20000000 %}"
#: ``a`` and ``b`` hold nothing but one another's likes, forty levels deep: 2 ** 40 entries to a walk that does not count.
DEEP = "{% set ns = namespace(a=BRACKET, b=BRACKET) %}{% for i in range(40) %}{% set ns.a = PAIR_A %}{% set ns.b = PAIR_B %}{% endfor %}"
LISTS = DEEP.replace("BRACKET", "[]").replace("PAIR_A", "[ns.a, ns.a]").replace("PAIR_B", "[ns.b, ns.b]")
TUPLES = DEEP.replace("BRACKET", "()").replace("PAIR_A", "(ns.a, ns.a)").replace("PAIR_B", "(ns.b, ns.b)")
DICTS = (
    DEEP.replace("BRACKET", "{}")
    .replace("PAIR_A", "{'a': ns.a, 'b': ns.a}")
    .replace("PAIR_B", "{'a': ns.b, 'b': ns.b}")
)
CHAIN = "{% set ns = namespace(a=(1,)) %}{% for i in range(90000) %}{% set ns.a = (ns.a,) %}{% endfor %}"


def grow(seed: str, step: str) -> str:
    return GROW.replace("SEED", seed).replace("STEP", step)


HOSTILE: dict[str, str] = {
    # reaching Python
    "class": "{{ ''.__class__.__mro__ }}",
    "class item": "{{ ''['__class__']['__mro__'] }}",
    "class call": "{{ ''.__class__() }}",
    "class by attribute": "{{ ([{}]|map(attribute='__class__.__init__')|first).x }}",
    "class by attr": "{{ ''|attr('__class__') }}",
    "class by sort": "{{ (['', 'a']|sort(attribute='__class__.__name__.x')|first).x.y }}",
    "globals": "{{ raise_exception.__globals__['os'] }}",
    "partial": "{{ namespace.func.__globals__.x }}",
    "partial call": "{{ range.func(3).x.y }}",
    "macro internals": "{% macro m() %}{% endmacro %}{{ m._func.__globals__.x }}",
    "macro environment": "{% macro m() %}{% endmacro %}{{ m._environment.filters.x }}",
    "namespace internals": "{{ namespace(a=1)._Namespace__attrs.a }}",
    "namespace class": "{{ namespace(a=1).__class__.__init__.__globals__ }}",
    "loop internals": "{% for i in [1] %}{{ loop._iterator.gi_frame.x }}{% endfor %}",
    "loop class": "{% for i in [1] %}{{ loop.__class__.__init__ }}{% endfor %}",
    "self": "{{ self._TemplateReference__context.environment }}",
    "undefined internals": "{{ nosuch._fail_with_undefined_error.__globals__ }}",
    "method internals": "{{ 'x'.join.__self__.x }}",
    "method func": "{{ 'x'.upper.func.__globals__.x }}",
    "generator": "{{ ([1]|map('string')).gi_frame.f_globals }}",
    "str.mro": "{{ ''.mro() }}",
    "format attribute": "{{ '{0.__class__.__init__}'.format('x') }}",
    "format item": "{{ '{0[__class__]}'.format('x') }}",
    "format keyword": "{{ '{x.__class__}'.format(x=1) }}",
    "format map": "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "format nested": "{{ '{:{}}'.format('x', 999999999) }}",
    "format method of a list": "{{ (['{0.__class__}'|attr('format')]|first)('x') }}",
    "encode": "{{ 'x'.encode().x }}",
    "dict update": "{{ {}.update({'a': 1}) }}",
    "messages update": "{{ messages[0].update({'role': 'x'}) }}",
    "messages clear": "{{ messages.clear() }}",
    "messages sort": "{{ messages.sort() }}",
    "globals of jinja": "{{ lipsum() }}",
    "cycler": "{{ cycler.__init__.__globals__ }}",
    "joiner": "{{ joiner() }}",
    "request": "{{ config.items() }}",
    "import": "{% import 'x' as y %}",
    "from import": "{% from 'x' import y %}",
    "include": "{% include 'x' %}",
    "include that may miss": "{% include 'x' ignore missing %}",
    "include of a file": "{% include '/etc/passwd' %}",
    "extends": "{% extends 'x' %}",
    "block": "{% block a %}{% endblock %}",
    "autoescape": "{% autoescape true %}{% endautoescape %}",
    "do": "{% do x %}",
    "trans": "{% trans %}x{% endtrans %}",
    "debug": "{% debug %}",
    "call of a text": "{{ 'x'() }}",
    "call of a message": "{{ messages[0]() }}",
    "shadowed guard": "{% set environment = 1 %}{% set measured = 1 %}{{ 'a' * 10 ** 10 }}",
    "shadowed concat": "{% set concatenated = range %}{% set concat = range %}" + grow("x", "ns.s ~ ns.s"),
    "unknown filter": "{% if true %}{{ 'x'|pprint }}{% endif %}",
    "random": "{{ [1]|random }}",
    "xmlattr": "{{ {}|xmlattr }}",
    "unknown test": "{% if 'x' is filter %}{% endif %}",
    "star": "{{ range(*[9, 99]) }}",
    "double star": "{{ dict(**{'a': 1}) }}",
    "star of a text": "{% macro m() %}{% endmacro %}{{ m(*('x' * 30000000)) }}",
    # growing
    "repeat": "{{ 'a' * 10 ** 10 }}",
    "repeat the other way": "{{ 10 ** 10 * 'a' }}",
    "repeat a list": "{{ ([1] * 10 ** 10)|length }}",
    "repeat a tuple": "{{ ((1,) * 10 ** 10)|length }}",
    "repeat emoji": "{{ '\U0001f642' * 10 ** 8 }}",
    "double": grow("x", "ns.s + ns.s"),
    "double by tilde": grow("x", "ns.s ~ ns.s"),
    "double by join": grow("x", "[ns.s, ns.s]|join"),
    "double by method": grow("x", "''.join([ns.s, ns.s])"),
    "double by format": grow("x", "'{0}{0}'.format(ns.s)"),
    "double by keyword": grow("x", "'{a}{a}'.format(a=ns.s)"),
    "double by percent": grow("x", "'%s%s' % (ns.s, ns.s)"),
    "double by mapping": grow("x", "'%(a)s%(a)s' % {'a': ns.s}"),
    "double by filter": grow("x", "'%s%s'|format(ns.s, ns.s)"),
    "double by replace": grow("x", "ns.s|replace('x', 'xx')"),
    "double by method replace": grow("x", "ns.s.replace('x', 'xx')"),
    "double by nothing": grow("x", "ns.s|replace('', 'x')"),
    "double by escape": grow("&", "(ns.s ~ ns.s)|e"),
    "double by json": grow("x", "ns.s|tojson|tojson"),
    "double by repr": grow("x", "[ns.s, ns.s]|string"),
    "double by macro": "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}" + grow("x", "m(ns.s)"),
    "double by block": GROW.replace("{% set ns.s = STEP %}", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}").replace("SEED", "x"),
    "double by filter block": GROW.replace(
        "{% set ns.s = STEP %}", "{% set ns.s %}{% filter trim %}{{ ns.s }}x{{ ns.s }}{% endfilter %}{% endset %}"
    ).replace("SEED", "x"),
    "double a list": grow("x", "ns.s|list + ns.s|list"),
    "double by indent": grow("x", "('\n' ~ ns.s)|indent(ns.s|length)"),
    "upper of sharp s": "{{ ('\u0390' * 30000000)|upper }}",
    "print again and again": BIG + "{% for i in range(100000) %}{{ big }}{% endfor %}",
    "print to a variable": BIG + "{% set t %}{% for i in range(100000) %}{{ big }}{% endfor %}{% endset %}",
    "print data": "{% for i in range(100000) %}" + "x" * 200_000 + "{% endfor %}",
    "print in a macro": BIG + "{% macro m() %}{% for i in range(999) %}{{ big }}{% endfor %}{% endmacro %}{{ m() }}",
    "keep all": BIG + "{% set l = [] %}{% for i in range(100000) %}{% set _ = l.append(big ~ i) %}{% endfor %}",
    "keep slices": BIG + "{% set l = [] %}{% for i in range(100000) %}{% set _ = l.append(big[i:]) %}{% endfor %}",
    "slices without a loop": BIG + "{{ [" + "big[1:]," * 1500 + "]|length }}",
    "upper without a loop": BIG + "{{ [" + "big|upper," * 1500 + "]|length }}",
    "lower tests without a loop": BIG + "{% set a = 'A' ~ big %}{{ [" + "a is lower," * 1500 + "]|length }}",
    "look-ups without a loop": "{% set a = 'x' * 9000000 %}{% set b = a ~ '' %}{% set d = {a: 1} %}{{ [" + "d[b]," * 2000 + "]|length }}",
    "center": "{{ 'x'|center(10 ** 10) }}",
    "center method": "{{ 'x'.center(10 ** 10) }}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "zfill": "{{ 'x'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 10) }}",
    "translate": "{{ 'x'.translate({120: 'x' * 999999}) }}",
    "indent": "{{ 'a\nb'|indent(10 ** 10) }}",
    "indent first": "{{ 'a'|indent(10 ** 10, true) }}",
    "indent that pays back": "{{ 'a\nb'|indent(-10 ** 18) }}{{ 'a' * 10 ** 10 }}",
    "indent by nan": "{{ 'a\nb'|indent('nan'|float) }}{{ 'a' * 10 ** 10 }}",
    "replace by nan": "{{ 'aa'|replace('a', 'b', 'nan'|float) }}{{ 'a' * 10 ** 10 }}",
    "indent by text": BIG + "{{ ('\n' * 100000)|indent(big, blank=true) }}",
    "wordwrap": "{{ ('x ' * 10000)|wordwrap(1, wrapstring='x' * 10000) }}",
    "format width": "{{ '{:>9999999999}'.format('x') }}",
    "format precision": "{{ '{:.999999999f}'.format(1) }}",
    "percent width": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (9999999999, 1) }}",
    "percent precision": "{{ '%.999999999f' % 1 }}",
    "format filter width": "{{ '%9999999999s'|format('x') }}",
    "odd is a percent": "{{ '%9999999999d' is odd }}",
    "divisibleby is a percent": "{{ '%9999999999d' is divisibleby 3 }}",
    "select odd": "{{ ['%9999999999d']|select('odd')|list }}",
    "json indent": "{{ [1]|tojson(indent=10 ** 10) }}",
    "json indent text": "{{ [1, 2]|tojson(indent='x' * 9999) }}",
    "json separators": "{{ ([1] * 9999)|tojson(separators=('x' * 99999, ':')) }}",
    "json escapes": "{{ ('\U0001f642' * 15000000)|tojson(ensure_ascii=true) }}",
    "round": "{{ 5|round(-10 ** 10) }}",
    "round up": "{{ 5|round(10 ** 10, 'ceil') }}",
    "sum of lists": "{{ ([[1] * 1000] * 1000)|sum(start=[]) }}",
    "sum of texts": "{{ (['x' * 1000] * 1000)|sum(start='') }}",
    "split": "{{ (' x' * 9000000).split()|length }}",
    "split at a letter": "{{ ('x' * 9000000).split('x')|length }}",
    "splitlines": "{{ ('\n' * 9000000).splitlines()|length }}",
    "list of letters": "{{ ('\U0001f642' * 9000000)|list|length }}",
    "long path": "{{ [1]|map(attribute='a.' * 9000000)|list }}",
    "long path of numbers": "{{ [1]|map(attribute='9' * 900000)|list }}",
    "long paths to sort by": "{{ ([{}] * 9999)|sort(attribute='a,' * 9999) }}",
    "range": "{{ range(10 ** 9)|list }}",
    "huge range": "{{ range(2 ** 900)|list }}",
    "json of a generated text": "{{ ('[' ~ '[],' * 9000000 ~ '1]')|from_json|length }}",
    "nested json": "{{ ('[' * 200000)|from_json }}",
    "deep json": "{{ ('[' * 900 ~ ']' * 900)|from_json|string }}",
    "chain of namespaces": "{% set ns = namespace(a=1) %}{% for i in range(99999) %}{% set ns.a = namespace(a=ns.a, b=ns.a) %}{% endfor %}{{ 'x' * 10 ** 9 }}",
    "raise a long text": BIG + "{{ 'x' * 10 ** 9 }}{{ raise_exception(big) }}",
    "a long name": BIG + "{{ {}[big].x }}",
    # big integers
    "power": "{{ 9 ** (9 ** 9) }}",
    "power of power": "{{ (9 ** 999) ** 999 }}",
    "negative power": "{{ 9 ** -(9 ** 99) }}",
    "square": grow("x", "3 if ns.s == 'x' else ns.s * ns.s"),
    "long literal": "{{ 0x" + "f" * 100_000 + " // 0x" + "f" * 50_000 + " }}",
    "long numeral": "{{ ('f' * 9000000)|int(0, 16) }}",
    "long decimal": "{{ ('9' * 9000000)|int }}",
    "long float": "{{ ('9' * 9000000)|float }}",
    "long numerals": "{{ '1' * 4000|int }}" + "{{ ('1' * 4000)|int }}",
    # two ways to the same lists, many times over
    "print lists": LISTS + "{{ ns.a }}",
    "print lists as text": LISTS + "{{ ns.a|string|length }}",
    "join lists": LISTS + "{{ ns.a ~ '' }}",
    "lists as json": LISTS + "{{ ns.a|tojson }}",
    "compare lists": LISTS + "{{ ns.a == ns.b }}",
    "order lists": LISTS + "{{ ns.a < ns.b }}",
    "compare lists in a chain": LISTS + "{{ 1 < 2 == (ns.a == ns.b) }}",
    "compare lists by test": LISTS + "{{ ns.a is eq(ns.b) }}",
    "compare lists by filter": LISTS + "{{ [ns.a]|select('equalto', ns.b)|list }}",
    "list in lists": LISTS + "{{ ns.a in [ns.b] }}",
    "list not in lists": LISTS + "{{ ns.a not in [ns.b] }}",
    "list in lists by test": LISTS + "{{ ns.a is in([ns.b]) }}",
    "sort lists": LISTS + "{{ [ns.a, ns.b]|sort }}",
    "greatest list": LISTS + "{{ [ns.a, ns.b]|max }}",
    "loop changed": LISTS + "{% for i in [1, 2] %}{{ loop.changed(ns.a if i == 1 else ns.b) }}{% endfor %}",
    "hash tuples": TUPLES + "{{ {ns.a: 1} }}",
    "look tuples up": TUPLES + "{{ {}[ns.a] }}",
    "get tuples": TUPLES + "{{ {}.get(ns.a) }}",
    "tuples in a dict": TUPLES + "{{ ns.a in {} }}",
    "unique tuples": TUPLES + "{{ [ns.a, ns.b]|unique|list }}",
    "dict of tuples": TUPLES + "{{ dict([(ns.a, 1)]) }}",
    "index by tuples": TUPLES + "{{ [1][ns.a].x }}",
    "compare tuples": TUPLES + "{{ ns.a == ns.b }}",
    "percent of tuples": TUPLES + "{{ '%s%s' % ns.a }}",
    "format tuples": TUPLES + "{{ '{}'.format(ns.a) }}",
    "raise tuples": TUPLES + "{{ raise_exception(ns.a) }}",
    "compare dicts": DICTS + "{{ ns.a == ns.b }}",
    "dicts as json": DICTS + "{{ ns.a|tojson(indent=2) }}",
    "dict views": DICTS + "{{ ns.a.values() == ns.b.values() }}",
    "sort dicts": DICTS + "{{ ns.a|dictsort(by='value') }}",
    "hash a chain": CHAIN + "{{ {ns.a: 1} }}",
    "print a chain": CHAIN + "{{ ns.a }}",
    "compare a chain": CHAIN.replace("(a=(1,))", "(a=(1,))") + "{{ ns.a == (ns.a, 1) }}",
    "chain as json": CHAIN + "{{ ns.a|tojson }}",
    "list in itself": "{% set l = [] %}{% set _ = l.append(l) %}{{ l|tojson }}",
    "list in itself compared": "{% set l = [] %}{% set _ = l.append(l) %}{% set m = [] %}{% set _ = m.append(m) %}{{ l == m }}",
    "namespace in itself": "{% set n = namespace() %}{% set n.n = n %}{{ n }}",
    "colliding numbers": "{% set l = [] %}{% for i in range(100000) %}{% set _ = l.append(i * (2 ** 61 - 1)) %}{% endfor %}{{ l|unique|list|length }}",
    "colliding keys": "{{ {" + ",".join(f"{i * (2**61 - 1)}: 1" for i in range(1, 3000)) + "} }}",
    # going on for ever
    "loops": "{% for a in range(100000) %}" * 5 + "{% endfor %}" * 5,
    "loops that do nothing": "{% for a in range(100000) %}{% for b in range(100000) if b is none %}{% endfor %}{% endfor %}",
    "loops that skip": "{% for a in range(100000) %}{% for b in range(100000) %}{% continue %}{% endfor %}{% endfor %}",
    "loops side by side": "{% for a in range(100000) %}{% endfor %}" * 1000,
    "loops that filter": "{% for a in range(100000) %}{% for b in range(100000)|select('none') %}{% endfor %}{% endfor %}",
    "a loop with much in it": "{% for a in range(100000) %}" + "{% set b = a.x %}" * 2000 + "{% endfor %}",
    "a loop over letters": BIG + "{% for a in big %}{% endfor %}",
    "a list that grows": "{% set l = [1] %}{% for a in l %}{% set _ = l.append(1) %}{% endfor %}",
    "a list that grows slowly": "{% set l = [1] %}{% for a in l %}" + "{% set b = a.x %}" * 2000 + "{% set _ = l.append(1) %}{% endfor %}",
    "a list that gives way": "{% set l = [1] * 99999 %}{% for a in range(100000) %}{% for b in range(999) %}{% set _ = l.pop(0) %}{% set _ = l.append(1) %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "loop called": "{% for a in [1] %}{{ loop([1]) }}{% endfor %}",
    "macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "two macros": "{% macro m() %}{{ n() }}{% endmacro %}{% macro n() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro that doubles": "{% macro m(d) %}{% if d %}{{ m(d - 1) }}{{ m(d - 1) }}{% endif %}{% endmacro %}{{ m(45) }}",
    "macro that doubles unseen": "{% macro m(d) %}{% if d and m(d - 1) == '' and m(d - 1) == '' %}{% endif %}{% endmacro %}{{ m(45) }}",
    "macro by default": "{% macro m(a=m()) %}{% endmacro %}{{ m() }}",
    "macro with much in it": "{% macro m() %}" + "{% set b = a %}" * 2500 + "{% endmacro %}{% for a in range(100000) %}{{ m() }}{% endfor %}",
    "caller": "{% macro m() %}{{ caller() }}{% endmacro %}{% macro n() %}{% call m() %}{{ n() }}{% endcall %}{% endmacro %}{{ n() }}",
    "varargs": "{% macro m() %}{% set n.a = varargs %}{% endmacro %}{% set n = namespace(a=1) %}{% for i in range(9999) %}{{ m(n.a) }}{% endfor %}{{ {n.a: 1} }}",
    "search": "{% set a = 'a' * 9000000 %}{% set b = 'a' * 900000 ~ 'b' ~ 'a' * 900000 %}{% for i in range(9999) %}{{ b in a }}{% endfor %}",
    "search from behind": "{% set a = 'a' * 9000000 %}{{ a.rsplit('b' ~ 'a' * 900000) }}",
    "find from behind": "{{ ('a' * 9000000).rfind('b' ~ 'a' * 900000) }}",
    "strip": "{{ ('a' * 9000000).strip('b' * 9000000 ~ 'a') }}",
    "trim": "{{ ('a' * 9000000)|trim('b' * 9000000 ~ 'a') }}",
    "prefixes": "{% set p = 'a' * 900000 %}{{ (p ~ 'a').startswith([p ~ 'b'] * 9 ~ '') }}{% for i in range(99999) %}{{ p.startswith((p, p, p)) }}{% endfor %}",
    "map of maps": "{{ (range(100000)|map('string')|list * 99)|map('upper')|map('lower')|list }}",
    "sort": "{{ (['x' * 99999] * 9999)|sort }}",
    "strftime": "{{ strftime_now('%Y' * 9999999) }}",
    "strftime width": "{{ strftime_now('%999999999Y')[999999].x }}",
    # deep sources
    "parentheses": "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
    "open parentheses": "{{ " + "(" * 100_000,
    "brackets": "{{ " + "[" * 10_000 + "]" * 10_000 + " }}",
    "braces": "{{ " + "{1:" * 10_000 + "1" + "}" * 10_000 + " }}",
    "subscripts": "{{ " + "a[" * 10_000 + "1" + "]" * 10_000 + " }}",
    "arguments": "{{ " + "a(b=" * 10_000 + "1" + ")" * 10_000 + " }}",
    "nots": "{{ " + "not " * 50_000 + "a }}",
    "minus signs": "{{ " + "-" * 200_000 + "1 }}",
    "ifs": "{% if a %}" * 20_000,
    "whole ifs": "{% if a %}" * 5_000 + "{% endif %}" * 5_000,
    "fors": "{% for a in b %}" * 5_000 + "{% endfor %}" * 5_000,
    "few fors": "{% for a in b %}" * 40 + "{% endfor %}" * 40,
    "sets": "{% set x %}" * 10_000,
    "macros in macros": "{% macro a() %}" * 10_000,
    "generations": "{% generation %}" * 10_000,
    "elses": "{{ a" + " if b else c" * 20_000 + " }}",
    "elifs": "{% if a %}" + "{% elif b %}" * 12_000 + "{% endif %}",
    "targets": "{% set " + "(" * 10_000 + "a" + ")" * 10_000 + " = 1 %}",
    "dots": "{{ a" + ".b" * 100_000 + " }}",
    "calls": "{{ a" + "()" * 100_000 + " }}",
    "filters": "{{ a" + "|trim" * 40_000 + " }}",
    "sums": "{{ a" + "+b" * 100_000 + " }}",
    "ands": "{{ a" + " and b" * 40_000 + " }}",
    "comparisons": "{{ a" + "<b" * 100_000 + " }}",
    "powers": "{{ a" + "**b" * 80_000 + " }}",
    "many outputs": "{{a}}" * 50_000,
    "many names": "".join(f"{{%if b%}}{{%set a{i}=1%}}{{%endif%}}" for i in range(6_000)),
    "many macros": "".join(f"{{%macro a{i}()%}}{{%endmacro%}}" for i in range(6_000)),
    "comments": "{#" * 120_000,
    "raw": "{% raw %}" * 28_000,
    "surrogate": "{{ '\udcff' }}{{ nosuch.x }}",
}  # fmt: skip
#: What gets away with it, and tells nothing.
HARMLESS: dict[str, str] = {
    "class": "{{ ''.__class__ }}{{ ''['__class__'] }}{{ [''.__class__] }}",
    "environment": "{{ environment }}{{ context }}{{ resolve }}{{ undefined }}{{ concat }}",
    "self": "{{ self.x }}{{ self['_TemplateReference__context'] }}",
    "loop": "{% for i in [1] %}{{ loop._iterable }}{{ loop['_recurse'] }}{% endfor %}",
    "namespace": "{{ namespace()._Namespace__attrs }}{{ namespace(a=1)['__dict__'] }}",
    "macro": "{% macro m() %}{% endmacro %}{{ m.name }}{{ m._func }}{{ m.arguments }}",
    "map": "{{ ['x']|map(attribute='__class__')|join }}{{ ['x']|map(attribute='__len__.__self__')|join }}",
    "method": "{{ ''.upper.__self__ }}{{ ''.upper.func }}{{ {}.items.args }}",
    "range": "{{ range(3).start }}{{ range.func }}",
}
#: As deep as it comes, where a program has told Python to let recursions go on.
DEEP_SOURCES = [
    "parentheses", "open parentheses", "brackets", "braces", "nots", "minus signs", "ifs", "whole ifs", "sets", "elses",
    "dots", "calls", "sums", "filters", "elifs", "macro", "caller", "hash a chain", "print a chain", "nested json",
]  # fmt: skip

MEGABYTE = 1 << 20
LIMIT = 900 * MEGABYTE  # more than this growth is refused by the system; the tests allow a third
SECONDS = 10


@pytest.mark.parametrize("name", HARMLESS)
def test_nothing_of_python_is_seen(name: str) -> None:
    text = render(HARMLESS[name], user("?"))
    assert set(text) <= set("[]Undefined, ")


def test_the_lists_of_what_can_be_called_are_closed() -> None:
    """A filter, test or method more is a decision: it must pay for what it makes."""
    from edgekv.template.filters import FILTERS, GLOBALS, TESTS
    from edgekv.template.methods import METHODS

    assert set(GLOBALS) == {"range", "dict", "namespace", "raise_exception"}
    assert len(FILTERS) == 39 and len(TESTS) == 36
    assert {kind.__name__: len(names) for kind, names in METHODS.items()} == {
        "str": 30, "dict": 4, "list": 2, "LoopContext": 2,
    }  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """What became of every hostile template, each in a process of its own."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork and limits of memory")
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True, timeout=900)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", [*HOSTILE, *(f"{name}, deeper" for name in DEEP_SOURCES)])
def test_a_hostile_template_is_refused(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    outcome = outcomes[name]
    assert outcome["error"].startswith("TemplateError: the chat template "), outcome
    assert "there is no memory" not in outcome["error"], outcome
    assert len(outcome["error"]) < 400 and outcome["error"].isprintable()
    assert outcome["seconds"] < SECONDS and outcome["megabytes"] < 300, outcome


def test_the_process_is_as_before() -> None:
    """After refusals the next render has a budget of its own."""
    for name in ("double", "macro", "loops side by side"):
        with pytest.raises(TemplateError):
            render(HOSTILE[name], user("?"))
    assert render("{{ 'x' * 1000000 }}") == "x" * 1_000_000


# -- as a program ---------------------------------------------------------------------------------------------------


def attempt(source: str) -> str:
    try:
        text = render(source, user("?"), assistant("!"))
    except Exception as err:
        return f"{type(err).__name__}: {err}"
    return f"a text of {len(text):,} characters: {text[:60]!r}"


def in_a_child(work: Callable[[], str]) -> dict[str, Any]:
    """Runs in a fork, under limits: what it says, how long it took and how much memory came to that of this process."""
    import resource
    import signal

    import psutil

    before, began = psutil.Process().memory_info(), time.monotonic()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(4 * SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (before.vms + LIMIT, before.vms + LIMIT))
        os.write(theirs, work()[:1000].encode("utf-8", "replace"))
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read().decode()
    _, status, usage = os.wait4(child, 0)
    grown = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) - before.rss
    seconds = time.monotonic() - began
    return {"error": said or f"status {status}", "seconds": seconds, "megabytes": grown / MEGABYTE}


def deeper(source: str) -> str:
    sys.setrecursionlimit(1_000_000)
    return attempt(source)


def attempts() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, source in HOSTILE.items():
        yield name, in_a_child(lambda source=source: attempt(source))  # type: ignore[misc]
    for name in DEEP_SOURCES:
        yield f"{name}, deeper", in_a_child(lambda name=name: deeper(HOSTILE[name]))  # type: ignore[misc]


if __name__ == "__main__":
    render(PLAIN)  # what Python imports late is imported
    print(json.dumps(dict(attempts())))
