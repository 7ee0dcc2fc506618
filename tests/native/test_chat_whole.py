"""Chat: no text is lost between what a template renders and what the model sees."""

from __future__ import annotations

import json

import pytest
from test_chat import FAMILIES, TinyPath, check, family, open_chat

from edgekv import Sampling
from edgekv.chat import Chat

ANSWERS = [
    "hi",
    " hi",
    "hi ",
    " hi ",
    "\nhi\n",
    " hi\n",
    "\n\nhi",
    "hi\n\n",
    " a\nb\n",
    "a\n\nb \n",
    " ",
    "\n\n",
    " \n ",
]


def say(text: str) -> Sampling:
    return Sampling(grammar=f"root ::= {json.dumps(text)}")


def seen(chat: Chat) -> str:
    return chat.session.model.detokenize(chat.session.visible_tokens)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_asked_after_an_answer_is_seen(tiny_path: TinyPath, name: str, answer: str) -> None:
    """However much white space the answer begins or ends with, which the template may trim; it stays as sampled."""
    chat = open_chat(tiny_path(), family(name), max_tokens=32)
    chat.add("user", "FIRST QUESTION")
    for number in range(3):
        reply = chat.reply(sampling=say(answer)).finish()
        said = chat.script.ids[chat.script.said].tolist()
        chat.add("user", f"QUESTION {number}")
        assert all(f"QUESTION {k}" in seen(chat) for k in range(number + 1))
        assert seen(chat).count("FIRST QUESTION") == 1
        assert chat.script.ids[chat.script.said].tolist() == said, reply.text
        check(chat)
    chat.session.close()
