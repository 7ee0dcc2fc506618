"""Long runs, tokenized with many pre-tokenizers: ``python long_runs.py FOLDER LENGTH [PRE...]`` prints each it did."""

from __future__ import annotations

import sys
from pathlib import Path

from edgekv import Model
from edgekv.tiny.gguf import encode
from edgekv.tiny.kinds import BUILDERS
from edgekv.tiny.vocab import tokenizer
from edgekv.tiny.weights import Weights

#: One of each regular expression that llama.cpp leaves to std::regex, and some it has code of its own for.
FAMILIES = (
    *(
        "gpt-4o",
        "tekken",
        "deepseek-v3",
        "deepseek-llm",
        "deepseek-coder",
        "exaone-moe",
        "bloom",
        "viking",
        "chameleon",
    ),
    *("granite-embed-multi-97m", "chatglm-bpe", "seed-coder", "bailingmoe", "qwen2", "llama-bpe", "gpt-2", "afmoe"),
)
UNITS = ("a", "A", "7", " ", "\n", "!", "\u0301", "é", "😀", "中", "가나 ")


def model_with(folder: Path, pre: str) -> Model:
    """A tiny model whose vocabulary names that pre-tokenizer."""
    arch, build = BUILDERS["llama"]
    weights = Weights(0, 4096)
    meta = {"general.architecture": arch, "general.name": pre, f"{arch}.context_length": 4096} | tokenizer()
    file = folder / f"{pre}.gguf"
    file.write_bytes(encode(meta | build(weights) | {"tokenizer.ggml.pre": pre}, weights.tensors))
    return Model(file)


if __name__ == "__main__":
    for pre in sys.argv[3:] or FAMILIES:
        with model_with(Path(sys.argv[1]), pre) as model:
            for unit in UNITS:
                text = (unit * int(sys.argv[2]))[: int(sys.argv[2])]
                assert model.detokenize(model.tokenize(text)) == text, (pre, unit)
        print(pre, flush=True)
