"""Adam and AdamW updated on the host: gradients go down, what is to be added to the parameters comes up.

Eight bytes per parameter cross the link instead of the sixteen of moments that visit the device.

Rules:

1. The host keeps no parameters, so there is none to fall behind when somebody writes to a parameter. torch's fused
   kernel for the CPU updates zeros without weight decay, which gives what is to be added; the device applies weight
   decay and adds. Adam's weight decay is part of the gradient, and is added to it on the device.
2. Small parameters, whose state stays on the device, are updated there by the user's own step.
3. A bucket is updated or it is not: memory is taken first, then the kernel runs, and after it only copies and
   arithmetic in place that need no memory. Ctrl-C waits until it is over.
4. While one bucket is updated, the gradients of the next are on their way.

Equal to the device's own arithmetic within a rounding of the update and one of the sum: at most some 1e-7 of a
parameter and of its update per step.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from memlab.runtime.buckets import counts_on_device
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.optimizer_step import restored_on_failure
from memlab.runtime.ownership import parameters_in
from memlab.runtime.plain_step import plain_stepper
from memlab.runtime.state_layers import SMALL_ELEMENTS
from memlab.techniques.offload.spill import Spill, is_dense
from memlab.techniques.offload.transfers import Ticket, copy_streams_of

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter

_SERVED = (torch.optim.Adam, torch.optim.AdamW)


def is_served(optimizer: Optimizer) -> bool:
    """Return whether the host can do an optimizer's update: exactly torch's Adam or AdamW, and everything in fp32.

    Example:
        >>> parameters = [torch.nn.Parameter(torch.ones(2))]
        >>> is_served(torch.optim.AdamW(parameters)), is_served(torch.optim.SGD(parameters))
        (True, False)
    """
    parameters = [*parameters_in(optimizer)]
    return (
        type(optimizer) in _SERVED
        and not any(group["differentiable"] for group in optimizer.param_groups)
        and bool(parameters)
        and all(p.dtype is torch.float32 and p.layout is torch.strided for p in parameters)
    )


class HostUpdate:
    """Updates a bucket of parameters on the host; a `Stepper` of techniques.

    Example:
        >>> from memlab.plan import Tier
        >>> parameter = torch.nn.Parameter(torch.ones(1024))
        >>> optimizer = torch.optim.AdamW([parameter], lr=0.5, weight_decay=0.0)
        >>> parameter.grad = torch.ones(1024)
        >>> HostUpdate(optimizer, Spill(Tier.DISK))([parameter])
        >>> round(parameter.mean().item(), 6), float(optimizer.state[parameter]["step"])
        (0.5, 1.0)
    """

    is_atomic = True  # a bucket is updated as a whole or not at all, so nobody needs to keep copies

    def __init__(self, optimizer: Optimizer, spill: Spill) -> None:
        # of which `is_served` is true; state lies on the host, with the shape and layout of parameters
        self._optimizer = optimizer
        self._spill = spill  # where new state, gradients and updates lie
        self._gradients: MutableMapping[torch.Tensor, Ticket] = WeakTensorKeyDictionary()
        self._counted: MutableMapping[torch.Tensor, _Counter] = WeakTensorKeyDictionary()

    def begin(self, parameters: Sequence[Parameter]) -> None:
        """Have the gradients of parameters on their way that are updated next."""
        for group in self._optimizer.param_groups:
            for parameter in _large(group, parameters):
                self._gradients[parameter] = self._sent(group, parameter)

    def forget(self) -> None:
        """Drop gradients that nobody came for."""
        for ticket in self._gradients.values():
            ticket.wait()
        self._gradients.clear()

    def __call__(self, parameters: Sequence[Parameter]) -> None:
        small = [parameter for parameter in parameters if parameter.numel() < SMALL_ELEMENTS]
        with deferred_interrupts(), torch.no_grad():
            chosen = [(group, large) for group in self._optimizer.param_groups if (large := _large(group, parameters))]
            updates = [self._prepared(group, large) for group, large in chosen]
            if small:
                with restored_on_failure(self._optimizer, small):
                    plain_stepper(self._optimizer)(small)
            for update in updates:
                update()

    def _prepared(self, group: dict[str, Any], parameters: Sequence[Parameter]) -> Callable[[], None]:
        """Take all memory that an update needs; what makes the update."""
        tickets = [self._gradients.pop(p) if p in self._gradients else self._sent(group, p) for p in parameters]
        fresh = {p: self._fresh(group, p) for p in parameters if not self._optimizer.state.get(p)}
        states = [fresh.get(p) or self._optimizer.state[p] for p in parameters]
        changes = [self._made_for(p).zero_() for p in parameters]
        above = [torch.empty_like(p) for p in parameters]
        counters = [self._counter(p, state["step"]) for p, state in zip(parameters, states, strict=True)]
        steps = [torch.tensor(counter.steps + 1.0, device="cpu") for counter in counters]

        def update() -> None:
            gradients = [ticket.arrived() for ticket in tickets]
            _fused_update(group, changes, gradients, states, steps)
            for p, change, target in zip(parameters, changes, above, strict=True):
                copy_streams_of(p).fetch(target, change).wait()
            if _is_decoupled(group, self._optimizer) and group["weight_decay"]:
                torch._foreach_mul_(list(parameters), 1 - float(group["lr"]) * group["weight_decay"])
            torch._foreach_add_(list(parameters), above)
            for p, state, counter in zip(parameters, states, counters, strict=True):
                counter.count()
                self._optimizer.state[p] = state

        return update

    def _sent(self, group: dict[str, Any], parameter: Parameter) -> Ticket:
        gradient = parameter.grad
        assert gradient is not None
        if group["weight_decay"] and not _is_decoupled(group, self._optimizer):
            sign = -1 if group["maximize"] else 1
            gradient = gradient.detach().add(parameter.detach(), alpha=sign * group["weight_decay"])
        return copy_streams_of(parameter).send(self._made_for(parameter), gradient)

    def _fresh(self, group: dict[str, Any], parameter: Parameter) -> dict[str, Any]:
        """State before the first update, made where it will stay."""
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if counts_on_device(group) else "cpu")
        return {"step": step} | {name: self._made_for(parameter).zero_() for name in names}

    def _made_for(self, parameter: Parameter) -> torch.Tensor:
        """Memory off the device in the layout of a parameter: the kernel walks all tensors side by side."""
        return laid_out_like(self._spill.empty_like(parameter.detach()), parameter)

    def _counter(self, parameter: Parameter, step: torch.Tensor) -> _Counter:
        counter = self._counted.get(parameter)
        if counter is None or not counter.is_of(step):
            counter = self._counted[parameter] = _Counter(step)
        return counter


class _Counter:
    """A step counter of a state and its value, so that reading it needs no wait for the device."""

    def __init__(self, step: torch.Tensor) -> None:
        self.steps = float(step)
        self._step, self._version = step, step._version

    def is_of(self, step: torch.Tensor) -> bool:
        """Return whether it is still this one's, and nobody else has written to it."""
        return step is self._step and step._version == self._version

    def count(self) -> None:
        """One step more, here and there."""
        self._step.add_(1.0)
        self._version = self._step._version
        self.steps += 1.0


def _large(group: dict[str, Any], parameters: Sequence[Parameter]) -> list[Parameter]:
    """Return those parameters of a group that are updated on the host."""
    wanted = {id(parameter) for parameter in parameters if parameter.numel() >= SMALL_ELEMENTS}
    return [parameter for parameter in group["params"] if id(parameter) in wanted]


def _fused_update(
    group: dict[str, Any],
    changes: list[torch.Tensor],
    gradients: list[torch.Tensor],
    states: Sequence[dict[str, Any]],
    steps: list[torch.Tensor],
) -> None:
    """Move moments on, and make of zeros what is to be added to the parameters."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    torch._fused_adamw_(
        changes,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        steps,
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
    )


def _is_decoupled(group: dict[str, Any], optimizer: Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))


def laid_out_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory in the layout that a tensor like the other one has.

    Example:
        >>> images = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
        >>> laid_out_like(torch.empty(2, 3, 4, 4), images).stride() == images.stride()
        True
    """
    # a dense tensor is copied as it lies; to ask torch costs a twin's prediction a millisecond each time
    strides = other.stride() if is_dense(other) else torch.empty_like(other, device="meta").stride()
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)
