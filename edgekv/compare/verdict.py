"""The verdict: what the figures mean, in a few sentences, and what to do.

Words for a KL divergence follow llama.cpp's yardstick for quantised weights (LLaMA-3-8B: q8_0 .0014, q4_K_M .031), and
are those of its interval's upper end: what has not been ruled out counts. What lies within the noise floor is called
that, and never a win.
"""

from __future__ import annotations

from typing import Any, Final

from edgekv.compare.arms import SAME_COST
from edgekv.compare.payoff import TURNS, nearest
from edgekv.edits import BUDGET
from edgekv.wording import count

Q8_0: Final = 0.0014
Q4_K_M: Final = 0.031
_NOISE: Final = 1.5  # times the floor: the upper end of what another day's noise floor would be
_TELLS: Final = 0.05  # of the channel index: more of the span's information than a rounding
_RULED_OUT: Final = 0.2  # of what can be found with the span in view: what "nothing" must rule out
_WIDE: Final = 0.4  # an interval that tells nothing of the model: that of fewer than about twenty answers
_UNCLEAR: Final = ("too few cases", "not clear", "the noise is too large")

#: The arms a verdict may be about, by what it would advise
_ADVISED: Final = {
    **dict.fromkeys(("mask", "summary_mask", "mask_keep_gap", "cache_reuse"), "mask"),
    **dict.fromkeys(("mask_auto", "mask_recompute", "summary_clean"), "mask with recompute"),
    "isolated": "isolate",
}


def words(vs: dict[str, Any], floor: float) -> str:
    """What a divergence costs, in words; ``vs`` holds its mean and interval."""
    if not vs["kld_ci"]:
        return "too few cases"
    low, high = vs["kld_ci"]
    if high <= _NOISE * floor:
        return "within noise" if floor <= Q4_K_M else "the noise is too large"
    if high <= Q8_0:
        return "like q8_0 weights"
    if high <= Q4_K_M:
        return "less than q4_K_M weights"
    if low <= Q4_K_M:
        return "about q4_K_M weights" if low > _NOISE * floor else "not clear"
    factor = vs["kld_mean"] / Q4_K_M
    return "more than q4_K_M weights" if factor < 3 else f"{factor:.0f}x q4_K_M weights"


def decide(data: dict[str, Any]) -> tuple[str, str]:
    """(advice, the verdict): "mask", "mask with recompute", "isolate", "restart", or "measure more"."""
    arms, name = data["arms"], masking_arm(data["arms"])
    if name is None:
        return "measure more", "No arm of this run masks anything, so there is nothing to decide."
    floor = data["noise"]["vs_restart"].get("kld_mean")
    leaks, leak_said = leak_words(arms, name)
    lost = _loses_facts(arms, name)
    said = [_sooner(data, name), _near(data, name, floor), leak_said]
    if lost:
        mine, restart = (arms[n]["facts"]["accuracy"] for n in (name, "restart"))
        said.append(f"It finds {mine:.0%} of the facts that stayed visible, a restart {restart:.0%}.")
    if data["break_even"]["said"] != "not measured":
        said.append(f"Break-even lies {data['break_even']['said']}.")
    advice = _advice(data, name, floor, gives_away=leaks == "leaks" or lost)
    said.append(_ADVICE[advice].format(again=_again(data["workload"]["tokens_behind"])))
    if advice in ("mask", "isolate") and leaks != "nothing":
        said.append("What leaks is not known.")
    return advice, " ".join(said)


def masking_arm(arms: dict[str, Any]) -> str | None:
    """The arm the verdict speaks of."""
    return next((n for n in _ADVISED if n in arms), None)


_ADVICE: Final = {
    "mask": "Mask and go on.",
    "mask with recompute": "{again} where the rest must not know of the span.",
    "isolate": "Read texts that are to go later with attend=, so that what follows them can be kept.",
    "restart": "Start again instead: at these lengths a mask was not seen to be sooner.",
    "measure more": "Measure more to decide: more cases, or more repeats.",
}


def _again(behind: float | None) -> str:
    """The way to read again what stands behind the span, as long as that is."""
    if behind is not None and behind <= BUDGET:
        return f'Mask with then="auto", which reads the {behind:.0f} tokens behind the span again,'
    return 'Mask with then="recompute", which reads as much again as a restart,'


# -- sentences ------------------------------------------------------------------------------------------------------


def _sooner(data: dict[str, Any], name: str) -> str:
    timed = nearest(data, name)
    if timed is None:
        return f"The arm {name} was not timed."
    point, found = timed
    begin = f"With {point['span']:,} tokens masked and {point['suffix']:,} behind, the nearest lengths timed, {name}"
    if found.sooner is None:
        return f"{begin} was not seen to answer sooner than a restart (n {found.turns})."
    a, b = (point["arms"][n]["ttft_ms"]["median"] / 1e3 for n in (SAME_COST.get(name, name), "restart"))
    times = f"{max(a / b, b / a):.1f} times {'sooner' if found.sooner else 'later'}"
    return f"{begin} gave its first token after {a:.2f} s, a restart after {b:.2f} s ({times}, n {found.turns})."


