"""`MicroInputs`: arguments of a split call that need gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memlab.runtime.lazy import requires_grad
from memlab.techniques.accumulation.split import Call, Division

# of one micro-batch, by position
Gradients = dict[int, torch.Tensor]


class MicroInputs:
    """Arguments that need gradients, whole and in parts."""

    def __init__(self, division: Division) -> None:
        self._division = division  # the micro-batches
        leaves = division.micro_batches[0].leaves
        # of these arguments among the leaves of the call
        self.positions = [i for i, leaf in enumerate(leaves) if requires_grad(leaf)]
        self.gradients: list[Gradients] = []  # of each micro-batch, in order

    def whole(self) -> dict[int, torch.Tensor]:
        """Return the whole arguments, by position."""
        return {position: self._whole(position) for position in self.positions}

    def _whole(self, position: int) -> torch.Tensor:
        micro_batches, layout = self._division.micro_batches, self._division.layout
        if position not in layout.split:
            whole: torch.Tensor = micro_batches[0].leaves[position]
            return whole
        return torch.cat([part.leaves[position] for part in micro_batches], layout.dim_of(position))

    def part_of(self, whole: Mapping[int, torch.Tensor], index: int) -> dict[int, torch.Tensor]:
        """Return those of one micro-batch, as views of the whole ones."""
        return {position: self._part_of(tensor, position, index) for position, tensor in whole.items()}

    def _part_of(self, whole: torch.Tensor, position: int, index: int) -> torch.Tensor:
        layout = self._division.layout
        if position not in layout.split:
            return whole
        dim = layout.dim_of(position)
        sizes = [part.leaves[position].size(dim) for part in self._division.micro_batches]
        return whole.narrow(dim, sum(sizes[:index]), sizes[index])

    def gradients_of(self, micro_batch: Call) -> Gradients:
        """Return what a backward pass has left at the arguments of one micro-batch."""
        leaves = micro_batch.leaves
        return {i: leaves[i].grad for i in self.positions if leaves[i].grad is not None}

    def add(self, gradients: Mapping[int, Gradients]) -> None:
        """Add gradients of all micro-batches, by their numbers."""
        earlier = self.gradients
        self.gradients = [_summed(gradients[i], earlier[i] if earlier else {}) for i in sorted(gradients)]

    def take(self) -> list[torch.Tensor | None]:
        """Hand over the gradients of the whole arguments."""
        taken = [self._gradient(position) for position in self.positions]
        self.gradients = []
        return taken

    def _gradient(self, position: int) -> torch.Tensor | None:
        parts = [part[position] for part in self.gradients if position in part]
        if not parts:
            return None
        layout = self._division.layout
        if position in layout.split:
            return torch.cat(parts, layout.dim_of(position))
        return torch.stack(parts).sum(0)


def _summed(one: Gradients, other: Gradients) -> Gradients:
    return {i: one[i] + other[i] if i in one and i in other else one.get(i, other.get(i)) for i in {*one, *other}}  # type: ignore[misc]
