"""Edits: the verbs of a session that change what the model may look at, or what stands where."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ._llama import uninterrupted
from .base import Base, verb
from .columns import State
from .errors import MaskUnsupported, PinnedTokens, UsageError
from .host import BOS_NAME
from .model import TokenArray
from .receipts import Receipt
from .spans import Range, Span, Target
from .transcript import Hiding

BUDGET: Final = 64  # tokens that then="auto" reads again at most: a short suffix loses most, and costs little to read


class Edits(Base):
    """See :class:`Session`."""

    # -- hiding and showing -------------------------------------------------------------------------------------

    @verb
    def mask(
        self,
        target: Target,
        *,
        gap: str = "close",
        force: bool = False,
        refresh_last: bool = True,
        then: str = "none",
        budget: int = BUDGET,
    ) -> Receipt:
        """Hide tokens: nothing read from now on attends to them; their cells stay, and unmask is instant.

        gap: "close" moves the visible tokens in front of the target up to those behind it, "keep" leaves the
        positions empty (unmask is then bit-exact). Masking the tail moves the cursor back, which equals a restart.
        force: mask attention sinks too. refresh_last=False samples the next token from the logits as they are,
        computed while the target was visible, for models trained that way; by default the last visible token is
        read again first.

        then: "recompute" makes it exact by :meth:`recompute`, "auto" does where that reads at most ``budget`` tokens:
        the loss is large where few tokens stand behind the span, and there reading them again is cheap. Should the
        reading fail (ContextFull), the mask stands.

        Masked is not forgotten: visible tokens computed while the target was visible carry what they took from it;
        the receipt counts them. No cell and no RAM is freed.

        Cost: no token is read; K is rotated once at the next decode when a gap was closed. Cells that a fork holds
        too are copied before they move.
        Guarantees: what is read next does not see the target.
        Raises MaskUnsupported, BadState, PinnedTokens, UnknownSpan, UsageError, ContextFull (no room for copies);
        then nothing has changed.
        """
        if then not in ("none", "recompute", "auto"):
            raise UsageError(f"then is 'none', 'recompute' or 'auto', not {then!r}")
        receipt = self._transcript.mask(self._rows(target), self._hiding(gap, force=force))
        if then == "recompute" or (then == "auto" and 0 < self._transcript.to_recompute.num_tokens <= budget):
            return self._transcript.journal.merge(2, receipt.then(self._transcript.recompute()))
        if refresh_last:
            return receipt
        self._reader.accept_stale_logits()
        return self._transcript.journal.merge(1, dataclasses.replace(receipt, reread=0))

    @verb
    def unmask(self, target: Target) -> Receipt:
        """Show masked or parked tokens again where they belong.

        The receipt counts the visible tokens that were read meanwhile, which did not see them.

        Cost: no token is read; K and V of parked ones are copied back; otherwise as :meth:`mask`.
        Guarantees: their K and V are those from before; bit-exact where no position moved.
        Raises BadState (nothing hidden there), UnknownSpan, UsageError, MaskUnsupported, ContextFull (no cells for
        parked tokens, or for copies), DamagedFile (parked in a folder, and changed there); then nothing has changed.
        """
        self._need_mask()
        return self._transcript.unmask(self._rows(target))

    @verb
    def park(
        self, target: Target, to: str | os.PathLike[str] = "ram", *, gap: str = "close", force: bool = False
    ) -> Receipt:
        """Mask tokens and free their cells; K and V wait in host memory or in a folder, and unmask brings them back.

        Takes visible and masked tokens. ``to``: "ram", or a folder (for one called ram, "./ram"). What waits there
        belongs to this session and its forks, and goes with them; :meth:`save` keeps it. Cells that a fork holds too
        are free only when the fork has let go of them.

        Cost: no token is read; K and V are copied out; otherwise as :meth:`mask`.
        Guarantees: what is read next does not see the target.
        Raises as :meth:`mask`, and FileError (the folder cannot take it), TooLarge (not enough RAM); then nothing has
        changed.
        """
        folder = None if to == "ram" else Path(to)
        return self._transcript.park(self._rows(target), self._hiding(gap, force=force), folder)

    @verb
    def evict(self, target: Target, *, gap: str = "close", force: bool = False) -> Receipt:
        """Mask for good and free the cells; the text stays known, and coming back means reading it again.

        Takes visible, masked and parked tokens. Cells that a fork holds too are free only when the fork has let go of
        them.

        Cost: no token is read; otherwise as :meth:`mask`.
        Guarantees: what is read next does not see the target.
        Raises as :meth:`mask`.
        """
        return self._transcript.evict(self._rows(target), self._hiding(gap, force=force))

    @verb
    def rewind(self, target: int | Target) -> Receipt:
        """Drop everything from an index, or from the start of a span, on; hidden tokens there too.

        Cost: no token is read; one is read again before the next is sampled.
        Guarantees: exact; what is left is as if the rest had never been read.
        Raises UsageError, UnknownSpan, MaskUnsupported; then nothing has changed.
        """
        if not self.model.capabilities.rewind and not self._transcript.restarts:
            raise MaskUnsupported(self.model.capabilities.rewind.reason)
        return self._transcript.rewind(self._place(target, "rewind to"))

    def _rows(self, target: Target) -> npt.NDArray[np.bool_]:
        """bool (n,): the rows of a target that still belong to the transcript."""
        return self._ledger.select(self._spans.resolve(target))

    def _place(self, target: int | Target, doing: str) -> int:
        """The row of an index, or of the first token of a target."""
        if isinstance(target, bool) or not isinstance(target, (int, np.integer)):
            return int(self._rows(target).argmax())  # type: ignore[arg-type]
        if not 0 <= target <= len(self._ledger):
            raise UsageError(f"cannot {doing} {target}: the transcript has {len(self._ledger)} tokens")
        return self._ledger.places.row(int(target))

    @contextlib.contextmanager
    def masked(self, target: Target, *, gap: str = "close", force: bool = False) -> Iterator[Receipt]:
        """Mask inside the block, and unmask after it what this hid and is still masked.

        Cost: as :meth:`mask` and :meth:`unmask`.
        Guarantees: what is still masked comes back, whatever happens in the block.
        Raises as :meth:`mask`.
        """
        hidden: npt.NDArray[np.int64] | None = None
        try:
            with uninterrupted():
                receipt = self.mask(target, gap=gap, force=force)
                hidden = self._ledger.places.exactly(receipt.ranges)
            yield receipt
        finally:
            if hidden is not None:
                self._show_again(hidden)

    @verb
    def _show_again(self, indexes: npt.NDArray[np.int64]) -> None:
        """Unmask those of these tokens that are still hidden, and no others."""
        rows = np.zeros(len(self._ledger), np.bool_)
        rows[self._ledger.places.rows_of(indexes)] = True
        c = self._ledger.columns
        rows &= c.where(State.MASKED) | c.parked if self._ledger.has_cells else c.where(State.EVICTED)
        if rows.any():
            self._transcript.unmask(rows)

    # -- new text in the middle ---------------------------------------------------------------------------------

    @verb
    def insert(
        self,
        index: int | Target,
        text: str | Iterable[int] | TokenArray,
        *,
        name: str | None = None,
        role: str = "",
        tags: Iterable[str] = (),
        special: bool = False,
    ) -> Receipt:
        """Read text in front of the token at ``index``, or of a span; what stands behind is not read again.

        ``receipt.span`` is the new text's. The new tokens see the visible ones in front of them. Those behind were
        computed without the new text, and know nothing of it until :meth:`recompute`; the receipt counts them. Indexes
        of other tokens stay what they are; a span that goes across ``index`` holds the new text, too.

        Cost: every new token is read once; earlier ones move, so K is rotated once at the next decode.
        Guarantees: what is read next sees the text in its place; all of it is read, or nothing has changed.
        Raises ContextFull, UsageError (name taken, no such index, nothing to insert), PinnedTokens (in front of the
        first token), MaskUnsupported (nothing can be shifted, or no cells).
        """
        self._need_mask()
        row = self._place(index, "insert at")
        if self._ledger.blank:
            raise UsageError("the session is empty: append the text")
        if not self._ledger.columns.visible[:row].any():
            raise PinnedTokens("nothing can stand in front of the first visible token, which draws attention as a sink")
        return self._transcript.insert(row, *self._new_text(text, name, role, tags, special=special))

    @verb
    def replace(
        self,
        target: Target,
        text: str | Iterable[int] | TokenArray,
        *,
        name: str | None = None,
        role: str = "",
        tags: Iterable[str] = (),
        special: bool = False,
    ) -> Receipt:
        """Put a new text in the place of a target, which is masked; what stands behind is not read again.

        ``receipt.span`` is the new text's; it may take the old one's ``name``, which then gets another. The layout
        opens or closes by exactly the difference. The old text's cells stay: :meth:`undo` brings it back and drops the
        new one, ``unmask`` of it alone shows both, ``evict`` frees them. Attention sinks may be replaced, as the new
        tokens become the sinks. A target of several ranges is replaced at the first of them.

        What stands behind was computed with the old text in view, and without the new: the receipt counts it.

        Cost: every new token is read once; otherwise as :meth:`insert`.
        Guarantees: what is read next sees the new text and not the old; all of it is done, or nothing has changed.
        Raises ContextFull, BadState (nothing visible there), UnknownSpan, UsageError, MaskUnsupported.
        """
        self._need_mask()
        ranges = self._spans.resolve(target)
        renamed = name if name is not None and self._spans.within(name, ranges) else None
        tokens, register = self._new_text(text, None if renamed else name, role, tags, special=special)
        if renamed:
            register = dataclasses.replace(register, name=renamed)
        return self._transcript.replace(self._ledger.select(ranges), tokens, register)

    def _new_text(
        self, text: str | Iterable[int] | TokenArray, name: str | None, role: str, tags: Iterable[str], *, special: bool
    ) -> tuple[TokenArray, _Register]:
        """The tokens of a text, and what registers its span once they are read."""
        if name is not None:
            self._check_name(name)
        tokens = self._tokens(text, special=special)
        if not len(tokens):
            raise UsageError("the text holds no token; to hide something without a new text, mask it")
        return tokens, self._namer(name, role, tags)

    def _namer(self, name: str | None, role: str, tags: Iterable[str]) -> _Register:
        """What makes the span of a text, of which only the indexes are still to come."""
        return _Register(self, name, role, frozenset((tags,) if isinstance(tags, str) else tags))

    def _check_name(self, name: str) -> None:
        if name == BOS_NAME:
            raise UsageError(f"{name!r} is the span of the model's own first token; choose another name")
        self._spans.check_name(name)

    @property
    def _first_tokens(self) -> TokenArray:
        """int32 (0 or 1,): the model's BOS, in front of a session's first text."""
        return np.asarray([self.model.bos] if self._ledger.blank and self.model.bos is not None else [], np.int32)

    def _tokens(self, text: str | Iterable[int] | TokenArray, *, special: bool = False) -> TokenArray:
        return self.model.tokenize(text, special=special) if isinstance(text, str) else self.model.check_tokens(text)

    # -- reading again, and back --------------------------------------------------------------------------------

    @verb
    def recompute(self, start: int | Target | None = None) -> Receipt:
        """Read visible tokens again, as if the hidden ones had never been read.

        From index or span ``start`` on, or from the first visible token that was computed while something else was
        visible (none: nothing is read). Kept gaps close first, and stay closed. An isolated span is not read while what
        it attended to stands. ``progress`` is called as in :meth:`append`.

        Cost: those tokens are read once more, and need as many free cells until that is done.
        Guarantees: exact, up to the noise of batch boundaries.
        Raises ContextFull, UsageError, MaskUnsupported (a state that cannot be rewound); on any error, and on Ctrl-C,
        the cells from before are back.
        """
        self._need_mask()
        return self._transcript.recompute(None if start is None else self._place(start, "read again from"))

    @verb
    def undo(self) -> Receipt:
        """Take the newest mask, unmask, park, evict, rewind, insert or replace back; again for the one before it.

        Tokens read since stay. What is parked again waits in host memory, wherever it was. What an evict or a rewind
        dropped is read again, the text of an insert or a replace is dropped. Reading (append, generate, recompute) is
        no edit; rewind for that.

        It works in any case while nothing was evaluated since the edit. Where positions cannot be shifted, hidden text
        right before what has to be evaluated again is in view meanwhile, and evaluated too if it was evicted: it leads
        to the position.

        Cost: no token is read, but for evict and rewind: what they dropped, once more.
        Guarantees: its tokens are as they were; bit-exact where no position moved and nothing had to be read.
        Raises BadState (no edit is left in the journal of 1,000), ContextFull, MaskUnsupported (other tokens have its
        positions by now and cannot be shifted; the next undo passes this edit over); then nothing has changed.
        """
        return self._transcript.undo()

    @property
    def history(self) -> tuple[Receipt, ...]:
        """The receipts of this session's edits, oldest first; the newest 1,000."""
        with self.lock:
            self._look()
            return self._transcript.journal.receipts

    @verb
    def compact(self) -> Receipt:
        """Put the cells in use in a row, so that decode scans no free ones between them.

        It pays after an evict or a rewind has freed many: ``stats.cells_scanned`` tells how many cells decode goes
        over, ``stats.compact_saves`` how many fewer it would be.

        Cost: no token is read; the K and V in use are copied out and in, and take as much RAM meanwhile.
        Guarantees: tokens, positions, masks and forks stay; logits change by the noise of cell order.
        Raises TooLarge (not enough RAM); then nothing has changed.
        """
        return self._transcript.compact()

    # -- checks -------------------------------------------------------------------------------------------------

    def _need_mask(self) -> None:
        """Raise MaskUnsupported where no part of this session can be hidden."""
        if not self.model.capabilities.mask and not self._transcript.restarts:
            raise MaskUnsupported(
                f"{self.model.capabilities.mask.reason}; start again without the text instead, which a session "
                "opened with on_unsupported='recompute' does by itself"
            )

    def _hiding(self, gap: str, *, force: bool) -> Hiding:
        """How to hide here: the gap that is possible, and what to tell the user about it."""
        self._need_mask()
        if gap not in ("close", "keep"):
            raise UsageError(f"gap is 'close' or 'keep', not {gap!r}")
        if gap == "close" and self._ledger.has_cells and not self.engine.can_shift:
            return Hiding("keep", force, notes=(self.engine.close_gaps.reason,))
        return Hiding(gap, force)


@dataclasses.dataclass(frozen=True)
class _Register:
    """Makes the span of a text that was read."""

    session: Edits
    name: str | None
    role: str
    tags: frozenset[str]

    def __call__(self, indexes: Range) -> Span:
        spans = self.session._spans
        name = self.name or spans.free_name(self.role or "text")
        spans.make_way(name)
        return spans.add(Span(name, *indexes, self.role, self.tags))
