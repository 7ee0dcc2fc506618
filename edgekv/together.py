"""Several generations in step: one token of each in every batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from . import recovery
from ._llama import uninterrupted
from .errors import ContextFull, EdgekvError, UsageError
from .generation import Generation


def decode_together(generations: Iterable[Generation]) -> Iterator[tuple[int, str]]:
    """Run generations of several sessions on one engine, a token of each in one batch; yields (number, piece).

    A batch reads the model's weights once for all of them, which is what a CPU waits for: four forks go on at well
    over the speed of one after the other. Each generation keeps its own sampling, stop strings and length, and is
    afterwards as if it had run alone. Left half read, all stay where they are, as a single one does.

    Raises UsageError unless each belongs to another session of the same engine; ContextFull when not every one of
    them finds a free cell (all end, and keep what was said); what one raises alone (GrammarStuck, ...) after the
    others have had their token, and they can go on.
    """
    together = list(generations)
    _check(together)
    left = True
    while left:
        with together[0].host.lock:
            for g in together:
                g.settle()
            together[0].host.engine.check_idle()
            going = [g for g in together if not g.finished]
            left = bool(going)
            with uninterrupted():
                _step(going)
            pieces = [(number, g.release()) for number, g in enumerate(together)]
        yield from ((number, piece) for number, piece in pieces if piece)


def _check(together: Sequence[Generation]) -> None:
    if not together:
        raise UsageError("there is nothing to decode: give at least one generation")
    if len({id(g.host.engine) for g in together}) > 1:
        raise UsageError("generations that decode together belong to sessions of one engine, such as forks")
    if len({id(g.host) for g in together}) < len(together) or len({g.host.sequence for g in together}) < len(together):
        raise UsageError("each generation needs a session of its own; fork() makes one")


def _step(going: Sequence[Generation]) -> None:
    """A token for each: all are drawn, then read in one batch."""
    errors: list[BaseException] = []
    for g in going:
        if not g.started:
            g.begin()
    try:
        for g in going:
            g.cut_short = True
        if going:
            records = [g.host.record for g in going]
            recovery.whole(going[0].host.engine, records, lambda: _read(_drawn(going, errors)), going)
        for g in going:
            g.cut_short = False
    except BaseException:
        for g in going:
            g.cut_short = True
            g.settle()
        raise
    if errors:
        raise errors[0]


def _drawn(going: Sequence[Generation], errors: list[BaseException]) -> list[tuple[Generation, int]]:
    return [(g, token) for g in going if (token := _draw(g, errors)) is not None]


def _draw(generation: Generation, errors: list[BaseException]) -> int | None:
    try:
        return generation.draw()
    except EdgekvError as err:
        generation.give_up()
        errors.append(err)
        return None


def _read(drawn: Sequence[tuple[Generation, int]]) -> None:
    if not drawn:
        return
    engine = drawn[0][0].host.engine
    if engine.cells_free < len(drawn):
        raise ContextFull(
            f"{len(drawn)} generations need a free cell each and {engine.cells_free} are free; evict something, "
            "or go on with fewer"
        )
    rows = engine.decode([g.host.chunk(token) for g, token in drawn], [g.host.holder for g, _ in drawn])
    for (generation, token), row in zip(drawn, rows, strict=True):
        generation.host.was_read(token, row)
    for generation, token in drawn:  # a stop string may be read again, into the rows of the others
        generation.take(token)
