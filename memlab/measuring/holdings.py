"""Tensors that exist before a step are known because they are named: who holds which tensors, for a ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from memlab.measuring.ledger import Holding
from memlab.records import Category
from memlab.runtime.tree import tensors_in
from memlab.runtime.workload import Batch


def parameters_of(model: torch.nn.Module) -> Iterator[Holding]:
    """Parameters and buffers of a model."""
    yield from ((Category.PARAMETERS, tensor) for tensor in model.parameters())
    yield from ((Category.PARAMETERS, tensor) for tensor in model.buffers())


def gradients_of(model: torch.nn.Module) -> Iterator[Holding]:
    """Gradients of a model's parameters."""
    return ((Category.GRADIENTS, p.grad) for p in model.parameters() if p.grad is not None)


def state_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Holding]:
    """Tensors in the state of optimizers."""
    return ((Category.OPTIMIZER_STATE, tensor) for o in optimizers for tensor in tensors_in(o.state))


def inputs_of(batch: Batch) -> Iterator[Holding]:
    """Tensors of a batch: they grow with it and are kept for backward, as activations are."""
    return ((Category.ACTIVATIONS, tensor) for tensor in batch.tensors)
