"""Chat: no text is lost between what a template renders and what the model sees."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_chat import CHATML, FAMILIES, TinyPath, check, family, open_chat

from edgekv import Sampling, Session, State, tiny
from edgekv.chat import Chat
from edgekv.errors import BadState, ChatBroken, MaskUnsupported, TemplateError, UsageError
from edgekv.following import Following
from edgekv.markup import Lexed
from edgekv.script import Hunk
from edgekv.turns import Message

ANSWERS = [" hi", "hi ", " hi ", "\nhi\n", "hi\n\n", " a\n\nb\n", "안", " 😀é\n", "\n\n"]
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}


def say(text: str) -> Sampling:
    return Sampling(grammar=f"root ::= {json.dumps(text, ensure_ascii=False)}")


def seen(chat: Chat) -> str:
    return chat.session.model.detokenize(chat.session.visible_tokens)


# -- white space ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_asked_after_an_answer_is_seen(tiny_path: TinyPath, name: str) -> None:
    """However much white space the answer begins or ends with, which the template may trim; it stays as sampled."""
    chat = open_chat(tiny_path(), family(name), max_tokens=32)
    chat.add("user", "FIRST QUESTION")
    for number, answer in enumerate(ANSWERS):
        chat.reply(sampling=say(answer)).finish()
        said = chat.script.ids[chat.script.said].tolist()
        chat.add("user", f"QUESTION {number}")
        assert f"QUESTION {number}" in seen(chat).split("FIRST QUESTION")[1]
        assert chat.script.ids[chat.script.said].tolist() == said
        beside = np.convolve(chat.script.said, [1, 1, 1], "same") > 0
        assert not (chat.script.kept & ~beside).any()
    assert all(seen(chat).count(f"QUESTION {k}") == 1 for k in range(len(ANSWERS)))
    check(chat)
    chat.session.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_is_settled(tiny_path: TinyPath, name: str) -> None:
    """What the template writes after an answer is evaluated, too, and a system text that is set later."""
    for answer in (" hi ", "hi\n\n"):
        chat = open_chat(tiny_path(), family(name))
        chat.ask("Hello.", sampling=say(answer)).finish()
        chat.settle()
        assert seen(chat).rstrip().endswith(chat.rendered().rstrip()[-6:])
        chat.set_system(" Be terse.\n")
        chat.ask("And now?", sampling=say(answer)).finish()
        assert "Be terse." in seen(chat) and "And now?" in seen(chat)
        check(chat)
        chat.session.close()


@pytest.mark.parametrize("name", ["qwen3", "toolcalls", "chatml", "llama3"])
def test_results_of_tools_are_seen(tiny_path: TinyPath, name: str) -> None:
    chat = open_chat(tiny_path(), family(name))
    chat.ask("Look!", sampling=say(" looking \n")).finish()
    for number in range(2):
        chat.add("tool", f"\n RESULT {number} \n", name="look")
    chat.reply(sampling=say("\n\nIt is there. ")).finish()
    chat.ask("Where?", sampling=say("There.")).finish()
    assert all(text in seen(chat) for text in ("RESULT 0", "RESULT 1", "Where?"))
    check(chat)
    chat.session.close()


# -- edits of characters and hidden parts ---------------------------------------------------------------------------


def test_characters_of_several_tokens_go_as_one(tiny_path: TinyPath) -> None:
    """Also where two begin with the same bytes."""
    chat = open_chat(tiny_path(), system="[]")
    chat.ask("Hello.").finish()
    for text in ("안녕", "Hello", "안녕하세요", "안녁하세요", "a 😀 b", "a 😁 b", "é", "è", "", "안"):
        chat.set_system(f"[{text}]")
        assert f"system\n[{text}]<|im_end|>" in seen(chat)
    check(chat)
    chat.session.close()


@pytest.mark.parametrize("verb", ["mask", "park", "evict"])
def test_another_system_text_where_the_old_one_is_hidden(tiny_path: TinyPath, verb: str) -> None:
    """It is hidden as well, and it is what comes back."""
    chat = open_chat(tiny_path(), system="Old words.")
    chat.ask("Hello.").finish()
    getattr(chat, verb)("system")
    chat.set_system("New text!")
    assert "Old" not in seen(chat) and "New" not in seen(chat)
    with pytest.raises(BadState):
        chat.undo()
    check(chat)
    chat.unmask("system")
    assert "New text!" in seen(chat) and "Old" not in seen(chat)
    check(chat)
    chat.session.close()


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_no_system_text_is_set_that_cannot_be_put_in(tiny_path: TinyPath, kind: str) -> None:
    chat = open_chat(tiny_path(kind), system="One.")
    chat.ask("Hello.").finish()
    chat.settle()
    before, messages = chat.session.visible_tokens.tolist(), chat.messages
    with pytest.raises(MaskUnsupported):
        chat.set_system("Two.")
    assert chat.session.visible_tokens.tolist() == before and chat.messages == messages
    chat.ask("And?").finish()
    assert "And?" in seen(chat)
    chat.session.close()


# -- the check itself -----------------------------------------------------------------------------------------------


def forget_the_tail(following: Following) -> None:
    """As if new text at the end were not evaluated."""
    following._read_behind = lambda *_: None  # type: ignore[method-assign]


def claim_the_tail(following: Following) -> None:
    """The text is written down and not evaluated."""

    def claim(text: str, _: int) -> None:
        end = len(following.script.text)
        script = following.script.reworded(Hunk(end, end, text))
        following.script = replace(script, kept=np.zeros(len(script), np.bool_))

    following._read_behind = claim  # type: ignore[method-assign]


def mask_the_new(following: Following) -> None:
    read = following._read_behind

    def masked(text: str, keep: int) -> None:
        before = len(following.session.tokens)
        read(text, keep)
        following.session.mask([(before, len(following.session.tokens))], force=True)

    following._read_behind = masked  # type: ignore[method-assign]


def evaluate_another(following: Following) -> None:
    lex, tokenize = following.markup.lex, following.session.model.tokenize
    small, large = (int(tokenize(letter)[0]) for letter in "lL")

    def other(text: str) -> Lexed:
        lexed = lex(text)
        return replace(lexed, ids=np.where(lexed.ids == small, large, lexed.ids).astype(np.int32))

    following.markup.lex = other  # type: ignore[method-assign]


def rewind_the_end(following: Following) -> None:
    following.session.rewind(len(following.session.tokens) - 3)


@pytest.mark.parametrize("fault", [forget_the_tail, claim_the_tail, mask_the_new, evaluate_another, rewind_the_end])
def test_a_fault_in_the_bookkeeping_is_never_silent(tiny_path: TinyPath, fault: Callable[[Following], None]) -> None:
    chat = open_chat(tiny_path())
    chat.add("user", "Hello.")
    fault(chat._following)
    with pytest.raises(ChatBroken, match="new session"):
        chat.ask("Is it lost?")
    verbs: list[Callable[[], object]] = [lambda: chat.ask("a"), chat.settle, chat.fork, lambda: chat.mask("user-1")]
    for verb in verbs:
        with pytest.raises(ChatBroken):
            verb()
    assert chat.messages[0].content == "Hello."
    chat.session.close()


def test_a_text_that_was_to_be_hidden_and_is_not(tiny_path: TinyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasoning that the template drops stays visible: the session does not mask it."""
    chat = open_chat(tiny_path(), family("qwen3"))
    chat.add("user", "Think!")
    chat.add("assistant", "<think>\nFirst this.\n</think>\n\nDone.")
    mask = chat.session.mask
    monkeypatch.setattr(chat.session, "mask", lambda ranges, **how: mask([(ranges[0][0], ranges[0][0] + 1)], **how))
    with pytest.raises(ChatBroken, match="no longer is visible"):
        chat.add("user", "And now?")
    chat.session.close()


