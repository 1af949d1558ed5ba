"""The multi-tensor updates that torch's optimizers take on CUDA by default.

An optimizer with `foreach=None` and `fused=None` loops over parameters on the CPU and updates all of
them at once on CUDA, which needs temporaries of the size of all parameters. So does gradient clipping.
What the user has set is kept, and so is `capturable`.

Source: torch/optim/optimizer.py `_default_to_fused_or_foreach`, torch/utils/_foreach_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer, swa_utils
from torch.utils import _foreach_utils

from memlab.trace.cuda_thread import current_gpu, exchange

_DEVICES = "_get_foreach_kernels_supported_devices"
_TYPES = "_foreach_supported_types"
_Devices = Callable[[], list[str]]


def exchange_defaults(undo: ExitStack) -> None:
    """Let fake CPU tensors count as tensors that multi-tensor updates are made for."""
    for module in (_foreach_utils, optimizer, swa_utils):
        exchange(module, _DEVICES, _with_cpu, undo)
    for module in (_foreach_utils, optimizer):
        exchange(module, _TYPES, _with_fake_tensors, undo)


def _with_cpu(original: _Devices) -> _Devices:
    def supported_devices() -> list[str]:
        return original() if current_gpu() is None else [*original(), "cpu"]

    return supported_devices


def _with_fake_tensors(original: list[type[torch.Tensor]]) -> list[type[torch.Tensor]]:
    return [*original, FakeTensor]
