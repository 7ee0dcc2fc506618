"""fork() after loading: the child leaves what is the parent's alone, and can open a model of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

_BEGIN = """
import os, signal, sys
from edgekv import Engine, Model, Session, Settings, errors
path, folder = sys.argv[1:]
settings = Settings(n_ctx=256, n_batch=64, n_threads=2, park_folder=folder, max_parked_bytes=0)
model = Model(path)
engine = Engine(model, settings)
session = Session(engine)
session.append("The quick brown fox jumps over the lazy dog, and once more.", name="text")
session.park((10, 30), folder)
before = session.logits()

def child(work):
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        try:
            work()
        except BaseException as err:
            print(repr(err), file=sys.stderr)
            os._exit(1)
        if EXIT == "os":
            os._exit(0)
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, code
    session.unmask((10, 30))
    session.audit()
    session.append("on")
    session.generate(5).finish()
    session.close(); engine.close(); model.close()
"""


def run(path: Path, folder: Path, code: str, *, leave: str = "os") -> None:
    done = python(f"EXIT = {leave!r}\n{_BEGIN}{code}", path, folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("leave", ["os", "sys"])
def test_a_child_cannot_use_what_its_parent_opened(tiny_path: Callable[..., Path], tmp_path: Path, leave: str) -> None:
    code = """
def work():
    for use in (lambda: session.append("x"), lambda: session.unmask((10, 30)), lambda: session.stats, session.logits,
                lambda: session.tokens, lambda: Session(engine), lambda: Session(model), lambda: model.tokenize("x"),
                session.fork, session.audit, lambda: session.generate(3).text, lambda: engine.ctx):
        try:
            use()
        except errors.ClosedError as err:
            assert "parent process" in str(err), err
        else:
            raise AssertionError("no error")
    session.close(); session.close(); engine.close(); model.close()
child(work)
"""
    run(tiny_path("llama"), tmp_path, code, leave=leave)


def test_a_child_opens_a_model_of_its_own(tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    code = """
def work():
    with Session(path, settings=settings) as own:
        own.append("The quick brown fox jumps over the lazy dog, and once more.")
        own.generate(5).finish()
        own.audit()
child(work)
"""
    run(tiny_path("llama"), tmp_path, code)


def test_a_fork_while_another_thread_holds_the_lock(tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    code = """
import threading
held, go = threading.Event(), threading.Event()
def hold():
    with engine.lock:
        held.set()
        go.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
def work():
    try:
        session.append("x")
    except errors.ClosedError:
        session.close()
        return
    raise AssertionError("no error")
pid = os.fork()
if not pid:
    signal.alarm(20)
    work()
    os._exit(0)
go.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    run(tiny_path("llama"), tmp_path, code)
