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

    Known limitations: recurrent layers and cells are traced as the CPU runs them, step by step and as separate operators
    (cuDNN keeps one reserve buffer, whose size NVIDIA does not publish); cuDNN's workspaces for convolutions, and its small
    reserve buffer for batch norm in channels-last format, are not counted, nor are buffers of deterministic algorithms.
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
    register((*cuda_attention.registrations(), *cuda_operators.registrations(), *cuda_autocast.registrations()), undo)


_CUDA = SharedExchange(_exchange)
