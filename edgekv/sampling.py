"""Sampling: a frozen description, and the llama.cpp sampler chain built from it.

The chain's order is llama.cpp's own (common/sampling.cpp): logit bias, penalties, grammar, top-k, typical, top-p,
min-p, temperature, then a draw. It runs in native code on native logits; numpy sees logits only when asked.
"""

from __future__ import annotations

import codecs
import ctypes
import math
import re
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from . import _llama, schema
from ._llama import lib
from .engine import Engine
from .errors import ClosedError, GrammarError, GrammarStuck, UsageError
from .model import Model

_MIN_KEEP: Final = 1
_MOST_COUNTED: Final = 1 << 20  # llama.cpp allocates a ring of penalty_last_n tokens, and aborts where it cannot
# llama.cpp reads a grammar by recursion; 30,000 parentheses, or as many rules in a chain, overflow an 8 MB stack.
_LONGEST_GRAMMAR: Final = 1 << 18
_DEEPEST_GRAMMAR: Final = 500
_LITERAL: Final = re.compile(r"""\"(?:\\.|[^\"\\])*\"|\[(?:\\.|[^\]\\])*\]|#.*""")
_STRONGEST: Final = 1e6  # of biases, penalties and temperatures: their products stay finite in float32
_COLDEST: Final = 1e-6
_PENALTIES: Final = ("repeat_penalty", "presence_penalty", "frequency_penalty")
_FLOATS: Final = ("temperature", "top_p", "min_p", "typical", *_PENALTIES)
_ENTRY: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama.h: llama_token_data


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy: temperature 0 takes the most likely token.

    temperature: 0 (or below 1e-6) greedy, 1 the model's own distribution. top_k: 0 off. top_p, min_p, typical: cut
    the tail of the distribution (1, 0, 1: off). repeat_penalty (1 off), presence_penalty, frequency_penalty (0 off)
    look at the last ``penalty_last_n`` *visible* tokens, so a masked span is not counted. seed: None draws one, and the
    generation reports it. logit_bias: token -> added logit, -inf bans. grammar: GBNF text; json_schema: a schema
    (dict or JSON text), {} for any JSON; at most one of the two.

    Raises UsageError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical: float = 1.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    grammar: str | None = None
    json_schema: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in _FLOATS:
            if not _is_number(getattr(self, name)):
                raise UsageError(f"{name} must be a number, not {getattr(self, name)!r}")
        for name in ("top_k", "penalty_last_n", *(() if self.seed is None else ("seed",))):
            if not _is_whole(getattr(self, name)):
                raise UsageError(f"{name} must be a whole number, not {getattr(self, name)!r}")
        rules = (
            (0 <= self.temperature <= _STRONGEST, f"temperature must be in [0, {_STRONGEST:g}]"),
            (0 <= self.top_k < 2**31, "top_k must be in [0 (off), 2**31)"),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]"),
            (0 <= self.min_p <= 1, "min_p must be in [0, 1]"),
            (0 < self.typical <= 1, "typical must be in (0, 1]"),
            (
                1 / _STRONGEST <= self.repeat_penalty <= _STRONGEST,
                f"repeat_penalty must be in [{1 / _STRONGEST:g}, {_STRONGEST:g}] (1 is off)",
            ),
            (abs(self.presence_penalty) <= _STRONGEST, f"presence_penalty must be in ±{_STRONGEST:g}"),
            (abs(self.frequency_penalty) <= _STRONGEST, f"frequency_penalty must be in ±{_STRONGEST:g}"),
            (0 <= self.penalty_last_n <= _MOST_COUNTED, f"penalty_last_n must be in [0 (off), {_MOST_COUNTED}]"),
            (self.seed is None or 0 <= self.seed < 2**32 - 1, "seed must be in [0, 2**32 - 1)"),
            (self.grammar is None or isinstance(self.grammar, str), "grammar must be GBNF text"),
            (self.grammar is None or self.json_schema is None, "give a grammar or a json_schema, not both"),
        )
        for holds, message in rules:
            if not holds:
                raise UsageError(message)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    def check(self, model: Model) -> None:
        """Raise UsageError for a bias that does not fit the model's vocabulary, or that bans all of it."""
        bias = self.logit_bias or {}
        for token in bias:
            model.check_token(token)
        if sum(value == -math.inf for value in bias.values()) == model.n_vocab:
            raise UsageError("logit_bias bans every token of the vocabulary: leave one out")

    @property
    def greedy(self) -> bool:
        return self.temperature < _COLDEST

    @property
    def has_penalties(self) -> bool:
        return self.penalty_last_n > 0 and (
            self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        )

    @property
    def gbnf(self) -> str | None:
        """The grammar in llama.cpp's notation; raises GrammarError for a schema that has none."""
        return self.grammar if self.json_schema is None else schema.to_gbnf(self.json_schema)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _checked_bias(bias: object) -> dict[int, float]:
    """A copy of a bias; raises UsageError where llama.cpp would sample nonsense with it."""
    if not isinstance(bias, Mapping):
        raise UsageError("logit_bias must be a mapping of tokens to numbers")
    for token, value in bias.items():
        if not _is_whole(token):
            raise UsageError(f"a key of logit_bias is a token (a whole number), not {token!r}")
        if token < 0:
            raise UsageError(f"token {token} of logit_bias is outside the vocabulary")
        if not _is_number(value) or not (abs(value) <= _STRONGEST or value == -math.inf):
            raise UsageError(
                f"logit_bias of token {token} must be in ±{_STRONGEST:g}, or -inf to ban it, not {value!r}"
            )
    return {int(token): float(value) for token, value in bias.items()}


