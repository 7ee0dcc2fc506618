"""Sampling: a frozen description, and the llama.cpp sampler chain built from it.

The chain's order is llama.cpp's own (common/sampling.cpp): logit bias, penalties, grammar, top-k, typical, top-p,
min-p, temperature, then a draw. It runs in native code on native logits; numpy sees logits only when asked.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from . import _llama
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
#: What the converter drops without a word.
_UNSAID: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_ENTRY: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama.h: llama_token_data


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy: temperature 0 takes the most likely token.

    temperature: 0 greedy, 1 the model's own distribution. top_k: 0 off. top_p, min_p, typical: cut the tail of the
    distribution (1, 0, 1: off). repeat_penalty (1 off), presence_penalty, frequency_penalty (0 off) look at the
    last ``penalty_last_n`` *visible* tokens, so a masked span is not counted. seed: None draws one, and the
    generation reports it. logit_bias: token -> added logit, -inf bans. grammar: GBNF text; json_schema: a schema
    (dict or JSON text); at most one of the two.

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
        rules = (
            (0 <= self.temperature < math.inf, "temperature must be 0 or more"),
            (0 <= self.top_k < 2**31, "top_k must be in [0 (off), 2**31)"),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]"),
            (0 <= self.min_p <= 1, "min_p must be in [0, 1]"),
            (0 < self.typical <= 1, "typical must be in (0, 1]"),
            (0 < self.repeat_penalty < math.inf, "repeat_penalty must be above 0 (1 is off)"),
            (math.isfinite(self.presence_penalty), "presence_penalty must be finite"),
            (math.isfinite(self.frequency_penalty), "frequency_penalty must be finite"),
            (0 <= self.penalty_last_n <= _MOST_COUNTED, f"penalty_last_n must be in [0 (off), {_MOST_COUNTED}]"),
            (self.seed is None or 0 <= self.seed < 2**32 - 1, "seed must be in [0, 2**32 - 1)"),
            (self.grammar is None or self.json_schema is None, "give a grammar or a json_schema, not both"),
        )
        for holds, message in rules:
            if not holds:
                raise UsageError(message)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.penalty_last_n > 0 and (
            self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        )

    @property
    def gbnf(self) -> str | None:
        """The grammar in llama.cpp's notation; raises GrammarError for a schema that has none."""
        return self.grammar if self.json_schema is None else schema_to_gbnf(self.json_schema)


GREEDY: Final = Sampling()


def schema_to_gbnf(schema: str | Mapping[str, Any]) -> str:
    """A JSON schema as GBNF. Raises GrammarError when it is no JSON or asks for what GBNF cannot say."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if unsaid := sorted(_UNSAID & _keywords(text)):
        raise GrammarError(f"a grammar cannot hold a number to {', '.join(unsaid)}; leave it out and check the answer")
    try:
        return _llama.json_schema_to_gbnf(text)
    except Exception as err:  # the converter raises whatever it stumbles over
        raise GrammarError(f"this JSON schema has no grammar: {err}") from err


def _keywords(text: str) -> set[str]:
    """The keywords of a JSON schema, wherever they stand; those of an object's properties are names."""
    try:
        return _walked(json.loads(text))
    except (ValueError, RecursionError):
        return set()  # the converter says what is wrong


def _walked(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(_walked, node))
    if not isinstance(node, dict):
        return set()
    found = {key for key in node if not isinstance(node[key], dict)}
    inner = [v for key, v in node.items() if key not in ("properties", "const", "enum", "default", "examples")]
    return found.union(*map(_walked, inner), *map(_walked, dict(node.get("properties") or {}).values()))


class Sampler:
    """A native sampler chain with its state: what it drew, penalties counted, how far the grammar is.

    ``visible`` are the tokens penalties count, oldest first. Close it, or let it be collected.
    """

    def __init__(self, model: Model, sampling: Sampling, visible: npt.NDArray[np.int32]) -> None:
        self.seed: Final = secrets.randbelow(2**32 - 1) if sampling.seed is None else sampling.seed
        self._careful = sampling.gbnf is not None
        self._n_vocab = model.n_vocab
        self._entries: npt.NDArray[Any] | None = None
        self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        self._free = weakref.finalize(self, lib.llama_sampler_free, self._chain)
        try:
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
        lib.llama_sampler_accept(self._chain, chosen.id)
        return int(chosen.id)

    def _candidates(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        if self._entries is None:
            self._entries = np.zeros(self._n_vocab, _ENTRY)
        self._entries["id"] = np.arange(self._n_vocab)  # the chain sorts in place
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
