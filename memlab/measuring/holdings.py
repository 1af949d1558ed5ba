"""Tensors that are named for a ledger, and an observer that names them as a step goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from memlab.records import Category, Phase
from memlab.runtime.batch import Batch
from memlab.runtime.graphs import gradient_of
from memlab.runtime.observer import Observer
from memlab.runtime.tree import tensors_in

if TYPE_CHECKING:  # a ledger takes what is named here
    from memlab.measuring.ledger import Ledger

Holding = tuple[Category, torch.Tensor]


def parameters_of(model: torch.nn.Module) -> Iterator[Holding]:
    """Parameters and buffers of a model."""
    yield from ((Category.PARAMETERS, tensor) for tensor in model.parameters())
    yield from ((Category.PARAMETERS, tensor) for tensor in model.buffers())


def gradients_of(model: torch.nn.Module) -> Iterator[Holding]:
    """Gradients of a model's parameters."""
    gradients = map(gradient_of, model.parameters())
    return ((Category.GRADIENTS, gradient) for gradient in gradients if gradient is not None)


def state_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Holding]:
    """Tensors in the state of optimizers."""
    return ((Category.OPTIMIZER_STATE, tensor) for o in optimizers for tensor in tensors_in(o.state))


def inputs_of(batch: Batch) -> Iterator[Holding]:
    """Tensors of a batch: they grow with it and are kept for backward, as activations are."""
    return ((Category.ACTIVATIONS, tensor) for tensor in batch.tensors)


class LedgerObserver(Observer):
    """Tells a ledger what runs, and what has found its place by then."""

    def __init__(self, model: torch.nn.Module, ledger: Ledger) -> None:
        self._model = model
        self._ledger = ledger

    def forward_begins(self, batch: Batch) -> None:
        self._ledger.phase = Phase.FORWARD
        self._ledger.know(inputs_of(batch))

    def forward_ended(self, loss: torch.Tensor | None) -> None:
        self._ledger.phase = Phase.OTHER

    def gradients_complete(self) -> None:
        self._ledger.know(gradients_of(self._model))

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._ledger.phase = Phase.STEP
        self.gradients_complete()

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        self._ledger.phase = Phase.OTHER
