"""Linear layers as DeepSpeed computes them under ZeRO 3.

What autograd keeps for `torch.nn.functional.linear` is a view of the weight, and under autocast a copy of it in 16 bits: either
would hold a gathered weight until the backward pass. DeepSpeed's own function keeps the parameter itself and casts it anew there.

Source: https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/zero/linear.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F


class _KeepsItsParameters(torch.autograd.Function):
    """``x @ weight.T + bias``, which keeps `x`, `weight` and `bias`."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight.t())
        out = x.matmul(weight.t())
        return out if bias is None else out.add_(bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG004
        x, _, _ = inputs
        kind = x.device.type
        ctx.autocast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, bias = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        kind, enabled, dtype = ctx.autocast
        flat = gradient.reshape(-1, gradient.shape[-1])
        with torch.autocast(kind, enabled=enabled, dtype=dtype):
            of_x = gradient.matmul(weight) if wants_x else None
            of_weight = flat.t().matmul(x.reshape(-1, x.shape[-1])) if wants_weight else None
            of_bias = flat.sum(0) if bias is not None and wants_bias else None
        return of_x, of_weight, of_bias


@contextmanager
def linear_as_in_stage_3() -> Iterator[None]:
    """Have linear layers computed in that way, until it is left."""
    original = F.linear

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002
        out: torch.Tensor = _KeepsItsParameters.apply(input, weight, bias)  # type: ignore[no-untyped-call]
        return out

    F.linear = linear
    try:
        yield
    finally:
        F.linear = original
