"""Fixtures for every test: tiny models written once a run, real ones where they are on disk, hypothesis profiles."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("default", derandomize=False, deadline=None)
hypothesis.settings.register_profile("nightly", derandomize=False, deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

TinyPath = Callable[..., Path]


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
