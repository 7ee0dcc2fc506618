"""The figures of a report as rows of text: whole, for pages, and an overview for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from edgekv.compare.verdict import words
from edgekv.wording import count

TITLES: Final = {
    "full": "nothing hidden",
    "mask": "mask",
    "mask_keep_gap": "mask, gap kept",
    "mask_auto": 'mask, then="auto"',
    "mask_recompute": "mask, all read again",
    "isolated": "read in isolation, masked",
    "cache_reuse": "cut out, suffix moved",
    "restart": "restart, prefix reused",
    "restart_cold": "restart from token 0",
    "summary_mask": "document masked, summary kept",
    "summary_clean": "document masked, summary read again",
    "summary_restart": "new prompt with the summary",
    "placebo": "another stretch masked (its own restart)",
}


def header(data: dict[str, Any]) -> str:
    machine, model, work = data["machine"], data["model"], data["workload"]
    masked, behind = work["tokens_masked"], work["tokens_behind"]
    lengths = f", on average {masked:.0f} tokens masked and {behind:.0f} behind" if work["cases"] else ""
    if work["placebo_masked"] is not None:
        lengths += f" (placebo: {work['placebo_masked']:.0f} and {work['placebo_behind']:.0f})"
    cut = " Interrupted: only what was finished counts." if data["interrupted"] else ""
    if data["stopped"]:
        cut += f" Stopped by an error, {data['stopped']}: only what was finished counts."
    notes = "".join(f" {note}." for note in data["notes"])
    floor = data["noise"]["vs_restart"].get("kld_mean")
    noise = f" Noise floor: KL {floor:.4f}, the restart in other batches." if floor is not None else ""
    return (
        f"{model['name']} ({model['file']}), {model['kv_type']} KV, {machine['cpu']}, "
        f"{count(machine['threads'], 'thread')}, llama.cpp {machine['build']['llama_cpp']}. "
        f"Workload {work['name']}: {count(work['cases'], 'case')}, "
        f"{work['compared']} of them compared token by token{lengths}; seed {data['settings']['seed']}."
        f"{noise}{cut}{notes}"
    )


Block: TypeAlias = tuple[str, list[Sequence[str]]]


def blocks(data: dict[str, Any]) -> list[Block]:
    """The three blocks of figures, and the curve, as rows of text; the first row is the head."""
    found = [
        (f"Cost ({_longest(data)})", list(cost_rows(data))),
        ("Consistency, against the restart", list(consistency_rows(data, "vs_restart"))),
        ("Consistency, against nothing hidden", list(consistency_rows(data, "vs_full"))),
        ("What still leaks", list(leak_rows(data))),
        ("First token, in seconds, by the number of tokens behind the span", list(curve_rows(data))),
    ]
    return [(title, rows) for title, rows in found if len(rows) > 1]


def overview(data: dict[str, Any]) -> list[Block]:
    """The figures that decide, under the arms' names, in 80 columns: timings with quartiles, others with 95 %."""
    found = [
        (f"Cost ({_longest(data)})", list(_brief_cost(data))),
        ("Consistency, against the restart; 95 % intervals", list(_brief_consistency(data))),
        ("What still leaks", list(_brief_leak(data))),
    ]
    return [(title, rows) for title, rows in found if len(rows) > 1]


def _brief_cost(data: dict[str, Any]) -> Iterable[Sequence[str]]:
    yield ("", "edit, ms", "first token, s", "n", "read again", "decode, tok/s")
    for name, arm in data["arms"].items():
        if arm["n"]:
            ttft, speed = _spread(arm["ttft_ms"], 1e-3, 2), _spread(arm["decode_tps"], 1, 0)
            edit, again = f"{arm['edit_ms']['median']:.1f}", f"{arm['tokens_redecoded']:,}"
            yield (name, edit, ttft, str(arm["n"]), again, speed)


def _brief_consistency(data: dict[str, Any]) -> Iterable[Sequence[str]]:
    yield ("", "KL mean", "p99", "same top", "in words")
    floor = data["noise"]["vs_restart"]
    for name, vs in [*((n, a["vs_restart"]) for n, a in data["arms"].items()), ("noise floor", floor)]:
        if vs and name != "restart":
            said = words(vs, floor["kld_mean"]).removesuffix(" weights") if vs is not floor else "-"
            kld = _figure(vs, "kld_mean", "kld_ci", ".4f" if vs["kld_mean"] < 1 else ".2f")
            top = _figure(vs, "same_top", "same_top_ci", ".0%")
            yield (name, kld, f"{vs['kld_p99']:.3f}", top, said)


def _brief_leak(data: dict[str, Any]) -> Iterable[Sequence[str]]:
    yield ("", "codes found", "n", "channel index", "facts found")
    asked = [(n, a["leak"], a["facts"]) for n, a in data["arms"].items()]
    for name, leak, facts in [*asked, ("never told", data["controls"], {})]:
        if leak.get("n"):
            accuracy = _figure(leak, "accuracy", "ci", ".0%")
            yield (name, accuracy, str(leak["n"]), _channel(leak), _figure(facts, "accuracy", "ci", ".0%"))


