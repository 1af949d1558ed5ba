"""`CellWatch`: plan, session and meter for the duration of one cell.

1. The model is found before the cell runs, or when the cell first trains one. Where several train (a GAN, an actor and
   its critic), each is taken when it is first trained; the plan is applied to each, and one meter measures all, each
   with its own parts. They are called as the variables that hold them.
2. The plan is applied there and then and stays; session and workload belong to the user's objects, so
   the watch keeps them no longer than the cell runs.
3. The meter observes while the cell runs and is closed however the cell ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memlab.errors import MemlabError
from memlab.jupyter.cell_observers import BesideInCell, Chooser, Largest, Notes, StaleOptimizers, without_graph
from memlab.jupyter.cells import beside
from memlab.jupyter.first_call import FirstTrainingCall
from memlab.jupyter.history import History
from memlab.jupyter.live import Progress
from memlab.live.control import Control
from memlab.measuring.beside import meter_of
from memlab.measuring.device import Device, device_for
from memlab.measuring.runs import row_of_failure
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.records import Measurement
from memlab.rescue.rescuer import Rescuer
from memlab.rescue.retries import RetryWatch
from memlab.runtime.batch import Batch
from memlab.runtime.namespace import name_of
from memlab.runtime.observer import Observer
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.ownership import live_optimizers, optimizers_of, steps_others, steps_some_of, unwrap_model
from memlab.runtime.workload import Workload, describe_all
from memlab.session import Session, fit, require_compatible, session_of, train_together
from memlab.techniques.gradient_release.gradient_release import is_loop_known

# a loop that accumulates by hand calls its model several times before the first step; after so many, no other is expected
_MOST_CALLS_OF_A_STEP = 64
# views draw four times a second
_LEAST_SECONDS_BETWEEN = 0.02


class CellWatch:
    """Applies a plan where a cell trains, and measures the cell.

    It is long because finding models, applying plans to them and measuring them go on at once, over one list of sessions.
    """

    def __init__(
        self,
        plan: Plan | None,  # the plan to apply; None keeps the one in force
        capacity_bytes: int | None,  # size the device is to behave as, or None
        progress: Progress | None,  # shows steps while they happen; None for silence
        # called with the workload and its batch at the first training step of a model, and with those of the models
        # before it; the plan it returns is applied to that very step. None applies `plan` at once
        choose: Callable[[Sequence[Workload]], Plan] | None,
        # makes what rescues a workload on a device of so many bytes; None lets the cell fail
        rescue: Callable[[Workload, int | None], Rescuer] | None,
        control_of: Callable[[nn.Module], Control],  # what follows and steers the run of a model
        variables: Callable[[], Mapping[str, Any]],  # those of the notebook
    ) -> None:
        self.sessions: list[Session] = []  # of the models that the cell trains, in the order in which they were found
        self._models: list[nn.Module] = []  # for the receipt, also of those that the cell drops
        self._fresh: list[Session] = []  # those that this cell has made
        self._unmeasured: list[Session] = []  # those that train on another thread
        # what memlab has refused in the middle of the cell, last; None for nothing
        self.refused: MemlabError | None = None
        self._put_off: MemlabError | None = None
        self.failure = ""  # what of memlab's own failed, in words; empty for nothing
        self.passed_over = ""  # class of a model that was called and that no optimizer trains; empty for none
        self._plan = plan
        self._capacity_bytes = capacity_bytes
        self._progress = progress
        self._choose = choose
        self._choosers: list[Chooser] = []
        self._rescue = rescue
        self._control_of = control_of
        self._variables = variables
        self._controls: list[Control] = []  # of the models that are measured
        self._device: Device | None = None
        self._thread: int | None = None  # whose training counts; None for any
        self._meter: Meter | None = None
        # plans that were in force during the cell, and its first batch
        self.notes = Notes(self._step_ended, self._broke_off)
        self._largest: list[Largest] = [self.notes]
        self._log_from: list[int] = []
        self._plans_before: list[Plan] = []
        self._next_told_seconds = 0.0
        self._calls: dict[int, int] = {}  # how often a model was called while models were looked for
        self._looking: FirstTrainingCall | None = None
        self._trained_uncalled = False  # a model was updated before it was called
        self.stale = StaleOptimizers(variables)  # says where an optimizer steps whose model was made again
        self._known: set[int] = set()  # optimizers that were there before
        self._looked_at: set[int] = set()  # those that have stepped
        self._missed: weakref.ref[torch.optim.Optimizer] | None = None  # the one whose model is looked for
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._undo.close()
        if self._progress is not None:
            self._progress.end()

    def forget(self) -> None:
        """Keep nothing of the user's any more."""
        self.sessions, self._models, self._fresh, self._unmeasured = [], [], [], []
        self._meter, self._device = None, None
        self._controls = []
        self.notes = Notes(self._step_ended, self._broke_off)
        self._largest = [self.notes]

    @property
    def session(self) -> Session | None:
        """The session of the model that the cell trains, of several the first that has stepped; None until it is found."""
        return next((each for each in self.sessions if each.workload.optimizers), next(iter(self.sessions), None))

    @property
    def was_passed_by(self) -> bool:
        """Return whether the cell has trained a model, but none of it by calls that could be observed."""
        session = self.session
        return self._trained_uncalled or (session is not None and session.usage.is_passed_by)

    @property
    def evaluated(self) -> str:
        """Return the class of a model that the cell has trained in eval mode, where none was found; empty for none."""
        return self._looking.evaluated if self._looking is not None else ""

    def wait_for_model(self) -> None:
        """Attach to the models that the cell trains."""
        with self._beside("looking for models", is_needed=self._changes_something):
            self._known |= {id(one) for one in live_optimizers()}
            self._undo.callback(register_optimizer_step_pre_hook(self._refuse_put_off).remove)
            self._look()

    def attach(self, workload: Workload, *, alone: bool = False) -> None:
        """Apply the plan to a workload and begin to observe; where a technique refuses, everything is as it was."""
        _tell_apart(workload, [each.workload for each in self.sessions], self._variables)
        if self._looking is not None:
            self._trained_uncalled |= any(id(one) in self._looking.stepped for one in workload.optimizers)
        require_compatible(workload, self._plan or Plan(), [each.workload for each in self.sessions])
        attached = session_of(workload.model)
        if self._device is None:
            where = (attached.workload if attached is not None else workload).device
            self._device = device_for(where, self._capacity_bytes)
            self._undo.callback(self._device.close)
        before = attached.plan if attached is not None else Plan()
        session = _session_for(workload, None if self._choose is not None else self._plan)
        if attached is None:
            self._fresh.append(session)
        session.usage.begin()
        self.sessions.append(session)
        self._models.append(workload.model)
        self._log_from.append(len(session.log))
        self._plans_before.append(before)
        train_together(self.sessions)
        with self._beside("watching this cell", is_needed=self._choose is not None):
            if self._meter is None:
                self._observe(session, self._device)
                if not alone:
                    self._undo.callback(register_optimizer_step_pre_hook(self._stepped).remove)
            else:
                self._observe_beside(session, self._meter)
            if self._rescue is not None and session.rescuer is None:  # unless whoever made the session has seen to it
                session.accept(self._rescue(session.workload, self._device.capacity_bytes))
                self._undo.callback(session.dismiss)
            # callbacks run in reverse: whoever is told of steps hears first how many have passed
            self._undo.callback(session.wake)
        if self.failure:
            self._undo.close()

    def _beside(self, what: str, *, is_needed: bool = False) -> AbstractContextManager[None]:
        """Note where memlab itself fails, and let the cell go on without it; raise what fails where the cell needs it."""
        return nullcontext() if is_needed else beside(what, partial(setattr, self, "failure"))

    @property
    def _changes_something(self) -> bool:
        """Return whether the cell asked for a plan, and must not train without it."""
        return self._plan not in (None, Plan()) or self._choose is not None

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Look for a further model when an optimizer steps that updates none of those found."""
        is_mine = self._thread in (None, threading.get_ident())
        if self.failure or not is_mine or is_loop_known():
            return
        with self._beside("looking for stale optimizers"):
            self.stale.stepped(optimizer, [each.workload for each in self.sessions])
        if id(optimizer) in self._looked_at:
            return
        with self._beside("looking for further models"):
            self._looked_at.add(id(optimizer))
            if not any(steps_some_of(optimizer, each.workload.model) for each in self.sessions):
                # hooks of steps are being run: none can join them
                self._missed = weakref.ref(optimizer)
                self._calls.clear()
                self._look(expects_closures=False)

    def _look(self, *, expects_closures: bool = True) -> None:
        """Look at what is called, until every model of a step has been seen."""
        if self._looking is None:
            looking = FirstTrainingCall(self._found, self._thread, expects_closures=expects_closures)
            self._looking = self._undo.enter_context(looking)

    def _found(self, model: nn.Module) -> bool:
        """Attach to a model that is called; True when there is no other one to expect."""
        if is_loop_known():
            return False
        is_over = True
        try:
            with self._beside("taking up a model", is_needed=self._changes_something):
                is_over = self._takes(unwrap_model(model))
        except MemlabError as refusal:
            if not self.sessions and any(steps_others(one, model) for one in optimizers_of(model)):
                self._put_off = refusal  # of a part, where the whole may still be called
                return False
            self._broke_off(refusal)
            raise
        self._put_off = None if self.sessions else self._put_off
        return is_over

    def _refuse_put_off(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Refuse at the step what the plan does not apply to, where nothing else was called before it."""
        if self._put_off is None or self._thread not in (None, threading.get_ident()) or is_loop_known():
            return
        refusal, self._put_off = self._put_off, None
        self._broke_off(refusal)
        raise refusal

    def _takes(self, called: nn.Module) -> bool:
        calls = self._calls[id(called)] = self._calls.get(id(called), 0) + 1
        holder = next((each for each in self.sessions if _holds(each.workload.model, called)), None)
        if holder is not None:
            has_all = holder.steps > 0 and self._missed is None
            is_over = holder.workload.model is called and (has_all or calls > _MOST_CALLS_OF_A_STEP)
            if is_over:
                self._looking = None
            return is_over
        optimizers = optimizers_of(called)
        if self.sessions and all(
            each in self._fresh and not each.steps and _holds(called, each.workload.model) for each in self.sessions
        ):
            self._begin_again()
        has_made_optimizers = any(id(one) not in self._known for one in live_optimizers())
        if not optimizers and (self.sessions or (calls == 1 and has_made_optimizers)):
            # a teacher or a loss with weights, unless it is called again and nothing else trains
            self.passed_over = type(called).__name__
            return False
        session = session_of(called)
        if not self.sessions:
            self.notes.thread = threading.get_ident()
        if self._missed is not None and self._missed() in optimizers:
            self._missed = None
        self.attach(session.workload if session is not None else Workload(called, optimizers))
        return bool(self.failure)

    def _begin_again(self) -> None:
        """Let go of what turns out to be parts of one model, which its making or a first look had called by themselves."""
        self._undo.close()
        for session in self.sessions:
            session.undo()
        self.forget()
        self._log_from, self._plans_before, self._choosers, self._looking = [], [], [], None
        self._put_off = None
        self._undo.callback(register_optimizer_step_pre_hook(self._refuse_put_off).remove)
        self._look()

    def give_up(self, refusal: MemlabError) -> None:
        """Go back to the plans before the cell, which memlab has refused."""
        for session, before in zip(self.sessions, self._plans_before, strict=True):
            session.loop_was_left()
            session.switching.give_up(refusal, before)

    def _broke_off(self, error: BaseException | None) -> None:
        if error is None:
            self.refused = None
        elif isinstance(error, MemlabError):
            error.in_loop = True
            self.refused = error

    def _observe(self, session: Session, device: Device) -> None:
        meter = self._meter = meter_of(self.sessions, device)
        meter.records = True  # beside the first steps, which are observed anyway
        # callbacks run in reverse: first nobody calls the meter any more, then it closes
        self._undo.callback(meter.close)
        # the one that chooses comes first: what it takes is no part of the first step
        watching: list[Observer] = [*self._choosing(session), meter, self.notes]
        if session.workload.device.type == "cuda":
            watching.append(RetryWatch(session.log.note, device=session.workload.device))
        for observer in watching:
            self._watch(session, observer)
            session.observers.tell_one(observer, "plan_changed", session.plan)
        self._let_steer(session, meter)

    def _observe_beside(self, session: Session, meter: Meter) -> None:
        """Have the meter of the first model measure another one as well, where one thread trains both.

        A gradient must not be read while another thread's backward pass writes it: the process would die.
        """
        self._largest.append(Largest())
        for observer in (self._largest[-1], *self._choosing(session)):
            self._watch(session, observer)
        if not self._is_on_measured_thread():
            self._unmeasured.append(session)
            session.log.note("trains in a thread of its own, and is not measured")
            return
        names = [each.workload.name for each in self.sessions if each not in self._unmeasured]
        number = meter.take_in(session.workload.model, names)
        for optimizer in session.workload.optimizers:
            meter.optimizer_found(optimizer)
        self._watch(session, BesideInCell(meter, number, self.notes))
        self._let_steer(session, meter)

    def _is_on_measured_thread(self) -> bool:
        """Return whether this is the thread of the first model, or that one is over."""
        here = threading.get_ident()
        if self.notes.thread not in {thread.ident for thread in threading.enumerate()}:
            self.notes.thread = here
        return self.notes.thread == here

    def _choosing(self, session: Session) -> list[Observer]:
        """Choose the plan when a model is first called, for it and those before it."""
        if self._choose is None:
            return []
        self._choosers.append(
            Chooser(session, self._choose, self._choosers, lambda: None if self._meter is None else self._meter.tape)
        )
        return [self._choosers[-1]]

    def _watch(self, session: Session, observer: Observer) -> None:
        session.observers.add(observer)
        self._undo.callback(session.observers.remove, observer)

    def _let_steer(self, session: Session, meter: Meter) -> None:
        """Have panels follow the cell, and whoever uses them steer it."""
        control = self._control_of(session.workload.model)
        first = next(iter(self._controls), None)
        if self._progress is not None and first is None:
            self._undo.callback(control.watch(self._progress.draw, self._progress.AFTER_SECONDS))
        control.training_begins(session, meter, first)
        self._controls.append(control)
        self._undo.callback(control.training_ended)
        self._undo.callback(control.stepped)

    def _step_ended(self) -> None:
        """Have views follow; many short steps are taken in at once."""
        if self._controls and perf_counter() >= self._next_told_seconds:
            for control in self._controls:
                control.stepped()
            self._next_told_seconds = perf_counter() + _LEAST_SECONDS_BETWEEN
        if self._looking is None and self._meter is not None and (steps := self._meter.steps_to_pass()):
            self.sessions[0].rest(steps)

    def keep(self, history_of: Callable[[nn.Module], History], error: BaseException | None = None) -> int:
        """Put what was measured into a history, once the cell is over; return how many steps ended in it.

        The history of the first model gets what was measured, each one's its own batch. Where an error for want of memory has
        ended the cell, its plan gets a row that says so.
        """
        session, meter = self.session, self._meter
        if session is None or meter is None:
            return 0
        for each in self.sessions:
            each.usage.note()
            if error is not None:
                each.loop_was_left()
        history = history_of(session.workload.model)
        for each, largest in zip(self.sessions, self._largest, strict=True):
            if largest.batch is not None and each.attached:
                own = history_of(each.workload.model)
                own.batch = without_graph(largest.batch)
                own.tape = meter.tape or (own.tape if len(self.sessions) > 1 else None)
        notes = _notes(self.sessions)
        measurements = _measurements(meter, self.notes.plans, notes, session.plan, error)
        history.add_steps(meter.steps, meter.times.steps_ended)
        history.trained_by(optimizer for each in self.sessions for optimizer in each.workload.optimizers)
        title = _title(self.sessions, self.notes.batch, meter.device.name, meter.times.steps_ended)
        history.add(title, measurements, _events(self.sessions, self._log_from))
        return meter.times.steps_ended


