"""`Guesses`: predictions made before measurements, and how close they came."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import EllipsisType

from memlab.errors import PlanError
from memlab.units import format_bytes, parse_bytes

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
        """From 0 to `MOST_POINTS`."""
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
        >>> guesses.reveal("peak of a step", 2 * 2**30)
        peak of a step: 2.00 GiB · you said 1.50 GiB, 25 % too low · 1 of 3 points
        >>> guesses.score()
        1 of 3 points for 1 guess
    """

    def __init__(self) -> None:
        self._made: dict[str, float | None] = {}
        self._revealed: dict[str, Revealed] = {}

    def guess(self, name: str, value: Value | EllipsisType) -> None:
        """Note a guess, before the measurement.

        Args:
            name: of what.
            value: a size such as ``"1.5 GiB"``, or a number; ``...`` for none yet.

        Raises:
            PlanError: neither a size nor a number.
        """
        self._made[name] = None if isinstance(value, EllipsisType) else _number(name, value)

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
        self._revealed[name] = Revealed(name, self._made[name], float(measured), unit)
        return self._revealed[name]

    def score(self) -> Score:
        """Points so far."""
        return Score(tuple(self._revealed.values()))


@dataclass(frozen=True)
class Score:
    """All guesses of a notebook."""

    revealed: tuple[Revealed, ...]

    @property
    def points(self) -> int:
        """Of all guesses."""
        return sum(each.points for each in self.revealed)

    def __str__(self) -> str:
        made = [each for each in self.revealed if each.guess is not None]
        if not made:
            return "no guess was made yet"
        guesses = f"{len(made)} guess{'es' if len(made) > 1 else ''}"
        return f"{self.points} of {MOST_POINTS * len(made)} points for {guesses}"

    __repr__ = __str__


def _number(name: str, value: Value) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        return float(parse_bytes(value))
    raise PlanError(f"guess of {name}: {value!r} is neither a size such as '300 MiB' nor a number")


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
