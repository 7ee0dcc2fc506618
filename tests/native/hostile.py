"""Session files that were made to hurt: right checksums around wrong contents; and an engine that must not notice.

As a program, ``python hostile.py MODEL FILE FIRST COUNT`` loads that many random mutations of a session file, goes on
with those that load, and says what became of them. ``test_save_faults.py`` starts it so.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import copy
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgekv import Engine, Model, Session, Settings, errors, store
from edgekv.store import Stored
from helpers import Look, cells_in_llama, look, some_tokens

Document = dict[str, Any]
SETTINGS = Settings(n_ctx=512, n_batch=32, n_threads=1, n_sessions=3)
COLUMNS = {
    "ids": "<i4",
    "pos": "<i4",
    "state": "i1",
    "seq": "<i2",
    "reserved": "i1",
    "replaced": "i1",
    "blob": "<i4",
    "index_of": "<i8",
}


def rich(session: Session) -> Session:
    """Everything a session can hold: closed and kept gaps, parked and evicted spans, an insert, what undo needs."""
    for name, size in {"head": 20, "middle": 50, "tail": 30}.items():
        session.append(some_tokens(size, size), name=name, role=name[0], tags=["all", name])
    if session.model.capabilities.mask:
        gap = "close" if session.engine.can_shift else "keep"
        session.mask((30, 40), gap=gap)
        session.mask((45, 48), gap="keep")
        session.park((60, 66), gap=gap)
        session.evict((80, 84), gap=gap)
        if session.engine.can_shift:
            session.insert(20, some_tokens(7, 9), name="new")
    session.generate(3).finish()
    if session.model.capabilities.mask:
        session.mask((52, 54), gap="keep")
    session.logits()
    return session


def members(path: Path) -> dict[str, bytes]:
    with Stored(path) as stored:
        return {name: stored.read(name).tobytes() for name in stored._members}


def rewrite(path: Path, contents: dict[str, bytes]) -> Path:
    store.write(path, contents.items())
    return path


def column(document: Document, name: str, change: Callable[[Any], Any]) -> None:
    """Change a column, given as an array, in the place where it is."""
    array = np.frombuffer(base64.b64decode(document[name]), COLUMNS[name]).copy()
    changed = change(array)
    document[name] = base64.b64encode((array if changed is None else changed).tobytes()).decode()


class Bystander:
    """An engine with a session on it, of which a load that is refused must leave everything as it was."""

    def __init__(self, model: Model, settings: Settings = SETTINGS) -> None:
        self.engine = Engine(model, settings)
        self.session = Session(self.engine)
        self.session.append(some_tokens(40, 4), name="other")
        if model.capabilities.mask:
            self.session.mask((10, 20), gap="keep")
            self.session.park((22, 28), gap="keep")
        self.session.logits()
        self.before = self.now()

    def now(self) -> tuple[Look, int, int, tuple[int, ...], tuple[int, int], int]:
        engine = self.engine
        return (
            look(self.session),
            engine.cells_used,
            cells_in_llama(engine) if engine.kv_bytes(1) else 0,
            tuple(sorted(engine._free_sequences)),
            engine.parking.num_bytes(self.session._transcript.record),
            len(engine.parking._blobs),
        )

    def check(self) -> None:
        assert self.now() == self.before

    def go_on(self) -> None:
        """It is as alive as ever."""
        with self.session.fork() as fork:
            fork.append(some_tokens(5))
            fork.generate(2).finish()
            fork.audit()
        self.check()

    def close(self) -> None:
        self.session.close()
        self.engine.close()


# ---- random mutations -----------------------------------------------------------------------------------------------

EVIL: list[Any] = [
    *(-1, 0, 1, 2, 3, 7, 100, 127, 2**15, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63)),
    *(0.5, 1e308, "", None, True, [], {}, "x", "*", "role:x", "A" * 100),
    *([[0, 5]], [[5, 0]], [[-1, 3]], [[3, 9], [1, 2]], [[0, 2**40]]),
]


def _paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _paths(value, (*path, key))


def _at(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


def mutated(document: Document, rng: random.Random) -> Document:
    """One to three random places say something else."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        paths = list(_paths(document))
        arrays = [path for path in paths if path[-1] in COLUMNS and isinstance(_at(document, path), str)]
        path = rng.choice(arrays if arrays and rng.random() < 0.4 else paths)
        _mutate(_at(document, path[:-1]), path[-1], rng)
    return document


