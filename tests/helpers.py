"""What several test files need: text, tokens, what a session looks like from outside, a Python of its own."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt

import edgekv
from edgekv import Engine, Session, Settings, Span, tiny
from edgekv._llama import lib

ROOT = Path(__file__).resolve().parents[1]
TEXT = "The token is 한글 and the user said 😀,\tcafé. The quick brown fox jumps over the lazy dog."
FIRST_BYTE = tiny.IM_END + 1  # tiny models: the token of byte b is FIRST_BYTE + b

#: Order of cells and batches moves logits least with these; compare with a tolerance of 1e-4.
EXACT = Settings(n_ctx=512, kv_type="f32", flash_attention=False, n_threads=1)


def byte_tokens(data: bytes) -> list[int]:
    """One token of a tiny model for every byte, so also ones that cut a character."""
    return [FIRST_BYTE + byte for byte in data]


def some_tokens(n: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """n tokens of a tiny model, none of them a control token."""
    return np.random.RandomState(seed).randint(FIRST_BYTE, 280, n).astype(np.int32)


def open_tiny(path: Path, n_ctx: int = 512, **settings: Any) -> Session:
    return Session(path, settings=Settings(n_ctx=n_ctx, **{"n_threads": 1, **settings}))


@dataclass(frozen=True)
class Look:
    """All that can be seen of a session without reading a token."""

    tokens: tuple[int, ...]
    spans: tuple[Span, ...]
    states: tuple[tuple[int, int], ...]
    cells_used: int
    cells_free: int
    cursor: int


def look(session: Session) -> Look:
    """What the session is now, and that llama.cpp agrees (an audit)."""
    session.audit()
    stats, tokens = session.stats, session.tokens
    states = session.states(Span("all", 0, len(tokens)))
    return Look(
        tuple(tokens.tolist()),
        session.spans,
        tuple((int(state), number) for state, number in sorted(states.items())),
        stats.cells_used,
        session.engine.cells_free,
        stats.cursor,
    )


def python(code: str, *args: str | Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run code in a Python of its own, which may die without a core file or a debugger."""
    env = {**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-c", f"{_NO_CORE}\n{code}", *map(str, args)]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


def ctrl_c(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def at_lines(call: Callable[[int], None]) -> Iterator[None]:
    """``call(n)`` before the n-th line, from 0, that the code of edgekv executes in the block."""
    count = itertools.count()

    def on_line(_frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line":
            call(next(count))
        return on_line

    def on_call(frame: FrameType, _event: str, _arg: object) -> Any:
        file = Path(frame.f_code.co_filename)
        return on_line if file.is_relative_to(_PACKAGE) and file.name not in _WITHOUT_GAPS else None

    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(None)


def places_in(verb: Callable[[], object], count: int) -> list[int]:
    """So many lines, evenly from the first to the last, of those that the verb executes."""
    lines: list[int] = []
    with at_lines(lines.append):
        verb()
    return np.unique(np.linspace(0, len(lines) - 1, count).astype(int)).tolist()


@contextlib.contextmanager
def ctrl_c_at(line: int) -> Iterator[None]:
    """Ctrl-C comes when edgekv is about to execute that line of the block, counted as it goes, from 0."""
    with at_lines(lambda n: ctrl_c() if n == line else None):
        yield


_PACKAGE = Path(edgekv.__file__).parent
_WITHOUT_GAPS = ("fair_lock.py",)  # Python lets no signal in before its lines, only after the calls in them
_NO_CORE = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"


def cells_in_llama(engine: Engine) -> int:
    """How many cells llama.cpp really has in use: the state begins with the architecture's name, the number of
    streams and the number of cells (llama-context.cpp, state_write_data; llama-kv-cache.cpp, state_write)."""
    engine.settle()
    size = lib.llama_state_get_size(engine.ctx)
    blob = np.empty(size, np.uint8)
    lib.llama_state_get_data(engine.ctx, blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), size)
    (length,) = struct.unpack_from("<I", blob)
    streams, cells = struct.unpack_from("<II", blob, 4 + length)
    assert streams == 1
    return int(cells)
