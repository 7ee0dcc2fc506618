"""Folders of the user's. They are asked for only when something is to lie in one: a service may have no home folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from .errors import FileError, UsageError


def user_folder(kind: Literal["cache", "state"], instead: str) -> Path:
    """edgekv's folder for what can be had again ("cache"), or for what was done here ("state"); it may not exist yet.

    ``instead``: what the user can give in place of it. Raises FileError, saying so, where the user has no home folder.
    """
    import platformdirs  # slow to import, and seldom needed

    ask = platformdirs.user_cache_path if kind == "cache" else platformdirs.user_state_path
    try:
        folder = ask("edgekv", appauthor=False)
    except (RuntimeError, KeyError):
        folder = Path("~")
    if folder.parts[:1] == ("~",):  # what expanduser leaves where it does not know
        raise FileError(f"this user has no home folder and HOME is not set; {instead}")
    return folder


def expand(path: str | os.PathLike[str]) -> Path:
    """A path whose ``~`` or ``~user`` is replaced. Raises UsageError where there is no such home folder."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, KeyError) as err:
        raise UsageError(f"{path}: no home folder is known for that ~; write the path out (./~ for a file)") from err
