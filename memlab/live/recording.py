"""A recording as a replay plays it: its points, the stretches under one plan, and when each point comes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from memlab.live.thinning import Track
from memlab.records import Measurement, StepRecord, ratio
from memlab.records.live_state import Change, LivePoint
from memlab.records.run_record import RunRecord

_LONGEST_SECONDS = 20.0
# shorter recordings are slowed down: eyes must be able to follow
_SHORTEST_SECONDS = 4.0
_FASTER = 2.0


@dataclass(frozen=True)
class Stretch:
    """Points in a row under one plan: from `start` on, before `stop`."""

    plan: str
    start: int
    stop: int


def points_of(record: RunRecord) -> tuple[LivePoint, ...]:
    """The points of a recording; of a file without them, made of its steps."""
    points: Iterable[LivePoint] = record.points
    if not record.points:
        breakdowns = {each.plan: each for each in record.comparison.measurements}
        points = (_point(step, breakdowns.get(step.plan)) for step in record.steps)
    track = Track()
    for each in sorted(points, key=lambda point: point.step):
        track.add(each)
    return track.points


def _point(step: StepRecord, measured: Measurement | None) -> LivePoint:
    return LivePoint(
        step=step.step,
        plan=step.plan,
        seconds=step.seconds,
        samples_per_second=ratio(step.samples or math.nan, step.seconds),
        peak_bytes=step.peak_allocated_bytes,
        live_bytes=measured.breakdown if measured is not None else {},
        loss=step.loss,
    )


def stretches_of(points: Sequence[LivePoint]) -> tuple[Stretch, ...]:
    """Points in a row under one plan, oldest first."""
    found, start = [], 0
    for plan, group in groupby(points, key=lambda point: point.plan):
        stop = start + len(list(group))
        found.append(Stretch(plan, start, stop))
        start = stop
    return tuple(found)


def changes_of(points: Sequence[LivePoint], stretches: Sequence[Stretch]) -> tuple[Change, ...]:
    """The plan changes between stretches, the first plan included."""
    return tuple(Change(points[each.start].step, each.plan) for each in stretches)


def times_of(points: Sequence[LivePoint]) -> tuple[float, ...]:
    """Return when each point comes while it is played: as far apart as in the run, times one factor."""
    took, step = [], points[0].step - 1 if points else 0
    for each in points:
        seconds = each.seconds if math.isfinite(each.seconds) else 0.0
        took.append(max(0.0, seconds) * (each.step - step))
        step = each.step
    whole = sum(took)
    if not whole:
        took, whole = [1.0] * len(points), float(len(points))
    playing = min(_LONGEST_SECONDS, max(_SHORTEST_SECONDS, whole / _FASTER))
    times, passed = [], 0.0
    for seconds in took:
        passed += seconds / whole * playing
        times.append(passed)
    return tuple(times)
