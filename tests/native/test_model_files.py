"""The files of a model: split ones, those that are no model, those that change, and what each is called."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import compress, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgekv
from edgekv import Model, Session, Settings, errors, gguf, inspection, tiny
from edgekv._llama import lib
from edgekv.tiny.gguf import encode

TinyPath = Callable[..., Path]
SETTINGS = Settings(n_ctx=256, n_threads=1)


def split(
    folder: Path, sizes: tuple[int, ...], name: str = "m", *, seed: int = 0, kind: str = "llama", **more: Any
) -> Path:
    """A tiny model in parts of so many tensors each, the rest in the last; as gguf-split does it."""
    meta, tensors = tiny.content(kind, seed=seed)
    left, count = dict(tensors), len(sizes)
    for i, size in enumerate(sizes):
        taken = list(left)[: size if i < count - 1 else None]
        own: Any = {"split.no": np.uint16(i), "split.count": np.uint16(count)}
        own["split.tensors.count"] = np.int32(len(tensors))
        head = {**meta, **own, **more} if i == 0 else own
        part(folder, i, count, name).write_bytes(encode(head, {t: left.pop(t) for t in taken}))
    return part(folder, 0, count, name)


def part(folder: Path, number: int, count: int, name: str = "m") -> Path:
    return folder / f"{name}-{number + 1:05d}-of-{count:05d}.gguf"


def written(path: Path, kind: str = "llama", *, seed: int = 0, without: tuple[str, ...] = (), **more: Any) -> Path:
    """A tiny model with other metadata."""
    meta, tensors = tiny.content(kind, seed=seed)
    meta = {key: value for key, value in {**meta, **more}.items() if key not in without}
    path.write_bytes(encode(meta, tensors))
    return path


def greedy(source: Any) -> list[int]:
    with Session(source, settings=SETTINGS) as session:
        session.append("The pump at the north gate")
        return session.generate(8).finish().tokens


def fingerprint(path: Path) -> str:
    return gguf.open_model(path).fingerprint


# ---- split models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(5, 5, 0), (0, 7, 0), (0, 1, 1, 0), (20, 0)])
def test_a_split_model_is_the_whole_model(tiny_path: TinyPath, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    path, count = split(tmp_path, sizes), len(sizes)
    with Model(path) as model, Model(tiny_path("llama")) as whole:
        assert greedy(model) == greedy(whole)
        assert model.parts == tuple(part(tmp_path, i, count) for i in range(count))
        assert model.size == sum(p.stat().st_size for p in model.parts) > whole.size
        assert model.num_bytes >= model.size
        assert (model.n_params, model.name) == (whole.n_params, whole.name)
        assert model.fingerprint == whole.fingerprint  # the same K and V, wherever the weights lie
        assert model.estimate(256).weights == model.num_bytes
        facts = inspection.inspect(model)
        assert (facts.parts, facts.size) == (count, model.size)


def test_parts_that_lie_behind_links(tmp_path: Path) -> None:
    """As the cache of a hub keeps them: the names are those of the links."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir(), snapshot.mkdir()
    split(blobs, (3, 3, 0))
    for i in range(3):
        (snapshot / part(blobs, i, 3).name).symlink_to(part(blobs, i, 3).rename(blobs / f"{i:064x}"))
    saved = tmp_path / "s.kvs"
    with Session(part(snapshot, 0, 3), settings=SETTINGS) as session:
        session.append("abc")
        session.save(saved)
    with Session.load(saved) as session:  # finds its model by the name it was opened by
        assert session.model.path == part(snapshot, 0, 3)
        assert session.generate(2).finish().text is not None


