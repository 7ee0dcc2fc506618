"""What a mask is worth on real models and real texts: the claims of the README, one test each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgekv import Model, Session, Settings, numerics

pytestmark = pytest.mark.real

TEXTS = sorted((Path(__file__).parents[1] / "data" / "texts").glob("*.txt"))
BEFORE, MASKED, AFTER, COMPARED = 500, 600, 16, 64  # of the README's table
FEW, SOME = 120, 150  # what the other tests put before the span, and into it
SETTINGS = Settings(n_ctx=1536)
TABLE = Settings(n_ctx=3072)
Capture = pytest.CaptureFixture[str]
Tokens = npt.NDArray[np.int32]
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
    def of(cls, model: Model, path: Path, after: int = AFTER, before: int = FEW, masked: int = SOME) -> Cut:
        tokens = model.tokenize(path.read_text("utf-8"))
        tokens = tokens if model.bos is None else np.concatenate([np.asarray([model.bos], np.int32), tokens])
        ends = np.cumsum([before, masked, after, COMPARED])
        assert len(tokens) >= ends[-1]
        return cls(*np.split(tokens[: ends[-1]], ends[:-1]))


def restart(model: Model, cut: Cut) -> npt.NDArray[np.float32]:
    with Session(model, settings=SETTINGS) as session:
        session.append(cut.before)
        session.append(cut.after)
        return session.logits_over(cut.compared)


# -- how far from a restart, by what stands behind the span -----------------------------------------------------------

ARMS = {
    "not masked": lambda _: None,
    "gap kept": lambda s: s.mask("span", gap="keep"),
    "none": lambda s: s.mask("span"),
    "auto": lambda s: s.mask("span", then="auto"),
    "recompute": lambda s: s.mask("span", then="recompute"),
}


@dataclass
class Measured:
    """Mean KL from a restart, and tokens read by the edit, of every arm; the floor is the restart read otherwise."""

    kl: dict[str, float]
    read: dict[str, int]


def rows_of_text(model: Model, path: Path, lengths: Sequence[int]) -> dict[int, Measured]:
    """One text: 500 tokens, 600 to be masked, then ``lengths`` behind them; each arm is a fork."""
    longest = Cut.of(model, path, max(lengths), BEFORE, MASKED)
    tokens = np.concatenate([longest.after, longest.compared])
    found, done = {}, 0
    with (
        Session(model, settings=TABLE) as masked,
        Session(model, settings=TABLE) as fresh,
        Session(model, settings=replace(TABLE, n_batch=ODD)) as odd,
    ):
        for session in (masked, fresh, odd):
            session.append(longest.before, name="before")
        masked.append(longest.masked, name="span")
        unread = masked.fork()
        for length in lengths:
            compared = tokens[length : length + COMPARED]
            for session in (masked, fresh, odd):
                session.append(tokens[done:length])
            done = length
            reference = fresh.logits_over(compared)
            found[length] = arms_of(masked, unread, tokens[:length], compared, reference)
            found[length].kl["noise floor"] = mean_kl(reference, odd.logits_over(compared))
        unread.close()
    return found


def arms_of(
    masked: Session, unread: Session, after: Tokens, compared: Tokens, reference: npt.NDArray[np.float32]
) -> Measured:
    found = Measured({}, {})
    for name, edit in ARMS.items():
        with masked.fork() as arm:
            receipt = edit(arm)
            found.read[name] = receipt.prefilled if receipt else 0
            found.kl[name] = mean_kl(reference, arm.logits_over(compared))
    with unread.fork() as arm:
        arm.append(after, attend="before")
        assert arm.mask("span").exact
        found.kl["isolated"], found.read["isolated"] = mean_kl(reference, arm.logits_over(compared)), 0
    return found


def mean_kl(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    return float(numerics.kl_divergence(reference, other).mean())


def check_worth(model: Model, texts: Sequence[Path], lengths: Sequence[int], capsys: Capture) -> None:
    rows = [rows_of_text(model, path, lengths) for path in texts]
    names = ["noise floor", *ARMS, "isolated"]
    mean = {k: {n: float(np.mean([row[k].kl[n] for row in rows])) for n in names} for k in lengths}
    with capsys.disabled():
        print(f"\n{model.path.name}: mean KL from a restart over {COMPARED} tokens, n = {len(rows)} texts (least-most)")
        for k, n in product(lengths, names):
            each = [row[k].kl[n] for row in rows]
            read = rows[0][k].read.get(n, 0)
            print(f"  {k:3} behind, {n:11} {mean[k][n]:.4f} ({min(each):.4f}-{max(each):.4f}), {read} read again")
    for k in lengths:
        kl, floor = mean[k], mean[k]["noise floor"]
        assert kl["none"] < 0.2
        assert kl["none"] < kl["gap kept"] * (0.5 if k == 16 else 1.1)
        assert max(kl["recompute"], kl["isolated"]) < 2 * floor < kl["none"]
        assert all(row[k].read["recompute"] == k for row in rows)
        assert all(row[k].read["auto"] == (k if k <= 64 else 0) for row in rows)
        assert kl["auto"] == kl["recompute" if k <= 64 else "none"]


@pytest.mark.slow
def test_closing_the_gap_is_what_matters(model: Model, capsys: Capture) -> None:
    """And reading the few tokens behind it again, or having read them in isolation, is as good as a restart."""
    check_worth(model, TEXTS[1:2], [16], capsys)


@pytest.mark.slow
def test_what_a_mask_is_worth(model: Model, capsys: Capture) -> None:
    """The README's table: five texts, by the number of tokens behind the span."""
    assert len(TEXTS) == 5
    check_worth(model, TEXTS, [16, 64, 256], capsys)


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


@pytest.mark.parametrize("model", ["smollm2_path", pytest.param("gemma_path", marks=pytest.mark.slow)], indirect=True)
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
            assert receipt.moved == FEW
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
        assert (timings.prefilled, timings.reread, timings.masked) == (COMPARED, 0, SOME)
        assert timings.reused == FEW + AFTER + 1
