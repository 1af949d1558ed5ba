"""`Session`: applies a plan to a workload, switches it at step boundaries, and undoes it.

The session holds together what each does one thing: `Switching` decides when the plan changes and takes back one
that does not apply, `InForce` changes it, `ModelCalls` and `Stepping` take over the two hooks. Techniques whose
setting stays are left alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any, Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.errors import MemlabError, RefusalError, SessionError, WorkloadError
from memlab.plan import Plan
from memlab.rescue.rescuer import Rescuer
from memlab.runtime import accelerator
from memlab.runtime.dispatch import never_compile
from memlab.runtime.hooks import CallHook
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.mechanisms import EarlyUpdates, Interruptible, OwnMemory, StateForm, brought
from memlab.runtime.observer import Observer
from memlab.runtime.ownership import WITHOUT_VALUES, is_made, parameters_in, stepped_by
from memlab.runtime.stand_ins import stand_in
from memlab.runtime.workload import Workload
from memlab.session import together
from memlab.session.growth import Growth
from memlab.session.log import Log
from memlab.session.model_calls import ModelCalls
from memlab.session.observers import Observers
from memlab.session.stepping import Position, Stepping
from memlab.session.switching import Switching
from memlab.session.taken_optimizers import TakenOptimizers
from memlab.session.usage import Usage
from memlab.techniques import Technique
from memlab.techniques.gradient_release.leftover import NOT_DROPPED, leftover

# steps of a rest are short, or it ends
_MOST_REST_SECONDS = 0.1


class Session:
    """A plan applied to live objects.

    Use `memlab.fit` to make one. Under ``with`` it is undone at the end of the block; bare, it stays
    until `undo`.

    Args:
        workload: what to apply plans to.
        observers: objects that are told about steps.
        rescuer: keeps the loop running when memory runs out; None lets the error pass.

    Attributes:
        workload: the live objects.
        log: what was done when.

    Raises:
        RefusalError: the model cannot be taken over at all (sharded, a sparse parameter).
        SessionError: the model has a session already.
    """

    def __init__(self, workload: Workload, observers: Sequence[Observer] = (), rescuer: Rescuer | None = None) -> None:
        if not is_made(workload.model):
            raise WorkloadError(WITHOUT_VALUES.format(workload.name))
        _refuse_foreign_parameters(workload)
        if together.session_of(workload.model) is not None:
            raise SessionError(
                f"{workload.name} has a session already: use its switch(plan), or undo() it first; in a notebook, flags of %%memfit and %memfit undo do that"
            )
        self.workload = workload
        self.log = Log()
        self.rescuer = rescuer
        self.observers = Observers(self.log.note_once)
        self.observers.only(observers)
        self._companions: weakref.WeakSet[Session] = weakref.WeakSet()
        self.position = Position()
        self.switching = Switching(
            workload,
            self.log,
            self.observers,
            self.position,
            companions=lambda: self.companions,
            is_led=lambda: together.is_led(self),
            accumulates=lambda: self.usage.accumulates,
        )
        self.in_force = self.switching.in_force
        self.usage = Usage(workload, self.in_force, self.log)
        device = workload.device
        self.growth = (
            Growth(partial(accelerator.allocated_bytes, device), partial(accelerator.most_bytes, device))
            if accelerator.is_accelerator(device)
            else None
        )
        self._calls = ModelCalls(self)
        self._stepping = Stepping(self)
        self.taken = TakenOptimizers(self, self._before_step, self._after_step)
        self._rest: _Rest | None = None
        self._hooks = ExitStack()
        self._model_id = id(workload.model)
        self._attach()

    # -- for people ----------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.in_force.plan

    @property
    def steps(self) -> int:
        """Optimizer steps seen so far."""
        return self.log.steps

    def switch(self, plan: Plan | str, *, now: bool = False, on_trial: bool = False) -> None:
        """Change to another plan, at once or at the next step boundary.

        Args:
            plan: the plan, or its flags.
            now: apply even between a forward and its step, for a loop that has been left there.
            on_trial: go back to the plan before, should this one turn out not to apply while the loop runs.

        Raises:
            RefusalError: a technique does not apply here; the old plan stays in force.
            SessionError: the session is over, or a switch `now` from another thread than training's.
        """
        self._require_attached()
        wanted = Plan.of(plan)
        if self.position.is_on_this_thread:
            self.wake(within_step=True)
        self.switching.switch(wanted, now=now, on_trial=on_trial)

    def undo(self) -> None:
        """Restore the workload as it was, without any technique. Does nothing when called again.

        A Ctrl-C that comes meanwhile is delivered when it is done.

        Raises:
            torch.OutOfMemoryError: there is no room for the workload as it was (moments back in fp32, say).
                The session is then as before, and can be undone once memory is free.
        """
        if not self.attached:
            return
        _alive = self.workload.model  # until the end: without a plan the session does not keep it
        with deferred_interrupts():
            self.wake()
            self.position.end_own_step()
            if self.rescuer is not None:
                self.rescuer.detach()
            try:
                self.switching.change(Plan(), to_the_end=True)
            except BaseException:
                if self.rescuer is not None:
                    self.rescuer.attach(self)
                raise
            self._hooks.close()
            trained = (p for optimizer in self.workload.optimizers for p in parameters_in(optimizer))
            if leftover.forget([*self.workload.model.parameters(), *trained]):
                self.log.answer(NOT_DROPPED)
            self.workload.drop_optimizers()

    def __enter__(self) -> Self:
        self._require_attached()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, MemlabError) and error.in_loop and self.attached:
            self.usage.was_refused()
        self.undo()

    def __repr__(self) -> str:
        state = f"plan {self.plan.label!r}" if self.attached else "undone"
        try:
            on = self.workload.describe()
        except WorkloadError as deleted:
            on = str(deleted)
        return f"<memlab session on {on}: {state}, {self.steps} steps>"

    # -- for what of memlab's own asks and watches ---------------------------------------------

    @property
    def pending(self) -> Plan | None:
        """The plan that waits for the next step boundary, or None."""
        return self.switching.pending

    @property
    def attached(self) -> bool:
        """Return whether the session is in force; False after `undo`."""
        return together.by_model.get(self._model_id) is self

    @property
    def companions(self) -> list[Session]:
        """Sessions of other models that train in the same loop, in the order in which they were made."""
        return [each for each in together.sessions() if each in self._companions] if self._companions else []

    @property
    def is_in_call(self) -> bool:
        """Return whether this thread is in a call of the model."""
        return self._call_hook.is_under_way

    def train_with(self, others: Iterable[Session]) -> None:
        """Note the sessions of the other models that train in the same loop."""
        self._companions = weakref.WeakSet(others)

    @property
    def techniques(self) -> list[Technique]:
        """The techniques in force, in the order in which they wrap the model call."""
        return self.in_force.techniques

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what the techniques in force have to say."""
        of_techniques = tuple(note for technique in self.techniques for note in technique.notes)
        in_backward = any(each.updates_in_backward for each in brought(self.techniques, EarlyUpdates))
        if not (in_backward or brought(self.techniques, StateForm)):
            return of_techniques
        known = {id(p) for each in (self, *self.companions) for p in each.workload.model.parameters()}
        others = [one for one in self.workload.optimizers if not stepped_by(one) <= known]
        return (*of_techniques, *(_of_others(one, self.workload.name) for one in others))

    @property
    def host_bytes(self) -> int:
        """Bytes kept off the device by the techniques in force."""
        return sum(each.host_bytes for each in brought(self.techniques, OwnMemory))

    @property
    def rescuing(self) -> Rescuer | None:
        """The rescuer, where it can do something: a failed call cannot be taken back within an engine."""
        is_idle = self.rescuer is None or self.rescuer.is_idle or self.in_force.is_engine
        return None if is_idle else self.rescuer

    def loop_was_left(self) -> None:
        """Discard the state of a step that an error has interrupted and that will not be continued."""
        with deferred_interrupts():
            self.position.end_own_step()
            for each in brought(self.techniques, Interruptible):
                each.broken_off()

    def hand_over(self, thread: int) -> None:
        """Let another thread train, and change plans between its steps."""
        self.position.thread = thread

    def rest(self, steps: int) -> None:
        """Take nothing over for some steps, if there is no need to: the model's call is torch's own meanwhile.

        Observers are told afterwards how many steps have passed. Steps that turn out long, and a plan that is asked
        for, end the rest.
        """
        is_needed = self._companions or self.position.own_step is not None or self.rescuing is not None
        if is_needed or not self.switching.is_settled:
            return
        if self._rest is None and self._call_hook.set_aside():
            self._rest = _Rest(steps)

    def wake(self, *, within_step: bool = False) -> None:
        """End a rest, which may be between a model call and its step; harmless when there is none."""
        rest, self._rest = self._rest, None
        if rest is None:
            return
        self._call_hook.put_back()
        self.position.is_within_step = within_step
        self.observers.tell("rested", rest.steps)
        if within_step:
            self.observers.tell("interrupted")  # nobody knows what the step has come to

    def shares(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer also steps models of other sessions."""
        others = (other for other in together.sessions() if other is not self)
        return any(optimizer is one for other in others for one in other.workload.optimizers)

    def accept(self, rescuer: Rescuer) -> None:
        """Recover the loop from out-of-memory errors from now on."""
        self.rescuer = rescuer
        rescuer.attach(self)

    def dismiss(self) -> None:
        """Stop recovering the loop from out-of-memory errors; do nothing when that is off."""
        if self.rescuer is not None:
            self.rescuer.detach()
        self.rescuer = None

    # -- attaching -----------------------------------------------------------------------------

    def _require_attached(self) -> None:
        if not self.attached:
            raise SessionError("this session is over: make a new one with memlab.fit(workload, plan)")

    def _attach(self) -> None:
        model = self.workload.model
        with deferred_interrupts(), ExitStack() as hooks:
            together.by_model[self._model_id] = self
            hooks.callback(together.by_model.pop, self._model_id, None)
            self._call_hook = CallHook(model, self._calls.run, self._calls.refuse_traced, self._calls.refuse_replicas)
            self._call_hook.install(hooks)
            if callable(getattr(type(model), "generate", None)) and "generate" not in vars(model):
                stand_in(model, "generate", self._calls.generating(), hooks)
            self.taken.attach(hooks)
            deleted = weakref.finalize(model, _model_deleted, weakref.ref(self))
            deleted.atexit = False
            hooks.callback(deleted.detach)
            if self.rescuer is not None:
                self.rescuer.attach(self)
            self._hooks = hooks.pop_all()

    @never_compile
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        leftover.settle()
        if self._rest is not None:
            return None
        return self._stepping.begins(optimizer, args, kwargs, sys._getframe(1))

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._rest is None:
            self._stepping.ended(optimizer)
            return
        self.log.steps += 1
        if self._rest.is_over_after_a_step() or self.pending is not None:
            self.wake()


class _Rest:
    """Steps of which a session takes nothing over; with how many have passed."""

    def __init__(self, most_steps: int) -> None:
        self.steps = 0
        self._most_steps = most_steps  # after how many it is over at the latest
        self._began_seconds = perf_counter()

    def is_over_after_a_step(self) -> bool:
        """Count a step, and return whether it was the last."""
        self.steps += 1
        return self.steps >= self._most_steps or perf_counter() - self._began_seconds > _MOST_REST_SECONDS


def _of_others(optimizer: torch.optim.Optimizer, name: str) -> str:
    return (
        f"{type(optimizer).__name__} updates parameters that are none of {name}'s as well: the plan is for these, too"
    )


def fit(
    workload: Workload, plan: Plan | str = "", observers: Sequence[Observer] = (), *, rescue: bool | Rescuer = False
) -> Session:
    """Apply a plan to live objects at once.

    Args:
        workload: model and optimizer, see `Workload`.
        plan: a `Plan`, or its flags as text.
        observers: objects that are told about steps, such as a `memlab.measuring.steps.Meter`.
        rescue: keep the loop running when memory runs out, under other plans that need less; a `Rescuer` says which.

    Returns:
        The session; use it bare and call `undo()` later, or under ``with``.

    Raises:
        PlanError: the flags cannot be read.
        RefusalError: a technique does not apply; the workload is as it was.
        SessionError: the model has a session already.
        WorkloadError: not a workload.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with fit(Workload(model, optimizer), "--accumulate 2") as session:
        ...     loss = model(torch.randn(6, 4)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        >>> session.plan.label, session.attached
        ('as written', False)
    """
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"fit: expected a memlab.Workload, got {type(workload).__name__}; write fit(Workload(model, optimizer), plan)"
        )
    wanted = Plan.of(plan)
    rescuer = Rescuer() if rescue is True else rescue or None
    session = None
    try:
        with deferred_interrupts():
            session = Session(workload, observers, rescuer)
            session.switch(wanted, now=True)
    except BaseException:
        # whoever does not get the session could not undo it
        if session is not None:
            session.undo()
        raise
    return session


def _model_deleted(session: weakref.ref[Session]) -> None:
    """Let the optimizers of a model that is gone go as well; what the session keeps of them is in a cycle with it."""
    alive = session()
    if alive is not None:
        alive._hooks.close()
        alive.workload.optimizers = []
        alive.observers.only(())


def _refuse_foreign_parameters(workload: Workload) -> None:
    """Refuse parameters that are kept by an engine, or in another form than as one tensor."""
    odd = next((name for name, p in workload.model.named_parameters() if p.layout is not torch.strided), "")
    if odd:
        raise RefusalError(
            "session", f"{workload.name} has a parameter that is sparse or nested ({odd})", "make it a dense one"
        )
    if any(_is_sharded(parameter) for parameter in workload.model.parameters()):
        raise RefusalError(
            "session",
            f"{workload.name} is already sharded (FSDP2 or tensor parallel)",
            "use that engine's own accumulation, checkpointing and offload",
        )


def _is_sharded(parameter: nn.Parameter) -> bool:
    # asking a fake for its data is slow, and it would say what its own type says
    kinds = (type(parameter),) if isinstance(parameter, FakeTensor) else (type(parameter), type(parameter.data))
    return any(kind.__name__ == "DTensor" for kind in kinds)
