"""Paired timings: edgekv against bare llama.cpp calls, in one run, as ratios.

    python scripts/bench.py [--model smollm2] [--rounds 7] [--json bench.json]

Every pair does the same work on the same weights, turn and turn about, so that a machine whose speed drifts slows both.
A ratio above 1 means edgekv was faster. Each figure is the median of ``rounds`` pairs, with the least and the most.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgekv import Engine, Model, Session, Settings, tiny
from edgekv._llama import lib

PROMPT = 256
PREFILL = 1024
TOKENS = 64
MASK_CELLS = 8192
MASK_SPANS = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = Settings(n_ctx=2048)
    results: dict[str, Any] = {"machine": f"{platform.machine()}, {settings.threads} threads", "model": options.model}
    for name, work in (("generate", GeneratePair), ("append", AppendPair)):
        with (
            Model(options.model) as model,
            Session(model, settings=settings) as session,
            Engine(model, settings) as bare,
        ):
            pair = work(session, Bare(bare))
            results[name] = paired((pair.ours, pair.theirs), options.rounds)
    results["mask_ms"], results["unmask_ms"] = mask_times()
    results["import_ms"] = process_times(["-c", "import edgekv"], options.rounds)
    results["help_ms"] = process_times(["-m", "edgekv", "--help"], options.rounds)
    if Path("/proc/self/status").exists():
        results["peak_rss_mb"] = {name: peak_rss(code, options.model) for name, code in RSS.items()}
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    return 0


def show(results: dict[str, Any]) -> None:
    print(f"{results['model']}, {results['machine']}")
    for name, unit in (("generate", "tokens/s"), ("append", "tokens/s")):
        r = results[name]
        print(
            f"{name:10} edgekv {r['edgekv']:8.1f} {unit}, bare {r['bare']:8.1f}, ratio {r['ratio']:.3f} "
            f"({r['ratio_min']:.3f}-{r['ratio_max']:.3f}), {r['n']} pairs"
        )
    for name in ("mask_ms", "unmask_ms", "import_ms", "help_ms"):
        r = results[name]
        print(f"{name:10} median {r['median']:8.3f}, least {r['min']:.3f}, most {r['max']:.3f}, n {r['n']}")
    for name, mb in results.get("peak_rss_mb", {}).items():
        print(f"peak RSS   {mb:8.1f} MB  {name}")


# -- pairs ----------------------------------------------------------------------------------------------------------

Work = Callable[[], float]  # does it once, returns tokens/s


def paired(pair: tuple[Work, Work], rounds: int) -> dict[str, float]:
    """Turn and turn about, the first of each not counted."""
    ours, theirs = pair
    ours(), theirs()
    speeds = [(ours(), theirs()) if i % 2 else (theirs(), ours())[::-1] for i in range(rounds)]
    ratios = [a / b for a, b in speeds]
    return {
        "edgekv": statistics.median(a for a, _ in speeds),
        "bare": statistics.median(b for _, b in speeds),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "n": rounds,
    }


def prompt_tokens(model: Model, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    text = (Path(__file__).parents[1] / "edgekv" / "data" / "field_report.txt").read_text("utf-8")
    return model.tokenize(text)[:count]


class GeneratePair:
    """Greedy tokens behind a prompt."""

    def __init__(self, session: Session, bare: Bare) -> None:
        self._session, self._bare = session, bare
        prompt = prompt_tokens(session.model, PROMPT)
        session.append(prompt)
        bare.read(prompt)

    def ours(self) -> float:
        began = time.perf_counter()
        generation = self._session.generate(TOKENS).finish()
        seconds = time.perf_counter() - began
        self._session.rewind(generation.span)
        self._session.logits()
        return len(generation.tokens) / seconds

    def theirs(self) -> float:
        return self._bare.generate(TOKENS)


class AppendPair:
    """A prompt, from an empty cache."""

    def __init__(self, session: Session, bare: Bare) -> None:
        self._session, self._bare = session, bare
        self._tokens = prompt_tokens(session.model, PREFILL)

    def ours(self) -> float:
        began = time.perf_counter()
        span = self._session.append(self._tokens)
        seconds = time.perf_counter() - began
        self._session.rewind(span)
        return len(self._tokens) / seconds

    def theirs(self) -> float:
        began = time.perf_counter()
        self._bare.read(self._tokens)
        seconds = time.perf_counter() - began
        self._bare.clear()
        return len(self._tokens) / seconds


class Bare:
    """The shortest loop over llama.cpp's own calls that does the work; no checks, no bookkeeping."""

    def __init__(self, engine: Engine) -> None:
        self._ctx = engine.ctx  # the same context parameters; nothing else of the engine is used
        self._memory = lib.llama_get_memory(self._ctx)
        self._batch = lib.llama_batch_init(engine.n_batch, 0, 1)
        self._n_batch = engine.n_batch
        self._cursor = 0
        self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        lib.llama_sampler_chain_add(self._chain, lib.llama_sampler_init_greedy())

    def read(self, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        for at in range(0, len(tokens), self._n_batch):
            part = np.ascontiguousarray(tokens[at : at + self._n_batch])
            positions = np.arange(self._cursor, self._cursor + len(part), dtype=np.int32)
            ctypes.memmove(self._batch.token, part.ctypes.data, 4 * len(part))
            ctypes.memmove(self._batch.pos, positions.ctypes.data, 4 * len(part))
            for i in range(len(part)):
                self._batch.n_seq_id[i], self._batch.seq_id[i][0], self._batch.logits[i] = 1, 2, 0
            self._batch.logits[len(part) - 1] = 1
            self._batch.n_tokens = len(part)
            assert lib.llama_decode(self._ctx, self._batch) == 0
            self._cursor += len(part)

    def generate(self, count: int) -> float:
        start = self._cursor
        began = time.perf_counter()
        batch, chain, ctx = self._batch, self._chain, self._ctx
        batch.n_tokens = 1
        for _ in range(count):
            batch.token[0] = lib.llama_sampler_sample(chain, ctx, -1)
            batch.pos[0], batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = self._cursor, 1, 2, 1
            assert lib.llama_decode(ctx, batch) == 0
            self._cursor += 1
        lib.llama_synchronize(ctx)
        seconds = time.perf_counter() - began
        lib.llama_memory_seq_rm(self._memory, 2, start, -1)
        self._cursor = start
        self._reread(start)
        return count / seconds

    def _reread(self, start: int) -> None:
        """The logits of the prompt's last token again, as the other side has to."""
        lib.llama_memory_seq_rm(self._memory, 2, start - 1, -1)
        self._batch.pos[0] = start - 1
        assert lib.llama_decode(self._ctx, self._batch) == 0

    def clear(self) -> None:
        lib.llama_memory_seq_rm(self._memory, 2, 0, -1)
        self._cursor = 0


# -- edits ----------------------------------------------------------------------------------------------------------


def mask_times() -> tuple[dict[str, float], dict[str, float]]:
    """mask and unmask with gap="keep" of each of 50 spans in 8,192 cells; metadata only, so a tiny model will do."""
    settings = Settings(n_ctx=MASK_CELLS, n_threads=1)
    size, rng = (MASK_CELLS - 8) // MASK_SPANS, np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        Model(tiny.write(Path(folder) / "tiny.gguf")) as model,
        Session(model, settings=settings) as session,
    ):
        session.append(rng.integers(4, 260, 4).tolist())  # attention sinks
        spans = [session.append(rng.integers(4, 260, size).tolist()) for _ in range(MASK_SPANS)][:-1]
        masks = [timed(partial(session.mask, span, gap="keep")) for span in spans]
        unmasks = [timed(partial(session.unmask, span)) for span in spans]
    return spread(masks), spread(unmasks)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


