"""JSON schema to GBNF: a subset that is held in full; every other keyword is refused with its name and place.

What is generated may be narrower than the schema (properties come in the schema's order, a number has at most 16
digits, an object with ``properties`` is closed unless ``additionalProperties`` opens it), never wider: what a grammar
of this module accepts parses as JSON and fits the schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import unquote

from .errors import GrammarError
from .json_pattern import CHAR, PatternError, literal, pattern_rule

#: Keywords that constrain nothing.
_ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"}
    | {"$schema", "$defs", "definitions", "discriminator"}
)
_OF_TYPE: Final = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set[str](),
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "object": {"properties", "required", "additionalProperties"},
    "boolean": set[str](),
    "null": set[str](),
}
_BOUNDS: Final = frozenset(_OF_TYPE["integer"])
_TYPED: Final = frozenset[str]().union(*_OF_TYPE.values())
_WHOLE: Final = ("$ref", "anyOf", "oneOf", "allOf")  # each stands alone
_KNOWN: Final = _ANNOTATIONS | _TYPED | {"type", "const", "enum", *_WHOLE}
_MOST: Final = 2000  # llama-grammar.cpp: MAX_REPETITION_THRESHOLD
_DIGITS: Final = 16
_DIGIT: Final = "[0-9]"

_MONTHS: Final = (
    '(("0" [13578] | "1" [02]) "-" ("0" [1-9] | [12] [0-9] | "3" [01])'
    ' | ("0" [469] | "11") "-" ("0" [1-9] | [12] [0-9] | "30") | "02-" ("0" [1-9] | "1" [0-9] | "2" [0-8]))'
)
_DATE: Final = f'[1-9] [0-9]{{3}} "-" {_MONTHS}'
_HOUR: Final = '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9]'
_TIME: Final = f'{_HOUR} ":" [0-5] [0-9] ("." [0-9]{{1,6}})? ("Z" | [+-] {_HOUR})'
_FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f'{_DATE} "T" {_TIME}',
    "uuid": '[0-9a-f]{8} "-" [0-9a-f]{4} "-" [0-9a-f]{4} "-" [0-9a-f]{4} "-" [0-9a-f]{12}',
}

_ANY: Final = {  # rules every grammar may refer to
    "ws": [['" "?']],
    "char": [[CHAR]],
    "string": [['"\\""', "char*", '"\\""']],
    "digits": [['("0" | [1-9] [0-9]{0,15})']],
    "integer": [['"-"?', "digits"]],
    "number": [['"-"?', "digits", '("." [0-9]{1,15})?', "([eE] [+-]? [0-9]{1,2})?"]],
    "boolean": [['"true"'], ['"false"']],
    "null": [['"null"']],
    "value": [["string"], ["number"], ["boolean"], ["null"], ["array"], ["object"]],
    "array": [['"["', "ws", '(value ("," ws value)*)?', "ws", '"]"']],
    "object": [['"{"', "ws", '(pair ("," ws pair)*)?', "ws", '"}"']],
    "pair": [["string", '":"', "ws", "value"]],
}


def to_gbnf(schema: str | bool | Mapping[str, Any]) -> str:
    """A JSON schema as GBNF; raises GrammarError, which names the keyword and its place, for what cannot be held."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, default=dict, allow_nan=False)
        root = json.loads(text)
        return _Converter(root).grammar()
    except GrammarError:
        raise
    except RecursionError:
        raise GrammarError("this JSON schema is nested too deeply for a grammar") from None
    except (TypeError, ValueError, OverflowError) as err:
        raise GrammarError(f"this JSON schema is no JSON: {err}") from err


