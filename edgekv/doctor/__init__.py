"""Whether edgekv and llama.cpp work here: machine, build, models, and a self-test of every promise about the cache.

machine    the facts of machine, build and models, and what is odd about them
selftest   checks on tiny random models, written to a temporary folder: no download, two seconds
on_model   checks on a real model: exact undo, what a quantised cache does to it, its speed
checks     a check, its finding, and how a failure becomes one
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edgekv import catalog
from edgekv.doctor import machine
from edgekv.doctor.checks import Check, Finding, carry_out
from edgekv.doctor.machine import Facts
from edgekv.errors import FileError

__all__ = ["Check", "Finding", "Report", "examine"]

Tick = Callable[[int, int], None]


@dataclass(frozen=True)
class Report:
    """Facts as name -> value, and findings in the order they were made."""

    machine: Facts
    build: Facts
    models: list[Facts]
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> int:
        return sum(f.status == "failed" for f in self.findings)

    @property
    def warnings(self) -> int:
        return sum(f.status == "warning" for f in self.findings)


def examine(model: str | None = None, tick: Tick | None = None) -> Report:
    """Run every check; ``model`` is a name or path, None for the default model if it is on disk.

    Never raises for what it finds: a check that stumbles is a finding. ``tick`` is told (checks done, checks in all).
    """
    findings = [carry_out(check) for check in machine.CHECKS]
    if not any(f.status == "failed" for f in findings):
        with _self_tests(model or _default()) as checks:
            total = len(findings) + len(checks)
            for check in checks:
                findings.append(carry_out(check))
                if tick is not None:
                    tick(len(findings), total)
    return Report(machine.machine(), machine.build(), machine.models(), tuple(findings))


def _default() -> str | None:
    """The default model's name where its file is here."""
    with suppress(FileError):  # no folder for models
        if catalog.find(catalog.DEFAULT).state() == "present":
            return catalog.DEFAULT
    return None


@contextmanager
def _self_tests(model: str | None) -> Iterator[list[Check]]:
    """The checks that need llama.cpp, and what they need while they run."""
    from edgekv.doctor import on_model, selftest

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgekv-doctor-")))
        real = stack.enter_context(on_model.checks(model)) if model is not None else [on_model.LEFT_OUT]
        yield [*selftest.checks(folder), *real]
