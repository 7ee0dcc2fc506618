"""Checks on a real model: exact undo, what a quantised cache does to what it says, and its speed here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from importlib import resources
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgekv.doctor import machine
from edgekv.doctor.checks import Check, Says
from edgekv.doctor.selftest import exact_undo
from edgekv.errors import EdgekvError, TooLarge
from edgekv.model import Model, TokenArray
from edgekv.numerics import kl_divergence, same_top
from edgekv.session import Session
from edgekv.settings import Settings

_SETTINGS: Final = Settings(n_ctx=512)
_WARM_UP: Final = 16  # tokens
_CONTEXT: Final = 160  # tokens in front of those that are compared
_COMPARED: Final = 64
_LEAST: Final = 48  # tokens of context on the slowest machine
_DECODED: Final = 12
_SECONDS: Final = 4.0  # what reading the context once may take: a slow machine reads less of it, but _LEAST

_BUSY: Final = 0.2  # others' share of the CPUs from which a speed needs that remark

_KL_WARN: Final = 0.1  # nats
_KL_GARBLED: Final = 1.0
_TOP_WARN: Final = 0.8
#: Mean KL that quantising the *weights* costs, Llama 3 8B (llama.cpp, tools/perplexity/README.md)
YARDSTICK: Final = "for scale: quantising weights costs .0014 at q8_0 and .031 at q4_K_M, by llama.cpp's table"

LEFT_OUT: Final = Check(
    "on a real model",
    lambda: Says("left out, none is here: edgekv models fetch smollm2, or give a GGUF file"),
)


@contextmanager
def checks(source: str) -> Iterator[list[Check]]:
    """The checks on one model, which stays loaded while they run; one that fails when it does not load."""
    with ExitStack() as stack:
        try:
            looks = _OnModel(stack.enter_context(Model(source)))
            made = looks.checks()
        except (EdgekvError, OSError) as err:
            message = str(err)
            made = [Check(source, lambda: Says(message, "failed"))]
        yield made


class _OnModel:
    """The checks share one text, how much of it this machine reads in a few seconds, and the f16 reference."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.name = model.name
        self.num_context = _CONTEXT

    def checks(self) -> list[Check]:
        """What can be looked at on this model. Raises NotGenerative for one without a cache."""
        kv = [Check(f"{kv_type} KV, {self.name}", partial(self.quantised, kv_type)) for kv_type in ("q8_0", "q4_0")]
        return [
            Check(f"speed, {self.name}", self.speed),
            Check(f"exact undo, {self.name}", self.undo),
            *(kv if self.model.capabilities.rewind else []),
        ]

    @cached_property
    def tokens(self) -> TokenArray:
        text = (resources.files("edgekv") / "data" / "field_report.txt").read_text("utf-8")
        tokens = self.model.tokenize(text)[: _CONTEXT + _COMPARED]
        bos = [] if self.model.bos is None else [self.model.bos]
        return np.concatenate([np.asarray(bos, np.int32), tokens])

    @property
    def context(self) -> TokenArray:
        return self.tokens[: self.num_context]

    @property
    def compared(self) -> TokenArray:
        return self.tokens[self.num_context : self.num_context + _COMPARED]

    def session(self, kv_type: str = "f16") -> Session:
        return Session(self.model, settings=replace(_SETTINGS, kv_type=kv_type))

    def speed(self) -> Says:
        others = machine.others_busy()
        with self.session() as session:
            warm = _timed(session, self.tokens[:_WARM_UP])
            self.num_context = max(_LEAST, min(_CONTEXT, int(warm * _SECONDS)))
            prefill = _timed(session, self.context[_WARM_UP:])
            decode = _timed(session, self.compared[:_DECODED], step=1)
        busy = others()
        figures = {"prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode, "others_busy": busy}
        beside = f", while other programs kept {busy * 100:.0f} % of the CPUs busy" if busy > _BUSY else ""
        return Says(f"reads {prefill:,.0f} tokens/s, generates {decode:,.1f} tokens/s{beside}", figures=figures)

    def undo(self) -> Says:
        if not self.model.capabilities.mask:
            return Says(f"this model cannot be masked: {self.model.capabilities.mask.reason}", "warning")
        third = self.num_context // 3
        with self.session() as session:
            for name, at in (("front", 0), ("middle", third), ("back", 2 * third)):
                session.append(self.context[at : at + third], name=name)
            cells = exact_undo(session, "middle", self.compared[:_DECODED])
        return Says(f"mask and unmask in place leave logits bit-equal; {cells} cells audited at each step")

    @cached_property
    def reference(self) -> npt.NDArray[np.float32]:
        return self._logits("f16")

    def _logits(self, kv_type: str) -> npt.NDArray[np.float32]:
        """float32 (compared, n_vocab): what follows the context, with a cache of this type."""
        with self.session(kv_type) as session:
            session.append(self.context)
            return session.logits_over(self.compared)

    def quantised(self, kv_type: str) -> Says:
        try:
            other = self._logits(kv_type)
        except TooLarge as err:  # llama.cpp's answer where a head is no multiple of the block
            return Says(f"llama.cpp opens no {kv_type} cache for this model: {err}", "warning")
        return judge(kl_divergence(self.reference, other), same_top(self.reference, other))


def judge(kl: npt.NDArray[np.float64], same: npt.NDArray[np.bool_]) -> Says:
    """A sentence on a quantised cache against f16: KL in nats and whether the top token agrees, a row each."""
    mean, agree = float(kl.mean()), float(same.mean())
    figures: dict[str, Any] = {"kl_mean": mean, "kl_max": float(kl.max()), "same_top": agree, "tokens": len(kl)}
    measured = f"mean KL {mean:.2g} against f16 over {len(kl)} tokens, same likeliest token {agree * 100:.0f} %"
    if mean <= _KL_WARN and agree >= _TOP_WARN:
        return Says(f"close to f16: {measured}", figures=figures)
    does = "garbles this model" if mean > _KL_GARBLED else "changes what this model says"
    return Says(f"{does}: {measured} ({YARDSTICK}); keep its cache in f16", "warning", figures)


def _timed(session: Session, tokens: TokenArray, step: int = 512) -> float:
    """Tokens a second when read ``step`` at a time; 1 is what generating costs."""
    began = time.perf_counter()
    for at in range(0, len(tokens), step):
        session.append(tokens[at : at + step])
    return len(tokens) / (time.perf_counter() - began)