class _Converter:
    """Rules: a name -> alternatives, each a sequence of terminals and of names of rules."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._rules: dict[str, list[list[str]]] = {name: list(rule) for name, rule in _ANY.items()}
        self._referred: dict[str, str] = {}

    def grammar(self) -> str:
        self._referred["#"] = "root"
        self._rules["root"] = []
        self._rules["root"] = [[self._rule(self._root, "$")]]
        self._drop_endless()
        if not self._rules["root"]:
            raise GrammarError("$: no finite JSON fits this schema, as it asks for itself again without end")
        lines = (
            f"{name} ::= {' | '.join(' '.join(parts) for parts in rule)}" for name, rule in self._rules.items() if rule
        )
        return "\n".join(lines) + "\n"

    def _drop_endless(self) -> None:
        """Leave alternatives out that nothing finite fits: generation would never end in them."""
        ends: set[str] = set()
        while True:
            more = {
                name
                for name, rule in self._rules.items()
                if name not in ends and any(all(p in ends or p not in self._rules for p in parts) for parts in rule)
            }
            if not more:
                break
            ends |= more
        for name, rule in self._rules.items():
            self._rules[name] = [parts for parts in rule if all(p in ends or p not in self._rules for p in parts)]

    def _add(self, alternatives: list[list[str]]) -> str:
        name = f"r{len(self._rules)}"
        self._rules[name] = alternatives
        return name

    # -- schemas ------------------------------------------------------------------------------------------------

    def _rule(self, schema: Any, at: str) -> str:
        """The name of the rule of a schema, which is at ``at``."""
        if schema is True:
            return "value"
        if schema is False:
            raise GrammarError(f"{at}: nothing fits the schema false")
        if not isinstance(schema, dict):
            raise GrammarError(f"{at}: a schema is an object, true or false")
        says = _constraints(schema, at)
        if whole := says & set(_WHOLE):
            return self._whole(schema, says, min(whole), at)
        if says & {"const", "enum"}:
            return self._add([[literal(_dumped(value, at))] for value in _values(schema, says, at)])
        kinds = _kinds(schema, at) or [kind for kind, own in _OF_TYPE.items() if says & own] or ["value"]
        if "number" in kinds and says & _BOUNDS:
            raise GrammarError(f"{at}: {min(says & _BOUNDS)} (a grammar can bound integers only)")
        rules = [self._of_kind(kind, schema, at) for kind in kinds]
        return rules[0] if len(rules) == 1 else self._add([[rule] for rule in rules])

    def _of_kind(self, kind: str, schema: Mapping[str, Any], at: str) -> str:
        says = _OF_TYPE.get(kind, set()) & set(schema)
        made: dict[str, Callable[[Mapping[str, Any], str], str]] = {
            "string": self._string,
            "integer": self._integer,
            "array": self._array,
            "object": self._object,
        }
        return made[kind](schema, at) if says else kind

    def _whole(self, schema: Mapping[str, Any], says: set[str], keyword: str, at: str) -> str:
        if beside := says - {keyword}:
            raise GrammarError(f"{at}: {min(beside)} beside {keyword}")
        if keyword == "$ref":
            return self._ref(schema["$ref"], at)
        parts = schema[keyword]
        if not isinstance(parts, list) or not parts:
            raise GrammarError(f"{at}: {keyword} is a list of schemas")
        if keyword == "allOf":
            return self._rule(parts[0] if len(parts) == 1 else self._merged(parts, at), f"{at}.allOf")
        if keyword == "oneOf":
            self._check_apart(parts, at)
        return self._add([[self._rule(part, f"{at}.{keyword}[{i}]")] for i, part in enumerate(parts)])

    def _ref(self, ref: Any, at: str) -> str:
        self._target(ref, at)
        if ref not in self._referred:
            name = self._referred[ref] = self._add([])
            self._rules[name] = [[self._rule(self._target(ref, at), str(ref))]]
        return self._referred[ref]

    def _target(self, ref: Any, at: str) -> Any:
        node, seen = self._root, {ref}
        for _ in range(_MOST):
            if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
                raise GrammarError(f"{at}: $ref {ref!r} (only '#/...' of the same schema can be followed)")
            node = self._root
            for part in ref.split("/")[1:]:
                key = unquote(part).replace("~1", "/").replace("~0", "~")
                if isinstance(node, list) and key.isascii() and key.isdigit() and int(key) < len(node):
                    node = node[int(key)]
                elif isinstance(node, dict) and key in node:
                    node = node[key]
                else:
                    raise GrammarError(f"{at}: $ref {ref!r} leads nowhere")
            if not (isinstance(node, dict) and "$ref" in node):
                return node
            _constraints(node, ref)
            if set(node) - _ANNOTATIONS != {"$ref"}:
                return node  # refused where it is converted
            ref = node["$ref"]
            if ref in seen:
                raise GrammarError(f"{at}: $ref {ref!r} refers to itself")
            seen.add(ref)
        raise GrammarError(f"{at}: $ref chain is too long")

    def _resolved(self, schema: Any, at: str) -> Any:
        return self._target(schema["$ref"], at) if isinstance(schema, dict) and "$ref" in schema else schema

    def _merged(self, parts: list[Any], at: str) -> dict[str, Any]:
        """One object schema for several that name different properties."""
        properties: dict[str, Any] = {}
        required: list[str] = []
        for i, part in enumerate(parts):
            node, place = self._resolved(part, at), f"{at}.allOf[{i}]"
            if not isinstance(node, dict) or node.get("type") != "object":
                raise GrammarError(f"{place}: allOf of several schemas needs objects ('type': 'object')")
            if odd := _constraints(node, place) - {"type", "properties", "required"}:
                raise GrammarError(f"{place}: {min(odd)} inside allOf")
            own = _mapping(node.get("properties", {}), f"{place}.properties")
            if both := set(own) & set(properties):
                raise GrammarError(f"{place}.properties: {min(both)} is in two parts of allOf")
            properties |= own
            required += _names(node.get("required", []), f"{place}.required")
        return {"type": "object", "properties": properties, "required": required}

    def _check_apart(self, parts: list[Any], at: str) -> None:
        for i, part in enumerate(parts):
            for k in range(i):
                if not self._apart(part, parts[k], at):
                    raise GrammarError(f"{at}: oneOf, whose schemas {k} and {i} may both fit (anyOf allows that)")

    def _apart(self, a: Any, b: Any, at: str) -> bool:
        """Whether nothing fits both schemas, as far as that can be seen."""
        a, b = self._resolved(a, at), self._resolved(b, at)
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        if "const" in a or "enum" in a:
            values = _values(a, _constraints(a, at), at)
            if "const" in b or "enum" in b:
                others = _values(b, _constraints(b, at), at)
                return not any(value == other for value in values for other in others)
            kinds = _kinds(b, at)
            return bool(kinds) and not any(_is(value, kind) for value in values for kind in kinds)
        if "const" in b or "enum" in b:
            return self._apart(b, a, at)
        ours, theirs = (set(_kinds(node, at)) for node in (a, b))
        if not ours or not theirs:
            return False
        if both := (ours & theirs) | ({"integer"} if {"integer", "number"} <= ours | theirs else set()):
            return both == {"object"} and self._told_apart(a, b, at)
        return True

    def _told_apart(self, a: Mapping[str, Any], b: Mapping[str, Any], at: str) -> bool:
        """Whether a property that both objects require cannot be the same in both."""
        needed = set(_names(a.get("required", []), at)) & set(_names(b.get("required", []), at))
        own, other = (_mapping(node.get("properties", {}), at) for node in (a, b))
        return any(self._apart(own[name], other[name], at) for name in needed & set(own) & set(other))

    # -- kinds --------------------------------------------------------------------------------------------------

    def _string(self, schema: Mapping[str, Any], at: str) -> str:
        says = set(schema) & _OF_TYPE["string"]
        if len(says) > 1 and says & {"pattern", "format"}:
            raise GrammarError(f"{at}: {' beside '.join(sorted(says))}")
        if "pattern" in says:
            try:
                inner = pattern_rule(schema["pattern"])
            except PatternError as err:
                raise GrammarError(f"{at}: pattern: {err}") from None
        elif "format" in says:
            if schema["format"] not in _FORMATS:
                raise GrammarError(f"{at}: format {schema['format']!r} (known are {', '.join(_FORMATS)})")
            inner = _FORMATS[schema["format"]]
        else:
            inner = _repeated("char", *_counts(schema, "minLength", "maxLength", at))
        return self._add([['"\\""', f"({inner})", '"\\""']])

    def _integer(self, schema: Mapping[str, Any], at: str) -> str:
        low: list[int] = []
        high: list[int] = []
        for key in _OF_TYPE["integer"] & set(schema):
            value = schema[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise GrammarError(f"{at}: {key} must be a number")
            if key == "minimum":
                low.append(math.ceil(value))
            elif key == "exclusiveMinimum":
                low.append(math.floor(value) + 1)
            elif key == "maximum":
                high.append(math.floor(value))
            else:
                high.append(math.ceil(value) - 1)
        most: int = 10**_DIGITS - 1
        least, greatest = max(low, default=-most), min(high, default=most)
        if least > greatest or max(abs(least), abs(greatest)) > most:
            raise GrammarError(f"{at}: no integer of at most {_DIGITS} digits is in [{least}, {greatest}]")
        alternatives = [['"-"', digits] for digits in _between(max(1, -greatest), -least)]
        return self._add(alternatives + [[digits] for digits in _between(max(0, least), greatest)])

    def _array(self, schema: Mapping[str, Any], at: str) -> str:
        first = schema.get("prefixItems", [])
        if not isinstance(first, list):
            raise GrammarError(f"{at}: prefixItems is a list of schemas")
        if schema.get("uniqueItems", False) is not False:
            raise GrammarError(f"{at}: uniqueItems")
        least, most = _counts(schema, "minItems", "maxItems", at)
        rest = schema.get("items", not first)
        if isinstance(rest, list):
            raise GrammarError(f"{at}: items as a list (prefixItems is the keyword for that)")
        if rest is False:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and least > most:
            raise GrammarError(f"{at}: minItems asks for more items than there can be")
        items = [self._rule(item, f"{at}.prefixItems[{i}]") for i, item in enumerate(first[:most])]
        more = None if most is None else most - len(items)
        parts: list[str] = []
        for i, item in enumerate(items):
            parts += ['"," ws', item] if i else [item]
        if more == 0:
            return self._add([['"["', "ws", *parts, "ws", '"]"']])
        item = self._rule(rest, f"{at}.items")
        needed = max(0, least - len(items))
        tail = _repeated(f'("," ws {item})', max(0, needed - 1), None if more is None else more - 1)
        alternatives = [[*parts, *(['"," ws'] if parts else []), item, tail]]
        if not needed:
            alternatives.append(parts or ['""'])
        inner = self._add(alternatives)
        return self._add([['"["', "ws", inner, "ws", '"]"']])

    def _object(self, schema: Mapping[str, Any], at: str) -> str:
        properties = dict(_mapping(schema.get("properties", {}), f"{at}.properties"))
        required = _names(schema.get("required", []), f"{at}.required")
        more = schema.get("additionalProperties", "properties" not in schema)
        for name in required:
            if name not in properties:
                properties[name] = schema.get("additionalProperties", True)
                if properties[name] is False:
                    raise GrammarError(f"{at}.required: {name!r} is no property, and additionalProperties is false")
        end = [['""']]
        if more is not False:
            key = f'"\\"" {_no_key(properties)} "\\""'
            pair = self._add([[key, '":"', "ws", self._rule(more, f"{at}.additionalProperties")]])
            first, later = [[pair, self._rest(pair)], *end], [['"," ws', pair, self._rest(pair)], *end]
        else:
            first, later = end, end
        # From the last property to the first: what may follow before any was written, and after one was.
        for name, value in reversed(properties.items()):
            pair = self._add([[literal(_dumped(name, at)), '":"', "ws", self._rule(value, f"{at}.properties.{name}")]])
            then, skipped = self._add(later), self._add(first)
            first, later = [[pair, then]], [['"," ws', pair, then]]
            if name not in required:
                first, later = [*first, [skipped]], [*later, [then]]
        return self._add([['"{"', "ws", self._add(first), "ws", '"}"']])

    def _rest(self, pair: str) -> str:
        return f'("," ws {pair})*'


def _constraints(schema: Mapping[str, Any], at: str) -> set[str]:
    """The keywords that constrain; raises GrammarError for one that is not known here."""
    if "$id" in schema and at != "$":
        raise GrammarError(f"{at}: $id (only the whole schema may have one)")
    if unknown := set(schema) - _KNOWN - {"$id"}:
        raise GrammarError(f"{at}: {min(unknown)} cannot be held by a grammar; leave it out and check the answer")
    return set(schema) - _ANNOTATIONS - {"$id"}


def _kinds(schema: Mapping[str, Any], at: str) -> list[str]:
    """The types a schema declares, [] for none."""
    if "type" not in schema:
        return []
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not kinds or not all(isinstance(kind, str) and kind in _OF_TYPE for kind in kinds):
        raise GrammarError(f"{at}: type {schema['type']!r} (known are {', '.join(_OF_TYPE)})")
    return list(dict.fromkeys(kinds))


def _values(schema: Mapping[str, Any], says: set[str], at: str) -> list[Any]:
    """The values a const or an enum leaves."""
    if beside := says - {"const", "enum", "type"}:
        raise GrammarError(f"{at}: {min(beside)} beside {'const' if 'const' in says else 'enum'}")
    if {"const", "enum"} <= says:
        raise GrammarError(f"{at}: enum beside const")
    values = [schema["const"]] if "const" in says else schema["enum"]
    if not isinstance(values, list):
        raise GrammarError(f"{at}: enum is a list of values")
    kinds = _kinds(schema, at)
    left = [value for value in values if not kinds or any(_is(value, kind) for kind in kinds)]
    if not left:
        raise GrammarError(f"{at}: no value is left of the type that is asked for")
    return left


def _is(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a type of JSON schema."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {
        "string": isinstance(value, str),
        "integer": number and value == math.floor(value),
        "number": number,
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
        "boolean": isinstance(value, bool),
        "null": value is None,
    }[kind]


def _dumped(value: Any, at: str) -> str:
    """A value as JSON; characters beyond ASCII as they are, where they have UTF-8."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise GrammarError(f"{at}: a number that JSON cannot hold") from None
    return text if not re.search("[\ud800-\udfff\x7f]", text) else json.dumps(value).replace("\x7f", "\\u007f")


