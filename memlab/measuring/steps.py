"""`Meter`: memory and speed of every optimizer step of a live loop.

Rules of the meter:

1. It is told what happens by the session, on the training thread, and never changes the workload.
2. A step begins with the first forward after the one before ended, and ends when the optimizers
   have stepped; several forwards in between are summed. Optimizers that take turns (a GAN's) make one step
   once each has had a turn. A model without an optimizer makes a step of each forward.
3. A ledger watches the first two steps with an update of each plan and two in a row every now and then: the second
   one knows what the first left alive. How often follows from what watching costs. On a GPU autograd takes more memory
   while it is watched (see the ledger), which is left out of allocated bytes.
4. Of steps so short that telling of them is noticed, on a device that has no counter of each, most pass untold
   (`steps_to_pass`). They are counted, and have no records.
5. Nothing waits for the device within a step: times and losses are read when they are asked for. Records are made
   then, too, or many at once: between two steps of a loop every line of Python costs three times what it costs in a row.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from memlab.measuring.device import Device
from memlab.measuring.holdings import Holding, inputs_of
from memlab.measuring.models import Models
from memlab.measuring.observation import Observation
from memlab.measuring.times import LEAST_STEPS_BETWEEN, MOST_SKIPPED, OBSERVED_IN_A_ROW, OpenStep, Period, Times
from memlab.plan import Plan
from memlab.records import LOOP, Category, Measurement, Phase, StepRecord
from memlab.runtime.batch import Batch
from memlab.runtime.observer import Observer
from memlab.session.recording import StepRecorder
from memlab.session.tape import Tape

# shorter steps are told of in part: at first twenty, then a few of each fifty
_SHORT_SECONDS = 0.004
_TOLD_AT_FIRST = 20
_TOLD_IN_A_ROW = 5


class Meter(Observer):
    """The observer that a session calls on the training thread.

    Known limitations:
        An exception between forward and step shows only in the next forward: a session that sees one
        escape calls `interrupted`, or the forwards before it count towards the next step.

    Over 300 lines: each moment of the loop changes the one step that is open.
    """

    def __init__(
        self,
        model: torch.nn.Module,  # the model that is trained; others may join it
        optimizers: Iterable[torch.optim.Optimizer],  # those known so far
        device: Device,  # what memory is counted on; it stays open when the meter closes
        host_bytes: Callable[[], int] = lambda: 0,  # tells how many bytes techniques keep off the device at present
        # parts of parameters that techniques keep on the device at present, beside the model
        held: Callable[[], Iterable[torch.Tensor]] = lambda: (),
    ) -> None:
        self.device = device
        self._ledger = device.ledger()
        self._models = Models(model, optimizers, held, self._ledger)
        self.times = Times(device)  # of all steps, by plan
        self._turns = Turns()
        self._host_bytes = host_bytes
        self._step: OpenStep | None = None
        self.in_forward = False
        self._in_step = False
        self._evaluations = 0  # calls without gradients that are watched, each within the one before
        self.records = False  # whether a step of the loop is recorded
        self.tape: Tape | None = None  # that step; None as long as none was
        self._recorder: StepRecorder | None = None

    # -- what was measured ---------------------------------------------------------------------

    @property
    def steps(self) -> list[StepRecord]:
        """Steps whose time is known by now, oldest first; reading never waits for the device."""
        return self.times.steps_after(0)

    def measurement(self, plan: Plan) -> Measurement:
        measured = self.times.measurement(plan, self._read_counters)
        found = self.times.parts_of(plan)
        names = dict(enumerate((*self._models.names, LOOP), 1))
        parts = {name: found.get(number % len(names), {}) for number, name in names.items()}
        return replace(measured, models=parts if found else {})

    # -- moments of the loop -------------------------------------------------------------------

    def steps_to_pass(self) -> int:
        """Return how many steps may pass from here on of which the meter is not told."""
        period = self.times.period
        since = period.steps - period.observed_from
        told = _TOLD_AT_FIRST if since < LEAST_STEPS_BETWEEN else _TOLD_IN_A_ROW
        if since % LEAST_STEPS_BETWEEN != told or self.device.counts_every_step or len(self._models.optimizers) != 1:
            return 0
        self.times.settle(wait=False)
        is_short = statistics.median(period.plain_seconds or [math.inf]) < _SHORT_SECONDS
        return LEAST_STEPS_BETWEEN - told if is_short else 0

    def rested(self, steps: int) -> None:
        self.times.pass_over(steps)

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
        self._ledger.know([*self._models.parameters(), *self._models.state()])
        self._ledger.know_the_rest(Category.WORKSPACES)

    def plan_changed(self, plan: Plan) -> None:
        """Begin a new period: at a step boundary, or within a step whose batch is done again under the new plan."""
        if not self.in_forward:
            self._end_step_if_over()
        self.times.plan_changed(plan)
        self.only_tried()  # what failed under the old plan is no peak of the new one

    def take_in(self, number: int, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Measure another model that trains in the same loop, or one in the place of another that is gone; it has this number from 1 on."""
        self._stop_recording()
        self.tape = None  # of the models before, which says nothing of all
        period = self.times.period
        period.observed_from = period.steps
        self._models.add(number, model, names)

    def call_begins(self, number: int, batch: Batch) -> None:
        self._models.call_begins(number, batch, is_observed=self._is_observed)

    def call_ended(self) -> None:
        self._models.call_ended()

    @property
    def _is_observed(self) -> bool:
        return self._step is not None and self._step.observed

    def only_tried(self) -> None:
        """Peaks so far are none of the plan's."""
        if self._step is not None:
            self._forget_peaks(self._step, ())

    def only_watched(self) -> None:
        """Steps so far are none of the plan's."""
        self.times.begin_anew()
        self.only_tried()

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        self._models.add_optimizer(optimizer)

    def forward_begins(self, batch: Batch) -> None:
        self.step_goes_on(1, batch)
        self.call_begins(1, batch)

    def forward_ended(self, loss: torch.Tensor | None) -> None:
        self.call_ended()
        self.forward_is_over(loss)

    def step_goes_on(self, number: int, batch: Batch) -> None:
        """A forward begins, of the model of a number; the first one of a step begins the step."""
        if self.in_forward:
            self.interrupted()
        self._end_step_if_over(goes_on=True)
        step = self._step
        if step is None:
            step = self._step = self._begin_step(batch)
        elif step.observed:
            self._ledger.know(inputs_of(batch))
        self._turns.forward_begins()
        step.rows[number] = step.rows.get(number, 0) + batch.rows
        step.tokens_of[number] = step.tokens_of.get(number, 0) + batch.tokens
        self.in_forward = True
        if step.observed:
            self._ledger.phase = Phase.FORWARD

    def forward_is_over(self, loss: torch.Tensor | None) -> None:
        """Note the end of a forward, and the loss it returned."""
        self.in_forward = False
        step = self._step
        if step is None:
            return
        if step.observed:
            self._ledger.phase = Phase.STEP if self._in_step else Phase.OTHER
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_meta:
            step.loss = loss.detach()

    def evaluation_begins(self, batch: Batch) -> None:
        """Watch a call between two steps where the ledger enforces a capacity; one within a step is watched with it."""
        if self._evaluations or (self._step is None and self.device.observes_every_step):
            self._evaluations += 1
            if self._evaluations == 1:
                self._begin_ledger(inputs_of(batch))
                self._ledger.start()

    def evaluation_ended(self) -> None:
        if self._evaluations:
            self._evaluations -= 1
            if not self._evaluations:
                self._ledger.stop()

    def gradients_complete(self) -> None:
        """Gradients have found their place, and will leave it before the step."""
        if self._is_observed:
            self._ledger.know(self._models.gradients())
            self._models.claim()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._in_step = True
        if self._recorder is not None:
            self._recorder.step_begins(optimizer)
        if self._is_observed:
            self._ledger.phase = Phase.STEP
            self.gradients_complete()

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool = False) -> None:
        self._in_step = False
        self._end_turn(optimizer, skipped)
        if self._recorder is not None:
            self._recorder.step_ended()

    def _end_turn(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        self.optimizer_found(optimizer)
        self._turns.stepped(id(optimizer))
        step = self._step
        if step is None:
            return
        if step.observed:
            self._ledger.phase = Phase.OTHER
        step.skipped = step.skipped or skipped
        is_second = id(optimizer) in step.stepped
        step.stepped.add(id(optimizer))
        if len(step.stepped) == len(self._models.optimizers) or (is_second and self._turns.expects(self._optimizers)):
            self._turns.expect_no_other(self._optimizers)
            self._end_step(step)
            self._record(step)

    def interrupted(self) -> None:
        """The loop broke off or stands still (an exception, the end of a cell): forget the step it was in.

        The ledger stops watching; the next step is timed from its first forward.
        """
        if not self.in_forward:
            self._end_step_if_over()
        self._ledger.stop()
        self._ledger.phase = Phase.OTHER
        self._step = None
        self._stop_recording()
        self.times.last_end = None
        self.in_forward = self._in_step = False
        self._evaluations = 0
        self._models.interrupted()

    def pause(self) -> None:
        """The loop stands still between two steps: the next step is timed from its first forward."""
        self._end_step_if_over()
        self.times.last_end = None

    def close(self) -> None:
        """Stop watching and let go of model and optimizers; what was measured stays readable."""
        self.interrupted()
        self._ledger.close()
        self._models.forget()

    def _begin_step(self, batch: Batch) -> OpenStep:
        # a larger batch than any before has the highest peak so far
        period, elements = self.times.period, batch.elements
        observed = self.device.observes_every_step or self._is_due() or elements > period.largest
        if observed:
            period.largest = max(period.largest, elements)
        step = OpenStep(begin=self.times.last_end or self.device.mark(), observed=observed)
        if len(self._models) == 1:
            self._ledger.leave_data()
        self._forget_peaks(step, inputs_of(batch) if observed else ())
        if observed:
            self._ledger.start()
        return step

    def _forget_peaks(self, step: OpenStep, inputs: Iterable[Holding]) -> None:
        """Let the peaks of a step start from what lives now."""
        self.device.reset_peaks()
        if step.observed:
            self._begin_ledger(inputs)
            self._models.claim()
            step.elsewhere_bytes = self.device.elsewhere_bytes(self._ledger.live_bytes)

    def _begin_ledger(self, inputs: Iterable[Holding]) -> None:
        self._ledger.begin([*self._models.parameters(), *self._models.gradients(), *self._models.state(), *inputs])

    def _is_due(self) -> bool:
        """Return whether the next step is to be observed."""
        period = self.times.period
        since = period.steps - period.observed_from
        if since and since % LEAST_STEPS_BETWEEN == 0 and since >= self.times.steps_between_observations():
            period.observed_from, since = period.steps, 0
        # at first each of several models makes a step of its own
        return since < OBSERVED_IN_A_ROW * len(self._models)

    @property
    def _optimizers(self) -> set[int]:
        return {id(each) for each in self._models.optimizers}

    def _end_step_if_over(self, *, goes_on: bool = False) -> None:
        """End a step that had waited for other optimizers, or that has none; those that never stepped may come if the loop goes on."""
        step = self._step
        if (
            step is not None
            and (step.stepped or not self._models.optimizers)
            and not self._turns.are_open(step.stepped)
            and not (goes_on and self._turns.expects(self._optimizers))
        ):
            self._stop_recording()
            self._end_step(step)

    def _end_step(self, step: OpenStep) -> None:
        self._step = None
        period = self.times.period
        observation = self._observation() if step.observed else None
        peaks = self.device.peaks(observation.peak_bytes if observation is not None else None)
        if observation is not None and peaks[0] is not None:
            peaks = (peaks[0] - observation.sums_bytes, peaks[1])
        self.times.end_step(step, peaks)
        if observation is not None:
            period.keep(observation, peaks, step.elsewhere_bytes)
            if step.skipped and period.skipped < MOST_SKIPPED:  # the first update comes later
                period.skipped += 1
                period.observed_from += 1
            self._read_counters(period)

    def _record(self, step: OpenStep) -> None:
        """Record the next step of the loop, if none was that is as large as the one that is over."""
        if self._recorder is not None:
            found = self._recorder.finish(step.samples)
            is_void = found is not None and found.problem and len(self._models) == 1
            self.tape, self._recorder = self.tape if is_void else found or self.tape, None
            self.records = found is not None  # compiled code stays in the way
        elif self.records and self._is_due() and (self.tape is None or self.tape.rows < step.samples):
            self._recorder = StepRecorder(self._models.all, self._models.optimizers)
            self._recorder.begin()

    def _stop_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.drop()
            self._recorder = None

    def _observation(self) -> Observation:
        self._ledger.know([*self._models.state(), *self._models.parameters()])
        self._models.claim()
        self._ledger.stop()
        seen = self._ledger.finish()
        return seen if len(self._models) > 1 else replace(seen, owners={})

    def _read_counters(self, period: Period) -> None:
        period.host_bytes = max(period.host_bytes, self._host_bytes())
        period.driver_bytes = self.device.driver_bytes()


class Turns:
    """Order in which the optimizers of a loop step.

    Those that take turns (a GAN's) make one step once each has had a turn.
    """

    def __init__(self) -> None:
        self._forwards = 0
        # when an optimizer stepped, in forwards, which have after a further forward, and how often
        self._since: dict[int, tuple[int, list[int]]] = {}
        # those that stepped between its last two steps, each as often as it did
        self._between: dict[int, list[int]] = {}
        self._latest = 0  # when one stepped last, in forwards
        self._apart: set[int] = set()  # those that stepped after a forward of their own

    def forward_begins(self) -> None:
        """Note that a model is called."""
        self._forwards += 1

    def stepped(self, optimizer: int) -> None:
        """Note that an optimizer of this number has stepped."""
        _, self._between[optimizer] = self._since.pop(optimizer, (0, []))
        for forwards, others in self._since.values():
            if forwards < self._forwards:
                others.append(optimizer)
        self._since[optimizer] = (self._forwards, [])
        (self._apart.add if self._forwards > self._latest else self._apart.discard)(optimizer)
        self._latest = self._forwards

    def expects(self, optimizers: Iterable[int]) -> bool:
        """Return whether one of these has not stepped yet, and may still be to come in the first step."""
        return any(each not in self._between for each in optimizers)

    def expect_no_other(self, optimizers: Iterable[int]) -> None:
        """Note that the first step is over: which of these had no turn by then is not waited for."""
        for each in optimizers:
            self._between.setdefault(each, [])

    def are_open(self, stepped: Iterable[int]) -> bool:
        """Return whether optimizers that take turns with those that have stepped are still to come.

        One that steps after several steps of another is waited for as long as it took the last time.
        """
        done = {*stepped}
        return any({*self._between.get(each, ())} - done for each in done) or any(
            not done.isdisjoint(self._between[each]) and len(others) <= len(self._between[each])
            for each, (_, others) in self._since.items()
            if each not in done and each in self._apart
        )
