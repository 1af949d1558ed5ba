"""`Session`: applies a plan to a workload, switches it at step boundaries, and undoes it.

The session owns the two hooks and decides when a plan changes; `InForce` changes it, wholly or not at
all. Techniques whose setting stays are left alone.

A *step boundary* is the moment before the first training forward after an `optimizer.step()`. A
switch asked for between a forward and its step waits for it; everything happens on the thread that
trains.

A plan is *on trial* when it was asked for from elsewhere than the code that trains (a panel, another thread), and
once a step has ended under it. Whatever says then that it does not apply, in the model call, its backward pass or the
step, does not end the loop: the plan before comes back, and the same work is done again. A plan that code has just
asked for is answered by the error, and so are memlab's own loops (measurements, predictions).
"""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Self, TypeGuard

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.errors import MemlabError, RefusalError, SessionError, WorkloadError
from memlab.plan import Plan
from memlab.rescue.guard import Start
from memlab.rescue.rescuer import Rescuer
from memlab.runtime import optimizer_step, state_layers
from memlab.runtime.hooks import CallHook, ForwardHandler, chained, install_step_hooks, loss_of, on_first_step
from memlab.runtime.interrupts import HeldBack, hold_back, interruptible, uninterrupted
from memlab.runtime.observer import Observer
from memlab.runtime.workload import Batch, Workload, is_made, steps_some_of, unwrap_optimizer
from memlab.session import in_force
from memlab.session.in_force import InForce
from memlab.session.observers import Observers
from memlab.session.together import require_compatible
from memlab.techniques import TECHNIQUES, Technique, is_wanted
from memlab.techniques.base import Host
from memlab.techniques.gradient_release.gradient_release import is_loop_known


@dataclass(frozen=True)
class LogEntry:
    """An action of a session, and the step in or before which it happened.

    Args:
        step: the step that was under way, or that came next, counted from 1.
        text: what was done, in words.
    """

    step: int
    text: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}"


_WITHOUT_CALL = "(it calls parts of it, its forward directly, or it within compiled code or a transform of torch.func)"