GREEDY: Final = Sampling()


class Sampler:
    """A native sampler chain with its state: what it drew, penalties counted, how far the grammar is.

    ``visible`` are the tokens penalties count, oldest first. Close it, or let it be collected.
    """

    def __init__(self, model: Model, sampling: Sampling, visible: npt.NDArray[np.int32]) -> None:
        self.seed: Final = secrets.randbelow(2**32 - 1) if sampling.seed is None else sampling.seed
        self._careful = sampling.gbnf is not None
        self._model = model
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._ids = np.arange(model.n_vocab)
        self._entries: npt.NDArray[Any] | None = None
        self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        self._free = weakref.finalize(self, lib.llama_sampler_free, self._chain)
        try:
            sampling.check(model)
            for part in _parts(model, sampling, self.seed, visible):
                lib.llama_sampler_chain_add(self._chain, part)
        except BaseException:
            self._free()
            raise

    def close(self) -> None:
        self._free()

    def _check_open(self) -> None:
        if not self._free.alive:
            raise ClosedError("the sampler was closed")

    def sample(self, engine: Engine, row: int) -> int:
        """Draw from the logits at batch index ``row`` of the engine's last decode.

        Raises NoLogits where there are none, GrammarStuck when the grammar allows no token.
        """
        engine.check_row(row)
        self._check_open()
        if self._careful:
            return self.sample_array(engine.logits(row))
        return int(lib.llama_sampler_sample(self._chain, engine.ctx, row))

    def sample_array(self, logits: npt.NDArray[np.float32]) -> int:
        """Draw from float32 (n_vocab,) logits held in numpy.

        The way for logits another session's decode has overwritten, and for grammars: the token is looked at
        before the chain accepts it, as accepting one the grammar rejects would abort the process.
        """
        self._check_open()
        entries = self._candidates(logits)
        while not self._continues_text(token := self._choose(entries)):
            logits = logits.copy()
            logits[token] = -math.inf
            entries = self._candidates(logits)
        lib.llama_sampler_accept(self._chain, token)
        return token

    def _choose(self, entries: npt.NDArray[Any]) -> int:
        array = _llama.set_fields(
            lib.llama_token_data_array(),
            data=entries.ctypes.data_as(ctypes.POINTER(lib.llama_token_data)),
            size=len(entries),
            selected=-1,
            sorted=False,
        )
        lib.llama_sampler_apply(self._chain, ctypes.byref(array))
        chosen = array.data[array.selected] if 0 <= array.selected < array.size else None
        if chosen is None or not math.isfinite(chosen.logit):
            raise GrammarStuck("no token of the vocabulary continues the grammar here")
        return int(chosen.id)

    def _continues_text(self, token: int) -> bool:
        """Whether the text stays UTF-8, of which llama.cpp's grammars check less than a decoder does."""
        if not self._careful:
            return True
        before = self._decoder.getstate()
        if self._model.is_end(token):
            return not before[0]
        try:
            self._decoder.decode(self._model.piece(token))
        except UnicodeDecodeError:
            self._decoder.setstate(before)
            return False
        return True

    def _candidates(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        if self._entries is None:
            self._entries = np.zeros(len(self._ids), _ENTRY)
        self._entries["id"] = self._ids  # the chain sorts in place
        self._entries["logit"] = logits
        self._entries["p"] = 0
        return self._entries


def _parts(model: Model, s: Sampling, seed: int, visible: npt.NDArray[np.int32]) -> Iterator[Any]:
    """The native samplers of a chain, in order."""
    if s.logit_bias:
        yield _logit_bias(model, s.logit_bias)
    if s.has_penalties:
        yield _penalties(model, s, visible[-s.penalty_last_n :].tolist())
    if (gbnf := s.gbnf) is not None:
        yield _grammar(model, gbnf)
    if s.greedy:
        yield lib.llama_sampler_init_greedy()
        return
    if s.top_k:
        yield lib.llama_sampler_init_top_k(s.top_k)
    if s.typical < 1:
        yield lib.llama_sampler_init_typical(s.typical, _MIN_KEEP)
    if s.top_p < 1:
        yield lib.llama_sampler_init_top_p(s.top_p, _MIN_KEEP)
    if s.min_p > 0:
        yield lib.llama_sampler_init_min_p(s.min_p, _MIN_KEEP)
    yield lib.llama_sampler_init_temp(s.temperature)
    yield lib.llama_sampler_init_dist(seed)  # without a final sampler the chain would abort


def _logit_bias(model: Model, bias: Mapping[int, float]) -> Any:
    entries = (lib.llama_logit_bias * len(bias))()
    for entry, (token, value) in zip(entries, bias.items(), strict=True):
        _llama.set_fields(entry, token=model.check_token(token), bias=value)
    return lib.llama_sampler_init_logit_bias(model.n_vocab, len(bias), entries)


def _penalties(model: Model, s: Sampling, recent: Iterable[int]) -> Any:
    part = lib.llama_sampler_init_penalties(
        model.n_vocab, s.penalty_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
    )
    for token in recent:
        lib.llama_sampler_accept(part, token)
    return part


def _grammar(model: Model, gbnf: str) -> Any:
    _llama.forget_messages()
    if "\0" in gbnf or not gbnf.strip():  # llama.cpp takes an empty grammar for no constraint at all
        raise GrammarError("a grammar cannot be empty or hold a NUL character")
    if len(gbnf) > _LONGEST_GRAMMAR or _nesting(gbnf) > _DEEPEST_GRAMMAR:
        raise GrammarError(
            f"a grammar of {len(gbnf):,} characters, {_nesting(gbnf)} groups deep, is more than llama.cpp survives "
            f"({_LONGEST_GRAMMAR:,} characters, {_DEEPEST_GRAMMAR} groups)"
        )
    part = lib.llama_sampler_init_grammar(model.vocab, gbnf.encode("utf-8", "replace"), b"root")
    if not part:  # a NULL in a chain is a segmentation fault
        raise GrammarError(f"llama.cpp cannot read the grammar: {_llama.last_messages() or 'is there a root rule?'}")
    return part


def _nesting(gbnf: str) -> int:
    """The most groups open at once, outside strings, character classes and comments."""
    deepest = depth = 0
    for char in _LITERAL.sub("", gbnf):
        depth += (char == "(") - (char == ")" and depth > 0)
        deepest = max(deepest, depth)
    return deepest