# -- what a template leaves out -------------------------------------------------------------------------------------

ONLY_USERS = "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def test_what_a_template_leaves_out_is_refused_or_noted(tiny_path: TinyPath) -> None:
    chat = open_chat(tiny_path(), ONLY_USERS, system="Be terse.", tools=(TOOL,))
    chat.add("user", "Hello.")
    with pytest.raises(TemplateError, match="leaves out"):
        chat.add("tool", "a result")
    assert [m.role for m in chat.messages] == ["system", "user"]
    chat.add("assistant", "Hi.", tool_calls=[{"name": "look", "arguments": {}}])
    for what in ("role 'system'", "role 'assistant'", "takes no tools", "leaves out tool calls"):
        assert sum(what in note for note in chat.notes) == 1
    chat.add("user", "On!")
    assert "On!" in seen(chat)
    chat.session.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_noted_where_nothing_is_left_out(tiny_path: TinyPath, name: str) -> None:
    chat = open_chat(tiny_path(), family(name), system="Be terse.")
    chat.ask("Hello.", sampling=say(" a ")).finish()
    chat.ask("And?").finish()
    assert not any("leaves out" in note or "no tools" in note for note in chat.notes)
    chat.session.close()


# -- forms of content -----------------------------------------------------------------------------------------------

PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As in Llama 3.2 Vision: either form.
EITHER = PARTS.replace("{% for p", "{% if m.content is string %}{{ m.content }}{% else %}{% for p", 1).replace(
    "{% endfor %}<|im_end|>", "{% endfor %}{% endif %}<|im_end|>"
)
#: A result as parts, and refused without its call.
RESULTS = (
    "{% if messages[-1].role == 'tool' and not messages[-2].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    + (
        PARTS.replace("{% for p", "{% if m.role != 'tool' %}{{ m.content }}{% else %}{% for p", 1).replace(
            "{% endfor %}<|im_end|>", "{% endfor %}{% endif %}<|im_end|>"
        )
    )
)
#: The user's as parts, all others as text.
MIXED = PARTS.replace("{% for p", "{% if m.role != 'user' %}{{ m.content }}{% else %}{% for p", 1).replace(
    "{% endfor %}<|im_end|>", "{% endfor %}{% endif %}<|im_end|>"
)


