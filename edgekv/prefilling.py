"""Prefill: read a text once, into a KV module that any session of the same model attaches without reading it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from . import catalog, modules
from .errors import MaskUnsupported, UsageError
from .model import Model
from .reader import Progress
from .session import Session
from .settings import Settings

_SPARE: Final = 2  # cells: the first token of a model that has one, and one to shift with


@dataclass(frozen=True)
class Prefilled:
    """A module that was written: its tokens, those they saw, the file's bytes, and ms of reading and of writing."""

    path: Path
    name: str
    tokens: int
    attended: int
    size: int
    read_ms: float
    write_ms: float


def prefill(
    text: str,
    path: str | os.PathLike[str],
    source: str | os.PathLike[str] | Model = catalog.DEFAULT,
    *,
    attend: str = "",
    settings: Settings = Settings(),
    progress: Progress | None = None,
) -> Prefilled:
    """Read ``text`` with a model and write it as a KV module, named after its file; see :meth:`Session.attach`.

    attend: the text that sessions begin with which it is for, such as their system prompt: the module's tokens see it,
    and the model's own first token. settings: the KV type, flash attention and RoPE are those the sessions must have;
    ``n_ctx`` is what the texts need. ``progress`` is called with (tokens read, tokens to read).

    Raises UsageError (an empty text), MaskUnsupported (a recurrent or hybrid model), FileError, and as Session().
    """
    if isinstance(source, Model):
        return _prefill(source, text, Path(path), attend, settings, progress)
    with Model(source) as model:
        return _prefill(model, text, Path(path), attend, settings, progress)


def _prefill(
    model: Model, text: str, path: Path, attend: str, settings: Settings, progress: Progress | None
) -> Prefilled:
    if not model.capabilities.park:
        raise MaskUnsupported(model.capabilities.park.reason)
    tokens = model.tokenize(text)
    if not len(tokens):
        raise UsageError("the text holds no token: there is nothing to read")
    n_ctx = len(tokens) + len(model.tokenize(attend)) + _SPARE
    name = "".join(c for c in path.stem if c.isprintable() and c not in "*?[]:").strip() or "module"
    with Session(model, settings=replace(settings, n_ctx=n_ctx)) as session:
        session.progress = progress
        if attend:
            session.append(attend)
        began = time.perf_counter()
        span = session.append(text)
        read = time.perf_counter()
        size = modules.write(path, session._transcript, span.range, name)
        return Prefilled(path, name, len(tokens), span.start, size, _ms(began, read), _ms(read, time.perf_counter()))


def _ms(began: float, ended: float) -> float:
    return (ended - began) * 1e3
