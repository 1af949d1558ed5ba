"""`Feed`: what a meter measures, gathered for views: steps, changes of the plan, settings tried. Bounded, whatever the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from memlab.live.thinning import Track
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.records import Measurement, StepRecord
from memlab.records.comparison import baseline_first, timed_anew
from memlab.records.live_state import Change, LivePoint

_MOST_CHANGES = 100
_MOST_SETTINGS = 40


class Feed:
    """Steps and settings of one model, over any number of cells.

    Attributes:
        step: number of the newest step.
        measurements: settings tried, by label, in the order in which they were first tried.
        changes: of the plan, the last hundred.
    """

    def __init__(self, say: Callable[[str], None] = lambda _words: None) -> None:
        self.step = 0
        self._say = say
        self._of_old: dict[str, Measurement] = {}  # settings tried before the meter that is followed
        self.measurements: dict[str, Measurement] = {}
        self.changes: deque[Change] = deque(maxlen=_MOST_CHANGES)
        self._track = Track()
        self._meter: Meter | None = None
        self._before = 0  # steps before those the meter counts
        self._seen = 0  # steps of the meter that have been taken in
        self._fresh: set[str] = set()  # labels of plans with steps not yet measured

    @property
    def points(self) -> tuple[LivePoint, ...]:
        """Steps, oldest first, thinned."""
        return self._track.points

    @property
    def newest(self) -> LivePoint | None:
        """The newest step."""
        return self._track.newest

    def begin(self, meter: Meter, step: int) -> None:
        """Follow a meter whose first step comes after step `step`."""
        self._meter, self._before, self._seen = meter, step, 0
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
        self._meter = None

    def plan_changed(self, plan: Plan, step: int) -> None:
        """Note that steps from `step` on run under a plan; a plan that was taken back before its first step leaves nothing."""
        if self.changes and self.changes[-1].step == step:
            self.changes.pop()
        before = self.changes[-1].plan if self.changes else self.newest.plan if self.newest else ""
        if plan.label != before:
            self.changes.append(Change(step, plan.label))

    def take_in(self) -> None:
        """Take in the steps that have ended; costs next to nothing when there is none."""
        if self._meter is None:
            return
        for record in self._meter.steps_after(self._seen):
            self._seen = record.step
            self.step = self._before + record.step
            self._fresh.add(record.plan)
            if self._is_higher(record):
                # what its bytes are for is known from this step on
                self.measure()
            self._track.add(self._point(record))

    def measure(self) -> None:
        """Reduce the steps of the plans that have had new ones; never waits for the device."""
        if self._meter is None:
            return
        for label in tuple(self._fresh):
            measured = self._meter.so_far(label)
            if measured is not None:
                self.know([measured])
                self._compare_with_old(measured)
            self._fresh.discard(label)

    def know(self, measurements: Iterable[Measurement]) -> None:
        """Take in settings that were measured elsewhere; the newest of a plan counts."""
        for measured in measurements:
            before = self.measurements.get(measured.plan)
            row, _ = timed_anew(before, measured) if before is not None else (measured, "")
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
                self._say(said)

    def _is_higher(self, record: StepRecord) -> bool:
        """Return whether a step needed more than what its plan is known to need, as the first ones do."""
        known = self.measurements.get(record.plan)
        return known is None or (record.peak_allocated_bytes or 0) > sum(known.breakdown.values())

    def _point(self, record: StepRecord) -> LivePoint:
        known = self.measurements.get(record.plan)
        return LivePoint(
            step=self._before + record.step,
            plan=record.plan,
            seconds=record.seconds,
            samples_per_second=record.samples / record.seconds if record.samples and record.seconds else math.nan,
            peak_bytes=record.peak_allocated_bytes,
            live_bytes=known.breakdown if known is not None else {},
            loss=record.loss,
        )
