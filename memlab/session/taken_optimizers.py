"""`TakenOptimizers`: the optimizers that a session has taken over, which loops make, initialize anew and drop."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from memlab.runtime import state_layers
from memlab.runtime.hooks import StepHandler, install_step_hooks, keep_last, on_each_step
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.ownership import steps_some_of, unwrap_optimizer
from memlab.session import together

if TYPE_CHECKING:
    from memlab.session.session import Session


class TakenOptimizers:
    """Optimizers of one session, with its step hooks on them."""

    def __init__(
        self,
        session: Session,
        before_step: StepHandler,  # the step hooks
        after_step: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._session = session
        self._before_step, self._after_step = before_step, after_step
        self._hooks_of: dict[int, ExitStack] = {}  # on each optimizer, by its id
        self._added: dict[int, ExitStack] = {}  # likewise, with what else refers to it
        self._undo = ExitStack()

    def attach(self, undo: ExitStack) -> None:
        """Take over those that are known, and from now on each that steps the model; until undone."""
        session, self._undo = self._session, undo.enter_context(ExitStack())
        for optimizer in session.workload.optimizers:
            self._add(optimizer)
            session.observers.tell("optimizer_found", optimizer)
        on_each_step(self.found, self._undo)

    def found(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over an optimizer that is first seen when it steps, or that was initialized anew."""
        session = self._session
        if optimizer in session.in_force.optimizers:
            if not keep_last(optimizer, self._before_step):  # `optimizer.__init__(...)` by the loop has dropped it
                self._hooks_of[id(optimizer)].close()
                self._hook(optimizer, self._undo)
            return
        if unwrap_optimizer(optimizer) is not optimizer or not steps_some_of(optimizer, session.workload.model):
            return
        if together.is_led(session):
            # an earlier session has just taken it over, and sees to its state
            session.in_force.change(session.plan)
        session.switching.retry(lambda: session.in_force.check_optimizer(optimizer))
        with deferred_interrupts():
            if session.workload.optimizers:
                self._forget_dropped()
            self._add(optimizer)
            session.workload.optimizers.append(optimizer)
            session.log.note(f"found optimizer {type(optimizer).__name__}")
            session.observers.tell("optimizer_found", optimizer)

    def _add(self, optimizer: torch.optim.Optimizer) -> None:
        with ExitStack() as hooks:
            self._hook(optimizer, hooks)
            self._session.in_force.attach_optimizer(optimizer)
            hooks.callback(self._session.in_force.detach_optimizer, optimizer)
            self._added[id(optimizer)] = added = hooks.pop_all()
            self._undo.push(added)

    def _forget_dropped(self) -> None:
        """Let go of optimizers that the loop has dropped, moments and all, where no plan is on them."""
        if self._session.techniques:
            return
        taken = self._session.workload.optimizers
        known = [weakref.ref(optimizer) for optimizer in taken]
        for optimizer in taken:
            self._added.pop(id(optimizer)).close()
        del optimizer
        taken.clear()
        for ref in known:
            if (kept := ref()) is not None:
                self._add(kept)
                taken.append(kept)

    def _hook(self, optimizer: torch.optim.Optimizer, undo: ExitStack) -> None:
        hooks = self._hooks_of[id(optimizer)] = undo.enter_context(ExitStack())
        session = self._session
        state_layers.show_own_form(optimizer, lambda: session.techniques, lambda: together.is_led(session), hooks)
        install_step_hooks(optimizer, self._before_step, self._after_step, hooks)
