"""The frame around all commands: light, one error boundary, clean stdout. Real processes, no engine."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from edgekv import cli
from edgekv.cli import output
from edgekv.errors import EdgekvError, ModelNotFound, UnknownSpan
from wheels import make_model, noise, pip_environ, write_manifest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("llama_cpp", "numpy", "rich", "platformdirs", "importlib.metadata")

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")


def run(*args: str, folder: Path | str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "EDGEKV_MANIFEST": str(ROOT / "models" / "manifest.json"),
        "EDGEKV_MODELS": str(folder),
    }
    env = {**env, "PYTHONPATH": str(ROOT), **more}
    for name in ("EDGEKV_DEBUG", "FORCE_COLOR"):
        if name not in more:
            env.pop(name, None)
    command = [sys.executable, "-m", "edgekv", *args]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)


# --- light


@pytest.mark.parametrize("args", [["--help"], [], ["models", "--help"], ["models", "path", "--help"]])
def test_help_loads_nothing_heavy(args: list[str]) -> None:
    script = f"""
import sys
from edgekv.cli import cli
try:
    cli({args!r}, prog_name="edgekv")
finally:
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    print(heavy, file=sys.stderr)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"


def test_help_names_every_command_and_no_command_means_help(tmp_path: Path) -> None:
    full = run("--help", folder=tmp_path)
    assert all(f"\n  {name}" in full.stdout for name in cli.COMMANDS)
    assert run("-h", folder=tmp_path).stdout == full.stdout
    assert run(folder=tmp_path).stdout == full.stdout
    assert full.stderr == ""


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_table_says_what_the_command_says(name: str) -> None:
    _, short = cli.COMMANDS[name]
    command = cli.cli.get_command(click.Context(cli.cli), name)
    assert command is not None
    assert command.name == name
    assert command.get_short_help_str(limit=200).rstrip(".") == short


def test_version(tmp_path: Path) -> None:
    done = run("--version", folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("edgekv ")


# --- the error boundary


def test_a_wrong_call_is_2_and_an_error_is_1(tmp_path: Path) -> None:
    for args in (
        ["model"],
        ["--nonsense"],
        ["models", "--nonsense"],
        ["models", "lst"],
        ["models", "path", "a", "b"],
    ):
        done = run(*args, folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, ""), args
        assert done.stderr.startswith("error: "), args
        assert "--help" in done.stderr
    done = run("models", "path", "smollm2", folder=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert "edgekv models fetch smollm2" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_near_command_is_named(tmp_path: Path) -> None:
    assert "did you mean models?" in run("model", folder=tmp_path).stderr
    assert "did you mean" not in run("qqq", folder=tmp_path).stderr


@dataclass
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], Ended]:
    """Run a function as a command of the real group, through the real boundary."""

    def invoke(body: Callable[[], object]) -> Ended:
        command = click.Command("demo", callback=body)
        monkeypatch.setattr(cli.cli, "get_command", lambda _ctx, _name: command)
        result = CliRunner().invoke(cli.cli, ["demo"], prog_name="edgekv")
        return Ended(result.exit_code, result.stdout, result.stderr)

    return invoke


def raiser(exc: BaseException) -> Callable[[], object]:
    def body() -> None:
        raise exc

    return body


