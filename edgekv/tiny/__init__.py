"""Tiny random GGUF models, one for each kind of memory llama.cpp has: under 1 MB, written in milliseconds.

``edgekv doctor`` tests itself on one, and the tests exercise the mechanics on all of them, so neither needs a download.
They speak nonsense; but their logits are lively, and depend on every token that a mask may hide.

    kind        architecture, memory                                             what it is for
    llama       2 layers x 128, 4 heads over 2 KV heads, full attention          the plain case
    gemma3      5 layers with a window of 32 positions and 1 full layer          sliding window
    mrope       qwen2vl with rope sections; no BOS, as in the real ones          positions that must not shift
    yarn        llama stretched 4 times by YaRN                                  K that a shift would rescale
    deepseek2   MLA: a compressed K, and no V                                    cells without V
    mamba       recurrent                                                        nothing can be masked
    lfm2        two convolution layers, two attention layers                     hybrid: nothing can be masked honestly
    encoder     bert: llama_get_memory is NULL; n_ctx_train is at most 512       not generative
    vocab_only  a tokenizer and no tensors: loads with vocab_only alone          not generative

The files: `gguf` the container, `vocab` the tokenizer, `weights` the random tensors, `kinds` one builder a kind.
"""

from __future__ import annotations

import os
from pathlib import Path

from edgekv import files
from edgekv.errors import UsageError
from edgekv.tiny.gguf import Meta, Tensor, encode
from edgekv.tiny.kinds import BUILDERS, WINDOW
from edgekv.tiny.vocab import BOS, EOS, IM_END, IM_START, tokenizer
from edgekv.tiny.weights import Weights

__all__ = ["BOS", "EOS", "IM_END", "IM_START", "KINDS", "WINDOW", "content", "write"]

KINDS: tuple[str, ...] = tuple(BUILDERS)


def write(path: str | os.PathLike[str], kind: str = "llama", *, seed: int = 0, n_ctx_train: int = 4096) -> Path:
    """Write a tiny random model of that kind and return its path; the same arguments give the same bytes.

    Atomic: a temporary file in the same folder takes the path's place, or nothing happens. Raises `UsageError` for an
    unknown kind, a context below 1 or a seed outside [0, 2**32), and `OSError` when the folder cannot be written.
    """
    return files.replace(Path(path), encode(*content(kind, seed=seed, n_ctx_train=n_ctx_train)))


def content(kind: str = "llama", *, seed: int = 0, n_ctx_train: int = 4096) -> tuple[Meta, dict[str, Tensor]]:
    """What :func:`write` writes: metadata and tensors by name. Raises `UsageError` as it does."""
    _check(kind, seed, n_ctx_train)
    arch, build = BUILDERS[kind]
    weights = Weights(seed, n_ctx_train)
    general: Meta = {"general.architecture": arch, "general.name": f"edgekv tiny {kind}"}
    meta = general | {f"{arch}.context_length": n_ctx_train} | tokenizer() | build(weights)
    return meta, weights.tensors


def _check(kind: str, seed: int, n_ctx_train: int) -> None:
    if kind not in BUILDERS:
        raise UsageError(f"no tiny model of kind {kind!r}; there are {', '.join(KINDS)}")
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed must be in [0, 2**32), not {seed}")
    if n_ctx_train < 1:
        raise UsageError(f"n_ctx_train must be at least 1, not {n_ctx_train}")
