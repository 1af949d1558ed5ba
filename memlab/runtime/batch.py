"""`Batch`: the arguments of one model call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_map

from memlab.runtime.tree import tensors_in


@dataclass(frozen=True)
class Batch:
    """The arguments of one model call, kept by reference."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors of the call, in order."""
        return tuple(tensors_in((self.args, self.kwargs)))

    @property
    def rows(self) -> int:
        """Rows: the first dimension of the first tensor that has one, or items of a list of which each is one; 0 without any.

        Example:
            >>> images = [torch.zeros(3, 8, 8) for _ in range(5)]
            >>> Batch.of({"images": images, "targets": [{"boxes": torch.zeros(2, 4)}] * 5}).rows
            5
        """
        with torch._C.DisableTorchFunctionSubclass():  # a class of the user's need not know of such questions
            for value in (*self.args, *self.kwargs.values()):
                if type(value) is list and _is_list_of_rows(value, self):
                    return len(value)
            for tensor in self.tensors:  # this and `tokens` without generators: they are asked in every step
                if tensor.dim():
                    return tensor.size(0)  # nested tensors have no shape
        return 0

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            return sum(map(torch.Tensor.numel, self.tensors))

    @property
    def tokens(self) -> int:
        """Tokens: its `input_ids`, or its first positional matrix of integers; 0 without either."""
        with torch._C.DisableTorchFunctionSubclass():
            for holder in (self.kwargs, *self.args):
                if (
                    not isinstance(holder, torch.Tensor)
                    and isinstance(holder, Mapping)
                    and isinstance(holder.get("input_ids"), torch.Tensor)
                ):
                    return int(holder["input_ids"].numel())
            for value in self.args:
                if _is_token_matrix(value):
                    return int(value.numel())
            return 0

    @property
    def shapes(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shapes and dtypes of its tensors: what of it decides what a step needs.

        Example:
            >>> Batch.of({"inputs": torch.zeros(2, 3)}).shapes
            (((2, 3), 'torch.float32'),)
        """
        with torch._C.DisableTorchFunctionSubclass():
            return tuple((tuple(each.shape), str(each.dtype)) for each in self.tensors)

    @property
    def copied(self) -> Batch:
        """The same tensors in other lists, dicts and tuples: a model, or the loop, may write to its own.

        Example:
            >>> batch = Batch(({"inputs": torch.zeros(2, 3)},), {})
            >>> batch.copied.args[0].pop("inputs") is batch.args[0]["inputs"]
            True
        """
        return Batch(*tree_map(lambda leaf: leaf, (self.args, dict(self.kwargs))))

    @classmethod
    def of(cls, batch: Any) -> Batch:
        """Read what people hand over as a batch: keyword arguments, positional arguments or one input."""
        if isinstance(batch, Batch):
            return batch
        if isinstance(batch, Mapping):
            return cls((), dict(batch))
        if isinstance(batch, (tuple, list)):
            return cls(tuple(batch), {})
        return cls((batch,), {})


def _is_list_of_rows(items: list[Any], batch: Batch) -> bool:
    """Return whether each item is a row of the batch: a dict of its own, or a tensor whose first dimension is its own.

    Where items are alike, other arguments tell.
    """
    if all(isinstance(item, Mapping) for item in items):
        return len(items) > 0
    if not all(isinstance(item, torch.Tensor) and item.dim() for item in items):
        return False
    sizes = {item.size(0) for item in items}
    others = (each for each in (*batch.args, *batch.kwargs.values()) if isinstance(each, torch.Tensor) and each.dim())
    beside = {each.size(0) for each in others}
    return len(sizes) > 1 or (len(items) in beside and sizes.isdisjoint(beside))


def _is_token_matrix(value: Any) -> bool:
    is_matrix = isinstance(value, torch.Tensor) and value.dim() == 2
    return is_matrix and not value.is_floating_point() and value.dtype is not torch.bool
