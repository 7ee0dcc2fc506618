"""Where a session's next-token logits are: in llama.cpp's buffer, in a copy, or nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .engine import Engine
from .errors import NoLogits
from .history import View
from .sampling import Sampler


class NextLogits:
    """The distribution behind a session's last token, and the view it was computed under.

    They stay in the engine's buffer until another decode is about to overwrite them; then they are copied. After an
    edit they are stale: computed while something else was visible. ``fresh(view)`` tells.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._row: int | None = None
        self._serial = -1  # of the decode that computed them, -1 for those that came as a copy
        self._copy: npt.NDArray[np.float32] | None = None
        self.view: View | None = None

    def in_buffer(self, row: int, view: View) -> None:
        """The engine's last decode computed them at this batch index."""
        self._row, self._serial, self._copy, self.view = row, self._engine.serial, None, view

    def in_copy(self, logits: npt.NDArray[np.float32], view: View) -> None:
        self._row, self._serial, self._copy, self.view = None, -1, logits, view

    def clear(self) -> None:
        self._row, self._serial, self._copy, self.view = None, -1, None, None

    def kept(self) -> dict[str, Any]:
        """What it is now."""
        return dict(vars(self))

    def restore_kept(self, before: dict[str, Any]) -> None:
        copied = self._copy if self._serial == before["_serial"] != -1 else None  # out of the buffer, meanwhile
        vars(self).update(before)
        if self._row is not None and copied is not None:
            self._copy, self._row = copied, None

    @property
    def _overwritten(self) -> bool:
        """Whether a decode that failed has taken their place in the buffer."""
        return self._row is not None and self._serial != self._engine.serial

    @property
    def known(self) -> bool:
        return self.view is not None and not self._overwritten

    def fresh(self, view: View) -> bool:
        """Whether they were computed with exactly this hidden."""
        return self.view == view and not self._overwritten

    def keep_logits(self) -> None:
        """Copy them out of the engine's buffer, which is about to be overwritten."""
        if self._row is not None and not self._overwritten:
            self._copy, self._row = self._engine.logits(self._row), None

    def array(self) -> npt.NDArray[np.float32]:
        """float32 (n_vocab,): a copy."""
        if self._row is not None and not self._overwritten:
            return self._engine.logits(self._row)
        if self._copy is None:
            raise NoLogits("there is no distribution yet: append something first")
        return self._copy.copy()

    def sample(self, sampler: Sampler) -> int:
        """Draw the next token, in native code where the logits are still in the buffer."""
        if self._row is not None and not self._overwritten:
            return sampler.sample(self._engine, self._row)
        return sampler.sample_array(self.array())
