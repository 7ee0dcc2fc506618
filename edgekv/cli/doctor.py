"""``edgekv doctor``: does it work here?"""

from __future__ import annotations

import contextlib
import faulthandler
import io
from typing import TYPE_CHECKING, Any

import click

from edgekv.cli.output import complete_model, console, json_option, print_facts, print_json, progress
from edgekv.wording import count, size

if TYPE_CHECKING:
    from edgekv.doctor import Finding, Report

_MARKS = {"ok": "ok", "warning": "warning", "failed": "FAILED"}


@click.command()
@click.argument("model", metavar="[NAME|FILE]", required=False, shell_complete=complete_model)
@json_option
def doctor(model: str | None, as_json: bool) -> int:
    """Check that edgekv and llama.cpp work here.

    Shows machine and build, tests every promise about the cache on tiny models made on the spot, and then on
    NAME|FILE (default: smollm2, if it was fetched) exact undo, quantised caches and speed. Takes some 10 seconds.
    Exits with 1 when something failed; warnings leave it at 0.
    """
    from edgekv.doctor import examine

    with contextlib.suppress(io.UnsupportedOperation, AttributeError):  # stderr may be closed, or no file
        faulthandler.enable()  # a crash inside llama.cpp at least says in which check
    with progress("checking", unit="steps") as update:
        report = examine(model, update)
    if as_json:
        print_json(_as_dict(report))
    else:
        _print(report)
    return int(report.failed > 0)


def _as_dict(report: Report) -> dict[str, Any]:
    return {
        "schema": "edgekv.doctor/1",
        "ok": not report.failed,
        "failed": report.failed,
        "warnings": report.warnings,
        "machine": report.machine,
        "build": report.build,
        "models": report.models,
        "checks": report.findings,
    }


def _print(report: Report) -> None:
    out = console()
    print_facts([*_machine(report), *_build(report)])
    out.print()
    print_facts((_MARKS[f.status], _sentence(f)) for f in report.findings)
    out.print()
    out.print(_verdict(report), soft_wrap=True)


def _machine(report: Report) -> list[tuple[str, str]]:
    m = report.machine
    quota = "" if m["cpu_quota"] is None else f"; a quota of {m['cpu_quota']:.3g} CPUs"
    threads = f"{count(m['threads_used'], 'thread')} used"
    return [
        ("CPU", f"{m['cpu']}, {count(m['cores'] or 0, 'core')}, {m['logical_cpus']} logical{quota}; {threads}"),
        ("RAM", f"{size(m['ram_free'])} free of {size(m['ram_total'])}"),
        ("system", f"{m['os']}, {m['python']}"),
    ]


def _build(report: Report) -> list[tuple[str, str]]:
    b = report.build
    llama = f" (llama.cpp {b['llama_cpp']})" if b["llama_cpp"] else ""
    return [
        ("edgekv", f"{b['edgekv']}, llama-cpp-python {b['llama_cpp_python'] or 'not found'}{llama}"),
        ("uses", ", ".join(b["features"]) or "nothing: llama.cpp does not load"),
    ]


def _sentence(finding: Finding) -> str:
    return f"{finding.name}: {finding.message}"


def _verdict(report: Report) -> str:
    checks = count(len(report.findings), "check")
    if report.failed:
        return f"{report.failed} of {checks} failed"
    if report.warnings:
        return f"{checks}, {count(report.warnings, 'warning')}, nothing failed"
    return f"{checks}, all is well"
