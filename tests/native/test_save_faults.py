"""Files that are damaged, that lie, or that cannot be written: refused with the reason, and nothing has changed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import stat
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import SETTINGS, Bystander, Document, column, members, rewrite, rich

from edgekv import Engine, Model, Sampling, Session, Settings, errors
from edgekv.store import Stored
from helpers import ctrl_c_at, look, places_in, python, some_tokens

TinyPath = Callable[..., Path]
KINDS = ("llama", "gemma3", "yarn", "mrope", "mamba", "lfm2")
HERE = Path(__file__).resolve().parent
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="POSIX")
REFUSED = (errors.NotEdgekvFile, errors.DamagedFile)


@pytest.fixture(scope="module")
def saved(tiny_path: TinyPath, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``saved(kind)``: the file of a session that holds everything."""
    folder = tmp_path_factory.mktemp("saved")

    def path(kind: str) -> Path:
        file = folder / f"{kind}.kv"
        if not file.exists():
            with Session(tiny_path(kind), settings=SETTINGS) as session:
                rich(session).save(file)
        return file

    return path


@pytest.fixture(scope="module")
def bystanders(tiny_path: TinyPath) -> Iterator[Callable[[str], Bystander]]:
    made: dict[str, Bystander] = {}

    def bystander(kind: str) -> Bystander:
        if kind not in made:
            made[kind] = Bystander(Model(tiny_path(kind)))
        return made[kind]

    yield bystander
    for one in made.values():
        one.close()


