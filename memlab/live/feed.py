"""`Feed`: what a meter measures, gathered for views: steps, changes of the plan, settings tried, events. Bounded, whatever the run.

`Track` keeps any number of steps as a bounded number of points:

1. The newest points are kept as they came.
2. Older ones stand for stretches of steps under one plan, each as high as its highest step: no peak is lost.
3. When there are too many points, neighbours become one, and stretches become twice as long from then on. So a step costs
   the same after hours as in the beginning. Where plans change too often for that, neighbours under two plans become one.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memlab.plan import Plan
from memlab.records import Measurement, StepRecord
from memlab.records.comparison import baseline_first, timed_anew
from memlab.records.live_state import Change, LivePoint

if TYPE_CHECKING:
    from memlab.measuring.steps import Meter

_MOST_CHANGES = 100
_MOST_EVENTS = 20
_MOST_SETTINGS = 40


class Feed:
    """Steps and settings of one model, over any number of cells."""

    def __init__(self) -> None:
        self.step = 0  # number of the newest step
        self.events: deque[str] = deque(maxlen=_MOST_EVENTS)  # what has happened, in words, the last twenty
        self._of_old: dict[str, Measurement] = {}  # settings tried before the meter that is followed
        # settings tried, by label, in the order in which they were first tried
        self.measurements: dict[str, Measurement] = {}
        self.changes: deque[Change] = deque(maxlen=_MOST_CHANGES)  # of the plan, the last hundred
        self._track = Track()
        self.meter: Meter | None = None  # the one that is followed, while a loop runs
        self._before = 0  # steps before those the meter counts
        self._seen = 0  # steps of the meter that have been taken in
        self._fresh: set[str] = set()  # labels of plans with steps not yet measured

    @property
    def points(self) -> tuple[LivePoint, ...]:
        return self._track.points

    @property
    def newest(self) -> LivePoint | None:
        return self._track.newest

    def begin(self, meter: Meter, step: int) -> None:
        """Follow a meter whose next step comes after step `step`."""
        self.meter, self._seen = meter, meter.times.steps_ended
        self._before = step - self._seen
        self._of_old = dict(self.measurements)
        self.step = max(self.step, step)

    def begin_anew(self) -> None:
        """Forget the steps and marks of a run that was ended: steps are counted from 1 again. What was measured stays."""
        self.step = 0
        self.changes.clear()
        self._track = Track()

    def end(self) -> None:
        """Take in what is left, and let go of the meter."""
        self.take_in()
        self.measure()
        if self.meter is not None:
            self.step = max(self.step, self._before + self.meter.times.steps_ended)
        self.meter = None

    def plan_changed(self, plan: Plan, step: int) -> None:
        """Note that steps from `step` on run under a plan; a plan that was taken back before its first step leaves nothing."""
        if self.changes and self.changes[-1].step == step:
            self.changes.pop()
        before = self.changes[-1].plan if self.changes else self.newest.plan if self.newest else ""
        if plan.label != before:
            self.changes.append(Change(step, plan.label))

    def take_in(self) -> None:
        """Take in the steps that have ended; costs next to nothing when there is none."""
        if self.meter is None:
            return
        for record in self.meter.times.steps_after(self._seen):
            self._seen = record.step
            self.step = self._before + record.step
            self._fresh.add(record.plan)
            if self._is_higher(record):
                # what its bytes are for is known from this step on
                self.measure()
            self._track.add(LivePoint.of(record, self.measurements.get(record.plan), self._before))

    def measure(self) -> None:
        """Reduce the steps of the plans that have had new ones; never waits for the device."""
        if self.meter is None:
            return
        for label in tuple(self._fresh):
            measured = self.meter.times.so_far(label)
            if measured is not None:
                self.know([measured])
                self._compare_with_old(measured)
            self._fresh.discard(label)

    def know(self, measurements: Iterable[Measurement]) -> None:
        """Take in settings that were measured elsewhere; the newest of a plan counts."""
        for measured in measurements:
            row, _ = timed_anew(self.measurements.get(measured.plan), measured)
            # steps of other moments of the training: their losses are no drift from one another
            self.measurements[measured.plan] = replace(row, losses=())
        # the first row is what others are compared with
        rows = baseline_first(tuple(self.measurements.values()))
        kept = (*rows[:1], *rows[1:][-(_MOST_SETTINGS - 1) :])
        self.measurements = {each.plan: each for each in kept}

    def _compare_with_old(self, measured: Measurement) -> None:
        old = self._of_old.get(measured.plan)
        if old is not None and measured.is_settled and measured.plan == next(iter(self.measurements)):
            del self._of_old[measured.plan]
            if said := timed_anew(old, measured)[1]:
                self.events.append(said)

    def _is_higher(self, record: StepRecord) -> bool:
        """Return whether a step needed more than what its plan is known to need, as the first ones do."""
        known = self.measurements.get(record.plan)
        return known is None or (record.peak_allocated_bytes or 0) > sum(known.breakdown.values())


_MOST = 300
_NEWEST = 50
# share of the older points that may be left when neighbours have become one
_ENOUGH = 0.75


@dataclass
class _Stretch:
    """Some steps in a row, as one point."""

    first: int  # number of its first step, where it is drawn
    highest: LivePoint  # the step with the highest peak
    steps: int = 1  # how many steps it stands for
    seconds: float = 0.0  # how long they took
    timed_seconds: float = 0.0  # how long those took whose samples are known
    samples: float = 0.0  # of these
    drawn: LivePoint | None = None

    @classmethod
    def of(cls, point: LivePoint) -> _Stretch:
        samples = point.samples_per_second * point.seconds
        known = math.isfinite(samples)
        return cls(point.step, point, 1, point.seconds, point.seconds if known else 0.0, samples if known else 0.0)

    def take(self, later: _Stretch) -> None:
        """Become one with the stretch that comes after."""
        if _height(later.highest) > _height(self.highest):
            self.highest = later.highest
        self.steps += later.steps
        self.seconds += later.seconds
        self.timed_seconds += later.timed_seconds
        self.samples += later.samples
        self.drawn = None

    @property
    def point(self) -> LivePoint:
        if self.drawn is None:
            self.drawn = self.highest if self.steps == 1 else self._typical()
        return self.drawn

    def _typical(self) -> LivePoint:
        # the highest step is often one that was watched closely, and slow for that: speed is that of the whole stretch
        speed = self.samples / self.timed_seconds if self.timed_seconds else math.nan
        return replace(self.highest, step=self.first, seconds=self.seconds / self.steps, samples_per_second=speed)


class Track:
    """Takes steps one by one, for hours, and keeps a few hundred points.

    A point that stands for several steps is at the first of them and has the highest peak; its time and its speed are the
    mean of all of them. May be read from any thread.

    Example:
        >>> track = Track()
        >>> for step in range(1, 10_001):
        ...     track.add(LivePoint(step, "as written", 0.1, 80.0, 10**9 if step == 77 else step, {}))
        >>> len(track.points) <= 300, max(point.peak_bytes for point in track.points), track.points[0].step
        (True, 1000000000, 1)
    """

    def __init__(self, most: int = _MOST, newest: int = _NEWEST) -> None:
        self._most_older = most - newest
        self._newest: deque[_Stretch] = deque()
        self._most_newest = newest
        self._older: list[_Stretch] = []
        self._steps_each = 1
        self._lock = threading.Lock()

    def add(self, point: LivePoint) -> None:
        with self._lock:
            self._newest.append(_Stretch.of(point))
            if len(self._newest) > self._most_newest:
                self._grow_old(self._newest.popleft())

    @property
    def points(self) -> tuple[LivePoint, ...]:
        """Steps, oldest first, thinned."""
        with self._lock:
            return tuple(stretch.point for part in (self._older, self._newest) for stretch in part)

    @property
    def newest(self) -> LivePoint | None:
        with self._lock:
            return self._newest[-1].point if self._newest else None

    def _grow_old(self, stretch: _Stretch) -> None:
        if self._older and _is_alike(self._older[-1], stretch) and self._older[-1].steps < self._steps_each:
            self._older[-1].take(stretch)
            return
        self._older.append(stretch)
        if len(self._older) > self._most_older:
            self._steps_each *= 2
            older = _in_pairs(self._older, _is_alike)
            is_enough = len(older) <= _ENOUGH * self._most_older
            self._older = older if is_enough else _in_pairs(older, lambda _earlier, _later: True)


def _is_alike(earlier: _Stretch, later: _Stretch) -> bool:
    return earlier.highest.plan == later.highest.plan


def _in_pairs(stretches: Sequence[_Stretch], may_join: Callable[[_Stretch, _Stretch], bool]) -> list[_Stretch]:
    """Neighbours as one, where they may be."""
    paired: list[_Stretch] = []
    is_open = False
    for stretch in stretches:
        if is_open and may_join(paired[-1], stretch):
            paired[-1].take(stretch)
            is_open = False
        else:
            paired.append(stretch)
            is_open = True
    return paired


def _height(point: LivePoint) -> int:
    """Return what is compared; a step that was not observed is lower than any that was."""
    return -1 if point.peak_bytes is None else point.peak_bytes
