"""Forks, replaced text and far positions on real models: the other claims of the README."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgekv import Engine, Model, Session, Settings, numerics
from edgekv.batch import Chunk
from edgekv.layout import REBASE_AT

pytestmark = pytest.mark.real

TEXTS = sorted((Path(__file__).parents[1] / "data" / "texts").glob("*.txt"))
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", params=["smollm2_path", "gemma_path"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with Model(request.getfixturevalue(request.param)) as loaded:
        yield loaded


def tokens_of(model: Model, number: int, count: int) -> npt.NDArray[np.int32]:
    tokens = model.tokenize(TEXTS[number].read_text("utf-8"))
    return (tokens if model.bos is None else np.concatenate([np.asarray([model.bos], np.int32), tokens]))[:count]


def mean_kl(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    return float(numerics.kl_divergence(one, other).mean())


def test_a_fork_says_what_its_origin_says(model: Model) -> None:
    with Session(model, settings=Settings(n_ctx=1024)) as session:
        session.append(tokens_of(model, 1, 200))
        with session.fork() as fork:
            assert fork.generate(24).text == session.generate(24).text
            assert np.array_equal(fork.logits(), session.logits())


@pytest.mark.slow
def test_a_replaced_text_read_again_equals_a_restart(model: Model) -> None:
    tokens, summary = tokens_of(model, 2, 350), tokens_of(model, 3, 60)
    before, old, after, compared = np.split(tokens, [100, 250, 286])
    with (
        Session(model, settings=Settings(n_ctx=1024)) as session,
        Session(model, settings=Settings(n_ctx=1024)) as fresh,
    ):
        for part, name in ((before, "before"), (old, "old"), (after, "after")):
            session.append(part, name=name)
        untouched = session.logits_over(compared)
        receipt = session.replace("old", summary)
        assert (receipt.prefilled, receipt.influenced, receipt.unaware) == (60, 36, 36)
        replaced = session.logits_over(compared)
        session.audit()
        for part in (before, summary, after):
            fresh.append(part)
        reference = fresh.logits_over(compared)
        with session.fork() as fork:
            assert fork.recompute().prefilled == 36
            exact = mean_kl(reference, fork.logits_over(compared))
        session.undo()
        back = mean_kl(untouched, session.logits_over(compared))
        session.audit()
    assert exact < 0.02
    assert back < 0.02
    assert mean_kl(reference, replaced) > exact


@pytest.mark.slow
def test_positions_far_beyond_training_change_nothing(model: Model, capsys: Capture) -> None:
    """The same tokens at later and later positions, against position 0, as far as positions are let grow.

    RoPE looks at differences of positions only, so n_ctx_train bounds those, not the positions; what limits these is
    the float32 angle. Far beyond, the divergence is seen to rise.
    """
    trained = int(model.header[f"{model.header['general.architecture']}.context_length"])
    tokens = tokens_of(model, 1, 160)
    reference = logits_at(model, tokens, 0, n_batch=512)
    floor = mean_kl(reference, logits_at(model, tokens, 0, n_batch=37))
    offsets = [trained, 4 * trained, REBASE_AT, 1 << 24]
    curve = {at: mean_kl(reference, logits_at(model, tokens, at, n_batch=512)) for at in sorted(offsets)}
    with capsys.disabled():
        print(f"\n{model.path.name}: trained on {trained:,}; mean KL from position 0, 32 tokens; floor {floor:.4f}")
        print("  " + ", ".join(f"{at:,}: {kl:.4f}" for at, kl in curve.items()))
    assert all(kl < 3 * max(floor, 0.004) for at, kl in curve.items() if at <= max(REBASE_AT, 4 * trained))
    assert curve[1 << 24] > 0.1


def logits_at(model: Model, tokens: npt.NDArray[np.int32], start: int, n_batch: int) -> npt.NDArray[np.float32]:
    """float32 (32, n_vocab): what predicts the last 32 tokens when the first stands at position ``start``."""
    with Engine(model, Settings(n_ctx=512, n_batch=n_batch)) as engine:
        seq = engine.take_sequences()[0]
        for at in range(0, len(tokens) - 32, n_batch):
            part = tokens[at : min(at + n_batch, len(tokens) - 32)]
            engine.decode([Chunk(seq, start + at, part)])
        engine.decode([Chunk(seq, start + len(tokens) - 32, tokens[-32:], "all")])
        return engine.logit_rows(range(32))


@pytest.mark.slow
def test_a_chat_four_times_as_long_as_training(smollm2_path: Path, capsys: Capture) -> None:
    """A window of 64 + 448 tokens over a text of 4 x n_ctx_train: the oldest 64 go whenever 64 have come.

    How far the session is from a restart of what it shows must not grow with the cursor.
    """
    with Model(smollm2_path) as model, Session(model, settings=Settings(n_ctx=1024)) as session:
        trained = int(model.header["llama.context_length"])
        text = np.concatenate([tokens_of(model, n, 1400) for n in range(5)])
        text = np.tile(text, -(-5 * trained // len(text)))
        session.append(text[:64], name="system")
        curve: dict[int, float] = {}
        for at in range(64, 4 * trained + 64, 64):
            session.append(text[at : at + 64])
            if len(session.visible_tokens) > 512:
                session.evict((at - 448, at - 384))
            if session.stats.cursor % (trained // 2) < 64 and at > 512:
                curve[session.stats.cursor] = from_restart(session, text[at + 64 : at + 128])
        session.audit()
        assert session.stats.cursor >= 4 * trained
    with capsys.disabled():
        print("\ncursor: mean KL from a restart, 64 tokens")
        print("  " + ", ".join(f"{cursor:,}: {kl:.3f}" for cursor, kl in curve.items()))
    early, late = list(curve.values())[:3], list(curve.values())[-3:]
    assert statistics.mean(late) < 2 * statistics.mean(early)


def from_restart(session: Session, following: npt.NDArray[np.int32]) -> float:
    with Session(session.model, settings=session.engine.settings) as fresh:
        fresh.append(session.visible_tokens)
        return mean_kl(fresh.logits_over(following), session.logits_over(following))
