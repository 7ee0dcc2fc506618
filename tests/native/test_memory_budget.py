"""Memory budgets: what is chosen, and that a process under a hard limit of what was promised lives.

Every run is a Python of its own. ``ulimit -v`` is what ``address_space`` promises, a memory cgroup what ``process``
does. Under half of either the end is our error: no kill, no abort.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgekv import Engine, Model, Session, Settings, budget, errors, memory
from helpers import ROOT, python

TinyPath = Callable[..., Path]
CGROUPS = Path("/sys/fs/cgroup/memory")
CPU = Path("/sys/fs/cgroup/cpu")

FILL = """
import json, sys
from edgekv import Session, errors
path, limit, given = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
try:
    with Session(path, memory_budget=limit, **given) as session:
        import numpy
        tokens = numpy.random.RandomState(0).randint(5, session.model.n_vocab - 5, session.engine.num_cells - 8)
        session.append(tokens.astype("int32"))
        made = len(session.generate(6).finish().tokens)
        lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
        settings = session.engine.settings
        print(json.dumps({
            "n_ctx": settings.n_ctx, "kv_type": settings.kv_type, "made": made,
            "peak": 1024 * int(lines["VmHWM"].split()[0]),
        }))
except errors.TooLarge as err:
    print(json.dumps({"too_large": str(err)}))
