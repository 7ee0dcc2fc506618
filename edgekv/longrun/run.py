"""A run: message after message, way after way, in an order that goes round; what is finished counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from edgekv._llama import uninterrupted
from edgekv.doctor import machine
from edgekv.errors import AuditFailed, EdgekvError, UsageError
from edgekv.longrun.options import Options
from edgekv.longrun.result import Result
from edgekv.longrun.texts import Frame, messages
from edgekv.longrun.ways import WAYS, Turn, Way, open_all
from edgekv.memory import cells_for
from edgekv.model import Model

#: Called with (turns of all ways done, in all).
Watch = Callable[[int, int], None]


class Run:
    """One run on a model; :meth:`all` does it. Raises UsageError for a model that cannot mask, and for a cache that
    two exchanges and the system text do not fit in."""

    def __init__(self, model: Model, options: Options = Options(), watch: Watch = lambda *_: None) -> None:
        if not model.capabilities.mask:
            raise UsageError(f"a chat cannot hide anything here: {model.capabilities.mask.reason}")
        self.model, self.options, self.watch = model, options, watch
        self.frame = Frame(model)
        self.messages = messages(model, options.turns, options.message_tokens, options.seed)
        self._check_room()

    def _check_room(self) -> None:
        """The policies keep the newest exchange while the next one comes."""
        first, cells = self.messages[0], cells_for(self.options.settings.n_ctx)
        asked = sum(self.frame.num_new(first, first=one) for one in (True, False))
        need = asked + 2 * self.options.max_tokens
        if need > cells:
            raise UsageError(
                f"two exchanges of that length take {need:,} tokens with the system text, and n_ctx gives {cells:,}; "
                "take shorter messages and answers, or a larger n_ctx"
            )

    def all(self) -> Result:
        """Measure. Ctrl-C ends it, and so does an error once a turn is finished; the result says so."""
        result = Result.begin(self.model, self.options)
        others = machine.others_busy()
        try:
            with ExitStack() as stack:
                self._say_all(open_all(self.frame, self.options, stack), result)
        except KeyboardInterrupt:
            result.interrupted = True
        except AuditFailed:
            raise  # no figure of this run can be believed
        except EdgekvError as err:
            if not result.num_turns:
                raise
            result.stopped = f"turn {result.num_turns + 1}: {err}"
        result.others_busy = others()
        return result

    def _say_all(self, ways: dict[str, Way], result: Result) -> None:
        for number, message in enumerate(self.messages):
            turns = self._say(ways, message, number)
            with uninterrupted():  # a turn counts for all ways, or for none
                for name, turn in turns.items():
                    result.turns[name].append(turn)
                    result.notes[name] = ways[name].notes

    def _say(self, ways: dict[str, Way], message: str, number: int) -> dict[str, Turn]:
        names, turns = list(WAYS), dict[str, Turn]()
        for step in range(len(names)):
            name = names[(step + number) % len(names)]
            turns[name] = ways[name].say(message)
            self.watch(number * len(names) + step + 1, len(self.messages) * len(names))
        return turns
