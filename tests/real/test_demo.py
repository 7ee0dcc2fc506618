"""The demo: its JSON is what the README promises; the slow tier runs it as a user does, on all of its report."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgekv import cli, demo

pytestmark = pytest.mark.real

ARMS = ("mask", "mask_keep_gap", "restart", "restart_cold")


@pytest.fixture(scope="module")
def short(smollm2_path: Path) -> dict[str, Any]:
    """With a short report and short answers."""
    script = demo.Script.load()
    script = replace(script, report=script.report[:1000], questions=script.questions[:1])
    plan = functools.partial(demo.Plan, continuation=16, answer_tokens=8, summary_tokens=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo.Script, "load", lambda: script)
        patch.setattr(demo, "Plan", plan)
        done = CliRunner().invoke(cli.cli, ["demo", str(smollm2_path), "--json", "--repeat", "1", "--threads", "1"])
    assert done.exit_code == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert script.after in done.stderr  # the story, beside the object
    return dict(json.loads(done.stdout))


def check(found: dict[str, Any]) -> None:
    assert found["schema"] == "edgekv.demo/1"
    assert set(found["tokens"]) >= {"context", "masked", "suffix"}
    assert found["tokens"]["masked"] + found["tokens"]["suffix"] < found["tokens"]["context"]
    assert set(found["arms"]) == set(ARMS)
    for arm in found["arms"].values():
        assert set(arm) >= {"edit_ms", "ttft_ms", "tokens_redecoded", "cells_used", "vs_restart"}
        assert set(arm["vs_restart"]) >= {"kld_mean", "same_top"}
    arms = found["arms"]
    assert arms["restart"]["vs_restart"] | {"kld_mean": 0.0, "same_top": 1.0} == arms["restart"]["vs_restart"]
    assert arms["mask"]["tokens_redecoded"] == 0
    assert arms["restart"]["tokens_redecoded"] < arms["restart_cold"]["tokens_redecoded"]


def test_one_object_of_the_promised_shape(short: dict[str, Any]) -> None:
    check(short)


@pytest.mark.slow
def test_all_of_it(smollm2_path: Path) -> None:
    command = [sys.executable, "-m", "edgekv", "demo", str(smollm2_path), "--json", "--repeat", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    check(found)
    arms, noise = found["arms"], found["noise"]["kld_mean"]
    assert arms["restart_cold"]["vs_restart"]["kld_mean"] < 0.05
    assert 0 <= noise < 0.05
    assert noise < arms["mask"]["vs_restart"]["kld_mean"] < 0.5
