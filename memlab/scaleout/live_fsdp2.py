"""FSDP2 in this process.

With one rank a shard is the whole parameter, so the user's parameters show the shards (in host memory when offloaded),
and the user's own optimizer goes on stepping them. FSDP2 hands over a gradient when it has reduced it; it becomes that
of the user's parameter there and then, added to what is there, as a backward pass does.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from memlab.errors import RefusalError
from memlab.scaleout.engines.fsdp2 import shard
from memlab.scaleout.in_kernel import InKernel, on_gradient

Optimizer = torch.optim.Optimizer
State = dict[str, Any]


class LiveFsdp2(InKernel):
    """`fully_shard` on every repeated block and on the whole of a replica."""

    @property
    def _offloads(self) -> bool:
        return bool(self.plan.offload)

    def check(self) -> None:
        super().check()
        for name, parameter in self.workload.model.named_parameters():
            if not parameter.is_contiguous() or not parameter.dim():
                what = "a scalar" if not parameter.dim() else "not contiguous"
                raise RefusalError("scale", f"{name} is {what}, which FSDP2 does not shard", "use --scale zero2")

    def _begin(self, undo: ExitStack) -> None:
        assert self._replica is not None
        shard(self._replica.model, self.device, offloads=self._offloads)
        for name, parameter, sharded in self._replica.parameters():
            if not isinstance(sharded, DTensor):
                raise RefusalError("scale", f"FSDP2 did not shard {name}", "train without --scale")
            self._show(parameter, sharded._local_tensor.detach())
            if sharded.requires_grad:
                undo.callback(on_gradient(sharded, _deliver_to(parameter)))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        assert self._replica is not None
        output = self._replica.model(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.step_ended()
        return output

    def step_ended(self) -> None:
        """The outermost module stays gathered after a forward; what the loop writes next must be gathered anew."""
        assert self._replica is not None
        self._replica.model.reshard()  # type: ignore[operator] # FSDP's module has it

    def give_back(self) -> None:
        # on the device a shard is a tensor of its own already, of the parameter's shape and layout
        if self._offloads:
            super().give_back()

    def _take_over(self, optimizer: Optimizer) -> None:
        if self._offloads:
            _move_state(optimizer, torch.device("cpu"))

    def give_back_optimizer(self, optimizer: Optimizer) -> None:
        if self._offloads:
            _move_state(optimizer, self.device)


def _deliver_to(parameter: nn.Parameter) -> Any:
    def deliver(sharded: torch.Tensor) -> None:
        assert isinstance(sharded.grad, DTensor)
        gradient, sharded.grad = sharded.grad._local_tensor, None
        with torch.no_grad():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    return deliver


def _move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Counters of steps stay where torch keeps them."""
    for parameter, state in list(optimizer.state.items()):
        optimizer.state[parameter] = {
            name: value.to(device) if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in state.items()
        }
