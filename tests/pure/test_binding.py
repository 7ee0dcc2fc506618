"""The contract with llama-cpp-python: which names, fields and arguments edgekv relies on."""

from __future__ import annotations

import ast
import ctypes
from pathlib import Path

import pytest

import edgekv
from edgekv import _llama, capabilities
from edgekv._llama import lib

_FIELDS = {
    "llama_model_params": "n_gpu_layers use_extra_bufts",
    "llama_context_params": "n_ctx n_batch n_ubatch n_seq_max n_outputs_max n_threads n_threads_batch flash_attn_type "
    "type_k type_v kv_unified swa_full rope_freq_base rope_freq_scale offload_kqv op_offload",
    "llama_batch": "n_tokens token embd pos n_seq_id seq_id logits",
    "llama_token_data": "id logit p",
    "llama_token_data_array": "data size selected sorted",
    "llama_logit_bias": "token bias",
}
_ARGUMENTS = {
    "llama_decode": 2,
    "llama_memory_seq_rm": 4,
    "llama_memory_seq_cp": 5,
    "llama_memory_seq_add": 5,
    "llama_memory_seq_pos_max": 2,
    "llama_state_get_data": 3,
    "llama_state_set_data": 3,
    "llama_state_seq_get_data": 4,
    "llama_state_seq_set_data": 4,
    "llama_set_abort_callback": 3,
    "llama_token_to_piece": 6,
    "llama_tokenize": 7,
    "llama_sampler_init_penalties": 5,
    "llama_sampler_init_logit_bias": 3,
    "llama_sampler_init_grammar": 3,
    "llama_sampler_sample": 3,
}


def names_used() -> set[str]:
    """What follows ``lib.`` or ``_lib.`` anywhere in edgekv, and constants made from a setting."""
    found: set[str] = set()
    for path in Path(edgekv.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("lib", "_lib", "_llama.lib"):
                found.add(node.attr)
    found |= {f"GGML_TYPE_{kind}" for kind in ("F32", "F16", "Q8_0", "Q4_0")}
    return found | {f"LLAMA_FLASH_ATTN_TYPE_{kind}" for kind in ("ENABLED", "DISABLED")}


def test_the_table_of_names_is_that_of_the_source() -> None:
    assert sorted(_llama.NAMES) == sorted(names_used())


def test_a_binding_that_lacks_a_name_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_llama, "_started", False)
    monkeypatch.delattr(lib, "llama_state_set_data")
    with pytest.raises(ImportError, match=r"lacks llama_state_set_data; .*pip install 'llama-cpp-python=="):
        _llama.start()


@pytest.mark.parametrize("name", _FIELDS)
def test_the_fields_that_are_set(name: str) -> None:
    assert set(_FIELDS[name].split()) <= {field for field, *_ in getattr(lib, name)._fields_}


@pytest.mark.parametrize("name", _ARGUMENTS)
def test_the_number_of_arguments(name: str) -> None:
    assert len(getattr(lib, name).argtypes) == _ARGUMENTS[name]


def test_a_field_that_is_none_is_refused() -> None:
    with pytest.raises(ImportError, match=r"llama_context_params .* has no kv_unite, n_ctz; install"):
        _llama.set_fields(lib.llama_context_params(), n_ctx=1, kv_unite=True, n_ctz=1)


def test_the_abort_callback_reads_the_flag() -> None:
    flag = _llama.AbortFlag()
    call = flag._callback
    data = ctypes.cast(flag._data, ctypes.c_void_p)
    assert not call(data)
    flag.set()
    assert flag.is_set
    assert call(data)
    flag.clear()
    assert not call(data)


@pytest.mark.parametrize("arch", ["deepseek4", "minimax-m3", "deepseek32", "of-next-year"])
def test_a_memory_that_was_not_tested_is_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    kind = capabilities.MemoryKind(arch, recurrent=False, hybrid=False, mrope=False, can_shift=True, rescales=False)
    assert not capabilities.answer(kind).mask
    monkeypatch.setenv(capabilities.UNTESTED, "1")
    assert bool(capabilities.answer(kind).mask) is (arch != "deepseek4")
