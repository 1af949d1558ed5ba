"""Accelerate and the Trainer on many processes without a GPU: they shard over accelerators alone."""

from __future__ import annotations

import torch


def take_the_cpu_for_a_gpu() -> None:
    """Tell Accelerate, in this process, that its device is the CPU and that ranks talk by gloo."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


def without_compiling() -> None:
    """Have DeepSpeed reduce by gloo: its own operator for that is compiled first, and a lock is left where that is ended."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
