"""The only module that imports llama_cpp: the low-level names, one log route, one guard for Ctrl-C.

Everything above talks to llama.cpp through ``lib`` (the ctypes names of ``llama_cpp.llama_cpp``), never through
``llama_cpp.Llama``: that class owns positions itself, drops cells of other sequences and cannot set ``kv_unified``.
(:func:`open_llama` opens one to be measured against.)
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Protocol

import llama_cpp.llama_cpp as _lib

if TYPE_CHECKING:
    from .settings import Settings

lib: Any = _lib  # the ctypes names carry no usable types

_NAMES: Final = """
GGML_TYPE_F16 GGML_TYPE_F32 GGML_TYPE_Q4_0 GGML_TYPE_Q8_0 LLAMA_FLASH_ATTN_TYPE_DISABLED LLAMA_FLASH_ATTN_TYPE_ENABLED
LLAMA_ROPE_TYPE_MROPE LLAMA_STATE_SEQ_VERSION LLAMA_TOKEN_ATTR_CONTROL LLAMA_TOKEN_ATTR_LSTRIP LLAMA_TOKEN_ATTR_RSTRIP
LLAMA_TOKEN_ATTR_UNKNOWN LLAMA_TOKEN_ATTR_USER_DEFINED ggml_abort_callback llama_backend_init llama_batch
llama_context_default_params llama_decode llama_free llama_ftype_name llama_get_logits_ith llama_get_memory
llama_init_from_model llama_log_callback llama_log_set llama_logit_bias llama_memory_can_shift llama_memory_seq_add
llama_memory_seq_cp llama_memory_seq_pos_max llama_memory_seq_rm llama_model_default_params llama_model_free
llama_model_ftype llama_model_get_vocab llama_model_has_decoder llama_model_has_encoder llama_model_is_hybrid
llama_model_is_recurrent llama_model_load_from_file llama_model_meta_count llama_model_meta_key_by_index
llama_model_meta_val_str_by_index llama_model_n_ctx_train llama_model_n_params llama_model_n_swa llama_model_rope_type
llama_n_ctx llama_n_ubatch llama_print_system_info llama_sampler_accept llama_sampler_apply llama_sampler_chain_add
llama_sampler_chain_default_params llama_sampler_chain_init llama_sampler_free llama_sampler_init_dist
llama_sampler_init_grammar llama_sampler_init_greedy llama_sampler_init_logit_bias llama_sampler_init_min_p
llama_sampler_init_penalties llama_sampler_init_temp llama_sampler_init_top_k llama_sampler_init_top_p
llama_sampler_init_typical llama_sampler_sample llama_set_abort_callback llama_state_get_data llama_state_get_size
llama_state_seq_get_data llama_state_seq_get_size llama_state_seq_set_data llama_state_set_data llama_token_data
llama_token_data_array llama_token_to_piece llama_tokenize llama_vocab_bos llama_vocab_eos llama_vocab_get_add_bos
llama_vocab_get_attr llama_vocab_is_eog llama_vocab_n_tokens
"""
#: Every function, struct and constant of the binding that edgekv uses: checked at load, so that a binding that lacks
#: one is refused with a sentence, and not in the middle of the work. tests/pure/test_binding.py compares it with the
#: source.
NAMES: Final = tuple(_NAMES.split())
_INSTALL: Final = "install a version that edgekv was tested with: pip install 'llama-cpp-python==0.3.36'"


def kv_type_id(kv_type: str) -> int:
    """ggml's number of a KV cache type."""
    return int(getattr(lib, f"GGML_TYPE_{kv_type.upper()}"))


def set_fields(struct: Any, **values: Any) -> Any:
    """Set fields of a native struct, by name; returns it.

    ctypes takes any attribute without a word: a field that another version calls otherwise would keep its default, and
    with it several streams, or a window that is recycled. Raises ImportError, with what to install, for a name that is
    no field.
    """
    unknown = values.keys() - {name for name, *_ in struct._fields_}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ImportError(f"{type(struct).__name__} of this llama-cpp-python has no {names}; {_INSTALL}")
    for name, value in values.items():
        setattr(struct, name, value)
    return struct


def small_context(n_cells: int, n_batch: int, *, n_sequences: int) -> Any:
    """Parameters of a small context on one thread, to try something in."""
    return set_fields(
        lib.llama_context_default_params(),
        n_ctx=n_cells,
        n_batch=n_batch,
        n_ubatch=n_batch,
        n_seq_max=n_sequences,
        n_outputs_max=max(n_batch, n_sequences),
        n_threads=1,
        n_threads_batch=1,
        kv_unified=True,
        swa_full=True,
        offload_kqv=False,
        op_offload=False,
    )


log: Final = logging.getLogger("edgekv.llama")


# llama.h's enum ggml_log_level -> logging; 5 continues the message before it.
_LEVELS: Final = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
_LEVEL_CONTINUED: Final = 5


class _Page(threading.local):
    """The messages of the calls of one thread: engines on several threads must not quote each other's."""

    def __init__(self) -> None:
        self.recent: collections.deque[str] = collections.deque(maxlen=20)
        self.level = logging.DEBUG
        self.unsaid = False


_page = _Page()
_start_lock = threading.Lock()
_started = False


def _on_log(level: int, text: bytes, _user: object) -> None:
    try:
        _take(level, text)
    except BaseException as err:  # of a signal handler, say: ctypes would print and forget it
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(type(err)))


def _take(level: int, text: bytes) -> None:
    if level != _LEVEL_CONTINUED:
        _page.level = _LEVELS.get(level, logging.DEBUG)
    level = _page.level
    if _page.unsaid or (level < logging.WARNING and not log.isEnabledFor(level)):
        return
    line = text.decode("utf-8", "replace").rstrip()
    if not line:
        return
    if level >= logging.WARNING:
        _page.recent.append(line)
    # A model's own oddities (missing keys, unusual sizes) are warnings to llama.cpp, talk to us.
    log.log(logging.DEBUG if level == logging.WARNING else level, line)


