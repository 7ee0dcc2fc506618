"""The tiny models in raw llama.cpp: they load, they are what they claim, and a mask would show in their logits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_cpp import llama_cpp as ll

from edgekv import tiny
from edgekv.errors import UsageError

ATTENTION = ("llama", "gemma3", "mrope", "yarn")
GENERATIVE = (*ATTENTION, "mamba", "lfm2")
TEXT = "The token is 한글 and the user said 😀,\tcafé\n\x00\x01\x7f done. The quick brown fox jumps over the lazy dog."

Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ll.llama_backend_init()
    path = tmp_path_factory.mktemp("tiny")
    for kind in tiny.KINDS:
        tiny.write(path / f"{kind}.gguf", kind)
    return path


@contextmanager
def loaded(path: Path, *, vocab_only: bool = False) -> Iterator[Any]:
    """The model, or None where llama.cpp refuses it."""
    params = ll.llama_model_default_params()
    params.vocab_only = vocab_only
    params.check_tensors = True
    model = ll.llama_model_load_from_file(str(path).encode(), params)
    try:
        yield model or None
    finally:
        if model:
            ll.llama_model_free(model)


@contextmanager
def context(model: Any, *, type_kv: int = 1, embeddings: bool = False) -> Iterator[Any]:
    params = ll.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = 512, 512, 8
    params.n_threads = params.n_threads_batch = 1
    params.kv_unified = params.swa_full = True
    params.flash_attn_type = ll.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.type_k = params.type_v = type_kv
    params.embeddings = embeddings
    ctx = ll.llama_init_from_model(model, params)
    assert ctx
    try:
        yield ctx
    finally:
        ll.llama_free(ctx)


def decode(ctx: Any, tokens: list[int], start: int = 0) -> None:
    """Into sequence 0 from position `start` on; logits for the last token only."""
    batch = ll.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, i == len(tokens) - 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    result = ll.llama_decode(ctx, batch)
    ll.llama_batch_free(batch)
    assert result == 0


def logits(ctx: Any, model: Any) -> Logits:
    n_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    row: Logits = np.ctypeslib.as_array(ll.llama_get_logits_ith(ctx, -1), (n_vocab,)).copy()
    return row


def tokenize(model: Any, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
    raw = text.encode()
    room = len(raw) + 1
    out = (ll.llama_token * room)()
    n = ll.llama_tokenize(ll.llama_model_get_vocab(model), raw, len(raw), out, room, bos, special)
    assert n >= 0
    return list(out[:n])


def detokenize(model: Any, tokens: list[int], *, special: bool = True) -> bytes:
    buffer = ctypes.create_string_buffer(64)
    vocab = ll.llama_model_get_vocab(model)
    sizes = ((token, ll.llama_token_to_piece(vocab, token, buffer, 64, 0, special)) for token in tokens)
    return b"".join(buffer.raw[:size] for _, size in sizes)


def some_tokens(model: Any, n: int) -> list[int]:
    tokens = tokenize(model, TEXT)
    assert len(tokens) >= n
    return tokens[:n]


def divergence(p: Logits, q: Logits) -> float:
    """KL(p || q) in nats."""
    log_p, log_q = (x.astype(float) - np.logaddexp.reduce(x.astype(float)) for x in (p, q))
    return float(np.sum(np.exp(log_p) * (log_p - log_q)))


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_bytes_follow_the_seed(folder: Path, tmp_path: Path, kind: str) -> None:
    first = (folder / f"{kind}.gguf").read_bytes()
    assert tiny.write(tmp_path / "again.gguf", kind).read_bytes() == first
    other = tiny.write(tmp_path / "other.gguf", kind, seed=1).read_bytes()
    assert (other != first) == (kind != "vocab_only")  # a vocabulary holds nothing random
    assert len(first) < 1_000_000


def test_write_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("old")
    assert tiny.write(str(path)) == path
    assert path.read_bytes()[:4] == b"GGUF"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        tiny.write(tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("wrong", [{"kind": "gpt5"}, {"n_ctx_train": 0}, {"seed": -1}, {"seed": 2**32}])
def test_usage_errors(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        tiny.write(tmp_path / "model.gguf", **wrong)
    assert not list(tmp_path.iterdir())


# ---- what llama.cpp makes of them -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rope", "window", "recurrent", "hybrid"),
    [
        ("llama", ll.LLAMA_ROPE_TYPE_NORM, 0, False, False),
        ("gemma3", ll.LLAMA_ROPE_TYPE_NEOX, tiny.WINDOW, False, False),
        ("mrope", ll.LLAMA_ROPE_TYPE_MROPE, 0, False, False),
        ("yarn", ll.LLAMA_ROPE_TYPE_NORM, 0, False, False),
        ("mamba", ll.LLAMA_ROPE_TYPE_NONE, 0, True, False),
        ("lfm2", ll.LLAMA_ROPE_TYPE_NEOX, 0, False, True),
    ],
)
def test_capabilities(folder: Path, kind: str, rope: int, window: int, recurrent: bool, hybrid: bool) -> None:
    with loaded(folder / f"{kind}.gguf") as model:
        assert ll.llama_model_rope_type(model) == rope
        assert ll.llama_model_n_swa(model) == window
        assert ll.llama_model_is_recurrent(model) == recurrent
        assert ll.llama_model_is_hybrid(model) == hybrid
        assert ll.llama_model_n_ctx_train(model) == 4096
        assert ll.llama_vocab_get_add_bos(ll.llama_model_get_vocab(model)) == (kind != "mrope")


@pytest.mark.parametrize("kind", GENERATIVE)
def test_can_shift_is_no_gate(folder: Path, kind: str) -> None:
    """llama.cpp says no for M-RoPE alone: yes also where a shift means nothing (recurrent) or does harm (YaRN)."""
    with loaded(folder / f"{kind}.gguf") as model, context(model) as ctx:
        assert ll.llama_memory_can_shift(ll.llama_get_memory(ctx)) == (kind != "mrope")


@pytest.mark.parametrize("kind", GENERATIVE)
def test_decodes_with_lively_logits(folder: Path, kind: str) -> None:
    with loaded(folder / f"{kind}.gguf") as model, context(model) as ctx:
        assert ll.llama_get_memory(ctx)
        decode(ctx, some_tokens(model, 40))
        row = logits(ctx, model)
        assert np.isfinite(row).all()
        assert row.std() > 1.0
        decode(ctx, [int(row.argmax())], 40)
        assert divergence(row, logits(ctx, model)) > 0.1


@pytest.mark.parametrize("kind", GENERATIVE)
def test_greedy_text_varies_reads_and_does_not_end(folder: Path, kind: str) -> None:
    with loaded(folder / f"{kind}.gguf") as model, context(model) as ctx:
        decode(ctx, some_tokens(model, 40))
        out: list[int] = []
        for i in range(64):
            out.append(int(logits(ctx, model).argmax()))
            decode(ctx, out[-1:], 40 + i)
        assert len(set(out)) > 10
        assert detokenize(model, out).decode().isprintable()
        assert not set(out) & {tiny.BOS, tiny.EOS, tiny.IM_START, tiny.IM_END}


def again(ctx: Any, model: Any, tokens: list[int]) -> Logits:
    """Logits of the last token, decoded once more by itself: the same batch schedule whatever is visible."""
    last = len(tokens) - 1
    assert ll.llama_memory_seq_rm(ll.llama_get_memory(ctx), 0, last, -1)
    decode(ctx, tokens[-1:], last)
    return logits(ctx, model)


def move(ctx: Any, source: int, target: int, start: int, stop: int) -> None:
    memory = ll.llama_get_memory(ctx)
    ll.llama_memory_seq_cp(memory, source, target, start, stop)
    assert ll.llama_memory_seq_rm(memory, source, start, stop)


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("seed", range(4))
def test_hiding_half_the_tokens_shows_and_showing_them_again_undoes_it(tmp_path: Path, kind: str, seed: int) -> None:
    path = tiny.write(tmp_path / "model.gguf", kind, seed=seed)
    with loaded(path) as model, context(model) as ctx:
        tokens = some_tokens(model, 60)
        decode(ctx, tokens)
        full = again(ctx, model, tokens)
        move(ctx, 0, 1, 15, 45)
        assert divergence(full, again(ctx, model, tokens)) > 0.05
        move(ctx, 1, 0, 15, 45)
        np.testing.assert_array_equal(again(ctx, model, tokens), full)


def test_gemma3_has_a_full_layer(folder: Path) -> None:
    """Windows alone reach at most 6 x 31 positions back; a token 239 positions back still counts."""
    with loaded(folder / "gemma3.gguf") as model, context(model) as ctx:
        tokens = some_tokens(model, 60) * 4
        rows = []
        for first in (tokens[0], tokens[0] + 1):
            ll.llama_memory_clear(ll.llama_get_memory(ctx), True)
            decode(ctx, [first, *tokens[1:]])
            rows.append(logits(ctx, model))
        assert np.abs(rows[0] - rows[1]).max() > 1e-4


def test_a_quantised_cache_fits_the_head(folder: Path) -> None:
    with loaded(folder / "llama.gguf") as model, context(model, type_kv=8) as ctx:  # q8_0
        decode(ctx, some_tokens(model, 40))
        assert np.isfinite(logits(ctx, model)).all()


def test_encoder_has_no_memory_but_embeds(folder: Path) -> None:
    with loaded(folder / "encoder.gguf") as model, context(model, embeddings=True) as ctx:
        assert not ll.llama_get_memory(ctx)
        assert ll.llama_model_n_ctx_train(model) == 512
        decode(ctx, some_tokens(model, 40))
        pooled = np.ctypeslib.as_array(ll.llama_get_embeddings_seq(ctx, 0), (64,))
        assert np.isfinite(pooled).all()
        assert pooled.std() > 0.01


def test_vocab_only_loads_only_as_such(folder: Path) -> None:
    path = folder / "vocab_only.gguf"
    with loaded(path) as model:
        assert model is None
    with loaded(path, vocab_only=True) as model:
        assert detokenize(model, tokenize(model, TEXT)) == TEXT.encode()


# ---- vocabulary -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in tiny.KINDS if kind != "vocab_only"])
def test_text_survives_the_tokenizer(folder: Path, kind: str) -> None:
    with loaded(folder / f"{kind}.gguf") as model:
        assert detokenize(model, tokenize(model, TEXT)) == TEXT.encode()


def test_any_text_survives_and_no_text_makes_a_control_token(folder: Path) -> None:
    controls = {tiny.BOS, tiny.EOS, tiny.IM_START, tiny.IM_END}
    pieces = st.text() | st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", " the", "한", "😀"])

    with loaded(folder / "llama.gguf") as model:

        @settings(deadline=None)
        @given(st.lists(pieces).map("".join))
        def check(text: str) -> None:
            tokens = tokenize(model, text)
            assert detokenize(model, tokens) == text.encode()
            assert not controls & set(tokens)

        check()


def test_words_are_one_token_and_control_tokens_need_parsing(folder: Path) -> None:
    with loaded(folder / "llama.gguf") as model:
        assert [len(tokenize(model, word)) for word in (" the", "system", "한", "😀")] == [1, 1, 1, 1]
        chat = tokenize(model, "<|im_start|>user\n<|im_end|>", special=True, bos=True)
        assert (chat[0], chat[1], chat[-1]) == (tiny.BOS, tiny.IM_START, tiny.IM_END)
        assert detokenize(model, chat, special=False) == b"user\n"


def test_both_ends_end_a_generation(folder: Path) -> None:
    with loaded(folder / "llama.gguf") as model:
        vocab = ll.llama_model_get_vocab(model)
        ends = [t for t in range(ll.llama_vocab_n_tokens(vocab)) if ll.llama_vocab_is_eog(vocab, t)]
        assert ends == [tiny.EOS, tiny.IM_END]
        assert ll.llama_vocab_eot(vocab) == tiny.IM_END


def test_chat_template(folder: Path) -> None:
    with loaded(folder / "llama.gguf") as model:
        assert b"<|im_start|>" in ll.llama_model_chat_template(model, None)
