"""``edgekv chat``: talk with a model; hide, show, fork and save parts of the conversation meanwhile."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.cli.output import Words, console, model_argument, print_json
from edgekv.errors import UsageError
from edgekv.memory import KV_BLOCKS

if TYPE_CHECKING:
    from edgekv.chat import Options
    from edgekv.cli.chat.loop import State

_HELP = """Talk with a model, offline, for as long as you like.

    \b
    edgekv chat
    edgekv chat my.gguf --system "You are terse." --n-ctx 2048 --policy "keep_turns(8)"
    echo "Name three fruits." | edgekv chat --json

    No turn reads more than what is new in it: when the cache fills up, a policy hides the oldest turns, and nothing
    behind them is read again. Commands begin with a slash: /help lists them. Enter sends, Alt-Enter begins a line,
    Ctrl-C stops an answer and keeps what was said, Ctrl-D ends.

    \b
    Policies: hide_oldest(trigger=1.0, target=0.75), keep_turns(N), sliding_window(sinks=4, recent=N),
      summarize_oldest(trigger=0.8, target=0.4, kept=True), clear_tool_uses(trigger, keep),
      clear_thinking(keep=1), block_markers(start, end, summary_start, summary_end); several with "+"; none

    Without a terminal each line is a message, or several between two lines of three quotes. Exits with 1 if an error
    was said.
    """


@dataclass(frozen=True)
class Given:
    """The command line."""

    model: str
    system: str | None
    template: Path | None
    attached: tuple[str, ...]
    load_from: str | None
    policy: str
    spill: str
    then: str
    max_tokens: int
    temperature: float | None
    seed: int | None
    n_ctx: int | None
    kv_type: str | None
    threads: int | None
    memory_budget: str | None
    go_on: bool
    autosave: str | None
    autosave_kv: bool
    no_autosave: bool


@click.command(help=_HELP)
@model_argument
@click.option("--system", type=Words(), metavar="TEXT", help="The system text.")
@click.option(
    "--template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A chat template (Jinja) in place of the model's own.",
)
@click.option("--attach", "attached", multiple=True, metavar="FILE", help="A KV module (edgekv prefill) to begin with.")
@click.option("--continue", "go_on", is_flag=True, help="Go on with the newest conversation.")
@click.option("--load", "load_from", metavar="FILE|NUMBER", help="Go on with a saved conversation; see --list.")
@click.option("--list", "list_kept", is_flag=True, help="List the conversations that are kept, and exit.")
@click.option("--policy", default="hide_oldest", show_default=True, help="What to hide as it grows; none.")
@click.option(
    "--spill",
    type=click.Choice(["evict", "park"]),
    default="evict",
    show_default=True,
    help="What becomes of hidden turns when their cells are needed.",
)
@click.option(
    "--then",
    type=click.Choice(["none", "auto", "recompute"]),
    default="none",
    show_default=True,
    help="Read what stands behind a mask again.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True, help="Of an answer.")
@click.option("--temperature", type=float, help="0 takes the likeliest token.  [default: 0.7]")
@click.option("--seed", type=int, help="Repeat a drawn conversation.")
@click.option("--n-ctx", type=click.IntRange(1), metavar="CELLS", help="Size of the cache.  [default: up to 4096]")
@click.option("--kv-type", type=click.Choice(list(KV_BLOCKS)), help="Of the cache.  [default: f16]")
@click.option("--threads", type=click.IntRange(1), help="[default: the physical cores, or a container's CPU quota]")
@click.option("--memory-budget", metavar="SIZE", help='Size the cache so that the process stays below, "512MiB".')
@click.option("--autosave", metavar="FILE", help="Keep the conversation there.  [default: a file in the state folder]")
@click.option("--autosave-kv", is_flag=True, help="Keep the KV cache with it: large, but nothing is prefilled on load.")
@click.option("--no-autosave", is_flag=True, help="Keep nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print events, one JSON object a line.")
def chat(as_json: bool, list_kept: bool, **values: Any) -> int:
    if list_kept:
        _list(as_json)
        return 0
    from edgekv.cli.chat import commands, loop, screen

    given = Given(**values)
    _check(given)
    options = _options(given)  # refused before a model is opened
    look = screen.Look(
        complete=lambda text: commands.complete(state, text),
        status=lambda width: loop.status(state, width),
        prompt=lambda: loop.prompt(state),
    )
    state = loop.State(screen.open_screen(look, as_json=as_json))
    with contextlib.closing(state):
        _open(given, options, state)
        _greet(state, given)
        return loop.Loop(state).run()


def _check(given: Given) -> None:
    brought = (given.system, given.template, given.attached, given.n_ctx, given.memory_budget, given.kv_type)
    if given.load_from is not None and given.go_on:
        raise UsageError("--continue goes on with the newest conversation, --load with another: choose one")
    if (given.load_from is not None or given.go_on) and any(brought):
        raise UsageError(
            "a saved conversation brings its own system text, template and cache; give only what else is to change"
        )
    if given.memory_budget and given.n_ctx:
        raise UsageError("--memory-budget chooses the cells; leave --n-ctx out")
    if (given.autosave or given.autosave_kv) and given.no_autosave:
        raise UsageError("--autosave and --no-autosave contradict each other")


def _options(given: Given) -> Options:
    from edgekv.chat import Options
    from edgekv.cli.chat.commands import read_policy

    return Options(policy=read_policy(given.policy), spill=given.spill, then=given.then, max_tokens=given.max_tokens)


def _open(given: Given, options: Options, state: State) -> None:
    """Put the chat that the command line asks for into the state, which owns it from then on."""
    from edgekv.cli.chat import opening

    path = _to_load(given)
    keep = opening.Keep(_file_to_keep_in(given, path), given.autosave_kv)
    if path is None:
        cache = opening.Cache(given.n_ctx, given.kv_type, given.threads, given.memory_budget)
        opened = opening.new(given.model, cache, given.system, given.template, options, keep, state.screen)
    else:
        source = click.get_current_context().get_parameter_source("model")
        named = given.model if source is not click.core.ParameterSource.DEFAULT else None
        opened = opening.saved(path, options, keep, state.screen, named=named, threads=given.threads)
    state.go_on_with(replace(opened, autosave=None) if given.no_autosave else opened)
    changes = {"temperature": given.temperature, "seed": given.seed}
    given_ones: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    state.chat.session.sampling = replace(state.chat.session.sampling, **given_ones)
    for module in given.attached:
        state.screen.note(str(state.chat.attach(module)))


def _to_load(given: Given) -> Path | None:
    """The file to go on with. Raises UsageError where there is no conversation to continue."""
    from edgekv.cli.chat import conversations

    if given.load_from is not None:
        return conversations.find(given.load_from, conversations.kept() if given.load_from.isdecimal() else [])
    if not given.go_on:
        return None
    newest = conversations.newest()
    if newest is None:
        raise UsageError(f"there is nothing to continue: {conversations.summary([])}")
    return newest.path


def _file_to_keep_in(given: Given, loaded: Path | None) -> Path | None:
    """The file that --autosave names. Raises UsageError where it holds something else than what was loaded."""
    from edgekv.cli.chat import conversations

    if given.autosave is None:
        return None
    path = Path(given.autosave).expanduser()
    taken = conversations.seen(path) is not None
    if taken and not path.is_file():
        raise UsageError(f"{path} is a folder or a device; name a file to keep the conversation in")
    if taken and (loaded is None or not loaded.exists() or not loaded.samefile(path)):
        raise UsageError(f"{path} is there already: go on with it (--load {path} as well), or name another file")
    return path


def _greet(state: State, given: Given) -> None:
    from edgekv.cli.chat import conversations

    session, autosave, place = state.chat.session, state.branch.autosave, conversations.folder()
    kept = f" · autosave {autosave.path or place}" if autosave and (autosave.path or place) else ""
    facts = f"{session.engine.num_cells:,} cells · policy {state.chat.options.policy or 'none'}{kept}"
    state.screen.note(f"{session.model.description} · {facts} · /help lists the commands")
    for note in session.engine.notes:
        state.screen.note(f"note: {note}")
    if autosave and not kept:
        state.branch.autosave = None
        state.screen.note("note: no autosave, as there is no home folder here; --autosave FILE names a place")
    if not (given.load_from or given.go_on) and (newest := conversations.newest()):
        state.screen.note(f"the last conversation: {newest}; chat --continue goes on with it, /load lists all")


def _list(as_json: bool) -> None:
    from edgekv.cli.chat import conversations, drawing

    entries = conversations.kept()
    if as_json:
        print_json({"schema": "edgekv.conversations/1", **conversations.facts(entries)})
    else:
        console().print(drawing.Listed(entries, conversations.summary(entries)))
