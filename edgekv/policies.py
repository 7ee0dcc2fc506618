"""What to hide when a conversation grows: a policy looks at a View and returns Cuts; nothing is changed here.

A *turn* is a span tagged "turn": one chat message with its delimiters. An *exchange* is a user turn and all turns up
to the next one. Nested in turns, "thinking" tags a block of reasoning and "tool_result" the content of a tool's answer,
with "tool:NAME" beside it. Never touched: attention sinks, spans tagged "pinned" or "summary", and those of role
"system". What stands in no turn is touched by ``sliding_window`` alone. Pure numpy.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import ContextFull, UsageError
from .planner import NUM_SINKS
from .spans import Range, Span
from .wording import count

Places: TypeAlias = npt.NDArray[np.intp]
#: An int is a number of tokens, a float in (0, 1] a share of the cells: 1 is one token, 1.0 the whole cache.
Amount: TypeAlias = float
#: The tags of what no policy touches.
_NEVER: Final = frozenset({"pinned", "summary"})


@dataclass(frozen=True)
class Cut:
    """A part to hide, and why.

    name: the span's, or "window". ranges: sorted, disjoint index ranges of visible tokens; as a target they select
    these and no other visible token. summarise: a summary of all such cuts is to be made before they go. beyond: no
    policy's rule asks for it; without it there is no room for what comes next.
    """

    name: str
    ranges: tuple[Range, ...]
    why: str
    summarise: bool = False
    beyond: bool = False

    @property
    def tokens(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, eq=False)
class View:
    """What a policy looks at: plain data, no session.

    spans: all of them. visible: int64 (n,), the indexes of the visible tokens in reading order, in which a text that
    was inserted has higher indexes than what stands behind it. cells: of the cache. free: cells that are, or would be
    once what is hidden already gives its own back. need: cells wanted for what comes next. opens: whether that begins
    an exchange of its own, so that all there are now are old ones. shared: int64, the indexes of visible tokens whose
    cells other sessions hold too, so that hiding them frees none. elsewhere: cells that other sessions hold.
    """

    spans: tuple[Span, ...]
    visible: npt.NDArray[np.int64]
    cells: int
    free: int
    need: int = 0
    opens: bool = False
    shared: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    elsewhere: int = 0

    @property
    def used(self) -> int:
        """Visible tokens once what comes next is read."""
        return len(self.visible) + self.need

    def amount(self, amount: Amount) -> int:
        """That many tokens; a share is rounded down."""
        return int(amount * self.cells) if isinstance(amount, float) else amount

    @cached_property
    def _by_index(self) -> Places:
        return np.argsort(self.visible)

    def at(self, span: Span) -> Places:
        """Where in ``visible`` a span stands, ascending: its tokens, and what was later put between two of them
        (a gist in the place of a tool's answer goes with its turn)."""
        first, last = np.searchsorted(self.visible, (span.start, span.stop), sorter=self._by_index)
        own = np.sort(self._by_index[first:last])
        gaps = [np.arange(own[i] + 1, own[i + 1]) for i in np.flatnonzero(np.diff(own) > 1)]
        return np.sort(np.concatenate([own, *(gap for gap in gaps if self.visible[gap].min() >= span.stop)]))

    @cached_property
    def touchable(self) -> npt.NDArray[np.bool_]:
        """bool (n,): whether each of ``visible`` may go."""
        return self._touchable(_NEVER)

    def _touchable(self, never: Iterable[str]) -> npt.NDArray[np.bool_]:
        """As :attr:`touchable`, where the spans with one of these tags never go."""
        may_go = self.visible >= NUM_SINKS
        may_go[:NUM_SINKS] = False  # the sinks of a text that was inserted in front of all others
        for span in self.spans:
            if span.role == "system" or not span.tags.isdisjoint(never):
                may_go[self.at(span)] = False
        return may_go

    def tagged(self, tag: str) -> list[Span]:
        """The spans with that tag that have a visible token, in reading order."""
        placed = [(self.at(s), s) for s in self.spans if tag in s.tags]
        return [s for at, s in sorted((p for p in placed if len(p[0])), key=lambda p: (p[0][0], -len(p[0])))]

    def num_hideable(self, spans: Iterable[Span]) -> int:
        """The visible tokens of spans that are no attention sinks, and whose cells nobody else holds."""
        free = self._touchable(set()) & ~np.isin(self.visible, self.shared)
        here = np.zeros(len(self.visible), np.bool_)
        for span in spans:
            here[self.at(span)] = True
        return int(np.count_nonzero(here & free))

    def num_touchable(self, spans: Iterable[Span]) -> int:
        return sum(int(self.touchable[self.at(span)].sum()) for span in spans)

    @cached_property
    def exchanges(self) -> list[list[Span]]:
        """The turns by exchange, oldest first; what stands in front of the first user turn is one as well.

        Those of which nothing may go are left out, but for the newest.
        """
        found: list[list[Span]] = []
        for turn in self.tagged("turn"):
            if turn.role == "system" or "summary" in turn.tags:
                continue  # a summary that stands last would make an older one of the exchange that goes on
            if turn.role == "user" or not found:
                found.append([])
            found[-1].append(turn)
        return [turns for turns in found if turns is found[-1] or self.num_touchable(turns)]

    def ranges(self, at: Places) -> tuple[Range, ...]:
        """The index ranges of these places. They end where other visible text was put in: a range would take it."""
        at = at[np.argsort(self.visible[at])]
        index = self.visible[at]
        ends = np.flatnonzero((np.diff(index) != 1) | (np.diff(at) != 1))
        starts, stops = index[[0, *(ends + 1)]], index[[*ends, -1]] + 1
        return tuple(zip(starts.tolist(), stops.tolist(), strict=True))

    def cuts(
        self, parts: Iterable[tuple[Span, str]], *, summarise: bool = False, never: Iterable[str] = _NEVER
    ) -> tuple[Cut, ...]:
        """A cut for each of these spans, with its why, of which something may go; no token is in two, and none in a
        span with one of the tags ``never``."""
        left, found = self._touchable(never), list[Cut]()
        for span, why in parts:
            at = self.at(span)
            at = at[left[at]]
            left[at] = False
            if len(at):
                found.append(Cut(span.name, self.ranges(at), why, summarise))
        return tuple(found)

    def cut_oldest(self, num: int, why: str, *, summarise: bool = False) -> tuple[Cut, ...]:
        """The turns of that many exchanges."""
        old, total = self.exchanges[:num], len(self.exchanges)
        parts = ((turn, f"exchange {i} of {total}; {why}") for i, turns in enumerate(old, 1) for turn in turns)
        return self.cuts(parts, summarise=summarise)

    def without(self, cuts: Iterable[Cut]) -> View:
        """The view once these are hidden and have given their cells back."""
        gone = [np.arange(start, stop) for cut in cuts for start, stop in cut.ranges]
        goes = np.isin(self.visible, np.concatenate([np.empty(0, np.int64), *gone]))
        freed = np.count_nonzero(~np.isin(self.visible[goes], self.shared))
        return replace(self, visible=self.visible[~goes], free=self.free + int(freed))

    # -- the last resort ----------------------------------------------------------------------------------------

    def cut_for_need(self) -> tuple[Cut, ...]:
        """What goes whatever a policy says, until ``need`` cells are free: exchanges, the oldest first; of the one
        that goes on, the turns between its question and its last turn; at last summaries."""
        cuts, view = tuple[Cut, ...](), self
        for turns, never in self._last_resort():
            if view.free < view.need:
                why = "without it there is no room for what comes next"
                more = view.cuts(((turn, why) for turn in turns), never=never)
                cuts, view = cuts + more, view.without(more)
        return tuple(replace(cut, beyond=True) for cut in cuts)

    def _last_resort(self) -> Iterable[tuple[list[Span], Iterable[str]]]:
        """Turns that may go together, in order, and the tags of what stays of them all the same."""
        old = self.exchanges
        if not self.opens and old:
            *old, (*begun, _) = old
            old += [[turn] for turn in begun if turn is not begun[0] or turn.role != "user"]
        yield from ((turns, _NEVER) for turns in old)
        every = self.tagged("turn")
        yield [t for t in every if "summary" in t.tags and (self.opens or t is not every[-1])], {"pinned"}


class Policy(ABC):
    """What to hide. ``a + b`` runs both, b on what a left; ``parse(str(policy))`` is the policy again."""

    @abstractmethod
    def plan(self, view: View) -> tuple[Cut, ...]:
        """What would be hidden now; changes nothing, and is the same for the same view."""

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The policies this one runs, in order."""
        return (self,)

    def __add__(self, other: Policy) -> Policy:
        return Chain(self.parts + other.parts) if isinstance(other, Policy) else NotImplemented

    def __str__(self) -> str:
        args: list[str] = []
        for name, given in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name)
            text = str(value) if isinstance(value, float) else repr(value)  # the repr of numpy's is no literal
            args.append(text if given.default is given.empty else f"{name}={text}")
        return f"{_name(type(self))}({', '.join(args)})"


@dataclass(frozen=True)
class Chain(Policy):
    """Policies in order; each sees what those before it left."""

    policies: tuple[Policy, ...]

    def plan(self, view: View) -> tuple[Cut, ...]:
        cuts: tuple[Cut, ...] = ()
        for policy in self.policies:
            more = policy.plan(view)
            cuts, view = cuts + more, view.without(more)
        return cuts

    @property
    def parts(self) -> tuple[Policy, ...]:
        return self.policies

    def __str__(self) -> str:
        return " + ".join(map(str, self.policies))


#: Hides nothing of its own accord.
NONE: Final = Chain(())


@dataclass(frozen=True)
class SlidingWindow(Policy):
    """All visible tokens go but the first ``sinks`` and the last ``recent`` (StreamingLLM, arXiv:2309.17453), whatever
    turns they are of. What is never touched stays, and counts."""

    sinks: int = NUM_SINKS
    recent: int = 1024

    def __post_init__(self) -> None:
        _check_whole("sinks", self.sinks, 0)
        _check_whole("recent", self.recent, 1)

    def plan(self, view: View) -> tuple[Cut, ...]:
        at = np.arange(self.sinks, len(view.visible) - self.recent)
        at = at[view.touchable[at]]
        why = f"all but the first {self.sinks:,} and the last {self.recent:,} visible tokens"
        return (Cut("window", view.ranges(at), why),) if len(at) else ()


@dataclass(frozen=True)
class KeepTurns(Policy):
    """Only the last ``n`` exchanges stay; the turns of older ones go whole, with their delimiters."""

    n: int

    def __post_init__(self) -> None:
        _check_whole("n", self.n, 1)

    def plan(self, view: View) -> tuple[Cut, ...]:
        return view.cut_oldest(max(0, len(view.exchanges) - self.n), f"the last {self.n:,} stay")


@dataclass(frozen=True)
class HideOldest(Policy):
    """When the visible tokens and those that come next exceed ``trigger``, the oldest exchanges go, whole, until they
    are no more than ``target``. The newest exchange stays in any case."""

    trigger: Amount = 1.0
    target: Amount = 0.75
    _summarise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_amount("trigger", self.trigger)
        _check_amount("target", self.target)
        if isinstance(self.trigger, float) == isinstance(self.target, float) and self.target > self.trigger:
            raise UsageError(f"target {self.target} is above trigger {self.trigger}; let it be the same or lower")

    def plan(self, view: View) -> tuple[Cut, ...]:
        target = view.amount(self.target)
        if view.used <= max(view.amount(self.trigger), target):
            return ()
        num, left = 0, view.used
        while left > target and num < len(view.exchanges) - 1:
            num, left = num + 1, left - view.num_touchable(view.exchanges[num])
        why = f"down from {count(view.used, 'token')}, with what comes next, to {target:,}"
        return view.cut_oldest(num, why, summarise=self._summarise)


@dataclass(frozen=True)
class SummarizeOldest(HideOldest):
    """As :class:`HideOldest`, and a summary is made of what goes before it does.

    kept: the summary stays in the cache as it was generated, in sight of what it sums up; else it is read again
    without that. The policy only carries this, for whoever makes the summary.
    """

    trigger: Amount = 0.8
    target: Amount = 0.4
    kept: bool = True
    _summarise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.kept, bool):
            raise UsageError(f"kept is True or False, not {self.kept!r}")


@dataclass(frozen=True)
class ClearToolUses(Policy):
    """When the visible tokens and those that come next exceed ``trigger``, tool results go, but for the newest ``keep``
    and those of the tools in ``exclude``; none goes where that frees less than ``clear_at_least``.

    As clear_tool_uses_20250919 in Anthropic's context editing, whose trigger is 100,000 tokens of 200,000. The turn
    keeps its delimiters, so that the template stays whole.
    """

    trigger: Amount = 0.5
    keep: int = 3
    clear_at_least: Amount = 0
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_amount("trigger", self.trigger)
        _check_whole("keep", self.keep, 0)
        _check_amount("clear_at_least", self.clear_at_least, least=0)
        if not isinstance(self.exclude, tuple) or not all(isinstance(name, str) for name in self.exclude):
            raise UsageError(f"exclude is a tuple of names of tools, such as ('search',), not {self.exclude!r}")

    def plan(self, view: View) -> tuple[Cut, ...]:
        if view.used <= view.amount(self.trigger):
            return ()
        results, excluded = view.tagged("tool_result"), {f"tool:{name}" for name in self.exclude}
        old = enumerate(results[: max(0, len(results) - self.keep)], 1)
        why = f"of {len(results)}; the last {self.keep:,} stay"
        cuts = view.cuts((s, f"tool result {i} {why}") for i, s in old if not s.tags & excluded)
        return cuts if sum(c.tokens for c in cuts) >= view.amount(self.clear_at_least) else ()


@dataclass(frozen=True)
class ClearThinking(Policy):
    """Reasoning goes, but for that of the newest ``keep`` turns that have any; with 0, all of it.

    As clear_thinking_20251015 in Anthropic's context editing.
    """

    keep: int = 1

    def __post_init__(self) -> None:
        _check_whole("keep", self.keep, 0)

    def plan(self, view: View) -> tuple[Cut, ...]:
        by_turn: dict[Span, list[Span]] = {}
        for block in view.tagged("thinking"):
            by_turn.setdefault(_turn_of(block, view.spans), []).append(block)
        old = enumerate(list(by_turn.values())[: max(0, len(by_turn) - self.keep)], 1)
        why = f"of {len(by_turn)} with thinking; the last {self.keep:,} stay"
        return view.cuts((block, f"turn {i} {why}") for i, blocks in old for block in blocks)


@dataclass(frozen=True)
class BlockMarkers(Policy):
    """For models trained to fold their own reasoning: a block goes when its summary is written (Memento,
    arXiv:2604.09852). That is while they generate, so ``plan`` hides nothing; see :meth:`finished`."""

    start: str
    end: str
    summary_start: str
    summary_end: str

    def __post_init__(self) -> None:
        if not all(isinstance(m, str) and m for m in self._markers) or len(set(self._markers)) < 4:
            raise UsageError(f"block_markers takes four different texts, not {self._markers!r}")

    @property
    def _markers(self) -> tuple[str, ...]:
        return (self.start, self.end, self.summary_start, self.summary_end)

    def plan(self, view: View) -> tuple[Cut, ...]:  # noqa: ARG002
        return ()

    def finished(self, text: str, after: int = 0) -> list[Range]:
        """Character ranges of the blocks, markers included, whose summary ends behind character ``after``.

        A summary begins behind its block, and no other block begins before it ends. Of nested starts the innermost
        counts, and what is not closed is passed over. Never raises.
        """
        found, opened, block, summing = list[Range](), -1, (0, 0), False
        longest_first = sorted(self._markers, key=len, reverse=True)  # one may be the beginning of another
        for match in re.finditer("|".join(map(re.escape, longest_first)), text):
            if match[0] == self.start:
                opened, block, summing = match.start(), (0, 0), False
            elif match[0] == self.end and opened >= 0:
                opened, block = -1, (opened, match.end())
            elif match[0] == self.summary_start:
                summing = block != (0, 0)
            elif match[0] == self.summary_end and summing:
                found += [block] if match.end() > after else []
                block, summing = (0, 0), False
        return found


def make_room(policy: Policy, view: View, reserve: int = 0) -> tuple[Cut, ...]:
    """The policy's plan, so that ``view.need`` cells are free, and ``reserve`` more where that can be.

    Where its rule makes too little room, :meth:`View.cut_for_need` says what goes as well; such cuts are ``beyond``.
    What a summary takes is not counted. Raises ContextFull, with what helps, where all that may go is too little.
    """
    more = replace(view, need=view.need + reserve)
    for wanted in (more, view):
        cuts = policy.plan(wanted)
        if wanted.without(cuts).free >= wanted.need:
            return cuts
    for wanted in (more, view):
        cuts = policy.plan(wanted)
        left = wanted.without(cuts)
        cuts += left.cut_for_need()
        left = wanted.without(cuts)
        if left.free >= left.need:
            return cuts
    raise ContextFull(_too_little(left))


def _too_little(view: View) -> str:
    """Why there is no room although all that may go is gone from the view, and the one thing that helps."""
    short = view.need - view.free
    pinned = [span for span in view.tagged("pinned") if span.role != "system"]
    held = view.num_hideable(pinned)
    room = f"{count(view.need, 'cell')} are needed, and {view.free:,} of {view.cells:,} can be made free"
    if view.need > view.cells:
        helps = "send less at once"
    elif short <= held:
        return f"{room}: pinned text holds {held:,}; unpin {', '.join(span.name for span in pinned)}"
    elif short <= view.elsewhere:
        return f"{room}: other sessions on this engine hold {view.elsewhere:,}; close a fork"
    else:
        helps = f"send less at once (at most about {view.free:,} tokens)" if view.free else "begin a new chat"
    return f"{room}; {helps}, or open with a larger n_ctx, of at least {view.cells + short:,}"


def _turn_of(part: Span, spans: Iterable[Span]) -> Span:
    """The turn a part is nested in; the part itself where there is none."""
    return next((s for s in spans if "turn" in s.tags and s.start <= part.start and part.stop <= s.stop), part)


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} is a whole number of at least {least}, not {value!r}")


def _check_amount(name: str, value: object, least: int = 1) -> None:
    share = isinstance(value, float) and 0 < value <= 1
    if not share and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise UsageError(f"{name} is a number of tokens, or a share of the cells such as 0.75, not {value!r}")


def _name(kind: type) -> str:
    """KeepTurns is "keep_turns"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


sliding_window, keep_turns = SlidingWindow, KeepTurns
hide_oldest, summarize_oldest = HideOldest, SummarizeOldest
clear_tool_uses, clear_thinking, block_markers = ClearToolUses, ClearThinking, BlockMarkers
_FACTORIES: Final[dict[str, Callable[..., Policy]]] = {
    _name(kind): kind
    for kind in (SlidingWindow, KeepTurns, HideOldest, SummarizeOldest, ClearToolUses, ClearThinking, BlockMarkers)
}


def parse(text: str) -> Policy:
    """The policy of a text such as "keep_turns(8) + clear_thinking(keep=1)". Only literals count; nothing is evaluated.

    Raises UsageError, with the names that are near, or with what the policy takes.
    """
    try:
        return _parsed(ast.parse(text.strip(), mode="eval").body)
    except UsageError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # ast.parse: any of these for odd text
        raise UsageError(f"{text!r} is no policy; write 'keep_turns(8)', several with '+' between them") from error


def _parsed(node: ast.expr) -> Policy:
    """The policy of "name(arguments)", of "name" where it needs none, or of several in a sum."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _parsed(node.left) + _parsed(node.right)
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = ast.unparse(call.func)
    if name not in _FACTORIES:
        near = difflib.get_close_matches(name, _FACTORIES, n=3, cutoff=0.5) or _FACTORIES
        raise UsageError(f"no policy is called {name!r}; there is {', '.join(near)}")
    make = _FACTORIES[name]
    try:
        given = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        if len(given) < len(call.keywords):
            raise TypeError("a name is there twice, which only a compiler would refuse")
        return make(*map(ast.literal_eval, call.args), **given)
    except (TypeError, ValueError) as error:
        takes = str(inspect.signature(make)).removesuffix(" -> None").replace("'", "")
        why = f": {error}" if isinstance(error, UsageError) else ""
        raise UsageError(f"{ast.unparse(node)} does not fit {name}{takes}{why}") from error
