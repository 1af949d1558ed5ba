"""A linear layer whose weight is cast a tile of output features at a time, in both passes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from memlab.errors import SessionError
from memlab.techniques.accumulation.split import row_ranges


class TiledLinear(torch.autograd.Function):
    """`F.linear` in a lower precision than that of the weight, of which no whole copy is made or kept."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,  # [..., i] in the precision of the product
        weight: torch.Tensor,  # [o, i]
        bias: torch.Tensor | None,  # [o]
        tiles: int,
    ) -> torch.Tensor:
        dtype, tiles = inputs.dtype, min(tiles, len(weight))
        rows = inputs.reshape(-1, inputs.shape[-1])  # [n, i]
        output = rows.new_empty(len(rows), len(weight))  # [n, o]
        with torch.autocast(inputs.device.type, enabled=False):
            for start, stop in row_ranges(len(weight), tiles):
                low_bias = None if bias is None else bias[start:stop].to(dtype)
                output[:, start:stop] = F.linear(rows, weight[start:stop].to(dtype), low_bias)
        ctx.save_for_backward(inputs, weight)
        ctx.tiles, ctx.bias_dtype = tiles, None if bias is None else bias.dtype
        return output.reshape(*inputs.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # as autograd has it under create_graph
            raise SessionError(
                "create_graph=True through a layer in tiles: its gradients have no graph; switch --tile off"
            )
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gradient = gradients[0].reshape(-1, len(weight))  # [n, o]
        rows = inputs.reshape(-1, inputs.shape[-1])  # [n, i]
        # sums over tiles are kept in fp32: rounding each of them would be worse than rounding the whole once
        grad_rows = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device) if needs_inputs else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        with torch.autocast(inputs.device.type, enabled=False):
            for start, stop in row_ranges(len(weight), ctx.tiles):
                tile = gradient[:, start:stop]
                if grad_rows is not None:
                    grad_rows += tile @ weight[start:stop].to(rows.dtype)
                if grad_weight is not None:
                    grad_weight[start:stop] = tile.t() @ rows
        grad_bias = gradient.sum(0).to(ctx.bias_dtype) if needs_bias else None
        grad_inputs = None if grad_rows is None else grad_rows.to(inputs.dtype).reshape(inputs.shape)
        return grad_inputs, grad_weight, grad_bias, None
