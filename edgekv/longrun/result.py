"""What a run found: every turn of every way, and the figures and sentences that come of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from edgekv import policies
from edgekv.doctor import machine
from edgekv.longrun.options import Options
from edgekv.longrun.ways import WAYS, Turn
from edgekv.memory import cells_for
from edgekv.model import Model
from edgekv.wording import count

SCHEMA: Final = "edgekv.bench-chat/1"
TITLES: Final = {
    "mask": "mask",
    "summarise": "summarise, mask",
    "reread": "trim, read again",
    "llama_cpp": "llama_cpp.Llama",
}
_HEAD: Final = (
    *("times in s", "TTFT\nturn 5", "TTFT\nat end", "ratio", "TTFT\nmedian", "TTFT\nworst", "total\ntime"),
    *("tokens\nread", "new\ntokens", "read\nagain"),
)
_EARLY: Final = slice(2, 7)
_LATE: Final = slice(-5, None)
_ALIKE: Final = 1.2  # times that a noisy machine makes of nothing
_BUSY: Final = 0.1  # of all CPUs


@dataclass(frozen=True)
class Figures:
    """Of one way. early_ms: to the first token around turn 5 (median of turns 3 to 7); late_ms: of the last five;
    ratio: late to early. median_ms, worst_ms: of all turns. total_ms: of the whole conversation. prefilled, generated,
    new: sums of the turns'. read: of prefilled and generated; again: those read beyond the new ones. summaries: made.
    waited_ms: the median of turns that made one. None where no turn tells."""

    early_ms: float | None
    late_ms: float | None
    ratio: float | None
    median_ms: float | None
    worst_ms: float | None
    total_ms: float
    prefilled: int
    generated: int
    read: int
    new: int
    again: int
    summaries: int
    waited_ms: float | None

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Figures:
        ttft = [turn.ttft_ms for turn in turns]
        early, late = _median(ttft[_EARLY]), _median(ttft[_LATE])
        read, new = sum(t.read for t in turns), sum(t.new for t in turns)
        return cls(
            early_ms=early,
            late_ms=late,
            ratio=late / early if early and late else None,
            median_ms=_median(ttft),
            worst_ms=max(ttft, default=None),
            total_ms=sum(t.ms for t in turns),
            prefilled=sum(t.prefilled for t in turns),
            generated=sum(t.generated for t in turns),
            read=read,
            new=new,
            again=max(0, read - new),
            summaries=sum(t.summaries for t in turns),
            waited_ms=_median([t.ttft_ms for t in turns if t.summaries]),
        )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


@dataclass
class Result:
    """facts: what it was measured on, and how. turns: of every way, as many of each. notes: what the chats had to say.
    others_busy: the share of all CPUs that other processes used meanwhile. stopped: by which error, "" for none."""

    facts: dict[str, Any]
    turns: dict[str, list[Turn]] = field(default_factory=lambda: {name: [] for name in WAYS})
    notes: dict[str, tuple[str, ...]] = field(default_factory=lambda: dict.fromkeys(WAYS, ()))
    interrupted: bool = False
    stopped: str = ""
    others_busy: float = 0.0

    @classmethod
    def begin(cls, model: Model, options: Options) -> Result:
        return cls(_facts(model, options))

    @property
    def num_turns(self) -> int:
        return min(map(len, self.turns.values()))

    def figures(self) -> dict[str, Figures]:
        return {name: Figures.of(turns) for name, turns in self.turns.items()}

    def as_dict(self) -> dict[str, Any]:
        """Everything, as ``edgekv bench chat --json`` writes it."""
        ways = {
            name: {**asdict(found), "notes": list(self.notes[name]), "turns": [asdict(t) for t in self.turns[name]]}
            for name, found in self.figures().items()
        }
        return {
            "schema": SCHEMA,
            **self.facts,
            "ways": ways,
            "others_busy": self.others_busy,
            "interrupted": self.interrupted,
            "stopped": self.stopped,
            "verdict": self.verdict,
        }

    def json(self) -> str:
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def html(self) -> str:
        from edgekv.longrun.html import render

        return render(self)

    # -- in words -----------------------------------------------------------------------------------------------

    @property
    def header(self) -> str:
        """What was measured, where, and what a reader must know of it."""
        on, model, how = self.facts["machine"], self.facts["model"], self.facts["settings"]
        said = (
            f"{model['name']} ({model['file']}), {model['kv_type']} KV, {on['cpu']}, {count(on['threads'], 'thread')}, "
            f"llama.cpp {on['build']['llama_cpp']}. {count(self.num_turns, 'turn')} in {how['cells']:,} cells, "
            f"messages of {how['message_tokens']} tokens, answers of at most {how['max_tokens']}, lists trimmed to "
            f"{how['trim_to']:.0%} of the cache; seed {how['seed']}."
        )
        if self.others_busy > _BUSY:
            said += f" Other processes used {self.others_busy:.0%} of the CPUs meanwhile."
        said += " Interrupted: only what was finished counts." if self.interrupted else ""
        return said + (f" Stopped by an error, {self.stopped}." if self.stopped else "")

    def rows(self) -> list[Sequence[str]]:
        """The figures as text, a row a way; the first row is the head."""
        return [_HEAD, *(_row(name, found) for name, found in self.figures().items())]

    @property
    def verdict(self) -> str:
        """What the figures say, in plain sentences."""
        if not self.num_turns:
            return "No turn was finished: there is nothing to say yet."
        found, trim_to = self.figures(), self.facts["settings"]["trim_to"]
        return " ".join([_sooner(found), _read_again(found, trim_to), _price(found, self.num_turns)])


def _row(name: str, f: Figures) -> Sequence[str]:
    ratio = "-" if f.ratio is None else f"{f.ratio:.1f}"
    early, late, median, worst = map(_number, (f.early_ms, f.late_ms, f.median_ms, f.worst_ms))
    tokens = (f"{number:,}" for number in (f.read, f.new, f.again))
    return (TITLES[name], early, late, ratio, median, worst, f"{f.total_ms / 1e3:.1f}", *tokens)


def _number(ms: float | None) -> str:
    return "-" if ms is None else f"{ms / 1e3:.2f}"


def seconds(ms: float | None) -> str:
    return "-" if ms is None else f"{ms / 1e3:.2f} s"


def _sooner(found: dict[str, Figures]) -> str:
    """First tokens at the end, against those of the start and of reading again."""
    mask, reread, llama = found["mask"], found["reread"], found["llama_cpp"]
    said = f"At the end the first token came after {seconds(mask.late_ms)} with a mask{_times(mask)}"
    said += f", {_against(mask, reread)} with trimming and reading again ({seconds(reread.late_ms)}{_times(reread)})"
    return f"{said}; llama_cpp.Llama took {seconds(llama.late_ms)}{_times(llama)}."


def _times(found: Figures) -> str:
    return "" if found.ratio is None else f", {found.ratio:.1f} times that of turn 5"


def _against(one: Figures, other: Figures) -> str:
    if not one.late_ms or not other.late_ms:
        return "to compare with what it took"
    ratio = other.late_ms / one.late_ms
    if 1 / _ALIKE < ratio < _ALIKE:
        return "about as soon as"
    return f"{ratio:.1f} times sooner than" if ratio > 1 else f"{1 / ratio:.1f} times later than"


def _read_again(found: dict[str, Figures], trim_to: float) -> str:
    mask, reread = found["mask"], found["reread"]
    again = f"{mask.again:,} of them twice" if mask.again else "none of them twice"
    said = f"The mask read {mask.read:,} tokens, {again}; reading again read {reread.read:,}"
    if not reread.again:
        return f"{said}, no more than was new: the cache never filled, and only a longer run or a smaller n_ctx tells."
    less = (
        "; it would be less with a list that is cut down further, and so less often (--trim-to)" if trim_to == 1 else ""
    )
    return f"{said}, {reread.again / reread.read:.0%} of them not for the first time{less}."


def _price(found: dict[str, Figures], num_turns: int) -> str:
    """What speaks against it."""
    mask, summed = found["mask"], found["summarise"]
    said = ""
    if summed.summaries:
        said = (
            f"Summaries cost their generation: {summed.summaries} of {count(num_turns, 'turn')} waited "
            f"{seconds(summed.waited_ms)} for one, and all took {summed.total_ms / 1e3:.1f} s instead of "
            f"{mask.total_ms / 1e3:.1f} s. "
        )
    return f"{said}A mask is not a restart: what was said while the hidden turns were in view still carries them."


# -- facts ----------------------------------------------------------------------------------------------------------


def _facts(model: Model, options: Options) -> dict[str, Any]:
    s = options.settings
    return {
        "machine": {**machine.machine(), "threads": s.threads, "build": dict(machine.build())},
        "model": {
            "name": model.description,
            "file": model.path.name,
            "fingerprint": model.fingerprint,
            "kv_type": s.kv_type,
        },
        "settings": {
            "turns": options.turns,
            "message_tokens": options.message_tokens,
            "max_tokens": options.max_tokens,
            "trim_to": options.trim_to,
            "seed": options.seed,
            "n_ctx": s.n_ctx,
            "cells": cells_for(s.n_ctx),
            "n_batch": s.n_batch,
            "flash_attention": s.flash_attention,
            "policies": {"mask": str(policies.hide_oldest()), "summarise": str(policies.summarize_oldest())},
        },
    }
