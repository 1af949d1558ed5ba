"""Engines in this process: one rank, over the live objects, put on and taken off between two steps.

Rules:

1. The engine has a model of its own (`replica`), with the plan's other techniques on it. The user's modules and
   parameters stay the same objects; while the engine runs, parameters show its data, and their `grad` its gradients.
2. What the loop does to them in place (clipping, scaling, writing weights) is done to the engine's.
3. Giving back leaves the engine as it is, and closing it comes last: a change of plans that fails in between goes back
   to an engine that still runs.
4. Where a call, a backward pass or a step has failed, the engine is in a state of its own making. It is made anew before
   the next call.
5. The process group has one rank and ends with the last engine (`one_rank`).
"""

from __future__ import annotations

import gc
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from memlab.errors import RefusalError
from memlab.plan import Plan, ScaleOut
from memlab.runtime.hooks import chained
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.touch import own_class
from memlab.runtime.tree import tensors_in
from memlab.runtime.workload import Workload
from memlab.scaleout import one_rank
from memlab.scaleout.own_backward import OwnBackward
from memlab.scaleout.replica import Replica, refuse_hooks
from memlab.scaleout.storage_resizes import Resized, tell_resizes
from memlab.session.in_force import InForce
from memlab.techniques.base import ModelCall
from memlab.techniques.scale import LiveEngine

Optimizer = torch.optim.Optimizer


