"""Plain sentences from a seed, of so many kinds that no two cases share one.

A sentence is drawn from twelve patterns over lists of names, places, things, times and numbers: some 10^9 different
ones. A writer remembers what it has said and never says it twice, and numbers make the rest unlike each other.
"""

from __future__ import annotations

from typing import Final

import numpy as np

_NAMES: Final = (
    "Ada", "Bruno", "Chidi", "Dalia", "Emre", "Freya", "Goran", "Hana", "Imani", "Jonas", "Keiko", "Lior", "Mina",
    "Nadia", "Oskar", "Priya", "Quentin", "Rosa", "Soojin", "Tomas", "Uma", "Viktor", "Wen", "Ximena", "Yusuf", "Zofia",
)  # fmt: skip
_PLACES: Final = (
    "the harbour", "the north gate", "the old mill", "the reading room", "the greenhouse", "platform two",
    "the archive",
    "the workshop", "the ferry landing", "the roof garden", "the weather station", "the east ward", "the market hall",
    "the boat shed", "the signal box", "the kitchen", "the quarry", "the lighthouse", "the print shop", "the depot",
)  # fmt: skip
_THINGS: Final = (
    "a crate of lamps", "the spare pump", "two maps", "a box of valves", "the visitors' book", "a coil of rope",
    "the blue ledger", "a sack of flour", "the projector", "four chairs", "a tin of varnish", "the tide tables",
    "a ladder", "the seed trays", "a bundle of letters", "the first-aid kit", "a pair of scales", "the brass bell",
    "the duty roster", "a roll of canvas",
)  # fmt: skip
_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_WEATHER: Final = ("rain", "fog", "a north wind", "heavy snow", "bright sun", "frost", "thunder", "a warm breeze")
_MOODS: Final = ("quiet", "crowded", "cold", "freshly painted", "half empty", "well lit", "dusty", "noisy", "locked")
_SYLLABLES: Final = (
    "Bar", "Bel", "Cor", "Dar", "Den", "Fal", "Fen", "Gar", "Hal", "Hol", "Jor", "Kel", "Kor", "Lam", "Lin", "Mal",
    "Mar", "Mel", "Nor", "Ol", "Pel", "Por", "Ral", "Ros", "Sal", "Sel", "Tal", "Tor", "Val", "Ver", "Wal", "Wes",
    "Yar", "Zel",
)  # fmt: skip
_ENDINGS: Final = (
    "berg", "by", "dorf", "ek", "feld", "holt", "ini", "man", "mont", "ov", "quist", "son", "stad", "wick",
)  # fmt: skip
_PATTERNS: Final = (
    "On {day} {name} carried {thing} to {place}.",
    "{name} found {place} {mood} at {hour} o'clock and went on to {place2}.",
    "It took {number} minutes to bring {thing} from {place} to {place2}.",
    "{name} and {name2} counted {number} steps between {place} and {place2}.",
    "Because of {weather}, {thing} stayed in {place} until {day}.",
    "{name} wrote that {place} had been {mood} since {day}.",
    "Nobody at {place} knew who had ordered {thing}, so {name} signed for it.",
    "By {hour} o'clock {number} people stood in {place}, and {name} opened the door.",
    "The list in {place} names {name} first and {name2} last.",
    "{name} repaired {thing} in {place} while {name2} kept the time: {number} minutes.",
    "After {weather} on {day}, {place} was {mood} and {name} walked home.",
    "{name2} asked {name} to leave {thing} at {place} before {hour} o'clock.",
)


class Writer:
    """Sentences drawn from ``seed``; none is said twice."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._said: set[str] = set()

    def sentence(self) -> str:
        while True:
            text = self.pick(_PATTERNS).format(
                name=self.pick(_NAMES), name2=self.pick(_NAMES), place=self.pick(_PLACES), place2=self.pick(_PLACES),
                thing=self.pick(_THINGS), day=self.pick(_DAYS), weather=self.pick(_WEATHER), mood=self.pick(_MOODS),
                hour=self.number(1, 12), number=self.number(2, 400),
            )  # fmt: skip
            if text not in self._said:
                self._said.add(text)
                return text

    def passage(self, num_sentences: int) -> str:
        """Sentences, one behind the other, with a space at the end."""
        return "".join(f"{self.sentence()} " for _ in range(num_sentences))

    def pick(self, options: tuple[str, ...]) -> str:
        return options[int(self._rng.integers(len(options)))]

    def number(self, low: int, high: int) -> int:
        """From ``low`` to ``high``, both included."""
        return int(self._rng.integers(low, high + 1))

    def codes(self, count: int) -> tuple[str, ...]:
        """Different four-digit numbers."""
        return tuple(str(n) for n in self._rng.choice(np.arange(1000, 10000), count, replace=False))

    def name(self) -> str:
        return self.pick(_NAMES)

    def surname(self) -> str:
        """One that nobody has had before: two syllables and an ending, 16,000 in all."""
        while True:
            name = (self.pick(_SYLLABLES) + self.pick(_SYLLABLES).lower() + self.pick(_ENDINGS)).capitalize()
            if name not in self._said:
                self._said.add(name)
                return name

    def place(self) -> str:
        return self.pick(_PLACES)
