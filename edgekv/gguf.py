"""Reads a GGUF model without llama.cpp: what the file is, where its other parts are, how large its cache will be.

Format: ggml's docs/gguf.md (v2, v3, little-endian). A split model (NAME-00001-of-00003.gguf, as gguf-split writes it)
is opened by its first part; all its parts count.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final

from .errors import DamagedModel, ModelError, ModelNotFound, NotGenerative, NotGGUF
from .wording import printable

MAGIC: Final = b"GGUF"
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_UINT16: Final = 2
_STRING: Final = 8
_ARRAY: Final = 9
_LONGEST: Final = 1 << 26  # no key or value of a sane file is longer; a damaged length would ask for terabytes
_LARGEST: Final = 1 << 28  # nor is a header
_MOST: Final = 1 << 20  # nor are there so many keys or tensors
_MANY: Final = 4096  # longer arrays are tables of the tokenizer, of which no value is needed
_BLOCK: Final = 1 << 16
_ALIGNMENT: Final = 32

_SAMPLE: Final = 1 << 16  # bytes a sample of the fingerprint
_SAMPLES: Final = 64
#: Metadata that changes neither K and V nor logits: names, licences, the template, how it was made and divided.
_BESIDE: Final = ("general.", "tokenizer.chat_template", "split.", "quantize.")
_COUNTS: Final = frozenset({"general.architecture", "general.quantization_version"})


@dataclass(frozen=True)
class ModelFile:
    """A model on disk as it was when it was opened.

    path: absolute; of the first part where there are several (``parts``, all of them). header: the metadata but for the
    tokenizer's tables. size: bytes of all parts. fingerprint: 32 hex digits, see docs/files.md.
    """

    path: Path
    parts: tuple[Path, ...]
    header: dict[str, Any]
    size: int
    fingerprint: str
    _were: tuple[tuple[int, ...], ...] = field(repr=False)

    def check_unchanged(self) -> None:
        """Raise DamagedModel where a part was replaced, written to or removed since."""
        for part, was in zip(self.parts, self._were, strict=True):
            try:
                same = _identity(os.stat(part)) == was
            except OSError:
                same = False
            if not same:
                raise DamagedModel(
                    f"{part} changed while it was being opened; wait until its download or copy is done, "
                    "and open it again"
                )


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Read the head of a model file and of all its parts, and take its fingerprint; weights are read by samples only.

    Raises NotGGUF for another kind of file or a big-endian one; DamagedModel where the file ends inside its header;
    NotGenerative for a GGUF that is no language model, or a later part of one; ModelNotFound, naming a part that is
    missing; ModelError where it may not be read.
    """
    path = Path(path).absolute()  # the working folder may change
    try:
        with ExitStack() as stack:
            return _open(path, stack)
    except OSError as err:
        raise ModelError(f"{err.filename or path} cannot be read: {err.strerror or err}") from err


def _open(path: Path, stack: ExitStack) -> ModelFile:
    head = _Head(path, stack)
    head.refuse_other_kinds()
    heads = [head, *(_later(part, i, head, stack) for i, part in _other_parts(head))]
    if not any(h.tensors for h in heads):
        raise NotGenerative(f"{path} holds a vocabulary but no model; nothing can be generated with it")
    return ModelFile(
        path=path,
        parts=tuple(h.path for h in heads),
        header=head.metadata,
        size=sum(h.size for h in heads),
        fingerprint=_fingerprint(heads),
        _were=tuple(h.identity for h in heads),
    )


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


# -- parts --------------------------------------------------------------------------------------------------------


