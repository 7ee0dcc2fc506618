"""The machine, the build of llama.cpp, the models on disk: facts, and checks of what they mean together."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeAlias

import edgekv
from edgekv import catalog, memory, settings
from edgekv.doctor.checks import Check, Says
from edgekv.errors import FileError

Facts: TypeAlias = Mapping[str, Any]

#: name in /proc/cpuinfo -> name in llama_print_system_info(): what makes matrix products fast
_FEATURES: Final = {
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi2": "BMI2",
    "avx512f": "AVX512",
    "asimd": "NEON",
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
    "sve": "SVE",
}


def machine() -> Facts:
    import psutil

    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cpus": psutil.cpu_count(),
        "cpu_quota": settings.cpu_quota(),
        "threads_used": settings.default_threads(),
        "ram_total": int(psutil.virtual_memory().total),
        "ram_free": memory.free_ram(),
        "os": platform.platform(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def build() -> Facts:
    """Versions; ``system_info``: llama.cpp's own line, None where it does not load; ``features``: what it uses."""
    facts: dict[str, Any] = {"edgekv": edgekv.__version__, "llama_cpp_python": _version("llama-cpp-python")}
    try:
        facts["system_info"] = system_info()
        facts["llama_cpp"] = _llama_version()
    except (ImportError, OSError, RuntimeError):
        facts["system_info"] = facts["llama_cpp"] = None
    facts["features"] = features(facts["system_info"] or "")
    return facts


def models() -> list[Facts]:
    """Those known by name; path: None where the user has no folder for them."""
    try:
        return [{"name": e.name, "path": e.path, "size": e.size, "state": e.state()} for e in catalog.entries()]
    except FileError:
        return [{"name": e.name, "path": None, "size": e.size, "state": "absent"} for e in catalog.entries()]


def system_info() -> str:
    """llama.cpp's line of CPU features it was built with and found here."""
    from edgekv import _llama

    _llama.start()
    return " ".join(_llama.lib.llama_print_system_info().decode("utf-8", "replace").split()).strip("| ")


def features(info: str) -> list[str]:
    """The features a system info line has switched on: 'CPU : AVX = 1 | FMA = 0' -> ['AVX']."""
    pairs = (part.rpartition(":")[2].partition("=") for part in info.split("|"))
    return [name.strip() for name, _, value in pairs if value.strip() not in ("", "0")]


def missing_features(info: str, flags: set[str]) -> list[str]:
    """What this CPU has (its flags in /proc/cpuinfo) and this build of llama.cpp does not use."""
    used = set(features(info))
    return [name for flag, name in _FEATURES.items() if flag in flags and name not in used]


def _look_at_build() -> Says:
    info = system_info()
    idle = missing_features(info, _cpu_flags())
    figures = {"used": features(info), "idle": idle}
    if {"AVX2", "FMA", "NEON"} & set(idle):
        return Says(
            f"llama.cpp was built without {', '.join(idle)}, which this CPU has: it will be slow; build it here with "
            "pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python",
            "warning",
            figures,
        )
    beside = f"; not used, though this CPU has it: {', '.join(idle)}" if idle else ""
    return Says(f"loads, with every call edgekv needs{beside}", figures=figures)


def _look_at_models() -> Says:
    try:
        states = {entry.name: entry.state() for entry in catalog.entries()}
    except FileError as err:
        return Says(str(err), "warning")
    broken = [name for name, state in states.items() if state == "wrong size"]
    here = [name for name, state in states.items() if state == "present"]
    if broken:
        return Says(f"{', '.join(broken)} is not as long as it should be: edgekv models fetch {broken[0]}", "warning")
    if not here:
        return Says(f"none of those known by name is here; edgekv models fetch {catalog.DEFAULT} brings the default")
    return Says(f"{', '.join(here)} in {catalog.models_dir()}")


CHECKS: Final = (Check("llama.cpp", _look_at_build), Check("models", _look_at_models))


def others_busy() -> Callable[[], float]:
    """Start a watch; its answer is the share of all CPUs, 0 to 1, that other processes have used since."""
    import psutil

    def used() -> tuple[float, float]:
        whole, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = whole.idle + getattr(whole, "iowait", 0.0)
        return sum(whole) - idle - own.user - own.system, sum(whole)

    busy_before, all_before = used()

    def share() -> float:
        busy, all_now = used()
        return min(1.0, max(0.0, (busy - busy_before) / max(all_now - all_before, 1e-9)))

    return share


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _llama_version() -> str | None:
    from edgekv import _llama

    ask = getattr(_llama.lib, "llama_version", None)
    told = ask() if ask else None
    return told.decode("utf-8", "replace") if isinstance(told, bytes) else None


def _cpu_name() -> str:
    for key in ("model name", "Hardware", "Model"):
        if name := _cpuinfo().get(key):
            return name
    return platform.processor() or platform.machine()


def _cpu_flags() -> set[str]:
    facts = _cpuinfo()
    return set((facts.get("flags") or facts.get("Features") or "").split())


def _cpuinfo() -> dict[str, str]:
    """The first value of every key in /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found
