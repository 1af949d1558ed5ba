"""How often a view is drawn, by a simulated clock."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.live.views import Pace


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def drawings(clock: Clock, pace: Pace, costs: list[float], seconds: float, step_seconds: float = 0.05) -> list[float]:
    """Train for a while in steps of one length; when each drawing began."""
    begun, end = [], clock.seconds + seconds
    while clock.seconds < end:
        clock.seconds += step_seconds
        if pace.is_due():
            begun.append(clock.seconds)
            cost = costs[len(begun) % len(costs)]
            clock.seconds += cost
            pace.spent(cost)
    return begun


def test_two_hours() -> None:
    clock = Clock()
    begun = drawings(clock, Pace(clock), [0.005], 7200)
    gaps = [later - earlier for earlier, later in pairwise(begun[1:])]
    assert min(gaps) >= 1.0 - 1e-9
    assert max(gaps) <= 1.1
    assert len(begun) * 0.005 <= 7200 * 0.005


def test_cheap_drawings_come_four_times_a_second() -> None:
    clock = Clock()
    begun = drawings(clock, Pace(clock), [0.0001], 60, step_seconds=0.01)
    assert 220 <= len(begun) <= 240


@settings(deadline=None)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=20), st.floats(0.02, 3))
def test_whatever_drawings_cost_they_take_half_a_percent(costs: list[float], step_seconds: float) -> None:
    clock = Clock()
    begun = drawings(clock, Pace(clock), costs, 200, step_seconds)
    spent = [costs[number % len(costs)] for number in range(1, len(begun) + 1)]
    gaps = [later - earlier for earlier, later in pairwise(begun)]
    assert all(gap >= 0.25 - 1e-9 for gap in gaps)
    # the first one is free, and what the last one costs is paid for later
    assert sum(spent[1:-1]) <= (clock.seconds - 1000) * 0.005 + 1e-6


def test_the_first_drawing_comes_at_once() -> None:
    assert Pace(Clock()).is_due()


def test_the_first_drawing_may_take_long() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.spent(1.5)
    clock.seconds += 0.25
    assert pace.is_due()
    pace.spent(1.5)
    clock.seconds += 299
    assert not pace.is_due()


def test_what_someone_waits_for_is_drawn_soon() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.hurry()
    assert pace.is_due()
    pace.spent(0)
    pace.spent(1.0)
    pace.hurry()
    assert not pace.is_due()
    clock.seconds += 0.25
    assert pace.is_due()
