"""Gradient release: parameters are updated inside the backward pass, and each gradient is freed once it is used.

Numbered rules of the mechanism:

1. A hook on each parameter says when its gradient is complete for this backward pass. Complete gradients wait until
   they are a thirty-second of the model's, so that kernels have something to do; then these parameters are updated,
   by the same code as in a step, and their gradients are gone; those that still wait are when the pass ends.
2. The update is the loop's own, with learning rates as they are in the backward pass. It is the right one for loops
   that make one backward pass per step and do nothing with gradients in between. Whether a loop is one is not to be
   seen from outside, so the *first step of each optimizer is watched*: it keeps its gradients to the end, as without
   this technique, and a loop that is none gets a `RefusalError` before anything is different from the loop as written.
   The step itself frees them as it goes, so that fresh moments take the place of gradients. Where the plan is on trial, as one is that
   a running loop was given by a click, twenty steps are watched, and the loop's code is read (`later_uses`): what a loop does now and
   then only, as showing the norm of gradients or clipping from some step on, is met before an update cannot be taken back. What is
   measured meanwhile is forgotten.
   The watch begins at the model's call; gradients of steps without one (a loop that calls parts of the model) are kept.
3. Refused are: a second backward pass before the step (accumulation in the loop); gradients that are read or written
   between backward and step (clipping by the norm of all of them, a `GradScaler`); `autograd.grad` through the weights there; learning rates and moments that are
   changed there; steps with a closure. A loop that begins with any of it later is told so by the same error, which then says that
   parameters were updated already. On trial (`Session`) and before any parameter was updated, the technique stands back
   instead, and the loop goes on under the plan before.
4. memlab's own loops (measurements, predictions) are known, and not watched.
5. With accumulation of the plan's own, gradients are complete when the last micro-batch is through.
6. A backward pass in which parameters have been updated is completed before a Ctrl-C is delivered: all of them are updated
   then, as after `step()`. (The other way, to give the updated ones their old values back, would take copies of them.)
7. A loop that was left in the middle of a step, by Ctrl-C, by an error in the backward pass or by a refusal, is a new loop
   when it goes on: what was under way is forgotten, and its first step is watched.
8. Gradients of parameters that two optimizers hold are kept: which one updates next is not to be seen in the backward pass. A
   loop may make the second one at any time, so `add_param_group` is watched, which every new optimizer calls.
9. After `step()` the loop's `.grad` reads as a `Gone` until the loop drops or zeroes it, which it must do in every step:
   what reads the values gets a `RefusalError`, and so does a backward pass or a step that would use them once more.
10. A look from another cell than the step's, or than the backward pass's, is no loop's: it changes nothing of what is under
   way, and gets the gradient while that is there, or the same refusal each time.
11. Gradients that are gone and were not dropped when the plan goes are watched on (`leftover`).

An update that a backward pass has made cannot be made undone. A rescue therefore repeats forward passes only; and when
an update breaks off in its middle, the next gradient is answered by an error instead of being counted twice.

Known limitations: what reads gradients from compiled code or from another thread is not seen, and meets None. An error in the backward pass itself, in a hook of the loop's say, leaves those parameters updated whose turn had
come: a loop that goes on after it is refused, and in a later cell the notes say so. On a GPU a Ctrl-C never comes into the middle of a backward pass.

The mechanism of torch: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from memlab.errors import RefusalError, SessionError
from memlab.plan import Plan
from memlab.runtime import optimizer_step
from memlab.runtime.backward import is_in_backward
from memlab.runtime.buckets import is_separable, share_of, size_of
from memlab.runtime.graphs import leaves_of
from memlab.runtime.interrupts import Listener, deferred_interrupts, listen
from memlab.runtime.lifetimes import called_while_alive, gradient_is_held, overlap, storage_of
from memlab.runtime.mechanisms import EarlyUpdates, Updating
from memlab.runtime.own_steps import is_own_step
from memlab.runtime.ownership import parameters_in
from memlab.runtime.state_entries import PackedState, kept_of
from memlab.runtime.state_layers import order_state
from memlab.runtime.workload import Workload
from memlab.techniques.base import Description, ModelCall, Reduces, Technique, Traits, process_count
from memlab.techniques.gradient_release import reasons
from memlab.techniques.gradient_release.groups import hear_no_more, hear_of_groups, hearing
from memlab.techniques.gradient_release.later_uses import use_of_gradients
from memlab.techniques.gradient_release.leftover import leftover
from memlab.techniques.gradient_release.watch import Gone, Watch, where
from memlab.techniques.offload.spill import is_spilled

_STEPS_ON_TRIAL = 20  # what loops do now and then, as logging, is mostly done within these

Optimizer = torch.optim.Optimizer
Settings = list[dict[str, Any]]
Entry = tuple[int, list[int]] | None


@dataclass
class _Step:
    """One step of an optimizer, since its first gradient."""

    settings: Settings  # of its groups, as the backward pass found them
    known: int  # how many entries its state had
    share_bytes: int  # how much waits before it is updated, as buckets are counted
    waiting: list[nn.Parameter] = field(default_factory=list)  # parameters with complete gradients
    waiting_bytes: int = 0  # their size, likewise
    has_released: bool = False  # whether parameters have been updated already
    # their moments as the update has left them, or as they were when the gradient of a watched step was complete
    entries: dict[int, Entry] = field(default_factory=dict)

    def add(self, parameter: nn.Parameter) -> None:
        self.waiting.append(parameter)
        self.waiting_bytes += size_of(parameter)

    def take(self) -> list[nn.Parameter]:
        parameters, self.waiting, self.waiting_bytes = self.waiting, [], 0
        self.has_released = True
        return parameters


class GradientRelease(Technique, Updating, EarlyUpdates):
    """Update inside the backward pass; see the module for the rules and the known limitations.

    Over 300 lines: all rules ask the same sets, of which gradients are complete, used or gone.
    """

    field = "gradients"
    traits = Traits(Reduces.MODEL_STATES)
    descriptions = (
        Description(
            flags="--release-grads",
            saves="gradients: at a time there is at most 1/32 of them, or the largest one",
            costs="many small updates during the backward pass",
            exactness="bit for bit",
            gives_nothing="the peak is at the end of the forward pass; with --accumulate; refused for loops that clip, accumulate or look at gradients by hand",
        ),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.only_watches = True
        self._owners: dict[int, Optimizer | None] = {}  # by id of the parameter; None for one that two update
        self._heard: set[int] = set()  # parameters with a hook
        self._complete: set[int] = set()  # parameters whose gradient of this step is complete
        self._is_called_between = False  # the model, when some of them were
        self._steps: dict[Optimizer, _Step] = {}  # under way: from the first gradient to the end of `step()`
        self._steps_to_watch = 0  # of each optimizer; known from the first call on
        self._watched: Counter[Optimizer] = Counter()  # steps of theirs that were
        self._releases = False  # whether that is over
        self._is_known = False
        self._is_broken = False
        self._is_withdrawn = False
        self._was_left = False  # the loop, in the middle of a step, whose gradients may be there when it goes on
        self._was_called = False  # the model, since a step: the call is where watching begins
        # in a watched step, parameters with a gradient that the loop has not dropped since its call
        self._adding: set[int] = set()
        self._as_completed: dict[int, tuple[int, int]] = {}  # place and version of gradients that a watched step keeps
        self._used: set[int] = set()  # parameters whose gradient was in a step and which the loop has not dropped since
        self._gone: set[int] = set()  # parameters whose gradient was freed and which the loop has not written since
        self._lock = threading.RLock()  # hooks run on one thread for each device
        # backward passes under way with complete gradients, by number of their graph task
        self._passes: set[int] = set()
        self._put_off: Callable[[], None] | None = None  # delivers a Ctrl-C that came into the middle of one
        self._watch = Watch(self._touched, self._written, self._differentiated)
        self._watched_thread: object = None  # what is done with gradients in others is not seen
        self._listener: Listener | None = None
        self._refused: tuple[int, RefusalError] | None = None  # and the thread whose work that has ended

    @property
    def updates_in_backward(self) -> bool:  # type: ignore[override]
        return not self._is_withdrawn and (any(map(self._is_seen, self._watched)) or is_own_step())

    # -- whether it applies --------------------------------------------------------------------

    def check(self, workload: Workload) -> None:
        if process_count() > 1:
            raise RefusalError(
                self.field,
                "several processes train together, and a gradient is complete here before the others have added theirs",
                "use the engine's own sharding of gradients (ZeRO-2, FSDP2)",
            )
        model = workload.model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        others = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        if overlap(trained, [*others, *model.buffers()]):
            raise RefusalError(
                self.field,
                f"two weights of {workload.name} have their values in one place (tied by .data), and the update of one would "
                "come before the other's gradient is computed",
                f"tie them by making both one parameter, or {reasons.LEAVE_OUT}",
            )
        if self.host.accumulates():
            raise RefusalError(self.field, *reasons.ADDED_UP)
        own = {id(parameter) for parameter in workload.model.parameters()}
        if any(each is not self.host.predecessor(self) and not own.isdisjoint(each._owners) for each in hearing):
            raise RefusalError(
                self.field,
                f"{workload.name} has parameters of a model that is under --release-grads already",
                "undo that first (%memfit undo all)",
            )

    def check_optimizer(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if not is_separable(optimizer):
            raise RefusalError(
                self.field,
                f"{name} is not known to update each parameter independently of all others",
                "use an optimizer of torch.optim other than LBFGS",
            )
        if any(not _is_own(hook) for hook in optimizer._optimizer_step_pre_hooks.values()):
            raise RefusalError(
                self.field,
                f"{name} has a step pre-hook, which comes when gradients are gone",
                f"remove the hook, or {reasons.LEAVE_OUT}",
            )

    # -- in and out ----------------------------------------------------------------------------

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        undo.callback(self._forget)
        hear_of_groups(self, undo)
        for parameter in workload.model.parameters():
            self._hear_of(parameter, undo)
        if self.plan.accumulation > 1:
            self.notes.append(reasons.SPLIT)

    def _hear_of(self, parameter: torch.Tensor, undo: ExitStack) -> None:
        if parameter.requires_grad and id(parameter) not in self._heard:
            self._heard.add(id(parameter))
            undo.callback(self._heard.discard, id(parameter))
            completed = called_while_alive(self._completed)  # hooks are no reason to keep a session
            undo.callback(parameter.register_post_accumulate_grad_hook(completed).remove)  # type: ignore[no-untyped-call]

    def attach_optimizer(self, optimizer: Optimizer, undo: ExitStack) -> None:
        undo.callback(self._forget_optimizer, optimizer)
        for parameter in parameters_in(optimizer):
            # what is no part of the model is updated with it, so that a Ctrl-C finds all updated or none
            if not any(id(parameter) in other._heard for other in hearing):
                self._hear_of(parameter, undo)
            if self._owners.setdefault(id(parameter), optimizer) is not optimizer:
                self._owners[id(parameter)] = None

    def group_added(self, optimizer: Optimizer) -> None:
        """An optimizer has got one more group of parameters, which another one may update already."""
        for parameter in optimizer.param_groups[-1]["params"]:
            if self._owners.get(id(parameter), optimizer) is not optimizer:
                self._owners[id(parameter)] = None
                self.notes.once(reasons.SHARED)

    def _forget_optimizer(self, optimizer: Optimizer) -> None:
        not_dropped = self._gone & self._used
        leftover.add(parameter for parameter in parameters_in(optimizer) if id(parameter) in not_dropped)
        for parameter in parameters_in(optimizer):
            self._owners.pop(id(parameter), None)
        self._close(optimizer)
        self._watched.pop(optimizer, None)

    def _forget(self) -> None:
        self._watch_no_more()
        self._complete.clear()
        self._is_called_between = False
        self._steps.clear()
        self._passes.clear()
        self._as_completed.clear()
        self._adding.clear()
        self._used.clear()
        self._gone.clear()
        self._put_off = None

    def _watch_loop(self) -> None:
        """See what the loop does with gradients, and hear when it is left."""
        self._watch.begin()
        self._watched_thread = _this_thread()
        if self._listener is None or self._listener.is_spent(None):
            self._listener = listen(self._interrupted)

    def _watch_no_more(self) -> None:
        self._watch.end()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.remove()

    # -- a loop that is left -------------------------------------------------------------------

    def _interrupted(self, deliver: Callable[[], None]) -> None:
        """A Ctrl-C, while the loop is in a step or has not come to drop its gradients."""
        if self._passes and is_in_backward() and self._has_released:
            self._put_off = deliver
            return
        self.broken_off()
        deliver()

    def broken_off(self) -> None:
        self._forget()
        self._watched.clear()
        self._was_left = True

    def _notice_broken_pass(self) -> None:
        """An error has ended a backward pass, and nobody said so.

        Raises:
            RefusalError: it has come to a loop that goes on, as one that skips a batch, when some weights were updated.
        """
        if not self._passes or is_in_backward():
            return
        if self._has_released and not (self._watch.is_resumed or self._is_broken):
            raise self._refusal("the loop goes on after an error has ended a backward pass", reasons.LEAVE_OUT)
        if self._has_released:
            self.notes.append(
                "a backward pass broke off when some parameters had been updated already and others had not; they are one "
                "update ahead of the others from then on"
            )
        self.broken_off()

    @property
    def _has_released(self) -> bool:
        return any(step.has_released for step in self._steps.values())

    # -- a step --------------------------------------------------------------------------------

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if is_in_backward():  # recomputed in a backward pass
            return call(*args, **kwargs)
        self._notice_broken_pass()
        self._watch_no_more()
        self._was_called = True
        self._is_called_between |= bool(self._complete)
        self._is_known = is_own_step()
        if not self._is_known:
            self._begin_watching()
        if self._used and not self._is_known and self._watched_thread is not _this_thread():
            raise self._refusal(
                "the loop goes on in another thread, and whether it has dropped the gradients of the step before was not seen",
                f"drop them right after step(), or {reasons.LEAVE_OUT}",
            )
        if self._is_known:  # nobody watches what becomes of the loop's gradients around these steps
            self._used.clear()
            self._gone.clear()
        output = call(*args, **kwargs)
        if self._owners and not self._is_known:  # without an optimizer no gradient is anybody's
            self._adding = set() if self._was_left else set(self._gradients_there())
            self._watch_loop()
        return output

    def _begin_watching(self) -> None:
        if not self._steps_to_watch:
            is_clicked = self.host.on_trial() and not self.host.of_rescue()
            if is_clicked and (use := use_of_gradients(sys._getframe())) is not None:
                raise RefusalError(self.field, reasons.LATER_USE.format(use=use), reasons.LEAVE_OUT)
            self._steps_to_watch = _STEPS_ON_TRIAL if is_clicked else 1
        elif not self._releases and all(map(self._is_seen, self._updating())):
            self._releases = True
            if self._steps_to_watch > 1:
                self.host.only_watched()

    def _is_seen(self, optimizer: Optimizer) -> bool:
        return self._watched[optimizer] >= self._steps_to_watch > 0

    def _updating(self) -> set[Optimizer]:
        return {optimizer for optimizer in self._owners.values() if optimizer is not None}

    def _gradients_there(self) -> Iterator[int]:
        """Parameters whose gradient has values already, of those whose step is watched, by id."""
        own = (
            p
            for optimizer in self._updating()
            if not self._is_seen(optimizer)
            for p in parameters_in(optimizer)
            if id(p) not in self._gone
        )
        there = [(id(p), p.grad) for p in own if p.grad is not None and not p.grad.is_sparse]
        if there:
            home = there[0][1].device
            counts = torch.stack([gradient.count_nonzero().to(home) for _, gradient in there]).tolist()
            yield from (key for (key, _), count in zip(there, counts, strict=True) if count)

    def evaluate(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._is_called_between |= bool(self._complete) and not is_in_backward()
        return call(*args, **kwargs)

    def _completed(self, parameter: nn.Parameter) -> None:
        """The gradient of a parameter is complete."""
        with deferred_interrupts(), self._lock:
            if self._is_withdrawn:
                return
            if id(parameter) in self._used:
                self._refuse(
                    "the loop does not drop the gradients of the step before, so that they add up", reasons.LEAVE_OUT
                )
                return
            self._gone.discard(id(parameter))
            optimizer = self._owners.get(id(parameter))
            if optimizer is None or not self._was_called:
                return
            if self._is_broken:
                raise _broken()
            # of two optimizers one may have its gradients still, and those of the other come first
            if id(parameter) in self._complete or (self._is_called_between and not self._has_released):
                self._refuse(*reasons.ADDED_UP)
                return
            if id(parameter) in self._adding:
                self._refuse(
                    "the loop adds to the gradients that an earlier backward() has left", reasons.USE_ACCUMULATE
                )
                return
            step = self._steps.get(optimizer) or self._begin_step(optimizer)
            self._hear_of_its_end()
            self._complete.add(id(parameter))
            if self._is_seen(optimizer) or self._is_known:
                step.add(parameter)
                if step.waiting_bytes >= step.share_bytes:
                    self._release(optimizer, step)
            else:
                with self._watch.paused():
                    self._as_completed[id(parameter)] = _state_of_gradient(parameter)
                step.entries[id(parameter)] = _entry_of(optimizer, parameter)

    def _hear_of_its_end(self) -> None:
        """Have `_pass_ended` called when the backward pass that is under way is over."""
        number = torch._C._current_graph_task_id()
        if number not in (-1, *self._passes):
            self._passes.add(number)
            ended = called_while_alive(self._pass_ended)
            torch.autograd.Variable._execution_engine.queue_callback(partial(ended, number))

    def _pass_ended(self, number: int) -> None:
        with deferred_interrupts(), self._lock:
            for optimizer, step in list(self._steps.items()):
                if step.has_released and step.waiting:
                    self._release(optimizer, step)
            self._passes.discard(number)
            deliver, self._put_off = self._put_off, None
            if deliver is not None:
                self.broken_off()
        if deliver is not None:
            deliver()

    def _begin_step(self, optimizer: Optimizer) -> _Step:
        """The first gradient for an optimizer since its step."""
        if not self._is_known:
            self.notes.once(reasons.watching(self._steps_to_watch))
        step = self._steps[optimizer] = _Step(_settings_of(optimizer), len(optimizer.state), share_of(optimizer))
        return step

    def _release(self, optimizer: Optimizer, step: _Step) -> None:
        """Update the parameters that wait, and free their gradients."""
        self.only_watches = False
        parameters = step.take()
        try:
            with self._watch.paused():
                self.host.gradients_complete()
                optimizer_step.update(optimizer, parameters, self.host.techniques())
        except BaseException:
            self._is_broken = True
            raise
        for parameter in parameters:
            step.entries[id(parameter)] = _entry_of(optimizer, parameter)
            self._drop(parameter)

    def _drop(self, parameter: nn.Parameter) -> None:
        """Free a gradient that has been used."""
        parameter.grad = None
        if not self._is_known:
            self._gone.add(id(parameter))

    def step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        refused, self._refused = self._refused, None
        if refused is not None and refused[0] != threading.get_ident():
            raise refused[1]  # a thread of the loop has ended with it, and its gradients are not there
        self._notice_broken_pass()
        self._watch_no_more()
        if has_closure:
            raise self._refusal(*reasons.CLOSURE)
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise self._refusal(*reasons.SCALED)
        if self._is_called_between:
            raise self._refusal(
                "the loop calls the model between backward() and step(), when weights are others", reasons.LEAVE_OUT
            )
        step = self._steps.get(optimizer)
        if step is not None and step.settings != _settings_of(optimizer):
            raise self._refusal(
                "the loop changes the optimizer's settings (its learning rate?) between backward() and step()",
                "change them before backward() or after step()",
            )
        for parameter in parameters_in(optimizer):
            if step is not None and step.entries.get(id(parameter), entry := _entry_of(optimizer, parameter)) != entry:
                raise self._refusal(*reasons.OTHER_MOMENTS)
            completed = self._as_completed.pop(id(parameter), None)
            if completed not in (None, _state_of_gradient(parameter)) and not _was_moved(parameter.grad):
                raise self._refusal(*reasons.WRITTEN_LATER)
            if completed is not None and not _was_moved(parameter.grad) and gradient_is_held(parameter):
                raise self._refusal(*reasons.HELD)
            if id(parameter) in self._gone and id(parameter) not in self._complete:
                if id(parameter) in self._used:
                    raise self._refusal(
                        "the loop steps once more with the gradients of the step before", reasons.LEAVE_OUT
                    )
                parameter.grad = torch.zeros_like(parameter)  # the loop has zeroed it, and moments and decay go on

    def bucket_updated(self, optimizer: Optimizer, parameters: Any) -> None:
        if not (self._is_known or self._is_seen(optimizer)) and self.host.on_trial():
            return  # whether the loop drops them itself is seen in the next step
        for parameter in parameters:
            if id(parameter) in self._complete:
                self._drop(parameter)

    def close(self) -> None:
        hear_no_more(self)  # where the change to this plan was taken back, nothing has undone it

    def step_ended(self, optimizer: Optimizer, *, skipped: bool) -> None:
        if optimizer in self._steps and not self._is_known:
            self._watched[optimizer] += 1
        self._was_left = False
        if not self._is_known:
            self._used |= self._complete.intersection(map(id, parameters_in(optimizer)))
        self._close(optimizer)
        self._was_called = False
        if self._complete or self._used or self._gone:
            self._watch_loop()

    def _close(self, optimizer: Optimizer) -> None:
        """The step of an optimizer is over."""
        self._complete.difference_update(map(id, parameters_in(optimizer)))
        step = self._steps.pop(optimizer, None)
        if step is not None and len(optimizer.state) > step.known:
            order_state(optimizer, step.known)

    # -- what the loop does with gradients -----------------------------------------------------

    def _touched(self, tensor: torch.Tensor, written: tuple[Any, ...] | None) -> Gone | None:
        """The loop reads or writes a gradient.

        Args:
            tensor: whose gradient it is.
            written: what it becomes; empty where it is deleted, None where it is read.

        Returns:
            What the loop gets, or puts back, in place of a gradient that is gone, or would be from the next step on.
        """
        if self._is_withdrawn:
            return None
        self._adding.discard(id(tensor))  # it is dropped, or the loop's own matter
        self._notice_broken_pass()
        if id(tensor) in self._complete:
            done = reasons.what_is_done()
            if written is None and self._watch.is_resumed and done[0].startswith(reasons.USED_BETWEEN):
                self._refuse_look(reasons.FREED_EARLY + (reasons.UPDATED if self._has_released else ""))
            else:
                self._refuse(*done)
        if written is None or any(isinstance(value, Gone) for value in written):
            if id(tensor) in self._gone:
                return Gone(tensor, id(tensor), weakref.ref(self))
            if id(tensor) in self._used and tensor.grad is not None:
                return Gone(tensor, id(tensor), weakref.ref(self), kept=tensor.grad)
        self._used.discard(id(tensor))
        self._gone.discard(id(tensor))
        return None

    def _written(self, tensors: Sequence[torch.Tensor]) -> None:
        """The loop writes to tensors, perhaps to weights that would be updated by then."""
        if not self._complete or self._is_withdrawn:
            return
        # within transforms of torch.func, and of other layouts, tensors have no storage
        places = {storage_of(tensor) for tensor in tensors if torch._C._has_storage(tensor)}
        updated = [(step, p) for step in self._steps for p in parameters_in(step) if id(p) in self._complete]
        if any(storage_of(parameter) in places for _, parameter in updated):
            self._refuse(
                f"the loop writes to weights between backward() and optimizer.step(){where()}, when they would be updated",
                f"do that before the forward pass or after step(), or {reasons.LEAVE_OUT}",
            )
        moments = (value for step, p in updated for value in kept_of(step.state.get(p) or {}).values())
        if any(torch.is_tensor(moment) and storage_of(moment) in places for moment in moments):
            self._refuse(*reasons.OTHER_MOMENTS)

    def gone_zeroed(self, parameter: int) -> None:
        """The loop has zeroed a gradient that is gone."""
        self._used.discard(parameter)

    def gone_read(self) -> None:
        """The loop uses the values of a gradient that is gone, or that would be from the next step on."""
        if self._watch.is_resumed:
            if self._gone:
                self._refuse_look(reasons.FREED)
            return
        reason = f"the loop uses gradients after optimizer.step(){where()}, when they are gone"
        if self._gone:
            refusal = self._refusal(reason, reasons.LEAVE_OUT)
            self.host.refused(refusal)
            raise refusal
        self._refuse(reason, reasons.LEAVE_OUT)

    def _differentiated(self, outputs: Any) -> None:
        """The loop asks for gradients of its own, perhaps through weights that would be updated by then."""
        if not self._complete or self._is_withdrawn:
            return
        # a tensor, a gradient edge, which is a tuple by itself, or several of either
        is_one = isinstance(outputs, (torch.Tensor, GradientEdge))
        if any(id(leaf) in self._complete for leaf in leaves_of([outputs] if is_one else outputs)):
            self._refuse("the loop calls autograd.grad() between backward() and optimizer.step()", reasons.LEAVE_OUT)

    def _refuse_look(self, reason: str) -> None:
        """Refuse what `_refuse` does, from another cell: what is under way goes on as if there had been no look."""
        refusal = RefusalError(
            self.field,
            reason,
            reasons.LEAVE_OUT_BEFORE,
            is_late=self._has_released or bool(self._gone),
            in_loop=True,
        )
        if not self.host.withdraw(refusal, as_on_trial=not refusal.is_late):
            raise refusal
        self._is_withdrawn = True

    def _refuse(self, reason: str, nearest: str) -> None:
        """Stand back, where the plan before can come back; else raise the refusal."""
        refusal = self._refusal(reason, nearest)
        # a cell of its own is no loop that asked for the plan
        if not self.host.withdraw(refusal, as_on_trial=self._watch.is_resumed and not refusal.is_late):
            # another error: the one that is raised keeps the loop's variables alive
            again = RefusalError(self.field, refusal.reason, nearest, is_late=refusal.is_late, in_loop=True)
            self._refused = (threading.get_ident(), again)
            raise refusal
        self._is_withdrawn = True

    def _refusal(self, reason: str, nearest: str) -> RefusalError:
        has_released = self._has_released
        if has_released:
            reason += reasons.UPDATED
        is_late = has_released or not self._used.isdisjoint(self._gone)
        self.broken_off()
        # raised where the loop touches a gradient
        return RefusalError(self.field, reason, nearest, is_late=is_late, in_loop=True)


def _state_of_gradient(parameter: torch.Tensor) -> tuple[int, int]:
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse:
        return (-1, -1)
    return storage_of(gradient), gradient._version


def _entry_of(optimizer: Optimizer, parameter: torch.Tensor) -> Entry:
    """Return what tells an entry of the optimizer's state from another one, and its tensors from others."""
    entry = optimizer.state.get(parameter)
    if not entry:
        return None
    # one that was read is in another form until the next update
    packed = entry.closed if isinstance(entry, PackedState) and entry.closed is not None else entry
    return id(entry), [id(value) for value in kept_of(packed).values() if torch.is_tensor(value)]


def _was_moved(gradient: torch.Tensor | None) -> bool:
    """Return whether offload has taken a gradient off the device, once it was complete."""
    if gradient is None or gradient.layout is not torch.strided:
        return False
    return is_spilled(gradient.untyped_storage())


def _broken() -> SessionError:
    error = SessionError(
        "an update inside the backward pass broke off before, and some weights and moments are partly updated: go back "
        "to a checkpoint, undo() the session and attach memlab anew"
    )
    error.is_late = True
    return error


_threads = threading.local()


def _this_thread() -> object:
    """Return what stands for this thread: numbers of threads are used again when one has ended."""
    if not hasattr(_threads, "mark"):
        _threads.mark = object()
    return _threads.mark


def _is_own(hook: Any) -> bool:
    return type(getattr(hook, "__self__", None)).__module__.startswith("memlab.")


def _settings_of(optimizer: Optimizer) -> Settings:
    """Settings of each group; tensors among them by what they are and how often they were written."""
    return [
        {name: _told(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def _told(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    return tuple(map(_told, value)) if isinstance(value, (list, tuple)) else value