class InProcessEngine(LiveEngine):
    """Base of the engines in this process."""

    passes_each_call = False  # whether it must have run the backward pass of a call before the next call

    def __init__(self, plan: Plan, workload: Workload) -> None:
        self.plan = plan
        self.workload = workload
        self.device = workload.device
        self._undo = ExitStack()
        self._started: Replica | None = None  # the engine's model, from its start to its end
        self._techniques: InForce | None = None
        self._shown_parameters: list[tuple[nn.Parameter, tuple[int, ...]]] = []
        self._optimizers: list[Optimizer] = []
        self._storage_resized: Resized = lambda _storage: None
        self._is_under_way = False  # a call, a backward pass or a step; afterwards, whether one has failed
        self._updates = self._passes = 0
        self._last_call: Callable[[], OwnBackward | None] = lambda: None

    # -- on ------------------------------------------------------------------------------------

    def check(self) -> None:
        one_rank.check()
        name = self.workload.name
        for key, parameter in self.workload.model.named_parameters():
            if own_class(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
                raise RefusalError("scale", f"{key} of {name} is a {type(parameter).__name__}", "train without --scale")
            refuse_hooks(key, parameter)

    def start(self, storage_resized: Resized) -> None:
        self._require_one_device()
        self._storage_resized = storage_resized
        with ExitStack() as undo:
            undo.callback(setattr, self.workload, "trained_on", self.workload.trained_on)
            self.workload.trained_on = self.device
            undo.callback(one_rank.release, self)
            one_rank.hold(self, self.device)
            tell_resizes(storage_resized, undo)
            _ignore_deprecations()
            self._started = Replica(self.workload.model, self.workload.name)
            self._techniques = InForce(Workload(self._started.model, name=self.workload.name))
            self._techniques.change(replace(self.plan, scale=ScaleOut.NONE, offload=()))
            undo.callback(self._techniques.change, Plan())
            self._begin(undo)
            self._undo = undo.pop_all()

    @property
    def _replica(self) -> Replica:
        """Return the model that the engine has taken apart; there is none before it has started."""
        assert self._started is not None
        return self._started

    def _require_one_device(self) -> None:
        tensors = [*self.workload.model.parameters(), *self.workload.model.buffers()]
        devices = sorted({str(tensor.device) for tensor in tensors})
        if len(devices) > 1:
            raise RefusalError("scale", f"{self.workload.name} is on {', '.join(devices)}", "move it to one device")

    def _show(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        """Have a parameter show the engine's data, until that is given back."""
        self._shown_parameters.append((parameter, parameter.stride()))
        show(parameter, data, None if parameter.grad is None else parameter.grad.to(data.device))

    @abstractmethod
    def _begin(self, undo: ExitStack) -> None:
        """Have the engine take the replica apart; `undo` ends it."""

    def add_optimizer(self, optimizer: Optimizer) -> None:
        self._take_over(optimizer)
        self._optimizers.append(optimizer)

    def _take_over(self, optimizer: Optimizer) -> None:
        """Have the engine see to an optimizer's state."""

    # -- training ------------------------------------------------------------------------------

    def call(self, own: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._is_users:
            return own(*args, **kwargs)
        last = self._last_call()
        if self.passes_each_call and not self._is_apart and last is not None and last.waits:
            raise RefusalError(
                "scale",
                f"the loop calls {self.workload.name} again before the backward pass of a call, and parts of it have hooks: "
                f"{self.plan.scale} runs one call at a time",
                "remove the hooks, or use --scale fsdp2",
            )
        again = OwnBackward(
            self.workload.model, own, args, kwargs,
            device=self.device, is_apart=self._is_apart, updates=lambda: self._updates, age=lambda: (self._passes, self._started is None),
        )  # fmt: skip
        self._last_call = weakref.ref(again)
        return again.run(self._trained)

    def _trained(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, list[str]]:
        output, kept = self._called("forward", args, kwargs)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]
        return output, kept

    def evaluate(self, own: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return own(*args, **kwargs) if self._is_users else self._called("evaluate", args, kwargs)[0]

    @property
    def _is_apart(self) -> bool:
        """Return whether the engine's graph is kept apart from the loop's; what hooks keep of it would not be found there."""
        return not any(
            module._forward_hooks for module in self.workload.model.modules() if module is not self.workload.model
        )

    @property
    def _is_users(self) -> bool:
        """Return whether the loop calls the model with weights, or on tensors, that an engine does not know (`torch.func`)."""
        return torch._C._are_functorch_transforms_active() or any(
            not isinstance(tensor, nn.Parameter)
            for module in self.workload.model.modules()
            for tensor in module._parameters.values()
            if tensor is not None
        )

    def _called(self, moment: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, list[str]]:
        self._recover()
        assert self._techniques is not None
        call = chained([getattr(technique, moment) for technique in self._techniques.techniques], self._run)
        self._replica.follow()
        with self._under_way():
            try:
                output = call(*args, **kwargs)
            finally:
                kept = self._replica.carry_back()
        return output, kept

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        self._is_under_way = True
        yield
        self._is_under_way = False

    def _backward_begins(self, _gradient: torch.Tensor) -> None:
        if not self._is_under_way:
            self._is_under_way = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._is_under_way = False
        self._passes += self.passes_each_call

    def _recover(self) -> None:
        """An engine in which something has failed is made anew; weights, moments and gradients are with the user."""
        if self._started is not None and not self._is_under_way:
            return
        with deferred_interrupts():
            optimizers = self._optimizers
            for optimizer in optimizers if self._started is not None else ():
                self.give_back_optimizer(optimizer)
            self.give_back()
            self.close()
            self.start(self._storage_resized)
            for optimizer in optimizers:
                self.add_optimizer(optimizer)

    def step_ended(self) -> None:
        self._updates += 1

    @abstractmethod
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model under the engine."""

    # -- off -----------------------------------------------------------------------------------

    def give_back(self) -> None:
        if self._started is None:
            return
        values = [
            torch.empty_strided(shown.shape, stride, dtype=shown.dtype, device=self.device).copy_(shown.detach())
            for shown, stride in self._shown_parameters
        ]
        gradients = [None if p.grad is None else p.grad.to(self.device, copy=True) for p, _ in self._shown_parameters]
        for (parameter, _), value, gradient in zip(self._shown_parameters, values, gradients, strict=True):
            show(parameter, value, gradient)

    def close(self) -> None:
        self._undo.close()
        self._started = self._techniques = None
        self._shown_parameters, self._optimizers, self._is_under_way = [], [], False
        # engines are full of cycles
        gc.collect()

    @property
    def host_bytes(self) -> int:
        if self.device.type == "cpu":
            return 0
        return sum(tensor.nbytes for tensor in self._tensors() if tensor.device.type == "cpu")

    def _tensors(self) -> Iterator[torch.Tensor]:
        for parameter, _ in self._shown_parameters:
            yield from (parameter, *(() if parameter.grad is None else (parameter.grad,)))
        for optimizer in self.workload.optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


def on_gradient(parameter: torch.Tensor, called: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Have something called whenever a gradient of a parameter is complete. Returns what takes that back."""
    handle: Any = parameter.register_post_accumulate_grad_hook(called)  # type: ignore[no-untyped-call]
    remove: Callable[[], None] = handle.remove
    return remove


def show(parameter: nn.Parameter, data: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Give a parameter other data and another gradient, which may be on another device than before."""
    parameter.grad = None
    parameter.data = data
    parameter.grad = gradient


def _ignore_deprecations() -> None:
    """DeepSpeed calls functions of torch by names that torch warns of, within the loop's own backward pass."""
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    filters = cast("list[Any]", warnings.filters)
    entry = filters[0]
    one_rank.at_end(lambda: filters.remove(entry) if entry in filters else None)