# -- processes ------------------------------------------------------------------------------------------------------

# The kernel's own high-water mark of this program: ru_maxrss would start at the size of the process that forked it.
PEAK = """
import re, pathlib
status = pathlib.Path("/proc/self/status")
print(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1])
"""
RSS = {
    "edgekv.Session": """
import sys
from edgekv import Session
session = Session(sys.argv[1], n_ctx=4096)
session.append(open(sys.argv[2]).read())
session.generate(16).finish()
""",
    "llama_cpp.Llama": """
import sys
from edgekv import catalog, settings
from llama_cpp import Llama
threads = settings.physical_cores()
llama = Llama(str(catalog.resolve(sys.argv[1])), n_ctx=4096, n_batch=512, flash_attn=True, swa_full=True,
              n_threads=threads, n_threads_batch=threads, verbose=False)
llama.eval(llama.tokenize(open(sys.argv[2], 'rb').read()))
for _ in range(16):
    llama.eval([llama.sample(temp=0)])
""",
}


def peak_rss(code: str, model: str) -> float:
    """Peak resident memory, in MB, of a process that reads the report and generates 16 tokens at n_ctx 4096."""
    report = Path(__file__).parents[1] / "edgekv" / "data" / "field_report.txt"
    command = [sys.executable, "-c", code + PEAK, model, str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) * 1024 / 1e6


def process_times(arguments: list[str], rounds: int) -> dict[str, float]:
    """Milliseconds of whole processes; the interpreter's own start is in it."""
    command = [sys.executable, *arguments]
    run = partial(subprocess.run, command, capture_output=True, check=True)
    return spread([timed(run) for _ in range(rounds)])


if __name__ == "__main__":
    sys.exit(main())