def _tell_apart(workload: Workload, others: Sequence[Workload], variables: Callable[[], Mapping[str, Any]]) -> None:
    """Name models: from the second one on, each is called as it is in the notebook."""
    if not others:
        return
    for each in (*others, workload) if len(others) == 1 else (workload,):
        if each.name == type(each.model).__name__:
            each.name = name_of(each.model, variables())
    alike = [each.name for each in others if each.name.partition(" #")[0] == workload.name]
    if alike:
        workload.name = f"{workload.name} #{len(alike) + 1}"


def _holds(model: nn.Module, module: nn.Module) -> bool:
    return any(part is module for part in model.modules())


def _notes(sessions: Sequence[Session]) -> tuple[str, ...]:
    """What techniques have to say, once; what is not true of all models with the name of its own."""
    told = {note: [each.workload.name for each in sessions if note in each.notes] for s in sessions for note in s.notes}
    return tuple(note if len(of) == len(sessions) else f"{', '.join(of)}: {note}" for note, of in told.items())


def _events(sessions: Sequence[Session], log_from: Sequence[int]) -> tuple[str, ...]:
    """Return in words the actions on the models since their logs had so many entries."""
    return tuple(
        f"{each.workload.name}: {entry}" if len(sessions) > 1 else str(entry)
        for each, before in zip(sessions, log_from, strict=True)
        for entry in each.log[before:]
    )


