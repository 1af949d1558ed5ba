"""`ModelShape`: what of a model decides how engines divide it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

ROOT = 0


@dataclass(frozen=True)
class ParameterShape:
    """One parameter.

    Args:
        elements: in it.
        rows: its first dimension, along which FSDP2 cuts it; 1 for a scalar.
        itemsize: bytes of an element.
        trained: whether it gets a gradient.
        group: number of the optimizer's group it is in; None in none.
    """

    elements: int
    rows: int
    itemsize: int
    trained: bool
    group: int | None

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self.elements * self.itemsize

    def cut_bytes(self, ranks: int) -> int:
        """A rank's part, cut by rows and filled up to the same on every rank.

        Example:
            >>> ParameterShape(elements=30, rows=3, itemsize=4, trained=True, group=0).cut_bytes(2)
            80
        """
        return math.ceil(self.rows / ranks) * (self.elements // max(1, self.rows)) * self.itemsize

    def part_bytes(self, ranks: int) -> int:
        """A rank's part, cut anywhere and filled up to the same on every rank."""
        return math.ceil(self.elements / ranks) * self.itemsize


@dataclass(frozen=True)
class ModelShape:
    """A model, as engines see it.

    Args:
        parameters: each once, however many modules share it.
        modules: the parameters that each module itself has, by number; the first module is the model.
        blocks: numbers of the modules that FSDP2 gathers by themselves.
        block_parameters: what belongs to each of them.
        buffer_bytes: of the model's buffers.
    """

    parameters: tuple[ParameterShape, ...]
    modules: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...]
    block_parameters: tuple[tuple[int, ...], ...]
    buffer_bytes: int

    @cached_property
    def rest(self) -> tuple[int, ...]:
        """Parameters that belong to no block."""
        within = {number for owned in self.block_parameters for number in owned}
        return tuple(number for number in range(len(self.parameters)) if number not in within)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Trained parameters of each of the optimizer's groups."""
        count = 1 + max((p.group for p in self.parameters if p.group is not None), default=-1)
        return tuple(
            tuple(n for n, p in enumerate(self.parameters) if p.group == group and p.trained) for group in range(count)
        )

    @property
    def trained(self) -> tuple[int, ...]:
        """Parameters that get a gradient."""
        return tuple(number for number, parameter in enumerate(self.parameters) if parameter.trained)

    def size_bytes(self, numbers: Iterable[int] | None = None) -> int:
        """Bytes of some parameters, or of all."""
        chosen: Iterable[int] = range(len(self.parameters)) if numbers is None else numbers
        return sum(self.parameters[number].size_bytes for number in chosen)

    def elements(self, numbers: Sequence[int] | None = None) -> int:
        """Elements of some parameters, or of all."""
        chosen: Iterable[int] = range(len(self.parameters)) if numbers is None else numbers
        return sum(self.parameters[number].elements for number in chosen)
