"""`Found`: tensors with a graph that a call finds in the model's state."""

from __future__ import annotations

from collections.abc import Collection
from itertools import compress
from typing import Any

import torch

from memlab.runtime.model_state import KeptTensor, State


class Found:
    """Tensors with a graph that a call finds in the model's state: inputs of it, beside its arguments, if it uses them.

    Their graphs are the loop's, or those of earlier calls (a weight that a network makes once for several calls, a recurrent state).
    """

    def __init__(self, state: State, given: Collection[int]) -> None:  # `id`s of the arguments
        self.kept = [kept for kept in state.tensors if kept.derives and id(kept.seen) not in given]
        self.originals = [kept.original for kept in self.kept]
        self.leaves: list[torch.Tensor] = []  # where gradients come to, of the last run
        self._nodes: list[Any] = []

    def stand_ins(self) -> dict[KeptTensor, torch.Tensor]:
        """Return what a run is to find in their places."""
        self.leaves = [kept.values() for kept in self.kept]
        with torch.enable_grad():  # in a backward pass it is not
            made = [_Enters.apply(leaf) for leaf in self.leaves]  # type: ignore[no-untyped-call]
        self._nodes = [each.grad_fn for each in made]
        return dict(zip(self.kept, made, strict=True))

    def views(self) -> dict[KeptTensor, torch.Tensor]:
        """Return the tensors themselves for one more run, as views: their gradients are not handed to hooks of the loop's."""
        return {kept: own.view_as(own) for kept, own in zip(self.kept, self.originals, strict=True)}

    def forget_unused(self, nodes: Collection[Any]) -> None:
        """Keep those alone that the run has used, which has left a graph of these nodes: an attribute may be of a step long past."""
        used = [node in nodes for node in self._nodes]
        self._nodes = []
        self.kept = [*compress(self.kept, used)]
        self.originals = [*compress(self.originals, used)]
        self.leaves = [*compress(self.leaves, used)]


def is_entering(stand_in: torch.Tensor) -> bool:
    """Return whether nothing has been written to a stand-in: what is, has another graph."""
    return isinstance(stand_in.grad_fn, _Enters._backward_cls)


class _Enters(torch.autograd.Function):
    """A tensor as it comes into a call: one that may be written to, as the tensor itself may be."""

    @staticmethod
    def forward(_ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