def _other_parts(head: _Head) -> Iterator[tuple[int, Path]]:
    """(number, path) of the parts after the first, as llama.cpp looks for them; all of them are there."""
    count, number = head.number("split.count"), head.number("split.no")
    if count < 2:
        return
    what = f"{head.path} is part {number + 1} of {count} of a split model"
    ending = _ending(number, count)
    if not head.path.name.endswith(ending):
        raise NotGenerative(f"{what}; llama.cpp finds the parts by their names, so its own must be NAME{ending}")
    paths = [head.path.with_name(head.path.name.removesuffix(ending) + _ending(i, count)) for i in range(count)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelNotFound(f"{what}, and {names} must lie in the same folder; fetch what is missing")
    if number:
        raise NotGenerative(f"{what}; give the first part, {paths[0]}")
    yield from list(enumerate(paths))[1:]


def _ending(number: int, count: int) -> str:
    """How the name of a part ends; counted from 1 there, from 0 in its metadata."""
    return f"-{number + 1:05d}-of-{count:05d}.gguf"


def _later(path: Path, number: int, first: _Head, stack: ExitStack) -> _Head:
    """llama.cpp aborts where the number of a later part is of another type."""
    head = _Head(path, stack)
    if head.kinds.get("split.no") != _UINT16 or head.metadata["split.no"] != number:
        raise DamagedModel(f"{path} is not part {number + 1} of {first.path.name}; fetch or copy it again")
    return head


# -- one file -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensor:
    name: bytes
    shape: bytes  # dimensions and type, as they are in the file
    offset: int


class _Head:
    """The head of one file, which stays open until the stack closes it."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path: Final = path
        self.metadata: Final[dict[str, Any]] = {}
        self.kinds: Final[dict[str, int]] = {}
        self.digests: Final[dict[str, bytes]] = {}
        self.tensors: Final[list[_Tensor]] = []
        try:
            self.file: Final[BinaryIO] = stack.enter_context(path.open("rb"))
            stat = os.fstat(self.file.fileno())
            self.identity: Final = _identity(stat)
            self.size: Final = stat.st_size
            if self._take(4, short=True) != MAGIC:
                raise NotGGUF(_other_kind(path))
            self._read()
        except (struct.error, KeyError, OverflowError, MemoryError) as err:
            raise DamagedModel(f"{path} ends or breaks inside its header; fetch or copy it again") from err

    def number(self, key: str) -> int:
        value = self.metadata.get(key, 0)
        return value if isinstance(value, int) else 0

    def _read(self) -> None:
        version, num_tensors, count = self._unpack("IQQ")
        if version not in (2, 3):
            raise NotGGUF(f"{self.path} has GGUF version {version}; 2 and 3 are supported, little-endian")
        if max(num_tensors, count) > _MOST:
            raise struct.error("a number beyond any sane file")
        for _ in range(count):
            self._key_value()
        for _ in range(num_tensors):
            name = self._take(self._unpack("Q")[0])
            (dims,) = self._unpack("I")
            shape = self._take(8 * dims + 4)
            self.tensors.append(_Tensor(name, shape, self._unpack("Q")[0]))
        alignment = max(1, self.number("general.alignment") or _ALIGNMENT)
        self.data_start = -(-self.file.tell() // alignment) * alignment

    def _key_value(self) -> None:
        key = self._string()
        start = self.file.tell()
        (kind,) = self._unpack("I")
        self.kinds[key], value = kind, self._value(kind)
        if value is not None:
            self.metadata[key] = value
        if key in _COUNTS or not key.startswith(_BESIDE):
            self.digests[key] = self._digest(start, self.file.tell())

    def _digest(self, start: int, stop: int) -> bytes:
        digest = hashlib.sha256()
        self.file.seek(start)
        for at in range(start, stop, _BLOCK):
            digest.update(self.file.read(min(_BLOCK, stop - at)))
        return digest.digest()

    def _value(self, kind: int) -> Any:
        """A value; None for a table of the tokenizer, which is passed over."""
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        item, count = self._unpack("IQ")
        if item == _STRING:
            self._pass_strings(count)
            return None
        data = self._take(count * struct.calcsize(_SCALARS[item]))
        return list(struct.unpack(f"<{count}{_SCALARS[item]}", data)) if count <= _MANY else None

    def _pass_strings(self, count: int) -> None:
        """The hundred thousands of a vocabulary, as fast as Python can."""
        length = struct.Struct("<Q").unpack_from
        while count:
            start = self.file.tell()
            data = self._take(_BLOCK, short=True)
            at, last = 0, len(data) - 8
            if last < 0:
                raise struct.error("the file ends here")
            while count and at <= last:
                at += 8 + length(data, at)[0]
                count -= 1
            if at > _LONGEST:
                raise struct.error("a length beyond any sane file")
            self.file.seek(start + at)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _string(self) -> str:
        return self._take(self._unpack("Q")[0]).decode("utf-8", "replace")

    def _take(self, length: int, *, short: bool = False) -> bytes:
        if length > _LONGEST or self.file.tell() > _LARGEST:
            raise struct.error("a length beyond any sane file")
        data = self.file.read(length)
        if len(data) < length and not short:
            raise struct.error("the file ends here")
        return data

    # -- what it is -----------------------------------------------------------------------------------------------

    def refuse_other_kinds(self) -> None:
        """Raise NotGenerative, saying what it is, for a GGUF that is no language model."""
        what = self._other_use()
        if what:
            raise NotGenerative(f"{self.path} is {what}")
        arch = self.metadata.get("general.architecture", "")
        if self.tensors and f"{arch}.block_count" not in self.metadata and not self.number("split.no"):
            raise NotGenerative(
                f"{self.path} is no language model: it says nothing of layers (architecture {self._said(arch)}); "
                "nothing can be generated with it"
            )

    def _other_use(self) -> str:
        """What the file is and what to do, '' for a model."""
        kind, arch = (str(self.metadata.get(f"general.{name}", "")) for name in ("type", "architecture"))
        if kind == "adapter" or "adapter.type" in self.metadata:
            name = self.metadata.get("general.base_model.0.name")
            base = f"the model it was made for ({self._said(name)})" if name else f"its base model (a {arch} model)"
            named = self._said(self.metadata.get("adapter.type", "lora"))
            return (
                f"an adapter ({named}), not a model, and edgekv applies none; give {base}, into which "
                "llama-export-lora can merge it"
            )
        if arch == "clip" or kind in ("mmproj", "clip-vision"):
            return (
                "a multimodal projector (mmproj), which turns images or sound into what its language model takes, and "
                "edgekv reads text only; give the language model itself"
            )
        if kind == "imatrix" or self._has_key("imatrix."):
            return "an importance matrix (imatrix), which is only of use to llama-quantize; give the model itself"
        if arch == "controlvector" or self._has_key("controlvector."):
            hint = self.metadata.get("controlvector.model_hint")
            of = f" (a {self._said(hint)} model)" if hint else ""
            return f"a control vector, not a model, and edgekv applies none; give the model it was made for{of}"
        return ""

    def _has_key(self, prefix: str) -> bool:
        return any(key.startswith(prefix) for key in self.kinds)

    @staticmethod
    def _said(value: object) -> str:
        """A word of a stranger's file."""
        return printable(str(value))[:60] or "not named"


def _other_kind(path: Path) -> str:
    from .store import is_ours  # zipfile is slow to import

    if is_ours(path):
        return f"{path} is a session file or KV module, not a model: Session.load takes the one, attach the other"
    return f"{path} is not a GGUF file (it does not begin with 'GGUF'); convert it with llama.cpp first"


# -- fingerprint --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Region:
    """Bytes of one tensor, up to the next one in its file."""

    file: BinaryIO
    start: int
    size: int


def _fingerprint(heads: list[_Head]) -> str:
    """Of what K, V and logits follow from: metadata, tensor names, shapes and types, and 64 samples of their data.

    The tensors are taken in the order of their names, wherever they lie: a model has one fingerprint, split or not.
    """
    digest = hashlib.sha256()
    for key, value in sorted(heads[0].digests.items()):
        digest.update(key.encode() + b"\0" + value)
    tensors = sorted((pair for head in heads for pair in _regions(head)), key=lambda pair: pair[0].name)
    for tensor, region in tensors:
        lengths = struct.pack("<QQQ", len(tensor.name), len(tensor.shape), region.size)
        digest.update(lengths + tensor.name + tensor.shape)
    regions = [region for _, region in tensors]
    for at in _places(sum(r.size for r in regions)):
        for block in _sample(regions, at):
            digest.update(block)
    return digest.hexdigest()[:32]


def _places(total: int) -> Iterable[int]:
    """Where samples begin: from the first byte to the last, evenly; one after the other where they cover all."""
    if total <= _SAMPLES * _SAMPLE:
        return range(0, total, _SAMPLE)
    return ((total - _SAMPLE) * i // (_SAMPLES - 1) for i in range(_SAMPLES))


def _regions(head: _Head) -> Iterator[tuple[_Tensor, _Region]]:
    size = max(0, head.size - head.data_start)
    ends = sorted({t.offset for t in head.tensors} | {size})
    next_to = dict(pairwise(ends))
    for tensor in head.tensors:
        end = min(size, next_to.get(tensor.offset, size))
        yield tensor, _Region(head.file, head.data_start + tensor.offset, max(0, end - tensor.offset))


def _sample(regions: list[_Region], at: int) -> Iterator[bytes]:
    """The bytes from ``at`` on, as if the tensors lay one after the other."""
    left = _SAMPLE
    for region in regions:
        if at < region.size and left:
            region.file.seek(region.start + at)
            block = region.file.read(min(left, region.size - at))
            left -= len(block)
            yield block
        at = max(0, at - region.size)
