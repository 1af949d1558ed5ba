"""`CellWatch`: plan, session and meter for the duration of one cell.

1. The model is found before the cell runs, or when the cell first trains one (`ModelSearch`). Where several train (a GAN, an
   actor and its critic), each is taken when it is first trained; the plan is applied to each, and one meter measures all, each
   with its own parts (`CellMeter`). They are called as the variables that hold them.
2. The plan is applied there and then and stays; session and workload belong to the user's objects, so
   the watch keeps them no longer than the cell runs.
3. The meter observes while the cell runs and is closed however the cell ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any, Self

from torch import nn

from memlab.errors import MemlabError, RefusalError
from memlab.jupyter.cell_meter import CellMeter
from memlab.jupyter.cell_observers import without_graph
from memlab.jupyter.cell_records import Taken, TakenModels, measurements_of, notes_of, tell_apart, title_of
from memlab.jupyter.cells import CellErrors
from memlab.jupyter.display import tell
from memlab.jupyter.first_call import ModelSearch
from memlab.jupyter.history import History
from memlab.jupyter.live import Progress
from memlab.live.control import Control
from memlab.measuring.leaks import Leaks
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.rescue.recovery import NothingFitsError
from memlab.rescue.rescuer import Rescuer
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.workload import Workload
from memlab.session import Session, fit, require_compatible, session_of, train_together
from memlab.session.nested import fit_in_place_of

# views draw four times a second
_LEAST_SECONDS_BETWEEN = 0.02


class CellWatch:
    """Applies a plan where a cell trains, and measures the cell."""

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
        self._plan = plan
        self._capacity_bytes = capacity_bytes
        self._progress = progress
        self._is_chosen = choose is not None
        self._rescue = rescue
        self._control_of = control_of
        self._variables = variables
        self._next_told_seconds = 0.0
        self._leaks = Leaks()
        self.grown: list[str] = []  # what the loop holds more of after each step, in words
        self._undo = ExitStack()
        self.controls: list[Control] = []  # of the models that are measured
        self.models = TakenModels()
        self.errors = CellErrors(needs_plan=self._is_chosen or plan not in (None, Plan()))
        self.measuring = CellMeter(self.models, self.errors, self._undo, self._step_ended, choose)
        self.search = ModelSearch(self.models, self.errors, self._undo, self._take, self._take_back, variables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._undo.close()
        if self._progress is not None:
            self._progress.end()

    def forget(self) -> None:
        """Keep nothing of the user's any more."""
        self.models.all, self.controls = [], []
        self.measuring.forget()

    @property
    def was_passed_by(self) -> bool:
        """Return whether the cell has trained a model, but none of it by calls that could be observed."""
        session = self.models.session
        return self.search.has_trained_uncalled or (session is not None and session.usage.is_passed_by)

    def _take(self, workload: Workload) -> None:
        """Attach to a model that is called."""
        if not self.models.sessions:
            self.measuring.thread = threading.get_ident()
        self.attach(workload)

    def _take_back(self) -> None:
        self._undo.close()
        for session in self.models.sessions:
            session.undo()
        self.forget()

    def attach(self, workload: Workload, *, alone: bool = False) -> None:
        """Apply the plan to a workload and begin to observe; where a technique refuses, everything is as it was."""
        others = [each.workload for each in self.models.sessions]
        tell_apart(workload, others, self._variables)
        try:
            require_compatible(workload, self._plan or Plan(), others)
        except MemlabError as refusal:
            if not self._goes_back(refusal):
                raise
        attached = session_of(workload.model)
        device = self.measuring.on(
            (attached.workload if attached is not None else workload).device, self._capacity_bytes
        )
        before = attached.plan if attached is not None else Plan()
        try:
            session = self._session_of_one(workload)
        except MemlabError as refusal:
            if self.errors.needs_plan or attached is not None:
                raise
            self.errors.failure = f"nothing was measured or protected: {refusal}"
            self._undo.close()
            return
        session.usage.begin(is_within_step=session.position.is_within_step)
        session.log.not_rescued = ""
        taken = self.models.take(session, before, is_fresh=attached is None)
        train_together(self.models.sessions)
        with self.errors.beside("watching this cell", is_needed=self._is_chosen):
            is_first = self.measuring.meter is None
            meter = self.measuring.observe(session, taken)
            if taken.number:
                self._let_steer(session, taken, meter)
            if is_first and not alone:
                self.search.expect_more()
            if self._rescue is not None and session.rescuer is None:  # unless whoever made the session has seen to it
                session.accept(self._rescue(session.workload, device.capacity_bytes))
                taken.undo.callback(taken.dismiss)
            # callbacks run in reverse: whoever is told of steps hears first how many have passed
            taken.undo.callback(taken.wake)
        if self.errors.failure:
            self._undo.close()

    def _session_of_one(self, workload: Workload) -> Session:
        """The session of a model with the plan on it; one beside others that it does not apply to is left as it is."""
        others = self.models.sessions
        plan = None if self._is_chosen else self._plan
        is_new = bool(others) and not self._is_chosen and session_of(workload.model) is None
        if is_new and others[0].plan != (plan or Plan()):
            plan = others[0].plan  # it has been changed since the cell began
        try:
            return _session_for(workload, plan, others)
        except RefusalError as refusal:
            if not others or session_of(workload.model) is not None:
                raise
            tell(f"{workload.name} is left as it is: {refusal}")
            return _session_for(workload, None, others)

    def _let_steer(self, session: Session, taken: Taken, meter: Meter) -> None:
        """Have panels follow the cell, and whoever uses them steer it."""
        control = self._control_of(session.workload.model)
        first = next(iter(self.controls), None)
        if self._progress is not None and first is None:
            taken.undo.callback(control.watch(self._progress.draw, self._progress.AFTER_SECONDS))
        control.training_begins(session, meter, first)
        self.controls.append(control)
        taken.undo.callback(self.controls.remove, control)
        taken.undo.callback(control.steps.end)
        taken.undo.callback(control.steps.stepped)

    def _goes_back(self, refusal: MemlabError) -> bool:
        """Go on without the plan, where it turns out not to apply to a further model once others have trained under it."""
        sessions = self.models.sessions
        is_known = self.measuring.plans and not any(session.position.is_within_step for session in sessions)
        if not is_known or not all(session.steps > 0 for session in sessions):
            return False
        self.give_up(refusal)
        self._plan, self.errors.needs_plan = None, self._is_chosen
        return all(session.plan == Plan() for session in sessions)

    def give_up(self, refusal: MemlabError) -> None:
        """Go back to the plans before the cell, which memlab has refused."""
        for session, taken in self.models.present:
            session.loop_was_left()
            session.usage.was_refused()
            session.switching.give_up(refusal, taken.plan_before)

    def _step_ended(self) -> None:
        """Have views follow; many short steps are taken in at once."""
        if self.controls and perf_counter() >= self._next_told_seconds:
            for control in self.controls:
                control.steps.stepped()
            self._next_told_seconds = perf_counter() + _LEAST_SECONDS_BETWEEN
        meter = self.measuring.meter
        if meter is not None and meter.times.steps_ended >= self._leaks.next_look:
            with self.errors.beside("the look at what grows"):
                device = self.models.sessions[0].workload.device
                self._leaks.look(meter.times.steps_ended, sys._getframe(), self._variables(), device)
                if self._leaks.is_sure:
                    self._say_leaks()
        if self.search.is_over and meter is not None and (steps := meter.steps_to_pass()):
            self.models.sessions[0].rest(steps)

    def _say_leaks(self, *, has_failed: bool = False) -> None:
        """Add to the log what the loop holds more of after each step."""
        meter, present = self.measuring.meter, self.models.present
        if meter is not None and present:
            session, _ = present[0]
            for line in self._leaks.lines(meter.times.period.peaks[0] or 0, has_failed=has_failed):
                if line not in self.grown:
                    self.grown.append(line)
                    session.log.note(line)

    @property
    def trained_nothing(self) -> bool:
        """Return whether the cell's optimizers were made for other models, so that nothing was updated."""
        return self.search.stale.were_named and not any(each.workload.optimizers for each in self.models.sessions)

    def keep(self, history_of: Callable[[nn.Module], History], error: BaseException | None = None) -> int:
        """Put what was measured into a history, once the cell is over; return how many steps ended in it.

        The history of the first model gets what was measured, each one's its own batch. Where an error for want of memory has
        ended the cell, its plan gets a row that says so. A loop whose optimizer was made for another model gets none: rows of
        training would be compared with it.
        """
        session, sessions, meter = self.models.session, self.models.sessions, self.measuring.meter
        if session is None or meter is None or self.trained_nothing:
            return 0
        for each in sessions:
            each.usage.note()
            if error is not None:
                each.loop_was_left()
        self._say_leaks(has_failed=is_out_of_memory(error) or isinstance(error, NothingFitsError))
        history = history_of(session.workload.model)
        for each, taken in self.models.present:
            batch = taken.largest.batch
            if batch is not None and each.attached:
                own = history_of(each.workload.model)
                own.batch = without_graph(batch)
                own.tape = meter.tape or (own.tape if len(sessions) > 1 else None)
        measurements = measurements_of(meter, self.measuring.plans, notes_of(sessions), session.plan, error)
        history.add_steps(meter.steps, meter.times.steps_ended)
        history.trained_by(optimizer for each in sessions for optimizer in each.workload.optimizers)
        title = title_of(sessions, self.models.all[0].largest.batch, meter.device.name, meter.times.steps_ended)
        history.add(title, measurements, self.models.events)
        return meter.times.steps_ended


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
