"""Model: one GGUF file: tokenizer, metadata, capabilities, fingerprint, memory estimate."""

from __future__ import annotations

import codecs
import ctypes
import hashlib
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from . import _llama, capabilities, catalog, gguf, memory
from ._llama import lib
from .capabilities import Capability
from .errors import BadState, ClosedError, DamagedModel, ModelError, NotGenerative, TooLarge, UsageError

_T = TypeVar("_T")
TokenArray: TypeAlias = npt.NDArray[np.int32]

# llama.cpp splits a text by std::regex, which recurses for each character of a match (unicode.cpp).
_BPE: Final = 2  # llama.h: LLAMA_VOCAB_TYPE_BPE
_SHALLOW: Final = 1_000  # characters whose recursion any stack holds
_DEEP: Final = 50_000  # characters whose recursion _STACK holds
_STACK: Final = 256 << 20
_NEAR: Final = 2_000  # characters before a cut, among which a good place is looked for
_BLANK: Final = re.compile(r"\s{2,}")
_PLACE: Final = re.compile(r"(?<=\n)(?=\S)|(?<=\w)(?=[^\w\n])")
_stack_lock = threading.Lock()

_LONGEST_CHARACTER: Final = 4  # bytes of UTF-8
_SAMPLE: Final = 1 << 16  # bytes a sample of the fingerprint
_SAMPLES: Final = 64
_NO_MEMORY: Final = ("Cannot allocate memory", "bad_alloc", "failed to allocate", "unable to allocate")
# llama.h: LLAMA_TOKEN_ATTR_UNKNOWN and _CONTROL, _LSTRIP, _RSTRIP
_CONTROL, _USER_DEFINED, _LSTRIP, _RSTRIP = 1 | 1 << 3, 1 << 4, 1 << 7, 1 << 8
_ROPE_MROPE: Final = 8  # llama.h: LLAMA_ROPE_TYPE_MROPE; IMROPE (40) has the bit too, VISION (24) as well


