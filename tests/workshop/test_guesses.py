"""Guesses: what they are worth, and what is said of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from memlab.errors import PlanError
from memlab.units import MIB
from memlab.workshop import Guesses


@pytest.mark.parametrize(
    ("guess", "points", "words"),
    [
        ("100 MiB", 3, "you said 100.0 MiB, exactly"),
        ("104 MiB", 3, "you said 104.0 MiB, 4 % too high"),
        ("80 MiB", 2, "you said 80.0 MiB, 20 % too low"),
        ("190 MiB", 1, "you said 190.0 MiB, 90 % too high"),
        ("1 GiB", 0, "you said 1.00 GiB, 924 % too high"),
    ],
)
def test_points_follow_the_factor_between_guess_and_measurement(guess: str, points: int, words: str) -> None:
    guesses = Guesses()
    guesses.guess("peak", guess)
    revealed = guesses.reveal("peak", 100 * MIB)
    assert str(revealed) == repr(revealed) == f"peak: 100.0 MiB · {words} · {points} of 3 points"


def test_numbers_have_a_unit_of_their_own() -> None:
    guesses = Guesses()
    guesses.guess("time", 2)
    assert str(guesses.reveal("time", 1.5, "×")) == "time: 1.5 × · you said 2 ×, 33 % too high · 1 of 3 points"


def test_what_was_not_guessed_is_revealed_without_points() -> None:
    guesses = Guesses()
    assert str(guesses.score()) == "no guess was made yet"
    guesses.guess("peak", ...)
    assert "no guess was made: put your number in place of ..." in str(guesses.reveal("peak", MIB))
    guesses.guess("other", "1 MiB")
    guesses.reveal("other", MIB)
    guesses.reveal("other", MIB)
    assert str(guesses.score()) == "3 of 3 points for 1 guess"


def test_nothing_is_divided_by_zero() -> None:
    guesses = Guesses()
    guesses.guess("gain", 0)
    assert guesses.reveal("gain", 0, "MiB").points == 3
    assert guesses.reveal("gain", 5, "MiB").points == 0
    guesses.guess("gain", 5)
    assert str(guesses.reveal("gain", 0, "MiB")) == "gain: 0 MiB · you said 5 MiB · 0 of 3 points"


@pytest.mark.parametrize(
    "value", ["3 apples", "", None, True, "nan MiB", math.nan, "nan", -3, "-3", "-3 MiB", math.inf, 1j]
)
def test_what_cannot_be_read_is_said_in_a_line_and_an_earlier_guess_stays(value: Any) -> None:
    guesses = Guesses()
    said = f"peak: {value!r} is neither a size such as '300 MiB' nor a number from 0 up; guess again"
    assert str(guesses.guess("peak", value)) == said
    assert "no guess was made" in str(guesses.reveal("peak", MIB))
    guesses.guess("peak", "1 MiB")
    assert str(guesses.guess("peak", value)) == said
    assert guesses.reveal("peak", MIB).points == 3


@pytest.mark.parametrize(
    ("value", "read"), [("60 MB", "57.2 MiB"), ("60", "60.0 MiB"), (60, "60.0 MiB"), ("1.5e2", "150.0 MiB")]
)
def test_sizes_may_be_written_as_people_write_them(value: Any, read: str) -> None:
    guesses = Guesses()
    assert guesses.guess("peak", value) is None
    assert f"you said {read}" in str(guesses.reveal("peak", 100 * MIB))


def test_numbers_may_come_as_text() -> None:
    guesses = Guesses()
    guesses.guess("share", "40 %")
    assert "you said 40 %" in str(guesses.reveal("share", 50, "%"))
    guesses.guess("numbers", "60,000")
    assert "you said 60,000 numbers" in str(guesses.reveal("numbers", 65_536, "numbers"))


def test_what_was_not_asked_cannot_be_revealed() -> None:
    with pytest.raises(PlanError, match="'peak' was not guessed: asked was nothing yet; run the cell with the guess"):
        Guesses().reveal("peak", 1)


def test_large_numbers_are_written_out() -> None:
    guesses = Guesses()
    guesses.guess("numbers on the wire", 60_000)
    said = "numbers on the wire: 65,536 numbers · you said 60,000 numbers, 8 % too low · 2 of 3 points"
    assert str(guesses.reveal("numbers on the wire", 65_536, "numbers")) == said
    assert str(guesses.reveal("numbers on the wire", 999.4, "numbers")).startswith("numbers on the wire: 999 numbers ·")
