"""Fixtures for every test: tiny models written once a run, real ones where they are on disk, hypothesis profiles.

Every run gives the same result: hypothesis draws the same examples, and a test process keeps to one core, so that
llama.cpp uses one thread in it and in the processes that it starts.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from hypothesis import Phase
from hypothesis.internal.conjecture import providers

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")

#: The same examples in every run. A failure is not shrunk, which can take minutes: run its test with
#: HYPOTHESIS_PROFILE=shrink, and pin what comes out with @example.
FIXED = hypothesis.settings(
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    max_examples=50,
    phases=[Phase.explicit, Phase.generate],
)
hypothesis.settings.register_profile("default", FIXED)
hypothesis.settings.register_profile("shrink", FIXED, phases=[*FIXED.phases, Phase.shrink])
hypothesis.settings.register_profile("nightly", deadline=None, print_blob=True, max_examples=1000)
hypothesis.settings.load_profile(PROFILE)
if PROFILE != "nightly":
    # hypothesis also draws constants from the source of the modules imported so far, which depends on the tests before.
    providers.HypothesisProvider._local_constants = providers._local_constants

TinyPath = Callable[..., Path]

ROOT = Path(__file__).resolve().parents[1]

#: What a user's shell may have set, and no test may depend on.
USERS_OWN = ("EDGEKV_DEBUG", "EDGEKV_MANIFEST", "FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES")


def pytest_configure(config: pytest.Config) -> None:
    for name in USERS_OWN:
        os.environ.pop(name, None)
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # for the processes that tests start anywhere
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    starts_workers = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not starts_workers and hasattr(os, "sched_setaffinity"):
        keep_to_one_core(os.environ.get("PYTEST_XDIST_WORKER"))


def keep_to_one_core(worker: str | None) -> None:
    """A worker of pytest-xdist takes the core of its number.

    Two workers with two threads each would be several times slower on two cores than with one each, and sums of floats
    could depend on how they are split.
    """
    cores = sorted(os.sched_getaffinity(0))
    number = int(re.sub(r"\D", "", worker)) if worker else os.getpid()
    os.sched_setaffinity(0, {cores[number % len(cores)]})


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty home folder: no test reads or writes the user's own files."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("HOME", "USERPROFILE"):
        os.environ[name] = str(folder)
    for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
        os.environ[f"XDG_{kind}_HOME"] = str(folder / kind.lower())
    return folder


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> TinyPath:
    """``tiny_path(kind, seed=0, n_ctx_train=4096)``: the file of a tiny random model, written on first use."""
    from edgekv import tiny

    folder = tmp_path_factory.mktemp("tiny")

    def path(kind: str = "llama", *, seed: int = 0, n_ctx_train: int = 4096) -> Path:
        file = folder / (f"{kind}-{seed}.gguf" if n_ctx_train == 4096 else f"{kind}-{seed}-{n_ctx_train}.gguf")
        return file if file.exists() else tiny.write(file, kind, seed=seed, n_ctx_train=n_ctx_train)

    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2, the default model; skips where it is not on disk."""
    return _real("smollm2")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3, for the sliding-window path; skips where it is not on disk."""
    return _real("gemma3-270m")


def _real(name: str) -> Path:
    from edgekv import catalog

    entry = catalog.find(name)
    if entry.state() == "present":
        return entry.path
    message = f"{name} is not in {entry.path.parent} ({entry.state()}): run `make models`"
    if os.environ.get("EDGEKV_REQUIRE_MODELS") == "1":
        pytest.fail(message)
    pytest.skip(message)
