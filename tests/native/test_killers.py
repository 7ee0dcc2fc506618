"""Everything known to kill the process inside llama.cpp, tried through edgekv in a process of its own."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import killers_engine
import killers_session
import pytest
from killers import CASES

from helpers import python

assert killers_engine and killers_session  # imported for the cases they register

HERE = Path(__file__).resolve().parent
RUN = "import runpy, sys; sys.argv[0] = 'killers.py'; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


@pytest.fixture(scope="module")
def outcomes(tiny_path) -> dict[str, str]:
    """What became of every case. The process that dies is started again behind the case it died of."""
    folder = {tiny_path(kind).parent for kind, _ in CASES.values()}.pop()
    left, found = list(CASES), dict[str, str]()
    while left:
        done = python(f"import sys; sys.path.insert(0, {str(HERE)!r})\n{RUN}", HERE / "killers.py", folder, *left)
        for outcome, name, *why in re.findall(r"^(begin|wrong|fine) (\w+) ?(.*)$", done.stdout, re.MULTILINE):
            found[name] = f"{outcome} {why[0]}".strip()
        begun = [name for name in left if name in found]
        assert begun, done.stderr
        if found[begun[-1]] == "begin":
            found[begun[-1]] = f"died with {done.returncode}: {done.stderr[-500:]}"
        left = [name for name in left if name not in found]
    return found


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_killer_is_a_typed_error_and_the_session_goes_on(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == "fine"


# ---- llama.cpp still dies of it; where it does not any more, a guard may go ------------------------------------------

RAW = """
import sys, ctypes
from llama_cpp import llama_cpp as ll
ll.llama_backend_init()
model = ll.llama_model_load_from_file(sys.argv[1].encode(), ll.llama_model_default_params())
vocab = ll.llama_model_get_vocab(model)
params = ll.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max, params.kv_unified = 256, 32, 32, 8, True
def context():
    made = ll.llama_init_from_model(model, params)
    return made, ll.llama_get_memory(made)
def decode(ctx, n, n_seq=1):
    batch = ll.llama_batch_init(64, 0, 1)
    batch.n_tokens = n
    for i in range(n):
        batch.token[i], batch.pos[i], batch.logits[i] = 5, i, i == n - 1
        batch.n_seq_id[i], batch.seq_id[i][0] = n_seq, 0
    return ll.llama_decode(ctx, batch)
ctx, memory = context()
print("ready", flush=True)
"""

DEADLY = {
    "sequence beyond 255": ("llama", "ll.llama_memory_seq_rm(memory, 256, 0, -1)"),
    "batch beyond n_batch": ("llama", "decode(ctx, 33)"),
    "sampling with no logits": ("llama", "ll.llama_sampler_sample(ll.llama_sampler_init_greedy(), ctx, 0)"),
    "token outside the vocabulary": (
        "llama",
        "ll.llama_token_to_piece(vocab, 10**6, ctypes.create_string_buffer(9), 9, 0, True)",
    ),
    "shift on M-RoPE": ("mrope", "decode(ctx, 4); ll.llama_memory_seq_add(memory, 0, 2, 4, 0)"),
    "no sequence for a token": ("llama", "decode(ctx, 4, n_seq=0)"),
    "fewer rows than sequences": ("llama", "params.n_outputs_max = 4; ctx, memory = context(); decode(ctx, 4)"),
    "several streams": (
        "llama",
        "params.kv_unified = False; ctx, memory = context(); decode(ctx, 4); "
        "ll.llama_memory_seq_cp(memory, 0, 1, 1, 3)",
    ),
}


@pytest.mark.skipif(sys.platform == "win32", reason="signals as return codes are POSIX")
@pytest.mark.parametrize("name", DEADLY)
def test_llama_cpp_itself_still_dies_of_it(tiny_path, name: str) -> None:
    kind, code = DEADLY[name]
    done = python(f"{RAW}\n{code}\nprint('alive')", tiny_path(kind))
    assert done.stdout.split() == ["ready"], done.stderr
    assert done.returncode in (-signal.SIGABRT, -signal.SIGSEGV)
