"""A training step on fake CPU tensors that chooses what CUDA would choose.

On a build of torch without CUDA a step cannot be traced on fake CUDA tensors. Traced on fake CPU
tensors, it would take the CPU's attention, dropout, autocast lists and optimizer loops. Inside
`cuda_choices` the calls take CUDA's way:

- attention: `cuda_attention`,
- dropout, softmax, linear and RMS norm: `cuda_operators`,
- autocast: `cuda_autocast`,
- the multi-tensor updates of torch's optimizers, and gradient clipping: an optimizer with `foreach=None` and `fused=None`
  loops over parameters on the CPU and updates all of them at once on CUDA, which needs temporaries of the size of all
  parameters. What the user has set is kept, and so is `capturable`,
- device="cuda", .cuda(), torch.autocast("cuda") in the user's code: `cuda_literals`.

Only the thread that enters feels it, and nothing is left behind (`cuda_thread` has the rules).

Source of the updates: torch/optim/optimizer.py `_default_to_fused_or_foreach`, torch/utils/_foreach_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer, swa_utils
from torch.utils import _foreach_utils

from memlab.hardware.gpus import Gpu
from memlab.trace import cuda_attention, cuda_autocast, cuda_literals, cuda_operators
from memlab.trace.cuda_kernels import register
from memlab.trace.cuda_thread import SharedExchange, current_gpu, exchange, tracing_for

_Devices = Callable[[], list[str]]


@contextmanager
def cuda_choices(gpu: Gpu) -> Iterator[None]:
    """Let fake CPU tensors take the operators CUDA would take on a GPU.

    Autograd's backward must run in the calling thread, as it does for CPU tensors.

    Raises:
        MemlabError: a private name of torch that this needs does not exist in the installed version.

    Known limitations: recurrent layers and cells are traced as the CPU runs them, step by step and as separate operators
    (cuDNN keeps one reserve buffer, whose size NVIDIA does not publish); cuDNN's workspaces for convolutions, and its small
    reserve buffer for batch norm in channels-last format, are not counted, nor are buffers of deterministic algorithms.
    """
    with ExitStack() as stack:
        stack.enter_context(_CUDA.held())
        stack.enter_context(tracing_for(gpu))
        stack.enter_context(cuda_literals.CudaMeansCpu())
        yield


def _exchange(undo: ExitStack) -> None:
    # fake CPU tensors count as tensors that multi-tensor updates are made for
    for module in (_foreach_utils, optimizer, swa_utils):
        exchange(module, "_get_foreach_kernels_supported_devices", _with_cpu, undo)
    for module in (_foreach_utils, optimizer):
        exchange(module, "_foreach_supported_types", _with_fake_tensors, undo)
    cuda_literals.exchange_autocast(undo)
    cuda_autocast.exchange_cache(undo)
    register((*cuda_attention.registrations(), *cuda_operators.registrations(), *cuda_autocast.registrations()), undo)


def _with_cpu(original: _Devices) -> _Devices:
    def supported_devices() -> list[str]:
        found, gpu = original(), current_gpu()
        is_supported = gpu is not None and gpu.device_type in found
        return [*found, "cpu"] if is_supported else found

    return supported_devices


def _with_fake_tensors(original: list[type[torch.Tensor]]) -> list[type[torch.Tensor]]:
    return [*original, FakeTensor]


_CUDA = SharedExchange(_exchange)
