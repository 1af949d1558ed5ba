"""FSDP2: parameters, gradients and optimizer state in shards, a block gathered while it is used.

Source: `torch.distributed.fsdp.fully_shard`, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from memlab.runtime.modules import repeated_blocks
from memlab.scaleout import tensors
from memlab.scaleout.engines.base import Engine, exchange_parameters, fill_state


class Fsdp2(Engine):
    """`fully_shard` on every repeated block and on the whole."""

    offloads = False

    def start(self) -> None:
        model, optimizers = self.workload.model, self.workload.optimizers
        names = tensors.names_of(model)
        self._shard()
        self._allocate()
        exchange_parameters(optimizers, names, model)
        tensors.fill({**tensors.parameter_keys(model), **tensors.buffer_keys(model)}, self.folder)
        fill_state(optimizers, model, self.folder, self._state_like)

    def _shard(self) -> None:
        shard(self.inner, self.device, offloads=self.offloads)

    def _allocate(self) -> None:
        self.workload.model._apply(self._with_memory)  # type: ignore[no-untyped-call]

    def _with_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        home = torch.device("cpu") if self.offloads and isinstance(tensor, DTensor) else self.device
        return torch.empty_like(tensor, device=home) if tensor.is_meta else tensor.to(home)

    def _state_like(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if value.shape == parameter.shape and isinstance(parameter, DTensor):
            return torch.empty_like(parameter.detach(), dtype=value.dtype)
        return torch.empty(value.shape, dtype=value.dtype, device=self.device if value.dim() else "cpu")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        if not torch.is_grad_enabled():
            # no backward pass comes to do it, and until then the model has gathered parameters in place of its own
            self.inner.reshard()  # type: ignore[operator] # `fully_shard` has changed its class
        return output

    def save(self, folder: Path) -> None:
        tensors.store(tensors.all_of(self.workload), folder, together=True)


class OffloadedFsdp2(Fsdp2):
    """The same with shards in host memory, where the update is done too."""

    offloads = True


def shard(model: nn.Module, device: torch.device, *, offloads: bool) -> None:
    """Put `fully_shard` on every repeated block and on the whole.

    Args:
        model: with parameters on the device, or without data.
        device: of this rank.
        offloads: whether shards are kept in host memory, where the update is done too.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    pinned = device.type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pinned) if offloads else OffloadPolicy()
    for block in _shardable(repeated_blocks(model), model):
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)


def _shardable(blocks: list[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Blocks that share no parameter with the rest: what is tied has to be gathered together."""
    inside = [{id(parameter) for parameter in block.parameters()} for block in blocks]
    within = {id(part) for block in blocks for part in block.modules()}
    outside = {
        id(parameter)
        for module in model.modules()
        if id(module) not in within
        for parameter in module._parameters.values()
    }
    counts: dict[int, int] = {}
    for owned in inside:
        for parameter in owned:
            counts[parameter] = counts.get(parameter, 0) + 1
    return [
        block
        for block, owned in zip(blocks, inside, strict=True)
        if owned and not owned & outside and all(counts[parameter] == 1 for parameter in owned)
    ]