def _near(data: dict[str, Any], name: str, floor: float | None) -> str:
    vs, work = data["arms"][name]["vs_restart"], data["workload"]
    if not vs or floor is None:
        return "How near it is to a restart was not measured."
    spread = " ({:.4f}-{:.4f})".format(*vs["kld_ci"]) if vs["kld_ci"] else ""
    lengths = f"about {work['tokens_masked']:.0f} tokens masked and {work['tokens_behind']:.0f} behind"
    return (
        f"Over {count(vs['cases'], 'case')} with {lengths}, it differs from a restart by a mean KL of "
        f"{vs['kld_mean']:.4f}{spread}: {words(vs, floor)} (noise floor {floor:.4f})."
    )


def leak_words(arms: dict[str, Any], name: str) -> tuple[str, str]:
    """("leaks", "nothing", "unknown" or "not asked", and the sentence): what the forced choice says, or that it can
    say nothing."""
    full, mine, restart = (arms.get(n, {}).get("leak") or {} for n in ("full", name, "restart"))
    if not mine.get("n") or not full.get("n") or not restart.get("n"):
        return "not asked", "What still leaks was not asked."
    low, high = mine["ci"]
    found = f"{mine['accuracy']:.0%} of its codes are found ({low:.0%}-{high:.0%}, n {mine['n']})"
    than = f"a restart finds {restart['accuracy']:.0%}"
    if full["ci"][0] <= max(full["chance"], restart["ci"][1]):
        return "unknown", _too_small(full, restart)
    if _recalls(mine, restart):
        return "leaks", f"The span is still decodable: {found}, {than}."
    if part := next((p for p in ("used", "unused") if p in mine and _recalls(mine[p], restart[p])), None):
        lean = "leans on them" if part == "used" else "does not lean on them"
        return "leaks", (
            f"The span is still decodable where the text behind {lean}: {mine[part]['accuracy']:.0%} of "
            f"{mine[part]['n']} codes are found, by a restart {restart[part]['accuracy']:.0%}."
        )
    if (index := mine.get("channel_index_ci")) and index[0] > _TELLS:
        return (
            "leaks",
            f"The span is still decodable: {index[0]:.0%}-{index[1]:.0%} of what it told about its codes is left.",
        )
    level = max(mine["chance"], restart["accuracy"])
    if high - level > _RULED_OUT * (full["accuracy"] - level) or (index and index[1] > _RULED_OUT):
        return "unknown", f"Too few cases to tell what leaks: {found}, {than}."
    return "nothing", f"No direct recall was seen: {found}, {than}."


def _too_small(full: dict[str, Any], restart: dict[str, Any]) -> str:
    seen = f"with the span in view the model finds {full['accuracy']:.0%} of its codes"
    if full["ci"][1] - full["ci"][0] > _WIDE:
        return f"Too few cases to tell what leaks: {seen} (n {full['n']})."
    if restart["ci"][0] > restart["chance"]:
        return f"A restart finds {restart['accuracy']:.0%} of the codes: what stays visible tells them."
    return f"Too small to tell what leaks: {seen} (n {full['n']})."


def _recalls(mine: dict[str, Any], restart: dict[str, Any]) -> bool:
    """More than chance and more than a restart would."""
    return bool(mine["ci"][0] > mine["chance"] and mine["accuracy"] > restart["ci"][1])


def _loses_facts(arms: dict[str, Any], name: str) -> bool:
    """Whether fewer of the visible facts are found than by a restart."""
    mine, restart = (arms.get(n, {}).get("facts") or {} for n in (name, "restart"))
    if not mine.get("n") or not restart.get("n"):
        return False
    return bool(mine["accuracy"] < restart["ci"][0] and mine["ci"][1] < restart["accuracy"])


# -- advice ---------------------------------------------------------------------------------------------------------


def _advice(data: dict[str, Any], name: str, floor: float | None, *, gives_away: bool) -> str:
    arms, behind = data["arms"], data["workload"]["tokens_behind"]
    if gives_away:
        return "mask with recompute"
    said = words(arms[name]["vs_restart"], floor) if arms[name]["vs_restart"] and floor is not None else _UNCLEAR[0]
    if said in _UNCLEAR:
        return "measure more"
    timed = nearest(data, name)
    if _ADVISED[name] == "mask" and (timed is None or not timed[1].sooner):
        return "restart" if timed and timed[1].turns >= TURNS else "measure more"
    if said in ("within noise", "like q8_0 weights", "less than q4_K_M weights"):
        return _ADVISED[name]
    if floor is not None and (behind or 0) > BUDGET and _isolation_helps(arms, floor):
        return "isolate"
    return "mask with recompute"


def _isolation_helps(arms: dict[str, Any], floor: float) -> bool:
    isolated = arms.get("isolated", {}).get("vs_restart")
    return bool(isolated) and words(isolated, floor) == "within noise" and leak_words(arms, "isolated")[0] != "leaks"
