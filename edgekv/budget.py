"""A memory budget: sizes such as "256MiB", and the context that fits in one.

The budget is for the whole process, resident: weights, cache, llama.cpp's buffers, and Python with its libraries
(``MemoryEstimate.process``). It is what a container's limit or a board's RAM must hold; what your own program keeps
comes on top. ``ulimit -v`` counts address space: where one is set, what is chosen fits below it as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from . import memory
from .errors import TooLarge, UsageError
from .memory import MIB, MemoryEstimate
from .model import Model
from .settings import Settings
from .wording import num_bytes

USEFUL: Final = 2048  # cells; with fewer, smaller types and batches are tried
_FEW: Final = 512  # cells; only below that are gaps given up for a smaller type
_TYPES: Final = ("f16", "q8_0", "q4_0")
_BATCHES: Final = (512, 256, 128, 64, 32)
_LOGITS: Final = 4 * MIB


def parse_size(size: int | str) -> int:
    """Bytes of a budget, as :func:`~edgekv.wording.num_bytes`; raises UsageError for less than one, too."""
    wanted = num_bytes(size)
    if wanted < 1:
        raise UsageError(f"a memory budget is at least one byte, not {size!r}")
    return wanted


@dataclass(frozen=True)
class Fit:
    """Settings that fit in a budget, and what they need. note: what was given up for it, '' for nothing."""

    settings: Settings
    need: MemoryEstimate
    note: str


@dataclass(frozen=True)
class _Budget:
    """What must fit in what; None for what the user left open."""

    model: Model
    limit: int
    free: int
    settings: Settings
    n_ctx: int | None
    kv_type: str | None

    def need(self, settings: Settings) -> MemoryEstimate:
        return self.model.estimate(
            settings.n_ctx,
            settings.kv_type,
            min(settings.n_batch, memory.cells_for(settings.n_ctx)),
            settings.max_outputs(self.model.n_vocab),
            flash_attention=settings.flash_attention,
            free=self.free,
        )

    def holds(self, settings: Settings) -> bool:
        need = self.need(settings)
        return need.process <= self.limit and need.cache + need.buffers <= self.free

    def most(self, settings: Settings) -> Settings:
        """With the n_ctx that was given, or the largest that fits; with n_ctx 0 when none does."""
        if self.n_ctx is not None:
            return settings if self.holds(settings) else replace(settings, n_ctx=0)
        fits = memory.largest_that(self.model.n_ctx_train, lambda n: self.holds(replace(settings, n_ctx=n)))
        return replace(settings, n_ctx=fits)

    def candidates(self, kv_types: tuple[str, ...]) -> Iterator[Settings]:
        """The most cells of every type and batch, best first."""
        for kv_type in kv_types:
            for n_batch in self.batches():
                yield self.most(replace(self.settings, kv_type=kv_type, n_batch=n_batch))

    def batches(self) -> tuple[int, ...]:
        given = self.settings.n_batch
        return _BATCHES if given == Settings().n_batch else (given,)

    def best(self, kv_types: tuple[str, ...], enough: int) -> Settings | None:
        """The first candidate with enough cells, else the one with the most; None when nothing fits."""
        most: Settings | None = None
        for settings in self.candidates(kv_types):
            if settings.n_ctx >= min(enough, self.model.n_ctx_train) or (self.n_ctx and settings.n_ctx):
                return settings
            if settings.n_ctx and (most is None or settings.n_ctx > most.n_ctx):
                most = settings
        return most


def fit(model: Model, limit: int, settings: Settings, *, n_ctx: int | None = None, kv_type: str | None = None) -> Fit:
    """Choose n_ctx, KV type and batch for a process that may take ``limit`` bytes.

    What is given is kept: n_ctx, kv_type, and whatever of ``settings`` is not the default. Else f16 is taken where
    2,048 cells of it fit, then q8_0, then q4_0; types that could not close gaps only where the others give fewer than
    512 cells. The batch is halved, down to 32 tokens, before the type is. Raises TooLarge when nothing fits.
    """
    usual = Settings()
    n_ctx = n_ctx or (settings.n_ctx if settings.n_ctx != usual.n_ctx else None)
    kv_type = kv_type or (settings.kv_type if settings.kv_type != usual.kv_type else None)
    few_logits = _LOGITS if settings.logits_bytes == usual.logits_bytes else settings.logits_bytes
    settings = replace(settings, n_ctx=n_ctx or 1, kv_type=kv_type or "f16", logits_bytes=few_logits)
    settings.check()
    budget = _Budget(model, limit, memory.free_ram(), settings, n_ctx, kv_type)
    chosen = _choose(budget)
    if chosen is None:
        raise TooLarge(_too_small(budget))
    return Fit(chosen, budget.need(chosen), _note(model, chosen))


def _choose(budget: _Budget) -> Settings | None:
    closing, others = _types(budget)
    best = budget.best(closing, USEFUL) if closing else None
    if best is None or best.n_ctx < min(_FEW, budget.model.n_ctx_train, budget.n_ctx or _FEW):
        return max((budget.best(others, USEFUL), best), key=lambda s: s.n_ctx if s else 0)
    return best


def _types(budget: _Budget) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The types to try: those in which gaps close as well as the model allows, and those in which they stay open."""
    model, given = budget.model, budget.kv_type
    if given is not None:
        return (given,), ()
    quantised = budget.settings.flash_attention
    tried = [t for t in _TYPES if t == "f16" or (quantised and memory.check_head_size(model.header, t))]
    usual = bool(model.capabilities.close_gaps)
    closing = tuple(t for t in tried if bool(model.close_gaps(t)) == usual)
    return closing, tuple(t for t in tried if t not in closing)


def _note(model: Model, chosen: Settings) -> str:
    gaps = model.close_gaps(chosen.kv_type)
    notes = []
    if model.capabilities.close_gaps and not gaps:
        notes.append(gaps.reason)
    if chosen.n_ctx < min(USEFUL, model.n_ctx_train):
        notes.append(f"{chosen.n_ctx:,} cells are few for a conversation")
    return "; ".join(notes)


def _too_small(budget: _Budget) -> str:
    """What does not fit, and the budget that would do."""
    settings = _smallest(budget)
    need, useful = budget.need(settings), budget.need(replace(settings, n_ctx=_useful(budget)))
    parts = (
        f"a memory budget of {_mb(budget.limit)} is too small for {budget.model.path.name}: its weights take "
        f"{_mb(need.weights)}, Python and the libraries {_mb(need.program)}, buffers {_mb(need.buffers)} and "
        f"{memory.cells_for(settings.n_ctx):,} cells in {settings.kv_type} {_mb(need.cache)}"
    )
    if need.process <= budget.limit:
        return f"{parts}, and only {_mb(budget.free)} are free here"
    more = "" if useful == need else f" (for {_useful(budget):,} cells '{_whole_mb(useful.process)}')"
    return f"{parts}; memory_budget='{_whole_mb(need.process)}' would do{more}"


def _smallest(budget: _Budget) -> Settings:
    """What takes least of all that may be chosen."""
    kv_type = [*_types(budget)[0], *_types(budget)[1]][-1]
    n_ctx = budget.n_ctx or min(memory.CELL_STEP, budget.model.n_ctx_train)
    return replace(budget.settings, n_ctx=n_ctx, kv_type=kv_type, n_batch=budget.batches()[-1])


def _useful(budget: _Budget) -> int:
    return budget.n_ctx or min(USEFUL, budget.model.n_ctx_train)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def _whole_mb(num_bytes: int) -> str:
    """Rounded up, as it is to be typed."""
    return f"{-(-num_bytes // 10**6)}MB"
