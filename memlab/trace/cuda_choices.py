"""A training step on fake CPU tensors that chooses what CUDA would choose.

On a build of torch without CUDA a step cannot be traced on fake CUDA tensors. Traced on fake CPU
tensors, it would take the CPU's attention, dropout, autocast lists and optimizer loops. Inside
`cuda_choices` the calls take CUDA's way:

- attention: `cuda_attention`,
- dropout, softmax, linear and RMS norm: `cuda_operators`,
- autocast: `cuda_autocast`,
- the multi-tensor updates of torch's optimizers: `cuda_optimizers`,
- device="cuda", .cuda(), torch.autocast("cuda") in the user's code: `cuda_literals`.

Only the thread that enters feels it, and nothing is left behind (`cuda_thread` has the rules).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from memlab.hardware.gpus import Gpu
from memlab.trace import cuda_attention, cuda_autocast, cuda_literals, cuda_operators, cuda_optimizers
from memlab.trace.cuda_kernels import register
from memlab.trace.cuda_thread import SharedExchange, tracing_for


@contextmanager
def cuda_choices(gpu: Gpu) -> Iterator[None]:
    """Let fake CPU tensors take the operators CUDA would take on a GPU.

    Autograd's backward must run in the calling thread, as it does for CPU tensors.

    Args:
        gpu: what the step is traced for; its compute capability decides about attention.

    Raises:
        MemlabError: a private name of torch that this needs does not exist in the installed version.

    Known limitations: see `not_modelled`.

    Example:
        >>> from memlab.hardware.gpus import gpu
        >>> with cuda_choices(gpu("A100 80GB")):
        ...     pass  # one training step on the fake twin
    """
    with ExitStack() as stack:
        stack.enter_context(_CUDA.held())
        stack.enter_context(tracing_for(gpu))
        stack.enter_context(cuda_literals.on_the_cpu())
        yield


def _exchange(undo: ExitStack) -> None:
    cuda_optimizers.exchange_defaults(undo)
    cuda_literals.exchange_autocast(undo)
    cuda_autocast.exchange_cache(undo)
    register(
        (*cuda_attention.registrations(), *cuda_operators.registrations(), *cuda_autocast.registrations()),
        undo,
    )


_CUDA = SharedExchange(_exchange)

_NOT_MODELLED: tuple[tuple[type[nn.Module], str], ...] = (
    (
        nn.RNNBase,
        "recurrent layers are traced as the CPU runs them, step by step; cuDNN keeps one reserve buffer instead, "
        "whose size NVIDIA does not publish",
    ),
    (
        nn.RNNCellBase,
        "recurrent cells are traced as separate operators; CUDA fuses the gates of a step into one kernel",
    ),
    (
        nn.modules.conv._ConvNd,
        "workspaces of cuDNN's convolutions are not counted: their size depends on the algorithm cuDNN picks",
    ),
    (
        nn.modules.batchnorm._BatchNorm,
        "batch norm is traced as torch's own kernel; cuDNN's keeps a small reserve buffer more in channels-last format",
    ),
)


def not_modelled(model: nn.Module) -> tuple[str, ...]:
    """Return what of a model is not traced as CUDA runs it, in words.

    Example:
        >>> not_modelled(nn.Linear(2, 2))
        ()
    """
    kinds = tuple(type(module) for module in model.modules())
    said = [words for kind, words in _NOT_MODELLED if any(issubclass(found, kind) for found in kinds)]
    if torch.are_deterministic_algorithms_enabled():
        said.append("deterministic algorithms are on: their extra buffers are not counted")
    return tuple(said)
