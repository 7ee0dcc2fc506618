"""Every promise about the cache, on tiny random models: they speak nonsense, but a wrong cell shows in their logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from edgekv import kv_check, tiny
from edgekv.doctor.checks import Check, Says, expect
from edgekv.errors import MaskUnsupported
from edgekv.session import Session
from edgekv.settings import Settings

#: Full precision without flash attention: logits differ by rounding only, whatever the order of cells.
_PRECISE: Final = Settings(n_ctx=512, kv_type="f32", flash_attention=False, n_threads=1)
_USUAL: Final = Settings(n_ctx=512, n_threads=1)
_TOLERANCE: Final = 1e-2  # of logits that span tens; a wrong position moves them by whole units

_TEXTS: Final = {
    "rules": "Answer in one word. ",
    "report": "The pump at the north gate lost pressure twice, and the spare valve is kept in hall 4. ",
    "tail": "What follows was read while the report was visible. ",
}
_PROBE: Final = "Where is the spare valve?"
_HEAD_SIZES: Final = (64, 128, 256)
_KINDS: Final = {"llama": "full attention", "gemma3": "sliding window"}


def checks(folder: Path) -> list[Check]:
    """All self-tests; their models are written into ``folder``."""
    made = [
        Check(f"{name}, {_KINDS[kind]}", partial(look, folder, kind))
        for kind in _KINDS
        for name, look in _BY_KIND.items()
    ]
    return [*made, Check("quantised KV", _quantised), Check("refusal, recurrent", partial(_refusal, folder))]


@contextmanager
def _opened(folder: Path, kind: str, settings: Settings) -> Iterator[Session]:
    """A session on a tiny model with nothing read yet."""
    path = folder / f"{kind}.gguf"
    if not path.exists():
        tiny.write(path, kind)
    with Session(path, settings=settings) as session:
        yield session


def _read(session: Session, *names: str) -> Session:
    for name in names:
        session.append(_TEXTS[name], name=name)
    return session


def _unmask(folder: Path, kind: str) -> Says:
    with _opened(folder, kind, _USUAL) as session:
        cells = exact_undo(_read(session, *_TEXTS), "report", session.model.tokenize(_PROBE))
    return Says(f"mask and unmask in place leave logits bit-equal; {cells} cells audited at each step")


def exact_undo(session: Session, name: str, probe: np.typing.NDArray[np.int32]) -> int:
    """Mask a span in place and show it again: hidden it must change the logits over ``probe``, shown again no bit.

    Returns the number of cells compared with llama.cpp's own at each step.
    """
    before = session.logits_over(probe)
    session.mask(name, gap="keep", force=True)
    session.audit()
    hidden = session.logits_over(probe)
    session.audit()
    session.unmask(name)
    cells = session.audit().cells
    after = session.logits_over(probe)
    expect(not np.array_equal(before, hidden), "the mask changed nothing: hidden tokens are still looked at")
    expect(np.array_equal(before, after), f"unmask moved logits by {_distance(before, after):.2g}; it must be exact")
    return cells


def _gap(folder: Path, kind: str) -> Says:
    with _opened(folder, kind, _PRECISE) as session:
        before = _read(session, *_TEXTS).logits_over(_PROBE)
        receipt = session.mask("report", gap="close")
        session.audit()
        session.unmask("report")
        session.audit()
        off = _distance(before, session.logits_over(_PROBE))
    expect(receipt.moved, "no position moved")
    expect(off <= _TOLERANCE, f"closing a gap and opening it again moved logits by {off:.2g}")
    return Says(f"{receipt.moved} tokens move up and come back; logits within {off:.1g}", figures={"off": off})


def _tail(folder: Path, kind: str) -> Says:
    with _opened(folder, kind, _PRECISE) as session:
        _read(session, "rules", "report").mask("report")
        masked = _read(session, "tail").logits_over(_PROBE)
        session.audit()
    with _opened(folder, kind, _PRECISE) as session:
        fresh = _read(session, "rules", "tail").logits_over(_PROBE)
    off = _distance(masked, fresh)
    expect(off <= _TOLERANCE, f"masking the tail differs from a restart by {off:.2g}")
    return Says(f"masking the tail equals a restart; logits within {off:.1g}", figures={"off": off})


def _kv_types(folder: Path, kind: str) -> Says:
    types = ("f16", "q8_0", "q4_0")
    for kv_type in types:
        with _opened(folder, kind, Settings(n_ctx=512, kv_type=kv_type, n_threads=1)) as session:
            _read(session, *_TEXTS).mask("report")
            expect(np.isfinite(session.logits()).all(), f"{kv_type}: logits are not finite")
            session.generate(8).finish()
            session.unmask("report")
            session.audit()
    return Says(f"{', '.join(types)}: mask, generate, unmask")


def _quantised() -> Says:
    """What a session with such a cache tries at its first use, for the usual head sizes."""
    found = {(kv_type, size): kv_check.measure(kv_type, size) for kv_type in kv_check.LIMITS for size in _HEAD_SIZES}
    for (kv_type, size), kl in found.items():
        expect(
            kl <= kv_check.LIMITS[kv_type],
            f"{kv_type} with heads of {size} garbles on this CPU: mean KL {kl:.2g} nats from f16; keep caches in f16",
        )
    worst = {kv_type: max(kl for (other, _), kl in found.items() if other == kv_type) for kv_type in kv_check.LIMITS}
    said = ", ".join(f"{kv_type} {kl:.2g}" for kv_type, kl in worst.items())
    return Says(f"only rounds, with heads of 64 to 256; mean KL from f16: {said} nats", figures={"kl_mean": worst})


def _refusal(folder: Path) -> Says:
    with _opened(folder, "mamba", _USUAL) as session:
        _read(session, *_TEXTS)
        try:
            session.mask("report")
        except MaskUnsupported:
            session.audit()
            return Says("what cannot be masked is refused before anything is touched")
    return Says("a recurrent state was masked, which cannot be", "failed")


def _distance(left: np.typing.NDArray[np.float32], right: np.typing.NDArray[np.float32]) -> float:
    """The largest difference between two arrays of logits."""
    return float(np.abs(left - right).max())


_BY_KIND: Final[dict[str, Callable[[Path, str], Says]]] = {
    "exact undo": _unmask,
    "closed gap": _gap,
    "tail mask": _tail,
    "KV types": _kv_types,
}
