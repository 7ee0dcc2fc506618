"""Model: one GGUF model: tokenizer, metadata, capabilities, fingerprint, memory estimate."""

from __future__ import annotations

import codecs
import ctypes
import os
import re
import threading
import unicodedata
import weakref
from collections.abc import Iterable
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _llama, capabilities, catalog, gguf, memory
from ._llama import lib
from .capabilities import Capability
from .errors import BadState, ClosedError, DamagedModel, ModelError, NotGenerative, TooLarge, UsageError
from .wording import parameters, printable, well_formed

TokenArray: TypeAlias = npt.NDArray[np.int32]

# Many pre-tokenizers are a std::regex (llama.cpp, unicode.cpp), whose matcher calls itself once a character: a match of
# some 20,000 characters overflows a stack of 8 MB, which ends the process.
_LONGEST_RUN: Final = 4096
_LONG_RUN: Final = re.compile(rf"[^ \t\r\n]{{{_LONGEST_RUN + 1}}}|\s{{{_LONGEST_RUN + 1}}}")
_LONGEST_CHARACTER: Final = 4  # bytes of UTF-8
_NO_MEMORY: Final = ("Cannot allocate memory", "bad_alloc", "failed to allocate", "unable to allocate")
_CONTROL: Final = lib.LLAMA_TOKEN_ATTR_UNKNOWN | lib.LLAMA_TOKEN_ATTR_CONTROL