def _mutate(parent: Any, key: Any, rng: random.Random) -> None:
    old = parent[key]
    if key in COLUMNS and isinstance(old, str) and rng.random() < 0.9:
        with contextlib.suppress(ValueError):  # it is base64 no longer
            column(parent, key, lambda array: _mutate_array(array, rng))
    elif isinstance(old, list) and old and rng.random() < 0.4:
        _mutate_list(old, rng)
    elif isinstance(old, bool) and rng.random() < 0.7:
        parent[key] = not old
    elif isinstance(old, int) and rng.random() < 0.5:
        parent[key] = old + rng.choice([-2, -1, 1, 2, 10])
    elif rng.random() < 0.1:
        del parent[key]
    else:
        parent[key] = rng.choice(EVIL)


def _mutate_list(items: list[Any], rng: random.Random) -> None:
    i, j = rng.randrange(len(items)), rng.randrange(len(items))
    how = rng.choice(["drop", "swap", "double"])
    if how == "drop":
        del items[i]
    elif how == "swap":
        items[i], items[j] = items[j], items[i]
    else:
        items.insert(i, copy.deepcopy(items[i]))


def _mutate_array(array: Any, rng: random.Random) -> Any:
    if not len(array) or rng.random() < 0.2:
        return array[:-1] if rng.random() < 0.5 else np.concatenate([array, array[-1:]])
    most = np.iinfo(array.dtype)
    for _ in range(rng.choice([1, 1, 4])):
        i, j = rng.randrange(len(array)), rng.randrange(len(array))
        value = rng.choice([0, 1, 2, 3, 4, 5, -1, -7, int(array[i]) + 1, int(array[i]) - 1, int(array[j]), 120, 285])
        array[i] = max(most.min, min(most.max, value))
    return array


def go_on(session: Session) -> None:
    """All a user might do next. It may be refused, in edgekv's words."""
    verbs: list[Callable[[], object]] = [
        session.logits,
        lambda: str(session),
        lambda: [str(receipt) for receipt in session.history],
        lambda: session.append(some_tokens(4)),
        lambda: session.generate(2).finish(),
        session.undo,
        session.undo,
        lambda: session.influenced_by((3, 9)),
        session.recompute,
        *(lambda i=i: session.unmask((i, i + 5)) for i in range(0, len(session.tokens), 5)),
        lambda: session.mask((10, 14)),
        lambda: session.insert(12, some_tokens(3)),
        lambda: session.fork().close(),
        lambda: session.rewind(30),
        session.audit,
    ]
    for call in verbs:
        with contextlib.suppress(errors.EdgekvError):
            call()


def fuzz(model: Path, file: Path, first: int, count: int) -> None:
    told: collections.Counter[str] = collections.Counter()
    bystander, contents = Bystander(Model(model)), members(file)
    document = json.loads(contents["session.json"])
    path = file.with_name("mutated.kv")
    for seed in range(first, first + count):
        print("seed", seed, file=sys.stderr, flush=True)
        text = json.dumps(mutated(document, random.Random(seed)))
        rewrite(path, contents | {"session.json": text.encode()})
        try:
            session = Session.load(path, bystander.engine)
        except errors.FileError as err:
            told[type(err).__name__] += 1
        else:
            told["loaded"] += 1
            session.audit()
            go_on(session)
            session.close()
        bystander.check()
    bystander.go_on()
    print(json.dumps(told))


if __name__ == "__main__":
    fuzz(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
