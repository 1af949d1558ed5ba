"""`CellMeter`: one meter for all models that a cell trains, the plans in force there, and who else observes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from memlab.jupyter.cell_observers import Chooser
from memlab.jupyter.cell_records import Taken, TakenModels
from memlab.jupyter.cells import CellErrors
from memlab.measuring.device import Device, device_for
from memlab.measuring.loop_meter import CompanionObserver, meter_of
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.rescue.retries import RetryWatch
from memlab.runtime import accelerator
from memlab.runtime.batch import Batch
from memlab.runtime.observer import Observer
from memlab.runtime.workload import Workload
from memlab.session import Session


class CellMeter(Observer):
    """Measures the models that a cell trains, each with its own parts, and has the plan chosen where that is asked for.

    It observes the first of them itself.
    """

    def __init__(
        self,
        models: TakenModels,
        errors: CellErrors,
        undo: ExitStack,  # ends what watches the cell
        step_ended: Callable[[], None],
        choose: Callable[[Sequence[Workload]], Plan] | None,  # as of a `CellWatch`
    ) -> None:
        self.meter: Meter | None = None
        self.plans: tuple[Plan, ...] = ()  # that were in force during the cell, the last one last
        self.thread: int | None = None  # that the first model trains on; None before its first call
        self._models = models
        self._errors = errors
        self._undo = undo
        self._step_ended = step_ended
        self._choose = choose
        self._choosers: list[Chooser] = []
        self._device: Device | None = None

    def forget(self) -> None:
        """Keep nothing of the user's any more."""
        self.meter, self._device = None, None
        self._choosers = []
        self.plans, self.thread = (), None

    def forward_begins(self, batch: Batch) -> None:
        self.thread = self.thread or threading.get_ident()

    def plan_changed(self, plan: Plan) -> None:
        self.plans = (*(known for known in self.plans if known != plan), plan)

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        self._step_ended()

    def on(self, device: torch.device, capacity_bytes: int | None) -> Device:
        """Return the device that is measured, the first that is asked for; with a capacity it behaves as one of that size."""
        if self._device is None:
            self._device = device_for(device, capacity_bytes)
            self._undo.callback(self._device.close)
        return self._device

    def observe(self, session: Session, taken: Taken) -> Meter:
        """Measure a model: the first, a further one, or one in the place of another that the loop has dropped.

        Only where one thread trains all: a gradient must not be read while another thread's backward pass writes it, and the
        process would die.
        """
        is_first = self.meter is None
        meter = self.meter = self.meter or self._new_meter()
        self._undo.push(taken.undo)
        # the one that chooses comes first: what it takes is no part of the first step
        watching: list[Observer] = [*self._choosing(session, taken)]
        if is_first:
            taken.number = 1
        elif not self._is_on_measured_thread():
            taken.number = 0
            session.log.note("trains in a thread of its own, and is not measured")
        else:
            taken.number = taken.number or 1 + max(each.number for each in self._models.all)
            numbered = sorted((each for each in self._models.all if each.number), key=lambda each: each.number)
            names = [each.session.workload.name if each.session is not None else "" for each in numbered]
            meter.take_in(taken.number, session.workload.model, names if len(names) > 1 else [])
            for optimizer in session.workload.optimizers:
                meter.optimizer_found(optimizer)
        if taken.number == 1:
            watching += [meter, self]
            if accelerator.has_peaks(session.workload.device):
                watching.append(RetryWatch(session.log.note, device=session.workload.device))
        elif taken.number:
            watching.append(_Beside(meter, taken.number, self))
        # a model in the place of the first may begin under another plan than that one has come to
        is_other_plan = taken.number == 1 and self.plans[-1:] != (session.plan,)
        for observer in (*watching, taken.largest, self._errors):
            session.observers.add(observer)
            taken.undo.callback(session.observers.remove, observer)
            if is_other_plan:
                session.observers.tell_one(observer, observer.plan_changed, session.plan)
        return meter

    def _new_meter(self) -> Meter:
        assert self._device is not None
        meter = meter_of(lambda: self._models.sessions, self._device)
        meter.records = True  # beside the first steps, which are observed anyway
        # callbacks run in reverse: first nobody calls the meter any more, then it closes
        self._undo.callback(meter.close)
        return meter

    def _choosing(self, session: Session, taken: Taken) -> list[Observer]:
        """Choose the plan when a model is first called, for it and those before it."""
        if self._choose is None:
            return []
        chooser = Chooser(
            session, self._choose, self._choosers, lambda: None if self.meter is None else self.meter.tape
        )
        self._choosers.append(chooser)
        taken.undo.callback(self._choosers.remove, chooser)
        return [chooser]

    def _is_on_measured_thread(self) -> bool:
        """Return whether this is the thread of the first model, or that one is over."""
        here = threading.get_ident()
        if self.thread not in {thread.ident for thread in threading.enumerate()}:
            self.thread = here
        return self.thread == here


class _Beside(CompanionObserver):
    """Tells of a further model also which plans come into force on it, and that it steps."""

    def __init__(self, meter: Meter, number: int, cell: CellMeter) -> None:
        super().__init__(meter, number)
        self._cell = cell

    def plan_changed(self, plan: Plan) -> None:
        if plan not in self._cell.plans:
            self._meter.plan_changed(plan)
            self._cell.plan_changed(plan)

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        super().step_ended(optimizer, skipped)
        self._cell.step_ended(optimizer, skipped)
