"""Keeping: the verbs of a session that go through files: save, load, attach."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from . import manifest, modules, recovery, saving
from .base import Lease, verb
from .edits import Edits
from .engine import Engine
from .errors import MaskUnsupported, UsageError
from .host import register_bos
from .manifest import Manifest
from .model import Model
from .reader import Progress
from .receipts import Receipt
from .settings import Settings
from .store import Stored
from .transcript import Transcript

K = TypeVar("K", bound="Keeping")


class Keeping(Edits):
    """See :class:`Session`."""

    @verb
    def save(self, path: str | os.PathLike[str], *, kv: bool = True) -> int:
        """Write the whole session to a file; returns its size in bytes.

        All of it: tokens, K and V, masks, gaps, parked spans, tags, influence, undo, next logits, ``sampling``,
        ``memo``.

        kv=False leaves out K and V, which are nearly all of a file: it takes kilobytes. :meth:`load` then evaluates the
        visible tokens again, first to last, from position 0 on, as a restart would: no token of it is influenced by
        anything hidden. Masked and parked tokens come back evicted: their text is known, their K and V are not. Undo
        evaluates what it needs; models that cannot shift positions have nothing to undo after such a load, unless the
        session was opened with on_unsupported="recompute".

        The file is for its owner only (0600), as the text can be read out of it. It is replaced whole:
        whatever happens, a power cut included, the old one or the new one is there. ``progress`` is called with (cells
        copied, cells to copy).

        Cost: K and V are copied out and written; no token is evaluated.
        Guarantees: nothing of any session changes: the next tokens are evaluated and sampled as without the save.
        (Where positions have moved since the last evaluation, K is rotated at once; another move before the next
        evaluation rotates, and so rounds, it a second time.)
        Raises FileError (a folder, no permission, disk full); then the file is as it was.
        """
        beside = saving.Beside(self.sampling, self.memo)
        self.engine.reading = True
        try:
            return saving.save(Path(path), self._transcript, beside, self.progress, kv=kv)
        finally:
            self.engine.reading = False

    @classmethod
    def load(
        cls: type[K],
        path: str | os.PathLike[str],
        source: str | os.PathLike[str] | Model | Engine | None = None,
        *,
        settings: Settings | None = None,
        n_threads: int | None = None,
        progress: Progress | None = None,
    ) -> K:
        """The session that :meth:`save` wrote, on the same model and in the same kind of cache.

        What was parked in a folder waits in host memory, as far as ``max_parked_bytes`` allows.

        ``source`` as in Session(); None takes the model from where it was. The context is opened as it was, unless
        ``settings`` say otherwise. Every byte of the file is checked before llama.cpp sees one.

        A file without K and V (``save(kv=False)``) may be loaded into a cache of another kind. ``progress`` is called
        with (cells copied, cells to copy), or (tokens evaluated, tokens to evaluate) where the file has no K and V.

        Cost: K and V are read from the file and copied; no token is evaluated. Without them, every visible token is.
        Guarantees: exact, but for the order of the cells, which is that of the text afterwards. So what was only
        appended and generated goes on bit for bit; after edits logits differ by the noise of cell order, which can turn
        a greedy choice that is nearly a tie. Loading twice gives the same.
        Raises NotEdgekvFile, DamagedFile, WrongFile (of another model or kind of cache, or a newer format), FileError
        (cannot be opened), ContextFull (more cells than there are), and as Session(); then nothing has changed.
        """
        lease, session = Lease(), object.__new__(cls)

        def begin(transcript: Transcript, beside: saving.Beside) -> K:
            session._begin(transcript, lease)
            session.sampling, session.memo = beside.sampling, beside.memo
            return session

        try:
            with Stored(Path(path)) as stored:
                facts = manifest.read(stored, "session")
                engine = _engine_for(stored, facts, source, settings, n_threads, lease)
                with engine.lock:
                    recovery.ready(engine)
                    engine.check_idle()
                    return recovery.whole(engine, (), partial(saving.load, stored, facts, engine, begin, progress))
        except BaseException:
            lease.stack.close()
            raise

    @verb
    def attach(
        self, path: str | os.PathLike[str], *, name: str | None = None, role: str = "", tags: Iterable[str] = ()
    ) -> Receipt:
        """Take in a KV module (see :func:`edgekv.prefill`) behind what is there, at any position; no token is read.

        ``receipt.span`` is the text's; ``name``: the module's own by default. Its tokens are those of an isolated text:
        they know nothing of this session but the tokens it begins with, where the module was read behind the same;
        else the receipt says so. An empty session gets the model's BOS in front, which is read.

        Cost: K and V are copied in, and rotated once at the next decode unless they stand where they were read.
        Guarantees: what is read next sees the text; all of it comes, or nothing has changed.
        Raises WrongFile (another model, KV type, ...), DamagedFile, FileError, ContextFull, UsageError (name taken),
        MaskUnsupported (recurrent, or it would have to be shifted and cannot).
        """
        began = time.perf_counter()
        if not self._ledger.has_cells:
            raise MaskUnsupported(self.model.capabilities.park.reason)
        self.engine.check_copies()
        with Stored(Path(path)) as stored:
            facts = manifest.read(stored, "module")
            opened = modules.read(stored, facts, self._transcript)
            if name is not None:
                self._check_name(name)
            bos = self._first_tokens
            modules.check_room(opened, self._transcript, bos)
            if len(bos):
                modules.check_cells(opened, self._transcript)  # or the first token would stay where they are refused
                self._reader.read(bos, lambda read: register_bos(self._spans, read))
            register = self._namer(name or self._spans.free(opened.name), role, tags)
            return self._transcript.journal.add(modules.attach(opened, self._transcript, register, began))


def _engine_for(
    stored: Stored,
    facts: Manifest,
    source: str | os.PathLike[str] | Model | Engine | None,
    settings: Settings | None,
    n_threads: int | None,
    lease: Lease,
) -> Engine:
    """The engine a saved session comes to; one that is opened for it belongs to ``lease``."""
    if isinstance(source, Engine):
        if settings is not None or n_threads is not None:
            raise UsageError("an engine that is open keeps its settings; give them to Engine(...)")
        return source
    settings = settings or saving.settings_of(facts)
    settings = settings if n_threads is None else replace(settings, n_threads=n_threads)
    if isinstance(source, Model):
        model = source
    else:
        model = lease.stack.enter_context(Model(facts.model.path if source is None else source))
    manifest.check(stored, facts, model, settings)
    return lease.stack.enter_context(Engine(model, settings))
