"""What a user can reach that would end in llama.cpp's abort: grammars, samplers, use after close, edits."""

from __future__ import annotations

import math
import warnings
from functools import partial

from killers import killer, refused

from edgekv import Engine, Model, Sampling, Session, Settings
from edgekv.batch import Chunk
from edgekv.columns import CellRun
from edgekv.errors import BadState, ClosedError, ContextFull, GrammarError, GrammarStuck, UsageError
from edgekv.sampling import Sampler
from edgekv.steps import Move, Own, Shift
from helpers import TEXT, open_tiny, some_tokens

NOTHING = some_tokens(0)


def generate(s: Session, n: int = 3, **sampling: object) -> str:
    return s.generate(n, sampling=Sampling(**sampling)).text  # type: ignore[arg-type]


# ---- sampling -------------------------------------------------------------------------------------------------------


@killer()
def grammars_llama_cpp_cannot_read(s: Session) -> None:
    before = len(s.tokens)
    for gbnf in (
        "root ::= (",
        'a ::= "x"',
        "root ::= foo",
        'root ::= root "x" | "y"',
        'root ::= "a"{1000000000}',
        'root ::= "a"{99999999999999999999999}',
        'root ::= "\0"',
        "nonsense",
        'root ::= "\\x',
    ):
        with refused(GrammarError):
            generate(s, grammar=gbnf)
    assert len(s.tokens) == before


@killer()
def grammars_that_overflow_the_stack(s: Session) -> None:
    chain = "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(100_000)), 'r100000 ::= "a"'])
    groups = f'root ::= {"(" * 100_000}"a"{")" * 100_000}'
    hidden = f'root ::= ")" [)] {"(" * 100_000}"a"{")" * 100_000}'
    for gbnf in (chain, groups, hidden):
        with refused(GrammarError, "survives"):
            generate(s, grammar=gbnf)
    assert generate(s, grammar=f'root ::= {"(" * 400}"a"{")" * 400} "((("') == "a(("


@killer()
def schemas_that_are_none(s: Session) -> None:
    loop: dict[str, object] = {"type": "array"}
    loop["items"] = loop
    deep: dict[str, object] = {"type": "string"}
    for _ in range(900):
        deep = {"type": "array", "items": deep}
    for schema in ("{", '{"type": "nope"}', {"$ref": "https://example.invalid/x"}, deep):
        with refused(GrammarError):
            generate(s, json_schema=schema)


@killer()
def a_grammar_that_rejects_everything(s: Session) -> None:
    ban_a = {token: -math.inf for token in range(s.model.n_vocab) if b"a" in s.model.piece(token)}
    for temperature in (0.0, 1.0):
        generation = s.generate(5, sampling=Sampling(temperature, grammar='root ::= "b" "a"', logit_bias=ban_a))
        with refused(GrammarStuck):
            generation.finish()
        assert generation.text == "b"
        assert s.text(generation.span) == "b"
    with refused(GrammarStuck):
        generate(s, grammar="root ::= <[99999]>")  # a token by its number, beyond the vocabulary


@killer()
def every_token_banned(s: Session) -> None:
    ban = dict.fromkeys(range(s.model.n_vocab), -math.inf)
    for temperature in (0.0, 1.0):
        with refused(UsageError, "bans every token"):
            s.generate(3, sampling=Sampling(temperature, logit_bias=ban))


@killer()
def extreme_sampling(s: Session) -> None:
    """Every chain ends in a sampler that chooses, whatever the numbers."""
    for extra in (
        {"temperature": 1e-44},
        {"temperature": 1e6},
        {"temperature": 1.0, "top_k": 2**31 - 1},
        {"temperature": 1.0, "top_p": 1e-300, "min_p": 1.0, "typical": 1e-300},
        {"temperature": 1.0, "repeat_penalty": 1e6, "presence_penalty": 1e6, "frequency_penalty": -1e6},
        {"repeat_penalty": 1e-6, "penalty_last_n": 1 << 20},
        {"temperature": 1e-6, "logit_bias": {5: 1e6, 6: -1e6, 7: -math.inf}},
        {"temperature": 1.0, "seed": 2**32 - 2},
    ):
        generation = s.generate(2, sampling=Sampling(**extra))  # type: ignore[arg-type]
        assert len(generation.finish().tokens) == 2 or generation.finish_reason == "end"


@killer()
def sampling_values_out_of_range(_s: Session) -> None:
    for wrong in (
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_k": 2**31},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"typical": 0.0},
        {"repeat_penalty": 0.0},
        {"presence_penalty": math.nan},
        {"penalty_last_n": 2**31 - 1},
        {"seed": 2**32 - 1},
        {"grammar": "root ::= [a]", "json_schema": "{}"},
    ):
        with refused(UsageError):
            Sampling(**wrong)  # type: ignore[arg-type]


