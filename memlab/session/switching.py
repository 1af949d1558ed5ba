"""`Switching`: when the plan of a session changes, and going back from one that turns out not to apply.

A *step boundary* is the moment before the first training forward after an `optimizer.step()`. A plan asked for
between a forward and its step waits for it; everything happens on the thread that trains.

A plan is *on trial* when it was asked for from elsewhere than the code that trains (a panel, another thread), and
once a step has ended under it. Whatever says then that it does not apply, in the model call, its backward pass or the
step, does not end the loop: the plan before comes back, and the same work is done again. A plan that code has just
asked for is answered by the error, and so are memlab's own loops (measurements, predictions).
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard

from torch import nn

from memlab.errors import MemlabError, RefusalError, SessionError
from memlab.plan import Plan
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.mechanisms import EarlyUpdates, LoopChecks, brought
from memlab.runtime.out_of_memory import is_out_of_memory, release
from memlab.runtime.own_steps import is_own_step
from memlab.runtime.workload import Workload
from memlab.session.in_force import InForce, check_all
from memlab.session.log import Log
from memlab.session.observers import Observers
from memlab.session.stepping import Position
from memlab.session.together import require_compatible, session_of, sharing
from memlab.techniques import TECHNIQUES, is_wanted
from memlab.techniques.base import Host

if TYPE_CHECKING:
    from memlab.session.session import Session


class Switching:
    """The plan in force, the one that is asked for, and the one to go back to."""

    def __init__(
        self,
        workload: Workload,  # what plans are applied to
        log: Log,  # where changes and refusals are noted
        observers: Observers,  # who is told of them
        position: Position,  # where the loop is
        *,
        companions: Callable[[], Sequence[Session]],  # sessions of other models that train in the same loop
        is_led: Callable[[], bool],  # whether a session that was there before sees to the optimizers
        accumulates: Callable[[], bool],  # whether the loop makes several backward passes for a step
    ) -> None:
        self._workload = workload
        self._log = log
        self._observers = observers
        self._position = position
        self._companions = companions
        self.pending: Plan | None = None  # the plan that waits for the next step boundary, or None
        self.is_on_trial = False  # whether a plan that turns out not to apply is taken back
        # plans to go back to, the newest last, and whether each was on trial itself
        self._before: list[tuple[Plan, bool]] = []
        # the plan before rescues, where it is not on trial itself: what is refused of it ends the loop
        self._asked: Plan | None = None
        self.refused: set[Plan] = set()  # plans that turned out not to apply since one was asked for last
        self._is_of_rescue = False  # whether nobody asked for the plan in force
        self._withdrawn: MemlabError | None = None  # why, from the middle of the loop's own code
        self._model: nn.Module | None = None  # kept while techniques are on it, whose undo needs it
        host = Host(
            gradients_complete=lambda: observers.tell("gradients_complete"),
            only_tried=lambda: observers.tell("only_tried"),
            only_watched=lambda: observers.tell("only_watched"),
            storage_resized=lambda storage: observers.tell("storage_resized", storage),
            on_trial=lambda: self.is_on_trial,
            of_rescue=lambda: self._is_of_rescue,
            withdraw=self._withdraw,
            refused=lambda refusal: observers.tell("refused", refusal),
            is_led=is_led,
            accumulates=accumulates,
            say=log.answer,
        )
        self.in_force = InForce(workload, host)  # the plan in force, and its techniques

    @property
    def is_settled(self) -> bool:
        """Return whether there is no plan, and none that is asked for or to be taken back."""
        is_busy = self.in_force.techniques or self.is_on_trial or self._withdrawn is not None
        return not is_busy and self.pending is None

    # -- asking --------------------------------------------------------------------------------

    def switch(self, plan: Plan, *, now: bool, on_trial: bool) -> None:
        """Change to another plan, at once or at the next step boundary; see `Session.switch`."""
        if self._position.is_on_this_thread and (now or not self._position.is_within_step):
            self.pending = None
            self.change(plan, on_trial=on_trial)
        elif now:
            raise SessionError(
                "switch(now=True) from another thread than the one that trains: leave out now, and the training thread applies it"
            )
        else:
            self.pending = plan

    def ask(self, plan: Plan | None) -> None:
        """Note a plan for the next step boundary, from whatever thread; None withdraws what was asked for.

        Unlike `switch` it never applies anything there and then. What is refused, observers are told.
        """
        self.pending = plan if plan != self.in_force.plan else None
        self._observers.tell("plan_asked", self.pending or self.in_force.plan)

    # -- changing ------------------------------------------------------------------------------

    def change(
        self,
        plan: Plan,
        *,
        noted: bool = True,
        to_the_end: bool = False,
        on_trial: bool = False,
        of_rescue: bool = False,
    ) -> None:
        """Change to another plan at once, from whatever thread training has come to; see `Session.switch` and `InForce.change`.

        A change that is not `noted` is not in the log: it serves the plan that was asked for last.
        """
        self._position.end_own_step()
        if on_trial or of_rescue:
            self._check_loop(plan)
        if plan != self.in_force.plan:
            beside = {id(each): each.workload for each in (*self._companions(), *sharing(self._workload))}
            require_compatible(self._workload, plan, [*beside.values()])
        with deferred_interrupts():
            before = self.in_force.plan
            # a rescue may stand in the middle of an update, which is completed first
            self.in_force.change(plan, to_the_end=to_the_end or of_rescue)
            self._model = self._workload.model if self.in_force.techniques else None
            if plan == before:
                return
            self._withdrawn, self._is_of_rescue = None, of_rescue
            self._log.not_rescued = ""  # of the plan before
            if noted:
                self.refused.clear()
                self._asked = None
                self._remember(before, self.is_on_trial, chained=on_trial)
                self.is_on_trial = on_trial and bool(self.in_force.techniques)
                self._log.note(f"{before.label} → {plan.label}")
            self._observers.tell("plan_changed", self.in_force.plan)

    def rescued(self, before: Plan) -> None:
        """A rescue has come to the plan in force: it is on trial, as the next call may refuse it."""
        if not self.is_on_trial:
            self._asked = before
        self._remember(before, self.is_on_trial, chained=True)
        self.is_on_trial = True

    def _remember(self, before: Plan, was_on_trial: bool, *, chained: bool) -> None:
        """Note a plan to go back to; of a chain of plans on trial none may apply, and the way leads back through all."""
        known = [plan for plan, _ in self._before] if chained else []
        kept = known.index(before) if before in known else len(known)
        self._before = [*self._before[:kept], (before, was_on_trial)]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context whose plans are none to go back to: those of measurements."""
        known = self._before, self.is_on_trial
        try:
            yield
        finally:
            self._before, self.is_on_trial = known

    def enter_step(self) -> None:
        """Apply the plan that is asked for, if this is a step boundary; from here on the loop is within a step."""
        if not self._position.is_within_step:
            self._position.thread = threading.get_ident()
            self._observers.tell("step_boundary")
            self._apply_pending()
        self._position.is_within_step = True

    def step_ended(self) -> None:
        """Note that a step is over: whatever plan it ended under is on trial, if there is one to go back to."""
        self._position.is_within_step = False
        self._asked = None
        self.is_on_trial |= bool(self.in_force.techniques) and bool(self._before) and not is_own_step()

    def _apply_pending(self) -> None:
        pending, self.pending = self.pending, None
        if pending is None:
            return
        try:
            for each in self._companions():
                check(each.workload, pending)
            self.change(pending, on_trial=True)
            for each in self._companions():
                each.switching.ask(pending)
        except RefusalError as refusal:
            self._not_applied(pending, refusal)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            release(error)
            self._not_applied(
                pending,
                RefusalError(
                    "session",
                    f"there is no memory to change to {pending.label}",
                    "free memory first, or make the batch smaller",
                ),
            )

    def _check_loop(self, plan: Plan) -> None:
        """Ask the techniques that are to come whether they suit the loop that runs; a rescue may be on a thread of autograd's."""
        for kind in TECHNIQUES:
            if is_wanted(kind, plan) and kind.setting(plan) != kind.setting(self.in_force.plan):
                for each in brought([kind(plan)], LoopChecks):
                    # in no variable: this frame would keep itself, and what the loop holds
                    each.check_loop(self._workload, sys._current_frames().get(self._position.thread, sys._getframe()))

    def _not_applied(self, pending: Plan, refusal: RefusalError) -> None:
        """The loop goes on under the old plan; whoever asked reads it in the log."""
        self._log.note(f"refused {pending.label}: {refusal}")
        self._observers.tell("plan_refused", pending, refusal)

    # -- going back ----------------------------------------------------------------------------

    def falls_back(self, error: BaseException) -> bool:
        """Go back to the plan before, where an error says that a plan on trial does not apply; then the work is to be done again."""
        if not self._before or not self._is_trial_over(error):
            return False
        refused = self.in_force.plan
        self.refused.add(refused)
        before, was_on_trial = self._before.pop()
        # a plan with the same setting would be refused as well, or do nothing
        while self._before and isinstance(error, RefusalError) and _has_same(error.technique, refused, before):
            before, was_on_trial = self._before.pop()
        while not self._is_back(before, to_the_end=True):
            if before == Plan():
                return False
            before, was_on_trial = self._before.pop() if self._before else (Plan(), False)
        self.is_on_trial = was_on_trial
        text = f"refused {refused.label}: {error}; {before.label} is back"
        self._log.note(text)
        self._observers.tell("plan_refused", refused, error)
        self._observers.tell("refusal_handled")
        for each in self._companions():
            if each.plan == refused:
                each.switching.ask(before)
        if not self._observers.all:
            warnings.warn(f"memlab: {text}", RuntimeWarning, stacklevel=2)
        return True

    def give_up(self, error: MemlabError, before: Plan) -> None:
        """Go back from a plan whose refusal has ended the loop, to the one `before` the loop: the next one would end as well."""
        refused, named = self.in_force.plan, getattr(error, "technique", "")
        if not isinstance(error, RefusalError | SessionError) or refused == Plan():
            return  # a plan that memory has run out under is none that does not apply; nor is the loop as written
        if refused == before and (self.is_on_trial or not hasattr(refused, named)):
            return  # the loop has trained under it, or something else was refused
        known = [before, *(plan for plan, _ in reversed(self._before)), Plan()]
        others = (plan for plan in known if plan != refused and not _has_same(named, refused, plan))
        back = next((plan for plan in others if self._is_back(plan)), refused)
        self._before, self.is_on_trial = [], False
        if back != refused:
            self._log.note(f"refused {refused.label}: {error}; {back.label} is back")

    def _is_back(self, plan: Plan, *, to_the_end: bool = False) -> bool:
        """Change to a plan that was in force before; return whether it still applies, and has room. The loop as written always applies."""
        if any(each.only_watches for each in brought(self.in_force.techniques, EarlyUpdates)):
            self._observers.tell("only_watched")
        try:
            self.change(plan, noted=False, to_the_end=to_the_end)
        except (RefusalError, SessionError):
            if plan == Plan():
                raise
            return False
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            release(error)
            return False
        return True

    def retry(self, work: Callable[[], None]) -> None:
        """Do something, and once more under the plan before as often as a plan on trial refuses."""
        while True:
            try:
                work()
            except MemlabError as error:
                if not self.falls_back(error):
                    raise
            else:
                return

    def take_withdrawn_out(self) -> None:
        """Go back to the plan before, if a technique has withdrawn; do nothing otherwise."""
        refusal, self._withdrawn = self._withdrawn, None
        if refusal is not None:
            self.falls_back(refusal)

    def _withdraw(self, refusal: MemlabError, *, as_on_trial: bool = False) -> bool:
        self.is_on_trial |= as_on_trial and bool(self._before)
        if not self._is_trial_over(refusal):
            self._observers.tell("refused", refusal)
            return False
        self._withdrawn = refusal
        return True

    def _is_trial_over(self, error: BaseException) -> TypeGuard[MemlabError]:
        if not isinstance(error, RefusalError | SessionError):
            return False
        asked, field = self._asked, getattr(error, "technique", "")
        if asked is not None and _has_same(field, self.in_force.plan, asked):
            return False
        return self.is_on_trial and not error.is_late and not is_own_step()


def _has_same(field: str, one: Plan, other: Plan) -> bool:
    return hasattr(one, field) and getattr(one, field) == getattr(other, field)


def check(workload: Workload, plan: Plan) -> None:
    """Ask every technique of a plan whether it applies, to the model as it is now, without applying any."""
    session = session_of(workload.model)
    coming = [kind(plan) for kind in TECHNIQUES if is_wanted(kind, plan)]
    if session is not None:
        for technique in coming:
            technique.host = session.in_force.host
    check_all(coming, workload, workload.optimizers)
    for each in brought(coming, LoopChecks):
        each.check_modes(workload)
