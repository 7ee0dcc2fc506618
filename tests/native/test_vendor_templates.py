"""Every chat template that llama.cpp carries: the sandbox writes what Jinja writes, or refuses what Jinja refuses.

They are in the source package of llama-cpp-python, which pip fetches for this run; none is kept.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgekv.errors import TemplateError
from edgekv.template import Template

pytestmark = pytest.mark.slow
NOW = datetime(2026, 3, 4)
PACKAGE = "llama-cpp-python"
Outcome = dict[str, str]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be terse. 짧게."}
ID = "abcdef123"
CALL = {"id": ID, "type": "function", "function": {"name": "weather", "arguments": {"city": "서울", "days": 2}}}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": ID, "content": '{"celsius": 3}'}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where", "enum": ["서울", "Rome"]},
        "days": {"type": "integer"},
        "more": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "number"}}}},
    },
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Forecasts.", "parameters": SCHEMA}}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "two": {"messages": [user("Hello there"), assistant("Hi!"), user("안녕 🙂")]},
    "system": {"messages": [SYSTEM, user("Hello there"), assistant("Hi!"), user("안녕 <b> & 🙂")]},
    "prompt": {"messages": [SYSTEM, user("Hello there")], "add_generation_prompt": True},
    "tools": {
        "messages": [user("Weather?"), assistant("", tool_calls=[CALL]), RESULT, assistant("Cold."), user("Thanks.")],
        "tools": [TOOL],
        "add_generation_prompt": True,
    },
    "reasoning": {
        "messages": [
            user("2+2?"),
            assistant("4", reasoning_content="쉬움", thinking="쉬움"),
            user("3+3?"),
            assistant("<think>\nhm\n</think>\n\n6"),
            user("So?"),
        ],
        "add_generation_prompt": True,
        "enable_thinking": True,
    },
    "no thinking": {
        "messages": [user("2+2?"), assistant("4", reasoning_content="쉬움"), user("3+3?")],
        "add_generation_prompt": True,
        "enable_thinking": False,
    },
}
#: What the sandbox writes otherwise than Jinja, and why that is meant: it does as llama.cpp does.
OTHERWISE = {
    "Kimi-K2-Instruct": "appends to a list, which transformers' sandbox forbids",
    "Kimi-K2-Thinking": "appends to a list, which transformers' sandbox forbids",
    "llama-cpp-deepseek-r1": "dumps what map gives, which is a list here and a generator in Jinja",
    "meetkai-functionary-medium-v3.1": "adds to what 'safe' gives, which Jinja escapes as HTML",
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name to template; skips where the package is not to be had."""
    folder = tmp_path_factory.mktemp("sdist")
    wanted = f"{PACKAGE}=={importlib.metadata.version(PACKAGE)}"
    options = ["--no-deps", "--no-binary", PACKAGE, "--no-input", "--disable-pip-version-check", "-d", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode or not archives:
        pytest.skip(f"pip has no source package of {wanted}: {done.stderr[-500:]}")
    return dict(templates_in(archives[0]))


def templates_in(archive: Path) -> list[tuple[str, str]]:
    found = []
    with tarfile.open(archive) as tar:
        for member in tar:
            path = Path(member.name)
            if path.suffix == ".jinja" and path.parent.name == "templates" and (file := tar.extractfile(member)):
                found.append((path.stem, file.read().decode()))
    return found


def tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.cache
def compiled(source: str) -> jinja2.Template:
    """As Jinja itself reads it, in transformers' settings."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters |= {"tojson": tojson, "from_json": json.loads}
    environment.globals |= {"raise_exception": refuse, "strftime_now": NOW.strftime}
    # the marks of a training run, which say nothing
    plain = re.sub(r"{%(-?)\s*generation\s*(-?)%}", r"{%\1 if true \2%}", source)
    return environment.from_string(re.sub(r"{%(-?)\s*endgeneration\s*(-?)%}", r"{%\1 endif \2%}", plain))


def bare(source: str, variables: dict[str, Any]) -> tuple[str, str]:
    """What Jinja itself makes of a template, or the reason why it does not."""
    defaults = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "add_generation_prompt": False}
    try:
        return compiled(source).render(defaults | json.loads(json.dumps(variables))), ""
    except Exception as err:
        return "", str(err) or type(err).__name__


@functools.cache
def read(source: str) -> Template:
    return Template(source, bos="<s>", eos="</s>", now=NOW)


def ours(source: str, variables: dict[str, Any]) -> tuple[str, str]:
    try:
        return read(source).render(**variables), ""
    except TemplateError as err:
        return "", str(err)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_the_sandbox_writes_what_jinja_writes(sources: dict[str, str], conversation: str) -> None:
    variables = CONVERSATIONS[conversation]
    wrong = {
        name: (wanted, got)
        for name, source in sources.items()
        if not agree(wanted := bare(source, variables), got := ours(source, variables)) and name not in OTHERWISE
    }
    assert len(sources) > 50 and not wrong


def agree(wanted: tuple[str, str], got: tuple[str, str]) -> bool:
    """The same text; or the same refusal, quoted where the template has words of its own for it."""
    if wanted[1]:
        return bool(got[1]) and ("refuses" not in got[1] or wanted[1].split()[0] in got[1])
    return wanted == got


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_what_a_user_says_is_in_the_text(sources: dict[str, str], conversation: str) -> None:
    variables = CONVERSATIONS[conversation]
    said = [message["content"] for message in variables["messages"] if message["role"] == "user"]
    texts = {name: ours(source, variables)[0] for name, source in sources.items()}
    written = {name: text for name, text in texts.items() if text}
    assert [name for name, text in written.items() if not all(words in text for words in said)] == []
    assert len(written) > 0.8 * len(sources)


def test_those_written_otherwise_are_written(sources: dict[str, str]) -> None:
    for name in OTHERWISE.keys() & sources.keys():
        text, problem = ours(sources[name], CONVERSATIONS["tools"])
        assert "Thanks." in text and "&#" not in text, problem
