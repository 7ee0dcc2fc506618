"""Template: a model's chat template, which is a program of somebody else's, rendered where it can do no harm.

    text = Template(model.chat_template, bos="<s>").render([{"role": "user", "content": "Hi"}])

budget.py: what a render may spend; methods.py and filters.py: what a template may call; sandbox.py: Jinja, obeying.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

import jinja2

from edgekv.errors import TemplateError, UsageError
from edgekv.template.budget import DEEPEST, Budget, Refused, in_use
from edgekv.template.filters import Raised, strftime
from edgekv.template.sandbox import FILE, SANDBOX, names_read
from edgekv.template.takes import Takes
from edgekv.wording import printable, well_formed

__all__ = ["PLAIN", "PLAIN_STOPS", "Template"]

#: For base models, which have none. What it writes for a message does not hang on those that follow.
PLAIN: Final = """\
{%- for message in messages %}
{%- set content = message.content %}
{%- if content is not string %}{% set content = (content or [])|map(attribute='text', default='')|join %}{% endif %}
{%- if loop.first and message.role == 'system' %}
{{- content + '\\n\\n' }}
{%- else %}
{{- message.role|capitalize + ': ' + content }}
{%- if message.tool_calls %}{{ ' ' ~ message.tool_calls|tojson }}{% endif %}
{{- '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
#: Texts that end an answer there.
PLAIN_STOPS: Final = ("\nUser:", "\nAssistant:", "\nSystem:", "\nTool:")

_LONGEST: Final = 256_000  # characters; the longest template that llama.cpp carries has 17,000
_QUOTED: Final = 200  # characters of somebody else's words in a message
_ANOTHER: Final = "give another template"


class Template:
    """A model's chat template (Jinja), rendered in a sandbox. Several threads may render the same one at once.

    bos, eos: how those tokens are written. now: the date ``strftime_now`` tells, so that a chat keeps it; by default
    that of this call. Raises TemplateError for a source that is no Jinja, too long or too deep, or uses what chat
    templates do without (imports, blocks, recursive loops, ...).
    """

    def __init__(self, source: str, *, bos: str = "", eos: str = "", now: datetime | None = None) -> None:
        source = well_formed(source)
        self.source: Final = source
        self.now: Final = now or datetime.now()
        self._tokens = {"bos_token": bos, "eos_token": eos}
        if len(source) > _LONGEST:
            raise TemplateError(f"a chat template of {len(source):,} characters, of {_LONGEST:,} at most; {_ANOTHER}")
        if problem := self._compile():
            raise TemplateError(problem)
        self.takes: Final = Takes(self)

    def _compile(self) -> str:
        """What is wrong with the source, '' for nothing; told, not raised, so that no frames of the compiler stay."""
        try:
            tree = SANDBOX.parse(self.source)
            self._names = frozenset(names_read(tree))
            code = SANDBOX.compile(tree, filename=FILE)
            self._template = jinja2.Template.from_code(SANDBOX, code, SANDBOX.globals)
        except Exception as err:  # of Jinja's, of CPython's compiler, or a refusal of ours
            return f"the chat template cannot be read: {_reason(err)}{_line(err)}; {_ANOTHER}"
        return ""

    def __repr__(self) -> str:
        return f"<Template of {len(self.source):,} characters>"

    def mentions(self, name: str) -> bool:
        """Whether the template reads a variable, an attribute or an item of that name anywhere."""
        return name in self._names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The conversation as one text, control tokens written out; lone surrogates are U+FFFD.

        Messages, tools and options (``enable_thinking=False``, ...) are plain data: text, numbers, None, lists and
        mappings, of which the template gets copies. Raises UsageError for anything else; TemplateError where the
        template refuses the conversation (its own words are quoted), fails, or takes more time or memory than a chat
        template has reason to.
        """
        own = {"messages": messages, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        budget = Budget()
        variables = _plain({**self._tokens, **options, **own}, budget)
        text, problem = self._run(variables, budget)
        if problem:
            raise TemplateError(problem)
        return well_formed(text)

    def _run(self, variables: dict[str, Any], budget: Budget) -> tuple[str, str]:
        """The text and '', or what went wrong."""
        token = in_use.set(budget)
        try:
            context = self._template.new_context({"strftime_now": partial(strftime, self.now), **variables})
            return SANDBOX.concat(self._template.root_render_func(context)), ""
        except Raised as err:
            return "", f'the chat template refuses this conversation: "{_quoted(str(err))}"; change its messages'
        except Exception as err:
            reason = _reason(err) + _line(err, self._template)
            return "", f"the chat template cannot render this conversation: {reason}; {_ANOTHER}"
        finally:
            in_use.reset(token)


# -- data -----------------------------------------------------------------------------------------------------------


def _plain(value: Any, budget: Budget, depth: int = 0) -> Any:
    """A copy that is data and nothing else; more to render is more to spend."""
    if depth > DEEPEST:
        raise UsageError(f"messages, tools and options are nested more than {DEEPEST} deep")
    if isinstance(value, str):
        budget.grow(chars=len(value))
        return str.__str__(value)  # an enumeration's member, say, is its text
    if isinstance(value, (list, tuple)):
        budget.grow(messages=len(value))
        return [_plain(item, budget, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return {_key(key): _plain(item, budget, depth + 1) for key, item in value.items()}
    if value is None or type(value) in (bool, int, float):
        return value
    raise UsageError(f"a {type(value).__name__} in messages, tools or options; give text, numbers, lists and mappings")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise UsageError(f"a {type(key).__name__} as a key in messages, tools or options; keys are text")
    return str.__str__(key)


# -- what went wrong ------------------------------------------------------------------------------------------------


def _quoted(text: str) -> str:
    """Somebody else's words: one line, and not too many of them."""
    text = " ".join(text[: 4 * _QUOTED].split())
    return printable(text if len(text) <= _QUOTED else text[:_QUOTED] + "...")


def _reason(err: Exception) -> str:
    if isinstance(err, RecursionError):
        return "it is nested too deep"
    if isinstance(err, MemoryError):
        return "there is no memory for it"
    text = (isinstance(err, jinja2.TemplateError) and err.message) or (isinstance(err, SyntaxError) and err.msg)
    return _quoted(text or str(err) or type(err).__name__)


def _line(err: Exception, template: jinja2.Template | None = None) -> str:
    """' (line 12)': the innermost line of the template that fails, where that is known."""
    line = err.lineno if isinstance(err, (jinja2.TemplateSyntaxError, Refused)) else 0
    trace = err.__traceback__ if template else None
    while trace and template:
        if trace.tb_frame.f_code.co_filename == FILE:
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return f" (line {line})" if line else ""
