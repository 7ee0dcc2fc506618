"""What Jinja's operators and the methods of values do here: they pay for what they are about to make.

The methods are a closed list of what chat templates use; whatever else a value can do in Python is not there.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from string import Formatter
from typing import Any, Final, TypeAlias

from jinja2.runtime import LoopContext, Undefined

from edgekv.template.budget import ITEM, Refused, key, measured, named, number, size_of, spend, text_of, weigh

Function: TypeAlias = Callable[..., Any]

_FIELD: Final = re.compile(r"\w*")
_SPEC: Final = re.compile(r"(?:[^{}]?[<>=^])?[-+ ]?#?0?\d{0,2},?(?:\.\d{1,2})?[a-zA-Z%]?")
_PERCENT: Final = re.compile(r"%(?:\(\w*\))?[-+ #0]?\d{0,2}(?:\.\d{1,2})?[a-zA-Z%]")
_BREAKS: Final = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # where splitlines does

# -- operators ------------------------------------------------------------------------------------------------------


def contained(item: Any, holder: Any) -> bool:
    """``item in holder``."""
    if type(holder) is dict:
        return key(item) in holder
    measured(item)
    return item in measured(holder)


def concatenated(*values: Any) -> str:
    """``a ~ b ~ c``."""
    return join("", values)


def sliced(values: Any, start: Any, stop: Any, step: Any) -> Any:
    """``values[start:stop:step]``."""
    part = slice(start, stop, step)
    if isinstance(values, (str, list, tuple)):
        spend(len(range(*part.indices(len(values)))) * (1 if isinstance(values, str) else ITEM))
    elif not isinstance(values, Undefined):
        raise Refused(f"it slices {named(values)}")
    return values[part]


def calculated(sign: str, left: Any, right: Any) -> Any:
    """``left + right``, and the other signs."""
    if sign == "%" and isinstance(left, str):
        return percent(left, right)
    for value in (left, right):
        if isinstance(value, int):
            number(value)
    if sign == "+":
        spend(size_of(left) + size_of(right))
    elif sign == "*":
        spend(max(size_of(left) * _times(right), size_of(right) * _times(left)))
    elif sign == "**" and _times(right) * _times(left).bit_length() > 4096:
        raise Refused("it calculates with a number too large")
    return _SIGNS[sign](left, right)


def _times(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


_SIGNS: Final[dict[str, Function]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "**": operator.pow,
    "%": operator.mod,
}


# -- methods --------------------------------------------------------------------------------------------------------


def _linear(name: str) -> Function:
    """A method of str that walks through it once and makes three times its length at most."""
    method = getattr(str, name)

    def call(text: str, /, *args: Any) -> Any:
        weigh(args)
        spend(3 * len(text))
        return method(text, *args)

    return call


def _strip(name: str) -> Function:
    method = getattr(str, name)

    def call(text: str, chars: str | None = None, /) -> Any:
        spend(len(text) * (1 + len(chars or "") // 4))
        return method(text, chars)

    return call


def _split(name: str) -> Function:
    method = getattr(str, name)

    def call(text: str, sep: str | None = None, maxsplit: int = -1) -> Any:
        pieces = text.count(sep) if sep else len(text) // 2
        spend(len(text) + ITEM * (min(pieces, maxsplit) if maxsplit >= 0 else pieces))
        if name == "rsplit":  # CPython's search from behind tries the whole separator everywhere
            spend(len(text) * len(sep or "") // 16)
        return method(text, sep, maxsplit)

    return call


def count_breaks(text: str) -> int:
    return sum(map(text.count, _BREAKS))


def _splitlines(text: str, keepends: bool = False) -> list[str]:
    spend(len(text) + ITEM * count_breaks(text))
    return text.splitlines(keepends)


def replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = text_of(value), text_of(old), text_of(new)
    found = text.count(old)
    times = found if count is None or count < 0 else min(found, count)
    spend(len(text) + times * len(new))
    return text.replace(old, new, times)


def join(separator: str, values: Any) -> str:
    spend(ITEM * len(values))
    texts = [text_of(value) for value in values]
    spend(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def _format(text: str, /, *args: Any, **kwargs: Any) -> str:
    units = weigh(args) + weigh(kwargs)
    spend(len(text) + text.count("{") * units)
    for _, name, spec, _ in Formatter().parse(text):
        if not (_FIELD.fullmatch(name or "") and _SPEC.fullmatch(spec or "")):
            raise Refused("it formats with more than names and short widths")
    return text.format(*args, **kwargs)


def percent(text: str, values: Any) -> Any:
    """``text % values``."""
    spend(len(text) + text.count("%") * weigh(values))
    if "%" in _PERCENT.sub("", text):
        raise Refused("it formats with more than names and short widths")
    return text % values


def _get(mapping: dict[Any, Any], name: Any, default: Any = None) -> Any:
    return mapping.get(key(name), default)


def _listed(method: Function) -> Function:
    """A list instead of a view, which would print and compare all it shows."""

    def call(mapping: dict[Any, Any]) -> list[Any]:
        spend(2 * ITEM * len(mapping))
        return list(method(mapping))

    return call


def _append(values: list[Any], value: Any) -> None:
    spend(ITEM)
    values.append(value)


def _pop(values: list[Any], index: int = -1) -> Any:
    spend(ITEM + len(values))
    return values.pop(index)


def _changed(loop: LoopContext, *values: Any) -> bool:
    weigh(values)
    return loop.changed(*values)


_LINEAR: Final = (
    "upper", "lower", "title", "capitalize", "casefold", "swapcase", "startswith", "endswith", "removeprefix",
    "removesuffix", "find", "index", "count", "isdigit", "isdecimal", "isnumeric", "isalpha", "isalnum",
    "isspace", "isupper", "islower",
)  # fmt: skip
METHODS: Final[dict[type, dict[str, Function]]] = {
    str: {
        **{name: _linear(name) for name in _LINEAR},
        **{name: _strip(name) for name in ("strip", "lstrip", "rstrip")},
        **{name: _split(name) for name in ("split", "rsplit")},
        "splitlines": _splitlines,
        "replace": replace,
        "join": join,
        "format": _format,
    },
    dict: {"get": _get, "keys": _listed(dict.keys), "values": _listed(dict.values), "items": _listed(dict.items)},
    list: {"append": _append, "pop": _pop},  # as in llama.cpp; the lists are the render's own
    LoopContext: {"cycle": LoopContext.cycle, "changed": _changed},
}
#: What else ``loop`` has.
LOOP: Final = {
    "index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0", "previtem",
    "nextitem",
}  # fmt: skip
