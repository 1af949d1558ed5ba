"""`Guesses`: predictions made before measurements, and how close they came."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from types import EllipsisType

from memlab.errors import PlanError
from memlab.units import MIB, format_bytes, parse_bytes
from memlab.workshop.questions import Text

# a guess within this factor of what was measured gets so many points
_POINTS = ((1.05, 3), (1.25, 2), (2.0, 1))
MOST_POINTS = _POINTS[0][1]
# from here on a number is written out, and without decimals
_LARGE = 1000
Value = float | str


@dataclass(frozen=True)
class Revealed:
    """A guess beside what it was about."""

    name: str
    guess: float | None
    measured: float
    unit: str

    @property
    def points(self) -> int:
        """Points, from 0 to `MOST_POINTS`."""
        if self.guess is None or self.guess <= 0 or self.measured <= 0:
            return MOST_POINTS if self.guess == self.measured else 0
        factor = math.exp(abs(math.log(self.guess / self.measured)))
        return next((points for within, points in _POINTS if factor <= within), 0)

    def __str__(self) -> str:
        is_so = f"{self.name}: {_written(self.measured, self.unit)}"
        if self.guess is None:
            return f"{is_so} · no guess was made: put your number in place of ... in the cell above, and run both again"
        points = f"{self.points} of {MOST_POINTS} points"
        return f"{is_so} · you said {_written(self.guess, self.unit)}{_distance(self.guess, self.measured)} · {points}"

    __repr__ = __str__


class Guesses:
    """Guesses of one notebook, and their score.

    Example:
        >>> guesses = Guesses()
        >>> guesses.guess("peak of a step", "1.5 GiB")
        >>> guesses.guess("peak of a step", "a lot")
        peak of a step: 'a lot' is neither a size such as '300 MiB' nor a number from 0 up; guess again
        >>> guesses.guess("peak of a step", "1.5 GB")
        >>> guesses.reveal("peak of a step", 2 * 2**30)
        peak of a step: 2.00 GiB · you said 1.40 GiB, 30 % too low · 1 of 3 points
        >>> guesses.score()
        1 of 3 points for 1 guess
    """

    def __init__(self) -> None:
        self._made: dict[str, _Guess | None] = {}
        self._revealed: dict[str, Revealed] = {}

    def guess(self, name: str, value: Value | EllipsisType) -> Text | None:
        """Note a guess, before the measurement.

        Args:
            name: of what.
            value: a size such as ``"1.5 GiB"`` or ``"60 MB"``, or a number, as such or as text (of bytes, so many MiB);
                ``...`` for none yet.

        Returns:
            What is wrong with it, where it cannot be read; an earlier guess is kept then.
        """
        guess = None if isinstance(value, EllipsisType) else _read(value)
        if guess is None and not isinstance(value, EllipsisType):
            self._made.setdefault(name, None)
            return Text(f"{name}: {value!r} is neither a size such as '300 MiB' nor a number from 0 up; guess again")
        self._made[name] = guess
        return None

    def reveal(self, name: str, measured: float, unit: str = "") -> Revealed:
        """Set what was measured beside the guess.

        Args:
            name: as it was guessed.
            measured: bytes, or a number in a unit.
            unit: of the number, such as "×" or "samples/s"; "" for bytes.

        Raises:
            PlanError: nothing of that name was asked.
        """
        if name not in self._made:
            asked = ", ".join(self._made) or "nothing yet"
            raise PlanError(f"{name!r} was not guessed: asked was {asked}; run the cell with the guess first")
        made = self._made[name]
        guess = made.value if made is not None else None
        if made is not None and not made.is_size and not unit:
            guess = made.value * MIB
        self._revealed[name] = Revealed(name, guess, float(measured), unit)
        return self._revealed[name]

    def score(self) -> Text:
        """Points so far, of all guesses that were made."""
        made = [each for each in self._revealed.values() if each.guess is not None]
        if not made:
            return Text("no guess was made yet")
        guesses = f"{len(made)} guess{'es' if len(made) > 1 else ''}"
        return Text(f"{sum(each.points for each in made)} of {MOST_POINTS * len(made)} points for {guesses}")


@dataclass(frozen=True)
class _Guess:
    """A guess as it was read: bytes, or a number of whatever is asked."""

    value: float
    is_size: bool


def _read(value: object) -> _Guess | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return _Guess(float(value), is_size=False) if 0 <= value < math.inf else None
    if not isinstance(value, str):
        return None
    with suppress(ValueError):
        return _read(float(value.strip().rstrip("%×").replace(",", "")))
    with suppress(PlanError):
        return _Guess(float(parse_bytes(value)), is_size=True)
    return None


def _written(value: float, unit: str) -> str:
    if not unit:
        return format_bytes(value)
    return f"{value:,.0f} {unit}" if abs(value) >= _LARGE else f"{value:.3g} {unit}"


def _distance(guess: float, measured: float) -> str:
    if not measured:
        return ""
    change = guess / measured - 1
    if abs(change) < 0.005:
        return ", exactly"
    return f", {abs(change):.0%} too {'high' if change > 0 else 'low'}".replace("%", " %")
