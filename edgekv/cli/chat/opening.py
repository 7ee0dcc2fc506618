"""Opening: how a chat gets its model, its session and its file, from the command line and from /load."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from edgekv import Model, Session, manifest
from edgekv.chat import Chat, Options
from edgekv.cli.chat import conversations
from edgekv.cli.chat.conversations import Autosave
from edgekv.cli.chat.screen import Screen
from edgekv.sampling import Sampling
from edgekv.store import Stored
from edgekv.wording import decoded

DEFAULT_SAMPLING: Final = Sampling(temperature=0.7, top_p=0.95, min_p=0.05)
_MOST_CELLS: Final = 4096


@dataclass(frozen=True)
class Opened:
    """A chat on a session of its own, the model below it, and where it is kept. Whoever takes it closes them."""

    model: Model
    chat: Chat
    autosave: Autosave | None


@dataclass(frozen=True)
class Keep:
    """Where a conversation is to be kept: in ``file``, else in the folder, with K and V or without."""

    file: Path | None = None
    kv: bool = False


@dataclass(frozen=True)
class Cache:
    """The cache of a new session; None: what suits the model."""

    n_ctx: int | None = None
    kv_type: str | None = None
    threads: int | None = None
    memory_budget: str | None = None


def new(
    source: str, cache: Cache, system: str | None, template: Path | None, options: Options, keep: Keep, screen: Screen
) -> Opened:
    """A chat that begins. Raises as Model, Session and Chat."""
    text = None if template is None else decoded(template.read_bytes(), str(template))
    with contextlib.ExitStack() as opening:
        model = opening.enter_context(Model(source))
        if cache.memory_budget:
            room: dict[str, Any] = {"memory_budget": cache.memory_budget}
        else:
            room = {"n_ctx": cache.n_ctx or min(_MOST_CELLS, model.n_ctx_train or _MOST_CELLS)}
        session = opening.enter_context(Session(model, kv_type=cache.kv_type, n_threads=cache.threads, **room))
        chat = Chat(session, system=system, template=text, options=possible(options, model, screen))
        session.sampling = DEFAULT_SAMPLING
        opening.pop_all()
    return Opened(model, chat, Autosave(keep.file, kv=keep.kv))


def saved(
    path: Path,
    options: Options,
    keep: Keep,
    screen: Screen,
    *,
    named: str | None = None,
    threads: int | None = None,
    current: Model | None = None,
) -> Opened:
    """The chat that a file holds, on ``current`` where the file is of that model, else on the model it names, or on
    another file of that model, ``named``. Raises as Session.load and Chat.load; then nothing has changed.

    It is kept in the same file if that lies in the folder, else in a new one, as the file is the user's.
    """
    file = keep.file or (path if conversations.is_mine(path) else None)
    before = None if file is None else conversations.seen(file)  # what comes later is not in the chat
    with Stored(path) as stored:
        facts = manifest.read(stored, "session")
    with contextlib.ExitStack() as opening:
        if current is not None and current.fingerprint == facts.model.fingerprint:
            model = current
        else:
            model = opening.enter_context(Model(named or facts.model.path))
        with screen.progress("loading") as update:
            session = Session.load(path, model, n_threads=threads, progress=update)
        opening.enter_context(session)
        chat = Chat.load(session, options=possible(options, model, screen))
        same = file is not None and before is not None and file.samefile(path)
        had_kv = facts.session is not None and facts.session.kv
        autosave = Autosave(file, seen=before, kv=keep.kv or (same and had_kv))
        if file is None or same:
            autosave.begin_with(chat)
        opening.pop_all()
    return Opened(model, chat, autosave)


def possible(options: Options, model: Model, screen: Screen) -> Options:
    """The options without a policy where a model can hide nothing."""
    if options.policy is None or model.capabilities.mask:
        return options
    screen.note(f"note: no policy: {model.capabilities.mask.reason}")
    return replace(options, policy=None)
