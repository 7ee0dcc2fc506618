"""``edgekv doctor``: it says all is well where it is, and notices where it is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import Session
from edgekv.cells import Cells
from edgekv.doctor import checks, examine, machine, on_model, selftest
from edgekv.errors import EdgekvError

Edgekv = Callable[..., Any]
TinyPath = Callable[[str], Path]


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine where nothing was fetched."""
    monkeypatch.setenv("EDGEKV_MODELS", str(tmp_path))


@pytest.mark.usefixtures("no_models")
def test_all_is_well_without_a_model(edgekv: Edgekv) -> None:
    done = edgekv("doctor", "--json")
    told = json.loads(done.out)
    assert (done.code, told["schema"], told["ok"], told["failed"]) == (0, "edgekv.doctor/1", True, 0)
    names = [check["name"] for check in told["checks"]]
    assert names[:2] == ["llama.cpp", "models"]
    assert names[-1] == "on a real model"
    assert sum("sliding window" in name for name in names) == sum("full attention" in name for name in names) == 4
    assert {check["status"] for check in told["checks"]} == {"ok"}
    assert "edgekv models fetch smollm2" in told["checks"][-1]["message"]
    assert told["machine"]["threads_used"] >= 1
    assert told["machine"]["ram_total"] > told["machine"]["ram_free"] > 0
    assert told["build"]["llama_cpp_python"]
    assert told["build"]["features"]
    assert {model["state"] for model in told["models"]} == {"absent"}


