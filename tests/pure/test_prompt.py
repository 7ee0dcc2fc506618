"""Parts of a prompt: loaded, named, sized and rehearsed before a model reads a token."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgekv import prompt
from edgekv.errors import BadState, ContextFull, PinnedTokens, UnknownSpan, UsageError
from edgekv.prompt import Piece, Prompt
from edgekv.receipts import Timings


def pieces(**lengths: int) -> tuple[Piece, ...]:
    return tuple(Piece(name, "", np.zeros(n, np.int32)) for name, n in lengths.items())


def no_stdin() -> bytes:
    raise AssertionError("nothing asked for standard input")


def test_load_reads_in_order(tmp_path: Path) -> None:
    (tmp_path / "a=b.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
    specs = ["second=-", f"first={tmp_path / 'a=b.txt'}"]
    assert prompt.load(specs, lambda: b"two") == [prompt.Part("second", "two"), prompt.Part("first", "one\r\n")]
    assert prompt.load([], no_stdin) == []


@pytest.mark.parametrize("specs", [["x"], ["=f"], ["n="], ["a=-", "b=-"], ["a=1", "a=2"], [" =f"], ["tag:a=f"]])
def test_load_refuses_before_it_reads(specs: list[str]) -> None:
    with pytest.raises(UsageError):
        prompt.load(specs, no_stdin)


def test_room_is_made_for_everything() -> None:
    question = Piece("question", "user", np.zeros(20, np.int32))
    made = Prompt(pieces(a=100, b=135), question)
    assert made.num_tokens == 255
    assert made.cells(0, None) == 256  # the one more is for a token read again
    assert made.cells(1, None) == 512
    assert made.cells(1, 4096) == 4096
    assert made.cells(1, 257) == 257  # llama.cpp makes 512 of it
    assert Prompt(pieces(a=255)).cells(1000, None) == 256  # nothing is asked, nothing is answered
    with pytest.raises(ContextFull, match="255 tokens to read and 1 to answer need n_ctx=512, not 256"):
        made.cells(1, 256)


@pytest.mark.parametrize(
    ("masks", "force", "error"),
    [
        ([], False, None),
        (["b"], False, None),
        (["b", "c"], False, None),
        (["?"], True, None),
        (["a"], False, PinnedTokens),
        (["*"], False, PinnedTokens),
        (["z"], False, UnknownSpan),
        (["empty"], False, UsageError),
    ],
)
@pytest.mark.parametrize("can_shift", [False, True])
def test_a_rehearsal_refuses_what_the_mask_would(
    masks: list[str], force: bool, error: type[Exception] | None, can_shift: bool
) -> None:
    made = Prompt(pieces(a=10, b=20, c=5, empty=0))
    for gap in ("close", "keep"):
        if error is None:
            made.rehearse(masks, gap, force=force, can_shift=can_shift)
        else:
            with pytest.raises(error):
                made.rehearse(masks, gap, force=force, can_shift=can_shift)


def test_a_rehearsal_of_nothing_visible() -> None:
    with pytest.raises((BadState, UsageError)):
        Prompt(pieces(a=0)).rehearse(["a"], "close", force=True, can_shift=True)


@pytest.mark.parametrize("template", [None, "{{ messages }}", "<|im_start|>"])
def test_chatml_needs_its_template_and_its_tokens(template: str | None) -> None:
    """The last has the template, and a vocabulary that spells its marks out letter by letter."""
    model: Any = SimpleNamespace(
        chat_template=template,
        path=Path("other.gguf"),
        tokenize=lambda text, special=False: np.zeros(len(text), np.int32),  # noqa: ARG005
    )
    with pytest.raises(UsageError, match=r"other\.gguf has no ChatML template"):
        prompt.chatml(model)


def test_timings_are_counted_from_the_question() -> None:
    whole = Timings(
        prefilled=110, reused=0, masked=50, reread=1, generated=5, prefill_ms=900.0, ttft_ms=930.0, decode_ms=40.0
    )
    question = Piece("question", "user", np.zeros(10, np.int32))
    told = prompt.from_question_on(whole, question, reused=50, question_ms=80.0)
    assert (told.prefilled, told.reused, told.masked, told.reread, told.generated) == (10, 50, 50, 1, 5)
    assert (told.prefill_ms, told.ttft_ms, told.decode_ms) == (80.0, 110.0, 40.0)
