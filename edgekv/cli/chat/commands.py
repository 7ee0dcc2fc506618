"""Commands: what begins with a slash."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from edgekv import policies, render
from edgekv.cli.chat import conversations, drawing, opening
from edgekv.errors import UsageError
from edgekv.receipts import Receipt
from edgekv.spans import Target
from edgekv.wording import count, size

if TYPE_CHECKING:
    from edgekv.cli.chat.loop import State


@dataclass(frozen=True)
class Command:
    """usage: what stands behind the name; [WORD] may be left out. takes: what completes it."""

    run: Callable[[State, str], None]
    usage: str
    help: str
    takes: str = ""


def run(state: State, line: str) -> None:
    """Carry out a line that begins with a slash. Raises UsageError, and what the session raises."""
    name, _, rest = line[1:].strip().partition(" ")
    if name not in COMMANDS:
        raise UsageError(f"no command is called /{name}{_near(name, COMMANDS, '/')} (see /help)")
    command, rest = COMMANDS[name], rest.strip()
    if not rest and command.usage and not command.usage.startswith("["):
        raise UsageError(f"/{name} {command.usage}: {command.help}")
    if rest and not command.usage:
        raise UsageError(f"/{name} takes nothing behind it, not {rest!r}")
    command.run(state, rest)


def _near(name: str, known: Iterable[str], before: str = "") -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {before}{near[0]}?" if near else ""


def complete(state: State, text: str) -> Iterable[str]:
    """What the word at the end of a command may become."""
    words = text.split(" ")
    if len(words) == 1:
        return [f"/{name}" for name in COMMANDS if f"/{name}".startswith(text)]
    command = COMMANDS.get(words[0][1:])
    takes = command.takes if command is not None else ""
    choices: list[str] = []
    if takes == "span":
        choices = [span.name for span in state.chat.session.spans]
    elif takes == "conversation":
        choices = [path.stem for path in conversations.paths()]
    elif takes == "setting" and len(words) == 2:
        choices = list(_SETTINGS)
    return [choice for choice in choices if choice.startswith(words[-1])]


# -- looking ---------------------------------------------------------------------------------------------------------


def _help(state: State, rest: str) -> None:  # noqa: ARG001
    rows = [(f"/{name} {c.usage}".rstrip(), c.help) for name, c in COMMANDS.items()]
    facts = {"commands": [{"usage": usage, "help": said} for usage, said in rows]}
    state.screen.show("help", facts, drawing.rows([*rows, ("TARGET", _TARGET)]))


def _spans(state: State, rest: str) -> None:  # noqa: ARG001
    session = state.chat.session
    facts = [
        {
            "name": span.name,
            "role": span.role,
            "tags": sorted(span.tags),
            "start": span.start,
            "stop": span.stop,
            "states": render.states_of(session, span),
        }
        for span in session.spans
    ]
    state.screen.show("spans", {"spans": facts}, drawing.Spans(session))


def _map(state: State, rest: str) -> None:  # noqa: ARG001
    drawn = drawing.Cells(state.chat.session)
    state.screen.show("map", drawn.facts(), drawn)


def _stats(state: State, rest: str) -> None:  # noqa: ARG001
    stats = state.chat.session.stats
    facts = {**asdict(stats), "turns": len(state.chat.turns), "num_reread": state.chat.num_reread}
    rows = [
        ("turns", f"{len(state.chat.turns):,}"),
        ("tokens", f"{stats.visible:,} visible, {stats.masked:,} masked, {stats.parked:,} parked, "
                   f"{stats.evicted:,} evicted"),
        ("cells", f"{stats.cells_used:,} of {stats.cells:,}; {size(stats.kv_bytes_used)} of KV in use"),
        ("read", f"{stats.prefilled:,}, and {stats.generated:,} generated"),
        ("read again", f"{stats.reread:,} behind an edit, {state.chat.num_reread:,} tokenized with what follows"),
        ("not read again", f"{stats.reused:,} that a restart would have read again"),
    ]  # fmt: skip
    state.screen.show("stats", facts, drawing.rows(rows))


def _plan(state: State, rest: str) -> None:
    policy = policies.parse(rest) if rest else None
    if policy is None and state.chat.options.policy is None:
        raise UsageError("this chat has no policy; name one: /plan keep_turns(4)")
    cuts = state.chat.plan(policy)
    facts = {"policy": str(policy or state.chat.options.policy), "cuts": [asdict(cut) for cut in cuts]}
    rows = [(cut.name, count(cut.tokens, "token"), cut.why) for cut in cuts] or [("nothing would go", "", "")]
    state.screen.show("plan", facts, drawing.rows(rows))


# -- hiding ----------------------------------------------------------------------------------------------------------


def _target(rest: str) -> Target:
    """One name, or several; START:STOP is an index range."""
    targets: list[Target] = []
    for word in rest.split():
        start, colon, stop = word.partition(":")
        numbers = colon and all(_is_whole(part) for part in (start, stop))
        targets.append((int(start), int(stop)) if numbers else word)
    return targets if len(targets) > 1 else targets[0]


def _edit(verb: str) -> Callable[[State, str], None]:
    def edit(state: State, rest: str) -> None:
        _said(state, getattr(state.chat, verb)(_target(rest)))

    return edit


def _said(state: State, receipt: Receipt) -> None:
    state.screen.show("receipt", receipt.as_dict(), str(receipt))


def _pin(pinned: bool) -> Callable[[State, str], None]:
    def pin(state: State, rest: str) -> None:
        names = state.chat.pin(_target(rest), pinned=pinned)
        said = f"{', '.join(names)}: {'no policy hides it' if pinned else 'policies may hide it'} from now on"
        state.screen.show("pin", {"spans": list(names), "pinned": pinned}, said)

    return pin


def _undo(state: State, rest: str) -> None:  # noqa: ARG001
    _said(state, state.chat.undo())


def _summarize(state: State, rest: str) -> None:
    keep = _whole(rest or "1", "how many exchanges stay")
    with state.reading("summing up"):
        cuts = state.chat.summarize(keep)
    summary = next((t.message.content for t in reversed(state.chat.turns) if "summary" in t.message.tags), "")
    said = f"{summary}\n\n{count(sum(c.tokens for c in cuts), 'token')} hidden" if cuts else "nothing is old enough"
    state.screen.show("summary", {"text": summary, "cuts": [asdict(cut) for cut in cuts]}, said)


# -- branches, files, the system text --------------------------------------------------------------------------------


def _fork(state: State, rest: str) -> None:  # noqa: ARG001
    from edgekv.cli.chat.loop import Branch

    chat, autosave = state.chat.fork(), state.branch.autosave
    state.branches.append(Branch(chat, autosave and autosave.another(chat)))
    state.screen.show("fork", {"depth": len(state.branches) - 1}, "a branch on the same cells; /back returns")


def _back(state: State, rest: str) -> None:  # noqa: ARG001
    if len(state.branches) == 1:
        raise UsageError("there is no fork to come back from; /fork makes one")
    state.branches.pop().chat.session.close()
    last = state.chat.turns[-1].name if state.chat.turns else "the beginning"
    state.screen.show("back", {"depth": len(state.branches) - 1}, f"back where the fork began, behind {last}")


def _save(state: State, rest: str) -> None:
    path = Path(os.path.expanduser(rest))
    num_bytes = state.chat.save(path)
    if state.branch.autosave is not None:
        state.branch.autosave.wrote(path)
    state.screen.show("saved", {"path": str(path), "size": num_bytes}, f"saved: {path} ({size(num_bytes)})")


def _load(state: State, rest: str) -> None:
    if not rest:
        _list(state)
        return
    path = conversations.find(rest, state.shown or (conversations.kept() if rest.isdecimal() else []))
    chat, autosave = state.chat, state.branch.autosave
    keep = opening.Keep(kv=autosave is not None and autosave.kv)
    threads = chat.session.engine.settings.n_threads
    opened = opening.saved(path, chat.options, keep, state.screen, threads=threads, current=state.model)
    state.go_on_with(opened if autosave is not None else replace(opened, autosave=None))
    turns, visible = len(opened.chat.turns), opened.chat.session.stats.visible
    said = f"{path}: {count(turns, 'turn')}, {count(visible, 'token')} visible"
    state.screen.show("loaded", {"path": str(path), "turns": turns}, said)


def _list(state: State) -> None:
    state.shown = conversations.kept()
    summary = conversations.summary(state.shown)
    hint = f"{summary}\n/load NUMBER goes on with one" if state.shown else summary
    state.screen.show("conversations", conversations.facts(state.shown), drawing.Listed(state.shown, hint))


def _system(state: State, rest: str) -> None:
    if rest:
        state.chat.set_system(rest)
    said = next((turn.message.content for turn in state.chat.turns if turn.message.role == "system"), "")
    state.screen.show("system", {"text": said}, said or "no system text")


def _exit(state: State, rest: str) -> None:  # noqa: ARG001
    state.ended = True


# -- settings --------------------------------------------------------------------------------------------------------


def _set(state: State, rest: str) -> None:
    from edgekv.cli.chat import loop

    if rest:
        name, _, value = rest.partition(" ")
        if name not in _SETTINGS:
            raise UsageError(f"nothing is called {name!r}{_near(name, _SETTINGS)} (see /set)")
        _SETTINGS[name](state, name, value.strip())
    facts = loop.settings(state)
    state.screen.show("settings", facts, drawing.rows([(key, str(value)) for key, value in facts.items()]))


def _set_sampling(kind: type) -> Callable[[State, str, str], None]:
    def change(state: State, name: str, value: str) -> None:
        try:
            wanted: Any = None if name == "seed" and value in ("", "none") else kind(value)
        except ValueError as err:
            raise UsageError(f"{name} is a number, not {value!r}") from err
        for branch in state.branches:
            session = branch.chat.session
            session.sampling = replace(session.sampling, **{name: wanted})

    return change


def _set_option(read: Callable[[str], Any]) -> Callable[[State, str, str], None]:
    def change(state: State, name: str, value: str) -> None:
        wanted = read(value)
        for branch in state.branches:
            branch.chat.options = replace(branch.chat.options, **{name: wanted})

    return change


def read_policy(text: str) -> policies.Policy | None:
    """A policy as it is written, "none" for none. Raises UsageError."""
    return None if text.strip().lower() in ("", "none") else policies.parse(text)


def _whole(text: str, what: str) -> int:
    if not _is_whole(text):
        raise UsageError(f"{what} is a whole number, not {text!r}")
    return int(text)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 16


_SETTINGS: Final[dict[str, Callable[[State, str, str], None]]] = {
    "temperature": _set_sampling(float),
    "top_k": _set_sampling(int),
    "top_p": _set_sampling(float),
    "min_p": _set_sampling(float),
    "repeat_penalty": _set_sampling(float),
    "seed": _set_sampling(int),
    "max_tokens": _set_option(lambda text: _whole(text, "max_tokens")),
    "policy": _set_option(read_policy),
    "spill": _set_option(str),
    "then": _set_option(str),
}


def _compare(state: State, rest: str) -> None:
    from edgekv.cli.chat import comparing

    comparing.compare(state, _target(rest) if rest else None)


_TARGET: Final = "a name, a glob (user-*), role:tool, tag:thinking, an index range (10:80), or several of these"

COMMANDS: Final[dict[str, Command]] = {
    "help": Command(_help, "", "this list"),
    "spans": Command(_spans, "", "the parts of the conversation and their states"),
    "map": Command(_map, "", "which cells hold what"),
    "mask": Command(_edit("mask"), "TARGET", "hide; the cells stay, and /unmask is instant", "span"),
    "unmask": Command(_edit("unmask"), "TARGET", "show again what was masked or parked", "span"),
    "park": Command(_edit("park"), "TARGET", "hide, and move K and V to host memory", "span"),
    "evict": Command(_edit("evict"), "TARGET", "hide for good, and free the cells", "span"),
    "pin": Command(_pin(True), "TARGET", "keep from every policy", "span"),
    "unpin": Command(_pin(False), "TARGET", "let policies hide it again", "span"),
    "plan": Command(_plan, "[POLICY]", "what a policy would hide now, and why"),
    "summarize": Command(_summarize, "[KEEP]", "sum up all but the newest KEEP exchanges (1), and hide them"),
    "undo": Command(_undo, "", "take the newest edit back"),
    "fork": Command(_fork, "", "go on in a branch"),
    "back": Command(_back, "", "leave the branch for what it came from"),
    "save": Command(_save, "FILE", "write the whole conversation"),
    "load": Command(_load, "[NUMBER|FILE]", "go on with a saved one; list what is kept", "conversation"),
    "system": Command(_system, "[TEXT]", "show the system text, or put another in its place"),
    "set": Command(_set, "[NAME VALUE]", "show or change settings", "setting"),
    "stats": Command(_stats, "", "tokens, cells, what was read and read again"),
    "compare": Command(_compare, "[TARGET]", "measure mask against restart on this conversation", "span"),
    "exit": Command(_exit, "", "end"),
}
