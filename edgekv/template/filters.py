"""Filters, tests and functions: a closed list of what chat templates use, each paying for what it is about to do.

What Jinja does lazily is done at once here, so that it is paid for, too.
"""

from __future__ import annotations

import json
import operator
import re
from datetime import datetime
from functools import reduce
from typing import Any, Final

from jinja2 import filters, tests
from jinja2.runtime import Undefined
from jinja2.sandbox import safe_range
from jinja2.utils import Namespace, pass_context, pass_environment
from markupsafe import escape

from edgekv.template.budget import DEEPEST, ITEM, Refused, key, measured, number, size_of, spend, text_of, weigh
from edgekv.template.methods import METHODS, Function, contained, count_breaks, join, percent, replace

_JINJA: Final[dict[str, Any]] = {**filters.FILTERS}
_JINJA_TESTS: Final[dict[str, Any]] = {**tests.TESTS}
_NUMERAL: Final = 100  # characters that are read as a number
_PATH: Final = 1000  # characters of a path of attributes
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_BRACKET: Final = re.compile(r"[][{}]")
_INDENT: Final = 8  # spaces, and characters of a separator, in JSON


class Raised(Exception):
    """The template called raise_exception."""


# -- filters --------------------------------------------------------------------------------------------------------


def _on_text(name: str) -> Function:
    """A method of str, for anything that prints."""
    return lambda value, *args: METHODS[str][name](text_of(value), *args)


def _trim(value: Any, chars: str | None = None) -> Any:
    return METHODS[str]["strip"](text_of(value), chars)


def _escape(value: Any) -> str:
    text = text_of(value)
    spend(6 * len(text))
    return str(escape(text))


def _title(value: Any) -> Any:
    text = text_of(value)
    spend(ITEM * len(text))
    return _JINJA["title"](text)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: Jinja's own escapes what HTML would act on."""
    weigh(value)
    widths = [indent if isinstance(indent, int) else len(indent or ""), *map(len, separators or ())]
    if max(widths) > _INDENT:
        raise Refused(f"it writes JSON with more than {_INDENT} spaces")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _from_json(text: str) -> Any:
    spend(40 * len(text))  # "[[],[],": three characters become a list
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > DEEPEST:  # CPython reads it by recursion
            raise Refused("it nests lists too deep")
    return json.loads(text)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    text, columns = text_of(value), len(width) if isinstance(width, str) else operator.index(width)
    spend(2 * len(text) + (1 + count_breaks(text)) * (ITEM + max(0, columns)))
    return _JINJA["indent"](text, width, first, blank)


def _list(values: Any) -> list[Any]:
    spend(ITEM * len(values))
    return list(values)


def _items(mapping: Any) -> Any:
    return [] if isinstance(mapping, Undefined) else METHODS[dict]["items"](mapping)


def _reverse(values: Any) -> Any:
    spend(size_of(values))
    return values[::-1] if isinstance(values, str) else list(reversed(values))


def _each(values: Any, *options: Any) -> None:
    """Pay for a look at every value; an option may be a path of attributes, of which every part is a step."""
    for option in options:
        measured(option)  # Jinja looks filters and tests up by what it is given
    steps = sum(len(o) if len(o) > _PATH else o.count(".") + o.count(",") for o in options if isinstance(o, str))
    spend(ITEM * (1 + steps) * (1 + len(values or ())))  # None is empty, as for Jinja


def _eager(name: str) -> Function:
    """Jinja's filter, but a list: nothing pays for what a generator does later."""

    @pass_context
    def call(context: Any, values: Any, *args: Any, **kwargs: Any) -> list[Any]:
        _each(values, *args, *kwargs.values())
        return list(_JINJA[name](context, values, *args, **kwargs))

    return call


