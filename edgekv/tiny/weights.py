"""Random weights, scaled so that logits are lively and depend on every token that a mask may hide."""

from __future__ import annotations

import numpy as np

from edgekv.tiny.gguf import Tensor
from edgekv.tiny.vocab import CONTROL, tokens

FEED = 64  # inner width of every feed-forward block
HEAD = 32  # wide enough for one block of a quantised KV cache
SHARP = 1.5  # gain of Q and of K: scores of about +-2, so attention prefers some tokens and masking them shows


class Weights:
    """Random tensors by name, all drawn from one stream; `n_ctx` is the context the model claims."""

    def __init__(self, seed: int, n_ctx: int) -> None:
        self.n_ctx = n_ctx
        self.tensors: dict[str, Tensor] = {}
        # numpy froze this generator's stream; default_rng may change between versions, and with it the bytes
        self._random = np.random.RandomState(seed)

    def matrix(self, name: str, n_in: int, n_out: int, gain: float = 1.0) -> None:
        """Maps inputs of unit variance to outputs with a standard deviation of `gain`."""
        values = self._random.standard_normal((n_out, n_in)) * (gain / np.sqrt(n_in))
        self.tensors[name] = values.astype(np.float32)

    def matrices(self, name: str, count: int, n_in: int, n_out: int) -> None:
        """As :meth:`matrix`, ``count`` of them in one tensor, one a head."""
        values = self._random.standard_normal((count, n_out, n_in)) / np.sqrt(n_in)
        self.tensors[name] = values.astype(np.float32)

    def fill(self, value: float, n: int, *names: str) -> None:
        """Constants of one dimension: norms and biases."""
        for name in names:
            self.tensors[name] = np.full(n, value, np.float32)

    def ends(self, width: int, norm: str = "output_norm.weight", embedding: float = 0.5) -> None:
        """Embedding, last norm, and a head of its own: a tied one makes greedy decoding repeat the last token."""
        self.matrix("token_embd.weight", width, len(tokens()), embedding * np.sqrt(width))
        self.fill(1.0, width, norm)
        self.matrix("output.weight", width, len(tokens()), 3.0)
        self.tensors["output.weight"] *= _readable()[:, None]

    def attention(self, layer: str, width: int, n_kv: int) -> None:
        self.matrix(f"{layer}.attn_q.weight", width, width, SHARP)
        self.matrix(f"{layer}.attn_k.weight", width, n_kv * HEAD, SHARP)
        self.matrix(f"{layer}.attn_v.weight", width, n_kv * HEAD)
        self.matrix(f"{layer}.attn_output.weight", width, width, 2.0)  # an average over tokens is small: lift it

    def head_norms(self, layer: str) -> None:
        """These undo the gain of Q and K, so they carry it themselves."""
        self.fill(SHARP, HEAD, f"{layer}.attn_q_norm.weight", f"{layer}.attn_k_norm.weight")

    def feed_forward(self, layer: str, width: int, *, gated: bool = True) -> None:
        if gated:
            self.matrix(f"{layer}.ffn_gate.weight", width, FEED)
        self.matrix(f"{layer}.ffn_up.weight", width, FEED)
        self.matrix(f"{layer}.ffn_down.weight", FEED, width)


def _readable() -> Tensor:
    """Factor of each token's logit: greedy text is printable and never ends by itself, as tests want it."""
    ascii_only = [token.replace("Ġ", " ").isascii() for token in tokens()]  # Ġ is the space; other escapes stay out
    factor = np.where(ascii_only, 1.0, 0.3).astype(np.float32)
    factor[: len(CONTROL)] = 0.0
    return factor
