"""`held_by`: what a tensor keeps alive through the graph that made it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def held_by(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Results that are kept for a backward pass from some tensors, each memory once, parameters not among them.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> loss = (weight * torch.zeros(3)).exp().sum()
        >>> [tuple(tensor.shape) for tensor in held_by(loss)]
        [(3,), (3,)]
        >>> held_by(loss.detach())
        []
    """
    nodes = list(_nodes(tensor.grad_fn for tensor in tensors))
    # a linear layer saves a transposed view of its weight, so memories are compared, not tensors
    parameters = {_memory(node.variable) for node in nodes if hasattr(node, "variable")}
    found: dict[int, torch.Tensor] = {}
    for node in nodes:
        for saved in _saved(node):
            if _memory(saved) not in parameters:
                found.setdefault(_memory(saved), saved)
    return list(found.values())


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    seen: set[Any] = set()
    waiting = [root for root in roots if root is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [after for after, _ in node.next_functions if after is not None]


def _saved(node: Any) -> Iterator[torch.Tensor]:
    for name in dir(node):
        if not (name.startswith("_saved_") or name == "saved_tensors"):
            continue
        try:
            value = getattr(node, name)
        except RuntimeError:  # given back by a backward pass
            continue
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, torch.Tensor):
                yield each
