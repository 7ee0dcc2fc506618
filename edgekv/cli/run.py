"""``edgekv run``: read files as named parts, mask some, ask."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from edgekv.cli.output import Words, console, json_option, model_option, print_json, progress, stdin_bytes, talk
from edgekv.errors import MaskUnsupported, PinnedTokens, UsageError
from edgekv.memory import KV_BLOCKS
from edgekv.wording import count

if TYPE_CHECKING:
    from edgekv import Generation, Model, Receipt, Sampling, Session, Timings
    from edgekv.prompt import Part, Prompt, Writer

_HELP = """Read files as named parts, hide some of them, ask a question.

    \b
    edgekv run --part rules=rules.txt --part report=report.txt \\
               --mask report --ask "What are the rules?"

    Parts are read in the order given; then --mask hides some, and the question cannot look at them. Parts read after
    a hidden one were computed while it was visible: stderr says how many tokens that concerns. stdout is the answer.
    Without --ask the parts are read, masked and shown in a table.

    Chat models: --chat makes every part a turn of its own, for models that speak ChatML (a part called "system" is
    the system turn). For any other template write its control tokens into the files and add --special.
    """


@dataclass(frozen=True)
class Options:
    """The command line."""

    model: str
    parts: tuple[str, ...]
    system: str | None
    masks: tuple[str, ...]
    force: bool
    ask: str | None
    keep_gap: bool
    then: str
    chat: bool
    special: bool
    max_tokens: int
    temperature: float
    seed: int | None
    n_ctx: int | None
    kv_type: str
    threads: int | None

    @property
    def gap(self) -> str:
        return "keep" if self.keep_gap else "close"


@click.command(help=_HELP)
@model_option
@click.option("--part", "parts", multiple=True, metavar="NAME=FILE", help="A part: its name and file, - for stdin.")
@click.option("--system", type=Words(), metavar="TEXT", help='A first part called "system", given here.')
@click.option("--mask", "masks", multiple=True, metavar="NAME", help='Hide this part (or a pattern: "log*").')
@click.option("--force", is_flag=True, help="Mask even the first tokens, on which most models lean.")
@click.option("--ask", type=Words(), metavar="TEXT", help="The question, evaluated after the mask.")
@click.option("--keep-gap", is_flag=True, help="Leave the masked positions empty instead of closing up.")
@click.option(
    "--then",
    type=click.Choice(["none", "auto", "recompute"]),
    default="none",
    show_default=True,
    help="Read what stands behind the mask again: never, where at most 64 tokens saw the hidden text, or always.",
)
@click.option("--chat", is_flag=True, help="Wrap parts and question as ChatML turns.")
@click.option("--special", is_flag=True, help="Let control tokens in the texts act as such.")
@click.option("--max-tokens", type=click.IntRange(0), default=256, show_default=True, help="Length of the answer.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--seed", type=int, help="Repeat a drawn answer (temperature above 0).")
@click.option("--n-ctx", type=click.IntRange(1), metavar="CELLS", help="Size of the cache.  [default: what is needed]")
@click.option("--kv-type", type=click.Choice(list(KV_BLOCKS)), default="f16", show_default=True, help="Of the cache.")
@click.option("--threads", type=click.IntRange(1), help="[default: the physical cores, or a container's CPU quota]")
@json_option
def run(as_json: bool, **given: Any) -> int:
    from edgekv import Model, Sampling, Session, prompt

    options = Options(**given)
    parts, sampling = _parts(options), Sampling(temperature=options.temperature, seed=options.seed)
    with Model(options.model) as model:
        made = prompt.compose(model, _writer(model, options), parts, options.ask)
        _refuse_early(model, made, options)
        spare = made.num_behind(options.masks) if options.then != "none" else 0
        n_ctx = made.cells(options.max_tokens, options.n_ctx, spare)
        _remark(model, made, options)
        with Session(model, n_ctx=n_ctx, kv_type=options.kv_type, n_threads=options.threads) as session:
            return _Run(session, made, options, sampling, as_json).all()


def _parts(options: Options) -> Sequence[Part]:
    from edgekv import prompt

    if not options.parts and options.system is None:
        raise UsageError("there is nothing to read: give --part NAME=FILE, as often as you like")
    if options.chat and options.special:
        raise UsageError("--chat writes the control tokens itself and --special takes those of the texts: choose one")
    given = [] if options.system is None else [prompt.Part(prompt.SYSTEM, options.system)]
    parts = [*given, *prompt.load(options.parts, stdin_bytes)]
    taken = [] if options.ask is None else [prompt.QUESTION, prompt.ANSWER]
    if clash := next((part.name for part in parts if part.name in taken), None):
        raise UsageError(f"no part can be called {clash!r} beside --ask: that name is taken")
    prompt.check_names(part.name for part in parts)
    return parts


def _writer(model: Model, options: Options) -> Writer:
    from edgekv import prompt

    return prompt.chatml(model) if options.chat else prompt.plain(model, special=options.special)


def _refuse_early(model: Model, made: Prompt, options: Options) -> None:
    """Whatever the mask would refuse, before minutes are spent on reading."""
    from edgekv.planner import NUM_SINKS

    if options.masks and not model.capabilities.mask:
        raise MaskUnsupported(f"{model.capabilities.mask.reason}; run without --mask, and without that part")
    can_shift = bool(model.close_gaps(options.kv_type))
    try:
        made.rehearse(options.masks, options.gap, force=options.force, can_shift=can_shift)
    except PinnedTokens as err:
        raise PinnedTokens(
            f"a masked part holds one of the first {NUM_SINKS} tokens, on which most models lean whatever they say: "
            "put more text in front of it (--system TEXT will do, of a few words), or add --force"
        ) from err


def _remark(model: Model, made: Prompt, options: Options) -> None:
    from edgekv import prompt

    length = made.num_tokens + options.max_tokens
    if length > model.n_ctx_train:
        _say(f"note: {length:,} tokens are more than the {model.n_ctx_train:,} this model was trained for")
    if options.ask is not None and not (options.chat or options.special) and prompt.has_chatml(model):
        _say("note: this is a chat model and reads plain text here; --chat makes turns of the parts and the question")


def _say(line: str) -> None:
    talk().print(line, style="dim", markup=False, soft_wrap=True)


class _Run:
    """Read, mask, ask; and what there is to show for it."""

    def __init__(self, session: Session, made: Prompt, options: Options, sampling: Sampling, as_json: bool) -> None:
        self.session, self.made, self.options, self.as_json = session, made, options, as_json
        self.sampling = sampling
        self.receipts: list[Receipt] = []
        self.read_ms = 0.0

    def all(self) -> int:
        self._read()
        self._mask()
        if self.made.question is None:
            self._show_table()
            return 0
        return self._answer()

    def _read(self) -> None:
        from edgekv import prompt

        with progress("reading", total=self.made.num_tokens, unit="tokens") as update:
            self.read_ms = prompt.read(self.session, self.made.parts, update)
        tokens = sum(len(part.tokens) for part in self.made.parts)
        speed = f" ({tokens / self.read_ms * 1e3:,.0f} tokens/s)" if self.read_ms >= 1 else ""
        self._talk(f"read {count(tokens, 'token')} in {self.read_ms / 1e3:.2f} s{speed}")

    def _mask(self) -> None:
        if not self.options.masks:
            return
        o = self.options
        with contextlib.ExitStack() as after:
            if o.then != "none":
                self.session.progress = after.enter_context(progress("reading again", unit="tokens"))
            self.receipts.append(self.session.mask(list(o.masks), gap=o.gap, force=o.force, then=o.then))
        self.session.progress = None
        for receipt in self.receipts:
            self._talk(str(receipt))

    def _talk(self, line: str) -> None:
        if not self.as_json:
            _say(line)

    def _show_table(self) -> None:
        from edgekv.render import session_table

        if self.as_json:
            print_json(self._facts())
        else:
            click.echo(session_table(self.session, console().width))

    def _answer(self) -> int:
        from edgekv import prompt

        assert self.made.question is not None
        reused = self.session.stats.visible
        with progress("reading the question", unit="tokens") as update:
            question_ms = prompt.read(self.session, [self.made.question], update)
        answer = self.session.generate(self.options.max_tokens, sampling=self.sampling, name=prompt.ANSWER)
        interrupted = self._stream(answer)
        timings = prompt.from_question_on(answer.timings, self.made.question, reused, question_ms)
        if self.as_json:
            print_json(self._facts(answer, timings))
        else:
            click.echo()
            self._talk(("interrupted; kept: " if interrupted else "") + str(timings))
        return 130 if interrupted else 0

    def _stream(self, answer: Generation) -> bool:
        """Say the answer as it comes; True when Ctrl-C ended it."""
        try:
            if self.as_json:
                with progress("answering", total=self.options.max_tokens, unit="tokens") as update:
                    for _ in answer:
                        update(len(answer.tokens), self.options.max_tokens)
            else:
                for piece in answer:
                    click.echo(piece, nl=False)
        except KeyboardInterrupt:
            answer.close()
            return True
        return False

    def _facts(self, answer: Generation | None = None, timings: Timings | None = None) -> dict[str, Any]:
        session, model = self.session, self.session.model
        return {
            "schema": "edgekv.run/1",
            "model": {"path": model.path, "fingerprint": model.fingerprint},
            "parts": [_part_facts(session, part.name, part.role) for part in self.made.parts],
            "read_ms": self.read_ms,
            "receipts": [receipt.as_dict() for receipt in self.receipts],
            "question": self.options.ask,
            "answer": answer and answer.text,
            "finish_reason": answer and answer.finish_reason,
            "seed": answer.seed if answer and self.options.temperature else None,
            "timings": timings and {**asdict(timings), "tokens_per_s": timings.tokens_per_s},
            "stats": session.stats,
        }


def _part_facts(session: Session, name: str, role: str) -> dict[str, Any]:
    from edgekv.render import states_of

    span = session.span(name)
    where = {"start": span.start, "stop": span.stop, "tokens": len(span), "states": states_of(session, span)}
    return {"name": name, "role": role, **where}
