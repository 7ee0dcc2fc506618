"""The sandbox: Jinja as transformers and llama.cpp set it up, in a world without anything that is in no table.

Templates are compiled to Python. Jinja asks a sandbox about attributes, calls and arithmetic; where it does not ask,
``_Guards`` puts calls into the syntax tree: before loops and macros, around comparisons, slices and ``~``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any, Final

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from edgekv.template import filters, methods
from edgekv.template.budget import DEEPEST, ITEM, SIZED, Refused, in_use, key, measured, named, number, spend, text_of

FILE: Final = "<chat template>"  # what tracebacks name its code
_MOST_TOKENS: Final = 20_000  # the longest template that llama.cpp carries has 2,500, and as many nodes
_MOST_NODES: Final = 10_000
_MOST_NESTED: Final = 120  # brackets, blocks, prefixes; each takes several frames of the parser
_MOST_CALLS: Final = 50  # macros that wait for one another: those that write a JSON schema call themselves
_NODE: Final = 10  # units of a node, each time a loop or a macro may come to it
_MADE: Final = (nodes.List, nodes.Dict, nodes.Tuple)  # nodes that make an object
_NAME: Final = 100  # characters of a name that errors tell
_NODES: Final = {
    "Add", "And", "Assign", "AssignBlock", "Break", "Call", "CallBlock", "Compare", "Concat", "CondExpr", "Const",
    "Continue", "Dict", "Div", "ExprStmt", "Filter", "FilterBlock", "FloorDiv", "For", "Getattr", "Getitem", "If",
    "Keyword", "List", "Macro", "Mod", "Mul", "NSRef", "Name", "Neg", "Not", "Operand", "Or", "Output", "Pair",
    "Pos", "Pow", "Slice", "Sub", "Template", "TemplateData", "Test", "Tuple", "With",
}  # fmt: skip


# -- reading --------------------------------------------------------------------------------------------------------


class _Reading(Extension):
    """``{% generation %}``, which marks the answers for a training run, says nothing here; and tokens are counted."""

    tags = {"generation"}  # noqa: RUF012 - declared as Jinja does

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for count, token in enumerate(stream):
            if count == _MOST_TOKENS:
                raise Refused("it has more parts than a chat template needs", token.lineno)
            yield token

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _counted(method: Callable[..., Any]) -> Any:
    def call(parser: _Parser, *args: Any, **kwargs: Any) -> Any:
        parser.nesting += 1
        if parser.nesting > _MOST_NESTED:
            raise Refused("it is nested too deep", parser.stream.current.lineno)
        try:
            return method(parser, *args, **kwargs)
        finally:
            parser.nesting -= 1

    return call


class _Parser(Parser):
    """Jinja's parser is a recursion; this ends it, however deep this process lets Python go."""

    nesting = 0
    subparse = _counted(Parser.subparse)
    parse_condexpr = _counted(Parser.parse_condexpr)
    parse_not = _counted(Parser.parse_not)
    parse_unary = _counted(Parser.parse_unary)


def _check(tree: nodes.Template) -> None:
    """Refuse what no chat template needs, and a tree that the compiler, another recursion, would suffer from."""
    waiting: list[tuple[nodes.Node, int]] = [(tree, 0)]
    count = 0
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if depth > DEEPEST:
            raise Refused("it is nested too deep", node.lineno)
        if count > _MOST_NODES:
            raise Refused("it has more parts than a chat template needs")
        _check_node(node)
        waiting += [(child, depth + 1) for child in node.iter_child_nodes()]


def _check_node(node: nodes.Node) -> None:
    kind = type(node).__name__
    if isinstance(node, nodes.For) and node.recursive:
        raise Refused("it uses a recursive loop, which chat templates do without", node.lineno)
    if kind not in _NODES:
        raise Refused(f"it uses '{kind}', which chat templates do without", node.lineno)
    if isinstance(node, (nodes.Call, nodes.Filter, nodes.Test)) and (node.dyn_args or node.dyn_kwargs):
        raise Refused("it passes arguments with a '*', which chat templates do without", node.lineno)
    if isinstance(node, nodes.Const) and isinstance(node.value, int):
        number(node.value)


def names_read(tree: nodes.Template) -> Iterator[str]:
    """Names of variables, attributes and items that the template reads."""
    for node in tree.find_all(nodes.Node):
        if isinstance(node, nodes.Name) and node.ctx == "load":
            yield node.name
        elif isinstance(node, nodes.Getattr):
            yield node.attr
        elif isinstance(node, nodes.Getitem):
            yield from _constant(node.arg)
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
            yield from _constant(*node.args[:1])
        elif isinstance(node, nodes.Filter):
            first = node.args[:1] if node.name in ("selectattr", "rejectattr") else ()
            yield from _constant(*first, *(pair.value for pair in node.kwargs if pair.key == "attribute"))


def _constant(*found: nodes.Node) -> Iterator[str]:
    for node in found:
        if isinstance(node, nodes.Const) and isinstance(node.value, str):
            yield from node.value.replace(",", ".").split(".")


