"""A long chat on SmolLM2: the first token comes as soon at the end as at the beginning, and nothing is read twice."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from edgekv import Model, Settings
from edgekv.longrun import Figures, Options
from edgekv.longrun.texts import Frame, messages
from edgekv.longrun.ways import WAYS

pytestmark = pytest.mark.real

#: One thread: two wait for each other where other processes want the same cores.
OPTIONS = Options(turns=16, message_tokens=64, max_tokens=8, settings=Settings(n_ctx=512, n_threads=1))


def measured(model: Model) -> Figures:
    with closing(WAYS["mask"](Frame(model), OPTIONS)) as way:
        texts = messages(model, OPTIONS.turns, OPTIONS.message_tokens, OPTIONS.seed)
        return Figures.of([way.say(text) for text in texts])


def test_the_last_turns_answer_as_soon_as_the_fifth(smollm2_path: Path) -> None:
    """By medians, and once more where other processes were in the way."""
    with Model(smollm2_path) as model:
        found = measured(model)
        if found.ratio is None or found.ratio > 1.5:
            found = measured(model)
    assert (found.read, found.again) == (found.new, 0)
    assert found.read > 2 * 512
    assert found.ratio is not None
    assert found.ratio < 1.5