def test_models_that_differ_in_a_later_part_only(tmp_path: Path) -> None:
    """Equal first parts: without the other parts, the session of one would load into the other."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    a, b = split(tmp_path / "a", (0, 4, 0)), split(tmp_path / "b", (0, 4, 0), seed=1)
    assert a.read_bytes() == b.read_bytes()
    assert fingerprint(a) != fingerprint(b)
    saved = tmp_path / "s.kvs"
    with Session(a, settings=SETTINGS) as session:
        session.append("abc")
        session.save(saved)
    with pytest.raises(errors.WrongFile, match="another model"):
        Session.load(saved, b)


def test_a_later_part_names_the_first(tmp_path: Path) -> None:
    first = split(tmp_path, (3, 3, 0))
    for i in (1, 2):
        with pytest.raises(errors.NotGenerative, match=rf"part {i + 1} of 3 .*give the first part, {first}"):
            Model(part(tmp_path, i, 3))


@pytest.mark.parametrize("given", [0, 2])
def test_a_missing_part_is_named(tmp_path: Path, given: int) -> None:
    split(tmp_path, (3, 3, 0))
    part(tmp_path, 1, 3).unlink()
    with pytest.raises(errors.ModelNotFound, match=r"m-00002-of-00003\.gguf must lie in the same folder"):
        Model(part(tmp_path, given, 3))


def test_a_part_under_another_name(tmp_path: Path) -> None:
    split(tmp_path, (3, 0)).rename(tmp_path / "renamed.gguf")
    with pytest.raises(errors.NotGenerative, match=r"part 1 of 2 .* must be NAME-00001-of-00002\.gguf"):
        Model(tmp_path / "renamed.gguf")


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    first = split(tmp_path, (3, 3, 0))
    second = part(tmp_path, 1, 3)
    kept = second.read_bytes()
    for content in (part(tmp_path, 2, 3).read_bytes(), encode({"split.no": 1}, {}), encode({}, {})):
        second.write_bytes(content)  # of another number; of a number in another type, where llama.cpp aborts; of none
        with pytest.raises(errors.DamagedModel, match=r"m-00002-of-00003\.gguf is not part 2 of m-00001"):
            Model(first)
    second.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(errors.DamagedModel):
        Model(first)
    second.write_bytes(b"no model")
    with pytest.raises(errors.NotGGUF, match="00002"):
        Model(first)
    second.write_bytes(encode({"split.no": np.uint16(1)}, {}))
    with pytest.raises(errors.DamagedModel, match="tensors"):
        Model(first)


def test_a_split_of_one(tmp_path: Path) -> None:
    path = written(tmp_path / "any.gguf", **{"split.no": np.uint16(0), "split.count": np.uint16(1)})
    with Model(path) as model:
        assert model.parts == (path,)


# ---- files that are no model ----------------------------------------------------------------------------------------

TENSOR = {"blk.0.attn_q.weight.lora_a": np.zeros((8, 8), np.float32)}


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (
            {
                "general.type": "adapter",
                "general.architecture": "llama",
                "adapter.type": "lora",
                "general.base_model.0.name": "Llama \x1b[31m 3",
            },
            r"is an adapter \(lora\).*made for \(Llama \ufffd\[31m 3\)",
        ),
        ({"general.architecture": "llama", "adapter.type": "lora"}, r"is an adapter \(lora\).*base model \(a llama"),
        ({"general.type": "mmproj", "general.architecture": "clip"}, r"is a multimodal projector"),
        ({"general.architecture": "clip", "clip.vision.block_count": 2}, r"is a multimodal projector"),
        ({"general.type": "imatrix", "imatrix.chunk_count": 3}, r"is an importance matrix"),
        (
            {"general.architecture": "controlvector", "controlvector.model_hint": "mistral"},
            r"is a control vector.*a mistral model",
        ),
        ({"general.architecture": "flux"}, r"no language model.*architecture flux"),
        ({}, r"no language model.*architecture not named"),
    ],
)
def test_other_files_say_what_they_are(tmp_path: Path, meta: Any, says: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(encode(meta, TENSOR))
    with pytest.raises(errors.NotGenerative, match=says) as raised:
        Model(path)
    assert str(path) in str(raised.value)


def test_a_vocabulary(tiny_path: TinyPath) -> None:
    with pytest.raises(errors.NotGenerative, match="a vocabulary but no model"):
        Model(tiny_path("vocab_only"))


def test_a_folder_of_that_name_and_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelError, match="cannot be read"):
        gguf.open_model(tmp_path)
    with pytest.raises(errors.ModelError, match="cannot be read"):
        gguf.open_model(tmp_path / "gone.gguf")


# ---- files that change ----------------------------------------------------------------------------------------------


def replace_(path: Path) -> None:
    written(path.with_suffix(".new"), seed=1)
    os.replace(path.with_suffix(".new"), path)


@pytest.mark.parametrize("change", [replace_, Path.unlink], ids=["replaced", "deleted"])
def test_what_is_open_goes_on_when_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    path, saved, module = tmp_path / "m.gguf", tmp_path / "s.kvs", tmp_path / "text.kvm"
    old, before = tmp_path / "old.gguf", greedy(written(path))
    os.link(written(old), tmp_path / "kept.gguf")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Model("m.gguf") as model:
        monkeypatch.chdir(tmp_path / "elsewhere")
        change(path)
        assert model.path == path
        assert greedy(model) == before  # a further session
        assert model.estimate(256).weights
        assert inspection.inspect(model, "200MB").size == old.stat().st_size
        edgekv.prefill("some text", module, model, settings=SETTINGS)
        with Session(model, memory_budget="100MB", settings=Settings(n_threads=1)) as session:
            session.append("The pump at the north gate")
            session.save(saved)
        assert model.fingerprint == fingerprint(old)
    with Session.load(saved, old) as session:  # they are of the weights that were loaded
        assert session.generate(8).finish().tokens == before
        session.attach(module)
    with pytest.raises((errors.WrongFile, errors.ModelNotFound)):
        Session.load(saved)


@pytest.mark.parametrize("change", ["replaced", "deleted", "longer", "part"])
def test_a_file_that_changes_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Between the header's reading and the end of llama.cpp's."""
    path = split(tmp_path, (4, 0))
    reading = gguf.open_model

    def and_then(given: Path) -> gguf.ModelFile:
        read = reading(given)
        if change == "replaced":
            os.replace(split(tmp_path, (4, 0), "new", seed=1), path)
        elif change == "deleted":
            path.unlink()
        elif change == "longer":
            with path.open("ab") as file:
                file.write(bytes(64))
        else:
            split(tmp_path, (4, 0), "new", seed=1)
            os.replace(part(tmp_path, 1, 2, "new"), part(tmp_path, 1, 2))
        return read

    monkeypatch.setattr(gguf, "open_model", and_then)
    with pytest.raises(errors.DamagedModel, match="changed while it was being opened"):
        Model(path)
    monkeypatch.undo()
    if change != "deleted":
        Model(path).close()  # it is whole again


