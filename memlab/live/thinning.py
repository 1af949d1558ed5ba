"""`Track`: any number of steps as a bounded number of points.

1. The newest points are kept as they came.
2. Older ones stand for stretches of steps, each as high as its highest step: no peak is lost.
3. A stretch lies under one plan; the first step under each plan stays a point of its own.
4. When there are too many points, neighbours become one, and stretches become twice as long from then on. So a step costs
   the same after hours as in the beginning.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memlab.records.live_state import LivePoint

_MOST = 300
_NEWEST = 50
# how many of all points may be the first ones of their plans; with more plan changes than that, the oldest lose their mark
_MOST_FIRSTS_SHARE = 0.2


@dataclass
class _Stretch:
    """Some steps in a row, as one point.

    Attributes:
        highest: the step with the highest peak.
        is_first: a first step under its plan, which stays alone.
        steps: how many steps it stands for.
        seconds: how long they took.
        timed_seconds: how long those took whose samples are known.
        samples: of these.
    """

    highest: LivePoint
    is_first: bool
    steps: int = 1
    seconds: float = 0.0
    timed_seconds: float = 0.0
    samples: float = 0.0
    drawn: LivePoint | None = None

    @classmethod
    def of(cls, point: LivePoint, *, is_first: bool) -> _Stretch:
        samples = point.samples_per_second * point.seconds
        known = math.isfinite(samples)
        return cls(point, is_first, 1, point.seconds, point.seconds if known else 0.0, samples if known else 0.0)

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
        return replace(self.highest, seconds=self.seconds / self.steps, samples_per_second=speed)


class Track:
    """Takes steps one by one, for hours, and keeps a few hundred points.

    A point that stands for several steps is the one with the highest peak; its time and its speed are the mean of all of
    them. May be read from any thread.

    Example:
        >>> track = Track()
        >>> for step in range(1, 10_001):
        ...     track.add(LivePoint(step, "as written", 0.1, 80.0, 10**9 if step == 77 else step, {}))
        >>> len(track.points) <= 300, max(point.peak_bytes for point in track.points), track.points[0].step
        (True, 1000000000, 1)
    """

    def __init__(self, most: int = _MOST, newest: int = _NEWEST) -> None:
        self._most_older = most - newest
        self._most_firsts = int(most * _MOST_FIRSTS_SHARE)
        self._newest: deque[_Stretch] = deque()
        self._most_newest = newest
        self._older: list[_Stretch] = []
        self._firsts: deque[_Stretch] = deque()
        self._steps_each = 1
        self._lock = threading.Lock()

    def add(self, point: LivePoint) -> None:
        """Take in the next step."""
        with self._lock:
            stretch = _Stretch.of(point, is_first=not self._newest or self._newest[-1].highest.plan != point.plan)
            self._newest.append(stretch)
            if len(self._newest) > self._most_newest:
                self._grow_old(self._newest.popleft())

    @property
    def points(self) -> tuple[LivePoint, ...]:
        """Return what is kept, oldest first."""
        with self._lock:
            return tuple(stretch.point for part in (self._older, self._newest) for stretch in part)

    @property
    def newest(self) -> LivePoint | None:
        """The newest step; None before the first."""
        with self._lock:
            return self._newest[-1].point if self._newest else None

    def _grow_old(self, stretch: _Stretch) -> None:
        if stretch.is_first:
            self._mark(stretch)
        elif self._older and _may_join(self._older[-1], stretch) and self._older[-1].steps < self._steps_each:
            self._older[-1].take(stretch)
            return
        self._older.append(stretch)
        if len(self._older) > self._most_older:
            self._steps_each *= 2
            self._older = _in_pairs(self._older)

    def _mark(self, first: _Stretch) -> None:
        self._firsts.append(first)
        if len(self._firsts) > self._most_firsts:
            self._firsts.popleft().is_first = False


def _may_join(earlier: _Stretch, later: _Stretch) -> bool:
    return not earlier.is_first and not later.is_first


def _in_pairs(stretches: Sequence[_Stretch]) -> list[_Stretch]:
    """Neighbours as one, except for first steps under a plan."""
    paired: list[_Stretch] = []
    is_open = False
    for stretch in stretches:
        if is_open and _may_join(paired[-1], stretch):
            paired[-1].take(stretch)
            is_open = False
        else:
            paired.append(stretch)
            is_open = True
    return paired


def _height(point: LivePoint) -> int:
    """Return what is compared; a step that was not observed is lower than any that was."""
    return -1 if point.peak_bytes is None else point.peak_bytes
