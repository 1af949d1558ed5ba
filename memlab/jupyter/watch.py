"""`CellWatch`: plan, session and meter for the duration of one cell.

1. The model is found before the cell runs, or when the cell first trains one. Where several train (a GAN, an actor and
   its critic), each is taken when it is first trained; the plan is applied to each, and one meter measures all, each
   with its own parts. They are called as the variables that hold them.
2. The plan is applied there and then and stays; session and workload belong to the user's objects, so
   the watch keeps them no longer than the cell runs.
3. The meter observes while the cell runs and is closed however the cell ends.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from memlab.errors import MemlabError
from memlab.jupyter.cell_observers import BesideInCell, Chooser, Largest, Notes, StaleOptimizers, without_graph
from memlab.jupyter.cell_records import events_of, measurements_of, notes_of, tell_apart, title_of
from memlab.jupyter.cells import beside
from memlab.jupyter.first_call import FirstTrainingCall
from memlab.jupyter.history import History
from memlab.jupyter.live import Progress
from memlab.live.control import Control
from memlab.measuring.beside import meter_of
from memlab.measuring.device import Device, device_for
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.rescue.rescuer import Rescuer
from memlab.rescue.retries import RetryWatch
from memlab.runtime.hooks import calls_under_way
from memlab.runtime.observer import Observer
from memlab.runtime.own_steps import is_own_step
from memlab.runtime.ownership import live_optimizers, optimizers_of, steps_others, steps_some_of, unwrap_model
from memlab.runtime.workload import Workload
from memlab.session import Session, fit, require_compatible, session_of, train_together
from memlab.session.nested import fit_in_place_of

# a loop that accumulates by hand calls its model several times before the first step; after so many, no other is expected
_MOST_CALLS_OF_A_STEP = 64
# a loop that makes a layer in every step makes no model each time
_MOST_LOOKS = 64
# views draw four times a second
_LEAST_SECONDS_BETWEEN = 0.02


@dataclass
class _Taken:
    """A model that the cell trains, and what belongs to it."""

    session: Session | None  # None once the loop has dropped the model
    model: nn.Module | None  # for the receipt; likewise
    is_fresh: bool  # whether this cell has made its session
    log_from: int  # entries of its log before the cell
    plan_before: Plan
    largest: Largest  # its largest batch
    number: int = 0  # for the meter; 0 where it trains on another thread, and is not measured
    undo: ExitStack = field(default_factory=ExitStack)  # of what observes it; refers to the session by this alone

    def wake(self) -> None:
        if self.session is not None:
            self.session.wake()

    def dismiss(self) -> None:
        if self.session is not None:
            self.session.dismiss()


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
        self._taken: list[_Taken] = []  # models that the cell has trained, by their places
        self._past_events: tuple[str, ...] = ()  # of models that the loop has dropped
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
        self._next_told_seconds = 0.0
        # how often a model was called while models were looked for
        self._calls: MutableMapping[nn.Module, int] = WeakIdKeyDictionary()
        self._looking: FirstTrainingCall | None = None
        self._trained_uncalled = False  # a model was updated before it was called
        self.stale = StaleOptimizers(variables)  # says where an optimizer steps whose model was made again
        # optimizers that were there before, and those that have stepped
        self._known: MutableMapping[torch.optim.Optimizer, None] = WeakIdKeyDictionary()
        self._looked_at: MutableMapping[torch.optim.Optimizer, None] = WeakIdKeyDictionary()
        self._looks_left = _MOST_LOOKS
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
        self._taken = []
        self._meter, self._device = None, None
        self._controls = []
        self.notes = Notes(self._step_ended, self._broke_off)

    @property
    def sessions(self) -> list[Session]:
        """Sessions of the models that the cell trains, in the order in which they were found; not of those that it has dropped."""
        return [taken.session for taken in self._taken if taken.session is not None]

    @property
    def session(self) -> Session | None:
        """The session of the model that the cell trains, of several the first that has stepped; None until it is found."""
        sessions = self.sessions
        return next((each for each in sessions if each.workload.optimizers), next(iter(sessions), None))

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
            for one in live_optimizers():
                self._known[one] = None
            self._undo.callback(register_optimizer_step_pre_hook(self._refuse_put_off).remove)
            self._look()

    def attach(self, workload: Workload, *, alone: bool = False) -> None:
        """Apply the plan to a workload and begin to observe; where a technique refuses, everything is as it was."""
        others = [each.workload for each in self.sessions]
        tell_apart(workload, others, self._variables)
        if self._looking is not None:
            self._trained_uncalled |= any(id(one) in self._looking.stepped for one in workload.optimizers)
        try:
            require_compatible(workload, self._plan or Plan(), others)
        except MemlabError as refusal:
            if not self._goes_back(refusal):
                raise
        attached = session_of(workload.model)
        if self._device is None:
            where = (attached.workload if attached is not None else workload).device
            self._device = device_for(where, self._capacity_bytes)
            self._undo.callback(self._device.close)
        before = attached.plan if attached is not None else Plan()
        try:
            session = _session_for(workload, None if self._choose is not None else self._plan, self.sessions)
        except MemlabError as refusal:
            if self._changes_something or attached is not None:
                raise
            self.failure = f"nothing was measured or protected: {refusal}"
            self._undo.close()
            return
        session.usage.begin(is_within_step=session.position.is_within_step)
        session.log.not_rescued = ""
        place = next((i for i, each in enumerate(self._taken) if each.model is None), len(self._taken))
        taken = _Taken(
            session, workload.model, attached is None, len(session.log), before, self.notes if not place else Largest()
        )
        taken.number = next((each.number for each in self._taken[place : place + 1]), 0)
        self._taken[place : place + 1] = [taken]
        train_together(self.sessions)
        with self._beside("watching this cell", is_needed=self._choose is not None):
            is_first = self._meter is None
            meter = self._meter = self._meter or self._new_meter()
            self._undo.push(taken.undo)
            self._observe(session, taken, meter, is_first=is_first)
            if is_first and not alone:
                self._undo.callback(register_module_parameter_registration_hook(self._made).remove)
                self._undo.callback(register_optimizer_step_pre_hook(self._stepped).remove)
            if self._rescue is not None and session.rescuer is None:  # unless whoever made the session has seen to it
                session.accept(self._rescue(session.workload, self._device.capacity_bytes))
                taken.undo.callback(taken.dismiss)
            # callbacks run in reverse: whoever is told of steps hears first how many have passed
            taken.undo.callback(taken.wake)
        if self.failure:
            self._undo.close()

    def _beside(self, what: str, *, is_needed: bool = False) -> AbstractContextManager[None]:
        """Note where memlab itself fails, and let the cell go on without it; raise what fails where the cell needs it."""
        return nullcontext() if is_needed else beside(what, partial(setattr, self, "failure"))

    @property
    def _changes_something(self) -> bool:
        """Return whether the cell asked for a plan, and must not train without it."""
        return self._plan not in (None, Plan()) or self._choose is not None

    @property
    def _is_of_loop(self) -> bool:
        """Return whether what goes on now is of the cell's loop: of a thread that counts, and no step of a measurement."""
        return self._thread in (None, threading.get_ident()) and not is_own_step()

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Look for a further model when an optimizer steps that updates none of those found."""
        if self.failure or not self._is_of_loop:
            return
        with self._beside("looking for stale optimizers"):
            self.stale.stepped(optimizer, [each.workload for each in self.sessions])
        if optimizer in self._looked_at:
            return
        with self._beside("looking for further models"):
            self._looked_at[optimizer] = None
            if not any(steps_some_of(optimizer, each.workload.model) for each in self.sessions):
                # hooks of steps are being run: none can join them
                self._missed = weakref.ref(optimizer)
                self._calls.clear()
                self._look(expects_closures=False)

    def _made(self, _module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        """Look for a further model when one is made, so that the plan is on it in its first step."""
        can_look = self._looking is None and self._looks_left > 0 and not self.failure
        if can_look and self._is_of_loop and not calls_under_way():
            with self._beside("looking for further models"):
                self._looks_left -= 1
                self._calls.clear()
                self._look()

    def _look(self, *, expects_closures: bool = True) -> None:
        """Look at what is called, until every model of a step has been seen."""
        if self._looking is None:
            looking = FirstTrainingCall(self._found, self._thread, expects_closures=expects_closures)
            self._looking = self._undo.enter_context(looking)

    def _found(self, model: nn.Module) -> bool:
        """Attach to a model that is called; True when there is no other one to expect."""
        if is_own_step():
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
        if self._put_off is None or not self._is_of_loop:
            return
        refusal, self._put_off = self._put_off, None
        self._broke_off(refusal)
        raise refusal

    def _takes(self, called: nn.Module) -> bool:
        calls = self._calls[called] = self._calls.get(called, 0) + 1
        holder = next((each for each in self.sessions if _holds(each.workload.model, called)), None)
        if holder is not None:
            has_all = holder.steps > 0 and self._missed is None
            is_over = holder.workload.model is called and (has_all or calls > _MOST_CALLS_OF_A_STEP)
            if is_over:
                self._looking = None
                if len(self._taken) > 1:
                    self._let_go_of_dropped()  # the graph of a loss may have kept one until now
            return is_over
        optimizers = optimizers_of(called)
        self._let_go_of_dropped()
        if self.sessions and all(
            taken.is_fresh and not each.steps and _holds(called, each.workload.model) for each, taken in self._present
        ):
            self._begin_again()
        has_made_optimizers = any(one not in self._known for one in live_optimizers())
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
        self._choosers, self._looking = [], None
        self._put_off = None
        self._undo.callback(register_optimizer_step_pre_hook(self._refuse_put_off).remove)
        self._look()

    def _goes_back(self, refusal: MemlabError) -> bool:
        """Go on without the plan, where it turns out not to apply to a further model once others have trained under it."""
        is_known = self.notes.plans and not any(session.position.is_within_step for session in self.sessions)
        if not is_known or not all(session.steps > 0 for session in self.sessions):
            return False
        self.give_up(refusal)
        self._plan = None
        return all(session.plan == Plan() for session in self.sessions)

    def give_up(self, refusal: MemlabError) -> None:
        """Go back to the plans before the cell, which memlab has refused."""
        for session, taken in self._present:
            session.loop_was_left()
            session.switching.give_up(refusal, taken.plan_before)

    def _broke_off(self, error: BaseException | None) -> None:
        if error is None:
            self.refused = None
        elif isinstance(error, MemlabError):
            error.in_loop = True
            self.refused = error

    def _new_meter(self) -> Meter:
        assert self._device is not None
        meter = meter_of(lambda: self.sessions, self._device)
        meter.records = True  # beside the first steps, which are observed anyway
        # callbacks run in reverse: first nobody calls the meter any more, then it closes
        self._undo.callback(meter.close)
        return meter

    def _observe(self, session: Session, taken: _Taken, meter: Meter, *, is_first: bool) -> None:
        """Have the meter measure a model: the first, a further one, or one in the place of another that the loop has dropped.

        Only where one thread trains all: a gradient must not be read while another thread's backward pass writes it, and the
        process would die.
        """
        # the one that chooses comes first: what it takes is no part of the first step
        watching: list[Observer] = [*self._choosing(session, taken)]
        if is_first:
            taken.number = 1
        elif not self._is_on_measured_thread():
            taken.number = 0
            session.log.note("trains in a thread of its own, and is not measured")
        else:
            taken.number = taken.number or 1 + max(each.number for each in self._taken)
            numbered = sorted((each for each in self._taken if each.number), key=lambda each: each.number)
            names = [each.session.workload.name if each.session is not None else "" for each in numbered]
            meter.take_in(taken.number, session.workload.model, names if len(names) > 1 else [])
            for optimizer in session.workload.optimizers:
                meter.optimizer_found(optimizer)
        if taken.number == 1:
            watching += [meter, self.notes]
            if session.workload.device.type == "cuda":
                watching.append(RetryWatch(session.log.note, device=session.workload.device))
        else:
            watching.append(taken.largest)
            if taken.number:
                watching.append(BesideInCell(meter, taken.number, self.notes))
        for observer in watching:
            session.observers.add(observer)
            taken.undo.callback(session.observers.remove, observer)
            if is_first:
                session.observers.tell_one(observer, "plan_changed", session.plan)
        if taken.number:
            self._let_steer(session, taken, meter)

    def _is_on_measured_thread(self) -> bool:
        """Return whether this is the thread of the first model, or that one is over."""
        here = threading.get_ident()
        if self.notes.thread not in {thread.ident for thread in threading.enumerate()}:
            self.notes.thread = here
        return self.notes.thread == here

    def _choosing(self, session: Session, taken: _Taken) -> list[Observer]:
        """Choose the plan when a model is first called, for it and those before it."""
        if self._choose is None:
            return []
        chooser = Chooser(
            session, self._choose, self._choosers, lambda: None if self._meter is None else self._meter.tape
        )
        self._choosers.append(chooser)
        taken.undo.callback(self._choosers.remove, chooser)
        return [chooser]

    def _let_steer(self, session: Session, taken: _Taken, meter: Meter) -> None:
        """Have panels follow the cell, and whoever uses them steer it."""
        control = self._control_of(session.workload.model)
        first = next(iter(self._controls), None)
        if self._progress is not None and first is None:
            taken.undo.callback(control.watch(self._progress.draw, self._progress.AFTER_SECONDS))
        control.training_begins(session, meter, first)
        self._controls.append(control)
        taken.undo.callback(self._controls.remove, control)
        taken.undo.callback(control.steps.end)
        taken.undo.callback(control.steps.stepped)

    @property
    def _present(self) -> list[tuple[Session, _Taken]]:
        """Sessions of the models that the loop has not dropped, as far as is known, with what belongs to them."""
        return [(taken.session, taken) for taken in self._taken if taken.session is not None]

    def _let_go_of_dropped(self) -> None:
        """Let go of models that the loop has dropped, as a search does with one before it goes on with the next.

        They are kept until another is called, for the receipt: many loops are functions, whose model goes when they end.
        """
        known = [
            (taken, weakref.ref(taken.model), weakref.ref(taken.session))
            for taken in self._taken
            if taken.model is not None and taken.session is not None
        ]
        logs = [(session.log, session.workload.name) for session in self.sessions]
        has_plans = any(session.techniques for session in self.sessions)
        for taken, _, _ in known:
            taken.model = taken.session = None
        if has_plans:
            gc.collect()  # a model and the plan on it refer to each other
        for (taken, model, session), (log, name) in zip(known, logs, strict=True):
            taken.model, taken.session = model(), session()
            if taken.model is None:
                self._past_events += tuple(f"{name}: {entry}" for entry in log[taken.log_from :])
                taken.session = None
                taken.undo.close()

    def _step_ended(self) -> None:
        """Have views follow; many short steps are taken in at once."""
        if self._controls and perf_counter() >= self._next_told_seconds:
            for control in self._controls:
                control.steps.stepped()
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
        for each, taken in self._present:
            batch = taken.largest.batch
            if batch is not None and each.attached:
                own = history_of(each.workload.model)
                own.batch = without_graph(batch)
                own.tape = meter.tape or (own.tape if len(self.sessions) > 1 else None)
        notes = notes_of(self.sessions)
        measurements = measurements_of(meter, self.notes.plans, notes, session.plan, error)
        history.add_steps(meter.steps, meter.times.steps_ended)
        history.trained_by(optimizer for each in self.sessions for optimizer in each.workload.optimizers)
        title = title_of(self.sessions, self.notes.batch, meter.device.name, meter.times.steps_ended)
        events = events_of(self.sessions, [taken.log_from for _, taken in self._present])
        history.add(title, measurements, (*self._past_events, *events))
        return meter.times.steps_ended


def _holds(model: nn.Module, module: nn.Module) -> bool:
    return any(part is module for part in model.modules())


def _session_for(workload: Workload, plan: Plan | None, beside: Sequence[Session]) -> Session:
    session = session_of(workload.model)
    if session is None:
        return fit_in_place_of(workload, plan, beside)
    known = {id(optimizer) for optimizer in session.workload.optimizers}
    if known and any(id(optimizer) not in known for optimizer in workload.optimizers):
        # the old optimizer, and the moments it keeps, must not live on in the session
        kept = session.plan
        session.undo()
        return fit(workload.held_weakly(), kept if plan is None else plan)
    if plan is not None:
        session.switch(plan, now=True)
    return session
