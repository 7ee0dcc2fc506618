"""What parking, saving and attaching cost against reading the same tokens again, and what an attached text is worth.

    python scripts/bench_files.py [--model smollm2] [--tokens 4000] [--rounds 9] [--json bench-files.json]

Medians, with the least and the most. Files lie in a temporary folder; they are in the page cache when they are read.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv import Model, Sampling, Session, Settings, numerics, prefill

TEXTS = sorted((Path(__file__).parents[1] / "tests" / "data" / "texts").glob("*.txt"))
SYSTEM = "You are a careful assistant. Answer from the text you were given.\n\n"
CHAT = "User: Good morning. I will send you a text in a moment.\nAssistant: Good morning. I am ready.\n\n"
QUESTION = "\n\nQuestion: What is this text about, and what is the most important thing in it?\nAnswer:"
ANSWER = 64
PARKED = 1000
CHARACTERS = 4000  # of each text that is attached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Model(options.model) as model:
        results: dict[str, Any] = {"model": options.model, "tokens": options.tokens}
        results["park"] = park(model, Path(folder), options.rounds, options.rounds // 2 + 1)
        show(park_lines(results["park"]))
        results["save"] = save(model, Path(folder), options.tokens, options.rounds, max(3, options.rounds // 3))
        show(save_lines(results))
        results["attach"] = attach(model, Path(folder))
        show(attach_lines(results["attach"]))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    return 0


def text_of(model: Model, count: int) -> npt.NDArray[np.int32]:
    tokens = np.concatenate([model.tokenize(p.read_text("utf-8")) for p in TEXTS])
    return np.resize(tokens, count)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def first_token(session: Session) -> None:
    session.generate(1).finish()


# -- park -----------------------------------------------------------------------------------------------------------


def park(model: Model, folder: Path, rounds: int, reads: int) -> dict[str, Any]:
    """Seconds to park 1,000 tokens and to bring them back, and to read them: appended, and dropped again."""
    size = PARKED * model.kv_bytes_per_token()
    found: dict[str, Any] = {"bytes": size, "read_s": []}
    with Session(model, settings=Settings(n_ctx=2560, n_sessions=1)) as session:
        session.append(text_of(model, 200))
        span = session.append(text_of(model, PARKED), name="span")
        session.append(text_of(model, 200))
        for to in ("ram", str(folder)):
            name = "ram" if to == "ram" else "folder"
            both = [
                (timed(lambda: session.park(span, to, gap="keep")), timed(lambda: session.unmask(span)))  # noqa: B023
                for _ in range(rounds + 1)
            ]
            found[name] = {"out_s": [a for a, _ in both[1:]], "back_s": [b for _, b in both[1:]]}
        for _ in range(reads):
            end = len(session.tokens)
            found["read_s"].append(timed(lambda: session.append(text_of(model, PARKED))))
            session.rewind(end)
    return found


# -- save and load --------------------------------------------------------------------------------------------------


def save(model: Model, folder: Path, num_tokens: int, rounds: int, reads: int) -> dict[str, Any]:
    """Seconds to save a session, and from nothing but the files to the first token: loaded, and read."""
    path, settings = folder / "chat.kvs", Settings(n_ctx=num_tokens + 512)
    found: dict[str, Any] = {"save_s": [], "load_s": [], "load_to_first_token_s": [], "read_to_first_token_s": []}
    with Session(model, settings=settings) as session:
        session.append(text_of(model, num_tokens))
        for _ in range(rounds):
            found["save_s"].append(timed(lambda: session.save(path)))
        found["bytes"] = path.stat().st_size
    for _ in range(rounds):
        began = time.perf_counter()
        with Session.load(path) as loaded:  # the model's file is opened, too
            found["load_s"].append(time.perf_counter() - began)
            first_token(loaded)
            found["load_to_first_token_s"].append(time.perf_counter() - began)
    for _ in range(reads):
        began = time.perf_counter()
        with Session(model.path, settings=settings) as session:
            session.append(text_of(model, num_tokens))
            first_token(session)
            found["read_to_first_token_s"].append(time.perf_counter() - began)
    return found


# -- attach ---------------------------------------------------------------------------------------------------------


def attach(model: Model, folder: Path) -> dict[str, Any]:
    """Each text: time to the first token of an answer, and KL of the answer's distributions from those where the text
    was read in place. At its own place behind the system prompt, and behind a chat."""
    found: dict[str, Any] = {"tokens": []}
    for text in TEXTS:
        content = text.read_text("utf-8")[:CHARACTERS]
        path = folder / f"{text.stem}.kv"
        found["tokens"].append(prefill(content, path, model, attend=SYSTEM).tokens)
        for place, front in (("own place", [SYSTEM]), ("behind a chat", [SYSTEM, CHAT])):
            add(found.setdefault(place, {}), answers(model, front, content, path))
    return found


def add(to: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        to.setdefault(name, []).append(value)


def answers(model: Model, front: list[str], content: str, path: Path) -> dict[str, Any]:
    """One text: what was read in place answers, and what the others make of that answer."""
    reference, seconds, answer = ask(model, front, lambda s: s.append(content))
    told: dict[str, Any] = {"read_s": seconds}
    ways: dict[str, tuple[Callable[[Session], object], int]] = {
        "floor": (lambda s: s.append(content), 37),
        "attached": (lambda s: s.attach(path), 512),
        "without": (lambda _s: None, 512),
    }
    for name, (bring, n_batch) in ways.items():
        rows, seconds, _ = ask(model, front, bring, answer, n_batch)
        told[f"{name}_kl"] = float(numerics.kl_divergence(reference, rows).mean())
        told[f"{name}_top"] = float(numerics.same_top(reference, rows).mean())
        told |= {"attached_s": seconds} if name == "attached" else {}
    return told


def ask(
    model: Model,
    front: list[str],
    bring: Callable[[Session], object],
    answer: list[int] | None = None,
    n_batch: int = 512,
) -> tuple[npt.NDArray[np.float32], float, list[int]]:
    """(float32 (64, n_vocab), seconds from the text to the first token, the tokens of the answer)."""
    with Session(model, settings=Settings(n_ctx=2560, n_batch=n_batch)) as session:
        for text in front:
            session.append(text)
        began = time.perf_counter()
        bring(session)
        session.append(QUESTION)
        session.logits()
        seconds = time.perf_counter() - began
        if answer is None:
            goes_on = Sampling(logit_bias=dict.fromkeys(model.end_tokens, -math.inf))
            answer = session.generate(ANSWER, sampling=goes_on).finish().tokens
            session.rewind(len(session.tokens) - len(answer))
        return session.logits_over(answer), seconds, answer


# -- results --------------------------------------------------------------------------------------------------------


def show(lines: Iterator[str]) -> None:
    for line in lines:
        print(line, flush=True)


def park_lines(found: dict[str, Any]) -> Iterator[str]:
    read, size = statistics.median(found["read_s"]), found["bytes"]
    yield f"{PARKED:,} tokens, {size / 1e6:.1f} MB of K and V; read in {spread(found['read_s'])} s"
    for name in ("ram", "folder"):
        for way in ("out", "back"):
            seconds = found[name][f"{way}_s"]
            rate, ratio = [size / s / 1e6 for s in seconds], read / statistics.median(seconds)
            yield f"parked to {name}, {way:4} {spread(rate, 0)} MB/s, {ratio:,.0f} times faster than reading"


def save_lines(results: dict[str, Any]) -> Iterator[str]:
    found = results["save"]
    yield f"session of {results['tokens']:,} tokens: a file of {found['bytes'] / 1e6:.1f} MB"
    yield f"saved in {spread(found['save_s'])} s, loaded in {spread(found['load_s'])} s"
    loaded, read = found["load_to_first_token_s"], found["read_to_first_token_s"]
    ratio = statistics.median(read) / statistics.median(loaded)
    yield f"to the first token: loaded {spread(loaded)} s, read {spread(read)} s, {ratio:.0f} times sooner"


def attach_lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"texts of {min(found['tokens']):,} to {max(found['tokens']):,} tokens, attached against read in place"
    for place in ("own place", "behind a chat"):
        at = found[place]
        yield f"{place}: first token after {spread(at['attached_s'])} s, read {spread(at['read_s'])} s"
        for name in ("floor", "attached", "without"):
            yield f"  {name:8} KL {spread(at[f'{name}_kl'], 4)}, same top {spread(at[f'{name}_top'])}"


def spread(values: list[float], digits: int = 2) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f}, n {len(values)})"


if __name__ == "__main__":
    sys.exit(main())
