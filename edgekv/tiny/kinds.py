"""What each kind of model holds: its tensors go into the weights, its key-values come back.

The names are llama.cpp's: src/llama-arch.cpp lists them, src/models/ says which ones an architecture wants.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgekv.tiny.gguf import Meta
from edgekv.tiny.vocab import tokenizer, tokens
from edgekv.tiny.weights import FEED, HEAD, SHARP, Weights

WINDOW = 32  # positions; small, so that a short test reaches past it


def _transformer(arch: str, layers: int, width: int, n_kv: int | list[int]) -> Meta:
    return {
        f"{arch}.block_count": layers,
        f"{arch}.embedding_length": width,
        f"{arch}.feed_forward_length": FEED,
        f"{arch}.attention.head_count": width // HEAD,
        f"{arch}.attention.head_count_kv": n_kv,
        f"{arch}.attention.key_length": HEAD,
        f"{arch}.attention.value_length": HEAD,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
    }


def _llama(w: Weights, arch: str = "llama") -> Meta:
    w.ends(128)
    for layer in ("blk.0", "blk.1"):
        w.fill(1.0, 128, f"{layer}.attn_norm.weight", f"{layer}.ffn_norm.weight")
        w.attention(layer, 128, n_kv=2)
        w.feed_forward(layer, 128)
    return _transformer(arch, 2, 128, n_kv=2)


def _gemma3(w: Weights) -> Meta:
    """Six layers, because llama.cpp makes every sixth layer of this architecture a full one."""
    w.ends(64, embedding=1 / 64**0.5)  # the graph multiplies by the root of the width
    for layer in (f"blk.{i}" for i in range(6)):
        norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        w.fill(1.0, 64, *(f"{layer}.{norm}.weight" for norm in norms))
        w.attention(layer, 64, n_kv=1)
        w.head_norms(layer)
        w.feed_forward(layer, 64)
    return _transformer("gemma3", 6, 64, n_kv=1) | {"gemma3.attention.sliding_window": WINDOW}


def _mrope(w: Weights) -> Meta:
    sections = [4, 6, 6, 0]  # time, height, width, unused: together half a head
    return _llama(w, "qwen2vl") | {"qwen2vl.rope.dimension_sections": sections} | tokenizer(add_bos=False)


def _yarn(w: Weights) -> Meta:
    return _llama(w) | {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": max(1, w.n_ctx // 4),
    }


def _deepseek2(w: Weights) -> Meta:
    """MLA: the cache keeps a compressed K, of which V is a part, so there is no V. All blocks are dense."""
    heads, compressed, rope, plain, value = 2, HEAD, HEAD, HEAD, HEAD
    w.ends(64)
    for layer in ("blk.0", "blk.1"):
        w.fill(1.0, 64, f"{layer}.attn_norm.weight", f"{layer}.ffn_norm.weight")
        w.fill(1.0, HEAD, f"{layer}.attn_q_a_norm.weight", f"{layer}.attn_kv_a_norm.weight")
        w.matrix(f"{layer}.attn_q_a.weight", 64, HEAD)
        w.matrix(f"{layer}.attn_q_b.weight", HEAD, heads * (plain + rope), SHARP)
        w.matrix(f"{layer}.attn_kv_a_mqa.weight", 64, compressed + rope, SHARP)
        w.matrices(f"{layer}.attn_k_b.weight", heads, plain, compressed)
        w.matrices(f"{layer}.attn_v_b.weight", heads, compressed, value)
        w.matrix(f"{layer}.attn_output.weight", heads * value, 64, 2.0)
        w.feed_forward(layer, 64)
    return _transformer("deepseek2", 2, 64, n_kv=1) | {
        "deepseek2.attention.key_length": compressed + rope,
        "deepseek2.attention.value_length": compressed,
        "deepseek2.attention.key_length_mla": plain + rope,
        "deepseek2.attention.value_length_mla": value,
        "deepseek2.attention.q_lora_rank": HEAD,
        "deepseek2.attention.kv_lora_rank": compressed,
        "deepseek2.rope.dimension_count": rope,
        "deepseek2.leading_dense_block_count": 2,
        "deepseek2.expert_feed_forward_length": FEED,
        "deepseek2.expert_shared_count": 0,
    }


def _mamba(w: Weights) -> Meta:
    w.ends(64)
    for layer in ("blk.0", "blk.1"):
        w.fill(1.0, 64, f"{layer}.attn_norm.weight")
        _state_space(w, layer, width=64, inner=128, state=16, rank=4)
    return {
        "mamba.block_count": 2,
        "mamba.embedding_length": 64,
        "mamba.attention.layer_norm_rms_epsilon": 1e-5,
        "mamba.ssm.conv_kernel": 4,
        "mamba.ssm.inner_size": 128,
        "mamba.ssm.state_size": 16,
        "mamba.ssm.time_step_rank": 4,
    }


def _state_space(w: Weights, layer: str, *, width: int, inner: int, state: int, rank: int) -> None:
    w.matrix(f"{layer}.ssm_in.weight", width, 2 * inner, 2.0)
    w.matrix(f"{layer}.ssm_conv1d.weight", 4, inner, 2.0)
    w.fill(0.0, inner, f"{layer}.ssm_conv1d.bias")
    w.matrix(f"{layer}.ssm_x.weight", inner, rank + 2 * state, 2.0)
    w.matrix(f"{layer}.ssm_dt.weight", rank, inner)
    w.fill(-2.0, inner, f"{layer}.ssm_dt.bias")  # small steps: the state remembers some ten tokens
    # A must be negative, or the state grows without bound
    w.tensors[f"{layer}.ssm_a"] = np.tile(-np.arange(1, state + 1, dtype=np.float32), (inner, 1))
    w.fill(1.0, inner, f"{layer}.ssm_d")
    w.matrix(f"{layer}.ssm_out.weight", inner, width, 3.0)


def _lfm2(w: Weights) -> Meta:
    w.ends(64, norm="token_embd_norm.weight")  # upstream's name for this architecture's last norm
    heads = [0, 2, 0, 2]
    for layer, n_kv in ((f"blk.{i}", n) for i, n in enumerate(heads)):
        w.fill(1.0, 64, f"{layer}.attn_norm.weight", f"{layer}.ffn_norm.weight")
        _lfm2_mixer(w, layer, n_kv)
        w.feed_forward(layer, 64)
    return _transformer("lfm2", 4, 64, heads) | {"lfm2.shortconv.l_cache": 3}


def _lfm2_mixer(w: Weights, layer: str, n_kv: int) -> None:
    if n_kv:
        w.attention(layer, 64, n_kv)
        w.head_norms(layer)
        return
    w.matrix(f"{layer}.shortconv.conv.weight", 3, 64, 2.0)
    w.matrix(f"{layer}.shortconv.in_proj.weight", 64, 3 * 64)
    w.matrix(f"{layer}.shortconv.out_proj.weight", 64, 64)


def _encoder(w: Weights) -> Meta:
    n_ctx = min(w.n_ctx, 512)  # every position has an embedding row here, and the file must stay small
    w.matrix("token_embd.weight", 64, len(tokens()), 8.0)
    w.matrix("position_embd.weight", 64, n_ctx, 8.0)
    _layer_norms(w, "token_embd_norm")
    for layer in ("blk.0", "blk.1"):
        w.attention(layer, 64, n_kv=2)
        w.feed_forward(layer, 64, gated=False)
        _layer_norms(w, f"{layer}.attn_output_norm", f"{layer}.layer_output_norm")
    return _transformer("bert", 2, 64, n_kv=2) | {
        "bert.context_length": n_ctx,
        "bert.attention.causal": False,
        "bert.attention.layer_norm_epsilon": 1e-5,
        "bert.pooling_type": 1,  # the mean over tokens
        "tokenizer.ggml.token_type_count": 2,
    }


def _layer_norms(w: Weights, *names: str) -> None:
    w.fill(1.0, 64, *(f"{name}.weight" for name in names))
    w.fill(0.0, 64, *(f"{name}.bias" for name in names))


def _vocab_only(w: Weights) -> Meta:
    meta = _llama(w)
    w.tensors.clear()
    return meta


BUILDERS: dict[str, tuple[str, Callable[[Weights], Meta]]] = {
    "llama": ("llama", _llama),
    "gemma3": ("gemma3", _gemma3),
    "mrope": ("qwen2vl", _mrope),
    "yarn": ("llama", _yarn),
    "deepseek2": ("deepseek2", _deepseek2),
    "mamba": ("mamba", _mamba),
    "lfm2": ("lfm2", _lfm2),
    "encoder": ("bert", _encoder),
    "vocab_only": ("llama", _vocab_only),
}