# models with a session, so that a second one is refused instead of wrapping the first. The model's hook and
# the optimizer's hooks keep the session; when the user drops both, nothing here keeps the model in memory
_numbers = itertools.count()
_attached: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()


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
        rescuer: as given.
        was_called: whether the loop has called the model to train it.

    Raises:
        RefusalError: the model cannot be taken over at all (compiled, sharded).
        SessionError: the model has a session already.
    """

    def __init__(self, workload: Workload, observers: Sequence[Observer] = (), rescuer: Rescuer | None = None) -> None:
        if not is_made(workload.model):
            raise WorkloadError(
                f"{workload.name} has parameters without values: call it once, or load its weights, first"
            )
        _refuse_foreign_engines(workload)
        if id(workload.model) in _attached:
            raise SessionError(f"{workload.name} has a session already: use its switch(plan), or undo() it first")
        self.workload = workload
        self.log: list[LogEntry] = []
        self._observers = Observers(self.note_once)
        self._observers.only(observers)
        self._tell = self._observers.tell
        self.rescuer = rescuer
        self._pending: Plan | None = None
        self._before: Plan | None = None  # the plan to go back to
        self._is_on_trial = False
        self._withdrawn: MemlabError | None = None  # why, from the middle of the loop's own code
        host = Host(
            gradients_complete=lambda: self._tell("gradients_complete"),
            only_tried=lambda: self._tell("only_tried"),
            storage_resized=lambda storage: self._tell("storage_resized", storage),
            on_trial=lambda: self._is_on_trial,
            withdraw=lambda refusal: self._withdraw(refusal),
            is_led=lambda: self._is_led,
        )
        self._in_force = InForce(workload, host)
        self._number = next(_numbers)
        self._companions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._hooks = ExitStack()
        self._steps = 0
        self._window_open = False
        self.was_called = False  # by a training forward, ever
        self._was_evaluated = False  # in eval mode, with gradients
        self._stepped: set[int] = set()  # optimizers that have, before the model was called
        self._skipped = False  # of the step that is under way
        self._held_back: HeldBack | None = None  # while it is
        self._own_step: optimizer_step.OwnStep | None = None  # likewise, where the optimizer makes it itself
        self._thread = threading.get_ident()
        self._model_id = id(workload.model)
        self._model: nn.Module | None = None  # kept while techniques are on it, whose undo needs it
        self._attach()

    # -- for people ----------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._in_force.plan

    @property
    def pending(self) -> Plan | None:
        """The plan that waits for the next step boundary, or None."""
        return self._pending

    @property
    def attached(self) -> bool:
        """Return whether the session is in force; False after `undo`."""
        return _attached.get(self._model_id) is self

    @property
    def steps(self) -> int:
        """Optimizer steps seen so far."""
        return self._steps

    @property
    def companions(self) -> list[Session]:
        """Sessions of other models that train in the same loop, in the order in which they were made."""
        return sorted((each for each in self._companions if each.attached), key=lambda each: each._number)

    def train_with(self, others: Iterable[Session]) -> None:
        """Note the sessions of the other models that train in the same loop."""
        self._companions = weakref.WeakSet(others)

    @property
    def _is_led(self) -> bool:
        """Whether a session that was there before has an optimizer of this model's."""
        earlier = (each for each in sessions() if each._number < self._number)
        return any(steps_some_of(one, self.workload.model) for each in earlier for one in each.workload.optimizers)

    @property
    def techniques(self) -> list[Technique]:
        """The techniques in force, in the order in which they wrap the model call."""
        return self._in_force.techniques

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what the techniques in force have to say."""
        return tuple(note for technique in self.techniques for note in technique.notes)

    @property
    def host_bytes(self) -> int:
        """Bytes kept off the device by the techniques in force."""
        return sum(technique.host_bytes for technique in self.techniques)

    @property
    def held_tensors(self) -> tuple[torch.Tensor, ...]:
        """Parts of parameters that the techniques in force keep on the device, beside the model."""
        return tuple(tensor for technique in self.techniques for tensor in technique.held_tensors)

    def canonical_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype a parameter or buffer of the model has without any plan."""
        changed = (t.canonical_dtype(tensor) for t in self.techniques)
        return next((dtype for dtype in changed if dtype is not tensor.dtype), tensor.dtype)

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
        same_thread = threading.get_ident() == self._thread
        if same_thread and (now or not self._window_open):
            self._pending = None
            self.change_plan(wanted, on_trial=on_trial)
            return
        if now:
            raise SessionError(
                "switch(now=True) from another thread than the one that trains: leave out now, and the training thread applies it"
            )
        self._pending = wanted

    def ask(self, plan: Plan | None) -> None:
        """Note a plan for the next step boundary, from whatever thread; None withdraws what was asked for.

        Unlike `switch` it never applies anything there and then. What is refused, observers are told.
        """
        self._pending = plan if plan != self.plan else None
        self._tell("plan_asked", self._pending or self.plan)

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Who is told about steps, in order."""
        return self._observers.all

    @observers.setter
    def observers(self, observers: Sequence[Observer]) -> None:
        self._observers.only(observers)

    @property
    def failure(self) -> str:
        """What of memlab's own failed and no longer watches, in words; empty for nothing."""
        return self._observers.failure

    def listen(self, observer: Observer, *, first: bool = False) -> None:
        """Add an observer; by default the others are told before it."""
        self._observers.add(observer, first=first)

    def tell(self, observer: Observer, moment: str, *args: Any) -> None:
        """Tell one observer alone, as all are told of the moments of a step."""
        self._observers.tell_one(observer, moment, *args)

    def leave(self, observer: Observer) -> None:
        """Remove an observer; do nothing when it is not there."""
        self._observers.remove(observer)

    def loop_was_left(self) -> None:
        """Discard the state of a step that an error has interrupted and that will not be continued."""
        with uninterrupted():
            self._end_own_step()
            for technique in self.techniques:
                technique.broken_off()

    def hand_over(self, thread: int) -> None:
        """Let another thread train, and change plans between its steps.

        Args:
            thread: its number, as from `threading.get_ident`.
        """
        self._thread = thread

    def note(self, text: str, step: int | None = None) -> None:
        """Add an entry to the log, for a step or for now."""
        self.log.append(LogEntry(self._steps + 1 if step is None else step, text))

    def note_once(self, text: str) -> None:
        """Add an entry to the log, unless it is there already."""
        if all(entry.text != text for entry in self.log):
            self.note(text)

    def shares(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer also steps models of other sessions."""
        return any(
            other is not self and any(optimizer is one for one in other.workload.optimizers) for other in sessions()
        )

    def accept(self, rescuer: Rescuer) -> None:
        """Recover the loop from out-of-memory errors from now on."""
        self.rescuer = rescuer
        rescuer.attach(self)

    def dismiss(self) -> None:
        """Stop recovering the loop from out-of-memory errors; do nothing when that is off."""
        if self.rescuer is not None:
            self.rescuer.detach()
        self.rescuer = None

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
        with uninterrupted():
            self._end_own_step()
            if self.rescuer is not None:
                self.rescuer.detach()
            try:
                self.change_plan(Plan(), to_the_end=True)
            except BaseException:
                if self.rescuer is not None:
                    self.rescuer.attach(self)
                raise
            self._hooks.close()

    def __enter__(self) -> Self:
        self._require_attached()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = f"plan {self.plan.label!r}" if self.attached else "undone"
        try:
            on = self.workload.describe()
        except WorkloadError as deleted:
            on = str(deleted)
        return f"<memlab session on {on}: {state}, {self._steps} steps>"

    # -- attaching -----------------------------------------------------------------------------

    def _require_attached(self) -> None:
        if not self.attached:
            raise SessionError("this session is over: make a new one with memlab.fit(workload, plan)")

    def _attach(self) -> None:
        model = self.workload.model
        with uninterrupted(), ExitStack() as hooks:
            _attached[id(model)] = self
            hooks.callback(_attached.pop, id(model), None)
            CallHook(model, self._on_forward).install(hooks)
            for optimizer in self.workload.optimizers:
                self._add_optimizer(optimizer, hooks)
                self._tell("optimizer_found", optimizer)
            on_first_step(self._on_any_step, hooks)
            deleted = weakref.finalize(model, _model_deleted, weakref.ref(self))
            deleted.atexit = False
            hooks.callback(deleted.detach)
            if self.rescuer is not None:
                self.rescuer.attach(self)
            self._hooks = hooks.pop_all()

    def _on_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over an optimizer that is first seen when it steps."""
        if (
            optimizer in self._in_force.optimizers
            or unwrap_optimizer(optimizer) is not optimizer
            or not steps_some_of(optimizer, self.workload.model)
        ):
            return
        if self._is_led:
            # an earlier session has just taken it over, and sees to its state
            self._in_force.change(self.plan)
        self._asked_again(lambda: self._in_force.check_optimizer(optimizer))
        with uninterrupted():
            self._add_optimizer(optimizer, self._hooks)
            self.workload.optimizers.append(optimizer)
            self.note(f"found optimizer {type(optimizer).__name__}")
            self._tell("optimizer_found", optimizer)

    def _add_optimizer(self, optimizer: torch.optim.Optimizer, undo: ExitStack) -> None:
        with ExitStack() as hooks:
            install_step_hooks(optimizer, self._before_step, self._after_step, hooks)
            hooks.callback(optimizer.register_state_dict_post_hook(self._saved_state).remove)
            hooks.callback(optimizer.register_load_state_dict_post_hook(self._loaded_state).remove)
            state_layers.keep_own_form_in_copies(optimizer, self._copied_state, hooks)
            self._in_force.attach_optimizer(optimizer)
            hooks.callback(self._in_force.detach_optimizer, optimizer)
            undo.push(hooks.pop_all())

    def _saved_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_layers.canonical_state_dict(optimizer, state_dict, self.techniques)

    def _copied_state(self, optimizer: torch.optim.Optimizer, copied: dict[str, Any]) -> dict[str, Any]:
        return state_layers.canonical_copy(optimizer, copied, self.techniques)

    def _loaded_state(self, optimizer: torch.optim.Optimizer) -> None:
        state_layers.pack_loaded(optimizer, self.techniques)

    # -- switching -----------------------------------------------------------------------------

    def change_plan(self, plan: Plan, *, noted: bool = True, to_the_end: bool = False, on_trial: bool = False) -> None:
        """Change to another plan at once, from whatever thread training has come to.

        Args:
            plan: the plan.
            noted: write it into the log. A change that is not noted serves the plan that was asked for last.
            to_the_end: a Ctrl-C that comes meanwhile does not take the change back.
            on_trial: as for `switch`.

        Raises:
            RefusalError: a technique does not apply here; the old plan stays in force.
        """
        self._end_own_step()
        require_compatible(self.workload, plan, self.companions)
        with uninterrupted():
            before = self.plan
            self._in_force.change(plan, to_the_end=to_the_end)
            self._model = self.workload.model if self.techniques else None
            if plan == before:
                return
            self._withdrawn = None
            if noted:
                self._before, self._is_on_trial = before, on_trial
                self.note(f"{before.label} → {plan.label}")
            self._tell("plan_changed", plan)

    def falls_back(self, error: BaseException) -> bool:
        """Go back to the plan before, where an error says that a plan on trial does not apply.

        Returns:
            Whether it is back, and the work that raised the error is to be done again.
        """
        if self._before is None or not self._is_trial_over(error):
            return False
        refused, before = self.plan, self._before
        self.change_plan(before, noted=False)
        self._before, self._is_on_trial = None, False
        text = f"refused {refused.label}: {error}; {before.label} is back"
        self.note(text)
        self._tell("plan_refused", refused, error)
        for each in self.companions:
            if each.plan == refused:
                each.ask(before)
        if not self.observers:
            warnings.warn(f"memlab: {text}", RuntimeWarning, stacklevel=2)
        return True

    def _is_trial_over(self, error: BaseException) -> TypeGuard[MemlabError]:
        if not isinstance(error, RefusalError | SessionError):
            return False
        return self._is_on_trial and not error.is_late and not is_loop_known()

    def _withdraw(self, refusal: MemlabError) -> bool:
        if not self._is_trial_over(refusal):
            return False
        self._withdrawn = refusal
        return True

    def _take_withdrawn_out(self) -> None:
        refusal, self._withdrawn = self._withdrawn, None
        if refusal is not None:
            self.falls_back(refusal)

    # -- the model call ------------------------------------------------------------------------

    def _on_forward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        is_transformed = torch._C._are_functorch_transforms_active()
        if is_transformed and self.techniques:
            self.note_once("calls inside of torch.func transforms are left as they are: the plan does not apply there")
        if is_transformed or not (self.workload.model.training and torch.is_grad_enabled()):
            self._was_evaluated |= torch.is_grad_enabled() and not (is_transformed or self.workload.model.training)
            return _through([t.evaluate for t in self.techniques], original, args, kwargs)
        if self._withdrawn is not None:
            self._take_withdrawn_out()
        self.was_called = True
        is_inner = self._own_step is not None and self._own_step_around(sys._getframe()) is not None
        if not (is_inner or self._window_open):
            self._at_boundary()
        self._window_open = True
        batch = Batch(args, kwargs)
        self._tell("forward_begins", batch)
        try:
            output = self._trained(original, args, kwargs)
        except BaseException:
            self._tell("interrupted")
            raise
        if self._observers.all:
            loss = loss_of(output)
            self._tell("forward_ended", loss)
        return output

    def _trained(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            return _through([t.forward for t in self.techniques], original, args, kwargs)

        if not (self._is_on_trial or self._in_force.techniques) and self._rescuing is None:
            return original(*args, **kwargs)
        while True:
            start = Start(self.workload.model, self.workload.device) if self._is_on_trial else None
            rescuer = self._rescuing
            try:
                return run(*args, **kwargs) if rescuer is None else rescuer.call(run, args, kwargs)
            except MemlabError as error:
                if start is None or not self.falls_back(error):
                    raise
            start.restore()

    @property
    def _rescuing(self) -> Rescuer | None:
        """The rescuer, where it can do something: a failed call cannot be taken back within an engine."""
        is_idle = self.rescuer is None or self.rescuer.is_idle or self._in_force.is_engine
        return None if is_idle else self.rescuer

    def _at_boundary(self) -> None:
        self._thread = threading.get_ident()
        self._tell("step_boundary")
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            for each in self.companions:
                check(each.workload, pending)
            self.change_plan(pending, on_trial=True)
            for each in self.companions:
                each.ask(pending)
        except RefusalError as refusal:
            # the loop goes on under the old plan; whoever asked reads it in the log
            self.note(f"refused {pending.label}: {refusal}")
            self._tell("plan_refused", pending, refusal)

    # -- the optimizer step --------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        has_closure = callable(kwargs.get("closure")) or any(map(callable, args[1:]))  # Accelerate passes None
        if self._own_step is not None:
            own = self._own_step_around(sys._getframe(2))  # above the hooked call itself
            if own is not None and own.optimizer is optimizer:
                own.inner_begins()
                return None
        if not has_closure and self._in_force.techniques:
            self._held_back = hold_back(sys._getframe(1))
        try:
            return self._step_taken_over(optimizer, args, kwargs, has_closure=has_closure)
        except BaseException:
            self._hold_back_no_longer()
            raise

    def _step_taken_over(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_closure: bool
    ) -> tuple[Any, Any] | None:
        if self._withdrawn is not None:
            self._take_withdrawn_out()
        if has_closure and self._makes_own_step(optimizer) and not self._window_open:
            self._at_boundary()  # no plan can change in the closure's model call, when state is unpacked
            self._window_open = True
        if self._in_force.techniques:
            self._asked_again(lambda: self._tell_step_begins(optimizer, has_closure=has_closure))
        self._tell("step_begins", optimizer)
        # a closure runs the backward pass, so what it leaves behind is looked at after it
        rescuer = self._rescuing
        is_rescued = rescuer is not None and rescuer.step_begins(optimizer)
        self._skipped = False
        if not (is_rescued or self._in_force.techniques):
            return None
        self._skipped = not has_closure and self._must_skip(optimizer)
        takes_over = any(t.takes_step or t.owns_steps or _changes_the_step(t, optimizer) for t in self.techniques)
        may_skip = has_closure and any(technique.may_skip for technique in self.techniques)
        if not (self._skipped or takes_over or may_skip or is_rescued):
            return None
        if self._makes_own_step(optimizer) and not self._skipped:
            self._own_step = optimizer_step.OwnStep(optimizer, self.techniques, sys._getframe(2))
            return None
        try:
            return optimizer_step.take_over(self._update)(optimizer, args, kwargs)
        except BaseException:
            self._tell("interrupted")
            raise

    def _makes_own_step(self, optimizer: torch.optim.Optimizer) -> bool:
        is_served = optimizer_step.is_separable(optimizer)
        return not (is_served or any(t.owns_steps or t.stepper(optimizer) for t in self.techniques))

    def _own_step_around(self, frame: FrameType) -> optimizer_step.OwnStep | None:
        """Return the step that an optimizer is making itself, around a frame; one that was broken off ends here."""
        if self._own_step is not None and not self._own_step.is_around(frame):
            self._end_own_step()
        return self._own_step

    def _end_own_step(self) -> None:
        own, self._own_step = self._own_step, None
        if own is not None:
            own.close()

    def _tell_step_begins(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        for technique in self.techniques:
            around = technique.changes_state and type(technique).around_update is not Technique.around_update
            needs_whole = technique.may_skip or technique.parameters_visit or around
            if has_closure and needs_whole and self._makes_own_step(optimizer):
                raise RefusalError(
                    technique.field,
                    f"{type(optimizer).__name__} evaluates the model inside its step",
                    f"leave {self.plan.label} out, or call step() without a closure",
                )
            technique.step_begins(optimizer, has_closure=has_closure)

    def _asked_again(self, ask: Callable[[], None]) -> None:
        """Ask the techniques in force, and those of the plan before when one of them refuses on trial."""
        try:
            ask()
        except MemlabError as error:
            if not self.falls_back(error):
                raise
            ask()

    def _must_skip(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(technique.skips_step(optimizer) for technique in self.techniques)

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._skipped or self._must_skip(optimizer):
            self._skipped = True
            self.note("gradients were not finite: update skipped, loss scale halved")
        elif not self._updated(optimizer):
            self._skipped = True
            who = "by the engine" if any(t.owns_steps for t in self.techniques) else "as the loop's own scaler asks"
            self.note(f"gradients were not finite: update skipped, {who}")

    def _updated(self, optimizer: torch.optim.Optimizer) -> bool:
        owner = next((technique for technique in self.techniques if technique.owns_steps), None)
        if owner is not None:
            return owner.step(optimizer)
        rescuer = self._rescuing
        if rescuer is not None and rescuer.is_armed:
            return rescuer.update(optimizer)
        if any(_changes_the_step(technique, optimizer) for technique in self.techniques):
            return optimizer_step.run_step(optimizer, self.techniques)
        # an update that is the loop's own in all but its order has no copies, as in the loop
        return optimizer_step.run_step(optimizer, self.techniques, optimizer_step.share_of(optimizer), backup=False)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        own = self._own_step
        if own is not None and own.optimizer is optimizer:
            if not own.ended():
                return
            self._own_step = None
        rescuer = self._rescuing
        if rescuer is not None:
            rescuer.step_ended()
        if id(optimizer) in self._stepped:
            self.say_what_was_passed_by()
        if not self.was_called:
            self._stepped.add(id(optimizer))
        skipped, self._skipped = self._skipped, False
        for technique in self._in_force.techniques:
            technique.step_ended(optimizer, skipped=skipped)
        self._tell("step_ended", optimizer, skipped)
        self._steps += 1
        self._window_open = False
        self._is_on_trial |= self._before is not None and not is_loop_known()
        if self._held_back is not None:
            self._hold_back_no_longer()

    def _hold_back_no_longer(self) -> None:
        held_back, self._held_back = self._held_back, None
        if held_back is not None:
            held_back.end()

    def say_what_was_passed_by(self) -> None:
        """Note settings that had no effect, once it is known that they had none."""
        if (passed_by := self.passed_by) is not None:
            self.note_once(passed_by)

    @property
    def how_passed_by(self) -> str:
        """In words, how the loop trains the model without calls that settings work around."""
        how = "in eval mode only" if self._was_evaluated else f"without calling it {_WITHOUT_CALL}"
        return f"the loop trains {self.workload.name} {how}"

    @property
    def passed_by(self) -> str | None:
        """Text for settings that work around calls or updates which the loop never makes; else None."""
        if not self.was_called:
            around = [t for t in self.techniques if type(t).forward is not Technique.forward and self._stepped]
            idle = [t for t in around if not (t.changes_modules and t.was_reached)]
            why, advice = (
                self.how_passed_by,
                f"call {'model.train() before' if self._was_evaluated else 'the model itself'}",
            )
        else:
            idle = [] if self.workload.optimizers else [t for t in self.techniques if t.works_on_updates]
            why, advice = f"no optimizer updates {self.workload.name}", "train it with one of torch.optim"
        if not idle:
            return None
        settings = {t.field: getattr(self.plan, t.field) for t in idle}
        if "offload" in settings:  # one field for several techniques
            settings["offload"] = tuple(
                pair for pair in self.plan.offload if any(t.wanted(Plan(offload=(pair,))) for t in idle)
            )
        return f"{replace(Plan(), **settings)} had no effect: {why}; {advice}"


def fit(
    workload: Workload, plan: Plan | str = "", observers: Sequence[Observer] = (), *, rescue: bool | Rescuer = False
) -> Session:
    """Apply a plan to live objects at once.

    Args:
        workload: model and optimizer, see `Workload`.
        plan: a `Plan`, or its flags as text.
        observers: objects that are told about steps, such as a `memlab.measuring.Meter`.
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
        with uninterrupted():
            session = Session(workload, observers, rescuer)
            session.switch(wanted, now=True)
    except BaseException:
        # whoever does not get the session could not undo it
        if session is not None:
            session.undo()
        raise
    return session


def check(workload: Workload, plan: Plan) -> None:
    """Ask every technique of a plan whether it applies, without applying any.

    Raises:
        RefusalError: the first one that does not.
    """
    session = session_of(workload.model)
    coming = [kind(plan) for kind in TECHNIQUES if is_wanted(kind, plan)]
    in_force.check(coming, workload, workload.optimizers, session.techniques if session is not None else ())


def _model_deleted(session: weakref.ref[Session]) -> None:
    """Let the optimizers of a model that is gone go as well; what the session keeps of them is in a cycle with it."""
    alive = session()
    if alive is not None:
        alive._hooks.close()
        alive.workload.optimizers = []
        alive.observers = ()


def session_of(model: nn.Module) -> Session | None:
    """The session attached to a model, or None."""
    return _attached.get(id(model))


def sessions() -> tuple[Session, ...]:
    """Every session that is attached now."""
    return tuple(_attached.values())


def _through(
    wrappers: Sequence[ForwardHandler], original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run a model call through techniques: a Ctrl-C arises in the model's own code, or when they are done."""

    def own(*args: Any, **kwargs: Any) -> Any:
        with interruptible():
            return original(*args, **kwargs)

    if not wrappers:
        return own(*args, **kwargs)
    with uninterrupted():
        return chained(wrappers, own)(*args, **kwargs)


def _changes_the_step(technique: Technique, optimizer: torch.optim.Optimizer) -> bool:
    changes = technique.changes_state or technique.parameters_visit
    return changes or technique.stepper(optimizer) is not None


def _refuse_foreign_engines(workload: Workload) -> None:
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