def _title(sessions: Sequence[Session], batch: Batch | None, device: str, steps: int) -> str:
    sizes = next((tensor.shape for tensor in (batch.tensors if batch is not None else ()) if tensor.dim()), ())
    called_with = [f"batch {' × '.join(map(str, sizes))}"] if sizes else []
    counted = f"{steps} step{'' if steps == 1 else 's'}"
    described = describe_all([each.workload for each in sessions])
    return " · ".join(["memfit", described, *called_with, device, counted])


def _session_for(workload: Workload, plan: Plan | None) -> Session:
    session = session_of(workload.model)
    if session is None:
        return fit(workload.held_weakly(), plan or Plan())
    known = {id(optimizer) for optimizer in session.workload.optimizers}
    if known and any(id(optimizer) not in known for optimizer in workload.optimizers):
        # the old optimizer, and the moments it keeps, must not live on in the session
        kept = session.plan
        session.undo()
        return fit(workload.held_weakly(), kept if plan is None else plan)
    if plan is not None:
        session.switch(plan, now=True)
    return session


def _measurements(
    meter: Meter, plans: Sequence[Plan], notes: tuple[str, ...], last: Plan, error: BaseException | None
) -> list[Measurement]:
    """Return what was measured under each plan; one that ran out of memory gets a row that says so."""
    found: list[Measurement] = []
    for plan in plans:
        with suppress(MemlabError):  # the plan was in force, but no step ended under it
            found.append(meter.measurement(plan))
    if found and notes:
        found[-1] = replace(found[-1], notes=(*found[-1].notes, *notes))
    if error is not None and is_out_of_memory(error):
        found = [each for each in found if each.plan != last.label]
        found.append(row_of_failure(last, meter.device, str(error)))
    return found
