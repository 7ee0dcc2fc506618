"""Killed while it saves: the file is the old one or the new one, whole, and at most one temporary file is left."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import python

TinyPath = Callable[..., Path]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL and fork are POSIX")

#: A process that forks writers, each killed at another line of edgekv's code; the model is loaded once.
#: argv: a model, a file, how many lines.
KILLER = """
import json, os, signal, sys, traceback
from collections import Counter
from pathlib import Path
from edgekv import Session, Settings
from edgekv.store import Stored
from helpers import at_lines, places_in, some_tokens

path, count = Path(sys.argv[2]), int(sys.argv[3])
settings = Settings(n_ctx=1024, n_batch=64, n_threads=1)
versions = {}
for size in (100, 900):  # small and large
    with Session(sys.argv[1], settings=settings) as session:
        session.append(some_tokens(size), name="old" if size == 100 else "new", tags=["x"])
        session.mask((20, 40))
        session.park((50, 60))
        session.logits()
        session.save(path)
    versions[size] = Session.load(path, sys.argv[1], n_threads=1)

def read():
    with Stored(path) as stored:
        return {name: stored.read(name).tobytes() for name in stored._members}

contents = {}
for size, session in versions.items():
    session.save(path)
    contents[size] = read()

def check():
    # One of the two, to the last byte. The manifest says when it was written.
    held = read()
    same = [s for s, c in contents.items() if {**c, "manifest.json": 0} == {**held, "manifest.json": 0}]
    assert len(same) == 1, sorted(held)
    return same[0]

def die(number):  # in a child, which opens what it saves itself
    session, elsewhere = Session.load(sys.argv[4], sys.argv[1], n_threads=1), sys.argv[4] + ".first"
    session.save(elsewhere)  # what is asked once is asked here
    at = places_in(lambda: session.save(elsewhere), count)[number]
    with at_lines(lambda line: os.kill(os.getpid(), signal.SIGKILL) if line == at else None):
        session.save(path)
    os.kill(os.getpid(), signal.SIGKILL)  # it was some lines shorter this time

versions[900].save(sys.argv[4])

told = Counter()
for number in range(count):
    versions[100].save(path)
    assert os.listdir(path.parent) == [path.name], os.listdir(path.parent)
    child = os.fork()
    if not child:
        try: die(number)
        except BaseException: traceback.print_exc()
        finally: os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    names = os.listdir(path.parent)
    left = [name for name in names if name != path.name]
    assert len(left) <= 1 and path.name in names, names
    told["left a temporary file"] += len(left)
    told[f"has {check()} tokens"] += 1
with Session.load(path, versions[100].engine) as session:
    session.audit()
    session.unmask((20, 40))
    session.unmask((50, 60))
    session.generate(1).finish()
print(json.dumps(told))
"""


def kill(model: Path, folder: Path, count: int) -> None:
    (folder / "there").mkdir()
    done = python(KILLER, model, folder / "there" / "session.kv", str(count), folder / "source.kv")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["left a temporary file"] > count // 4
    assert told["has 100 tokens"] > count // 4
    assert told["has 900 tokens"] >= 1  # killed when it had been put in its place


def test_killed_at_any_line(tiny_path: TinyPath, tmp_path: Path) -> None:
    kill(tiny_path(), tmp_path, 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_killed_at_a_thousand_lines(tiny_path: TinyPath, tmp_path: Path, kind: str) -> None:
    kill(tiny_path(kind), tmp_path, 1000)
