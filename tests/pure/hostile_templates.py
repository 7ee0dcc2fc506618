"""Chat templates that were made to hurt: to reach Python, to fill the memory, to run for ever, to overflow the stack.

As a program, ``python hostile_templates.py TIER`` renders each of a tier in a process of its own, with a limit of
memory and of CPU time, and prints what became of them. ``test_template.py`` starts it so.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from edgekv.template import PLAIN, Template

MEGABYTE = 1 << 20
LIMIT = 900 * MEGABYTE  # growth that the system refuses; the tests allow a third of it
SECONDS = 60  # of CPU time
MANY = 100_000  # the most that range() gives


# -- the words they are made of -------------------------------------------------------------------------------------


def loop(body: str, times: int = MANY) -> str:
    return f"{{% for i in range({times}) %}}{body}{{% endfor %}}"


def macro(name: str, body: str) -> str:
    return f"{{% macro {name}(a=0) %}}{body}{{% endmacro %}}"


def grow(seed: str, step: str) -> str:
    """``ns.s`` becomes ``step`` of itself, again and again."""
    return f"{{% set ns = namespace(s='{seed}') %}}" + loop(f"{{% set ns.s = {step} %}}", 99)


def grow_block(body: str) -> str:
    return "{% set ns = namespace(s='x') %}" + loop(f"{{% set ns.s %}}{body}{{% endset %}}", 99)


def twins(empty: str, pair: str) -> str:
    """``ns.a`` and ``ns.b``: forty levels of pairs, which hold 2 ** 40 entries for who walks without counting."""
    pairs = "".join(f"{{% set ns.{n} = {pair.replace('X', 'ns.' + n)} %}}" for n in "ab")
    return f"{{% set ns = namespace(a={empty}, b={empty}) %}}" + loop(pairs, 40)


BIG = "{% set big = 'x' * 20000000 %}"
LISTS = twins("[]", "[X, X]")
TUPLES = twins("()", "(X, X)")
DICTS = twins("{}", "{'a': X, 'b': X}")
CHAIN = "{% set ns = namespace(a=(1,)) %}" + loop("{% set ns.a = (ns.a,) %}", 90_000)
ITSELF = "{% set l = [] %}{% set _ = l.append(l) %}"
ADD = "{% set _ = l.append(VALUE) %}"
STEPS = "{% set b = a.x %}" * 2000


REACHING = {
    "class": "{{ ''.__class__.__mro__ }}",
    "class item": "{{ ''['__class__']['__mro__'] }}",
    "class call": "{{ ''.__class__() }}",
    "class by map": "{{ ([{}]|map(attribute='__class__.__init__')|first).x }}",
    "class by attr": "{{ ''|attr('__class__') }}",
    "class by sort": "{{ (['', 'a']|sort(attribute='__class__.__name__.x')|first).x.y }}",
    "mro": "{{ ''.mro() }}",
    "globals": "{{ raise_exception.__globals__['os'] }}",
    "function of a partial": "{{ namespace.func.__globals__.x }}",
    "call of its function": "{{ range.func(3).x.y }}",
    "macro's function": macro("m", "") + "{{ m._func.__globals__.x }}",
    "macro's environment": macro("m", "") + "{{ m._environment.filters.x }}",
    "namespace's attributes": "{{ namespace(a=1)._Namespace__attrs.a }}",
    "namespace's class": "{{ namespace(a=1).__class__.__init__.__globals__ }}",
    "loop's iterator": loop("{{ loop._iterator.gi_frame.x }}", 1),
    "loop's class": loop("{{ loop.__class__.__init__ }}", 1),
    "self": "{{ self._TemplateReference__context.environment }}",
    "undefined's methods": "{{ nosuch._fail_with_undefined_error.__globals__ }}",
    "method's self": "{{ 'x'.join.__self__.x }}",
    "method's function": "{{ 'x'.upper.func.__globals__.x }}",
    "generator's frame": "{{ ([1]|map('string')).gi_frame.f_globals }}",
    "format an attribute": "{{ '{0.__class__.__init__}'.format('x') }}",
    "format an item": "{{ '{0[__class__]}'.format('x') }}",
    "format a keyword": "{{ '{x.__class__}'.format(x=1) }}",
    "format_map": "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "format in a format": "{{ '{:{}}'.format('x', 999999999) }}",
    "format by attr": "{{ ('{0.__class__}'|attr('format'))('x') }}",
    "format by item": "{{ '{0.__class__}'['format']('x') }}",
    "encode": "{{ 'x'.encode().x }}",
    "dict update": "{{ {}.update({'a': 1}) }}",
    "message update": "{{ messages[0].update({'role': 'x'}) }}",
    "messages clear": "{{ messages.clear() }}",
    "messages sort": "{{ messages.sort() }}",
    "lipsum": "{{ lipsum() }}",
    "cycler": "{{ cycler.__init__.__globals__ }}",
    "joiner": "{{ joiner() }}",
    "config": "{{ config.items() }}",
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
    "pprint": "{% if true %}{{ 'x'|pprint }}{% endif %}",
    "random": "{{ [1]|random }}",
    "xmlattr": "{{ {}|xmlattr }}",
    "test of filters": "{% if 'x' is filter %}{% endif %}",
    "star": "{{ range(*[9, 99]) }}",
    "double star": "{{ dict(**{'a': 1}) }}",
    "star of a text": macro("m", "") + "{{ m(*('x' * 30000000)) }}",
    "star of a filter": "{{ 'x'|replace(*['x', 'y']) }}",
}
GROWING = {
    "repeat": "{{ 'a' * 10 ** 10 }}",
    "repeat from the right": "{{ 10 ** 10 * 'a' }}",
    "repeat a list": "{{ ([1] * 10 ** 10)|length }}",
    "repeat a tuple": "{{ ((1,) * 10 ** 10)|length }}",
    "repeat emoji": "{{ '🙂' * 10 ** 8 }}",
    "double": grow("x", "ns.s + ns.s"),
    "double by tilde": grow("x", "ns.s ~ ns.s"),
    "double by join": grow("x", "[ns.s, ns.s]|join"),
    "double by joining": grow("x", "''.join([ns.s, ns.s])"),
    "double by format": grow("x", "'{0}{0}'.format(ns.s)"),
    "double by keyword": grow("x", "'{a}{a}'.format(a=ns.s)"),
    "double by percent": grow("x", "'%s%s' % (ns.s, ns.s)"),
    "double by percent of a dict": grow("x", "'%(a)s%(a)s' % {'a': ns.s}"),
    "double by filter": grow("x", "'%s%s'|format(ns.s, ns.s)"),
    "double by replace": grow("x", "ns.s|replace('x', 'xx')"),
    "double by replacing": grow("x", "ns.s.replace('x', 'xx')"),
    "double by replacing nothing": grow("x", "ns.s|replace('', 'x')"),
    "double by escape": grow("&", "(ns.s ~ ns.s)|e"),
    "double by JSON": grow("x", "(ns.s ~ ns.s)|tojson"),
    "double by printing a list": grow("x", "[ns.s, ns.s]|string"),
    "double by macro": "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}" + grow("x", "m(ns.s)"),
    "double by block": grow_block("{{ ns.s }}{{ ns.s }}"),
    "double by filter block": grow_block("{% filter trim %}{{ ns.s }}x{{ ns.s }}{% endfilter %}"),
    "double by caller": macro("m", "{{ caller() }}{{ caller() }}")
    + grow_block("{% call m() %}{{ ns.s }}{% endcall %}"),
    "double a list": grow("x", "ns.s|list + ns.s|list"),
    "double by indent": grow("x", "('\n' ~ ns.s)|indent(ns.s|length)"),
    "upper": "{{ ('ΐ' * 30000000)|upper }}",
    "print again and again": BIG + loop("{{ big }}"),
    "print into a variable": BIG + "{% set t %}" + loop("{{ big }}") + "{% endset %}",
    "print data": loop("x" * 200_000),
    "print in a macro": BIG + macro("m", loop("{{ big }}", 999)) + "{{ m() }}",
    "keep texts": BIG + "{% set l = [] %}" + loop(ADD.replace("VALUE", "big ~ i")),
    "keep slices": BIG + "{% set l = [] %}" + loop(ADD.replace("VALUE", "big[i:]")),
    "slices side by side": BIG + "{{ [" + "big[1:]," * 1500 + "]|length }}",
    "uppers side by side": BIG + "{{ [" + "big|upper," * 1500 + "]|length }}",
    "tests side by side": BIG + "{% set a = 'A' ~ big %}{{ [" + "a is lower," * 1500 + "]|length }}",
    "look-ups side by side": "{% set a = 'x' * 9000000 %}{% set b = a ~ '' %}{% set d = {a: 1} %}{{ ["
    + "d[b]," * 2000
    + "]|length }}",
    "center": "{{ 'x'|center(10 ** 10) }}",
    "centering": "{{ 'x'.center(10 ** 10) }}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "zfill": "{{ 'x'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 10) }}",
    "translate": "{{ 'x'.translate({120: 'x' * 999999}) }}",
    "wordwrap": "{{ ('x ' * 10000)|wordwrap(1, wrapstring='x' * 10000) }}",
    "indent": "{{ 'a\nb'|indent(10 ** 10) }}",
    "indent the first line": "{{ 'a'|indent(10 ** 10, true) }}",
    "indent that pays back": "{{ 'a\nb'|indent(-10 ** 18) }}{{ 'a' * 10 ** 10 }}",
    "indent by no number": "{{ 'a\nb'|indent('nan'|float) }}{{ 'a' * 10 ** 10 }}",
    "indent by a text": BIG + "{{ ('\n' * 100000)|indent(big, blank=true) }}",
    "replace no number of times": "{{ 'aa'|replace('a', 'b', 'nan'|float) }}{{ 'a' * 10 ** 10 }}",
    "format width": "{{ '{:>9999999999}'.format('x') }}",
    "format precision": "{{ '{:.999999999f}'.format(1) }}",
    "percent width": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (9999999999, 1) }}",
    "percent precision": "{{ '%.999999999f' % 1 }}",
    "percent of a filter": "{{ '%9999999999s'|format('x') }}",
    "odd is a percent": "{{ '%9999999999d' is odd }}",
    "divisibleby is a percent": "{{ '%9999999999d' is divisibleby 3 }}",
    "select by percent": "{{ ['%9999999999d']|select('odd')|list }}",
    "JSON indent": "{{ [1]|tojson(indent=10 ** 10) }}",
    "JSON indent of text": "{{ [1, 2]|tojson(indent='x' * 9999) }}",
    "JSON separators": "{{ ([1] * 9999)|tojson(separators=('x' * 99999, ':')) }}",
    "JSON escapes": "{{ ('🙂' * 15000000)|tojson(ensure_ascii=true) }}",
    "sum of lists": "{{ ([[1] * 1000] * 1000)|sum(start=[]) }}",
    "sum of texts": "{{ (['x' * 1000] * 1000)|sum(start='') }}",
    "split": "{{ (' x' * 9000000).split()|length }}",
    "split at a letter": "{{ ('x' * 9000000).split('x')|length }}",
    "splitlines": "{{ ('\n' * 9000000).splitlines()|length }}",
    "letters": "{{ ('🙂' * 9000000)|list|length }}",
    "long path": "{{ [1]|map(attribute='a.' * 9000000)|list }}",
    "long path of digits": "{{ [1]|map(attribute='9' * 900000)|list }}",
    "many paths": "{{ ([{}] * 9999)|sort(attribute='a,' * 9999) }}",
    "range": "{{ range(10 ** 9)|list }}",
    "huge range": "{{ range(2 ** 900)|list }}",
    "JSON of lists": "{{ ('[' ~ '[],' * 9000000 ~ '1]')|from_json|length }}",
    "chain of namespaces": "{% set ns = namespace(a=1) %}" + loop("{% set ns.a = namespace(a=ns.a) %}") * 9,
    "raise a long text": BIG + "{{ raise_exception(big * 99) }}",
    "miss a long name": BIG + "{{ {}[big].x }}",
    "strftime": "{{ strftime_now('%Y' * 9999999) }}",
    "strftime width": "{{ strftime_now('%999999999Y')[999999].x }}",
    "round": "{{ 5|round(-10 ** 10) }}",
    "round up": "{{ 5|round(10 ** 10, 'ceil') }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power of a power": "{{ (9 ** 999) ** 999 }}",
    "negative power": "{{ 9 ** -(9 ** 99) }}",
    "squares": grow("x", "3 if ns.s == 'x' else ns.s * ns.s"),
    "long literals": "{{ 0x" + "f" * 100_000 + " // 0x" + "f" * 50_000 + " }}",
    "long hexadecimal": "{{ ('f' * 9000000)|int(0, 16) }}",
    "long decimal": "{{ ('9' * 9000000)|int }}",
    "long float": "{{ ('9' * 9000000)|float }}",
}
WALKING = {
    "print lists": LISTS + "{{ ns.a }}",
    "lists as text": LISTS + "{{ ns.a|string|length }}",
    "concatenate lists": LISTS + "{{ ns.a ~ '' }}",
    "lists as JSON": LISTS + "{{ ns.a|tojson }}",
    "compare lists": LISTS + "{{ ns.a == ns.b }}",
    "order lists": LISTS + "{{ ns.a < ns.b }}",
    "compare lists in a chain": LISTS + "{{ 1 == ns.a == ns.b }}{{ ns.a == ns.b == 1 }}",
    "compare lists by test": LISTS + "{{ ns.a is eq(ns.b) }}",
    "compare lists by filter": LISTS + "{{ [ns.a]|select('equalto', ns.b)|list }}",
    "list in lists": LISTS + "{{ ns.a in [ns.b] }}",
    "list not in lists": LISTS + "{{ ns.a not in [ns.b] }}",
    "list in lists by test": LISTS + "{{ ns.a is in([ns.b]) }}",
    "list in lists in a chain": LISTS + "{{ 1 == 1 in [ns.a] }}{{ ns.a in [ns.b] == 1 }}",
    "sort lists": LISTS + "{{ [ns.a, ns.b]|sort }}",
    "greatest list": LISTS + "{{ [ns.a, ns.b]|max }}",
    "loop changed": LISTS + loop("{{ loop.changed(ns.a if i else ns.b) }}", 2),
    "prefixes of lists": LISTS + "{{ 'x'.startswith(ns.a) }}",
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
    "dicts as JSON": DICTS + "{{ ns.a|tojson(indent=2) }}",
    "values of dicts": DICTS + "{{ ns.a.values() == ns.b.values() }}",
    "sort dicts": DICTS + "{{ ns.a|dictsort(by='value') }}",
    "hash a chain": CHAIN + "{{ {ns.a: 1} }}",
    "print a chain": CHAIN + "{{ ns.a }}",
    "filter named by a chain": CHAIN + "{{ [1]|map(ns.a)|list }}",
    "test named by a chain": CHAIN + "{{ [1]|select(ns.a)|list }}",
    "test of attributes named by a chain": CHAIN + "{{ [{'a': 1}]|selectattr('a', ns.a)|list }}",
    "attribute named by a chain": CHAIN + "{{ [{'a': 1}]|map(attribute=ns.a)|list }}",
    "order by a chain": CHAIN + "{{ [{'a': 1}]|sort(attribute=ns.a)|list }}",
    "JSON keys in a chain": CHAIN + "{{ {'a': ns.a}|tojson(sort_keys=true) }}",
    "compare a chain": CHAIN + "{{ ns.a == (ns.a, 1) }}",
    "chain as JSON": CHAIN + "{{ ns.a|tojson }}",
    "chain of arguments": "{% set n = namespace(a=1) %}"
    + macro("m", "{% set n.a = varargs %}")
    + loop("{{ m(1, n.a) }}", 9999)
    + "{{ n.a }}",
    "nested JSON": "{{ ('[' * 200000)|from_json }}",
    "deep JSON": "{{ ('[' * 900 ~ ']' * 900)|from_json|string }}",
    "print a list in itself": ITSELF + "{{ l }}",
    "list in itself as JSON": ITSELF + "{{ l|tojson }}",
    "compare lists in themselves": ITSELF
    + ITSELF.replace("l.", "m.").replace("(l)", "(m)").replace("set l", "set m")
    + "{{ l == m }}",
    "namespace in itself": "{% set n = namespace() %}{% set n.n = n %}{{ n }}",
    "colliding numbers": "{% set l = [] %}" + loop(ADD.replace("VALUE", "i * (2 ** 61 - 1)")) + "{{ l|unique|list }}",
    "colliding keys": "{{ {" + ",".join(f"{i * (2**61 - 1)}: 1" for i in range(1, 3000)) + "} }}",
}
RUNNING = {
    "loops": "{% for a in range(100000) %}" * 5 + "{% endfor %}" * 5,
    "loops that do nothing": loop("{% for b in range(100000) if b is none %}{% endfor %}"),
    "loops that skip": loop(loop("{% continue %}")),
    "loops side by side": loop("") * 1000,
    "loops that filter": loop("{% for b in range(100000)|select('none') %}{% endfor %}"),
    "loop with much in it": loop(STEPS),
    "loop over letters": BIG + "{% for a in big %}{% endfor %}",
    "list that grows": "{% set l = [1] %}{% for a in l %}" + ADD.replace("VALUE", "1") + "{% endfor %}",
    "list that shifts": "{% set l = [1] * 99999 %}" + loop("{% set _ = l.pop(0) %}" + ADD.replace("VALUE", "1")),
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "loop that is called": loop("{{ loop([1]) }}", 1),
    "macro": macro("m", "{{ m() }}") + "{{ m() }}",
    "two macros": macro("m", "{{ n() }}") + macro("n", "{{ m() }}") + "{{ m() }}",
    "macro that doubles": macro("m", "{% if a %}{{ m(a - 1) }}{{ m(a - 1) }}{% endif %}") + "{{ m(45) }}",
    "macro that doubles unseen": macro("m", "{% if a and m(a - 1) ~ m(a - 1) %}{% endif %}") + "{{ m(45) }}",
    "macro by default": "{% macro m(a=m()) %}{% endmacro %}{{ m() }}",
    "macro with much in it": macro("m", STEPS) + loop("{{ m() }}"),
    "caller": macro("m", "{{ caller() }}") + macro("n", "{% call m() %}{{ n() }}{% endcall %}") + "{{ n() }}",
    "search": "{% set a = 'a' * 9000000 %}{% set b = 'a' * 900000 ~ 'b' %}" + loop("{{ b ~ a in a }}"),
    "search from behind": "{% set a = 'a' * 9000000 %}{{ a.rsplit('b' ~ 'a' * 900000) }}",
    "find from behind": "{{ ('a' * 9000000).rfind('b' ~ 'a' * 900000) }}",
    "strip": "{{ ('a' * 9000000).strip('b' * 9000000 ~ 'a') }}",
    "trim": "{{ ('a' * 9000000)|trim('b' * 9000000 ~ 'a') }}",
    "prefixes": "{% set p = 'a' * 900000 %}" + loop("{{ p.startswith((p ~ 'b', p ~ 'c')) }}"),
    "maps": "{{ (range(100000)|map('string')|list * 99)|map('upper')|map('lower')|list }}",
    "sort": "{{ (['x' * 99999] * 9999)|sort }}",
}
DEEP = {
    "parentheses": "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
    "open parentheses": "{{ " + "(" * 100_000,
    "brackets": "{{ " + "[" * 10_000 + "]" * 10_000 + " }}",
    "braces": "{{ " + "{1:" * 10_000 + "1" + "}" * 10_000 + " }}",
    "subscripts": "{{ " + "a[" * 10_000 + "1" + "]" * 10_000 + " }}",
    "arguments": "{{ " + "a(b=" * 10_000 + "1" + ")" * 10_000 + " }}",
    "targets": "{% set " + "(" * 10_000 + "a" + ")" * 10_000 + " = 1 %}",
    "nots": "{{ " + "not " * 50_000 + "a }}",
    "minus signs": "{{ " + "-" * 200_000 + "1 }}",
    "elses": "{{ a" + " if b else c" * 20_000 + " }}",
    "ifs": "{% if a %}" * 20_000,
    "ifs that end": "{% if a %}" * 5_000 + "{% endif %}" * 5_000,
    "fors": "{% for a in b %}" * 5_000 + "{% endfor %}" * 5_000,
    "few fors": "{% for a in b %}" * 40 + "{% endfor %}" * 40,
    "sets": "{% set x %}" * 10_000,
    "macros in macros": "{% macro a() %}" * 10_000,
    "generations": "{% generation %}" * 10_000,
    "dots": "{{ a" + ".b" * 8_000 + " }}",
    "calls": "{{ a" + "()" * 8_000 + " }}",
    "filters": "{{ a" + "|trim" * 8_000 + " }}",
    "sums": "{{ a" + "+b" * 8_000 + " }}",
    "ands": "{{ a" + " and b" * 8_000 + " }}",
    "powers": "{{ a" + "**b" * 8_000 + " }}",
}
LONG = {
    "many dots": "{{ a" + ".b" * 120_000 + " }}",
    "many comparisons": "{{ a" + "<b" * 120_000 + " }}",
    "many outputs": "{{a}}" * 50_000,
    "many names": "".join(f"{{%if b%}}{{%set a{i}=1%}}{{%endif%}}" for i in range(6_000)),
    "many macros": "".join(f"{{%macro a{i}()%}}{{%endmacro%}}" for i in range(6_000)),
    "many elifs": "{% if a %}" + "{% elif b %}" * 12_000 + "{% endif %}",
    "many ends": "{%if b%}{%endif%}" * 15_000,
    "comments": "{#" * 120_000,
    "raw": "{% raw %}" * 28_000,
    "surrogate": "{{ '\udcff' }}{{ nosuch.x }}",
}
#: Each is refused, within seconds and a little memory.
HOSTILE: dict[str, str] = {**REACHING, **GROWING, **WALKING, **RUNNING, **DEEP, **LONG}

#: What gets away with it, and sees nothing.
HARMLESS: dict[str, str] = {
    "class": "{{ ''.__class__ }}{{ ''['__class__'] }}{{ [''.__class__] }}",
    "environment": "{{ environment }}{{ context }}{{ resolve }}{{ undefined }}{{ concat }}",
    "self": "{{ self.x }}{{ self['_TemplateReference__context'] }}",
    "loop": loop("{{ loop._iterable }}{{ loop['_recurse'] }}", 1),
    "namespace": "{{ namespace()._Namespace__attrs }}{{ namespace(a=1)['__dict__'] }}",
    "macro": macro("m", "") + "{{ m.name }}{{ m._func }}{{ m.arguments }}",
    "map": "{{ ['x']|map(attribute='__class__')|join }}{{ ['x']|map(attribute='upper.__self__')|join }}",
    "method": "{{ ''.upper.__self__ }}{{ ''.upper.func }}{{ {}.items.args }}",
    "range": "{{ range(3).start }}{{ range.func }}",
}

#: As much as the budget lets through, and a loop that is not all paid for when it begins; whatever comes of it.
HEAVY: dict[str, str] = {
    "list that grows slowly": "{% set l = [1] %}{% for a in l %}" + STEPS + ADD.replace("VALUE", "1") + "{% endfor %}",
    "emoji": "{% set a = '🙂' * 66000000 %}{{ a|length }}",
    "emoji printed": "{% set a = '🙂' * 33000000 %}{{ a }}",
    "widened": "{% set a = 'x' * 32000000 %}{% set b = a ~ '🙂' %}{{ b|length }}",
    "JSON": "{{ ('\x01' * 9000000)|tojson|length }}",
    "JSON in ASCII": "{{ ('🙂' * 9000000)|tojson(ensure_ascii=true)|length }}",
    "JSON of lists": "{{ ([1] * 280000)|tojson(indent=8)|length }}",
    "JSON read": "{{ ('[' ~ '{},' * 500000 ~ '1]')|from_json|length }}",
    "JSON of numbers read": "{{ ('[' ~ '1.5,' * 390000 ~ '1]')|from_json|length }}",
    "printed list": "{{ ['\x01' * 9000000]|string|length }}",
    "letters": "{{ ('🙂' * 600000)|list|length }}",
    "split": "{{ (' 🙂' * 600000).split()|length }}",
    "lines": "{{ ('\n' * 600000).splitlines()|length }}",
    "numbers": "{% set l = [] %}" + loop(ADD.replace("VALUE", "i * 1.5")),
    "dicts": "{% set l = [] %}" + loop(ADD.replace("VALUE", "{'a': {}, 'b': {}}")),
    "dicts in a row": "{% set l = [] %}" + loop(ADD.replace("VALUE", "[" + "{}," * 900 + "]"), 5_000),
    "namespaces": "{% set l = [] %}" + loop(ADD.replace("VALUE", "namespace(a=1)")),
    "macros": "{% set l = [] %}" + loop(macro("m", "x") + ADD.replace("VALUE", "m")),
    "titles": "{{ ('ab ' * 200000)|title|length }}",
    "sorted": "{{ (range(20000)|list)|sort|length }}",
    "unique": "{{ range(100000)|map('string')|unique|length }}",
    "indented": "{{ ('x\n' * 300000)|indent(100)|length }}",
    "replaced": "{{ ('ab' * 10000000)|replace('ab', '🙂')|length }}",
    "outputs": loop("{{ i }}{{ 'x' }}{{ i }}"),
    "long tags": "{{ a" + "~b" * 9_000 + " }}",
    "many sets": "".join(f"{{%set a{i}=1%}}" for i in range(3_000)),
    "elifs": "{% if a %}" + "{% elif b %}" * 2_000 + "{% endif %}",
    "many ifs": "".join(f"{{%set a{i}=1%}}" for i in range(1_200)) + "{%if b%}{%endif%}" * 1_500,
}

#: One of each way to hurt, cheap ones; the rest are variations, for the long tier.
CHOSEN = (
    "class", "class by map", "globals", "macro's function", "namespace's class", "loop's iterator",
    "repeat", "repeat a list", "double", "double by format", "double by macro", "double by block", "print data",
    "centering", "indent", "format width", "percent star", "odd is a percent", "JSON indent", "range", "strftime",
    "power", "long decimal", "miss a long name",
    "print lists", "compare lists", "list in lists", "sort lists", "hash tuples", "compare dicts", "dicts as JSON",
    "hash a chain", "nested JSON", "print a list in itself", "namespace in itself",
    "loops", "loops that skip", "recursive loop", "macro", "caller", "search", "prefixes",
    "parentheses", "subscripts", "ifs", "filters", "comments", "surrogate",
    "parentheses, deeper", "macro, deeper",
)  # fmt: skip

#: To be tried where a program has told Python to let recursions go on, too.
DEEPER = [*DEEP, "macro", "caller", "nested JSON", *(name for name in WALKING if "chain" in name or "itself" in name)]


# -- as a program ---------------------------------------------------------------------------------------------------


def attempt(source: str) -> str:
    try:
        text = Template(source).render([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
    except Exception as err:
        return f"{type(err).__name__}: {err}"
    return f"a text of {len(text):,} characters: {text[:60]!r}"


def attempt_deeper(source: str) -> str:
    sys.setrecursionlimit(1_000_000)
    return attempt(source)


def in_a_child(work: Callable[[], str]) -> dict[str, Any]:
    """Runs in a fork, under limits: what it says, how much memory came to that of this process."""
    import resource

    import psutil

    before = psutil.Process().memory_info()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))  # only what hangs needs as much
        resource.setrlimit(resource.RLIMIT_AS, (before.vms + LIMIT, before.vms + LIMIT))
        os.write(theirs, work()[:1000].encode("utf-8", "replace"))
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read().decode()
    _, status, usage = os.wait4(child, 0)
    grown = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) - before.rss
    return {"said": said or f"status {status}", "megabytes": grown / MEGABYTE}


HOSTILE_WORK: dict[str, Callable[[], str]] = {
    **{name: functools.partial(attempt, source) for name, source in HOSTILE.items()},
    **{f"{name}, deeper": functools.partial(attempt_deeper, HOSTILE[name]) for name in DEEPER},
}
TIERS: dict[str, dict[str, Callable[[], str]]] = {
    "chosen": {name: HOSTILE_WORK[name] for name in CHOSEN},
    "hostile": HOSTILE_WORK,
    "heavy": {name: functools.partial(attempt, source) for name, source in HEAVY.items()},
}


if __name__ == "__main__":
    (tier,) = sys.argv[1:]
    Template(PLAIN).render([])  # what Python imports late is imported
    print(json.dumps({name: in_a_child(work) for name, work in TIERS[tier].items()}))
