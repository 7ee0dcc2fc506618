"""A small byte-level vocabulary: any text goes in and comes out exactly."""

from __future__ import annotations

from edgekv.tiny.gguf import Meta

BOS, EOS, IM_START, IM_END = 0, 1, 2, 3
"""Ids of the control tokens; the 256 byte tokens follow, then the words."""

CONTROL = ["<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_WORDS = [" the", " and", " is", " token", "user", "system", "한", "😀"]  # tokens of more than one byte, and of many
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _printable_bytes() -> list[int]:
    return [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it prints, else the next one from U+0100 on."""
    printable = set(_printable_bytes())
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _merges() -> list[tuple[str, str]]:
    """Left to right through each word, so that each prefix is a token and the word always forms."""
    letters = _byte_letters()
    spelled = ["".join(letters[byte] for byte in word.encode()) for word in _WORDS]
    pairs = [(word[:n], word[n]) for word in spelled for n in range(1, len(word))]
    return list(dict.fromkeys(pairs))  # two words may share a prefix; the order stays


def tokens() -> list[str]:
    return [*CONTROL, *_byte_letters(), *(left + right for left, right in _merges())]


def tokenizer(add_bos: bool = True) -> Meta:
    names = tokens()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(names) - len(CONTROL)),  # control, normal
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in _merges()],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.eot_token_id": IM_END,  # else llama.cpp guesses between <|im_end|> and <|endoftext|>
        "tokenizer.ggml.add_bos_token": add_bos,
        "tokenizer.chat_template": _TEMPLATE,
    }
