"""What a mask is worth on real models and real texts: the claims of the README, one test each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgekv import Model, Session, Settings, numerics

pytestmark = pytest.mark.real

TEXTS = sorted((Path(__file__).parents[1] / "data" / "texts").glob("*.txt"))
BEFORE, MASKED, AFTER, COMPARED = 500, 600, 16, 64
SETTINGS = Settings(n_ctx=1536)
ODD = 37  # tokens a batch: boundaries nobody would choose, for the noise floor


@pytest.fixture(scope="module", params=["smollm2_path", "gemma_path"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with Model(request.getfixturevalue(request.param)) as loaded:
        yield loaded


@dataclass(frozen=True)
class Cut:
    """A real text in the pieces of the experiment."""

    before: npt.NDArray[np.int32]
    masked: npt.NDArray[np.int32]
    after: npt.NDArray[np.int32]
    compared: npt.NDArray[np.int32]

    @classmethod
    def of(cls, model: Model, path: Path, after: int = AFTER) -> Cut:
        tokens = model.tokenize(path.read_text("utf-8"))
        tokens = tokens if model.bos is None else np.concatenate([np.asarray([model.bos], np.int32), tokens])
        ends = np.cumsum([BEFORE, MASKED, after, COMPARED])
        assert len(tokens) >= ends[-1]
        return cls(*np.split(tokens[: ends[-1]], ends[:-1]))


def restart(model: Model, cut: Cut, n_batch: int = 512) -> npt.NDArray[np.float32]:
    with Session(model, settings=Settings(n_ctx=1536, n_batch=n_batch)) as session:
        session.append(cut.before)
        session.append(cut.after)
        return session.logits_over(cut.compared)


def masked(model: Model, cut: Cut) -> dict[str, npt.NDArray[np.float32]]:
    """Logits with the span masked, by gap; the kept gap first, as it is undone bit for bit."""
    with Session(model, settings=SETTINGS) as session:
        session.append(cut.before)
        span = session.append(cut.masked)
        session.append(cut.after)
        found = {}
        for gap in ("keep", "close"):
            with session.masked(span, gap=gap):
                found[gap] = session.logits_over(cut.compared)
        assert session.mask(span, then="auto").prefilled == len(cut.after)
        return {**found, "recompute": session.logits_over(cut.compared)}


def test_closing_the_gap_is_what_matters(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    """500 tokens, 600 masked, 16 behind: mean KL from a restart over 64 tokens, on each of five texts."""
    rows = []
    for path in TEXTS:
        cut = Cut.of(model, path)
        reference = restart(model, cut)
        arms = (*masked(model, cut).values(), restart(model, cut, n_batch=ODD))
        rows.append([float(numerics.kl_divergence(reference, arm).mean()) for arm in arms])
    kept, closed, again, noise = np.mean(rows, axis=0)
    with capsys.disabled():
        print(
            f"\n{model.path.name}, n = 5: gap kept {kept:.3f}, closed {closed:.3f}, read again {again:.4f}, "
            f"noise floor {noise:.4f}"
        )
        print(
            "\n".join(
                f"  {p.stem}: {r[0]:.3f} {r[1]:.3f} {r[2]:.4f} {r[3]:.4f}" for p, r in zip(TEXTS, rows, strict=True)
            )
        )
    assert len(rows) == 5
    assert closed < 0.2
    assert closed < kept / 2
    assert noise < closed
    assert again < 2 * noise


def test_unmask_is_bit_exact(model: Model) -> None:
    """mask(gap="keep"), look, unmask: every bit of the next token's logits is back, and of the tokens after it."""
    cut = Cut.of(model, TEXTS[0])
    with Session(model, settings=SETTINGS) as session, Session(model, settings=SETTINGS) as untouched:
        for s in (session, untouched):
            s.append(cut.before)
            s.append(cut.masked, name="span")
            s.append(cut.after)
        before = session.logits()
        session.mask("span", gap="keep")
        hidden = session.logits()
        assert not np.array_equal(before, hidden)
        session.unmask("span")
        assert np.array_equal(session.logits(), before)
        assert np.array_equal(session.logits_over(cut.compared), untouched.logits_over(cut.compared))
        session.audit()


def test_the_first_token_after_a_mask_obeys_it(model: Model) -> None:
    """Nothing is appended: the stale logits of the last decode must not be sampled from."""
    cut = Cut.of(model, TEXTS[1])
    with Session(model, settings=SETTINGS) as session, Session(model, settings=SETTINGS) as fresh:
        session.append(np.concatenate([cut.before, cut.masked[:64]]))
        secret = session.append(" The password is: swordfish swordfish swordfish swordfish swordfish.", name="secret")
        session.append(" Once more, the password is: swordfish", name="asked")
        stale = session.logits()
        session.mask([secret, "asked"])
        fresh.append(np.concatenate([cut.before, cut.masked[:64]]))
        now, wanted = session.logits(), fresh.logits()
        assert session.generate(1).tokens == [] or session.generate(1).finish()
        kl = numerics.kl_divergence(wanted[None], np.stack([now])).item()
        assert kl < 0.05 < numerics.kl_divergence(wanted[None], stale[None]).item()


def test_masking_the_tail_equals_a_restart(model: Model) -> None:
    """KL 0: the same cells, the same positions, and the same reading afterwards."""
    cut = Cut.of(model, TEXTS[2])
    with Session(model, settings=SETTINGS) as session:
        session.append(cut.before)
        span = session.append(cut.masked)
        receipt = session.mask(span)
        assert receipt.gap == "tail"
        assert receipt.exact
        session.append(cut.after)
        logits = session.logits_over(cut.compared)
    assert numerics.kl_divergence(restart(model, cut), logits).max() == 0.0


def test_mask_hides_and_unmask_brings_back(model: Model) -> None:
    """Shifted there and back, the distributions are those from before, up to the noise floor."""
    cut = Cut.of(model, TEXTS[3])
    with Session(model, settings=SETTINGS) as session:
        session.append(cut.before)
        session.append(cut.masked, name="span")
        session.append(cut.after)
        before = session.logits_over(cut.compared)
        with session.masked("span") as receipt:
            assert receipt.moved == BEFORE
            during = session.logits_over(cut.compared)
        again = session.logits_over(cut.compared)
        session.audit()
    assert numerics.kl_divergence(before, again).mean() < 0.02 < numerics.kl_divergence(before, during).mean()


def test_nothing_is_read_again(model: Model) -> None:
    """Tokens prefilled after a mask are the new ones only; one is read again where nothing new is."""
    cut = Cut.of(model, TEXTS[4])
    with Session(model, settings=SETTINGS) as session:
        session.append(cut.before)
        span = session.append(cut.masked)
        session.append(cut.after)
        session.generate(1).finish()
        session.mask(span)
        session.append(cut.compared)
        timings = session.generate(2).timings
        assert (timings.prefilled, timings.reread, timings.masked) == (COMPARED, 0, MASKED)
        assert timings.reused == BEFORE + AFTER + 1
