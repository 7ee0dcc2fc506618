"""``edgekv chat``: talk with a model; hide, show, fork and save parts of the conversation meanwhile."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.cli.output import model_argument
from edgekv.errors import UsageError
from edgekv.memory import KV_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edgekv import Session
    from edgekv.chat import Chat, Options

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
_MOST_CELLS = 4096


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
    autosave: str | None
    no_autosave: bool


@click.command(help=_HELP)
@model_argument
@click.option("--system", metavar="TEXT", help="The system text.")
@click.option(
    "--template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A chat template (Jinja) in place of the model's own.",
)
@click.option("--attach", "attached", multiple=True, metavar="FILE", help="A KV module (edgekv prefill) to begin with.")
@click.option("--load", "load_from", metavar="FILE", help="Go on with a saved conversation.")
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
@click.option("--threads", type=click.IntRange(1), help="[default: the physical cores]")
@click.option("--memory-budget", metavar="SIZE", help='Size the cache so that the process stays below, "512MiB".')
@click.option("--autosave", metavar="FILE", help="Where the conversation is saved after each answer.")
@click.option("--no-autosave", is_flag=True, help="Save only when told to.")
@click.option("--json", "as_json", is_flag=True, help="Print events, one JSON object a line.")
def chat(as_json: bool, **values: Any) -> int:
    from edgekv.cli.chat import commands, loop, screen

    given = Given(**values)
    _check(given)
    options = _options(given)  # refused before a model is opened
    with contextlib.ExitStack() as stack:
        state = loop.State([], None)  # type: ignore[arg-type]
        look = screen.Look(
            complete=lambda text: commands.complete(state, text),
            status=lambda width: loop.status(state, width),
            prompt=lambda: loop.prompt(state),
        )
        state.screen = screen.open_screen(look, as_json=as_json)
        state.branches.append(stack.enter_context(_opened(given, options, state)))
        stack.callback(_close_forks, state)
        _greet(state, given)
        return loop.Loop(state).run()


def _check(given: Given) -> None:
    brought = (given.system, given.template, given.attached, given.n_ctx, given.memory_budget, given.kv_type)
    if given.load_from and any(brought):
        raise UsageError("--load brings its own system text, template and cache; give only what else is to change")
    if given.memory_budget and given.n_ctx:
        raise UsageError("--memory-budget chooses the cells; leave --n-ctx out")
    if given.autosave and given.no_autosave:
        raise UsageError("--autosave and --no-autosave contradict each other")


def _options(given: Given) -> Options:
    from edgekv.chat import Options
    from edgekv.cli.chat.commands import read_policy

    return Options(policy=read_policy(given.policy), spill=given.spill, then=given.then, max_tokens=given.max_tokens)


@contextlib.contextmanager
def _opened(given: Given, options: Options, state: Any) -> Iterator[Chat]:
    """The chat, on a model and a session that are closed with it."""
    from dataclasses import replace

    from edgekv.chat import Chat
    from edgekv.cli.chat.loop import DEFAULT_SAMPLING

    with contextlib.ExitStack() as stack:
        session = stack.enter_context(_session(given, stack))
        if not session.model.capabilities.mask and options.policy is not None:
            state.screen.note(f"note: no policy: {session.model.capabilities.mask.reason}")
            options = replace(options, policy=None)
        if given.load_from:
            chat = Chat.load(session, options=options)
        else:
            template = given.template.read_text("utf-8") if given.template else None
            chat = Chat(session, system=given.system, template=template, options=options)
            session.sampling = DEFAULT_SAMPLING
        changes = {"temperature": given.temperature, "seed": given.seed}
        told: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        session.sampling = replace(session.sampling, **told)
        for path in given.attached:
            state.screen.note(str(chat.attach(path)))
        yield chat


def _session(given: Given, stack: contextlib.ExitStack) -> Session:
    from edgekv import Model, Session

    source = click.get_current_context().get_parameter_source("model")
    if given.load_from:  # its own model, unless another file of it is named
        named = given.model if source is not click.core.ParameterSource.DEFAULT else None
        return Session.load(given.load_from, named, n_threads=given.threads)
    model = stack.enter_context(Model(given.model))
    if given.memory_budget:
        return Session(model, memory_budget=given.memory_budget, kv_type=given.kv_type, n_threads=given.threads)
    n_ctx = given.n_ctx or min(_MOST_CELLS, model.n_ctx_train or _MOST_CELLS)
    return Session(model, n_ctx=n_ctx, kv_type=given.kv_type, n_threads=given.threads)


def _close_forks(state: Any) -> None:
    """/load may have opened other sessions, and /fork more of them."""
    for branch in reversed(state.branches):
        branch.session.close()


def _greet(state: Any, given: Given) -> None:
    import platformdirs

    if not given.no_autosave:
        folder = Path(platformdirs.user_state_path("edgekv"))
        state.autosave = Path(given.autosave) if given.autosave else folder / "autosave.kvs"
        with contextlib.suppress(OSError):
            state.autosave.parent.mkdir(parents=True, exist_ok=True)
    session, saved = state.chat.session, f" · autosave {state.autosave}" if state.autosave else ""
    facts = f"{session.engine.num_cells:,} cells · policy {state.chat.options.policy or 'none'}{saved}"
    state.screen.note(f"{session.model.description} · {facts} · /help lists the commands")
    for note in (*session.engine.notes, *state.chat.notes):
        state.told.append(note)
        state.screen.note(f"note: {note}")
