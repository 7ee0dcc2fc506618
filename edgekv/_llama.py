"""The only module that imports llama_cpp: the low-level names, one log route, one guard for Ctrl-C.

Everything above talks to llama.cpp through ``lib`` (the ctypes names of ``llama_cpp.llama_cpp``), never through
``llama_cpp.Llama``: that class owns positions itself, drops cells of other sequences and cannot set ``kv_unified``.
(:func:`open_llama` opens one to be measured against.)
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import llama_cpp.llama_cpp as _lib

if TYPE_CHECKING:
    from .settings import Settings

lib: Any = _lib  # the ctypes names carry no usable types

#: ggml.h type ids of the KV cache types
KV_TYPE_IDS: Final[dict[str, int]] = {"f32": 0, "f16": 1, "q8_0": 8, "q4_0": 2}

log: Final = logging.getLogger("edgekv.llama")


# llama.h's enum ggml_log_level -> logging; 5 continues the message before it.
_LEVELS: Final = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
_LEVEL_CONTINUED: Final = 5

_recent: collections.deque[str] = collections.deque(maxlen=20)
_start_lock = threading.Lock()
_started = False
_level = logging.DEBUG
_unsaid = False


def _on_log(level: int, text: bytes, _user: object) -> None:
    global _level
    if level != _LEVEL_CONTINUED:
        _level = _LEVELS.get(level, logging.DEBUG)
    if _unsaid or (_level < logging.WARNING and not log.isEnabledFor(_level)):
        return
    line = text.decode("utf-8", "replace").rstrip()
    if not line:
        return
    if _level >= logging.WARNING:
        _recent.append(line)
    # A model's own oddities (missing keys, unusual sizes) are warnings to llama.cpp, talk to us.
    log.log(logging.DEBUG if _level == logging.WARNING else _level, line)


_callback = _lib.llama_log_callback(_on_log)  # kept: a collected callback is a crash at the next log line


def start() -> None:
    """Load the backends once a process and route the native log to ``logging.getLogger("edgekv.llama")``."""
    global _started
    with _start_lock:
        if _started:
            return
        missing = [name for name in _NEEDED if not hasattr(_lib, name)]
        if missing:
            raise ImportError(
                f"this llama-cpp-python lacks {', '.join(missing)}; edgekv needs 0.3.36 or a later version with "
                "the llama_memory_* calls: pip install 'llama-cpp-python>=0.3.36'"
            )
        log.addHandler(logging.NullHandler())
        lib.llama_log_set(_callback, ctypes.c_void_p(0))
        lib.llama_backend_init()
        _started = True


_NEEDED: Final = (
    *(f"llama_memory_{verb}" for verb in ("clear", "seq_rm", "seq_cp", "seq_add", "seq_pos_max", "can_shift")),
    *("llama_get_memory", "llama_state_seq_get_data", "llama_state_seq_set_data", "llama_model_is_hybrid"),
)


def open_llama(path: str, settings: Settings, template: str, bos: str, eos: str, seed: int = 0) -> Any:
    """llama-cpp-python's own class, to be measured against: silent, on the CPU, in a context like an Engine's, leading
    chats in that template. Raises ValueError where llama.cpp refuses."""
    from llama_cpp import Llama
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    return Llama(
        path,
        n_ctx=settings.n_ctx,
        n_batch=settings.n_batch,
        n_ubatch=settings.n_batch,
        n_threads=settings.threads,
        n_threads_batch=settings.threads,
        flash_attn=settings.flash_attention,
        type_k=KV_TYPE_IDS[settings.kv_type],
        type_v=KV_TYPE_IDS[settings.kv_type],
        swa_full=True,
        n_gpu_layers=0,
        offload_kqv=False,
        op_offload=False,
        seed=seed,
        chat_handler=Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos).to_chat_handler(),
        verbose=False,
    )


def last_messages(limit: int = 2) -> str:
    """The newest native warnings and errors, for the text of an exception ('' when there were none)."""
    return " | ".join(list(_recent)[-limit:])


def forget_messages() -> None:
    """Start a new page, so that :func:`last_messages` speaks of the call that follows."""
    _recent.clear()


@contextlib.contextmanager
def unsaid() -> Iterator[None]:
    """A block whose native messages are expected, and told to nobody."""
    global _unsaid
    _unsaid = True
    try:
        yield
    finally:
        _unsaid = False


class Uninterrupted:
    """Hold Ctrl-C back until the block ends, so that native cells and the ledger change together or not at all.

    Python runs signal handlers between bytecodes of the main thread, so only the main thread needs this. Blocks may
    nest; the outermost one holds. A class and not a generator: every generated token goes through one.
    """

    __slots__ = ("_arrived", "_before")
    _held = False  # changed by the main thread only
    _pending = False

    def __enter__(self) -> None:
        self._before: Any = None
        if Uninterrupted._held or threading.get_ident() != threading.main_thread().ident:
            return
        before = signal.getsignal(signal.SIGINT)
        if not callable(before):  # SIG_IGN, SIG_DFL or a handler from C: nothing of Python's to hold back
            return
        self._arrived: list[tuple[int, FrameType | None]] = []
        Uninterrupted._pending = False  # one that came while the block before ended was that block's
        signal.signal(signal.SIGINT, self._hold)
        self._before, Uninterrupted._held = before, True

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))
        Uninterrupted._pending = True

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        Uninterrupted._held = False  # first: the handler from before may raise as soon as it is back
        signal.signal(signal.SIGINT, self._before)
        if self._arrived:
            self._before(*self._arrived[0])


def uninterrupted() -> Uninterrupted:
    """A block in which Ctrl-C waits; see :class:`Uninterrupted`."""
    return Uninterrupted()


def raise_if_interrupted() -> None:
    """Let Ctrl-C through that waits, at a place where nothing is half done: a long block asks between its steps."""
    if Uninterrupted._held and Uninterrupted._pending and threading.get_ident() == threading.main_thread().ident:
        raise KeyboardInterrupt
