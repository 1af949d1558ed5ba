"""How well times are predicted, told from pairs of which the answer is known."""

from __future__ import annotations

import pytest

from tests.bench.accuracy import Pair, Times


def pair(plan: str, predicted: float, *measured: float) -> Pair:
    return Pair("model", plan, 1, 1, None, None, predicted, measured)  # type: ignore[arg-type]


def test_pairs_within_the_noise_are_no_mistakes() -> None:
    pairs = [pair("as written", 1.0, 2.0, 2.02), pair("--bf16", 2.0, 4.0, 4.0), pair("--chunk-loss", 0.9, 1.99, 2.0)]
    found = Times.of(pairs)
    assert found.noise == pytest.approx(0.01)
    assert (found.tau, found.tau_beyond_noise, found.decided) == (1.0, 1.0, pytest.approx(2 / 3))
    wrong = Times.of([pairs[0], pairs[1], pair("--chunk-loss", 1.1, 1.99, 2.0)])
    assert (wrong.tau, wrong.tau_beyond_noise) == (pytest.approx(1 / 3), 1.0)


def test_times_are_calibrated_by_the_plan_as_written() -> None:
    found = Times.of(
        [pair("as written", 1.0, 2.0, 2.0), pair("--bf16", 2.0, 5.0, 5.0), pair("--adam8bit", 3.0, 6.5, 6.5)]
    )
    assert found.worst == pytest.approx(-0.2)
    assert found.covered == 1.0
    off = Times.of([pair("as written", 1.0, 2.0, 2.0), pair("--bf16", 2.0, 8.0, 8.0)])
    assert (off.worst, off.covered) == (-0.5, 0.5)


def test_two_measurements_that_disagree_say_so() -> None:
    found = Times.of([pair("as written", 1.0, 2.0, 3.0), pair("--bf16", 2.0, 3.0, 2.0)])
    assert found.tau_of_two == -1.0
    assert (found.noise, found.decided, found.tau_beyond_noise) == (0.5, 0.0, 0.0)
