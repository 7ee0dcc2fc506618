"""Memos: what a session file keeps of a chat: messages, the template's text, and which tokens it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import ChatBroken, WrongFile
from .following import Following
from .script import Script
from .session import Session
from .spans import Span, SpanTable
from .turns import Turn

FORMAT = "edgekv.chat/1"


@dataclass(frozen=True)
class Memo:
    """index, ends, said, kept: as in a Script, little-endian int64 and bool; kept is None in older files, which do not
    say it. hidden: indexes a policy or the template hid."""

    format: str
    template: str
    now: datetime
    turns: tuple[Turn, ...]
    text: str
    index: bytes
    ends: bytes
    said: bytes
    hidden: tuple[int, ...]
    notes: tuple[str, ...]
    num_reread: int
    count: int
    num_tokens: int
    kept: bytes | None = None


def write(following: Following, hidden: npt.NDArray[np.int64], count: int) -> str:
    """A chat as JSON."""
    script = following.script
    memo = Memo(
        FORMAT,
        following.template.source,
        following.template.now,
        following.turns,
        script.text,
        script.index.astype("<i8").tobytes(),
        script.ends.astype("<i8").tobytes(),
        script.said.tobytes(),
        tuple(hidden.tolist()),
        tuple(following.notes),
        following.num_reread,
        count,
        len(following.session.tokens),
        script.kept.tobytes(),
    )
    return msgspec.json.encode(memo).decode()


def read(session: Session) -> Memo:
    """The memo of a session. Raises WrongFile where it is no chat's, or contradicts the session."""
    if not session.memo:
        raise WrongFile("this file holds a session and no chat; Session.load opens it")
    try:
        memo = msgspec.json.decode(session.memo, type=Memo)
        if memo.format != FORMAT:
            raise ValueError(f"its format is {memo.format!r}, this edgekv reads {FORMAT!r}")
        _check(memo, session)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise WrongFile(f"the chat in this file cannot be read: {err}") from err
    return memo


def _check(memo: Memo, session: Session) -> None:
    index, ends = np.frombuffer(memo.index, "<i8"), np.frombuffer(memo.ends, "<i8")
    n = len(session.tokens)
    if memo.num_tokens != n:
        raise ValueError("the session has gone on without it")
    if not len(index) == len(ends) == len(memo.said) == len(memo.said if memo.kept is None else memo.kept):
        raise ValueError("its lists differ in length")
    if len(index) and not (index.min() >= 0 and index.max() < n and len(np.unique(index)) == len(index)):
        raise ValueError("it speaks of tokens that are not there")
    if len(ends) and not (ends.min() >= 0 and (np.diff(ends) >= 0).all() and ends[-1] <= len(memo.text)):
        raise ValueError("its text does not fit its tokens")
    if memo.text[int(ends[-1]) if len(ends) else 0 :].strip():
        raise ValueError("its text does not fit its tokens")
    if memo.count < 0 or any(not 0 <= i < n for i in memo.hidden):
        raise ValueError("it speaks of tokens that are not there")
    names = SpanTable()
    for turn in memo.turns:
        names.add(Span(turn.name, 0, 0))
    if any(not 0 <= a <= b <= n for turn in memo.turns for a, b in (turn.range, *(r for _, r in turn.parts))):
        raise ValueError("a turn lies outside the session")


def fill(memo: Memo, following: Following) -> None:
    """The chat of a memo that was read. Raises WrongFile where the session's tokens spell another text."""
    index = np.frombuffer(memo.index, "<i8").astype(np.int64)
    ends = np.frombuffer(memo.ends, "<i8").astype(np.int64)
    said = np.frombuffer(memo.said, np.bool_).copy()
    kept = np.ones(len(index), np.bool_) if memo.kept is None else np.frombuffer(memo.kept, np.bool_).copy()
    following.script = Script(memo.text, following.session.tokens[index], index, ends, said, kept)
    following.turns, following.num_reread = memo.turns, memo.num_reread
    following.notes[:] = memo.notes
    try:
        following.check()
    except ChatBroken as err:
        raise WrongFile(f"the chat in this file contradicts its session: {err}") from err