_callback = _lib.llama_log_callback(_on_log)  # kept: a collected callback is a crash at the next log line


def start() -> None:
    """Load the backends once a process and route the native log to ``logging.getLogger("edgekv.llama")``."""
    global _started
    with _start_lock:
        if _started:
            return
        missing = [name for name in NAMES if not hasattr(_lib, name)]
        if missing:
            raise ImportError(f"this llama-cpp-python lacks {', '.join(missing)}; {_INSTALL}")
        log.addHandler(logging.NullHandler())
        lib.llama_log_set(_callback, ctypes.c_void_p(0))
        lib.llama_backend_init()
        _started = True


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
        type_k=kv_type_id(settings.kv_type),
        type_v=kv_type_id(settings.kv_type),
        swa_full=True,
        n_gpu_layers=0,
        offload_kqv=False,
        op_offload=False,
        seed=seed,
        chat_handler=Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos).to_chat_handler(),
        verbose=False,
    )


def last_messages(limit: int = 2) -> str:
    """The newest native warnings and errors of this thread's calls, for the text of an exception ('' for none)."""
    return " | ".join(list(_page.recent)[-limit:])


def forget_messages() -> None:
    """Start a new page, so that :func:`last_messages` speaks of the call that follows."""
    _page.recent.clear()


@contextlib.contextmanager
def unsaid() -> Iterator[None]:
    """A block whose native messages are expected, and are not logged."""
    _page.unsaid = True
    try:
        yield
    finally:
        _page.unsaid = False


# -- stopping a decode ----------------------------------------------------------------------------------------------


def in_main_thread() -> bool:
    """Whether signal handlers run in this thread."""
    return threading.get_ident() == threading.main_thread().ident


class AbortFlag:
    """A byte that llama_decode looks at between two nodes of its graph: 0 to go on, else it ends with code 2."""

    def __init__(self) -> None:
        self._data = ctypes.create_string_buffer(2)
        self._callback = _abort_callback()

    def install(self, ctx: Any) -> None:
        """The flag must live as long as the context."""
        lib.llama_set_abort_callback(ctx, self._callback, ctypes.cast(self._data, ctypes.c_void_p))

    @property
    def is_set(self) -> bool:
        return self._data[0] != b"\0"

    def set(self) -> None:
        self._data[0] = b"\1"

    def clear(self) -> None:
        self._data[0] = b"\0"

    @contextlib.contextmanager
    def on_ctrl_c(self) -> Iterator[None]:
        """A block in which Ctrl-C that is held back sets the flag."""
        Uninterrupted.abort = self
        try:
            yield
        finally:
            Uninterrupted.abort = None


def _abort_callback() -> Any:
    """The C library's strlen: of "" it is 0, go on, and of "\\1" 1, abort. No Python runs between two nodes."""
    with contextlib.suppress(OSError, TypeError, AttributeError):
        library = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
        return ctypes.cast(library.strlen, lib.ggml_abort_callback)
    return lib.ggml_abort_callback(lambda data: bool(ctypes.string_at(data, 1)[0]))


class Job:
    """A native call in a thread of its own, while this one waits and its signal handlers run."""

    def __init__(self, call: Any, *args: Any) -> None:
        self._call, self._args, self._recent = call, args, _page.recent
        self._done = threading.Lock()
        self._done.acquire()
        self._begun = self._cancelled = False
        self.result: Any = None

    def start(self) -> None:
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        try:
            self._begun = True  # before it looks: cancel() does the same two in the other order
            if not self._cancelled:
                _page.recent = self._recent
                self.result = self._call(*self._args)
        finally:
            self._done.release()

    def wait(self) -> None:
        """Until the call has returned."""
        with self._done:
            pass

    def cancel(self) -> None:
        """Wait for the call if it runs; if it has not begun it never will."""
        self._cancelled = True
        if self._begun:
            self.wait()


class Uninterrupted:
    """Hold Ctrl-C back until the block ends, so that native cells and the ledger change together or not at all.

    Python runs signal handlers between bytecodes of the main thread, so only the main thread needs this. Blocks may
    nest; the outermost one holds. A class and not a generator: every generated token goes through one.
    """

    __slots__ = ("_arrived", "_before")
    _held = False  # changed by the main thread only
    _pending = False
    abort: AbortFlag | None = None  # of the decode that the main thread waits for

    def __enter__(self) -> None:
        self._before: Any = None
        if Uninterrupted._held or not in_main_thread():
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
        if Uninterrupted.abort is not None and self._before is signal.default_int_handler:
            Uninterrupted.abort.set()

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
    if Uninterrupted._held and Uninterrupted._pending and in_main_thread():
        raise KeyboardInterrupt


# -- fork() -----------------------------------------------------------------------------------------------------------

#: Whether this process came from a fork() after llama.cpp was loaded. libgomp's threads are gone in it, and a thread
#: that had some waits for them for ever: there, decodes run in new threads, which get threads of their own.
forked = False


class Inherited(Protocol):
    """What holds native memory, files or locks of the process that opened it."""

    def inherit(self) -> None:
        """In a child process: leave all of that alone, from now on."""


opened: weakref.WeakSet[Inherited] = weakref.WeakSet()
INHERITED: Final = "was opened in the parent process; open it again in this one"


def _after_fork() -> None:
    global forked, _start_lock
    forked = _started
    _start_lock = threading.Lock()
    Uninterrupted.abort = None
    for thing in list(opened):
        thing.inherit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
