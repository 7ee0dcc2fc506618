"""What a model file is, what its cache can do, and what cache fits in the RAM that is free here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import budget, memory, prompt
from .capabilities import Capabilities, Capability
from .model import Model
from .settings import Settings

CELLS = 4096  # the cache whose needs are told
_BATCH = 512


@dataclass(frozen=True)
class KvFigures:
    """One KV type: bytes of K and V a token, of ``CELLS`` cells, of everything with those, and the largest n_ctx.

    close_gaps: whether a gap can be closed in a cache of this type.
    """

    kv_type: str
    bytes_per_token: int
    bytes_cells: int
    bytes_total: int
    largest_n_ctx: int
    close_gaps: Capability


@dataclass(frozen=True)
class BudgetFigures:
    """What a memory budget gives, and what takes what of it, in bytes.

    ulimit_v: the address space such a process needs, see ``MemoryEstimate.address_space``. scoring: what ``score()``
    takes on top while it runs. note: what was given up, '' for nothing.
    """

    limit: int
    n_ctx: int
    kv_type: str
    n_batch: int
    program: int
    weights: int
    cache: int
    buffers: int
    process: int
    ulimit_v: int
    scoring: int
    note: str


@dataclass(frozen=True)
class Inspection:
    """Facts of one model. parts: files it is split into; size: bytes of all of them. description: what to call it.

    bos: the token every text begins with, as text. sliding_window: positions, 0 for none. budget: what one gives, None
    where none was asked for.
    """

    path: Path
    parts: int
    size: int
    fingerprint: str
    arch: str
    name: str
    description: str
    n_params: int
    quantisation: str
    n_ctx_train: int
    n_vocab: int
    bos: str | None
    chat_template: bool
    chatml: bool
    licence: str | None
    sliding_window: int
    capabilities: Capabilities
    ram_free: int
    kv: tuple[KvFigures, ...]
    metadata: dict[str, str]
    budget: BudgetFigures | None


def inspect(model: Model, memory_budget: int | str | None = None) -> Inspection:
    """Ask a loaded model; nothing is read or generated. Raises TooLarge when a cache does not fit in the budget."""
    ram_free = memory.free_ram()
    return Inspection(
        path=model.path,
        parts=len(model.parts),
        size=model.size,
        fingerprint=model.fingerprint,
        arch=model.arch,
        name=model.name,
        description=model.description,
        n_params=model.n_params,
        quantisation=model.quantisation,
        n_ctx_train=model.n_ctx_train,
        n_vocab=model.n_vocab,
        bos=None if model.bos is None else model.detokenize([model.bos]),
        chat_template=model.chat_template is not None,
        chatml=prompt.has_chatml(model),
        licence=model.metadata.get("general.license") or model.metadata.get("general.license.name"),
        sliding_window=model.n_swa,
        capabilities=model.capabilities,
        ram_free=ram_free,
        kv=tuple(_figures(model, kv_type) for kv_type in memory.KV_BLOCKS),
        metadata=model.metadata,
        budget=None if memory_budget is None else _in_budget(model, budget.parse_size(memory_budget)),
    )


def _in_budget(model: Model, limit: int) -> BudgetFigures:
    fit = budget.fit(model, limit, Settings())
    s, need = fit.settings, fit.need
    return BudgetFigures(
        limit,
        s.n_ctx,
        s.kv_type,
        s.n_batch,
        program=need.program,
        weights=need.weights,
        cache=need.cache,
        buffers=need.buffers,
        process=need.process,
        ulimit_v=need.address_space(s.threads),
        scoring=need.scoring,
        note=fit.note,
    )


def _figures(model: Model, kv_type: str) -> KvFigures:
    need = model.estimate(CELLS, kv_type)
    largest = memory.largest_context(model.header, model.size, kv_type, _BATCH)
    each = model.kv_bytes_per_token(kv_type)
    return KvFigures(kv_type, each, need.cache, need.total, largest, model.close_gaps(kv_type))
