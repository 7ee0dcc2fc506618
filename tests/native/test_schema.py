"""Structured output: what a grammar lets through is JSON and fits the schema, or the schema is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgekv import Sampling, Session, errors, schema
from helpers import TEXT, byte_tokens, open_tiny

TinyPath = Callable[..., Path]

REF = {"$ref": "#/$defs/N"}
PYDANTIC = {
    "$defs": {
        "Cat": {
            "properties": {"kind": {"const": "cat", "type": "string"}, "lives": {"type": "integer", "maximum": 9}},
            "required": ["kind"],
            "title": "Cat",
            "type": "object",
        },
        "Dog": {"properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"], "type": "object"},
    },
    "properties": {
        "pet": {
            "discriminator": {"propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        },
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}], "default": None},
    },
    "required": ["pet"],
    "type": "object",
}
HELD: list[Any] = [
    {},
    True,
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": ["string", "null", "integer"], "maxLength": 2, "minimum": -3, "maximum": 12},
    {"maxLength": 3},
    {"type": ["string", "null"], "enum": ["a", None, 5]},
    {"const": {"a": ['q"\\\n\x7f', "é😀\u2028\ud800", 1.5]}},
    {"enum": [1, True, None, "x\ty"], "title": "t"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "integer", "minimum": 17, "maximum": 1203},
    {"type": "integer", "exclusiveMinimum": -12, "exclusiveMaximum": 3},
    {"type": "integer", "minimum": 0.5},
    {"type": "array", "maxItems": 2},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "minItems": 1},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": False},
    {"type": "object", "properties": {"b": {"const": 1}, "a": {"const": 2}, "c": {"const": 3}}, "required": ["a"]},
    {"properties": {"한 글": {"const": "값"}, 'q"\\\n': {"type": "null"}, "": {"const": 0}}, "required": ["", "한 글"]},
    {"type": "object", "properties": {"a": {"const": 1}, "ab": {"const": 2}}, "additionalProperties": {"type": "null"}},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "required": ["x"]},
    {"type": "object", "properties": {}},
    {"properties": {"minimum": {"type": "null"}}, "required": ["minimum"], "additionalProperties": False},
    {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]},
    {"oneOf": [{"type": "boolean"}, {"const": "a"}, {"enum": ["b", 4]}, {"type": "null"}]},
    {"allOf": [{"type": "null"}], "description": "d"},
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"const": 2}}},
        ]
    },
    {"$defs": {"N": {"type": "object", "properties": {"v": {"const": 1}, "next": REF}, "required": ["v"]}}, **REF},
    {"$defs": {"N": {"type": "array", "items": REF, "maxItems": 2}}, **REF},
    {"type": "object", "properties": {"self": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["self"]},
    PYDANTIC,
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid")),
    *(
        {"type": "string", "pattern": pattern}
        for pattern in (
            r"^[A-Z]{2,3}-\d+$", r'^"[\w\s"\\]{0,3}\\$', r"^(a|b(c|d)?)+x?$", r"b", r"^a|^.{2}b$", r"^[^a\"]{3}.$",
            r"^\n[\t-\r]$",
            r"^(?:가|[ㄱ-힣])+\.\/$", r"^$", r"^x{0}y{0,2}$", r"^[-a][a-][\]\-]$",
        )
    ),
]  # fmt: skip
REFUSED: list[tuple[Any, str]] = [
    ({"type": "object", "properties": {"a": {"patternProperties": {}}}}, r"\$\.properties\.a: patternProperties"),
    ({"type": "number", "minimum": 0}, "minimum"),
    ({"type": "integer", "multipleOf": 2}, "multipleOf"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "no integer"),
    ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {}}, "contains"),
    ({"type": "array", "items": [{}]}, "prefixItems"),
    ({"type": "array", "items": False, "minItems": 1}, "minItems"),
    ({"type": "object", "minProperties": 1}, "minProperties"),
    ({"if": {}, "then": {}}, "if|then"),
    ({"not": {"type": "null"}}, "not"),
    ({"type": "string", "pattern": "^a$", "maxLength": 3}, "maxLength beside pattern"),
    ({"type": "string", "format": "email"}, "format 'email'"),
    ({"type": "string", "maxLength": 10**6}, "maxLength"),
    ({"type": "string", "minLength": "2"}, "minLength"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "oneOf"),
    ({"oneOf": [{"type": "null"}], "properties": {}}, "properties beside oneOf"),
    ({"allOf": [{"type": "string"}, {"maxLength": 2}]}, "allOf"),
    ({"$ref": "#/$defs/No"}, "leads nowhere"),
    ({"$ref": "https://example.invalid/x"}, "only '#/"),
    ({"$ref": "#"}, "itself"),
    ({"$defs": {"N": {"type": "object", "properties": {"n": REF}, "required": ["n"]}}, **REF}, "no finite JSON"),
    ({"type": "object", "required": ["a"], "properties": {}, "additionalProperties": False}, "'a' is no property"),
    ({"type": "nope"}, "type 'nope'"),
    ({"enum": []}, "no value"),
    ({"type": "string", "enum": [1]}, "no value"),
    (False, "false"),
    ([], "a schema is"),
    ("{", "no JSON"),
    ('{"const": NaN}', "JSON cannot hold"),
    ('{"type": "integer", "enum": [1e999]}', "no JSON"),
    *(
        ({"type": "string", "pattern": pattern}, "pattern")
        for pattern in ("(?=a)", r"\bx", r"a*?", r"(a)\1", "a^b", "[[]", "(", r"^[^\d]$", r"\D", "a{3000}", "[a",
            "[]", "a{2,1}", "a)", "a**")
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def session(tiny_path: TinyPath) -> Iterator[Session]:
    with open_tiny(tiny_path("llama"), n_ctx=2048) as session:
        session.append(TEXT)
        yield session


def say(session: Session, schema: Any, seed: int) -> tuple[str, str | None]:
    """What a random model says when held to a schema; text and lists are pressed to end."""
    bias = {byte_tokens(char.encode())[0]: 3.0 for char in '"}]'}
    start = len(session.tokens)
    sampling = Sampling(temperature=1.0, seed=seed, json_schema=schema, logit_bias=bias)
    said = session.generate(120, sampling=sampling).finish()
    session.rewind(start)
    return said.text, said.finish_reason


def check(text: str, schema: Any) -> None:
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


@pytest.mark.parametrize("schema", HELD, ids=str)
def test_what_is_said_is_json_and_fits(session: Session, schema: Any) -> None:
    reasons = set()
    for seed in range(2):
        text, reason = say(session, schema, seed)
        reasons.add(reason)
        if reason == "end":
            check(text, schema)
    assert "end" in reasons and reasons <= {"end", "length"}


@pytest.mark.parametrize(("wrong", "words"), REFUSED, ids=str)
def test_what_a_grammar_cannot_hold_is_refused_by_name(wrong: Any, words: str) -> None:
    with pytest.raises(errors.GrammarError, match=words):
        schema.to_gbnf(wrong)


NAMES = st.sampled_from(["a", "ab", "b", "한", 'q"', ""])
LOW, MORE = st.integers(0, 2), st.integers(0, 3)
VALUES = st.lists(st.text(max_size=3) | st.integers() | st.booleans(), min_size=1, max_size=3)


def bounded(kind: Any, low: int, more: int, what: tuple[str, str], **also: Any) -> dict[str, Any]:
    return {"type": kind, what[0]: low, what[1]: low + more, **also}


LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        bounded, st.just("integer"), st.integers(-999, 999), st.integers(0, 2000), st.just(("minimum", "maximum"))
    ),
    st.builds(bounded, st.just(["string", "null"]), LOW, MORE, st.just(("minLength", "maxLength"))),
    VALUES.map(lambda values: {"enum": values}),
)


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def an_object(properties: dict[str, Any], needed: set[str], more: Any) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "required": sorted(needed), **more}

    more = st.just({}) | st.just({"additionalProperties": False}) | inner.map(lambda s: {"additionalProperties": s})
    return st.one_of(
        st.builds(an_object, st.dictionaries(NAMES, inner, max_size=3), st.sets(st.just("a"), max_size=1), more).filter(
            lambda s: "a" in s["properties"] or not s["required"] or s.get("additionalProperties") is not False
        ),
        st.builds(bounded, st.just("array"), LOW, MORE, st.just(("minItems", "maxItems")), items=inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(lambda a, b: {"type": "array", "prefixItems": [a, b]}, inner, inner),
    )  # fmt: skip


@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=st.recursive(LEAVES, grown, max_leaves=5), seed=st.integers(0, 99))
def test_any_schema_of_the_subset_is_held(session: Session, schema: Any, seed: int) -> None:
    text, reason = say(session, schema, seed)
    if reason == "end":
        check(text, schema)
