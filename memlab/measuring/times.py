"""`Times`: times and losses of the steps of a loop, by the plans they were made under."""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from time import perf_counter

import torch

from memlab.errors import MemlabError
from memlab.measuring.device import Device, TimeMark
from memlab.measuring.observation import Observation
from memlab.plan import Plan
from memlab.records import Measurement, StepRecord, TimelinePoint, measurement_of_steps
from memlab.records.measurement import WARMUP_STEPS

# steps are watched two in a row: the second knows what the first left alive
OBSERVED_IN_A_ROW = 2
LEAST_STEPS_BETWEEN = 50
# steps without an update that are observed beside these: fp16 begins with a few, and state of the optimizer is there afterwards
MOST_SKIPPED = 16
# share of the loop's time that observed steps may cost
_OBSERVING_SHARE = 0.005
_MOST_RECORDS = 10_000
_MOST_PENDING = 50
# steps that the state of a running cell is reduced from
_MOST_SO_FAR = 200
# Linux's own count of it, of the thread that reads it: nanoseconds on a processor, nanoseconds waited, turns
_COUNTS = Path("/proc/thread-self/schedstat")
_LOOK_SECONDS = 0.1


# allocated and reserved bytes; None where the device does not count them
Peaks = tuple[int | None, int | None]


class ProcessorWait:
    """The share of the time for which the thread that calls `look` waited for a processor.

    Waiting for data, for files, for a GPU or in a pause is not counted: the thread is not ready then.

    Known limitations: only Linux tells; elsewhere the share is 0.
    """

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None
        self._last: tuple[float, float] | None = None

    def look(self) -> None:
        """Note how much it is by now; costs some microseconds, ten times a second at most."""
        now = perf_counter()
        if self._last is not None and now - self._last[0] < _LOOK_SECONDS:
            return
        with suppress(OSError, ValueError, IndexError):
            self._last = now, int(_COUNTS.read_text().split()[1]) / 1e9
            self._first = self._first or self._last

    @property
    def share(self) -> float:
        """Share of the time from the first look to the last."""
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return 0.0
        waited = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return min(1.0, max(0.0, waited))