def test_a_model_of_ones_own(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    done = edgekv("doctor", tiny_path("llama"), "--json")
    told = {check["name"].replace("edgekv tiny ", ""): check for check in json.loads(done.out)["checks"]}
    assert done.code == 0
    assert told["exact undo, llama"]["status"] == "ok"
    assert told["speed, llama"]["figures"]["prefill_tokens_per_s"] > 0
    assert told["speed, llama"]["figures"]["decode_tokens_per_s"] > 0
    assert told["q8_0 KV, llama"]["figures"]["tokens"] == 64
    assert 0 < told["q8_0 KV, llama"]["figures"]["kl_mean"] < told["q4_0 KV, llama"]["figures"]["kl_mean"]


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_a_model_that_cannot_be_masked_is_a_warning(edgekv: Edgekv, tiny_path: TinyPath, kind: str) -> None:
    done = edgekv("doctor", tiny_path(kind), "--json")
    told = json.loads(done.out)
    assert (done.code, told["warnings"]) == (0, 1)
    warning = next(check for check in told["checks"] if check["status"] == "warning")
    assert "cannot be masked" in warning["message"]


def test_a_model_that_does_not_load_is_a_failure(edgekv: Edgekv, tiny_path: TinyPath) -> None:
    for model, said in (("no-such-model", "no-such-model"), (tiny_path("encoder"), "no cache")):
        done = edgekv("doctor", model)
        assert done.code == 1
        failed = next(line for line in done.out.splitlines() if line.startswith("FAILED"))
        assert said in failed
        assert done.out.splitlines()[-1].endswith("failed")


@pytest.mark.usefixtures("no_models")
def test_it_fits_a_narrow_terminal(edgekv: Edgekv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = edgekv("doctor")
    assert done.code == 0
    assert max(len(line) for line in done.out.splitlines() if "/" not in line) <= 60
    assert "\x1b" not in done.out + done.err
    assert "llama-cpp-python" in done.out
    assert done.out.splitlines()[-1] == "13 checks, all is well"


# --- it would notice


def statuses() -> dict[str, str]:
    return {finding.name: finding.status for finding in examine().findings}


@pytest.mark.usefixtures("no_models")
def test_a_shift_by_the_wrong_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Cells._shift
    monkeypatch.setattr(Cells, "_shift", lambda self, run, delta: right(self, run, delta + 1))
    found = statuses()
    assert found["closed gap, full attention"] == found["closed gap, sliding window"] == "failed"
    assert found["exact undo, full attention"] == "ok"  # nothing moves there


@pytest.mark.usefixtures("no_models")
def test_a_mask_that_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "mask", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(Session, "unmask", lambda *_args, **_kwargs: None)
    found = examine()
    undo = next(f for f in found.findings if f.name == "exact undo, full attention")
    assert (undo.status, undo.message) == ("failed", "the mask changed nothing: hidden tokens are still looked at")
    assert found.failed >= 5


@pytest.mark.usefixtures("no_models")
def test_logits_off_by_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = Session.logits_over, []

    def wrong(self: Session, text: Any) -> Any:
        calls.append(text)
        return right(self, text) + np.float32(1e-3 * len(calls))

    monkeypatch.setattr(Session, "logits_over", wrong)
    assert statuses()["exact undo, full attention"] == "failed"


def test_an_exception_is_a_finding() -> None:
    def stumble() -> checks.Says:
        raise EdgekvError("no luck")

    found = checks.carry_out(checks.Check("x", stumble))
    assert (found.name, found.status, found.message) == ("x", "failed", "EdgekvError: no luck")
    assert found.ms >= 0


def test_llama_cpp_that_does_not_load(tmp_path: Path) -> None:
    """Still a report, on stdout, that says so."""
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text("raise OSError('libllama.so: cannot open shared object file')")
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    for more in ([], ["--json"]):
        command = [sys.executable, "-m", "edgekv", "doctor", *more]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 1, done.stderr
        assert "libllama.so: cannot open shared object file" in done.stdout
        assert "Traceback" not in done.stdout + done.stderr


# --- its parts


def test_features_of_a_build() -> None:
    info = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 0 | FMA = 1 | REPACK = 1 | CUDA : ARCHS = 500 |"
    assert machine.features(info) == ["SSE3", "AVX", "FMA", "REPACK", "ARCHS"]
    assert machine.features("") == []
    assert machine.missing_features(info, {"avx", "avx2", "fma", "sse3"}) == ["AVX2"]
    assert machine.missing_features("CPU : NEON = 1", {"asimd", "asimddp"}) == ["DOTPROD"]


def test_a_build_that_wastes_the_cpu_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cpu_flags", lambda: {"avx", "avx2", "fma"})
    monkeypatch.setattr(machine, "system_info", lambda: "CPU : AVX = 1")
    found = checks.carry_out(machine.CHECKS[0])
    assert found.status == "warning"
    assert "built without AVX2, FMA" in found.message
    assert found.figures["idle"] == ["AVX2", "FMA"]


@pytest.mark.parametrize(
    ("kl", "same", "status", "said"),
    [
        (0.001, 1.0, "ok", "close to f16"),
        (0.1, 0.8, "ok", "close to f16"),
        (0.2, 0.9, "warning", "changes what this model says"),
        (0.05, 0.7, "warning", "changes what this model says"),
        (3.0, 0.1, "warning", "garbles this model"),
    ],
)
def test_the_yardstick(kl: float, same: float, status: str, said: str) -> None:
    top = np.arange(10) < round(same * 10)
    says = on_model.judge(np.full(10, kl), top)
    assert says.status == status
    assert said in says.message
    assert (on_model.YARDSTICK in says.message) == (status == "warning")
    assert says.figures["kl_mean"] == pytest.approx(kl)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKV_MODELS", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    examine()
    assert list(tmp_path.iterdir()) == []


def test_self_tests_are_the_same_for_every_kind(tmp_path: Path) -> None:
    names = [check.name for check in selftest.checks(tmp_path)]
    assert len(names) == len(set(names)) == 10
    assert list(tmp_path.iterdir()) == []  # written when they run


@pytest.mark.real
@pytest.mark.slow
def test_the_default_model(edgekv: Edgekv, smollm2_path: Path) -> None:
    done = edgekv("doctor", smollm2_path, "--json")
    told = {check["name"].partition(",")[0]: check for check in json.loads(done.out)["checks"][-4:]}
    assert done.code == 0
    assert told["exact undo"]["status"] == told["q8_0 KV"]["status"] == "ok"
    assert told["q8_0 KV"]["figures"]["kl_mean"] < told["q4_0 KV"]["figures"]["kl_mean"]
