"""Where a session's next-token logits are: in llama.cpp's buffer, in a copy, or nowhere."""

from __future__ import annotations

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
        self._copy: npt.NDArray[np.float32] | None = None
        self.view: View | None = None

    def in_buffer(self, row: int, view: View) -> None:
        """The engine's last decode computed them at this batch index."""
        self._row, self._copy, self.view = row, None, view

    def in_copy(self, logits: npt.NDArray[np.float32], view: View) -> None:
        self._row, self._copy, self.view = None, logits, view

    def clear(self) -> None:
        self._row, self._copy, self.view = None, None, None

    @property
    def known(self) -> bool:
        return self.view is not None

    def fresh(self, view: View) -> bool:
        """Whether they were computed with exactly this hidden."""
        return self.view == view

    def keep_logits(self) -> None:
        """Copy them out of the engine's buffer, which is about to be overwritten."""
        if self._row is not None:
            self._copy, self._row = self._engine.logits(self._row), None

    def array(self) -> npt.NDArray[np.float32]:
        """float32 (n_vocab,): a copy."""
        if self._row is not None:
            return self._engine.logits(self._row)
        if self._copy is None:
            raise NoLogits("there is no distribution yet: append something first")
        return self._copy.copy()

    def sample(self, sampler: Sampler) -> int:
        """Draw the next token, in native code where the logits are still in the buffer."""
        if self._row is not None:
            return sampler.sample(self._engine, self._row)
        return sampler.sample_array(self.array())