def test_a_result_as_parts_after_its_call(tiny_path: TinyPath) -> None:
    chat = open_chat(tiny_path(), RESULTS)
    chat.add("user", "Look!")
    chat.add("assistant", "I look.", tool_calls=[{"name": "look"}])
    chat.add("tool", [part("A result.")])
    assert "tool\nA result.<|im_end|>" in seen(chat)
    chat.session.close()


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("template", [PARTS, EITHER, MIXED, CHATML])
def test_a_template_gets_content_as_it_takes_it(tiny_path: TinyPath, template: str) -> None:
    chat, plain = open_chat(tiny_path(), template, system="Be terse."), open_chat(tiny_path(), system="Be terse.")
    chat.add("user", [part("one"), part("two")])
    plain.add("user", "one\ntwo")
    for each in (chat, plain):
        each.reply(sampling=say("An answer.")).finish()
        each.add("tool", "a result")
        each.add("assistant", None)
        each.set_system([part("Be long.")] if each is chat else "Be long.")
        each.ask([part("three")] if each is chat else "three", sampling=say("yes")).finish()
        check(each)
    assert seen(chat) == seen(plain) and chat.messages == plain.messages
    for each in (chat, plain):
        each.session.close()


NO_TEXT: list[Any] = [
    3, b"text", {"type": "text", "text": "a"}, [3], ["a"], [{"text": "a"}], [{"type": "text"}], [{"type": 3}],
    [{"type": "text", "text": None}], object(),
]  # fmt: skip


def test_content_that_is_no_text(tiny_path: TinyPath) -> None:
    chat = open_chat(tiny_path())
    chat.add("user", "Hello.")
    before = chat.session.tokens.tolist()
    for content in NO_TEXT:
        for verb in (partial(chat.add, "user"), chat.ask, chat.set_system, partial(Message, "user")):
            with pytest.raises(UsageError, match="text"):
                verb(content)
    with pytest.raises(UsageError, match="'image_url'"):
        chat.ask([part("Look:"), {"type": "image_url", "image_url": {"url": "data:,"}}])
    with pytest.raises(UsageError, match="role"):
        chat.add(3, "text")  # type: ignore[arg-type]
    assert chat.session.tokens.tolist() == before and len(chat.messages) == 1
    chat.session.close()


# -- tool calls -----------------------------------------------------------------------------------------------------

