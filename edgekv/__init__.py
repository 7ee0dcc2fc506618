"""edgekv: keep the KV cache, change what the model may look at.

Hide, show, evict and rewind spans of a conversation on stock llama.cpp, at once and without reading anything again.
Names load on first use: ``import edgekv`` neither loads llama.cpp nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capabilities import Capabilities as Capabilities
    from .capabilities import Capability as Capability
    from .chat import Chat as Chat
    from .columns import State as State
    from .engine import Engine as Engine
    from .errors import EdgekvError as EdgekvError
    from .generation import Generation as Generation
    from .model import Model as Model
    from .prefilling import prefill as prefill
    from .receipts import Audit as Audit
    from .receipts import Receipt as Receipt
    from .receipts import Stats as Stats
    from .receipts import Timings as Timings
    from .sampling import Sampling as Sampling
    from .session import Session as Session
    from .settings import Settings as Settings
    from .spans import Span as Span
    from .together import decode_together as decode_together

__version__ = "0.1.0"

_HOME = {
    "Audit": "receipts",
    "Capabilities": "capabilities",
    "Capability": "capabilities",
    "Chat": "chat",
    "EdgekvError": "errors",
    "Engine": "engine",
    "Generation": "generation",
    "Model": "model",
    "Receipt": "receipts",
    "Sampling": "sampling",
    "Session": "session",
    "Settings": "settings",
    "Span": "spans",
    "State": "columns",
    "Stats": "receipts",
    "Timings": "receipts",
    "decode_together": "together",
    "prefill": "prefilling",
}

__all__ = [*sorted(_HOME), "__version__", "errors"]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module(".errors", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'edgekv' has no attribute {name!r}")
    importlib.import_module(".memory", __name__).check_program_fits()  # else numpy may end the process
    value = globals()[name] = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__
