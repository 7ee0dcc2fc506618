"""What hidden and freed cells cost while decoding, and what forks gain in one batch, on a real model.

    python scripts/bench_verbs.py [--model smollm2] [--tokens 6000] [--rounds 9] [--json bench-verbs.json]

Every arm has a context of its own with the same text in it; arms take turns, so that a machine whose speed drifts
slows all. Medians, with the least and the most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv import Model, Session, Settings, decode_together

GENERATED = 32
NUM_FORKS = 4

ARMS: dict[str, Callable[[Session, tuple[int, int]], list[Any]]] = {
    "all visible": lambda _s, _span: [],
    "masked": lambda s, span: [s.mask(span)],
    "masked, compacted": lambda s, span: [s.mask(span), s.compact()],
    "evicted": lambda s, span: [s.evict(span)],
    "evicted, compacted": lambda s, span: [s.evict(span), s.compact()],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with Model(options.model) as model:
        results = {"model": options.model, "decode": decode(model, options.tokens, options.rounds)}
        results["forks"] = forks(model, options.rounds)
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    return 0


def show(results: dict[str, Any]) -> None:
    for name, arm in results["decode"].items():
        said = " · ".join(arm["receipts"])
        print(f"{name:20} {spread(arm['tokens_per_s'])} tokens/s, {arm['cells_scanned']:,} cells scanned  {said}")
    print(f"{NUM_FORKS} forks in one batch, tokens/s against one after the other: {spread(results['forks'])}")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f}, n {len(values)})"


def text_of(model: Model, count: int) -> npt.NDArray[np.int32]:
    folder = Path(__file__).parents[1] / "tests" / "data" / "texts"
    tokens = np.concatenate([model.tokenize(p.read_text("utf-8")) for p in sorted(folder.glob("*.txt"))])
    return np.resize(tokens, count)


# -- decode ---------------------------------------------------------------------------------------------------------


def decode(model: Model, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second behind ``num_tokens``, of which 80 % are masked or evicted."""
    span = (num_tokens // 10, num_tokens // 10 + num_tokens * 8 // 10)
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        sessions = {}
        for name, edit in ARMS.items():
            session = stack.enter_context(Session(model, settings=Settings(n_ctx=num_tokens + 512, n_sessions=1)))
            session.append(text_of(model, num_tokens))
            receipts = [str(r) for r in edit(session, span)]
            found[name] = {"receipts": receipts, "cells_scanned": session.stats.cells_scanned, "tokens_per_s": []}
            sessions[name] = session
            print(f"{name}: read {num_tokens:,} tokens", file=sys.stderr)
        for turn in range(rounds + 1):
            for name, session in sessions.items():
                speed = generate(session)
                found[name]["tokens_per_s"] += [speed] if turn else []  # the first turn warms up
    return found


def generate(session: Session) -> float:
    session.logits()
    began = time.perf_counter()
    generation = session.generate(GENERATED).finish()
    seconds = time.perf_counter() - began
    session.rewind(generation.span)
    return len(generation.tokens) / seconds


# -- forks ----------------------------------------------------------------------------------------------------------


def forks(model: Model, rounds: int) -> list[float]:
    """Ratios of tokens/s: all forks in one batch against one after the other."""
    with Session(model, settings=Settings(n_ctx=1024)) as session:
        session.append(text_of(model, 300))
        turns = [forked(session, in_one_batch) / forked(session, one_after_the_other) for _ in range(rounds + 1)]
    return turns[1:]


def one_after_the_other(sessions: list[Session]) -> int:
    return sum(len(s.generate(GENERATED).finish().tokens) for s in sessions)


def in_one_batch(sessions: list[Session]) -> int:
    generations = [s.generate(GENERATED) for s in sessions]
    for _ in decode_together(generations):
        pass
    return sum(len(g.tokens) for g in generations)


def forked(session: Session, way: Callable[[list[Session]], int]) -> float:
    sessions = [session.fork() for _ in range(NUM_FORKS)]
    for number, fork in enumerate(sessions):
        fork.append(f" {number}")
    began = time.perf_counter()
    count = way(sessions)
    seconds = time.perf_counter() - began
    for fork in sessions:
        fork.close()
    return count / seconds


if __name__ == "__main__":
    sys.exit(main())