# -- guards ---------------------------------------------------------------------------------------------------------


def _guard(name: str, *args: Any) -> nodes.Call:
    """A call of the environment's: a variable is something that the template could set."""
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None, lineno=args[0].lineno)


def _payment(node: nodes.Node) -> nodes.Const:
    """Units for one round of a loop, or one call of a macro, that leaves nothing out."""
    inside = node.find_all(nodes.Node)
    return nodes.Const(sum(ITEM if isinstance(n, _MADE) else _NODE for n in inside), lineno=node.lineno)


class _Guards(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - named as Jinja does
        self.generic_visit(node)
        return _guard("concatenated", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (end or nodes.Const(None) for end in (node.arg.start, node.arg.stop, node.arg.step))
        return _guard("sliced", node.node, *ends)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        first = node.ops[0]
        if len(node.ops) == 1 and first.op in ("in", "notin"):
            found = _guard("contained", node.expr, first.expr)
            return found if first.op == "in" else nodes.Not(found, lineno=node.lineno)
        if len(node.ops) > 1 or not isinstance(first.expr, nodes.Const):  # a constant is short
            node.expr = _guard("measured", node.expr)
            for operand in node.ops:
                operand.expr = _guard("measured", operand.expr)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const) or not isinstance(pair.key.value, str):
                pair.key = _guard("key", pair.key)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        payment = _payment(node)
        self.generic_visit(node)
        node.iter = _guard("iterated", node.iter, payment)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:  # noqa: N802
        payment = _payment(node)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_guard("spend", payment), lineno=node.lineno))
        return node

    visit_CallBlock = visit_Macro  # noqa: N815


def _iterated(values: Any, payment: int) -> Any:
    """What a loop runs over; all of its rounds are paid for."""
    if type(values) not in SIZED:
        raise Refused(f"it loops over {named(values)}")
    spend((ITEM + payment) * len(values))
    return values


# -- running --------------------------------------------------------------------------------------------------------

_GUARDS: Final[dict[str, Callable[..., Any]]] = {
    "spend": spend,
    "measured": measured,
    "key": key,
    "iterated": _iterated,
    "contained": methods.contained,
    "concatenated": methods.concatenated,
    "sliced": methods.sliced,
}
_OWN: Final = frozenset(_GUARDS.values())


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Reading],
            optimized=False,  # nothing is calculated, unpaid, while it is compiled
            finalize=pass_context(lambda _, value: text_of(value)),  # nor printed then, as it asks for the context
        )
        self.filters = dict(filters.FILTERS)
        self.tests = dict(filters.TESTS)
        self.globals = {name: partial(function) for name, function in filters.GLOBALS.items()}
        self.extend(**_GUARDS)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Parser(self, source, name, filename).parse()
        _check(tree)
        return _Guards().visit(tree)  # type: ignore[no-any-return]

    def concat(self, parts: Any) -> str:
        """Join what was printed, of which no more than references are there yet."""
        texts = list(parts)
        spend(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:  # noqa: ARG002
        return methods.calculated(operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Call a macro or an entry of the tables, and nothing else."""
        if type(obj) is FunctionType and obj in _OWN:
            return obj(*args)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        if type(obj) is Macro:
            return _nested(obj, *args, **kwargs)
        if type(obj) is not partial and not isinstance(obj, Undefined):  # which says that it is undefined
            raise Refused(f"it calls {named(obj)}")
        spend(ITEM)
        return obj(*args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if attribute in methods.METHODS.get(kind, ()):
            return partial(methods.METHODS[kind][attribute], obj)
        if (kind is LoopContext and attribute in methods.LOOP) or (kind is Namespace and not attribute.startswith("_")):
            return getattr(obj, attribute) if hasattr(obj, attribute) else self._missing(obj, attribute)
        return self._item(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        found = self._item(obj, argument)
        return self.getattr(obj, argument) if isinstance(found, Undefined) and isinstance(argument, str) else found

    def _item(self, obj: Any, name: Any) -> Any:
        try:
            if isinstance(obj, dict):
                return obj[key(name)]
            if type(obj) in SIZED:
                return obj[name]
        except (TypeError, LookupError):
            pass
        return self._missing(obj, name)

    def _missing(self, obj: Any, name: Any) -> Undefined:
        """Undefined with a name that an error can write out."""
        short = type(name) is int and abs(name) >> 64 == 0
        return self.undefined(obj=obj, name=name[:_NAME] if isinstance(name, str) else name if short else named(name))


def _nested(macro: Macro, /, *args: Any, **kwargs: Any) -> Any:
    budget = in_use.get()
    spend(ITEM)
    budget.calls += 1
    if budget.calls > _MOST_CALLS:
        raise Refused("its macros call one another without an end")
    try:
        return macro(*args, **kwargs)
    finally:
        budget.calls -= 1


SANDBOX: Final = _Sandbox()