@pytest.fixture
def file(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the llama's file, to be damaged."""
    path = tmp_path / "damaged.kv"
    path.write_bytes(saved("llama").read_bytes())
    return path


@pytest.fixture
def bystander(bystanders: Callable[[str], Bystander]) -> Iterator[Bystander]:
    """The llama's."""
    yield bystanders("llama")
    bystanders("llama").check()


@pytest.fixture
def session(tiny_path: TinyPath) -> Iterator[Session]:
    with Session(tiny_path(), settings=SETTINGS) as session:
        yield rich(session)


def edited(path: Path, change: Callable[[Document], object], member: str = "session.json") -> Path:
    """The file, whose JSON says something else, with a right checksum."""
    contents = members(path)
    document = json.loads(contents[member])
    change(document)
    return rewrite(path, contents | {member: json.dumps(document).encode()})


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_truncated(saved: Callable[[str], Path], bystanders: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "cut.kv"
    path.write_bytes(saved(kind).read_bytes())
    size = path.stat().st_size
    lengths = {*range(0, 100, 9), *range(size - 200, size, 9), size - 1, *random.Random(0).sample(range(size), 40)}
    for length in sorted(lengths, reverse=True):
        os.truncate(path, length)
        with pytest.raises(REFUSED, match=r"cut\.kv"):
            Session.load(path, bystanders(kind).engine)
    bystanders(kind).go_on()


def regions(path: Path) -> Iterator[tuple[int, int]]:
    """[begin, end) of every local header, member, and of what stands behind the last."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        end = 0
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            begin = info.header_offset + 30 + sum(np.frombuffer(file.read(4), "<u2").tolist())
            yield info.header_offset, begin
            end = begin + info.file_size
            yield begin, end
        yield end, path.stat().st_size


def flips(path: Path) -> Iterator[tuple[int, int]]:
    """(byte, bit): every other byte that is none of a member's, ten of each member."""
    rng = random.Random(1)
    for number, (begin, end) in enumerate(regions(path)):
        is_member = number % 2 == 1
        places = rng.sample(range(begin, end), min(10, end - begin)) if is_member else range(begin, end, 2)
        yield from ((at, rng.randrange(8)) for at in places)


@POSIX
def test_a_flipped_bit_anywhere(file: Path, bystander: Bystander) -> None:
    data, count = file.read_bytes(), 0
    with file.open("r+b", buffering=0) as raw:
        for at, bit in flips(file):
            os.pwrite(raw.fileno(), bytes([data[at] ^ 1 << bit]), at)
            with pytest.raises(errors.DamagedFile, match="bytes of it were changed"):
                Session.load(file, bystander.engine)
            os.pwrite(raw.fileno(), data[at : at + 1], at)
            count += 1
    assert count > 500
    Session.load(file, bystander.engine).close()


def test_truncated_while_it_is_loaded(file: Path, bystander: Bystander) -> None:
    """What was checked first is checked again when it is read."""
    for keep in (0, 12_000):
        data = file.read_bytes()
        with pytest.raises(errors.DamagedFile, match="was changed"):
            Session.load(file, bystander.engine, progress=lambda _done, _all, keep=keep: os.truncate(file, keep))
        bystander.check()
        file.write_bytes(data)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_load_that_is_stopped(file: Path, bystander: Bystander, error: type[BaseException]) -> None:
    heard: list[int] = []

    def stop(done: int, total: int) -> None:
        heard.append(done)
        if done > total / 2:
            raise error

    with pytest.raises(error):
        Session.load(file, bystander.engine, progress=stop)
    assert len(heard) > 3
    bystander.go_on()
    with Session.load(file, bystander.engine) as session:
        session.audit()


# ---- a sound file that does not fit ---------------------------------------------------------------------------------

OTHER_SETTINGS = {
    "kv_type": {"kv_type": "q8_0"},
    "flash_attention": {"flash_attention": False},
    "rope_freq_base": {"rope_freq_base": 5000.0},
    "rope_freq_scale": {"rope_freq_scale": 0.5},
}


@pytest.mark.parametrize(
    ("kind", "name"), [*(("llama", name) for name in OTHER_SETTINGS), ("gemma3", "kv_type"), ("mamba", "kv_type")]
)
def test_in_another_kind_of_cache(tiny_path: TinyPath, saved: Any, kind: str, name: str) -> None:
    settings = replace(SETTINGS, **OTHER_SETTINGS[name])
    with Model(tiny_path(kind)) as model:
        bystander = Bystander(model, settings)
        with pytest.raises(errors.WrongFile, match=rf"was written with {name}=.*, here it is .*; open with"):
            Session.load(saved(kind), bystander.engine)
        bystander.go_on()
        bystander.close()
        with pytest.raises(errors.WrongFile, match=name):
            Session.load(saved(kind), model, settings=settings)


def test_on_another_model(tiny_path: TinyPath, file: Path, bystanders: Any) -> None:
    with Model(tiny_path(seed=1)) as model:
        bystander = Bystander(model)
        with pytest.raises(errors.WrongFile, match=r"of another model: llama-0\.gguf .*, and this is llama-1\.gguf"):
            Session.load(file, bystander.engine)
        bystander.go_on()
        bystander.close()
    for kind in KINDS[1:]:
        with pytest.raises(errors.WrongFile, match="of another model"):
            Session.load(file, bystanders(kind).engine)
        bystanders(kind).go_on()


def test_where_there_is_no_room(tiny_path: TinyPath, saved: Callable[[str], Path]) -> None:
    with Model(tiny_path()) as model:
        bystander = Bystander(model, replace(SETTINGS, n_ctx=256))
        bystander.session.append(some_tokens(bystander.engine.cells_free - 100))
        bystander.before = bystander.now()
        with pytest.raises(errors.ContextFull, match=r"takes \d+ cells and 100 are free; open it with a larger n_ctx"):
            Session.load(saved("llama"), bystander.engine)
        bystander.check()
        forks = [bystander.session.fork() for _ in range(2)]
        with pytest.raises(errors.UsageError, match="opened for 3 sessions"):
            Session.load(saved("llama"), bystander.engine)
        for fork in forks:
            fork.close()
        bystander.check()
        bystander.close()


def test_fewer_archives(tiny_path: TinyPath, tmp_path: Path) -> None:
    path = tmp_path / "archives.kv"
    with Session(tiny_path("yarn"), settings=SETTINGS) as session:
        session.append(some_tokens(40))
        for _ in range(3):  # at the same positions, and nothing can shift
            session.mask((30, 40) if len(session.tokens) == 40 else (len(session.tokens) - 10, len(session.tokens)))
            session.append(some_tokens(10))
        session.save(path)
    with Model(tiny_path("yarn")) as model:
        bystander = Bystander(model, replace(SETTINGS, n_archives=1))
        with pytest.raises(errors.WrongFile, match="uses 3 archive sequences; open it with n_archives=3 or more"):
            Session.load(path, bystander.engine)
        bystander.go_on()
        bystander.close()


def manifest_of(path: Path, change: Callable[[Document], object]) -> Path:
    return edited(path, change, "manifest.json")


MANIFESTS: dict[str, tuple[Callable[[Document], object], type[errors.FileError], str]] = {
    "newer": (lambda m: m.update(format=2), errors.WrongFile, "by a newer edgekv: format 2.*update edgekv"),
    "much newer": (lambda m: (m.clear(), m.update(format=99, kind="x")), errors.WrongFile, "by a newer edgekv"),
    "no format": (lambda m: m.pop("format"), errors.DamagedFile, "missing required field `format`"),
    "format 0": (lambda m: m.update(format=0), errors.DamagedFile, "no edgekv writes"),
    "format -1": (lambda m: m.update(format=-1), errors.DamagedFile, "no edgekv writes"),
    "format 1.5": (lambda m: m.update(format=1.5), errors.DamagedFile, "not as edgekv writes it"),
    "another kind": (lambda m: m.update(kind="banana"), errors.DamagedFile, "no edgekv writes a 'banana'"),
    "a module": (lambda m: m.update(kind="module"), errors.WrongFile, "is a module.*session.attach takes it"),
    "no session": (lambda m: m.update(session=None), errors.DamagedFile, "has no session in its manifest"),
    "no cache": (lambda m: m.pop("cache"), errors.DamagedFile, "missing required field `cache`"),
    "an older one": (lambda m: m["cache"].pop("flash_attention"), errors.DamagedFile, "missing required field"),
    "a list": (lambda m: m.update(model=[1]), errors.DamagedFile, "not as edgekv writes it"),
    "another model": (lambda m: m["model"].update(fingerprint="0" * 32), errors.WrongFile, "of another model"),
    "no fingerprint": (lambda m: m["model"].update(fingerprint=""), errors.WrongFile, "of another model"),
    "a type": (lambda m: m["cache"].update(kv_type="../x"), errors.WrongFile, "kv_type='../x'"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_does_not_fit(file: Path, bystander: Bystander, name: str) -> None:
    change, error, why = MANIFESTS[name]
    with pytest.raises(error, match=why):
        Session.load(manifest_of(file, change), bystander.engine)


NUMBERS = [-1, 0, 2**31 - 1, 2**31, 2**40, 2**63]


@pytest.mark.parametrize("name", ["n_ctx", "n_batch", "n_sessions", "n_archives"])
def test_contexts_that_cannot_be(file: Path, tiny_path: TinyPath, name: str) -> None:
    for number in NUMBERS:
        manifest_of(file, lambda m, number=number: m["session"]["context"].update({name: number}))
        if name == "n_batch" and 0 < number < 2**31:
            Session.load(file, tiny_path()).close()
            continue
        with pytest.raises((errors.FileError, errors.UsageError, errors.TooLarge)):
            Session.load(file, tiny_path())


@POSIX
def test_where_the_model_is_said_to_be(file: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "gone.gguf", tmp_path / "fifo", "/dev/zero", "/dev/stdin", tmp_path, file, "x" * 5000, ""):
        manifest_of(file, lambda m, path=path: m["model"].update(path=str(path)))
        with pytest.raises(errors.ModelError):
            Session.load(file)


def test_what_is_no_session_file(tiny_path: TinyPath, tmp_path: Path, bystander: Bystander) -> None:
    (tmp_path / "empty").touch()
    for path in (tiny_path(), tmp_path / "empty", HERE / "hostile.py"):
        with pytest.raises(errors.NotEdgekvFile, match="neither a session file nor a KV module"):
            Session.load(path, bystander.engine)
    for path in (tmp_path, tmp_path / "gone", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(errors.FileError):
            Session.load(path, bystander.engine)


def test_a_session_file_is_no_model(file: Path) -> None:
    with pytest.raises(errors.NotGGUF, match=r"is a session file .* not a model: Session\.load takes"):
        Model(file)


# ---- JSON that is valid, and cannot be ------------------------------------------------------------------------------

Change = Callable[[Document], object]


def put(name: str, at: int, value: int) -> Change:
    """A column of the table says something else in one place."""

    def change(document: Document) -> None:
        def put_one(array: Any) -> None:
            array[at] = value

        column(document if name in ("ids", "index_of") else document["table"], name, put_one)

    return change


def cut(name: str, count: int) -> Change:
    return lambda d: column(d if name in ("ids", "index_of") else d["table"], name, lambda array: array[:count])


def first(of: str, /, **values: object) -> Change:
    """The first of a list says something else."""
    return lambda d: d[of][0].update(values)


def in_undo(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda d: d["undo"][0]["runs"][0].update({name: change(d["undo"][0]["runs"][0][name])})


ROWS = {"visible": 3, "masked": 38, "parked": 68, "evicted": 88}  # of the llama's session

CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "a position off": (put("pos", ROWS["visible"], 7), "out of order"),
    "a position below": (put("pos", ROWS["visible"], -7), "no position"),
    "a masked position off": (put("pos", ROWS["masked"], 400), "cells are not those"),
    "a position of another": (put("pos", ROWS["masked"], 32), "cells are not those"),
    "a parked position off": (put("pos", ROWS["parked"], 300), "in no blob"),
    "state 5": (put("state", 3, 5), "no known state"),
    "state -1": (put("state", 3, -1), "no known state"),
    "visible, in an archive": (put("state", ROWS["masked"], 0), "visible token is in an archive"),
    "masked, in view": (put("state", ROWS["visible"], 1), "masked token is in no archive"),
    "evicted, with a cell": (put("state", ROWS["visible"], 3), "too many"),
    "evicted, shown": (put("state", ROWS["evicted"], 0), "out of order|too many|cells are not those"),
    "parked, not in a blob": (put("state", ROWS["evicted"], 2), "in no blob"),
    "parked, shown": (put("state", ROWS["parked"], 0), "out of order|too many"),
    "sequence 99": (put("seq", 3, 99), "none of its session's"),
    "sequence -1": (put("seq", 3, -1), "none of its session's"),
    "a masked one in another archive": (put("seq", ROWS["masked"], 2), "cells are not those"),
    "token 285": (put("ids", 3, 285), "outside the vocabulary"),
    "token -1": (put("ids", 3, -1), "outside the vocabulary"),
    "fewer tokens": (cut("ids", -1), "not of one length"),
    "no tokens": (cut("ids", 0), "not there|not of one length"),
    **{f"fewer {name}": (cut(name, -1), "not of one length") for name in ("pos", "state", "seq", "reserved", "blob")},
    "fewer indexes": (cut("index_of", -1), "not of one length"),
    "an index twice": (put("index_of", 3, 4), "two tokens have one index"),
    "an index beyond": (put("index_of", 3, 2**62), "two tokens have one index"),
    "an index below": (put("index_of", 3, -1), "two tokens have one index"),
    "blob 7": (put("blob", ROWS["parked"], 7), "in no blob"),
    "blob -1": (put("blob", ROWS["parked"], -1), "in no blob"),
    "no blobs": (lambda d: d.update(blobs=[]), "in no blob"),
    "a blob twice": (lambda d: d["blobs"].append(d["blobs"][0]), "two blobs have one number"),
    "a shorter blob": (lambda d: first("blobs", p1=d["blobs"][0]["p1"] - 1)(d), "in no blob"),
    "a longer blob": (lambda d: first("blobs", p1=d["blobs"][0]["p1"] + 1)(d), "not those of positions"),
    "an endless blob": (first("blobs", p1=2**31 - 2), "a blob is nowhere"),
    "a blob beyond": (first("blobs", p1=2**62), "a blob is nowhere"),
    "a blob below": (first("blobs", p0=-5), "a blob is nowhere"),
    "a blob of its own": (lambda d: d["blobs"].append({"number": 9, "p0": 0, "p1": 4}), "has no parked/9"),
    "no slices": (lambda d: d.update(cells=[]), "too few"),
    "a slice less": (lambda d: d["cells"].pop(), "too few"),
    "a slice twice": (lambda d: d["cells"].append(d["cells"][0]), "too many"),
    "slices that overlap": (lambda d: d["cells"][1].update(p0=d["cells"][0]["p0"], p1=d["cells"][0]["p1"]), "cell"),
    "slices swapped": (lambda d: d["cells"].insert(0, d["cells"].pop(3)), "not those of positions"),
    "a slice of an archive": (first("cells", number=1), "cells are not those"),
    "slice -1": (first("cells", number=-1), "a slice is nowhere"),
    "a slice backwards": (first("cells", p0=9, p1=3), "a slice is nowhere"),
    "an endless slice": (first("cells", p0=0, p1=2**31 - 2), "too many"),
    "a slice beyond": (first("cells", p0=2**63, p1=2**63 + 1), "a slice is nowhere"),
    "endless slices": (lambda d: d.update(cells=[{"number": 0, "p0": 0, "p1": 110}] * 100_000), "too many"),
    "a span beyond": (first("spans", stop=10_000), "outside the transcript"),
    "a span below": (first("spans", start=-1), "outside the transcript"),
    "a span backwards": (first("spans", start=9, stop=3), "outside the transcript"),
    "a span beyond 64 bits": (first("spans", stop=2**64), "not as edgekv writes it|outside the transcript"),
    "a name twice": (first("spans", name="tail"), "'tail' exists"),
    **{
        f"named {name!r}": (first("spans", name=name), "cannot name a span") for name in ("*", "", " ", "role:x", "a[b")
    },
    "a span without a name": (lambda d: d["spans"][0].pop("name"), "missing required field"),
    "a name of another type": (first("spans", name=5), "not as edgekv writes it"),
    "computed beyond": (lambda d: d["epochs"][0].update(computed=[[0, 10**6]]), "outside the transcript"),
    "computed below": (lambda d: d["epochs"][0].update(computed=[[-3, 2]]), "outside the transcript"),
    "hidden beyond": (lambda d: d["epochs"][0].update(hidden=[[0, 10**6]]), "outside the transcript"),
    "hidden out of order": (lambda d: d["epochs"][0].update(hidden=[[5, 9], [1, 3]]), "out of order"),
    "hidden twice": (lambda d: d["epochs"][0].update(hidden=[[1, 9], [5, 12]]), "out of order"),
    "a gap beyond": (lambda d: d["epochs"][0].update(gap=10**6), "gap lies outside"),
    "a view beyond": (lambda d: d.update(next_view=[[0, 10**6]]), "outside the transcript"),
    "logits of no token": (lambda d: d.update(original=[10**6, []]), "logits wait for no token"),
    "a first reading beyond": (first("originals", row=10**6), "first reading is nowhere"),
    "a first reading in view": (first("originals", seq=0), "first reading is nowhere"),
    "a first reading in no archive": (first("originals", seq=77), "first reading is nowhere"),
    "a first reading below": (first("originals", pos=-1), "first reading is nowhere"),
    "a first reading of an evicted one": (first("originals", row=ROWS["evicted"]), "first reading is nowhere"),
    "a first reading elsewhere": (first("originals", pos=300), "cells are not those"),
    "two first readings": (lambda d: d["originals"].append(d["originals"][0]), "two first readings"),
    "undo beyond": (in_undo("stop", lambda a: a + 10**6), "not there"),
    "undo below": (in_undo("start", lambda a: a - 10**6), "not there"),
    "undo of none": (in_undo("stop", lambda a: a - 10**6), "not there"),
    "undo of all, and again": (lambda d: d["undo"][0].update(runs=d["undo"][0]["runs"] * 1000), "a token twice"),
    "undo without a receipt": (first("undo", number=10**6), "no receipt"),
    "undo with no receipt of its own": (first("undo", number=-1), "no receipt"),
    "undo to spans that are not there": (first("undo", spans=[[0, 10**6]]), "spans that are not there"),
    "undo to state 9": (in_undo("state", lambda a: a + 9), "no known state"),
    "undo to a span beyond": (first("former_spans", stop=10**6), "outside the transcript"),
    "a verb nobody has": (first("receipts", verb="explode"), "a receipt of 'explode'"),
    "a gap nobody has": (first("receipts", gap="wide"), "a receipt of 'wide'"),
    "a bias that is no number": (lambda d: d["sampling"].update(logit_bias=[[5, "much"]]), "a bias is no number"),
    "a temperature below": (lambda d: d["sampling"]["sampling"].update(temperature=-1), "temperature must be"),
    "a seed beyond": (lambda d: d["sampling"]["sampling"].update(seed=2**40), "seed must be"),
    "a word for yes": (lambda d: d.update(restarts="yes"), "not as edgekv writes it"),
    "no table": (lambda d: d.update(table=None), "not as edgekv writes it"),
    "a list for a table": (lambda d: d.update(table=[1, 2]), "not as edgekv writes it"),
    "no base64": (lambda d: d.update(ids="%%%"), "not as edgekv writes it"),
    "half a token": (lambda d: d.update(ids="AAAAAAA="), "not there|not of one length"),
    "a float": (first("cells", p0=0.5), "not as edgekv writes it"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_cannot_be(file: Path, bystander: Bystander, name: str) -> None:
    change, why = CONTRADICTIONS[name]
    with pytest.raises(errors.DamagedFile, match=why):
        Session.load(edited(file, change), bystander.engine).close()


def test_more_archives_than_there_are(file: Path, bystander: Bystander) -> None:
    with pytest.raises(errors.WrongFile, match="uses 99 archive sequences"):
        Session.load(edited(file, first("cells", number=99)), bystander.engine)


def test_every_field_is_needed(file: Path, bystander: Bystander) -> None:
    """As in a file of an older edgekv, whose number was not counted up."""
    contents = members(file)
    document = json.loads(contents["session.json"])
    needed = [key for key in document if key != "memo"]  # of a file from before there were memos, see below
    for path in [(key,) for key in needed] + [("table", key) for key in document["table"]]:
        changed = json.loads(contents["session.json"])
        (changed if len(path) == 1 else changed["table"]).pop(path[-1])
        rewrite(file, contents | {"session.json": json.dumps(changed).encode()})
        with pytest.raises(errors.DamagedFile, match=f"missing required field `{path[-1]}`"):
            Session.load(file, bystander.engine)


def test_a_file_from_before_there_were_memos(file: Path, bystander: Bystander) -> None:
    """It has none, and loads."""
    contents = members(file)
    document = json.loads(contents["session.json"])
    assert document.pop("memo") == ""
    rewrite(file, contents | {"session.json": json.dumps(document).encode()})
    with Session.load(file, bystander.engine) as session:
        assert session.memo == ""


DEEP = b"[" * 100_000 + b"]" * 100_000
NO_JSON = {
    "empty": lambda _: b"",
    "no object": lambda _: b"[1]",
    "cut": lambda text: text[:-1],
    "two": lambda text: text * 2,
    "NaN": lambda text: text.replace(b'"gap":null', b'"gap":NaN', 1),
    "infinity": lambda text: text.replace(b'"ms":', b'"ms":Infinity,"x":', 1),
    "a float beyond": lambda text: text.replace(b'"ms":', b'"ms":1e999,"x":', 1),
    "a number of a million digits": lambda text: text.replace(b'"gap":null', b'"gap":' + b"9" * 10**6, 1),
    "no UTF-8": lambda text: text.replace(b'"name":"head"', b'"name":"h\xff"', 1),
    "half a character": lambda text: text.replace(b'"name":"head"', b'"name":"\\ud800"', 1),
    "deep": lambda _: DEEP,
    "deep in what nobody knows": lambda text: text[:-1] + b',"x":' + DEEP + b"}",
    "deep where a list is": lambda text: text.replace(b'"epochs":[', b'"epochs":[' + DEEP + b",", 1),
    "binary": lambda _: os.urandom(1000),
}


#: What changes nothing in a manifest, which has no such words.
IN_SESSIONS = {"NaN", "infinity", "a float beyond", "a number of a million digits", "deep where a list is"}


@pytest.mark.parametrize(
    ("member", "name"),
    [
        *(("session.json", name) for name in NO_JSON),
        *(("manifest.json", name) for name in sorted(NO_JSON.keys() - IN_SESSIONS)),
    ],
)
def test_no_json_of_edgekv_s(file: Path, bystander: Bystander, name: str, member: str) -> None:
    contents = members(file)
    text = NO_JSON[name](contents[member])
    assert text != contents[member]
    rewrite(file, contents | {member: text})
    with pytest.raises(errors.DamagedFile, match="not as edgekv writes it"):
        Session.load(file, bystander.engine)


FUZZ = "import runpy, sys; sys.argv[0] = sys.argv.pop(1); runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.mark.parametrize(
    ("kind", "count"),
    [("llama", 60), ("lfm2", 15), *(pytest.param(kind, 200, marks=pytest.mark.slow) for kind in KINDS)],
)
def test_random_mutations(tiny_path: TinyPath, saved: Any, kind: str, count: int) -> None:
    """Refused, or loaded and gone on with in a way that edgekv knows; the process lives, and others notice nothing."""
    script = f"import sys; sys.path.insert(0, {str(HERE)!r})\n{FUZZ}"
    done = python(script, HERE / "hostile.py", tiny_path(kind), saved(kind), 0, str(count), timeout=2000)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert sum(told.values()) == count
    assert told["DamagedFile"] > count / 3
    assert told["loaded"] > count / 6


# ---- K and V that are others ----------------------------------------------------------------------------------------


def change_member(path: Path, name: str, data: bytes | None) -> Path:
    contents = members(path)
    if data is None:
        del contents[name]
    else:
        contents[name] = data
    return rewrite(path, contents)


def with_position(data: bytes, value: int) -> bytes:
    """The first cell says another position (see state_blob)."""
    return data[:16] + value.to_bytes(4, "little", signed=True) + data[20:]


BLOBS: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda _: None,
    "empty": lambda _: b"",
    "shortened": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\0",
    "position -7": lambda data: with_position(data, -7),
    "position 5000": lambda data: with_position(data, 5000),
    "two streams": lambda data: data[:8] + b"\2" + data[9:],
    "no cells": lambda data: data[:12] + bytes(4) + data[16:],
    "endless cells": lambda data: data[:12] + b"\xff" * 4 + data[16:],
    "noise": lambda data: np.random.RandomState(0).bytes(len(data)),
    "no numbers": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize(
    ("kind", "member"), [("llama", "cells/3"), ("llama", "parked/0"), ("gemma3", "cells/0"), ("mrope", "cells/0")]
)
@pytest.mark.parametrize("name", BLOBS)
def test_blobs_that_are_others(saved: Any, bystanders: Any, tmp_path: Path, kind: str, name: str, member: str) -> None:
    path = tmp_path / "blob.kv"
    path.write_bytes(saved(kind).read_bytes())
    with pytest.raises(errors.DamagedFile):
        Session.load(change_member(path, member, BLOBS[name](members(path)[member])), bystanders(kind).engine)
    bystanders(kind).go_on()


def test_blobs_swapped(file: Path, bystander: Bystander) -> None:
    contents = members(file)
    contents["cells/0"], contents["cells/1"] = contents["cells/1"], contents["cells/0"]
    with pytest.raises(errors.DamagedFile, match="not those of positions"):
        Session.load(rewrite(file, contents), bystander.engine)


@pytest.mark.parametrize(("kind", "other"), [("llama", "q8_0"), ("gemma3", "f32")])
def test_blobs_of_another_type(tiny_path: TinyPath, bystanders: Any, tmp_path: Path, kind: str, other: str) -> None:
    path = tmp_path / "other.kv"
    with Session(tiny_path(kind), settings=replace(SETTINGS, kv_type=other)) as session:
        rich(session).save(path)
    manifest_of(path, lambda m: m["cache"].update(kv_type="f16"))
    with pytest.raises(errors.EdgekvError):
        Session.load(path, bystanders(kind).engine)
    bystanders(kind).go_on()


def test_blobs_of_another_type_are_said_to_be_that(tiny_path: TinyPath, tmp_path: Path, bystander: Bystander) -> None:
    path = tmp_path / "other.kv"
    with Session(tiny_path(), settings=replace(SETTINGS, kv_type="f32")) as session:
        rich(session).save(path)
    manifest_of(path, lambda m: m["cache"].update(kv_type="f16"))
    with pytest.raises(errors.DamagedFile):
        Session.load(path, bystander.engine)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mrope"])
def test_a_blob_with_more_caches_than_the_model(tiny_path: TinyPath, saved: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "double.kv"
    path.write_bytes(saved(kind).read_bytes())
    data = members(path)["cells/0"]
    with Model(tiny_path(kind)) as model:
        bystander = Bystander(model)
        with pytest.raises(errors.DamagedFile):
            Session.load(change_member(path, "cells/0", data + data[8:]), bystander.engine)
        bystander.check()
        bystander.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "yarn"])
def test_rows_of_noise_are_loaded(saved: Any, bystanders: Any, tmp_path: Path, kind: str) -> None:
    """Their checksum is right, so they are what somebody wants; what they do is not defined, but harmless."""
    path = tmp_path / "noise.kv"
    path.write_bytes(saved(kind).read_bytes())
    contents = members(path)
    for name in [n for n in contents if n.startswith(("cells/", "parked/", "logits/"))]:
        data = contents[name]
        contents[name] = data[: len(data) // 2] + b"\xff\x7e" * (len(data) // 4) if "/0" in name else data
    contents["logits/next"] = np.full(len(contents["logits/next"]) // 4, np.nan, np.float32).tobytes()
    try:
        session = Session.load(rewrite(path, contents), bystanders(kind).engine)
    except errors.EdgekvError:  # the second half was not all rows
        return
    with session:
        session.audit()
        session.generate(3).finish()
        session.generate(3, sampling=Sampling(temperature=1.0, seed=1)).finish()
        session.undo()
        session.audit()
    bystanders(kind).go_on()


@pytest.mark.parametrize("name", ["logits/next", "logits/original"])
@pytest.mark.parametrize("size", [0, 1136, 1139, 4 * 10**6])
def test_logits_of_another_size(file: Path, bystander: Bystander, name: str, size: int) -> None:
    if name not in members(file):
        pytest.skip("the session has none")
    with pytest.raises(errors.DamagedFile, match=f"{name} is of another vocabulary"):
        Session.load(change_member(file, name, bytes(size)), bystander.engine)
    with pytest.raises(errors.DamagedFile, match=f"it has no {name}"):
        Session.load(change_member(file, name, None), bystander.engine)


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_states_that_are_others(saved: Any, bystanders: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state.kv"
    path.write_bytes(saved(kind).read_bytes())
    data = members(path)["state"]
    rng = random.Random(2)
    changed = [b"", data[:7], data[: len(data) // 2], data[:-1], rng.randbytes(len(data)), bytes(len(data)), data[::-1]]
    changed += [data[:at] + b"\xff" * 4 + data[at + 4 :] for at in (0, 4, 8, 12, 20, 24)]
    for state in changed:
        with contextlib.suppress(errors.EdgekvError):
            Session.load(change_member(path, "state", state), bystanders(kind).engine).close()
        bystanders(kind).check()
    with pytest.raises(errors.DamagedFile, match="it has no state"):
        Session.load(change_member(path, "state", None), bystanders(kind).engine)
    bystanders(kind).go_on()


def test_a_state_with_a_cell_nowhere(tiny_path: TinyPath, saved: Any, tmp_path: Path) -> None:
    path = tmp_path / "state.kv"
    path.write_bytes(saved("lfm2").read_bytes())
    data = members(path)["state"]
    with Model(tiny_path("lfm2")) as model:
        bystander = Bystander(model)
        with contextlib.suppress(errors.DamagedFile):
            Session.load(change_member(path, "state", with_position(data, -7)), bystander.engine).close()
        leaked = bystander.now() != bystander.before
        bystander.close()
    assert not leaked


# ---- what is saved can be loaded ------------------------------------------------------------------------------------


def test_numbers_of_numpy_s(session: Session, tmp_path: Path) -> None:
    session.sampling = Sampling(
        np.float32(0.5), int(np.int64(3)), np.float64(0.5), seed=np.int64(7), logit_bias={np.int64(3): np.float32(1)}
    )
    session.save(tmp_path / "numpy.kv")
    with Session.load(tmp_path / "numpy.kv") as other:
        assert other.sampling == session.sampling


def test_what_could_not_be_loaded_is_not_saved(session: Session, tmp_path: Path) -> None:
    session.save(tmp_path / "file.kv")
    before = (tmp_path / "file.kv").read_bytes()
    session.sampling = Sampling(grammar="\ud800")  # what msgspec would write, and not read
    with pytest.raises(errors.UsageError, match="would not be readable"):
        session.save(tmp_path / "file.kv")
    session.sampling = Sampling()
    session.append("x", role="\ud800")
    with pytest.raises(errors.UsageError, match="would not be readable"):
        session.save(tmp_path / "file.kv")
    assert (tmp_path / "file.kv").read_bytes() == before
    assert os.listdir(tmp_path) == ["file.kv"]


@POSIX
def test_a_model_whose_path_is_no_text(tiny_path: TinyPath, tmp_path: Path) -> None:
    model = tmp_path / os.fsdecode(b"m\xff.gguf")
    model.write_bytes(tiny_path().read_bytes())
    with Session(model, settings=SETTINGS) as session:
        session.append("abc")
        session.save(tmp_path / os.fsdecode(b"s\xff.kv"))
    with pytest.raises(errors.ModelNotFound):
        Session.load(tmp_path / os.fsdecode(b"s\xff.kv"))
    with Session.load(tmp_path / os.fsdecode(b"s\xff.kv"), model) as session:
        assert len(session.tokens) == 4


# ---- saving where it cannot be --------------------------------------------------------------------------------------


def assert_goes_on(session: Session, before: object) -> None:
    assert look(session) == before
    with session.fork() as fork:
        fork.append("and on")
        fork.generate(2).finish()
        fork.audit()


@POSIX
def test_to_what_is_no_file(session: Session, tmp_path: Path) -> None:
    before = look(session)
    for path in (
        tmp_path,
        tmp_path / "missing/x",
        "/dev/null",
        "/dev/full",
        "/proc/x",
        "a\0b",
        "x" * 999,
    ):
        with pytest.raises(errors.FileError):
            session.save(path)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode) and stat.S_ISCHR(os.stat("/dev/full").st_mode)
    assert os.listdir(tmp_path) == []
    assert_goes_on(session, before)


@pytest.mark.parametrize(
    ("error", "when"),
    [(KeyboardInterrupt, 0.0), (KeyboardInterrupt, 0.5), (KeyboardInterrupt, 1.0), (OSError, 0.5), (SystemExit, 0.5)],
)
def test_stopped_half_way(session: Session, tmp_path: Path, error: type[BaseException], when: float) -> None:
    path = tmp_path / "session.kv"
    session.save(path)
    before, content = look(session), path.read_bytes()

    def stop(done: int, total: int) -> None:
        if done >= when * total:
            raise error

    session.progress = stop
    with pytest.raises(errors.FileError if error is OSError else error):
        session.save(path)
    session.progress = None
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["session.kv"]
    assert_goes_on(session, before)
    Session.load(path, session.engine).close()
    session.save(path)


@POSIX
@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_ctrl_c(tiny_path: TinyPath, tmp_path: Path, kind: str) -> None:
    """At whatever line it comes, a save is whole or has not been."""
    path = tmp_path / "session.kv"
    with Session(tiny_path(kind), settings=SETTINGS) as session:
        rich(session).save(path)
        before, names = look(session), set(members(path))
        for line in places_in(lambda: session.save(path), 25):
            with pytest.raises(KeyboardInterrupt), ctrl_c_at(line):
                session.save(path)
            assert look(session) == before
            assert set(members(path)) == names
            assert os.listdir(tmp_path) == ["session.kv"]
        assert_goes_on(session, before)


@POSIX
def test_verbs_from_a_progress_callback(session: Session, tmp_path: Path) -> None:
    tried: list[object] = []

    def meddle(_done: int, _total: int) -> None:
        for verb in (session.audit, session.undo, session.close, lambda: session.save(tmp_path / "b.kv")):
            with pytest.raises(errors.BadState, match="still reading"):
                verb()
            tried.append(verb)

    session.progress = meddle
    session.save(tmp_path / "a.kv")
    with Session.load(tmp_path / "a.kv", session.engine, progress=meddle):
        pass
    assert len(tried) > 8
    assert os.listdir(tmp_path) == ["a.kv"]


SAVE = """
import os, sys
from pathlib import Path
from edgekv import Session, errors
from helpers import some_tokens
path, model = Path(sys.argv[1]), sys.argv[2]
with Session(model, n_ctx=512, n_threads=1) as session:
    session.append(some_tokens(30))
    session.save(path)
    session.append(some_tokens(300), name="more")
    {limit}
    for _ in range(2):
        try: session.save(path)
        except errors.FileError as err: print(err)
    session.audit()
    {lift}
    assert os.listdir(path.parent) == [path.name], os.listdir(path.parent)
    with Session.load(path, session.engine) as other:
        assert len(other.tokens) == 30
    session.append("on")
    session.save(path)
"""


@POSIX
def test_a_limit_on_the_size_of_files(tiny_path: TinyPath, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))"
    lift = "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))"
    done = python(SAVE.format(limit=limit, lift=lift), tmp_path / "session.kv", tiny_path())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("File too large; what was there is unchanged") == 2


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk(tiny_path: TinyPath, tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(tmp_path), b"tmpfs", 0, b"size=128k"):
        pytest.skip("no mount here")
    try:
        done = python(SAVE.format(limit="", lift=""), tmp_path / "session.kv", tiny_path())
    finally:
        libc.umount2(os.fsencode(tmp_path), 2)
    assert done.stdout.count("No space left on device; what was there is unchanged") == 2, done.stderr
    assert done.stderr.strip().endswith("what was there is unchanged")  # the last one finds no room either


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become nobody")
def test_a_folder_one_may_not_write_to(tiny_path: TinyPath, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[: len(tmp_path.parents) - 2], tiny_path().parent):
        folder.chmod(folder.stat().st_mode | 0o055)
    drop = "os.setgid(65534); os.setuid(65534); os.umask(0)"
    done = python(
        SAVE.format(limit=drop, lift="print(oct(path.stat().st_mode)); raise SystemExit"),
        tmp_path / "session.kv",
        tiny_path(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Permission denied; what was there is unchanged") == 2
    assert "0o100600" in done.stdout


@POSIX
def test_a_link_leads_to_the_file(session: Session, tmp_path: Path) -> None:
    target, link = tmp_path / "target.kv", tmp_path / "link.kv"
    link.symlink_to("target.kv")
    for _ in range(2):
        session.save(link)
        assert link.is_symlink() and not target.is_symlink()
        assert target.stat().st_mode & 0o777 == 0o600
    with Session.load(link, session.engine) as other:
        assert np.array_equal(other.tokens, session.tokens)


@pytest.mark.parametrize(("kind", "kv_type"), [("llama", "f16"), ("gemma3", "q8_0"), ("mrope", "f32"), ("lfm2", "f16")])
def test_its_size(tiny_path: TinyPath, tmp_path: Path, kind: str, kv_type: str) -> None:
    """At most the cells, the logits, 64 KB, 64 bytes a token and 1 KB an edit."""
    with Session(tiny_path(kind), settings=replace(SETTINGS, kv_type=kv_type, n_ctx=2048)) as session:
        session.append(some_tokens(1000))
        rich(session)
        for _ in range(40 if session.model.capabilities.mask else 0):
            session.mask("middle")
            session.unmask("middle")
        size = session.save(tmp_path / "session.kv")
        assert size == (tmp_path / "session.kv").stat().st_size
        stats, n_vocab = session.stats, session.model.n_vocab
        cells = session.engine.kv_bytes(stats.cells_used) + stats.parked_bytes
        assert size <= cells + 2 * 4 * n_vocab + (64 << 10) + 64 * len(session.tokens) + 1000 * len(session.history)


# ---- several at once ------------------------------------------------------------------------------------------------


def test_two_threads_save_to_one_path(tiny_path: TinyPath, tmp_path: Path) -> None:
    path, wrong = tmp_path / "session.kv", list[BaseException]()
    with Model(tiny_path()) as model:
        sessions = [Session(model, settings=SETTINGS) for _ in range(2)]
        for size, session in zip((50, 200), sessions, strict=True):
            session.append(some_tokens(size))

        def save(session: Session) -> None:
            try:
                for _ in range(5):
                    session.save(path)
                    with Stored(path) as stored:
                        stored.read("session.json")
            except BaseException as err:
                wrong.append(err)

        threads = [threading.Thread(target=save, args=(session,)) for session in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for session in sessions:
            session.close()
        assert wrong == []
        assert os.listdir(tmp_path) == ["session.kv"]
        with Session.load(path, model) as session:
            session.audit()
            assert len(session.tokens) in (50, 200)


MANY = """
import sys
from edgekv import Session
from helpers import some_tokens
with Session(sys.argv[2], n_ctx=512, n_threads=1) as session:
    session.append(some_tokens(int(sys.argv[3])))
    for _ in range(10): session.save(sys.argv[1])
"""


def test_two_processes_save_to_one_path(tiny_path: TinyPath, tmp_path: Path) -> None:
    path, done = tmp_path / "session.kv", list[Any]()
    save = [
        threading.Thread(target=lambda n=n: done.append(python(MANY, path, tiny_path(), str(n)))) for n in (50, 200)
    ]
    for thread in save:
        thread.start()
    with Model(tiny_path()) as model, Engine(model, Settings(n_ctx=512, n_threads=1)) as engine:
        seen = set()
        running = True
        while running:
            running = any(thread.is_alive() for thread in save)  # and once more when they have ended
            if path.exists():
                with Session.load(path, engine) as session:
                    session.audit()
                    seen.add(len(session.tokens))
    assert [d.stderr for d in done if d.returncode] == []
    assert seen and seen <= {50, 200}
    assert os.listdir(tmp_path) == ["session.kv"]
