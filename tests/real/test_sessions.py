"""Parked spans, saved sessions and attached modules on real models: what the README says of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import bench_files as bench
import numpy as np
import pytest

from edgekv import Model, Session, Settings, prefill
from helpers import look, python

pytestmark = pytest.mark.real

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", params=["smollm2_path", "gemma_path"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with Model(request.getfixturevalue(request.param)) as loaded:
        yield loaded


def edited(model: Model, kv_type: str = "f16") -> Session:
    """420 tokens: one span masked, one masked with its gap kept, one parked, one read in isolation."""
    session = Session(model, settings=Settings(n_ctx=1536, kv_type=kv_type))
    parts = iter(np.split(bench.text_of(model, 420), 7))
    for name in ("system", "a", "b", "c", "d"):
        session.append(next(parts), name=name)
    session.mask("a")
    session.mask("b", gap="keep")
    session.append(next(parts), name="e")
    session.park("c")
    session.append(next(parts), name="alone", attend="system")
    session.generate(8).finish()
    return session


@pytest.mark.parametrize("model", ["smollm2_path", pytest.param("gemma_path", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("kv_type", ["f16", pytest.param("q8_0", marks=pytest.mark.slow)])
def test_a_load_in_another_process_says_the_same(model: Model, tmp_path: Path, kv_type: str) -> None:
    with edited(model, kv_type) as session:
        session.save(tmp_path / "chat.kvs")
        done = python(_GO_ON, tmp_path / "chat.kvs", timeout=1800)
        session.unmask("c")
        assert json.loads(done.stdout or "null") == session.generate(24).tokens, done.stderr


_GO_ON = """
import sys
from edgekv import Session
with Session.load(sys.argv[1]) as session:
    session.audit()
    session.unmask("c")
    print(session.generate(24).tokens)
"""


def test_parked_and_back_is_bit_for_bit(model: Model, tmp_path: Path) -> None:
    with edited(model) as session:
        logits, before = session.logits(), look(session)
        for to in ("ram", tmp_path):
            session.park("d", to, gap="keep")
            session.audit()
            session.unmask("d")
            assert look(session) == before
            assert np.array_equal(session.logits(), logits)


def test_a_loaded_session_evaluates_nothing_again(smollm2_path: Path, tmp_path: Path) -> None:
    """And its file is the cells, the logits, 64 KB and 64 bytes a token at most."""
    path = tmp_path / "chat.kvs"
    with Model(smollm2_path) as model:
        with Session(model, settings=Settings(n_ctx=1024)) as session:
            session.append(bench.text_of(model, 1000))
            logits, size = session.logits(), session.save(path)
        assert size <= 1000 * model.kv_bytes_per_token() + 4 * model.n_vocab + (64 << 10) + 64 * 1000
        with Session.load(path, model) as session:
            assert np.array_equal(session.logits(), logits)
            timings = session.generate(1).finish().timings
    assert (timings.prefilled, timings.reread, timings.reused) == (0, 0, 1000)


@pytest.mark.slow
def test_an_attached_text_is_as_good_as_one_that_was_read(model: Model, tmp_path: Path, capsys: Capture) -> None:
    content = bench.TEXTS[0].read_text("utf-8")[:1600]
    prefill(content, tmp_path / "text.kv", model, attend=bench.SYSTEM)
    own = bench.answers(model, [bench.SYSTEM], content, tmp_path / "text.kv")
    chat = bench.answers(model, [bench.SYSTEM, bench.CHAT], content, tmp_path / "text.kv")
    with capsys.disabled():
        for place, told in (("own place", own), ("behind a chat", chat)):
            figures = ", ".join(f"{name} {value:.4f}" for name, value in told.items())
            print(f"\n  {model.path.name}, {place}: {figures}", end="")
        print()
    for told in (own, chat):
        assert told["without_kl"] > 10 * told["attached_kl"]
    assert own["attached_kl"] < 3 * own["floor_kl"] + 0.005
