"""Small operators that take another way on CUDA than on the CPU.

Sources (pytorch, release 2.13): aten/src/ATen/native/Dropout.cpp `dropout`, SoftMax.cpp `softmax` and
`log_softmax`, Linear.cpp `linear`, layer_norm.cpp `rms_norm_symint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memlab.trace.cuda_kernels import Kernel, Registration, exists, is_watched, overload
from memlab.trace.hidden_memory import is_channels_last

_aten = torch.ops.aten


def registrations() -> tuple[Registration, ...]:
    """Kernels for the operators of this file."""
    kernels: dict[str, Kernel] = {
        "dropout": _dropout,
        "softmax.int": _softmax,
        "log_softmax.int": _softmax,
        "linear": _linear,
        "rms_norm": _rms_norm,
    }
    return tuple(Registration(name, "AutogradCPU", kernel) for name, kernel in kernels.items() if exists(name))


def _dropout(_: Any, tensor: torch.Tensor, p: float, train: bool) -> Any:
    """One fused kernel with a boolean mask, where the CPU multiplies by noise of the input's type."""
    if not train or not 0 < p < 1 or tensor.numel() == 0:
        return NotImplemented
    return _aten.native_dropout(tensor, p, train)[0]


_FUSED_SOFTMAX = {"softmax": "_softmax", "log_softmax": "_log_softmax"}


def _softmax(operator: Any, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Softmax from fp16 to fp32 without a copy of the input in fp32; bf16 has no such kernel."""
    if tensor.dtype is not torch.float16 or dtype is not torch.float32:
        return NotImplemented
    name = operator.name().removeprefix("aten::").partition(".")[0]
    return overload(_FUSED_SOFTMAX[name])(tensor, dim, True)


def _linear(_: Any, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Add the bias in place: fake tensors (as subclasses) are spared that, and tensors while modes are in force."""
    if bias is None or tensor.dim() <= 2 or tensor.is_contiguous() or is_watched():
        return NotImplemented
    return torch.matmul(tensor, weight.t()).add_(bias)


def _rms_norm(
    _: Any,
    tensor: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    if is_channels_last(tensor) or tensor.is_complex() or (weight is not None and weight.dtype is not tensor.dtype):
        return NotImplemented
    return _FusedRmsNorm.apply(tensor, list(normalized_shape), weight, eps)  # type: ignore[no-untyped-call]


class _FusedRmsNorm(torch.autograd.Function):
    """CUDA's single kernel, which on the CPU is always taken apart."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
    ) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out, reciprocal_rms = _aten._fused_rms_norm(tensor, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(tensor, weight, reciprocal_rms)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        tensor, weight, reciprocal_rms = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            of_tensor, of_weight = _aten._fused_rms_norm_backward(
                gradients[0], tensor, ctx.shape, reciprocal_rms, weight, wanted
            )
        return of_tensor, None, of_weight, None
