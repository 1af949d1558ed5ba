"""Data parallelism: every rank has all parameters, gradients are averaged while the backward pass runs.

Source: `torch.nn.parallel.DistributedDataParallel`, https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memlab.scaleout import tensors
from memlab.scaleout.engines.base import Engine, exchange_parameters, fill_state, materialize


class Ddp(Engine):
    """`DistributedDataParallel` over the inner model."""

    def start(self) -> None:
        model, optimizers = self.workload.model, self.workload.optimizers
        names = tensors.names_of(model)
        materialize(model, self.device)
        exchange_parameters(optimizers, names, model)
        tensors.fill({**tensors.parameter_keys(model), **tensors.buffer_keys(model)}, self.folder)
        fill_state(
            optimizers, model, self.folder, lambda _, value: value.new_empty(value.shape, device=self._home(value))
        )
        # a loop may train parts of a model in turn
        self._wrapped = DistributedDataParallel(
            self.inner,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            find_unused_parameters=True,
        )

    def _home(self, value: Any) -> Any:
        """Counters of steps stay on the host, as torch keeps them."""
        return self.device if value.dim() else "cpu"

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped(*args, **kwargs)

    def save(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            tensors.store(tensors.all_of(self.workload), folder)
        dist.barrier()
