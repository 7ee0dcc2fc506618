"""Manifests: what an edgekv file is, of which model and which cache, as JSON that can be read without a model."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import numpy as np

from .capabilities import rotation_disabled
from .errors import UsageError, WrongFile
from .store import MANIFEST, Content, Stored

if TYPE_CHECKING:
    from .model import Model
    from .settings import Settings

T = TypeVar("T")

#: What this edgekv writes and reads; a file of a higher number is refused.
FORMAT: Final = 1


@dataclass(frozen=True)
class ModelFacts:
    """The model whose K and V they are; ``path`` is where it was when they were written."""

    path: str
    fingerprint: str
    arch: str
    n_vocab: int


@dataclass(frozen=True)
class CacheFacts:
    """What K and V depend on beside the model; RoPE: 0 for the model's own.

    turned: whether llama.cpp stores quantised K and V turned by a matrix, which LLAMA_ATTN_ROT_DISABLE switches off.
    state_version: of the layout in which llama.cpp writes the state of a sequence.
    """

    kv_type: str
    flash_attention: bool
    rope_freq_base: float
    rope_freq_scale: float
    turned: bool
    state_version: int

    @classmethod
    def of(cls, settings: Settings) -> CacheFacts:
        """Of a context opened with these settings, in this process."""
        s = settings
        turned = s.kv_type.startswith("q") and not rotation_disabled()
        rope = float(s.rope_freq_base), float(s.rope_freq_scale)
        from . import _llama  # a file can be looked at without it

        return cls(s.kv_type, s.flash_attention, *rope, turned, _llama.lib.LLAMA_STATE_SEQ_VERSION)


@dataclass(frozen=True)
class ContextFacts:
    """The other settings of the context a session was in."""

    n_ctx: int
    n_batch: int
    n_sessions: int
    n_archives: int
    max_parked_bytes: int | None
    logits_bytes: int


@dataclass(frozen=True)
class SpanFacts:
    """A span: half-open index range, how many tokens are in which state, and how its text begins."""

    name: str
    start: int
    stop: int
    role: str
    tags: tuple[str, ...]
    states: dict[str, int]
    begins: str


@dataclass(frozen=True)
class SessionFacts:
    """``tokens``: how many are in which state; ``cells``: how many cells the session takes; ``kv``: whether K and V are
    in the file. Without them a load evaluates the visible tokens again."""

    context: ContextFacts
    tokens: dict[str, int]
    cells: int
    spans: tuple[SpanFacts, ...]
    kv: bool = True


@dataclass(frozen=True)
class ModuleFacts:
    """A text of ``tokens`` tokens that was read behind ``attended`` others, of which ``begins`` is the beginning."""

    name: str
    tokens: int
    attended: int
    position: int
    begins: str


@dataclass(frozen=True)
class Manifest:
    """``kind``: "session" or "module", and one of the two behind it. written: ISO 8601, UTC."""

    kind: str
    format: int
    written: str
    edgekv: str
    llama_cpp_python: str
    machine: str
    model: ModelFacts
    cache: CacheFacts
    session: SessionFacts | None = None
    module: ModuleFacts | None = None


@dataclass(frozen=True)
class _Head:
    kind: str
    format: int


def describe(
    model: Model, settings: Settings, *, session: SessionFacts | None = None, module: ModuleFacts | None = None
) -> Manifest:
    """A manifest for one of the two, written now."""
    from . import __version__

    return Manifest(
        kind="session" if session is not None else "module",
        format=FORMAT,
        written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        edgekv=__version__,
        llama_cpp_python=_llama_version(),
        machine=platform.machine(),
        model=ModelFacts(_readable(model.path), model.fingerprint, model.arch, model.n_vocab),
        cache=CacheFacts.of(settings),
        session=session,
        module=module,
    )


def _readable(path: Path) -> str:
    """A path as text; where it is not Unicode, it is not found again by it."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@cache
def _llama_version() -> str:
    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        return "?"


def read(stored: Stored, kind: str = "") -> Manifest:
    """The manifest of a file, of that kind if one is given. Raises DamagedFile, WrongFile (newer, or another kind)."""
    head = decode(stored, MANIFEST, _Head)
    if head.format > FORMAT:
        raise WrongFile(
            f"{stored.path} was written by a newer edgekv: format {head.format}, this one reads {FORMAT}; update edgekv"
        )
    if head.format < 1 or head.kind not in ("session", "module"):
        raise stored.damaged(f"no edgekv writes a {head.kind!r} in format {head.format}")
    if kind and head.kind != kind:
        verb = "session.attach takes it" if head.kind == "module" else "Session.load takes it"
        raise WrongFile(f"{stored.path} is a {head.kind}, not a {kind}; {verb}")
    manifest = decode(stored, MANIFEST, Manifest)
    if (manifest.session if head.kind == "session" else manifest.module) is None:
        raise stored.damaged(f"it has no {head.kind} in its manifest")
    return manifest


def check(stored: Stored, manifest: Manifest, model: Model, settings: Settings) -> None:
    """Raise WrongFile, with the reason, unless the file is of this model, and its K and V, if any, of such a cache."""
    if manifest.model.fingerprint != model.fingerprint:
        theirs = f"{Path(manifest.model.path).name} ({manifest.model.fingerprint[:12]})"
        raise WrongFile(
            f"{stored.path} is of another model: {theirs}, and this is {model.path.name} "
            f"({model.fingerprint[:12]}); open that one"
        )
    if manifest.session is not None and not manifest.session.kv:
        return
    theirs_, ours = manifest.cache, CacheFacts.of(settings)
    for name in ("kv_type", "flash_attention", "rope_freq_base", "rope_freq_scale"):
        was, here = getattr(theirs_, name), getattr(ours, name)
        if was != here:
            raise WrongFile(f"{stored.path} was written with {name}={was!r}, here it is {here!r}; open with {was!r}")
    if theirs_.state_version != ours.state_version:
        raise WrongFile(
            f"{stored.path} was written with llama-cpp-python {manifest.llama_cpp_python}, which writes K and V in "
            f"version {theirs_.state_version}, and {_llama_version()} here in version {ours.state_version}; load it "
            "with that release, or save it there without K and V"
        )
    if theirs_.turned != ours.turned:
        how = "without" if theirs_.turned else "with"
        raise WrongFile(
            f"{stored.path} holds quantised K and V that mean something else here, as LLAMA_ATTN_ROT_DISABLE is not "
            f"what it was; start this program {how} LLAMA_ATTN_ROT_DISABLE=1"
        )


def encode(value: object) -> Content:
    """A dataclass as JSON; bytes become base64. Raises UsageError for what :func:`decode` would not take: then nothing
    is written that could not be read."""
    try:
        data = msgspec.json.encode(value, enc_hook=_plain)
        msgspec.json.decode(data, type=type(value))
    except (TypeError, ValueError, RecursionError) as err:
        raise UsageError(f"the file would not be readable: {err}") from err
    return data


def _plain(value: object) -> object:
    """A number of numpy as one of Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} cannot be written to a file")


def decode(stored: Stored, name: str, kind: type[T]) -> T:
    """A member as that dataclass. Raises DamagedFile where it is none, a value of another type included."""
    try:
        return msgspec.json.decode(stored.read(name).tobytes(), type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as err:
        raise stored.damaged(f"{name} is not as edgekv writes it ({err})") from err