class Model:
    """A GGUF model loaded for the CPU. Close it, or use it as a context manager.

    ``source`` is a name of the manifest (``edgekv models list``) or a path. Raises ModelNotFound, NotGGUF,
    DamagedModel (truncated, or refused by llama.cpp), NotGenerative (vocabulary only, encoder), TooLarge.
    """

    def __init__(self, source: str | os.PathLike[str] = catalog.DEFAULT) -> None:
        self.path: Final = catalog.resolve(source)
        self.header: Final = gguf.read_header(self.path)
        self._refuse_unloadable()
        _llama.start()
        self._ptr = self._load()
        self._vocab = lib.llama_model_get_vocab(self._ptr)
        self._free = weakref.finalize(self, lib.llama_model_free, self._ptr)
        self._vocab_type = int(lib.llama_vocab_type(self._vocab))
        self._engines = 0
        self._lock = threading.Lock()
        self.n_vocab: Final[int] = lib.llama_vocab_n_tokens(self._vocab)
        self.n_ctx_train: Final[int] = lib.llama_model_n_ctx_train(self._ptr)
        self.n_swa: Final[int] = lib.llama_model_n_swa(self._ptr)
        # As llama.cpp writes it for some architectures; what logits take follows from it.
        self.header.setdefault(f"{self.arch}.vocab_size", self.n_vocab)
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self.capabilities: Final = self._ask_capabilities()

    def _refuse_unloadable(self) -> None:
        arch = self.header.get("general.architecture", "")
        if f"{arch}.block_count" not in self.header or not self.header[gguf.TENSOR_COUNT]:
            raise NotGenerative(f"{self.path} holds a vocabulary but no model; nothing can be generated with it")
        size = self.path.stat().st_size
        self._refuse_beyond(memory.room_to_load(self.header, size), size)

    def _refuse_beyond(self, free: int, needed: int) -> None:
        """llama.cpp may end the process where it gets no memory, so room is asked for first."""
        if needed > free:
            raise TooLarge(
                f"{self.path.name} needs {needed / 1e9:,.1f} GB of RAM and {free / 1e9:,.1f} GB are free here; "
                "take a smaller model or a stronger quantisation"
            )

    def _load(self) -> Any:
        _llama.forget_messages()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        # Some weights are copied into a layout this CPU is faster with, which may double what they take.
        params.use_extra_bufts = 2 * self.path.stat().st_size < memory.free_ram()
        before = _private_bytes()
        pointer = lib.llama_model_load_from_file(os.fsencode(self.path), params)
        self._loaded_bytes = _private_bytes() - before
        if not pointer:
            raise self._refusal(_llama.last_messages() or "no reason given")
        if lib.llama_model_has_encoder(pointer) or not lib.llama_model_has_decoder(pointer):
            lib.llama_model_free(pointer)
            raise NotGenerative(f"{self.path} is an encoder or has one: there is no cache of past tokens to mask")
        return pointer

    def _refusal(self, reason: str) -> ModelError:
        if any(words in reason for words in _NO_MEMORY):
            return TooLarge(f"{self.path.name} does not fit in the RAM that is free here: {reason}")
        return DamagedModel(
            f"llama.cpp refused {self.path}: {reason}; "
            "fetch or copy the file again, or update llama-cpp-python for a new architecture"
        )

    # -- life ---------------------------------------------------------------------------------------------------

    @property
    def ptr(self) -> Any:
        """The native llama_model pointer; raises ClosedError after close()."""
        self._check_open()
        return self._ptr

    @property
    def vocab(self) -> Any:
        """The native llama_vocab pointer."""
        self._check_open()
        return self._vocab

    def _check_open(self) -> None:
        if not self._free.alive:
            raise ClosedError(f"the model {self.path.name} was closed; load it again")

    def close(self) -> None:
        """Free the weights. Raises BadState while an engine still uses them; closing twice is fine."""
        with self._lock:
            if self._engines and self._free.alive:
                raise BadState(f"{self._engines} engine(s) still use {self.path.name}; close the sessions first")
            self._free()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Model {self.path.name}{'' if self._free.alive else ', closed'}>"

    def count_engine(self, change: int) -> None:
        """For Engine: one more (+1) or one less (-1) context stands on these weights."""
        with self._lock:
            self._engines += change

    # -- what the file says -------------------------------------------------------------------------------------

    @cached_property
    def metadata(self) -> dict[str, str]:
        """Scalar GGUF metadata as llama.cpp prints it, arrays left out."""
        pointer = self.ptr
        pairs = (
            (
                _text(lib.llama_model_meta_key_by_index, pointer, i),
                _text(lib.llama_model_meta_val_str_by_index, pointer, i),
            )
            for i in range(lib.llama_model_meta_count(pointer))
        )
        return dict(sorted(pairs))

    @property
    def arch(self) -> str:
        return str(self.header.get("general.architecture", "?"))

    @cached_property
    def description(self) -> str:
        """As llama.cpp puts it, such as 'llama 256M Q4_1'."""
        return _text(lib.llama_model_desc, self.ptr)

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja template, None for a base model."""
        return self.metadata.get("tokenizer.chat_template")

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits that tell model files apart: a hash of the size, the first MiB and 64 samples of the rest."""
        size = self.path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with self.path.open("rb") as file:
            digest.update(file.read(1 << 20))
            for i in range(_SAMPLES):
                file.seek(max(0, (size - _SAMPLE) * i // (_SAMPLES - 1)))
                digest.update(file.read(_SAMPLE))
        return digest.hexdigest()[:32]

    @cached_property
    def has_mrope(self) -> bool:
        """Whether a position has several components (M-RoPE)."""
        rope = int(lib.llama_model_rope_type(self.ptr))
        return rope > 0 and bool(rope & _ROPE_MROPE)

    @cached_property
    def hybrid(self) -> bool:
        """Whether some layers have a recurrent state and others attention cells."""
        return bool(lib.llama_model_is_hybrid(self.ptr))

    def _ask_capabilities(self) -> capabilities.Capabilities:
        """What this model's memory can do, each answer with its reason; opens a small context (10 ms) to ask."""
        return capabilities.answer(
            capabilities.MemoryKind(
                arch=self.arch,
                recurrent=lib.llama_model_is_recurrent(self.ptr),
                hybrid=self.hybrid,
                mrope=self.has_mrope,
                can_shift=self._probe_shift(),
                rescales=capabilities.rescales(self.arch, self.metadata),
            )
        )

    def close_gaps(self, kv_type: str) -> Capability:
        """Whether gaps can be closed in a cache of that type: a quantised one may forbid what the model allows."""
        return capabilities.close_gaps_in(kv_type, self.capabilities.close_gaps, self.header)

    def _probe_shift(self) -> bool:
        self._refuse_beyond(memory.address_room(), memory.OPENING)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_outputs_max = 256, 32, 32, 1
        params.swa_full = True
        context = lib.llama_init_from_model(self.ptr, params)
        if not context:
            raise DamagedModel(f"llama.cpp cannot open a context on {self.path}: {_llama.last_messages()}")
        try:
            cache = lib.llama_get_memory(context)
            if not cache:
                raise NotGenerative(f"{self.path} ({self.arch}) has no cache of past tokens to mask")
            return bool(lib.llama_memory_can_shift(cache))
        finally:
            lib.llama_free(context)

    def kv_bytes_per_token(self, kv_type: str = "f16") -> int:
        """Bytes of K and V one token holds over all layers."""
        return memory.kv_bytes_per_token(self.header, kv_type)

    @property
    def num_bytes(self) -> int:
        """What the opened model takes: its file, the vocabulary's tables, weights repacked for this CPU."""
        return self.path.stat().st_size + max(self.n_vocab * memory.VOCABULARY, self._loaded_bytes)

    def estimate(
        self,
        n_ctx: int,
        kv_type: str = "f16",
        n_batch: int = 512,
        n_outputs: int = memory.SEQUENCES,
        *,
        flash_attention: bool = True,
        free: int | None = None,
    ) -> memory.MemoryEstimate:
        """Bytes a session of that size needs, against what is free here now; nothing is allocated.

        n_outputs: rows of logits a decode keeps; reading and generating take one for each sequence, scoring
        ``Settings.max_outputs``. free: the bytes that are free, to ask only once.
        """
        return memory.estimate(
            self.header,
            self.num_bytes,
            n_ctx,
            kv_type,
            n_batch,
            n_outputs,
            flash_attention=flash_attention,
            free=free,
        )

    # -- tokens -------------------------------------------------------------------------------------------------

    @cached_property
    def bos(self) -> int | None:
        """The token every text begins with, None where the vocabulary asks for none."""
        wanted = lib.llama_vocab_get_add_bos(self.vocab)
        token = int(lib.llama_vocab_bos(self.vocab))
        return token if wanted and token >= 0 else None

    @cached_property
    def bos_text(self) -> str:
        """:attr:`bos` as text, "" for none."""
        return "" if self.bos is None else self.detokenize([self.bos])

    @cached_property
    def end_text(self) -> str:
        """The first of :attr:`end_tokens` as text, "" for none; the others are not looked for."""
        return next((self.detokenize([t]) for t in range(self.n_vocab) if self.is_end(t)), "")

    def is_end(self, token: int) -> bool:
        """Whether a token ends a generation (end of sequence or of turn)."""
        self._check_open()
        return bool(lib.llama_vocab_is_eog(self._vocab, self.check_token(token)))

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Every token that ends a generation."""
        return tuple(t for t in range(self.n_vocab) if self.is_end(t))

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Text -> token, of those that a text is read for only with ``special`` (llama-vocab.cpp:
        tokenizer_st_partition)."""
        return self._of_kind(_CONTROL)

    @cached_property
    def defined_tokens(self) -> dict[str, int]:
        """Text -> token, of those that stand for themselves in any text, such as marks of reasoning."""
        return self._of_kind(_USER_DEFINED)

    def _of_kind(self, bits: int) -> dict[str, int]:
        return {self.detokenize([t]): t for t, attributes in self._special.items() if attributes & bits}

    @cached_property
    def _special(self) -> dict[int, int]:
        """Token -> attributes, of all that are no plain text: asking for each of a large vocabulary takes its time."""
        wanted, ask, vocab = _CONTROL | _USER_DEFINED, lib.llama_vocab_get_attr, self.vocab
        return {t: attributes for t in range(self.n_vocab) if (attributes := int(ask(vocab, t))) & wanted}

    def swallows(self, token: int) -> tuple[bool, bool]:
        """Whether a control token takes the white space in front of it, and that behind it, for its own."""
        attributes = self._attributes(self.check_token(token))
        return bool(attributes & _LSTRIP), bool(attributes & _RSTRIP)

    def _attributes(self, token: int) -> int:
        self._check_open()
        return int(lib.llama_vocab_get_attr(self._vocab, token))

    def check_token(self, token: int) -> int:
        if not 0 <= token < self.n_vocab:
            raise UsageError(f"token {token} is outside the vocabulary [0, {self.n_vocab})")
        return int(token)

    def check_tokens(self, tokens: Iterable[int] | TokenArray) -> TokenArray:
        """Tokens as int32 (n,); raises UsageError for one outside the vocabulary, which llama.cpp may not survive."""
        if isinstance(tokens, (str, bytes, bytearray)):
            raise UsageError("text is a str: decode bytes, and tokenize a str first")
        wide = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
        if wide.size and (wide.ndim != 1 or not np.issubdtype(wide.dtype, np.integer)):
            raise UsageError("tokens are a flat sequence of whole numbers")
        self.check_range(wide)
        return wide.astype(np.int32)

    def check_range(self, tokens: npt.NDArray[Any]) -> None:
        """Raise UsageError for a token outside the vocabulary."""
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self.n_vocab):
            raise UsageError(f"a token is outside the vocabulary [0, {self.n_vocab})")

    def tokenize(self, text: str, *, special: bool = False) -> TokenArray:
        """Text as int32 tokens (n,), BOS not added.

        ``special`` reads control tokens such as ``<|im_start|>`` as such; by default they are plain text, so that
        nothing a user typed can act as one. Lone surrogates are replaced, as they have no UTF-8. A line, or white
        space, of more than 50,000 characters is tokenized in parts where llama.cpp splits text by regular expressions,
        which would overflow the stack. Raises TooLarge where there is no memory for that.
        """
        self._check_open()  # the vocabulary goes with the model
        longest = self._longest_stretch(text)
        if longest <= _SHALLOW:
            return self._tokenize(text, special)
        parts = [text] if longest <= _DEEP else list(_cut(text))
        found = _on_large_stack(lambda: [self._tokenize(part, special) for part in parts])
        return np.concatenate(found)

    def _longest_stretch(self, text: str) -> int:
        """A bound on how many characters a match of the pre-tokenizer's regular expressions has: a line, or white
        space of several lines. 0 where the tokenizer has no such expressions."""
        if len(text) <= _SHALLOW or self._vocab_type != _BPE:
            return 0
        blank = max((len(run[0]) for run in _BLANK.finditer(text)), default=0)
        return max(blank, *map(len, text.split("\n")))

    def _tokenize(self, text: str, special: bool) -> TokenArray:
        data = text.encode("utf-8", "replace")
        buffer = np.empty(len(data) + 8, np.int32)
        count = self._tokenize_into(buffer, data, special)
        if count < 0:
            buffer = np.empty(-count, np.int32)
            count = self._tokenize_into(buffer, data, special)
        return buffer[:count].copy()

    def _tokenize_into(self, buffer: TokenArray, data: bytes, special: bool) -> int:
        tokens = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        return int(lib.llama_tokenize(self._vocab, data, len(data), tokens, buffer.size, False, special))

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; may be part of a character. Control tokens are empty unless ``special``."""
        known = self._pieces.get((token, special))
        if known is None:
            known = self._pieces[(token, special)] = self._ask_piece(self.check_token(token), special)
        return known

    def _ask_piece(self, token: int, special: bool) -> bytes:
        self._check_open()
        buffer = ctypes.create_string_buffer(64)
        length = lib.llama_token_to_piece(self._vocab, token, buffer, 64, 0, special)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = lib.llama_token_to_piece(self._vocab, token, buffer, -length, 0, special)
        return buffer.raw[:length]

    def detokenize(self, tokens: Iterable[int], *, special: bool = True) -> str:
        """Tokens as text; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.piece(int(t), special=special) for t in tokens).decode("utf-8", "replace")

    def text_stream(self, *, special: bool = False) -> TextStream:
        """A decoder for a growing text that never shows half a character; ``special`` spells control tokens out."""
        return TextStream(self, special)

    def unfinished(self, tokens: Iterable[int]) -> bytes:
        """The bytes of a character that the last of ``tokens`` begin and do not complete, b"" for none."""
        data = b"".join(self.piece(int(token), special=True) for token in tokens)[-_LONGEST_CHARACTER:]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(data)
        return decoder.getstate()[0]