def _counts(schema: Mapping[str, Any], low: str, high: str, at: str) -> tuple[int, int | None]:
    for key in (low, high):
        value = schema.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise GrammarError(f"{at}: {key} must be a whole number in [0, {_MOST}] (a grammar counts no further)")
    least, most = schema.get(low, 0), schema.get(high)
    if most is not None and least > most:
        raise GrammarError(f"{at}: {low} is above {high}")
    return least, most


def _mapping(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise GrammarError(f"{at}: must be an object")
    return value


def _names(value: Any, at: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise GrammarError(f"{at}: must be a list of names")
    return list(dict.fromkeys(value))


def _repeated(item: str, least: int, most: int | None) -> str:
    if most == 0:
        return '""'
    return f"{item}{{{least},{'' if most is None else most}}}"


def _between(low: int, high: int) -> list[str]:
    """GBNF for the decimal digits of each integer in [low, high], 0 <= low."""
    found: list[str] = []
    while low <= high:
        length = len(str(low))
        top = min(high, 10**length - 1)
        found += _same_length(str(low), str(top))
        low = top + 1
    return found


def _same_length(low: str, high: str) -> list[str]:
    if not low:
        return ['""']
    rest = len(low) - 1
    any_rest = f" {_DIGIT}{{{rest}}}" if rest else ""
    lowest, highest = low[1:] == "0" * rest, high[1:] == "9" * rest
    if low[0] == high[0] and not (lowest and highest):
        return [f'"{low[0]}" ({" | ".join(_same_length(low[1:], high[1:]))})']
    first, last = int(low[0]), int(high[0])
    found = []
    if not lowest:
        found.append(f'"{first}" ({" | ".join(_same_length(low[1:], "9" * rest))})')
        first += 1
    if not highest:
        found.append(f'"{last}" ({" | ".join(_same_length("0" * rest, high[1:]))})')
        last -= 1
    return found + ([f"[{first}-{last}]{any_rest}"] if first <= last else [])


def _no_key(names: Iterable[str]) -> str:
    """GBNF for the inside of a key that is none of ``names``; no escapes, so that no name can be spelled by them."""
    plain = [name for name in names if not re.search(r'["\\\x00-\x1f\x7f\ud800-\udfff]', name)]
    return _unlike(sorted(set(plain))) if plain else KEY_CHAR + "*"


KEY_CHAR: Final = r'[^"\\\x00-\x1F\x7F]'


def _unlike(names: list[str]) -> str:
    """All texts but ``names``, which are a trie's words."""
    branches: dict[str, list[str]] = {}
    for name in names:
        if name:
            branches.setdefault(name[0], []).append(name[1:])
    parts = [f"{literal(char)} {_unlike(rest)}" for char, rest in branches.items()]
    others = "".join(f"\\U{ord(char):08X}" for char in branches)
    parts.append(f'[^"\\\\\\x00-\\x1F\\x7F{others}] {KEY_CHAR}*')
    return f"({' | '.join(parts)}){'' if '' in names else '?'}"
