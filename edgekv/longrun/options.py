"""Options: what a long run says, and in what cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgekv.errors import UsageError
from edgekv.settings import Settings


@dataclass(frozen=True)
class Options:
    """turns: messages, each of ``message_tokens`` tokens, with an answer of at most ``max_tokens``. trim_to: how much
    of the cache prompt and answer may fill once a wrapper has trimmed; 1.0 trims no more than it must, and a policy's
    own target (0.75) trims less often. seed: other messages. settings: of every way's context."""

    turns: int = 60
    message_tokens: int = 40
    max_tokens: int = 32
    trim_to: float = 1.0
    seed: int = 0
    settings: Settings = field(default_factory=lambda: Settings(n_ctx=1024))

    def __post_init__(self) -> None:
        for name, least in (("turns", 1), ("message_tokens", 8), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 < self.trim_to <= 1:
            raise UsageError(f"trim_to must be above 0 and at most 1, not {self.trim_to}")
