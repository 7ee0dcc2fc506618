"""A long chat on SmolLM2, twice as long as its context: no token is evaluated twice."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from edgekv import Model, Settings
from edgekv.longrun import Figures, Options
from edgekv.longrun.texts import Frame, messages
from edgekv.longrun.ways import WAYS

pytestmark = [pytest.mark.real, pytest.mark.slow]

OPTIONS = Options(turns=16, message_tokens=64, max_tokens=8, settings=Settings(n_ctx=512, n_threads=1))


def test_no_token_is_evaluated_twice(smollm2_path: Path) -> None:
    with Model(smollm2_path) as model, closing(WAYS["mask"](Frame(model), OPTIONS)) as way:
        texts = messages(model, OPTIONS.turns, OPTIONS.message_tokens, OPTIONS.seed)
        found = Figures.of([way.say(text) for text in texts])
    assert (found.read, found.again) == (found.new, 0)
    assert found.read > 2 * 512
