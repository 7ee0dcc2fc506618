"""The examples, each run as a user runs it: it ends, leaves nothing behind, and says what its docstring promises."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

EXAMPLES = Path(__file__).parents[2] / "examples"

#: what each is told on stdin; patterns, and how many lines of its stdout begin with one
LONG = "The garden has apples, pears, plums, cherries and nuts. " * 12 + "What is in it?\n"
FACTS: dict[str, tuple[str, dict[str, int]]] = {
    "chat.py": (
        f"Hello!\n\n{LONG * 3}",
        {r"\[\d+ tokens in view, [1-9]\d* hidden; [0-4] read again, where restarts would have read [1-9]": 1},
    ),
    "agent.py": (
        "",
        {
            r"\{'read_invoice': '(\w+)'\} -> \{'supplier': '\1', 'euros': \d+\}$": 4,
            r"cleared 'Invoice of \w+': masked \d+ tokens in ": 3,
            r"Noted \d+ euros; the invoices come to 844\.$": 1,
            r"\d+ tokens in view, \d+ cleared, read again: 0$": 1,
        },
    ),
    "documents.py": (
        "",
        {
            r"\w+: \d+ tokens read in \d+ ms": 2,
            r"attached \d+ tokens in .* loaded$": 2,
            r"masked \d+ tokens in .* exact: no visible token was computed while it was visible": 1,
            r"  \[.* first token after .* read again 0, reused \d+, masked 0\]$": 2,
            r"  \[.* first token after .* read again 0, reused \d+, masked [1-9]\d*\]$": 2,
        },
    ),
    "summarise.py": (
        "",
        {
            r"(kept|clean): hid user-1 \(\d+ tokens\), assistant-2 \(\d+ tokens\)$": 2,
            r"  read \d+, read again: 0$": 2,
            r"  masked \d+ tokens in .* computed while it was visible": 2,
            r"  inserted \d+ tokens in ": 1,
            r"\? What did the club decide about the pump\?$": 2,
        },
    ),
}


def run(name: str, model: Path) -> str:
    """What an example says on stdout."""
    command = [sys.executable, str(EXAMPLES / name), str(model)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, input=FACTS[name][0], cwd=folder, capture_output=True, text=True, timeout=1200, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert not list(Path(folder).iterdir())
    return done.stdout


NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "summarise.py" else n for n in NAMES])
def test_an_example_says_what_it_promises(name: str, smollm2_path: Path) -> None:
    said = run(name, smollm2_path)
    for fact, number in FACTS[name][1].items():
        lines = [line for line in said.splitlines() if re.match(fact, line)]
        assert len(lines) == number, f"{fact!r} is in {len(lines)} lines of\n{said}"
    if name == "summarise.py":
        check_summaries(said)


def check_summaries(said: str) -> None:
    """A clean one is in view of less, and is evaluated once more."""
    kept, clean = (int(n) for n in re.findall(r"(\d+) visible tokens were computed while it was", said))
    read_kept, read_clean = (int(n) for n in re.findall(r"^  read (\d+),", said, re.MULTILINE))
    assert clean < kept
    assert read_kept < read_clean