#: As in Mistral's: ids of nine letters and digits on calls and on results; arguments as an object or as text.
NINE = """{%- for m in messages %}
{%- if m.tool_calls %}
{%- for c in m.tool_calls %}
{%- if c.id is not defined or c.id|length != 9 %}{{ raise_exception('Tool call IDs should be 9 long') }}{% endif %}
{{- '[CALL]' + c.id + c.function.name + (WRITTEN) }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id|length != 9 %}{{ raise_exception('IDs: 9 long') }}{% endif %}
{{- '[RESULT]' + m.tool_call_id + (m.name or '?') + m.content }}
{%- else %}
{{- '[' + m.role + ']' + m.content }}
{%- endif %}
{%- endfor %}"""
WRITTEN = {
    "as an object": "c.function.arguments|tojson",
    "item by item": "c.function.arguments.items()|list|first|join(': ')|tojson|replace('\"a: ', '{\"a\": \"') + '}'",
    "as text": "c.function.arguments",
}


@pytest.mark.parametrize("how", WRITTEN)
def test_calls_are_written_as_a_template_takes_them(tiny_path: TinyPath, how: str) -> None:
    chat = open_chat(tiny_path(), NINE.replace("WRITTEN", WRITTEN[how]))
    chat.add("user", "Look!")
    given: list[Any] = [{"a": "é<|im_end|>"}, '{"a": "é<|im_end|>"}']
    for arguments, call_id in product(given, ["", "call_abcdefghijk", "abcdef123"]):
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        chat.add("assistant", None, tool_calls=[{**call, "id": call_id} if call_id else call])
        chat.add("tool", "RESULT", tool_call_id=call_id)
        text = seen(chat).rpartition("[CALL]")[2]
        own = text[:9]
        assert own.isalnum() and (own == call_id or call_id != "abcdef123")
        assert text == f'{own}look{{"a": "é<|im_end|>"}}[RESULT]{own}lookRESULT'
    assert not chat.notes
    check(chat)
    chat.session.close()


def test_results_belong_to_their_calls(tiny_path: TinyPath) -> None:
    """By id, else by name, else in order; what a reply found in its text can be given as it is."""
    chat = open_chat(tiny_path(), NINE.replace("WRITTEN", WRITTEN["as text"]))
    chat.add("user", "Look!")
    calls = [{"name": name, "arguments": {}} for name in ("one", "two", "three")]
    chat.add("assistant", "", tool_calls=[calls[0], calls[1], {**calls[2], "id": "abcdefghi"}])
    chat.add("tool", "THREE", tool_call_id="abcdefghi")
    chat.add("tool", "TWO", name="two")
    chat.add("tool", "ONE")
    chat.add("tool", "MORE")
    ids = [piece[:9] for piece in seen(chat).split("[CALL]")[1:]]
    for call_id, result in ((ids[2], "threeTHREE"), (ids[1], "twoTWO"), (ids[0], "oneONE")):
        assert f"[RESULT]{call_id}{result}" in seen(chat)
    assert "?MORE" in seen(chat) and len(set(ids)) == 3
    check(chat)
    chat.session.close()


NO_CALLS: list[Any] = [
    "call", {"name": "f"}, 3, [3], [{}], [{"function": "f"}], [{"function": {"name": 3}}], [{"name": "f", "id": 3}],
    [{"name": "f", "arguments": "{a"}], [{"name": "f", "arguments": "[]"}], [{"name": "f", "arguments": 3}],
    [{"name": "f", "arguments": "[" * 100_000}],
]  # fmt: skip


def test_calls_that_are_none(tiny_path: TinyPath) -> None:
    chat = open_chat(tiny_path())
    for calls in NO_CALLS:
        with pytest.raises(UsageError):
            chat.add("assistant", "", tool_calls=calls)
    assert not chat.messages and not len(chat.session.tokens)
    chat.session.close()