# ---- names and fingerprints -----------------------------------------------------------------------------------------


def test_what_a_model_is_called(tmp_path: Path) -> None:
    def called(path: Path) -> tuple[str, str]:
        with Model(path) as model:
            return model.name, model.description

    path = tmp_path / "some-model.gguf"
    name, description = called(written(path, **{"general.name": "Some\x1b[2J\n Model"}))
    assert name == "Some\ufffd[2J\ufffd Model"
    assert description == f"{name}, 221k parameters, all F32"
    assert called(written(path, **{"general.name": "한국어 모델"}))[0] == "한국어 모델"
    assert len(called(written(path, **{"general.name": "x" * 5000}))[0]) == 80
    for nothing in ("", ".", " \n"):
        assert called(written(path, **{"general.name": nothing}))[0] == "some-model"
    assert called(written(path, without=("general.name",)))[0] == "some-model"


def test_what_leaves_k_v_and_logits_alone_leaves_the_fingerprint_alone(tiny_path: TinyPath, tmp_path: Path) -> None:
    known, path = fingerprint(tiny_path("llama")), tmp_path / "m.gguf"
    for more in (
        {"general.name": "another name"},
        {"tokenizer.chat_template": "{{ messages }}" * 100},
        {"tokenizer.chat_template.tool_use": "{{ tools }}"},
        {"general.license": "mit", "general.url": "https://example.org", "general.tags": ["a", "b"]},
        {"quantize.imatrix.file": "x.dat"},
    ):
        assert fingerprint(written(path, **more)) == known
    assert fingerprint(written(path, without=("tokenizer.chat_template", "general.name"))) == known
    meta, tensors = tiny.content("llama")
    path.write_bytes(encode(dict(reversed(meta.items())), dict(reversed(tensors.items()))))
    assert fingerprint(path) == known  # nor does the order in the file


