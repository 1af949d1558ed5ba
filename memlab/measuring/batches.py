"""Size of a batch: rows, tokens, and the shapes that decide what a step needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memlab.measuring.ledger import tensors_in
from memlab.runtime.workload import Batch


def samples_of(batch: Batch) -> int:
    """Rows of a batch: the first dimension of its first tensor."""
    first = next((t for t in tensors_in((batch.args, batch.kwargs)) if t.dim()), None)
    return first.shape[0] if first is not None else 0


def shapes_of(batch: Any) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes and dtypes of the tensors in a batch: what of it decides what a step needs.

    Example:
        >>> shapes_of({"inputs": torch.zeros(2, 3)})
        (((2, 3), 'torch.float32'),)
    """
    tensors = tensors_in((batch.args, batch.kwargs) if isinstance(batch, Batch) else batch)
    return tuple((tuple(each.shape), str(each.dtype)) for each in tensors)


def tokens_of(batch: Batch) -> int:
    """Tokens of a batch: its `input_ids`, or its first positional matrix of integers; 0 without either."""
    for holder in (batch.kwargs, *batch.args):
        if isinstance(holder, Mapping) and isinstance(holder.get("input_ids"), torch.Tensor):
            return int(holder["input_ids"].numel())
    return next((value.numel() for value in batch.args if _is_token_matrix(value)), 0)


def _is_token_matrix(value: Any) -> bool:
    is_integer = isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype is not torch.bool
    return is_integer and value.dim() == 2
