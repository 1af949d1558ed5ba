"""Data parallelism: every rank has all parameters, gradients are averaged while the backward pass runs.

Micro-batches run inside the wrapped module, on aliases of the parameters: to the wrapper a split call is one call, with one
backward pass, after which gradients are averaged once.

Source: `torch.nn.parallel.DistributedDataParallel`, https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memlab.scaleout import tensors
from memlab.scaleout.engines.base import Engine
from memlab.techniques.accumulation.micro import MicroRun
from memlab.techniques.accumulation.split import Division
from memlab.techniques.base import ModelCall


class Ddp(Engine):
    """`DistributedDataParallel` over the inner model."""

    def start(self) -> None:
        super().start()
        self._forward: ModelCall = self.inner.forward
        self._split: Callable[[], Any] | None = None
        vars(self.inner)["forward"] = self._within
        # a loop may train parts of a model in turn; with `device_ids` the wrapper moves inputs, and a split call has none
        self._wrapped = DistributedDataParallel(self.inner, find_unused_parameters=True)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped(*args, **kwargs)

    def accumulate(self, share: Division, around: Callable[[ModelCall], ModelCall]) -> Any:
        self._split = self._run_of(MicroRun, share, around(self._forward)).outputs
        return self._wrapped()

    def _within(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, as the wrapper calls it."""
        if self._split is None:
            return self._forward(*args, **kwargs)
        split, self._split = self._split, None
        return split()

    def save(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            tensors.store(tensors.all_of(self.workload), folder)
        dist.barrier()
