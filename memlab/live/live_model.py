"""`LiveModel`: the model that a control follows, held weakly, with what is known of training it; and the steps that a panel runs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from memlab.errors import MemlabError, SessionError, WorkloadError
from memlab.measuring.runs import replayed, require_complete, training_step
from memlab.plan import Plan
from memlab.runtime.batch import Batch
from memlab.runtime.loop_mode import resumed
from memlab.runtime.namespace import is_held
from memlab.runtime.workload import Workload
from memlab.session import Session, fit, session_of, sessions
from memlab.session.nested import is_nested
from memlab.session.snapshot import Snapshot
from memlab.session.tape import Tape, own_step_of


class LiveModel:
    """A model, its session and its optimizers, none of them kept alive."""

    def __init__(self, model: nn.Module, listen: Callable[[Session], None], gone: Callable[[], None]) -> None:
        self.name = type(model).__name__  # of the model, as the notebook or its class has it
        # what the model is called with, to measure and to predict with; None where it is not known yet
        self.batch: Any = None
        self.tape: Tape | None = None  # a step of its loop on such a batch, where one was recorded
        # called as ``loss_fn(output, target)``; None when the model returns its own loss
        self.loss_fn: Callable[..., torch.Tensor] | None = None
        self.returns_loss: bool | None = None  # whether its newest call did; None before
        self.is_left = False  # whether no variable held it when `see_variables` last looked
        self._listen = listen  # called with a session that is found or made
        self._gone = gone  # called by whatever thread collects the model
        self._model = weakref.ref(model, self._forget)
        self._session: weakref.ref[Session] | None = None
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    @property
    def is_gone(self) -> bool:
        return self._model() is None

    def see_variables(self, namespace: Mapping[str, Any]) -> bool:
        """Look whether a notebook's variables still hold the model; return whether that has changed."""
        model, was_left = self._model(), self.is_left
        self.is_left = model is not None and not is_held(model, namespace)
        return self.is_left != was_left

    @property
    def session(self) -> Session | None:
        """The session of the model, while it is attached."""
        session = self._session() if self._session is not None else None
        return session if session is not None and session.attached else None

    @property
    def has_loss(self) -> bool:
        """Return whether steps can be made by themselves, as far as is known."""
        return self.loss_fn is not None or self.returns_loss is not False

    @property
    def has_own_step(self) -> bool:
        """Return whether the loop computes the loss, and a step of it was recorded that can be run again."""
        is_recorded = not self.has_loss and self.tape is not None and self.batch is not None
        return is_recorded and own_step_of(self.workload()) is not None

    def called_in_loop(self, batch: Batch, tape: Tape | None) -> None:
        """Take in what the loop calls it with, unless inputs and target for a loss function were named."""
        if self.loss_fn is None:
            self.batch, self.tape = batch, tape

    def follow(self, session: Session) -> None:
        """Take a session for the model's, and what it knows."""
        self._session = weakref.ref(session)
        self._optimizers = [weakref.ref(optimizer) for optimizer in session.workload.optimizers]
        self.loss_fn = self.loss_fn or session.workload.loss_fn
        self.batch = self.batch if self.batch is not None else session.workload.batch
        self.name = session.workload.name

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))

    def attached(self) -> Session:
        """A session on the model, made if there is none; it is listened to from now on.

        Raises:
            SessionError: the model was wrapped since, and trains as a part of another, which has a session.
        """
        model = self._alive()
        session = session_of(model)
        if session is None:
            around = next((each.workload for each in sessions() if is_nested(model, each.workload.model)), None)
            if around is not None:
                raise SessionError(f"{self.name} is trained as a part of {around.name}: ask its panel (%memfit panel)")
            session = fit(Workload(model, self._live_optimizers(), name=self.name).held_weakly())
        self._listen(session)
        return session

    def workload(self) -> Workload:
        """The live objects with the batch at hand."""
        model, session = self._alive(), self.session
        if self.batch is None:
            raise WorkloadError(
                "no batch is known yet: run the cell that trains with %%memfit first, or name one, as in "
                "%memfit panel --batch NAME"
            )
        live = session.workload if session is not None else Workload(model, self._live_optimizers(), name=self.name)
        workload = Workload(model, live.optimizers, self.batch, self.loss_fn, live.scheduler, live.name)
        workload.tape = self.tape
        return workload

    def _alive(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise MemlabError(f"{self.name} is deleted")
        return model

    def _live_optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def _forget(self, _model: object, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_over():  # the names of modules, `sys` among them, may be gone
            return
        self.batch = self.loss_fn = self.tape = None
        self._gone()


def steps_of(workload: Workload, session: Session, *, keep: bool) -> Generator[float]:
    """Train a workload on its batch, one step per `next`, until this is closed.

    Plans may be switched between steps; the one in force in the end stays. What the steps train is kept with `keep`; else
    weights, moments, gradients, scheduler, modes and random state are put back bit for bit, however this ends.
    """
    require_complete(workload)
    start = session.plan
    before = None if keep else Snapshot(workload)
    # those of the loop's last step, where it drops them at the top
    with resumed():
        for optimizer in workload.optimizers:
            optimizer.zero_grad(set_to_none=True)
    tape = None if keep else own_step_of(workload)
    try:
        yield from _steps(workload, partial(training_step, workload) if tape is None else replayed([workload], tape))
    finally:
        if before is not None:
            _put_back(session, before, start)


def _steps(workload: Workload, step: Callable[[], float]) -> Generator[float]:
    modes = {module: module.training for module in workload.model.modules()}
    workload.model.train()
    try:
        while True:
            with resumed():
                loss = step()
            yield loss
    finally:
        for module, was_training in modes.items():
            module.training = was_training


def _put_back(session: Session, before: Snapshot, start: Plan) -> None:
    """Restore under the plan of the start: parameters and state have the form of the plan they were copied under."""
    if not session.attached:
        before.restore()
        return
    last, waiting = session.plan, session.pending
    with session.observers.away():
        session.switch(start, now=True)
        before.restore()
        session.switch(last, now=True, on_trial=True)
    session.switching.ask(waiting)