class Model:
    """A GGUF model loaded for the CPU. Close it, or use it as a context manager.

    ``source`` is a name of the manifest (``edgekv models list``) or a path; of a split model, its first part. edgekv
    runs on the CPU, also where llama.cpp was built with GPU support: no layer is offloaded.

    What the file says, its size and its fingerprint are taken when it is opened. It may be replaced (by a rename, as
    downloads do it) or deleted while the model is open; it must not be written into, as the weights are mapped from it.

    Raises ModelNotFound (a missing part of a split model, too), NotGGUF, DamagedModel (truncated, refused by llama.cpp,
    or changed while it was being opened), NotGenerative (vocabulary only, encoder, adapter, mmproj, ...), TooLarge.
    """

    def __init__(self, source: str | os.PathLike[str] = catalog.DEFAULT) -> None:
        self._file: Final = gguf.open_model(catalog.resolve(source))
        self.path: Final[Path] = self._file.path
        self.header: Final = self._file.header
        self.size: Final = self._file.size
        self.fingerprint: Final = self._file.fingerprint
        self._refuse_beyond(memory.room_to_load(self.header, self.size), self.size)
        _llama.start()
        self._ptr = self._load()
        self._vocab = lib.llama_model_get_vocab(self._ptr)
        self._free = weakref.finalize(self, lib.llama_model_free, self._ptr)
        self._engines = 0
        self._lock = threading.Lock()
        self._inherited = False
        _llama.opened.add(self)
        self.n_vocab: Final[int] = lib.llama_vocab_n_tokens(self._vocab)
        self.n_ctx_train: Final[int] = lib.llama_model_n_ctx_train(self._ptr)
        self.n_swa: Final[int] = lib.llama_model_n_swa(self._ptr)
        # As llama.cpp writes it for some architectures; what logits take follows from it.
        self.header.setdefault(f"{self.arch}.vocab_size", self.n_vocab)
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self.capabilities: Final = self._ask_capabilities()

    def _refuse_beyond(self, free: int, needed: int) -> None:
        """llama.cpp may end the process where it gets no memory, so room is asked for first."""
        if needed > free:
            raise TooLarge(
                f"{self.path.name} needs {needed / 1e9:,.1f} GB of RAM and {free / 1e9:,.1f} GB are free here; "
                "take a smaller model or a stronger quantisation"
            )

    def _load(self) -> Any:
        _llama.forget_messages()
        # Some weights are copied into a layout this CPU is faster with, which may double what they take.
        repack = 2 * self.size < memory.free_ram()
        params = _llama.set_fields(lib.llama_model_default_params(), n_gpu_layers=0, use_extra_bufts=repack)
        before = _private_bytes()
        pointer = lib.llama_model_load_from_file(os.fsencode(self.path), params)
        self._loaded_bytes = _private_bytes() - before
        try:
            self._file.check_unchanged()
            if not pointer:
                raise self._refusal(_llama.last_messages() or "no reason given")
            if lib.llama_model_has_encoder(pointer) or not lib.llama_model_has_decoder(pointer):
                raise NotGenerative(f"{self.path} is an encoder or has one: there is no cache of past tokens to mask")
        except ModelError:
            if pointer:
                lib.llama_model_free(pointer)
            raise
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
            why = _llama.INHERITED if self._inherited else "was closed; load it again"
            raise ClosedError(f"the model {self.path.name} {why}")

    def inherit(self) -> None:
        """In a child process: the weights are the parent's."""
        self._inherited, self._lock = True, threading.Lock()
        self._free.detach()

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

    @property
    def parts(self) -> tuple[Path, ...]:
        """Its files: one, or those of a split model in their order."""
        return self._file.parts

    @cached_property
    def n_params(self) -> int:
        """Parameters, counted in its tensors."""
        return int(lib.llama_model_n_params(self.ptr))

    @cached_property
    def quantisation(self) -> str:
        """Of most of its weights, as llama.cpp calls it, such as 'Q4_1'; '' where it does not know."""
        name = (lib.llama_ftype_name(lib.llama_model_ftype(self.ptr)) or b"").decode("utf-8", "replace")
        return "" if "unknown" in name else name.removeprefix("(guessed) ")

    @cached_property
    def name(self) -> str:
        """The name its file gives it, in one line of at most 80 characters; the file's own name where it gives none."""
        name = " ".join(printable(str(self.header.get("general.name", ""))).split())[:80]
        return name if any(c.isalnum() for c in name) else printable(self.path.stem)[:80]

    @cached_property
    def description(self) -> str:
        """What to call this model: 'SmolLM2 135M, 135M parameters, Q4_1'."""
        return ", ".join(filter(None, (self.name, f"{parameters(self.n_params)} parameters", self.quantisation)))

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja template, None for a base model."""
        return self.metadata.get("tokenizer.chat_template")

    @cached_property
    def has_mrope(self) -> bool:
        """Whether a position has several components (M-RoPE)."""
        rope = int(lib.llama_model_rope_type(self.ptr))
        return rope > 0 and bool(rope & lib.LLAMA_ROPE_TYPE_MROPE)  # IMROPE and VISION have the bit, too

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
        sizes = {"n_ctx": 256, "n_batch": 32, "n_ubatch": 32, "n_outputs_max": 1}
        params = _llama.set_fields(lib.llama_context_default_params(), **sizes, swa_full=True)
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
        """What the opened model takes: its files, the vocabulary's tables, weights repacked for this CPU."""
        return self.size + max(self.n_vocab * memory.VOCABULARY, self._loaded_bytes)

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
        """The vocabulary's BOS token as text, "" for none: a chat template's ``bos_token``. It is there also where
        texts are not to begin with it (:attr:`bos` is None then)."""
        return self._named("bos", int(lib.llama_vocab_bos(self.vocab)))

    @cached_property
    def eos_text(self) -> str:
        """The vocabulary's EOS token as text, "" for none: a chat template's ``eos_token``. A turn may end with another
        of :attr:`end_tokens`."""
        return self._named("eos", int(lib.llama_vocab_eos(self.vocab)))

    def _named(self, kind: str, token: int) -> str:
        """A token as text; "" where there is none, or where llama.cpp only supposes it to be GPT-2's (token 11)."""
        supposed = self.metadata.get("tokenizer.ggml.model") == "gpt2" and (
            f"tokenizer.ggml.{kind}_token_id" not in self.metadata
        )
        return "" if token < 0 or supposed else self.detokenize([token])

    def is_end(self, token: int) -> bool:
        """Whether a token ends a generation (end of sequence or of turn)."""
        self._check_open()
        return bool(lib.llama_vocab_is_eog(self._vocab, self.check_token(token)))

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Every token that ends a generation, in the order of their numbers.

        llama.cpp makes control tokens of those it knows by their text; the others are in the metadata, or its default.
        """
        named = (value for key, value in self.header.items() if key.endswith("_token_id") and isinstance(value, int))
        asked = ("eos", "eot", "fim_pad", "fim_rep", "fim_sep")
        told = (int(getattr(lib, f"llama_vocab_{name}")(self.vocab)) for name in asked)
        candidates = {*self._special, *named, *told}
        return tuple(sorted(t for t in candidates if 0 <= t < self.n_vocab and self.is_end(t)))

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Text -> token, of those that a text is read for only with ``special`` (llama-vocab.cpp:
        tokenizer_st_partition)."""
        return self._of_kind(_CONTROL)

    @cached_property
    def defined_tokens(self) -> dict[str, int]:
        """Text -> token, of those that stand for themselves in any text, such as marks of reasoning."""
        return self._of_kind(lib.LLAMA_TOKEN_ATTR_USER_DEFINED)

    def _of_kind(self, bits: int) -> dict[str, int]:
        return {self.detokenize([t]): t for t, attributes in self._special.items() if attributes & bits}

    @cached_property
    def _special(self) -> dict[int, int]:
        """Token -> attributes, of all that are no plain text: one native call for each of the vocabulary, once."""
        asked = map(lib.llama_vocab_get_attr, repeat(self.vocab), range(self.n_vocab))
        attributes = np.fromiter(asked, np.int32, self.n_vocab)
        found = np.flatnonzero(attributes & (_CONTROL | lib.LLAMA_TOKEN_ATTR_USER_DEFINED))
        return dict(zip(found.tolist(), attributes[found].tolist(), strict=True))

    def swallows(self, token: int) -> tuple[bool, bool]:
        """Whether a control token takes the white space in front of it, and that behind it, for its own."""
        attributes = self._attributes(self.check_token(token))
        return bool(attributes & lib.LLAMA_TOKEN_ATTR_LSTRIP), bool(attributes & lib.LLAMA_TOKEN_ATTR_RSTRIP)

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
        nothing a user typed can act as one. Lone surrogates become U+FFFD, as they have no UTF-8. A run of more than
        4,096 characters without white space, or of white space, is tokenized in parts.
        """
        self._check_open()  # the vocabulary goes with the model
        parts = [self._tokenize(part, special) for part in self._survivable(well_formed(text))]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _survivable(self, text: str) -> list[str]:
        """The text in parts that llama.cpp's pre-tokenizers survive: cut within runs of more than ``_LONGEST_RUN``
        characters, after a word where there is one, and never within a token that has a text of its own."""
        parts, start = list[str](), 0
        while (run := _LONG_RUN.search(text, start)) is not None:
            first, at = run.start(), run.end() - 1
            words = range(at, max(first, at - _LONGEST_RUN // 2), -1)
            at = next((i for i in words if text[i - 1].isalnum() and _ends_word(text[i])), at)
            for name in (*self.control_tokens, *self.defined_tokens):
                if (inside := text.rfind(name, max(start, at - len(name) + 1), at + len(name) - 1)) > start:
                    at = inside
            parts.append(text[start:at])
            start = at
        return [*parts, text[start:]]

    def _tokenize(self, text: str, special: bool) -> TokenArray:
        data = text.encode()
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


def _ends_word(char: str) -> bool:
    """Whether a word ends before this character: no letter, digit, accent or apostrophe."""
    return not char.isalnum() and char not in "'\u2019" and not unicodedata.category(char).startswith("M")


class TextStream:
    """Tokens in, text out, with the bytes of an unfinished character held back until the rest arrives."""

    def __init__(self, model: Model, special: bool = False) -> None:
        self._model, self._special = model, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def copy(self) -> TextStream:
        other = TextStream(self._model, self._special)
        other._decoder.setstate(self._decoder.getstate())
        return other

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