# -- BOS and EOS ----------------------------------------------------------------------------------------------------

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("begins", ["", "{{ bos_token }}", "\n{{ bos_token }}"])
@pytest.mark.parametrize("kind", ["llama", "mrope"])  # mrope: add_bos_token is false
def test_the_first_token_comes_once_and_as_the_template_or_the_model_wants(
    tiny_path: TinyPath, kind: str, begins: str
) -> None:
    chat = open_chat(tiny_path(kind), begins + PLAIN, system="Be terse.")
    chat.add("user", "Hello.")
    chat.add("assistant", "<|startoftext|>Hi.")
    model = chat.session.model
    assert (model.bos_text, model.eos_text) == ("<|startoftext|>", "<|endoftext|>")
    tokens = chat.session.visible_tokens.tolist()
    assert tokens.count(tiny.BOS) == (kind == "llama" or bool(begins))
    assert tokens.count(tiny.EOS) == 3 and "Hi.<|endoftext|>" in seen(chat)
    check(chat)
    chat.session.close()


def test_a_vocabulary_without_bos_and_eos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file names none llama.cpp takes token 11, as GPT-2 has it, which is a letter here."""
    meta = tiny.tokenizer(add_bos=False)
    del meta["tokenizer.ggml.bos_token_id"], meta["tokenizer.ggml.eos_token_id"]
    monkeypatch.setattr(tiny, "tokenizer", lambda: meta)
    chat = open_chat(tiny.write(tmp_path / "tiny.gguf"), "{{ bos_token }}" + PLAIN)
    chat.add("user", "Hello.")
    assert seen(chat) == "[user]Hello."
    assert chat.session.model.bos is None
    check(chat)
    chat.session.close()


# -- invalid text ---------------------------------------------------------------------------------------------------


def test_lone_surrogates_become_replacement_characters(tiny_path: TinyPath, tmp_path: Path) -> None:
    half = "a\ud83db"
    tool = {"type": "function", "function": {"name": half, "description": half}}
    template = family("toolcalls") + "{{ '\ud83d' if enable_thinking else '' }}"
    chat = open_chat(tiny_path(), template, system=half, tools=(tool,), variables={"enable_thinking": half})
    chat.add("user", half, tags=[half])
    chat.add("assistant", half, tool_calls=[{"name": half, "arguments": {half: half}, "id": half}])
    chat.add("tool", "\ud83d\ude00", name=half, tool_call_id=half)
    chat.ask([part(half)]).finish()
    chat.set_system(half + half)
    assert [m.content for m in chat.messages[1:4]] == ["a\ufffdb", "a\ufffdb", "😀"]
    assert Message("user", half, name=half).content == "a\ufffdb"
    check(chat)
    chat.save(tmp_path / "chat.kvs")
    with Session.load(tmp_path / "chat.kvs", n_threads=1) as session:
        again = Chat.load(session, options=chat.options)
        assert again.messages == chat.messages
        check(again)
    chat.session.close()


def test_an_answer_of_broken_bytes_is_saved_and_loaded(tiny_path: TinyPath, tmp_path: Path) -> None:
    """Bytes that begin a character and do not complete it, and bytes that are none."""
    chat = open_chat(tiny_path(), max_tokens=6)
    model = chat.session.model
    first, no_utf8 = model.tokenize("é").tolist()[0], [t for t in range(model.n_vocab) if model.piece(t) == b"\xff"]
    for forced in (first, *no_utf8):
        chat.ask("Hello.", sampling=Sampling(logit_bias={forced: 1e4})).finish()
        assert "\ufffd" in chat.messages[-1].content
        check(chat)
    chat.save(tmp_path / "chat.kvs")
    with Session.load(tmp_path / "chat.kvs", n_threads=1) as session:
        again = Chat.load(session, options=chat.options)
        assert again.messages == chat.messages and again.script.text == chat.script.text
        again.ask("And?").finish()
        check(again)
    chat.session.close()


def test_text_that_a_vocabulary_cannot_spell_is_noted(tiny_path: TinyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a vocabulary without a token for each byte, where the tokenizer leaves letters out."""
    chat = open_chat(tiny_path())
    tokenize = chat.session.model.tokenize
    monkeypatch.setattr(chat.session.model, "tokenize", lambda text, **how: tokenize(text.replace("Z", ""), **how))
    chat.add("user", "A ZEBRA.")
    assert " EBRA." in seen(chat)
    assert any("no token" in note for note in chat.notes)
    chat.ask("And?").finish()
    check(chat)
    assert not chat.session.indexes(State.DROPPED).size
    chat.session.close()
