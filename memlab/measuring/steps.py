"""`Meter`: memory and speed of every optimizer step of a live loop.

Rules of the meter:

1. It is told what happens by the session, on the training thread, and never changes the workload.
2. A step begins with the first forward after the one before ended, and ends when the optimizers
   have stepped; several forwards in between are summed. Optimizers that take turns (a GAN's) make one step
   once each has had a turn. A model without an optimizer makes a step of each forward.
3. A ledger watches the first two steps of each plan and two in a row every now and then: the second
   one knows what the first left alive. How often follows from what watching costs.
4. Nothing waits for the device within a step: times and losses are read when they are asked for. Records are made
   then, too, or many at once: between two steps of a loop every line of Python costs three times what it costs in a row.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, takewhile
from typing import TypeGuard

import torch

from memlab.errors import MemlabError
from memlab.measuring.device import Device, Mark
from memlab.measuring.ledger import Holding, gradients_of, inputs_of, parameters_of, state_of
from memlab.measuring.observation import Observation
from memlab.measuring.waiting import Waiting
from memlab.plan import Plan
from memlab.records import LOOP, Category, Measurement, Phase, StepRecord, TimelinePoint, measurement_of_steps
from memlab.runtime.observer import Observer
from memlab.runtime.tree import tensors_in
from memlab.runtime.workload import Batch

_WARMUP_STEPS = 1
_OBSERVED_IN_A_ROW = 2
_LEAST_STEPS_BETWEEN = 50
# share of the loop's time that observed steps may cost
_OBSERVING_SHARE = 0.005
_MOST_RECORDS = 10_000
_MOST_PENDING = 50
# steps that the state of a running cell is reduced from
_MOST_SO_FAR = 200


@dataclass(slots=True)
class _OpenStep:
    """The step the loop is in."""

    begin: Mark
    observed: bool
    samples: int = 0
    tokens: int = 0
    forwards: int = 0
    loss: torch.Tensor | None = None
    skipped: bool = False
    stepped: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _PastStep:
    """A step that is over, whose time and loss have not been read yet."""

    number: int
    step: _OpenStep
    period: _Period
    end: Mark
    loss: torch.Tensor | float | None
    peaks: tuple[int | None, int | None]

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
class _Period:
    """The steps from one change of the plan to the next; `earlier` ones of the same plan count in its times."""

    number: int
    plan: Plan
    earlier: tuple[int, ...] = ()
    steps: int = 0
    observed_from: int = 0
    waiting: Waiting = field(default_factory=Waiting)
    host_bytes: int = 0
    driver_bytes: int | None = None
    peaks: tuple[int | None, int | None] = (None, None)
    timeline: tuple[TimelinePoint, ...] = ()
    parts: dict[int, dict[str, int]] = field(default_factory=dict)
    observation: Observation | None = None
    observed_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_OBSERVED_IN_A_ROW))
    plain_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_LEAST_STEPS_BETWEEN))

    @cached_property
    def label(self) -> str:
        return self.plan.label

    def note(self, seconds: float, *, observed: bool) -> None:
        """Keep the times of the newest steps, which say how often one can be observed."""
        (self.observed_seconds if observed else self.plain_seconds).append(seconds)

    def keep(self, observation: Observation, peaks: tuple[int | None, int | None]) -> None:
        """Keep the observation with the highest peak."""
        kept_bytes = self.observation.peak_bytes if self.observation is not None else -1
        if observation.peak_bytes >= kept_bytes:
            self.observation, self.peaks, self.timeline = observation, peaks, ()

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


class Meter(Observer):
    """The observer that a session calls on the training thread.

    Args:
        model: the model that is trained; others may join it.
        optimizers: those known so far.
        device: what memory is counted on; it stays open when the meter closes.
        host_bytes: tells how many bytes techniques keep off the device at present.
        held: parts of parameters that techniques keep on the device at present, beside the model.

    Known limitations:
        An exception between forward and step shows only in the next forward: a session that sees one
        escape calls `interrupted`, or the forwards before it count towards the next step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        device: Device,
        host_bytes: Callable[[], int] = int,
        held: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        self.device = device
        self._models = [model]
        self._names: list[str] = []
        self._forwards = 0
        # when an optimizer stepped, in forwards, and which have after a further forward
        self._since: dict[int, tuple[int, set[int]]] = {}
        self._between: dict[int, set[int]] = {}  # those that stepped between its last two steps
        self._calling: list[int] = []  # numbers of the models whose calls are under way, from 1
        self._optimizers = list(optimizers)
        self._host_bytes = host_bytes
        self._held = held
        self._ledger = device.ledger()
        self._period = _Period(number=0, plan=Plan())
        self._periods: dict[Plan, _Period] = {}
        self._step: _OpenStep | None = None
        self._steps_ended = 0
        self._last_end: Mark | None = None
        self.in_forward = False
        self._in_step = False
        self._pending: deque[_PastStep] = deque()
        self._timed: deque[_TimedStep] = deque(maxlen=_MOST_RECORDS)
        self._lock = threading.Lock()

    @property
    def steps(self) -> list[StepRecord]:
        """Steps whose time is known by now, oldest first; reading never waits for the device."""
        self._settle(wait=False)
        with self._lock:
            return [timed.record for timed in self._timed]

    def steps_after(self, number: int) -> list[StepRecord]:
        """Steps after the one of this number whose time is known by now; costs next to nothing when there is none."""
        self._settle(wait=False)
        with self._lock:
            newer = list(takewhile(lambda timed: timed.record.step > number, reversed(self._timed)))
        return [timed.record for timed in reversed(newer)]

    @property
    def live_bytes(self) -> int | None:
        """Live bytes at this moment of an observed step; None in others."""
        return self._ledger.live_bytes if self._ledger.watching else None

    def storage_resized(self, storage: torch.UntypedStorage) -> None:
        """An engine has given memory to a storage, or taken it away, without an operator."""
        self._ledger.resized(storage)

    @contextmanager
    def engine_starts(self) -> Iterator[None]:
        """Watch an engine start: buffers it makes for itself then are counted in every step.

        Nothing is refused meanwhile: on the way some of what the ledger counts is in host memory beside a GPU.
        """
        with self._ledger.without_limit():
            yield
        self._ledger.know([*self._parameters(), *self._state()])
        self._ledger.know_the_rest(Category.WORKSPACES)

    def plan_changed(self, plan: Plan) -> None:
        """Begin a new period: at a step boundary, or within a step whose batch is done again under the new plan."""
        if not self.in_forward:
            self._end_step_if_over()
        self._period.release()
        before = self._periods.get(plan)
        earlier = (*before.earlier, before.number) if before is not None else ()
        self._period = _Period(self._period.number + 1, plan, earlier)
        self._last_end = None
        if self._step is not None:
            # what failed under the old plan is no peak of the new one
            self._forget_peaks(self._step, ())

    def take_in(self, model: torch.nn.Module, names: Sequence[str]) -> int:
        """Measure another model that trains in the same loop.

        Returns:
            Its number, for `call_begins`.
        """
        self._models.append(model)
        self._names = list(names)
        return len(self._models)

    def call_begins(self, number: int, batch: Batch) -> None:
        """A call of one of the models begins: what is born from now on is its own."""
        self._calling.append(number)
        self._ledger.owner = number
        if self._is_observed:
            self._ledger.know(inputs_of(batch))
            self._ledger.belong(number, (tensor for _, tensor in inputs_of(batch)))

    def call_ended(self) -> None:
        """It is over; harmless when none is under way."""
        del self._calling[-1:]
        self._ledger.owner = self._calling[-1] if self._calling else 0

    def _claim(self) -> None:
        """Say which of several models parameters, gradients and optimizer state are of."""
        if len(self._models) < 2:
            return
        states = {id(p): state for o in self._optimizers for p, state in o.state.items()}
        for number, model in enumerate(self._models, 1):
            held = (t for of in (parameters_of(model), gradients_of(model)) for _, t in of)
            self._ledger.belong(number, held)
            self._ledger.belong(number, (t for p in model.parameters() for t in tensors_in(states.get(id(p), ()))))

    @property
    def _is_observed(self) -> bool:
        return self._step is not None and self._step.observed

    def only_tried(self) -> None:
        """Peaks so far are none of the plan's."""
        if self._step is not None:
            self._forget_peaks(self._step, ())

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)

    def forward_begins(self, batch: Batch) -> None:
        self.step_goes_on(batch)
        self.call_begins(1, batch)

    def forward_ended(self, loss: torch.Tensor | None) -> None:
        self.call_ended()
        self.forward_is_over(loss)

    def step_goes_on(self, batch: Batch) -> None:
        """A forward begins, of one or of several models within each other; the first one of a step begins the step."""
        if self.in_forward:
            self.interrupted()
        self._end_step_if_over()
        step = self._step
        if step is None:
            step = self._step = self._begin_step(batch)
        elif step.observed:
            self._ledger.know(inputs_of(batch))
        step.forwards += 1
        self._forwards += 1
        step.samples += batch.rows
        step.tokens += batch.tokens
        self.in_forward = True
        if step.observed:
            self._ledger.phase = Phase.FORWARD

    def forward_is_over(self, loss: torch.Tensor | None) -> None:
        """It has ended, and returned this loss."""
        self.in_forward = False
        step = self._step
        if step is None:
            return
        if step.observed:
            self._ledger.phase = Phase.STEP if self._in_step else Phase.OTHER
        if _is_readable(loss):
            step.loss = loss.detach()

    def gradients_complete(self) -> None:
        """Gradients have found their place, and will leave it before the step."""
        if self._is_observed:
            self._ledger.know(self._gradients())
            self._claim()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._in_step = True
        if self._step is not None and self._step.observed:
            self._ledger.phase = Phase.STEP
            self.gradients_complete()

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool = False) -> None:
        self._in_step = False
        self.optimizer_found(optimizer)
        self._note_turn(id(optimizer))
        step = self._step
        if step is None:
            return
        if step.observed:
            self._ledger.phase = Phase.OTHER
        step.skipped = step.skipped or skipped
        step.stepped.add(id(optimizer))
        if len(step.stepped) == len(self._optimizers):
            self._end_step(step)

    def interrupted(self) -> None:
        """The loop broke off or stands still (an exception, the end of a cell): forget the step it was in.

        The ledger stops watching; the next step is timed from its first forward.
        """
        if not self.in_forward:
            self._end_step_if_over()
        self._ledger.stop()
        self._ledger.phase = Phase.OTHER
        self._step = None
        self._last_end = None
        self.in_forward = self._in_step = False
        self._calling, self._ledger.owner = [], 0

    def measurement(self, plan: Plan) -> Measurement:
        """Memory and speed of the latest period of a plan; waits until its last step is done.

        Raises:
            MemlabError: no step has ended under this plan.
        """
        period = self._periods.get(plan)
        timed = self._timed_in(period, wait=True) if period is not None else []
        if period is None or not timed:
            raise MemlabError(f"no step has ended under the plan {plan.label!r}; run some steps first")
        if period is self._period:
            self._read_counters(period)
        measured = _measurement(period, self.device, timed, self._settled(timed), self._timed_before(period))
        names = dict(enumerate((*self._names, LOOP), 1))
        parts = {name: period.parts.get(number % len(names), {}) for number, name in names.items()}
        return replace(measured, models=parts if period.parts else {})

    def so_far(self, plan: str) -> Measurement | None:
        """Return what is known of a plan by now, from its newest steps; never waits for the device.

        Returns:
            The measurement; None before a step of it has been timed.
        """
        period = next((each for each in reversed(self._periods.values()) if each.plan.label == plan), None)
        if period is None:
            return None
        self._settle(wait=False)
        with self._lock:
            newest = list(
                islice((step for step in reversed(self._timed) if step.period == period.number), _MOST_SO_FAR)
            )
        if not newest:
            return None
        newest.reverse()
        measured = _measurement(period, self.device, newest, self._settled(newest), self._timed_before(period))
        # the newest steps may be ones that nobody looked at
        return replace(measured, peak_allocated_bytes=max(measured.peak_allocated_bytes, period.peaks[0] or 0))

    def pause(self) -> None:
        """The loop stands still between two steps: the next step is timed from its first forward."""
        self._end_step_if_over()
        self._last_end = None

    def close(self) -> None:
        """Stop watching and let go of model and optimizers; what was measured stays readable."""
        self.interrupted()
        self._ledger.close()
        self._models = []
        self._optimizers = []

    def _begin_step(self, batch: Batch) -> _OpenStep:
        observed = self.device.observes_every_step or self._is_due()
        step = _OpenStep(begin=self._last_end or self.device.mark(), observed=observed)
        self._forget_peaks(step, inputs_of(batch) if observed else ())
        if observed:
            self._ledger.start()
        return step

    def _forget_peaks(self, step: _OpenStep, inputs: Iterable[Holding]) -> None:
        """Let the peaks of a step start from what lives now."""
        self.device.reset_peaks()
        if step.observed:
            self._ledger.begin([*self._parameters(), *self._gradients(), *self._state(), *inputs])
            self._claim()

    def _is_due(self) -> bool:
        """Return whether the next step is to be observed."""
        period = self._period
        since = period.steps - period.observed_from
        if since and since % _LEAST_STEPS_BETWEEN == 0 and since >= self._steps_between():
            period.observed_from, since = period.steps, 0
        # at first each of several models makes a step of its own
        return since < _OBSERVED_IN_A_ROW * len(self._models)

    def _steps_between(self) -> int:
        self._settle(wait=False)
        with self._lock:
            return steps_between_observations([*self._period.observed_seconds], [*self._period.plain_seconds])

    def _end_step_if_over(self) -> None:
        """End a step that had waited for other optimizers, or that has none."""
        step = self._step
        if step is not None and (step.stepped or not self._optimizers) and not self._others_follow(step):
            self._end_step(step)

    def _others_follow(self, step: _OpenStep) -> bool:
        """Whether optimizers that take turns with those that have stepped are still to come."""
        return any(self._between.get(each, set()) - step.stepped for each in step.stepped)

    def _note_turn(self, optimizer: int) -> None:
        _, self._between[optimizer] = self._since.pop(optimizer, (0, set()))
        for forwards, others in self._since.values():
            if forwards < self._forwards:
                others.add(optimizer)
        self._since[optimizer] = (self._forwards, set())

    def _end_step(self, step: _OpenStep) -> None:
        self._step = None
        period = self._period
        observation = self._observation() if step.observed else None
        peaks = self.device.peaks(observation.peak_bytes if observation is not None else None)
        loss = self.device.keep(step.loss) if step.loss is not None else None
        self._last_end = self.device.mark()
        self._steps_ended += 1
        step.loss = None
        with self._lock:
            self._pending.append(_PastStep(self._steps_ended, step, period, self._last_end, loss, peaks))
        if not period.steps:
            self._periods[period.plan] = period
        period.steps += 1
        period.waiting.look()
        if observation is not None:
            period.keep(observation, peaks)
            self._read_counters(period)
        if len(self._pending) >= _MOST_PENDING:
            self._settle(wait=False)

    def _observation(self) -> Observation:
        self._ledger.know([*self._state(), *self._parameters()])
        self._claim()
        self._ledger.stop()
        seen = self._ledger.finish()
        return seen if len(self._models) > 1 else replace(seen, owners={})

    def _read_counters(self, period: _Period) -> None:
        period.host_bytes = max(period.host_bytes, self._host_bytes())
        period.driver_bytes = self.device.driver_bytes()

    def _settle(self, *, wait: bool) -> None:
        """Read times and losses of the steps that the device has done."""
        with self._lock:
            while self._pending and (wait or self._pending[0].end.passed()):
                self._timed.append(self._pending.popleft().read())

    def _timed_in(self, period: _Period, *, wait: bool) -> list[_TimedStep]:
        self._settle(wait=wait)
        with self._lock:
            return [step for step in self._timed if step.period == period.number]

    def _timed_before(self, period: _Period) -> list[float]:
        """Times of the settled steps of earlier periods of a plan: going back to it is no reason to time it anew."""
        if not period.earlier:
            return []
        with self._lock:
            steps = [step for step in self._timed if step.period in period.earlier]
        each = ([step for step in steps if step.period == number] for number in period.earlier)
        return [step.record.seconds for steps in each for step in self._settled(steps)][-_MOST_SO_FAR:]

    def _settled(self, timed: Sequence[_TimedStep]) -> list[_TimedStep]:
        """Steps after the warm-up that no ledger slowed down."""
        every = self.device.observes_every_step
        return [step for step in timed[_WARMUP_STEPS:] if every or not step.observed]

    def _parameters(self) -> Iterator[Holding]:
        for model in self._models:
            yield from parameters_of(model)
        if self._models:
            yield from ((Category.PARAMETERS, tensor) for tensor in self._held())

    def _gradients(self) -> Iterator[Holding]:
        for model in self._models:
            yield from gradients_of(model)

    def _state(self) -> Iterator[Holding]:
        return state_of(self._optimizers)