def _cut(text: str) -> Iterator[str]:
    """A text in parts of at most ``_DEEP`` characters, cut at line ends, before a space or a mark where it can be."""
    start = 0
    while len(text) - start > _DEEP:
        window = text[start : start + _DEEP]
        at = max((m.start() for m in _PLACE.finditer(window, _DEEP - _NEAR)), default=0)
        yield window[: at or _DEEP]
        start += at or _DEEP
    yield text[start:]


def _on_large_stack(work: Callable[[], _T]) -> _T:
    """Run ``work`` in a thread whose stack is large enough for the regular expressions of ``_DEEP`` characters."""
    done: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as err:  # raised again in the caller's thread
            failed.append(err)

    with _stack_lock:
        before = threading.stack_size(_STACK)
        try:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
        except RuntimeError as err:
            raise TooLarge(f"no {_STACK >> 20} MB of address space for the stack that this long text needs") from err
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


class TextStream:
    """Tokens in, text out, with the bytes of an unfinished character held back until the rest arrives."""

    def __init__(self, model: Model, special: bool = False) -> None:
        self._model, self._special = model, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that ``token`` completes, '' while a character is unfinished."""
        return self._decoder.decode(self._model.piece(token, special=self._special))

    def go_on(self, begun: bytes) -> None:
        """Begin with the bytes of a character that was begun before."""
        self._decoder.setstate((begun, 0))

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished character are held back."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """What is left of an unfinished character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def _private_bytes() -> int:
    """Resident bytes of this process that are in no file; 0 where the system does not tell."""
    import psutil

    told = psutil.Process().memory_info()
    return int(told.rss - told.shared) if hasattr(told, "shared") else 0


def _text(call: Any, *arguments: Any) -> str:
    """Call a native ``int f(..., char * buf, size_t size)`` with a buffer that is large enough."""
    size = 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = call(*arguments, buffer, size)
        if length < size:
            return buffer.value.decode("utf-8", "replace")
        size = length + 1
