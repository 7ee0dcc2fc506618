"""What a model's memory can do, asked once, before anything is touched; each answer with its reason.

The rules restate what llama.cpp does (llama-kv-cache.cpp, llama-memory-hybrid.cpp): a recurrent or hybrid memory
answers True to a middle ``seq_rm`` and keeps the text, so its bool is never asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Capability:
    """One answer: ``bool(capability)`` is the yes or no."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Capabilities:
    """mask: hide a middle span; close_gaps: move positions; park: take K/V out and back; rewind: drop the tail."""

    mask: Capability
    close_gaps: Capability
    park: Capability
    rewind: Capability

    def as_dict(self) -> dict[str, dict[str, bool | str]]:
        return {name: {"ok": c.ok, "reason": c.reason} for name, c in vars(self).items()}


@dataclass(frozen=True)
class MemoryKind:
    """The facts the answers follow from."""

    arch: str
    recurrent: bool
    hybrid: bool
    mrope: bool
    can_shift: bool
    rescales: bool  # a shift would rescale every K row (YaRN, attn_factor other than 1)


# Their caches compress across tokens: a partial seq_cp aborts the process.
_NO_PARTIAL_COPY: Final = frozenset({"deepseek4"})

_TESTED: Final = """
afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bitnet bloom chameleon chatglm codeshell
cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr dots1 ernie4_5 ernie4_5-moe exaone
exaone-moe exaone4 falcon falcon-h1 gemma gemma2 gemma3 gemma3n gemma4 glm4 glm4moe gpt-oss gpt2 gptj gptneox granite
granite_swa granitehybrid granitemoe graniteswitch grok grovemoe hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3
internlm2 jais jais2 jamba kimi-k3 kimi-linear laguna lfm2 lfm2moe llama llama4 maincoder mamba mamba2 maple mellum
mimo2 minicpm minicpm3 minimax-01 minimax-m2 mistral3 mistral4 mpt muse-glimmer nanbeige nemotron nemotron_h
nemotron_h_moe olmo olmo2 olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm
pockettts qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3tts qwen3vl qwen3vlmoe qwen4exp
refact rwkv6 rwkv6qwen2 rwkv7 seed_oss smallthinker smollm3 spark2_5 stablelm starcoder starcoder2 step35 talkie
xverse
"""
#: Architectures whose memory is of a class that was tested: one attention cache, that with a window, a recurrent state,
#: or both (llama-model.cpp of llama-cpp-python 0.3.36, create_memory, default branch). Another class may assert that
#: whole sequences are copied, and end the process at the first mask.
TESTED: Final = frozenset(_TESTED.split())
#: Set to 1, an architecture that was not tested is taken for one attention cache.
UNTESTED: Final = "EDGEKV_ALLOW_UNTESTED"

_HADAMARD: Final = 64  # llama-kv-cache.cpp: the smallest matrix a quantised K is turned by

_M_ROPE = "positions have several components (M-RoPE), which llama.cpp cannot shift; gaps are kept"
_YARN = "RoPE is scaled by YaRN or an attention factor: a shift would rescale every K row; gaps are kept"


def answer(kind: MemoryKind) -> Capabilities:
    """The four answers for a memory of that kind."""
    state = _keeps_state(kind)
    if state:
        no = Capability(False, state)
        return Capabilities(no, no, no, no)
    copy = Capability(True, "attention cells can be hidden and shown one by one")
    return Capabilities(copy, _close_gaps(kind), copy, Capability(True, "the last cells can be dropped"))


def _keeps_state(kind: MemoryKind) -> str:
    if kind.recurrent:
        return f"{kind.arch} is recurrent: its state has no cell a token, so nothing can be taken out of it"
    if kind.hybrid:
        return f"{kind.arch} is hybrid: its attention cells could go, its recurrent state would keep the text"
    if kind.arch in _NO_PARTIAL_COPY:
        return f"{kind.arch} compresses its cache across tokens: no part of it can be copied or hidden"
    if kind.arch not in TESTED and os.environ.get(UNTESTED, "") in ("", "0"):
        return (
            f"the memory of {kind.arch} was not tested with edgekv, and llama.cpp may end the process where it cannot "
            f"be masked; set {UNTESTED}=1 to try it"
        )
    return ""


def _close_gaps(kind: MemoryKind) -> Capability:
    if kind.mrope:
        return Capability(False, _M_ROPE)
    if kind.rescales:
        return Capability(False, _YARN)
    if not kind.can_shift:
        return Capability(False, f"llama.cpp cannot shift positions of {kind.arch}; gaps are kept")
    return Capability(True, "RoPE can be shifted")


def close_gaps_in(kv_type: str, close_gaps: Capability, header: Mapping[str, Any]) -> Capability:
    """``close_gaps`` of a model, narrowed to a cache of that type.

    llama.cpp stores quantised K turned by a Hadamard matrix and turns it back for a shift. Where it has no such
    matrix, or RoPE covers only part of a head, the shift ends the process (llama-kv-cache.cpp, build_rope_shift;
    half of that is llama.cpp pull request 25636).
    """
    if not close_gaps or not kv_type.startswith("q") or _turns_whole_heads(header):
        return close_gaps
    return Capability(False, "llama.cpp cannot shift quantised keys of this model's head size; gaps are kept")


def _turns_whole_heads(header: Mapping[str, Any]) -> bool:
    arch = header.get("general.architecture", "")
    heads = _largest(header.get(f"{arch}.attention.head_count")) or 1
    head = int(header.get(f"{arch}.attention.key_length", _largest(header.get(f"{arch}.embedding_length")) // heads))
    others = ("attention.key_length_swa", "rope.dimension_count", "rope.dimension_count_swa")
    same = all(header.get(f"{arch}.{name}", head) == head for name in others)
    return same and head % _HADAMARD == 0 and not rotation_disabled()


def _largest(value: Any) -> int:
    return max((int(v) for v in value), default=0) if isinstance(value, list) else int(value or 0)


def rotation_disabled() -> bool:
    """Whether llama.cpp is told not to turn quantised K and V; it reads the number that the variable begins with."""
    number = re.match(r"\s*[+-]?\d+", os.environ.get("LLAMA_ATTN_ROT_DISABLE", ""))
    return number is not None and int(number[0]) != 0


def rescales(arch: str, metadata: Mapping[str, str]) -> bool:
    """Whether the metadata asks for YaRN or an attention factor, which llama.cpp applies again at every shift."""
    if metadata.get(f"{arch}.rope.scaling.type", "none") == "yarn":
        return True
    factors = (metadata.get(f"{arch}.rope.scaling.{name}") for name in ("attn_factor", "yarn_attn_factor"))
    return any(factor is not None and float(factor) != 1.0 for factor in factors)