def _measurement(
    period: _Period, device: Device, timed: Sequence[_TimedStep], settled: Sequence[_TimedStep], before: Sequence[float]
) -> Measurement:
    """Reduce a period: memory of all its steps, times of those that are settled and of `before`."""
    timeline = period.reduce()
    records = [step.record for step in timed]
    measured = measurement_of_steps(
        period.plan,
        device.name,
        records,
        warmup=_WARMUP_STEPS,
        breakdown=device.breakdown(timeline, *period.peaks) if timeline else {},
        timeline=timeline,
        host_bytes=period.host_bytes,
        driver_bytes=period.driver_bytes,
    )
    seconds = (*before, *(step.record.seconds for step in settled))
    return replace(
        measured,
        step_seconds=seconds or measured.step_seconds,
        is_warm=bool(seconds),
        waited_share=period.waiting.share,
    )


def steps_between_observations(observed_seconds: Sequence[float], plain_seconds: Sequence[float]) -> int:
    """Return how many steps apart observations may begin, so that they cost at most half a percent of the time.

    Args:
        observed_seconds: times of observed steps; empty when none is known yet.
        plain_seconds: times of steps that were not observed; empty when none is known yet.

    Example:
        >>> steps_between_observations([1.05], [1.0]), steps_between_observations([3.0], [1.0])
        (50, 800)
    """
    if not observed_seconds or not plain_seconds:
        return _LEAST_STEPS_BETWEEN
    ratio = statistics.median(observed_seconds) / max(statistics.median(plain_seconds), 1e-9)
    cost = _OBSERVED_IN_A_ROW * (ratio - 1) / _OBSERVING_SHARE
    return max(_LEAST_STEPS_BETWEEN, math.ceil(round(cost, 6)))


def _is_readable(loss: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_meta
