"""Texts without a space for pages: llama.cpp's tokenizer ends the process at many of them, edgekv does not ask it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgekv import Model
from edgekv._llama import lib
from helpers import python

TinyPath = Callable[..., Path]

#: One of each kind of regular expression that overflows the stack, and each letter that does.
FAMILIES = ("gpt-4o", "deepseek-llm", "bloom", "default")
ALL = (
    *(
        *FAMILIES,
        "deepseek-v3",
        "falcon",
        "jais-2",
        "afmoe",
        "bailingmoe",
        "cohere2moe",
        "deepseek-coder",
        "exaone-moe",
    ),
    *(
        "gpt3-finnish",
        "hunyuan-dense",
        "granite-embed-multi-97m",
        "hy_v4",
        "joyai-llm",
        "kanana2",
        "llada-moe",
        "llama4",
    ),
    *("tekken", "superbpe"),
)
SIGNS = ("a", "1", "=", "'s", " ", " \n", "e\u0301", "中")
MORE = (*SIGNS, "aB", "a1", ".", "\n", "\t", "é", "한", "😀", "\u00a0", "a\u2028")

_CODE = """
import sys
from edgekv import Model, tiny
from edgekv.tiny import BUILDERS, encode, tokenizer
from edgekv.tiny.weights import Weights
folder, length, *names = sys.argv[1:]
signs = {signs!r}
for name in names:
    arch, build = BUILDERS["llama"]
    weights = Weights(0, 128)
    meta = {{"general.architecture": arch, f"{{arch}}.context_length": 128}} | tokenizer() | build(weights)
    path = f"{{folder}}/{{name}}.gguf"
    open(path, "wb").write(encode(meta | {{"tokenizer.ggml.pre": name}}, weights.tensors))
    with Model(path) as model:
        for sign in signs:
            text = sign * (int(length) // len(sign))
            assert model.detokenize(model.tokenize(text)) == text, (name, sign)
print("alive")
"""


def test_no_run_of_letters_ends_the_process(tmp_path: Path) -> None:
    done = python(_CODE.format(signs=SIGNS), tmp_path, "30000", *FAMILIES)
    assert done.stdout == "alive\n", done.stderr[-2000:]


@pytest.mark.slow
def test_no_run_of_letters_ends_the_process_in_any_tokenizer(tmp_path: Path) -> None:
    done = python(_CODE.format(signs=MORE), tmp_path, "1000000", *ALL, timeout=1200)
    assert done.stdout == "alive\n", done.stderr[-2000:]


def native(model: Model, text: str, special: bool = False) -> list[int]:
    """llama.cpp's tokens of the whole."""
    data = text.encode()
    buffer = np.empty(len(data) + 8, np.int32)
    pointer = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    return buffer[: lib.llama_tokenize(model.vocab, data, len(data), pointer, buffer.size, False, special)].tolist()


def test_prose_without_spaces_is_tokenized_as_llama_cpp_does(smollm2_path: Path) -> None:
    texts = ("我们今天去公园。天气很好,大家都很高兴!" * 500, "x = f(y)+1;" * 2000, "the cat sat. " * 3000, "=" * 4096)
    with Model(smollm2_path) as model:
        for text in texts:
            assert model.tokenize(text).tolist() == native(model, text)


def test_a_cut_is_never_within_a_control_token(tiny_path: TinyPath) -> None:
    with Model(tiny_path()) as model:
        for lead in range(4080, 4100):
            text = "x" * lead + "<|im_end|>" + "y" * 5000
            assert model.tokenize(text, special=True).tolist() == native(model, text, special=True)
            assert model.tokenize(text).tolist() == native(model, text)
