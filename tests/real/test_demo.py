"""The demo, run once as a user runs it: its JSON is what the README promises, and the mask is worth it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real

ARMS = ("mask", "mask_keep_gap", "restart", "restart_cold")


@pytest.fixture(scope="module")
def found(smollm2_path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "edgekv", "demo", str(smollm2_path), "--json", "--repeat", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5000)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "\x1b" not in done.stdout + done.stderr
    assert "Now the report is masked" in done.stderr  # the story, beside the object
    return dict(json.loads(done.stdout))


def test_one_object_of_the_promised_shape(found: dict[str, Any]) -> None:
    assert found["schema"] == "edgekv.demo/1"
    assert set(found["tokens"]) >= {"context", "masked", "suffix"}
    assert found["tokens"]["masked"] + found["tokens"]["suffix"] < found["tokens"]["context"]
    assert set(found["arms"]) == set(ARMS)
    for arm in found["arms"].values():
        assert set(arm) >= {"edit_ms", "ttft_ms", "tokens_redecoded", "cells_used", "vs_restart"}
        assert set(arm["vs_restart"]) >= {"kld_mean", "same_top"}


def test_the_mask_evaluates_nothing_again(found: dict[str, Any]) -> None:
    arms = found["arms"]
    assert arms["mask"]["tokens_redecoded"] == 0
    assert arms["restart"]["tokens_redecoded"] < arms["restart_cold"]["tokens_redecoded"]


def test_the_restart_is_its_own_measure(found: dict[str, Any]) -> None:
    arms, noise = found["arms"], found["noise"]["kld_mean"]
    assert arms["restart"]["vs_restart"] | {"kld_mean": 0.0, "same_top": 1.0} == arms["restart"]["vs_restart"]
    assert arms["restart_cold"]["vs_restart"]["kld_mean"] < 0.05
    assert 0 <= noise < 0.05
    assert noise < arms["mask"]["vs_restart"]["kld_mean"] < 0.5