# ---- after close ----------------------------------------------------------------------------------------------------


@killer()
def use_after_the_session_was_closed(s: Session) -> None:
    span, open_generation, started = s.spans[0], s.generate(3), s.generate(3)
    next(started)
    s.close()
    s.close()
    for verb in (
        partial(s.append, "a"),
        partial(s.generate, 1),
        partial(s.mask, span),
        partial(s.unmask, span),
        partial(s.evict, span),
        partial(s.rewind, 0),
        partial(s.score, "a"),
        partial(s.logits_over, "a"),
        partial(s.influenced_by, span),
        partial(s.text, span),
        s.logits,
        s.audit,
    ):
        with refused(ClosedError):
            verb()
    with refused(ClosedError):  # it never began
        assert open_generation.text
    assert started.text
    assert started.finish_reason == "closed"
    assert "closed" in f"{s!r} {s}"


@killer()
def use_after_the_engine_was_closed(s: Session) -> None:
    engine = Engine(s.model, Settings(n_ctx=256))
    session = Session(engine)
    session.append("abc")
    engine.close()
    engine.close()
    for call in (
        partial(engine.decode, [Chunk(3, 4, some_tokens(1))]),
        partial(engine.drop, 3, 0, 1),
        partial(engine.apply, [Shift(3, 0, 1, 1)]),
        partial(engine.apply, [Move(3, 4, 0, 1)]),
        partial(engine.apply, [Own(3, 0, 1)]),
        partial(engine.share, [CellRun(3, 0, 1)], 4),
        partial(engine.replace, 3, 4),
        partial(engine.clear, 3, 0),
        engine.compact,
        partial(engine.positions, 3),
        partial(engine.last_position, 3),
        partial(engine.logits, 0),
        partial(Session, engine),
        partial(session.append, "a"),
        partial(session.mask, (0, 1)),
        engine.settle,
        engine.take_sequences,
        session.logits,
        lambda: engine.ctx,
    ):
        with refused(ClosedError):
            call()
    session.close()


@killer()
def use_after_the_model_was_closed(s: Session) -> None:
    model = Model(s.model.path)
    model.close()
    model.close()
    for call in (
        partial(model.tokenize, "a"),
        partial(model.piece, 5),
        partial(model.is_end, 5),
        partial(Engine, model),
        partial(Session, model),
        lambda: model.ptr,
        lambda: model.vocab,
        lambda: model.bos,
        lambda: model.description,
    ):
        with refused(ClosedError):
            call()


@killer()
def use_after_the_sampler_was_closed(s: Session) -> None:
    sampler = Sampler(s.model, Sampling(), NOTHING)
    sampler.close()
    sampler.close()
    with refused(ClosedError):
        sampler.sample_array(s.logits())


@killer()
def everything_collected_while_a_generation_is_open(s: Session) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = open_tiny(s.model.path)
        other.append("abc")
        generation = other.generate(4)
        next(generation)
        del other
        assert len(generation.finish().tokens) == 4
        del generation


# ---- verbs inside verbs, edits --------------------------------------------------------------------------------------


@killer()
def verbs_from_a_progress_callback(s: Session) -> None:
    tried: list[object] = []

    def meddle(_done: int, _total: int) -> None:
        for verb in (partial(s.append, "b"), partial(s.mask, (6, 9)), partial(s.rewind, 8), s.logits, s.audit):
            with refused(BadState, "still reading"):
                verb()
            tried.append(verb)

    s.progress = meddle
    s.append(some_tokens(100))
    s.progress = None
    assert len(tried) == 10
    assert len(s.tokens) == 130


@killer()
def closed_from_a_progress_callback(s: Session) -> None:
    for when in (64, 100):
        with open_tiny(s.model.path, n_batch=64) as other:
            other.append("abc")
            other.progress = lambda done, _total, other=other, when=when: other.close() if done == when else None
            with refused(BadState, "still reading"):
                other.append(some_tokens(100))
            other.progress = None
            other.append(some_tokens(100))


@killer("gemma3")
def the_last_cell_of_a_window(s: Session) -> None:
    """Hidden and shifted cells must not be recycled for new tokens, and none must be read beyond the cache."""
    s.mask((8, 20))
    with refused(ContextFull):
        s.append(some_tokens(512))
    s.append(some_tokens(s.engine.cells_free))
    with refused(ContextFull):
        s.append("a")
    s.unmask((8, 20))
    s.evict((40, 80))


@killer()
def no_partial_copy_across_streams(s: Session) -> None:
    """Several streams would make a partial copy abort; audit() refuses any number of them but one."""
    with open_tiny(s.model.path, n_sessions=2, n_archives=2) as first:
        second = Session(first.engine)
        for session in (first, second):
            session.append(TEXT)
            session.mask((8, 20))
            session.audit()
