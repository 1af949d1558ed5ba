"""`Stepping`: the optimizer's step, taken over by a session."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from memlab.errors import RefusalError
from memlab.runtime import optimizer_step
from memlab.runtime.buckets import is_separable, share_of
from memlab.runtime.interrupts import HeldBack, hold_back
from memlab.runtime.mechanisms import EarlyUpdates, Skipping, Updating, Visiting, WholeSteps, brought
from memlab.runtime.optimizer_step import OwnStep
from memlab.runtime.plain_step import take_over

if TYPE_CHECKING:
    from memlab.session.session import Session


class Position:
    """Position of the training loop, and its thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()  # number of the thread that trains
        self.is_within_step = False  # whether the model has been called and the step of its optimizer is not over
        self.own_step: OwnStep | None = None  # the step under way, where the optimizer makes it itself; else None

    @property
    def is_on_this_thread(self) -> bool:
        """Return whether the thread that trains is the one that asks, which may be any where it has ended."""
        return threading.get_ident() == self.thread or self.thread not in sys._current_frames()

    def own_step_around(self, frame: FrameType) -> OwnStep | None:
        """Return the step that an optimizer is making itself, around a frame; one that was broken off ends here."""
        if self.own_step is not None and not self.own_step.is_around(frame):
            self.end_own_step()
        return self.own_step

    def end_own_step(self) -> None:
        """End the step that an optimizer is making itself; do nothing when there is none."""
        own, self.own_step = self.own_step, None
        if own is not None:
            own.close()


Optimizer = torch.optim.Optimizer


class Stepping:
    """Steps of the optimizers, made as the techniques in force and the rescuer need."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._skipped = False  # of the step that is under way
        self._held_back: HeldBack | None = None  # while it is

    # -- before --------------------------------------------------------------------------------

    def begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], call: FrameType
    ) -> tuple[Any, Any] | None:
        """Take over a step that begins: return arguments for the original step, or None to let it run as it was called."""
        has_closure = callable(kwargs.get("closure")) or any(map(callable, args[1:]))  # Accelerate passes None
        caller = call.f_back
        if self._session.position.own_step is not None and caller is not None:
            own = self._session.position.own_step_around(caller)
            if own is not None and own.optimizer is optimizer:
                own.inner_begins()
                return None
        if not has_closure and self._session.techniques:
            self._held_back = hold_back(call)
        try:
            return self._taken_over(optimizer, args, kwargs, call, has_closure=has_closure)
        except BaseException:
            self._hold_back_no_longer()
            self._session.observers.tell("interrupted")
            raise

    def _taken_over(
        self,
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: FrameType,
        *,
        has_closure: bool,
    ) -> tuple[Any, Any] | None:
        self._session.switching.take_withdrawn_out()
        if has_closure:
            # no plan can change in the closure's model call, when the step is under way
            self._session.switching.enter_step()
        if self._session.techniques:
            self._session.switching.retry(lambda: self._tell_techniques(optimizer, has_closure=has_closure))
        self._session.observers.tell("step_begins", optimizer)
        # a closure runs the backward pass, so what it leaves behind is looked at after it
        rescuer = self._session.rescuing
        is_rescued = rescuer is not None and rescuer.step_begins(optimizer)
        self._skipped = False
        techniques = self._session.techniques
        if not (is_rescued or techniques):
            return None
        self._skipped = not has_closure and self._must_skip()
        takes_over = bool(
            brought(techniques, EarlyUpdates) or self._whole_step(optimizer)
        ) or optimizer_step.is_changed(optimizer, techniques)
        may_skip = has_closure and bool(brought(techniques, Skipping))
        if not (self._skipped or takes_over or may_skip or is_rescued):
            return None
        if self._makes_own_step(optimizer) and not self._skipped:
            self._session.position.own_step = optimizer_step.OwnStep(optimizer, techniques, call)
            return None
        return take_over(self._update)(optimizer, args, kwargs)

    def _tell_techniques(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        for technique in self._session.techniques:
            may_skip = bool(brought([technique], Skipping))
            if may_skip and not has_closure and self._makes_own_step(optimizer):
                # called with nothing to update it may fail, or reach weights by a way of its own
                raise RefusalError(
                    technique.field,
                    f"{type(optimizer).__name__} updates by code of its own, which cannot leave a step out where gradients are not finite",
                    "use --bf16",
                )
            others = brought([technique], Visiting) or any(
                each.changes_parameters for each in brought([technique], Updating)
            )
            needs_whole = may_skip or bool(others)
            if has_closure and needs_whole and self._makes_own_step(optimizer):
                raise RefusalError(
                    technique.field,
                    f"{type(optimizer).__name__} evaluates the model inside its step",
                    f"leave {self._session.switching.in_force.plan.label} out, or call step() without a closure",
                )
            technique.step_begins(optimizer, has_closure=has_closure)

    def _makes_own_step(self, optimizer: Optimizer) -> bool:
        is_served = is_separable(optimizer)
        return not (is_served or self._has_stepper(optimizer))

    def _has_stepper(self, optimizer: Optimizer) -> bool:
        stepper = optimizer_step.foreign_stepper(optimizer, self._session.techniques)
        return stepper is not None or self._whole_step(optimizer) is not None

    def _whole_step(self, optimizer: Optimizer) -> Callable[[], bool] | None:
        """Return what makes a step in place of the optimizer; None where it makes it itself."""
        made = (each.whole_step(optimizer) for each in brought(self._session.techniques, WholeSteps))
        return next(filter(None, made), None)

    def _must_skip(self) -> bool:
        return any(each.skips_step() for each in brought(self._session.techniques, Skipping))

    # -- the update ----------------------------------------------------------------------------

    def _update(self, optimizer: Optimizer) -> None:
        if self._skipped or self._must_skip():
            self._skipped = True
            self._session.log.note("gradients were not finite: update skipped, loss scale halved")
        elif not self._updated(optimizer):
            self._skipped = True
            who = "by the engine" if self._session.in_force.is_engine else "as the loop's own scaler asks"
            self._session.log.note(f"gradients were not finite: update skipped, {who}")

    def _updated(self, optimizer: Optimizer) -> bool:
        techniques = self._session.techniques
        whole = self._whole_step(optimizer)
        if whole is not None:
            return whole()
        rescuer = self._session.rescuing
        if rescuer is not None and rescuer.is_armed:
            return rescuer.update(optimizer)
        if optimizer_step.is_changed(optimizer, techniques):
            return optimizer_step.run_step(optimizer, techniques)
        # an update that is the loop's own in all but its order has no copies, as in the loop
        return optimizer_step.run_step(optimizer, techniques, share_of(optimizer), backup=False)

    # -- after ---------------------------------------------------------------------------------

    def ended(self, optimizer: Optimizer) -> None:
        """Note that a step is over, or a part of one that the optimizer makes itself."""
        own = self._session.position.own_step
        if own is not None and own.optimizer is optimizer:
            if not own.ended():
                return
            self._session.position.own_step = None
        rescuer = self._session.rescuing
        if rescuer is not None:
            rescuer.step_ended()
        self._session.usage.stepped(optimizer)
        skipped, self._skipped = self._skipped, False
        for technique in self._session.techniques:
            technique.step_ended(optimizer, skipped=skipped)
        self._session.observers.tell("step_ended", optimizer, skipped)
        self._session.log.steps += 1
        self._session.switching.step_ended()
        self._hold_back_no_longer()

    def _hold_back_no_longer(self) -> None:
        held_back, self._held_back = self._held_back, None
        if held_back is not None:
            held_back.end()
