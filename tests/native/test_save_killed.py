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

#: A process that forks writers and kills them; the model is loaded once. argv: a model, a file, how often.
KILLER = """
import json, os, random, signal, sys, time
from collections import Counter
from pathlib import Path
from edgekv import Session, Settings, store
from edgekv.store import Stored
from helpers import some_tokens

path, times = Path(sys.argv[2]), int(sys.argv[3])
settings = Settings(n_ctx=1024, n_batch=64, n_threads=1)
versions = {}
for size in (100, 900):  # small and large
    versions[size] = Session(sys.argv[1], settings=settings)
    versions[size].append(some_tokens(size), name="old" if size == 100 else "new", tags=["x"])
    versions[size].mask((20, 40))
    versions[size].park((50, 60))
    versions[size].logits()

contents = {}
for size, session in versions.items():
    session.save(path)
    with Stored(path) as stored:
        contents[size] = {name: stored.read(name).tobytes() for name in stored._members}

def save_session(size):
    versions[size].save(path)

def write_members(size):
    store.write(path, contents[size].items(), private=True)

def repeat(save, order):
    while True:
        for size in order:
            save(size)

def check():
    # One of the two, to the last byte. The manifest says when it was written, and receipts how long it took.
    with Stored(path) as stored:
        held = {name: stored.read(name).tobytes() for name in stored._members}
    same = [s for s, c in contents.items() if {**c, "manifest.json": 0} == {**held, "manifest.json": 0}]
    assert len(same) == 1, sorted(held)
    return same[0]

rng, told = random.Random(times), Counter()
for i in range(times):
    save, order = (save_session if i % 2 else write_members), rng.sample(list(versions), 2)
    child = os.fork()
    if not child:
        try: repeat(save, order)
        finally: os._exit(1)
    time.sleep(rng.uniform(0.002, 0.04))
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    names = os.listdir(path.parent)
    left = [name for name in names if name != path.name]
    assert len(left) <= 1 and path.name in names, names
    told["killed"] += 1
    told["left a temporary file"] += len(left)
    told[f"has {check()} tokens"] += 1
    if i % 10 == 0:
        with Session.load(path, versions[100].engine) as session:
            session.audit()
            session.unmask((20, 40))
            session.unmask((50, 60))
            session.generate(1).finish()
save_session(100)
assert os.listdir(path.parent) == [path.name], os.listdir(path.parent)
assert check() == 100
print(json.dumps(told))
"""


def kill(model: Path, folder: Path, times: int) -> None:
    done = python(KILLER, model, folder / "session.kv", str(times), timeout=60 + times)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    print(told)
    assert told["killed"] == times
    assert told["left a temporary file"] >= times // 3
    assert min(told["has 100 tokens"], told["has 900 tokens"]) >= times // 10


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_killed_at_any_moment(tiny_path: TinyPath, tmp_path: Path, kind: str) -> None:
    kill(tiny_path(kind), tmp_path, 100)


@pytest.mark.slow
def test_killed_a_thousand_times(tiny_path: TinyPath, tmp_path: Path) -> None:
    kill(tiny_path(), tmp_path, 1000)