@pytest.mark.parametrize(
    ("exc", "code", "said"),
    [
        (EdgekvError("it broke"), 1, "error: it broke\n"),
        (ModelNotFound("where?"), 1, "error: where?\n"),
        (UnknownSpan("no span 'x'"), 2, "error: no span 'x'\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "error: /x: Permission denied\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "error: No space left on device\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
        (ImportError("no module named llama_cpp"), 1, "error: no module named llama_cpp\n"),
        (MemoryError(), 1, "error: out of memory\n"),
        (click.UsageError("both given"), 2, "error: both given\ntry: edgekv demo --help\n"),
        (SystemExit(5), 5, ""),
        (
            ValueError("odd"),
            1,
            "error: ValueError: odd (a bug in edgekv; EDGEKV_DEBUG=1 shows where)\n",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_exception_has_a_code_and_a_line(
    ended: Callable[[Callable[[], object]], Ended],
    monkeypatch: pytest.MonkeyPatch,
    exc: BaseException,
    code: int,
    said: str,
) -> None:
    monkeypatch.delenv("EDGEKV_DEBUG", raising=False)
    done = ended(raiser(exc))
    assert (done.code, done.out, done.err.lstrip("\n")) == (code, "", said)


def test_debug_adds_the_traceback(
    ended: Callable[[Callable[[], object]], Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKV_DEBUG", "1")
    done = ended(raiser(EdgekvError("it broke")))
    assert done.code == 1
    assert "Traceback" in done.err
    assert done.err.endswith("error: it broke\n")


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (3, 3), ("text", 0)])
def test_a_command_may_return_its_code(
    ended: Callable[[Callable[[], object]], Ended], returned: object, code: int
) -> None:
    assert ended(lambda: returned).code == code


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
@pytest.mark.parametrize("args", [["models", "list"], ["models", "list", "--json"], ["--help"]])
def test_a_closed_pipe_is_quiet(tmp_path: Path, args: list[str]) -> None:
    env = {
        **os.environ,
        "EDGEKV_MANIFEST": str(ROOT / "models" / "manifest.json"),
        "EDGEKV_MODELS": str(tmp_path),
    }
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "edgekv", *args]
    done = subprocess.run(command, env=env, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("args", [["models", "list"], ["models", "list", "--json"], ["--help"]])
def test_a_full_disk_is_one_line(tmp_path: Path, args: list[str]) -> None:
    env = {
        **os.environ,
        "EDGEKV_MANIFEST": str(ROOT / "models" / "manifest.json"),
        "EDGEKV_MODELS": str(tmp_path),
    }
    command = [sys.executable, "-m", "edgekv", *args]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, env=env, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: No space left on device"
    assert "Traceback" not in done.stderr


def test_a_narrow_encoding_is_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "modèles-模型"
    done = run("models", "list", folder=folder, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "mod\\xe8les" in done.stdout


# --- models


def test_list_as_json_is_clean(tmp_path: Path) -> None:
    done = run("models", "list", "--json", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["folder"] == str(tmp_path)
    assert {row["name"]: row["status"] for row in told["models"]} == {"smollm2": "no", "gemma3-270m": "no"}
    assert told["models"][0]["default"] is True


def test_list_for_people(tmp_path: Path) -> None:
    done = run("models", "list", folder=tmp_path)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("smollm2"))
    assert " ".join(row.split()) == "smollm2 98.4 MB chat 8,192 Apache-2.0 no SmolLM2-135M-Instruct.Q4_1.gguf"
    assert str(tmp_path) in done.stdout
    assert "edgekv models fetch" in done.stderr
    assert run("models", folder=tmp_path).stdout == done.stdout


def test_an_error_with_json_stays_off_stdout(tmp_path: Path) -> None:
    done = run("models", "fetch", "nope", "--json", folder=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no model is called 'nope'")


@needs_pip
def test_fetch_list_verify_path(tmp_path: Path) -> None:
    shop, folder = tmp_path / "shop", tmp_path / "models"
    shop.mkdir()
    entry = make_model(shop, "one", [noise(200_000, 1)])
    manifest = str(write_manifest(tmp_path / "m.json", entry))
    more = {**pip_environ(shop), "EDGEKV_MANIFEST": manifest}
    expected = folder / "one.gguf"

    def edgekv(*args: str) -> subprocess.CompletedProcess[str]:
        return run(*args, folder=folder, **more)

    assert edgekv("models", "path", "one").returncode == 1
    done = edgekv("models", "fetch", "one", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(expected)
    assert json.loads(done.stdout)["fetched"] is True
    assert "A test file." in done.stderr
    again = edgekv("models", "fetch", "one")
    assert again.stdout == f"one: already here, checksum right: {expected}\n"
    assert again.stderr == ""
    assert edgekv("models", "path", "one").stdout == f"{expected}\n"
    assert edgekv("models", "path", str(expected)).returncode == 1  # a name is asked for

    assert "verified" in edgekv("models", "list", "--verify").stdout
    with expected.open("r+b") as file:
        file.write(b"damage")
    assert edgekv("models", "list").returncode == 0
    damaged = edgekv("models", "list", "--verify")
    assert damaged.returncode == 1
    assert "wrong checksum" in damaged.stdout
    assert edgekv("models", "fetch", "one").stdout.startswith("one: fetched")
    assert expected.read_bytes() == noise(200_000, 1)


# --- output


def test_json_knows_what_results_are_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass
    class Row:
        where: Path
        values: tuple[float, ...]

    output.print_json({"rows": [Row(Path("a/b"), (1.0, float("nan"), float("-inf")))], 3: True, "none": None})
    out = capsys.readouterr().out
    told = json.loads(out)
    assert told == {
        "rows": [{"where": str(Path("a/b")), "values": [1.0, None, None]}],
        "3": True,
        "none": None,
    }
    assert out.endswith("}\n")


def test_json_takes_numpy(capsys: pytest.CaptureFixture[str]) -> None:
    np = pytest.importorskip("numpy")
    output.print_json({"a": np.float32("nan"), "b": np.arange(3), "c": np.float64(0.5), "d": np.bool_(True)})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [0, 1, 2], "c": 0.5, "d": True}


def test_json_refuses_what_it_would_have_to_guess() -> None:
    with pytest.raises(TypeError, match="object has no JSON form"):
        output.print_json({"x": object()})


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (98_362_432, "98.4 MB"),
        (2.5e9, "2.5 GB"),
        (3e12, "3000.0 GB"),
    ],
)
def test_sizes(count: float, shown: str) -> None:
    assert output.size(count) == shown


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(steps: list[tuple[float, int]], total: int, unit: output.Unit = "B", *, eta: bool = False) -> list[str]:
    clock, lines = Clock(), list[str]()
    plain = output.PlainProgress("work", unit, clock, lines.append, eta=eta)
    for clock.now, done in steps:
        plain.update(done, total)
    plain.close()
    return lines


def test_what_is_left_is_estimated_from_what_is_done() -> None:
    lines = lines_of([(30, 10), (60, 20), (270, 90), (300, 100)], 100, "%", eta=True)
    assert lines == [
        "work: 10 %, about 4 min left",
        "work: 20 %, about 4 min left",
        "work: 90 %, about 30 s left",
        "work: 100 %",
    ]


def test_short_work_is_silent() -> None:
    assert lines_of([(0.1, 10), (0.9, 100)], 100) == []


def test_lines_are_sparse_and_end_with_the_last_figure() -> None:
    steps = [(tick / 10, tick * 1000) for tick in range(101)]  # 10 s, 1 % each 0.1 s
    lines = lines_of(steps, 100_000)
    assert lines[0] == "work: 10 %, 10.0 kB of 100.0 kB"
    assert lines[-1] == "work: 100 %, 100.0 kB of 100.0 kB"
    assert 5 <= len(lines) <= 7


def test_a_stall_still_says_that_it_is_alive() -> None:
    lines = lines_of([(tick / 10, 50) for tick in range(600)], 100, "%")
    assert lines[:3] == ["work: 50 %"] * 3
    assert len(lines) == 5


def test_unknown_totals_count() -> None:
    assert lines_of([(1.5, 1200)], 0, "tokens") == ["work: 1,200 tokens"]


@pytest.mark.skipif(importlib.util.find_spec("pty") is None, reason="no terminals to make here")
@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_gets_a_bar_and_no_color_is_respected(no_color: bool) -> None:
    script = (
        "import time\n"
        "from edgekv.cli import output\n"
        "from edgekv.cli.output import progress, console\n"
        "output._BAR_AFTER_S = 600\n"
        "with progress('short', unit='B') as update:\n"
        "    update(1, 2)\n"
        "output._BAR_AFTER_S = 0\n"
        "with progress('work', unit='B') as update:\n"
        "    for i in range(5): update(i * 1000, 4000), time.sleep(0.2)\n"
        "console().print('[red]result[/red]')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    env = {**env, "NO_COLOR": "1"} if no_color else {key: env[key] for key in env if key != "NO_COLOR"}
    shown = in_terminal([sys.executable, "-c", script], env)
    assert "work" in shown and "short" not in shown  # what is done soon needs no bar
    assert "/4.0 kB" in shown
    assert ("\x1b[31mresult" in shown) is not no_color


def in_terminal(command: list[str], env: dict[str, str]) -> str:
    import pty

    main, side = pty.openpty()
    with subprocess.Popen(command, env=env, cwd=ROOT, stdin=side, stdout=side, stderr=side) as process:
        os.close(side)
        shown = b""
        try:
            while block := os.read(main, 4096):
                shown += block
        except OSError:  # Linux says EIO when the other side is closed
            pass
        os.close(main)
    assert process.returncode == 0, shown
    return shown.decode()
