"""longrun: a conversation far longer than its cache, led in four ways side by side, turn and turn about.

    from edgekv import longrun
    result = longrun.run("smollm2", turns=60)
    print(result.verdict)

mask: a Chat that hides the oldest turns. summarise: one that sums them up first. reread: what wrappers do, which trim
their list of messages and read again what no longer follows. llama_cpp: llama-cpp-python's own chat completion, on the
same trimmed list. All on contexts of their own, in one order that goes round, so that what else a machine does hits all
alike. A session gives a piece out when its token is in the cache, llama_cpp.Llama before that: one decode sooner.

options.py: what is said; texts.py: messages, the template, trimming; ways.py: the four; run.py, result.py, html.py.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from edgekv.longrun.options import Options
from edgekv.longrun.result import Figures, Result
from edgekv.longrun.run import Run, Watch
from edgekv.longrun.ways import Turn
from edgekv.model import Model

__all__ = ["Figures", "Options", "Result", "Run", "Turn", "run"]


def run(
    model: str | os.PathLike[str] | Model,
    options: Options | None = None,
    *,
    watch: Watch = lambda *_: None,
    **changes: Any,
) -> Result:
    """Run it. ``changes`` are fields of :class:`Options`, and go before those of ``options``; ``watch`` is called with
    (done, in all).

    Ctrl-C ends it, and the result tells what was finished. Raises UsageError for options that make no sense, and for a
    model whose memory cannot be masked; ModelError, TooLarge, TemplateError, ContextFull as Chat does.
    """
    chosen = replace(options or Options(), **changes)
    if isinstance(model, Model):
        return Run(model, chosen, watch).all()
    with Model(model) as loaded:
        return Run(loaded, chosen, watch).all()
