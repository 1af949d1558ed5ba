"""Memory that grows over an evaluation is told from what does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memlab.session.growth import Growth

_LIMIT = 1000


def _said(live: Callable[[int], float], calls: int = 300) -> list[str]:
    growth = Growth(lambda: int(1e6 * live(growth.calls)), lambda: int(1e6 * _LIMIT))
    return [text for text in (growth.called() for _ in range(calls)) if text]


@pytest.mark.parametrize(
    "live",
    [
        lambda n: 100,
        lambda n: 100 + 50 * (n > 6),  # a workspace that is made once
        lambda n: 100 + 300 * min(1, n / 20),  # a cache that fills
        lambda n: 100 + 30 * (n % 3),  # batches of other lengths
        *(lambda n, k=k: 100 + 10 * (n % k) for k in range(2, 33)),  # eval_accumulation_steps
        lambda n: 100 + 0.2 * n,  # no more than a twentieth of the device after all
    ],
)
def test_clean_evaluations_are_silent(live: Callable[[int], float]) -> None:
    assert _said(live) == []


@pytest.mark.parametrize("each", [3, 10, 2])
def test_what_is_kept_is_said_once(each: int) -> None:
    assert len(_said(lambda n: 100 + each * n + n % 2)) == 1


def test_a_training_call_begins_anew() -> None:
    growth = Growth(lambda: 10**7 * growth.calls, lambda: 10**8)
    for _ in range(20):
        for _ in range(10):
            assert growth.called() == ""
        growth.trained()
    assert growth.text() == ""
