"""FSDP2: parameters, gradients and optimizer state in shards, a block gathered while it is used.

Source: `torch.distributed.fsdp.fully_shard`, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from memlab.errors import RefusalError
from memlab.runtime.modules import repeated_blocks
from memlab.scaleout import tensors
from memlab.scaleout.engines.base import Engine
from memlab.scaleout.in_process import InProcessEngine, on_gradient

Optimizer = torch.optim.Optimizer


class Fsdp2(Engine):
    """`fully_shard` on every repeated block and on the whole, on a rank."""

    @property
    def _offloads(self) -> bool:
        return bool(self.scale.plan.offload)

    def _place(self) -> None:
        shard(self.inner, self.device, offloads=self._offloads)
        self._allocate()

    def _allocate(self) -> None:
        self.workload.model._apply(self._with_memory)  # type: ignore[no-untyped-call]

    def _with_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        home = torch.device("cpu") if self._offloads and isinstance(tensor, DTensor) else self.device
        return torch.empty_like(tensor, device=home) if tensor.is_meta else tensor.to(home)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self.inner, *args, **kwargs)

    def save(self, folder: Path) -> None:
        tensors.store(tensors.all_of(self.workload), folder, together=True)


class LiveFsdp2(InProcessEngine):
    """The same in this process, on a replica.

    With one rank a shard is the whole parameter, so the user's parameters show the shards (in host memory when offloaded),
    and the user's own optimizer goes on stepping them. FSDP2 hands over a gradient when it has reduced it; it becomes that
    of the user's parameter there and then, added to what is there, as a backward pass does.
    """

    @property
    def _offloads(self) -> bool:
        return bool(self.plan.offload)

    def check(self) -> None:
        super().check()
        for name, parameter in self.workload.model.named_parameters():
            if not parameter.is_contiguous() or not parameter.dim():
                what = "a scalar" if not parameter.dim() else "not contiguous"
                raise RefusalError("scale", f"{name} is {what}, which FSDP2 does not shard", "use --scale zero2")
            attributes = [attribute for attribute in vars(parameter) if not attribute.startswith("_")]
            if attributes:
                raise RefusalError(
                    "scale",
                    f"{name} has the attribute .{attributes[0]}, which FSDP2 leaves off the parameters that it makes",
                    "use --scale zero2",
                )

    def _begin(self, undo: ExitStack) -> None:
        shard(self._replica.model, self.device, offloads=self._offloads)
        for name, parameter, sharded in self._replica.parameters():
            if not isinstance(sharded, DTensor):
                raise RefusalError("scale", f"FSDP2 did not shard {name}", "train without --scale")
            self._show(parameter, sharded._local_tensor.detach())
            if sharded.requires_grad:
                undo.callback(on_gradient(sharded, partial(_deliver, parameter)))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self._replica.model, *args, **kwargs)

    def step_ended(self) -> None:
        """The outermost module stays gathered after a forward; what the loop writes next must be gathered anew."""
        super().step_ended()
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


def shard(model: nn.Module, device: torch.device, *, offloads: bool) -> None:
    """Put `fully_shard` on every repeated block and on the whole."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    pinned = device.type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pinned) if offloads else OffloadPolicy()
    for block in shardable(repeated_blocks(model), model):
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)


def _run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    output = model(*args, **kwargs)
    if not torch.is_grad_enabled():
        # no backward pass comes to do it, and until then the model has gathered parameters in place of its own
        model.reshard()  # type: ignore[operator] # `fully_shard` has changed its class
    return output


def shardable(blocks: list[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Blocks that share no parameter with the rest: what is tied has to be gathered together."""
    inside = [{id(parameter) for parameter in block.parameters()} for block in blocks]
    within = {id(part) for block in blocks for part in block.modules()}
    others = (module for module in model.modules() if id(module) not in within)
    counts = Counter(parameter for owned in inside for parameter in owned)
    counts.update(id(parameter) for module in others for parameter in module._parameters.values())
    return [
        block
        for block, owned in zip(blocks, inside, strict=True)
        if owned and all(counts[parameter] == 1 for parameter in owned)
    ]


def _deliver(parameter: nn.Parameter, sharded: torch.Tensor) -> None:
    assert isinstance(sharded.grad, DTensor)
    gradient, sharded.grad = sharded.grad._local_tensor.detach(), None
    with torch.no_grad():
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Counters of steps stay where torch keeps them."""
    for parameter, state in list(optimizer.state.items()):
        optimizer.state[parameter] = {
            name: value.to(device) if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in state.items()
        }
