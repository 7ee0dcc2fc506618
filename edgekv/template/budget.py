"""What a render may spend: whatever grows or takes long is paid for before it is done.

A unit is about a byte that is made, or a nanosecond of work. No clock could stop ``'a' * 10**10`` or the comparison
of two lists that hold one another thirty levels deep: they are single steps of CPython's, which has to be asked first.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any, Final

from jinja2.runtime import Undefined

DEEPEST: Final = 100  # lists in lists: CPython compares, hashes and dumps them by recursion
ITEM: Final = 100  # units of an entry of a list, of a small object, of a call
_UNITS: Final = 1 << 26
_PER_CHAR: Final = 20  # more units for each character of the conversation
_PER_MESSAGE: Final = 10_000  # and for each message
_SECONDS: Final = 5.0
_SECONDS_PER_MESSAGE: Final = 0.01  # small boards take a tenth of it
_MOST_BITS: Final = 1024  # of an integer that is calculated with
_LONG: Final = 1000  # characters; looking up as many costs less than a call of spend
SCALARS: Final = (int, float, bool, type(None), Undefined)
SIZED: Final = (str, list, tuple, dict, range, Undefined)


class Refused(Exception):
    """What the sandbox does not let a template do."""

    def __init__(self, message: str, lineno: int = 0) -> None:
        super().__init__(message)
        self.lineno = lineno


class Budget:
    """What one render has left, and how many macros wait for one another in it."""

    def __init__(self) -> None:
        self.units = _UNITS
        self.ends = time.monotonic() + _SECONDS
        self.calls = 0

    def grow(self, chars: int = 0, messages: int = 0) -> None:
        """There is more to render."""
        self.units += _PER_CHAR * chars + _PER_MESSAGE * messages
        self.ends += _SECONDS_PER_MESSAGE * messages


in_use: ContextVar[Budget] = ContextVar("budget")


def spend(units: int) -> None:
    """Raises Refused when nothing is left."""
    budget = in_use.get()
    budget.units -= max(units, 0)
    if budget.units < 0 or time.monotonic() > budget.ends:
        raise Refused("it takes more time or memory than a chat template has reason to")


def weigh(value: Any, depth: int = 1) -> int:
    """Pay for a walk through all of a value and for writing it out, escapes and indents too; the units it took.

    Lists can hold one another many times over, or themselves. The walk ends because every step is paid for.
    """
    kind = type(value)
    if depth > DEEPEST:
        raise Refused("it nests lists too deep")
    if kind not in SCALARS and kind not in SIZED:
        raise Refused(f"it uses {named(value)} as a text or a value")
    units = 6 * len(value) if kind is str else ITEM + 16 * depth
    spend(units)
    if kind in (list, tuple, dict):
        for child in (*value, *value.values()) if kind is dict else value:
            units += weigh(child, depth + 1)
    return units


def text_of(value: Any) -> str:
    """A value as Jinja prints it; a text is itself, and free."""
    if type(value) is str:
        return value
    weigh(value)
    return str(value)


def named(value: Any) -> str:
    """For messages: 'None', 'a dict', 'an int'."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def size_of(value: Any) -> int:
    """The units of a copy."""
    kind = type(value)
    return len(value) if kind is str else ITEM * len(value) if kind in SIZED else 0


def measured(value: Any) -> Any:
    """The value, paid for so that it may be compared."""
    if type(value) is str:
        spend(len(value))
    elif type(value) not in SCALARS:
        weigh(value)
    return value


def number(value: Any) -> Any:
    """The value if it is a number: '%' would format a text, and large integers take the square of their length."""
    if not isinstance(value, (int, float)) or (isinstance(value, int) and value.bit_length() > _MOST_BITS):
        raise Refused(f"it calculates with {named(value)}, or a number too large")
    return value


def key(value: Any) -> Any:
    """The value if it may be looked up: large integers can be made to collide, and a tuple's hash is a recursion."""
    if type(value) is str and len(value) > _LONG:
        spend(len(value))
    if type(value) not in (str, *SCALARS) or (type(value) is int and abs(value) >> 32):
        raise Refused(f"it looks up {named(value)}, or a number too large")
    return value
