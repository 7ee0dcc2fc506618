"""What would kill the process inside llama.cpp, tried through edgekv: a typed error, and the session goes on.

As a program, ``python killers.py FOLDER NAME...`` tries the named cases in order and says what became of each. When
the process dies, the case it had begun did it. ``test_killers.py`` starts it so. The cases: ``killers_engine.py`` for
the engine's verbs, ``killers_session.py`` for what a user can reach.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edgekv import Session, errors

Case = Callable[[Session], None]
CASES: dict[str, tuple[str, Case]] = {}


def killer(kind: str = "llama") -> Callable[[Case], Case]:
    """Register a case; it gets a session of that kind with 30 tokens, and must leave it usable or closed."""

    def register(case: Case) -> Case:
        CASES[case.__name__] = (kind, case)
        return case

    return register


@contextmanager
def refused(error: type[errors.EdgekvError], words: str = "") -> Iterator[None]:
    """The block must raise exactly this error, with these words in its message."""
    try:
        yield
    except errors.EdgekvError as err:
        if type(err) is not error or words not in str(err):
            raise AssertionError(f"{err!r} is not {error.__name__} with {words!r}") from err
    else:
        raise AssertionError(f"{error.__name__} was not raised")


def run(folder: Path, names: list[str]) -> None:
    from helpers import open_tiny, some_tokens

    for name in names:
        kind, case = CASES[name]
        print("begin", name, flush=True)
        try:
            with open_tiny(folder / f"{kind}-0.gguf", n_batch=64) as session:
                session.append(some_tokens(30))
                case(session)
                _go_on(session)
        except BaseException as err:  # reported, and the next case is tried
            print("wrong", name, repr(err), flush=True)
        else:
            print("fine", name, flush=True)


def _go_on(session: Session) -> None:
    if "closed" in repr(session):
        return
    session.append("on")
    assert len(session.generate(1).finish().tokens) == 1
    session.audit()


if __name__ == "__main__":
    sys.modules["killers"] = sys.modules["__main__"]  # the cases register here
    import killers_engine
    import killers_session

    assert killers_engine and killers_session
    run(Path(sys.argv[1]), sys.argv[2:])
