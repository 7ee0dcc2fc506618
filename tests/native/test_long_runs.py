"""Long runs of one character, which llama.cpp's regular expressions do not survive on the stack of a thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import long_runs
import pytest

from edgekv import Model
from helpers import python

HERE = Path(__file__).resolve().parent
RUN = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


def tokenized(folder: Path, length: int, *pre: str, timeout: float = 60) -> list[str]:
    """The pre-tokenizers that a process of its own lived through."""
    done = python(RUN, HERE / "long_runs.py", folder, str(length), *pre, timeout=timeout)
    assert done.returncode == 0, f"died with {done.returncode} after {done.stdout.split()[-1:]}: {done.stderr[-500:]}"
    return done.stdout.split()


def test_a_run_of_30_000_characters(tmp_path: Path) -> None:
    worst = ("gpt-4o", "deepseek-v3")
    assert tokenized(tmp_path, 30_000, *worst) == list(worst)


@pytest.mark.slow
@pytest.mark.parametrize("pre", long_runs.FAMILIES)
def test_runs_of_any_length(tmp_path: Path, pre: str) -> None:
    for length in (30_000, 50_001, 400_000):
        assert tokenized(tmp_path, length, pre, timeout=600) == [pre]


@pytest.mark.parametrize("pre", ["gpt-4o", "gpt-2"])
def test_long_lines_have_the_tokens_of_one_call(tmp_path: Path, pre: str) -> None:
    """Prose in one long line, with and without spaces, some of it longer than what is tokenized at once."""
    with long_runs.model_with(tmp_path, pre) as model:
        for text in (
            "The user said 한국어 and is 7 tokens, ok. " * 300,
            "中文没有空格，" * 700,
            "the user,system. " * 4000,
        ):
            known = model._tokenize(text, False)
            assert model.tokenize(text).tolist() == known.tolist()


def test_control_tokens_in_a_long_text_are_still_told_apart(tiny_path: Callable[..., Path]) -> None:
    with Model(tiny_path("llama")) as model:
        text = "a" * 60_000 + "<|im_end|>"
        assert model.tokenize(text, special=True).tolist()[-1] == model.control_tokens["<|im_end|>"]
        assert model.detokenize(model.tokenize(text)) == text