def _longest(data: dict[str, Any]) -> str:
    point = max(data["curve"], key=lambda p: p["span"] + p["suffix"], default=None)
    return (
        f"{point['span']:,} tokens masked, {point['suffix']:,} behind; median, quartiles" if point else "not measured"
    )


def cost_rows(data: dict[str, Any]) -> Iterable[Sequence[str]]:
    yield (
        "",
        "edit, ms",
        "first token, s",
        "n",
        "read again",
        "decode, tokens/s",
        "compacted",
        "cells",
        "KV, MB",
        "peak RSS, MB",
    )
    for name, arm in data["arms"].items():
        if arm["n"]:
            yield (
                TITLES[name],
                _spread(arm["edit_ms"], 1, 1),
                _spread(arm["ttft_ms"], 1e-3, 2),
                str(arm["n"]),
                f"{arm['tokens_redecoded']:,}",
                _spread(arm["decode_tps"], 1, 0),
                _spread(arm["decode_compacted_tps"], 1, 0),
                f"{arm['cells_used']:,}",
                f"{arm['kv_bytes'] / 1e6:.1f}",
                f"{arm['rss_peak_bytes'] / 1e6:.0f}",
            )


def consistency_rows(data: dict[str, Any], reference: str) -> Iterable[Sequence[str]]:
    """Each figure with its 95 % interval; KL also over each of the texts: the true one, and the restart's own."""
    yield (
        *("", "KL mean", "in words", "tokens", "true text", "own text", "median", "p99", "same top", "RMS dp", "dNLL"),
        "same greedy tokens",
    )
    floor = data["noise"][reference].get("kld_mean")
    arms = {**data["arms"], "noise": {reference: data["noise"][reference]}}
    for name, arm in arms.items():
        vs = arm[reference]
        if vs and name != reference.removeprefix("vs_"):
            yield (
                TITLES.get(name, "noise floor"),
                _figure(vs, "kld_mean", "kld_ci", ".4f"),
                "-" if name == "noise" or floor is None else words(vs, floor),
                f"{vs['n']:,}",
                _figure(vs, "kld_true", "kld_true_ci", ".4f"),
                _figure(vs, "kld_greedy", "kld_greedy_ci", ".4f"),
                _figure(vs, "kld_median", "kld_median_ci", ".4f"),
                _figure(vs, "kld_p99", "kld_p99_ci", ".3f"),
                _figure(vs, "same_top", "same_top_ci", ".0%"),
                _figure(vs, "rms_dp", "rms_dp_ci", ".3f"),
                _figure(vs, "dnll", "dnll_ci", "+.3f"),
                _figure(vs, "greedy_match_tokens", "greedy_match_ci", ".0f"),
            )


def leak_rows(data: dict[str, Any]) -> Iterable[Sequence[str]]:
    yield ("", "found", "chance", "n", "leaned on", "not leaned on", "channel index", "visible facts found")
    for name, arm in data["arms"].items():
        if arm["leak"].get("n"):
            yield (TITLES[name], *_leak(arm["leak"]), _facts(arm["facts"]))
    if data["controls"].get("n"):
        yield ("control: never told", *_leak(data["controls"]), "-")


def _facts(facts: dict[str, Any]) -> str:
    parts = [f"{part} {facts[part]['accuracy']:.0%}" for part in ("before", "behind") if part in facts]
    return ", ".join([_figure(facts, "accuracy", "ci", ".0%"), *parts])


def _leak(leak: dict[str, Any]) -> tuple[str, ...]:
    return (
        _figure(leak, "accuracy", "ci", ".0%"),
        f"{leak['chance']:.0%}",
        str(leak["n"]),
        _share(leak.get("used")),
        _share(leak.get("unused")),
        _channel(leak),
    )


def _channel(leak: dict[str, Any]) -> str:
    return _figure(leak, "channel_index", "channel_index_ci", "+.2f")


def curve_rows(data: dict[str, Any]) -> Iterable[Sequence[str]]:
    names = [n for n in TITLES if any(n in p["arms"] for p in data["curve"])]
    yield ("masked", "behind", *(TITLES[n] for n in names))
    for point in data["curve"]:
        cells = [_spread(point["arms"][n]["ttft_ms"], 1e-3, 2) if n in point["arms"] else "-" for n in names]
        yield (f"{point['span']:,}", f"{point['suffix']:,}", *cells)


def _spread(found: dict[str, Any] | None, factor: float, digits: int) -> str:
    if not found or found["median"] is None:
        return "-"
    low, high = (q * factor for q in found["iqr"])
    return f"{found['median'] * factor:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def _figure(found: dict[str, Any], name: str, ci: str, form: str) -> str:
    """A value and its interval: 0.0233 (0.0131-0.0336)."""
    value, ends = found.get(name), found.get(ci)
    if value is None:
        return "-"
    if not ends:
        return f"{value:{form}}"
    low, high = (f"{end:{form}}" for end in ends)
    return f"{value:{form}} ({low.removesuffix('%')}{' to ' if '+' in form else '-'}{high})"


def _share(found: dict[str, Any] | None) -> str:
    return f"{found['accuracy']:.0%} of {found['n']}" if found and found.get("n") else "-"
