"""The verdict: what the figures mean, in two sentences, and what to do.

Words for a KL divergence follow llama.cpp's yardstick for quantised weights (LLaMA-3-8B: q8_0 .0014, q4_K_M .031).
What lies within the noise floor is called that, and never a win.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Q8_0: Final = 0.0014
Q4_K_M: Final = 0.031
_NOISE: Final = 1.5  # times the floor: what a run of another day would still call noise
_FLAT: Final = 1e-4  # ms a token: no slope
_MASKS: Final = ("mask", "summary_mask", "mask_keep_gap")


def words(kld: float, floor: float) -> str:
    """What a mean KL divergence costs, in words."""
    if kld <= _NOISE * floor:
        return "within noise"
    extra = kld - floor
    if extra <= Q8_0:
        return "like q8_0 weights"
    if extra <= Q4_K_M:
        return "less than q4_K_M weights"
    if extra <= 3 * Q4_K_M:
        return "more than q4_K_M weights"
    return f"{extra / Q4_K_M:.0f} times q4_K_M weights"


def break_even(curve: list[dict[str, Any]]) -> float | None:
    """The suffix, in tokens, from which on a mask answers sooner than a restart: where their lines cross.

    A straight line through each arm's medians over the suffix lengths, at the longest span; None with fewer than two
    points, or where they do not cross. 0: from the first token on.
    """
    if not curve:
        return None
    longest = max(point["span"] for point in curve)
    rows = [p for p in curve if p["span"] == longest and {"mask", "restart"} <= set(p["arms"])]
    rows = [p for p in rows if all(p["arms"][a]["ttft_ms"]["median"] is not None for a in ("mask", "restart"))]
    if len(rows) < 2:
        return None
    suffix = [p["suffix"] for p in rows]
    gain = [p["arms"]["restart"]["ttft_ms"]["median"] - p["arms"]["mask"]["ttft_ms"]["median"] for p in rows]
    slope, start = np.polyfit(suffix, gain, 1)
    return None if slope < _FLAT else max(0.0, float(-start / slope))


def decide(data: dict[str, Any]) -> tuple[str, str]:
    """(advice, the verdict): "mask", "mask with recompute", "isolate", "restart", or "measure more"."""
    arms = data["arms"]
    name = next((n for n in _MASKS if n in arms), None)
    if name is None:
        return "measure more", "No arm of this run masks anything, so there is nothing to decide."
    floor = data["noise"]["vs_restart"].get("kld_mean")
    kld = arms[name]["vs_restart"].get("kld_mean")
    leaks = leak_words(arms, name)
    advice = _advice(data, name, kld, floor)
    return advice, f"{_first(data, name, kld, floor)} {leaks} {_ADVICE[advice]}"


_ADVICE: Final = {
    "mask": "Mask and go on.",
    "mask with recompute": 'Mask with then="auto" or "recompute" where the rest must not know of the span.',
    "isolate": "Read texts that are to go later with attend=, so that what follows them can be kept.",
    "restart": "Read again instead: behind so short a text it costs no more.",
    "measure more": "Run it with more cases to decide.",
}


def _first(data: dict[str, Any], name: str, kld: float | None, floor: float | None) -> str:
    point = max(data["curve"], key=lambda p: (p["span"], p["suffix"]), default=None)
    arm = "mask" if name == "summary_mask" else name
    said = ""
    if point is not None and {arm, "restart"} <= set(point["arms"]):
        mask, restart = (point["arms"][n]["ttft_ms"]["median"] for n in (arm, "restart"))
        if mask and restart and _overlap(*(point["arms"][n]["ttft_ms"]["iqr"] for n in (arm, "restart"))):
            said = f"With {point['suffix']:,} tokens behind the span, masking answered no sooner than a restart; "
        elif mask and restart:
            said = (
                f"With {point['suffix']:,} tokens behind the span, the first token came after {mask / 1e3:.2f} s "
                f"instead of {restart / 1e3:.2f} s ({max(restart / mask, mask / restart):.1f} times "
                f"{'sooner' if mask < restart else 'later'}); "
            )
    if kld is None or floor is None:
        return (said or "Nothing was timed; ") + "how near it is to a restart was not measured."
    return said + f"it differs from a restart by a mean KL of {kld:.4f}, {words(kld, floor)} (noise floor {floor:.4f})."


def _overlap(one: list[float], other: list[float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def leak_words(arms: dict[str, Any], name: str) -> str:
    """What the forced choice says, or that it can say nothing."""
    full, mask, restart = (arms.get(n, {}).get("leak") or {} for n in ("full", name, "restart"))
    if not mask.get("n"):
        return "What still leaks was not asked."
    if not _above(full, full["chance"]):
        return (
            f"Too small to tell what leaks: with the span in view the model finds {full['accuracy']:.0%} of the codes."
        )
    if _above(mask, max(mask["chance"], restart.get("accuracy") or 0)):
        found, chance = mask["accuracy"], mask["chance"]
        return f"The span is still decodable: {found:.0%} of its codes are found, chance is {chance:.0%}."
    low, high = mask["ci"]
    return (
        f"Its codes are found {mask['accuracy']:.0%} of the time ({low:.0%}-{high:.0%}, n {mask['n']}), chance is "
        f"{mask['chance']:.0%}: no direct recall was seen."
    )


def _above(leak: dict[str, Any], level: float) -> bool:
    return bool(leak.get("ci")) and leak["ci"][0] > level


def _advice(data: dict[str, Any], name: str, kld: float | None, floor: float | None) -> str:
    arms = data["arms"]
    even, behind = data.get("break_even_suffix"), data["workload"]["tokens_behind"]
    if even is not None and behind is not None and behind < even:
        return "restart"
    leak, restart = arms[name]["leak"], arms["restart"]["leak"]
    if leak.get("n") and _above(leak, max(leak["chance"], restart.get("accuracy") or 0)):
        return "mask with recompute"
    if kld is None or floor is None:
        return "measure more"
    if kld <= _NOISE * floor or kld - floor <= Q4_K_M:
        return "mask"
    isolated = arms.get("isolated", {}).get("vs_restart", {}).get("kld_mean")
    if isolated is not None and isolated <= _NOISE * floor and (behind or 0) > 64:
        return "isolate"
    return "mask with recompute"