@dataclass(slots=True)
class OpenStep:
    """The step the loop is in."""

    begin: TimeMark
    observed: bool
    rows: dict[int, int] = field(default_factory=dict)  # that each model was called with, by its number
    tokens_of: dict[int, int] = field(default_factory=dict)  # likewise
    elsewhere_bytes: int = 0
    loss: torch.Tensor | None = None
    skipped: bool = False
    stepped: set[int] = field(default_factory=set)

    @property
    def samples(self) -> int:
        """Rows of the step. A judge is called with real and with made ones, and again: the model that sees fewest sees each once."""
        return min(self.rows.values(), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of the step, of the model that sees fewest."""
        return min(filter(None, self.tokens_of.values()), default=0)


@dataclass(slots=True)
class _PastStep:
    """A step that is over, whose time and loss have not been read yet."""

    number: int
    step: OpenStep
    period: Period
    end: TimeMark
    loss: torch.Tensor | float | None
    peaks: Peaks

    def read(self) -> _TimedStep:
        record = StepRecord(
            step=self.number,
            plan=self.period.label,
            samples=self.step.samples,
            tokens=self.step.tokens,
            peak_allocated_bytes=self.peaks[0],
            peak_reserved_bytes=self.peaks[1],
            skipped=self.step.skipped,
            seconds=self.end.seconds_since(self.step.begin),
            loss=None if self.loss is None else float(self.loss),
        )
        self.period.note(record.seconds, observed=self.step.observed)
        return _TimedStep(record, self.period.number, self.step.observed)


@dataclass(frozen=True)
class _TimedStep:
    record: StepRecord
    period: int
    observed: bool


@dataclass
class Period:
    """The steps from one change of the plan to the next; `earlier` ones of the same plan count in its times."""

    number: int
    plan: Plan
    earlier: tuple[int, ...] = ()
    steps: int = 0
    observed_from: int = 0
    skipped: int = 0  # of the steps that were observed, those without an update
    largest: int = 0  # elements of the largest batch that was observed
    waiting: ProcessorWait = field(default_factory=ProcessorWait)
    host_bytes: int = 0
    driver_bytes: int | None = None
    peaks: Peaks = (None, None)
    elsewhere_bytes: int = 0
    timeline: tuple[TimelinePoint, ...] = ()
    parts: dict[int, dict[str, int]] = field(default_factory=dict)
    observation: Observation | None = None
    observed_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=OBSERVED_IN_A_ROW))
    plain_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=LEAST_STEPS_BETWEEN))

    @cached_property
    def label(self) -> str:
        return self.plan.label

    def note(self, seconds: float, *, observed: bool) -> None:
        """Keep the times of the newest steps, which say how often one can be observed."""
        (self.observed_seconds if observed else self.plain_seconds).append(seconds)

    def keep(self, observation: Observation, peaks: Peaks, elsewhere_bytes: int) -> None:
        """Keep the observation with the highest peak."""
        kept_bytes = self.observation.peak_bytes if self.observation is not None else -1
        if observation.peak_bytes >= kept_bytes:
            self.observation, self.peaks, self.timeline = observation, peaks, ()
            self.elsewhere_bytes = elsewhere_bytes

    def reduce(self) -> tuple[TimelinePoint, ...]:
        """The timeline at a few hundred points, made when it is first asked for."""
        if not self.timeline and self.observation is not None:
            self.timeline = self.observation.timeline()
            self.parts = self.observation.parts() if self.observation.owners else {}
        return self.timeline

    def release(self) -> None:
        """Keep the timeline but not the thousands of events it was made of."""
        self.reduce()
        self.observation = None


class Times:
    """Steps that have ended, and the periods between changes of the plan."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.period = Period(number=0, plan=Plan())  # the one under way
        self.steps_ended = 0  # steps so far, also those without a record
        self.last_end: TimeMark | None = None  # when the newest step ended; None where the loop has stood still since
        self._periods: dict[Plan, Period] = {}
        # of each plan, the latest that is over and of which a step was observed
        self._observed: dict[Plan, Period] = {}
        self._pending: deque[_PastStep] = deque()
        self._timed: deque[_TimedStep] = deque(maxlen=_MOST_RECORDS)
        self._lock = threading.Lock()

    # -- as the loop runs ----------------------------------------------------------------------

    def plan_changed(self, plan: Plan) -> None:
        self._release()
        before = self._periods.get(plan)
        earlier = (*before.earlier, before.number) if before is not None else ()
        self.period = Period(self.period.number + 1, plan, earlier)
        self.last_end = None

    def begin_anew(self) -> None:
        """Forget the steps of the period under way."""
        self._release()
        if self._periods.get(self.period.plan) is self.period:
            del self._periods[self.period.plan]
        self.period = Period(self.period.number + 1, self.period.plan, self.period.earlier, observed_from=1)
        self.last_end = None

    def _release(self) -> None:
        self.period.release()
        if self.period.timeline:
            self._observed[self.period.plan] = self.period

    def end_step(self, step: OpenStep, peaks: Peaks) -> None:
        """Add a step that is over; what the device has not finished is read later."""
        period, loss = self.period, self._device.keep(step.loss) if step.loss is not None else None
        self.last_end = self._device.mark()
        self.steps_ended += 1
        step.loss = None
        with self._lock:
            self._pending.append(_PastStep(self.steps_ended, step, period, self.last_end, loss, peaks))
        if not period.steps:
            self._periods[period.plan] = period
        period.steps += 1
        period.waiting.look()
        if len(self._pending) >= _MOST_PENDING:
            self.settle(wait=False)

    def pass_over(self, steps: int) -> None:
        """Count steps that were not told of."""
        self.steps_ended += steps
        self.period.steps += steps
        self.last_end = self._device.mark()
        self.period.waiting.look()

    def settle(self, *, wait: bool) -> None:
        """Read times and losses of the steps that the device has done."""
        with self._lock:
            while self._pending and (wait or self._pending[0].end.passed()):
                self._timed.append(self._pending.popleft().read())

    def steps_between_observations(self) -> int:
        """Return how many steps apart observations may begin under the plan of now."""
        self.settle(wait=False)
        with self._lock:
            return steps_between_observations([*self.period.observed_seconds], [*self.period.plain_seconds])

    # -- asked for -----------------------------------------------------------------------------

    def steps_after(self, number: int) -> list[StepRecord]:
        """Return steps after the one of this number whose time is known by now, oldest first; never waits for the device."""
        self.settle(wait=False)
        with self._lock:
            newer = list(takewhile(lambda timed: timed.record.step > number, reversed(self._timed)))
        return [timed.record for timed in reversed(newer)]

    def measurement(self, plan: Plan, read_counters: Callable[[Period], None]) -> Measurement:
        """Return memory and speed of the latest period of a plan; wait until its last step is done."""
        period = self._periods.get(plan)
        self.settle(wait=True)
        with self._lock:
            timed = [step for step in self._timed if period is not None and step.period == period.number]
        if period is None or not timed:
            raise MemlabError(f"no step has ended under the plan {plan.label!r}; run some steps first")
        if period is self.period:
            read_counters(period)
        return self._reduced(period, timed)

    def so_far(self, plan: str) -> Measurement | None:
        """Return what is known of a plan by now, from its newest steps; never wait for the device."""
        period = next((each for each in reversed(self._periods.values()) if each.plan.label == plan), None)
        if period is None:
            return None
        self.settle(wait=False)
        with self._lock:
            newest = list(
                islice((step for step in reversed(self._timed) if step.period == period.number), _MOST_SO_FAR)
            )
        if not newest:
            return None
        return self._reduced(period, newest[::-1])

    def parts_of(self, plan: Plan) -> dict[int, dict[str, int]]:
        """Return what each of several models had at the peak of a plan's latest period, by its number."""
        return self._periods[plan].parts

    def _reduced(self, period: Period, timed: Sequence[_TimedStep]) -> Measurement:
        """Reduce a period: memory of these steps, times of those that are settled and of earlier periods of the plan."""
        # a period of one step that began before it did, and was not observed, has no peak: that of the one before counts
        is_unseen = all(step.record.peak_allocated_bytes is None for step in timed)
        seen = self._observed.get(period.plan, period) if is_unseen and period.peaks[0] is None else period
        timeline = seen.reduce()
        settled = (step.record.seconds for step in self._settled(timed))
        measured = measurement_of_steps(
            period.plan,
            self._device.name,
            [step.record for step in timed],
            (*self._seconds_before(period), *settled),
            breakdown=self._device.breakdown(timeline, *seen.peaks, seen.elsewhere_bytes) if timeline else {},
            timeline=timeline,
            host_bytes=max(period.host_bytes, seen.host_bytes),
            driver_bytes=period.driver_bytes,
            waited_share=period.waiting.share,
        )
        # the newest steps may be ones that nobody looked at
        return replace(measured, peak_allocated_bytes=max(measured.peak_allocated_bytes, seen.peaks[0] or 0))

    def _seconds_before(self, period: Period) -> list[float]:
        """Times of the settled steps of earlier periods of a plan: going back to it is no reason to time it anew."""
        if not period.earlier:
            return []
        with self._lock:
            steps = [step for step in self._timed if step.period in period.earlier]
        each = ([step for step in steps if step.period == number] for number in period.earlier)
        return [step.record.seconds for steps in each for step in self._settled(steps)][-_MOST_SO_FAR:]

    def _settled(self, timed: Sequence[_TimedStep]) -> list[_TimedStep]:
        """Steps after the warm-up that no ledger slowed down."""
        every = self._device.observes_every_step
        return [step for step in timed[WARMUP_STEPS:] if every or not step.observed]


def steps_between_observations(observed_seconds: Sequence[float], plain_seconds: Sequence[float]) -> int:
    """Return how many steps apart observations may begin, so that they cost at most half a percent of the time.

    Example:
        >>> steps_between_observations([1.05], [1.0]), steps_between_observations([3.0], [1.0])
        (50, 800)
    """
    if not observed_seconds or not plain_seconds:
        return LEAST_STEPS_BETWEEN
    ratio = statistics.median(observed_seconds) / max(statistics.median(plain_seconds), 1e-9)
    cost = OBSERVED_IN_A_ROW * (ratio - 1) / _OBSERVING_SHARE
    return max(LEAST_STEPS_BETWEEN, math.ceil(round(cost, 6)))
