"""The engine's verbs with arguments that llama.cpp does not survive."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from killers import killer, refused

from edgekv import Engine, Model, Sampling, Session, Settings
from edgekv.batch import Batch, Chunk
from edgekv.columns import CellRun
from edgekv.errors import BadState, MaskUnsupported, NoLogits, UsageError
from edgekv.sampling import Sampler
from edgekv.steps import Move, Own, Shift
from helpers import open_tiny, some_tokens


def one(seq: int, pos: int, token: int = 7) -> list[Chunk]:
    return [Chunk(seq, pos, np.asarray([token], np.int32))]


# ---- sequences and positions ----------------------------------------------------------------------------------------


@killer()
def sequences_out_of_range(s: Session) -> None:
    e = s.engine
    for seq in (-1, -(2**31), e.settings.n_sequences(), 255, 256, 2**31):
        for call in (
            partial(e.drop, seq, 0, 1),
            partial(e.apply, [Shift(seq, 0, 1, 1)]),
            partial(e.apply, [Move(seq, 3, 0, 1)]),
            partial(e.apply, [Move(3, seq, 0, 1)]),
            partial(e.apply, [Own(seq, 0, 1)]),
            partial(e.share, [CellRun(seq, 0, 1)], 4),
            partial(e.share, [CellRun(3, 0, 1)], seq),
            partial(e.replace, seq, 4),
            partial(e.replace, 3, seq),
            partial(e.clear, seq, 0),
            partial(e.positions, seq),
            partial(e.last_position, seq),
            partial(e.decode, one(seq, 0)),
        ):
            with refused(UsageError):
                call()


@killer()
def more_than_256_sequences(s: Session) -> None:
    with refused(UsageError, "256"):
        Engine(s.model, Settings(n_sessions=51, n_archives=4))
    with Session(s.model, settings=Settings(n_ctx=256, n_sessions=1, n_archives=252)) as most:
        most.append(some_tokens(20))
        most.mask((6, 9))
        assert most.audit().sequences == 253


@killer()
def position_gaps(s: Session) -> None:
    end = s.stats.cursor
    for pos in (end + 1, end - 1, end + 100, 2**31 - 1, 2**31, -1):
        with refused(UsageError, "continues at"):
            s.engine.decode(one(3, pos))


@killer()
def negative_positions(s: Session) -> None:
    for pos in (-1, -7, -(2**31), 2**31 - 1, 2**32):
        with refused(UsageError):
            s.engine.decode(one(0, pos))
    for p0, p1 in ((-1, 3), (3, 3), (3, 2), (0, 2**31)):
        with refused(UsageError):
            s.engine.drop(3, p0, p1)


@killer()
def shifts_below_zero_and_beyond_the_last_position(s: Session) -> None:
    for delta in (-6, 2**31 - 6, -(2**31)):
        with refused(UsageError, "out of the range"):
            s.engine.apply([Shift(3, 5, 8, delta)])


@killer("mrope")
def shift_on_mrope(s: Session) -> None:
    for delta in (0, 1):
        with refused(MaskUnsupported, "M-RoPE"):
            s.engine.apply([Shift(3, 5, 8, delta)])
    with refused(MaskUnsupported, "M-RoPE"):
        s.engine.apply([Move(3, 4, 5, 8, 1)])
    assert s.mask((5, 8)).gap == "keep"


@killer("yarn")
def shift_on_yarn(s: Session) -> None:
    with refused(MaskUnsupported, "YaRN"):
        s.engine.apply([Shift(3, 5, 8, 1)])


@killer("mamba")
def partial_copy_on_recurrent(s: Session) -> None:
    for edit in (lambda: s.mask((5, 8)), lambda: s.rewind(5), lambda: s.engine.apply([Move(3, 4, 5, 8)])):
        with refused(MaskUnsupported, "recurrent"):
            edit()


@killer("lfm2")
def partial_copy_on_hybrid(s: Session) -> None:
    for edit in (lambda: s.mask((5, 8)), lambda: s.rewind(5), lambda: s.engine.apply([Move(3, 4, 5, 8)])):
        with refused(MaskUnsupported, "hybrid"):
            edit()


# ---- batches --------------------------------------------------------------------------------------------------------


@killer()
def batch_beyond_n_batch(s: Session) -> None:
    e = s.engine
    with refused(UsageError, "more than one batch"):
        e.decode([Chunk(3, s.stats.cursor, some_tokens(e.n_batch + 1))])
    half = some_tokens(e.n_batch // 2 + 1)
    with refused(UsageError, "more than one batch"):
        e.decode([Chunk(3, s.stats.cursor, half), Chunk(4, 0, half)])


@killer()
def empty_batch(s: Session) -> None:
    for chunks in ([], [Chunk(3, s.stats.cursor, some_tokens(0))], [*one(4, 0), Chunk(5, 0, some_tokens(0))]):
        with refused(UsageError, "nothing to decode"):
            s.engine.decode(chunks)


@killer()
def two_chunks_for_one_sequence(s: Session) -> None:
    with refused(UsageError, "one chunk a sequence"):
        s.engine.decode([*one(3, s.stats.cursor), *one(3, s.stats.cursor + 1)])


@killer()
def more_rows_of_logits_than_there_is_room_for(s: Session) -> None:
    with open_tiny(s.model.path, n_batch=4, n_archives=1) as small:
        small.engine.decode([Chunk(3, 0, some_tokens(4), "all")])
        assert small.engine.logit_rows(range(4)).shape == (4, s.model.n_vocab)
        assert small.engine.max_outputs >= 4


@killer()
def every_token_has_one_sequence(_s: Session) -> None:
    """n_seq_id 0 is a segmentation fault; no verb can ask for it."""
    batch = Batch(8)
    batch.fill([Chunk(4, 5, some_tokens(4)), Chunk(3, 0, some_tokens(4))])
    assert [batch.native.n_seq_id[i] for i in range(8)] == [1] * 8
    assert [batch.native.seq_id[i][0] for i in range(8)] == [4] * 4 + [3] * 4


@killer()
def batches_smaller_than_the_number_of_sequences(s: Session) -> None:
    """llama.cpp wants room for a row of logits a sequence, and aborts at the first decode without."""
    for n_batch in (1, 2, 5):
        with open_tiny(s.model.path, n_batch=n_batch) as small:
            small.append(some_tokens(20))
            assert len(small.generate(3).finish().tokens) == 3
            small.audit()


@killer()
def sizes_llama_cpp_refuses(s: Session) -> None:
    wrong: list[dict[str, Any]] = [
        {"n_batch": 0},
        {"n_batch": -1},
        {"n_ctx": 0},
        {"n_ctx": 2**32 + 256},
        {"n_sessions": 0},
        {"n_archives": 0},
        {"n_threads": 0},
        {"n_threads": 100_000},
        {"kv_type": "q8_0", "flash_attention": False},
        {"kv_type": "q4_0", "flash_attention": False},
        {"kv_type": "iq4_nl"},
    ]
    for settings in wrong:
        with refused(UsageError):
            Engine(s.model, Settings(**settings))


# ---- tokens ---------------------------------------------------------------------------------------------------------


@killer()
def tokens_outside_the_vocabulary(s: Session) -> None:
    m, end = s.model, s.stats.cursor
    for token in (-1, m.n_vocab, 2**31 - 1, -(2**31)):
        for call in (
            partial(m.piece, token),
            partial(m.detokenize, [5, token]),
            partial(m.is_end, token),
            partial(m.text_stream().feed, token),
            partial(s.append, [5, token]),
            partial(s.score, [5, token]),
            partial(s.engine.decode, one(3, end, token)),
        ):
            with refused(UsageError, "outside the vocabulary"):
                call()
        with refused(UsageError, "outside the vocabulary"):
            s.generate(1, sampling=Sampling(logit_bias={token: 1.0})).finish()


@killer()
def things_that_are_no_tokens(s: Session) -> None:
    wrong: list[Any] = [b"bytes", [1.5], [2**70], ["a"], np.zeros((2, 2), np.int32)]
    for tokens in wrong:
        with refused(UsageError):
            s.append(tokens)


# ---- logits ---------------------------------------------------------------------------------------------------------


@killer("mrope")  # the one kind without BOS, so an empty session stays empty
def sampling_with_no_logits(s: Session) -> None:
    s.rewind(0)
    for call in (s.logits, lambda: s.generate(1).text, lambda: s.score("a")):
        with refused(NoLogits):
            call()
    with Engine(s.model, Settings(n_ctx=256)) as fresh:
        for row in (0, -1, 5, 2**31):
            with refused(NoLogits):
                fresh.logits(row)
            with refused(NoLogits):
                Sampler(s.model, Sampling(), some_tokens(0)).sample(fresh, row)


@killer()
def logits_of_a_row_that_kept_none(s: Session) -> None:
    sampler = Sampler(s.model, Sampling(), some_tokens(0))
    s.engine.decode([Chunk(6, 0, some_tokens(4))])
    for row in (0, 2, 4, -1):
        with refused(NoLogits):
            s.engine.logits(row)
        with refused(NoLogits):
            sampler.sample(s.engine, row)
    assert 0 <= sampler.sample(s.engine, 3) < s.model.n_vocab
    s.engine.decode([Chunk(6, 4, some_tokens(4), "none")])
    with refused(NoLogits):
        s.engine.logits(3)
    s.engine.drop(6, 0, 8)


@killer()
def models_cannot_be_closed_under_an_engine(s: Session) -> None:
    with refused(BadState, "still use"):
        s.model.close()
    model = Model(s.model.path)
    engine = Engine(model, Settings(n_ctx=256))
    with refused(BadState, "still use"):
        model.close()
    engine.close()
    model.close()