def test_what_changes_k_v_or_logits_changes_the_fingerprint(tiny_path: TinyPath, tmp_path: Path) -> None:
    path, seen = tmp_path / "m.gguf", {fingerprint(tiny_path("llama"))}
    changes: list[dict[str, Any]] = [
        {"llama.rope.freq_base": 20000.0},
        {"llama.attention.head_count_kv": [2, 2]},
        {"tokenizer.ggml.add_bos_token": False},
        {"tokenizer.ggml.pre": "llama-bpe"},
        {"tokenizer.ggml.tokens": [*tiny.content("llama")[0]["tokenizer.ggml.tokens"][:-1], "other"]},  # type: ignore[index,list-item]
        {"llama.rope.scaling.type": "yarn"},
        {"llama.made.up": True},
    ]
    for more in changes:
        seen.add(fingerprint(written(path, **more)))
    meta, tensors = tiny.content("llama")
    for name in tensors:  # one bit of every tensor: so small a file is sampled whole
        changed = {**tensors, name: tensors[name].copy()}
        changed[name].view(np.uint32).flat[-1] ^= 1
        path.write_bytes(encode(meta, changed))
        seen.add(fingerprint(path))
    path.write_bytes(encode(meta, {("other" if n == "output.weight" else n): t for n, t in tensors.items()}))
    seen.add(fingerprint(path))
    path.write_bytes(encode(meta, {n: t.T.copy() if n == "output.weight" else t for n, t in tensors.items()}))
    seen.add(fingerprint(path))
    assert len(seen) == 1 + len(changes) + len(tensors) + 2


def test_a_session_file_outlives_a_new_template(tmp_path: Path) -> None:
    path, saved = written(tmp_path / "m.gguf"), tmp_path / "s.kvs"
    with Session(path, settings=SETTINGS) as session:
        session.append("abc")
        session.save(saved)
    written(path, **{"tokenizer.chat_template": "{{ messages }}", "general.name": "mended"})
    with Session.load(saved) as session:
        assert session.model.chat_template == "{{ messages }}"
        assert session.generate(2).finish().text is not None


# ---- tokens that end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in tiny.KINDS if k not in ("encoder", "vocab_only")])
def test_end_tokens_are_all_that_end(tiny_path: TinyPath, kind: str) -> None:
    with Model(tiny_path(kind)) as model:
        assert model.end_tokens == tuple(t for t in range(model.n_vocab) if model.is_end(t))


@pytest.mark.parametrize("key", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_a_normal_token_that_the_metadata_names_ends_too(tmp_path: Path, key: str) -> None:
    path = written(tmp_path / "m.gguf", **{f"tokenizer.ggml.{key}_token_id": 77})
    with Model(path) as model:
        assert 77 in model.end_tokens
        assert model.end_tokens == tuple(t for t in range(model.n_vocab) if model.is_end(t))


@pytest.mark.real
def test_end_tokens_of_a_large_vocabulary(gemma_path: Path) -> None:
    with Model(gemma_path) as model:
        ends = map(lib.llama_vocab_is_eog, repeat(model.vocab), range(model.n_vocab))
        assert model.end_tokens == tuple(compress(range(model.n_vocab), ends))
