"""A bounded number of points for any number of steps."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.live import feed
from memlab.live.feed import Track
from memlab.records.live_state import LivePoint


def point(step: int, plan: str = "as written", peak_bytes: int | None = 100, seconds: float = 0.1) -> LivePoint:
    return LivePoint(step, plan, seconds, 8 / seconds, peak_bytes, {"activations": 1}, 1.0)


def track_of(points: list[LivePoint], **limits: int) -> Track:
    track = Track(**limits)
    for each in points:
        track.add(each)
    return track


# stretches of steps under one plan: how many, the peaks of most of them in turn, and one that is higher
runs = st.lists(
    st.tuples(
        st.sampled_from(["as written", "--fp16", "--checkpoint"]),
        st.integers(1, 400),
        st.lists(st.none() | st.integers(0, 1000), min_size=1, max_size=3),
        st.tuples(st.integers(0, 399), st.integers(1001, 10**12)),
    ),
    min_size=1,
    max_size=15,
)


def steps_of(described: list[tuple[str, int, list[int | None], tuple[int, int]]]) -> list[LivePoint]:
    flat: list[tuple[str, int | None]] = []
    for plan, length, peaks, (where, highest) in described:
        stretch: list[int | None] = [peaks[number % len(peaks)] for number in range(length)]
        stretch[where % length] = highest
        flat += [(plan, peak) for peak in stretch]
    return [point(number, plan, peak) for number, (plan, peak) in enumerate(flat, 1)]


def firsts_of(points: list[LivePoint]) -> list[LivePoint]:
    return points[:1] + [later for earlier, later in pairwise(points) if later.plan != earlier.plan]


@settings(deadline=None)
@given(runs, st.sampled_from([(300, 50), (100, 20), (100, 50)]))
def test_whatever_comes_is_bounded_in_order_and_as_high(
    described: list[tuple[str, int, list[int | None], tuple[int, int]]], limits: tuple[int, int]
) -> None:
    steps = steps_of(described)
    most, newest = limits
    kept = track_of(steps, most=most, newest=newest).points
    assert len(kept) <= most
    assert [p.step for p in kept] == sorted({p.step for p in kept})
    assert kept[-newest:] == tuple(steps[-newest:])
    assert max((p.peak_bytes or 0 for p in kept), default=0) == max((p.peak_bytes or 0 for p in steps), default=0)
    numbers = {p.step: p for p in kept}
    # with few plans there is a point at the first step of each
    firsts = firsts_of(steps)
    if len(firsts) <= most // 5:
        assert all(numbers[first.step].plan == first.plan for first in firsts)
        # and a stretch keeps its own peak
        for first, following in zip(firsts, [*firsts[1:], None], strict=True):
            stop = following.step if following else len(steps) + 1
            stretch = [p.peak_bytes or 0 for p in steps[first.step - 1 : stop - 1]]
            assert max(p.peak_bytes or 0 for p in kept if first.step <= p.step < stop) == max(stretch)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=60, max_size=800))
def test_mean_speed_survives(times: list[float]) -> None:
    points = track_of([point(n, seconds=seconds) for n, seconds in enumerate(times, 1)], most=100, newest=20).points
    # each stands for the steps up to the next
    edges = [*(p.step for p in points), len(times) + 1]
    assert sum(p.seconds * (stop - start) for p, (start, stop) in zip(points, pairwise(edges), strict=True)) == (
        pytest.approx(sum(times))
    )
    assert all(p.samples_per_second * p.seconds == pytest.approx(8) for p in points)


def test_a_slow_watched_step_is_not_the_speed_of_its_stretch() -> None:
    steps = [
        point(n, peak_bytes=500 if n % 50 == 0 else None, seconds=0.9 if n % 50 == 0 else 0.1) for n in range(1, 4001)
    ]
    older = track_of(steps).points[2:200]
    assert all(p.samples_per_second > 50 for p in older if p.peak_bytes)


def test_speed_of_steps_without_rows_is_left_out() -> None:
    steps = [point(n) if n % 2 else LivePoint(n, "as written", 0.1, math.nan, None, {}) for n in range(1, 1001)]
    assert all(p.samples_per_second == pytest.approx(80) for p in track_of(steps).points[:100])
    unknown = [LivePoint(n, "as written", 0.1, math.nan, None, {}) for n in range(1, 1001)]
    assert all(math.isnan(p.samples_per_second) for p in track_of(unknown).points)


def test_a_plan_change_at_every_step_is_bounded_too() -> None:
    steps = [point(n, f"--accumulate {2 + n % 2}", n) for n in range(1, 5001)]
    kept = track_of(steps).points
    assert len(kept) <= 300
    assert kept[-50:] == tuple(steps[-50:])


def test_points_are_spread_over_a_long_run() -> None:
    kept = track_of([point(n) for n in range(1, 100_001)]).points
    assert len(kept) >= 150
    gaps = [later.step - earlier.step for earlier, later in pairwise(kept[:-50])]
    assert max(gaps) <= 100_000 / 50


def test_the_work_per_step_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    touched = 0
    in_pairs = feed._in_pairs

    def counted(stretches: list[feed._Stretch], may_join: Any) -> list[feed._Stretch]:
        nonlocal touched
        touched += len(stretches)
        return in_pairs(stretches, may_join)

    monkeypatch.setattr(feed, "_in_pairs", counted)
    # the least favourable case: short stretches under ever new plans
    track_of([point(n, str(n // 3)) for n in range(20_000)])
    assert 0 < touched <= 5 * 20_000


def test_before_the_first_step_there_is_nothing() -> None:
    track = Track()
    assert (track.points, track.newest) == ((), None)
    track.add(point(1))
    assert (track.points, track.newest) == ((point(1),), point(1))