def _comparing(name: str) -> Function:
    """Jinja's filter, which compares the values with one another."""

    @pass_environment
    def call(environment: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        _each(values, *args, *kwargs.values())
        spend(weigh(values) * len(values).bit_length())
        return _JINJA[name](*(() if name == "dictsort" else (environment,)), values, *args, **kwargs)

    return call


@pass_environment
def _unique(environment: Any, values: Any, case_sensitive: bool = False, attribute: Any = None) -> list[Any]:
    _each(values, attribute)
    prepare = None if case_sensitive else filters.ignore_case
    getter = filters.make_attrgetter(environment, attribute, postprocess=prepare)
    seen: dict[Any, Any] = {}
    for value in values:
        seen.setdefault(key(measured(getter(value))), value)
    return list(seen.values())


@pass_environment
def _joined(environment: Any, values: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        _each(values, attribute)
        values = list(map(filters.make_attrgetter(environment, attribute), values))
    return join(text_of(d), values)


@pass_environment
def _sum(environment: Any, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    _each(values, attribute)
    getter = filters.make_attrgetter(environment, attribute)
    return reduce(lambda total, value: number(total) + number(getter(value)), values, start)


def _numeral(name: str) -> Function:
    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, str) and len(value) > _NUMERAL:
            raise Refused(f"it reads a text of {len(value):,} characters as a number")
        return _JINJA[name](value, *args, **kwargs)

    return call


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if abs(precision) > 20:
        raise Refused("it rounds to more than 20 places")
    return _JINJA["round"](number(value), precision, method)


FILTERS: Final[dict[str, Function]] = {
    **{name: _JINJA[name] for name in ("default", "d", "length", "count", "first", "last")},
    **{name: _eager(name) for name in ("map", "select", "reject", "selectattr", "rejectattr")},
    **{name: _comparing(name) for name in ("sort", "dictsort", "min", "max")},
    **{name: _on_text(name) for name in ("upper", "lower", "capitalize")},
    **{name: _numeral(name) for name in ("int", "float")},
    "abs": lambda value: abs(number(value)),
    "e": _escape,
    "escape": _escape,
    "format": lambda text, *values: percent(text_of(text), values),
    "from_json": _from_json,
    "indent": _indent,
    "items": _items,
    "join": _joined,
    "list": _list,
    "replace": replace,
    "reverse": _reverse,
    "round": _round,
    "safe": text_of,  # nothing is escaped unasked
    "string": text_of,
    "sum": _sum,
    "title": _title,
    "tojson": _tojson,
    "trim": _trim,
    "unique": _unique,
}


# -- tests ----------------------------------------------------------------------------------------------------------


def _on(prepare: Function, test: Function) -> Function:
    return lambda *args: test(*map(prepare, args))


_SAFE: Final = (
    "defined", "undefined", "none", "boolean", "false", "true", "integer", "float", "string", "mapping", "number",
    "sequence", "iterable", "callable", "sameas",
)  # fmt: skip
_ORDER: Final = (
    "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le",
)  # fmt: skip
TESTS: Final[dict[str, Function]] = {
    **{name: _JINJA_TESTS[name] for name in _SAFE},
    **{name: _on(measured, _JINJA_TESTS[name]) for name in _ORDER},
    **{name: _on(number, _JINJA_TESTS[name]) for name in ("odd", "even", "divisibleby")},
    "lower": lambda value: METHODS[str]["islower"](text_of(value)),
    "upper": lambda value: METHODS[str]["isupper"](text_of(value)),
    "in": contained,
}


# -- functions ------------------------------------------------------------------------------------------------------


def _raise(message: Any = "") -> None:
    raise Raised(text_of(message))


def _dict(*given: Any, **items: Any) -> dict[Any, Any]:
    pairs = _items(given[0]) if given and isinstance(given[0], dict) else given[0] if given else ()
    spend(ITEM * (len(pairs) + len(items)))
    return {**{key(name): value for name, value in pairs}, **items}


def _namespace(*given: Any, **items: Any) -> Namespace:
    return Namespace(_dict(*given, **items))


def strftime(now: datetime, form: str) -> str:
    if len(form) > _NUMERAL:
        raise Refused("it asks for the date in too long a form")
    return now.strftime(form)


GLOBALS: Final[dict[str, Function]] = {
    "range": safe_range,
    "dict": _dict,
    "namespace": _namespace,
    "raise_exception": _raise,
}