"""


def run(
    path: Path, limit: int, *, before: Callable[[], None] | None = None, **given: object
) -> subprocess.CompletedProcess[str]:
    """Fill a budgeted session in a process of its own, which does ``before`` first; never a core file."""

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if before is not None:
            before()

    command = [sys.executable, "-c", FILL, str(path), str(limit), json.dumps(given)]
    env = {**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False, preexec_fn=prepare
    )


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-600:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def chosen(path: Path, limit: int | str, **given: Any) -> budget.Fit:
    with Model(path) as model:
        return budget.fit(model, budget.parse_size(limit), Settings(), **given)


def ulimit(num_bytes: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


@pytest.fixture
def cgroup() -> Iterator[Callable[[int], Callable[[], None]]]:
    """``cgroup(bytes)`` is a ``before`` that moves the process into a group with that limit; skips where none is."""
    folder = CGROUPS / f"edgekv-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as err:
        pytest.skip(f"no memory cgroup can be made here: {err}")

    def limited(num_bytes: int) -> Callable[[], None]:
        (folder / "memory.limit_in_bytes").write_text(str(num_bytes))
        return lambda: (folder / "cgroup.procs").write_text(str(os.getpid())) and None

    yield limited
    folder.rmdir()


def test_threads_below_a_quota() -> None:
    """In a real cgroup with half a CPU."""
    folder = CPU / f"edgekv-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "cpu.cfs_quota_us").write_text("50000")
    except OSError as err:
        pytest.skip(f"no cgroup with a quota can be made here: {err}")
    try:
        code = (
            f"import os; open({str(folder / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
            "from edgekv.settings import Settings, cpu_quota; print(cpu_quota(), Settings().threads)"
        )
        assert python(code).stdout.split() == ["0.5", "1"]
    finally:
        folder.rmdir()


# ---- what is chosen -------------------------------------------------------------------------------------------------


def test_the_choice_can_be_seen(tiny_path: TinyPath) -> None:
    with Session(tiny_path("llama"), memory_budget="100MB") as session:
        settings = session.engine.settings
        need = session.model.estimate(settings.n_ctx, settings.kv_type, settings.n_batch)
        assert (settings.n_ctx, settings.kv_type) == (4096, "f16")  # as trained: it fits
        assert need.process <= 100_000_000
        session.append("abc")
        assert session.generate(2).finish().text is not None


def test_what_is_given_is_kept(tiny_path: TinyPath) -> None:
    path = tiny_path("llama")
    assert chosen(path, "100MB", n_ctx=700).settings.n_ctx == 700
    assert chosen(path, "100MB", kv_type="q4_0").settings.kv_type == "q4_0"
    with Session(path, memory_budget="100MB", settings=Settings(n_batch=64, n_threads=1)) as session:
        assert (session.engine.settings.n_batch, session.engine.settings.threads) == (64, 1)
    with pytest.raises(errors.TooLarge, match="70,144 cells in f32"):
        chosen(path, "100MB", n_ctx=70_000, kv_type="f32")


def test_an_open_engine_takes_no_budget(tiny_path: TinyPath) -> None:
    with Model(tiny_path("llama")) as model, Engine(model, Settings(n_ctx=256)) as engine:
        with pytest.raises(errors.UsageError, match="keeps its settings"):
            Session(engine, memory_budget="100MB")
        with pytest.raises(errors.UsageError, match="not a size"):
            Session(model, memory_budget="lots")


def test_gaps_that_close_are_worth_more_than_cells(tiny_path: TinyPath) -> None:
    """The tiny llama's heads of 32 cannot be shifted when quantised; SmolLM2's of 64 can."""
    path = tiny_path("llama", n_ctx_train=65_536)
    least = chosen(path, "1GB", n_ctx=1024).need.process
    for spare in (0, 1 << 20, 5 << 20):
        fit = chosen(path, least + spare)
        assert fit.settings.kv_type == "f16"
        assert fit.settings.n_ctx >= 1024
    with Model(path) as model:  # and what was asked for comes first
        whole = Settings(n_batch=256)
        all_f16 = budget.fit(model, 1 << 30, whole, n_ctx=16_384).need.process
        wide = budget.fit(model, all_f16 - 1, whole, n_ctx=16_384)
    assert wide.settings.kv_type in ("q8_0", "q4_0")
    assert "cannot shift" in wide.note


def test_a_budget_too_small_names_one_that_does(tiny_path: TinyPath) -> None:
    path = tiny_path("llama")
    for given in ({}, {"n_ctx": 3000}, {"kv_type": "q8_0"}):
        with pytest.raises(errors.TooLarge, match=r"weights take .* buffers .* cells in .* would do") as raised:
            chosen(path, "50MB", **given)
        named = str(raised.value).split("memory_budget='")[1].split("'")[0]
        assert chosen(path, named, **given).need.process <= budget.parse_size(named)


@pytest.mark.parametrize("kind", ["gemma3", "mrope", "yarn", "mamba", "lfm2"])
def test_every_kind_of_memory_takes_a_budget(tiny_path: TinyPath, kind: str) -> None:
    with Session(tiny_path(kind), memory_budget="120MB") as session:
        assert session.engine.settings.n_ctx == 4096
        session.append("abc")


def test_more_memory_never_gives_fewer_cells_of_a_type(tiny_path: TinyPath) -> None:
    path = tiny_path("llama", n_ctx_train=65_536)
    least = chosen(path, "1GB", n_ctx=256).need.process
    sizes = [chosen(path, least + spare, kv_type="f16").settings for spare in range(0, 20 << 20, 1 << 20)]
    useful = [s.n_ctx for s in sizes if s.n_batch == 512]
    assert useful == sorted(useful) and useful[0] < useful[-1]


# ---- hard limits ----------------------------------------------------------------------------------------------------


def check_promised(path: Path, limit: int, **given: Any) -> None:
    """Under the ulimit promised it lives; the estimate is not too little, and not over 1.3 times what it took."""
    fit = chosen(path, limit, **given)
    answer = told(run(path, limit, before=ulimit(fit.need.address_space(fit.settings.threads)), **given))
    assert (answer["n_ctx"], answer["kv_type"], answer["made"]) == (fit.settings.n_ctx, fit.settings.kv_type, 6)
    assert answer["peak"] <= fit.need.process <= 1.3 * answer["peak"]


def check_half(done: subprocess.CompletedProcess[str]) -> None:
    assert "would do" in told(done)["too_large"] or "free here" in told(done)["too_large"]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_tiny_lives_with_what_was_promised(tiny_path: TinyPath, kind: str) -> None:
    check_promised(tiny_path(kind), 90_000_000)


@pytest.mark.parametrize("share", [0.4])
def test_a_ulimit_without_room_for_the_libraries_is_told(tiny_path: TinyPath, share: float) -> None:
    """numpy's OpenBLAS would end the process while it is imported."""
    space = chosen(tiny_path("llama"), 90_000_000).need.address_space(1)
    limit = min(int(share * space), memory.program_space() - 1)
    command = [sys.executable, "-m", "edgekv", "inspect", str(tiny_path("llama"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=ulimit(limit), check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ulimit -v is")


def test_tiny_in_a_container_of_the_budget(tiny_path: TinyPath, cgroup: Callable[[int], Callable[[], None]]) -> None:
    path, limit = tiny_path("llama"), 90_000_000
    assert told(run(path, limit, before=cgroup(limit)))["made"] == 6
    need = chosen(path, limit).need.process
    check_half(run(path, need // 2, before=cgroup(need // 2)))


SMOLLM2 = [{"n_ctx": 512}, {}, *({"n_ctx": 2048, "kv_type": kv_type} for kv_type in ("f16", "q8_0", "q4_0"))]


@pytest.mark.real
@pytest.mark.parametrize(
    "given", [{"n_ctx": 256, "kv_type": "q4_0"}, *(pytest.param(given, marks=pytest.mark.slow) for given in SMOLLM2)]
)
def test_smollm2_lives_with_what_was_promised(smollm2_path: Path, given: dict[str, Any]) -> None:
    check_promised(smollm2_path, 256 << 20, **given)


@pytest.mark.real
@pytest.mark.parametrize(
    "share", [0.5, 0.75, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.55, 0.6, 0.65, 0.7, 0.8, 0.85))]
)
def test_smollm2_under_less_ends_with_our_error_or_fits(smollm2_path: Path, share: float) -> None:
    fit = chosen(smollm2_path, 256 << 20, n_ctx=256)
    limit = int(share * fit.need.address_space(fit.settings.threads))
    answer = told(run(smollm2_path, 256 << 20, before=ulimit(limit), n_ctx=256))
    assert "too_large" in answer or (share > 0.7 and answer["made"] == 6)


@pytest.mark.slow
@pytest.mark.real
def test_smollm2_in_a_container_of_the_budget(smollm2_path: Path, cgroup: Callable[[int], Callable[[], None]]) -> None:
    limit = 256 << 20
    answer = told(run(smollm2_path, limit, before=cgroup(limit)))
    assert answer["made"] == 6
    assert answer["n_ctx"] >= 2048
    check_half(run(smollm2_path, limit // 2, before=cgroup(limit // 2)))


@pytest.mark.real
def test_a_smaller_budget_takes_a_smaller_type(smollm2_path: Path) -> None:
    types = [chosen(smollm2_path, size).settings.kv_type for size in ("400MB", "240MB", "225MB", "215MB")]
    assert types[0] == "f16" and types[-1] == "q4_0"
    assert types == sorted(types, key=["f16", "q8_0", "q4_0"].index)
    assert chosen(smollm2_path, "1GB").settings.n_ctx == 8192  # what it was trained for
