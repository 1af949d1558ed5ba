"""`Sharding`: what an engine adds to the step of a rank, and takes from it; the model and the account it works on; `DdpSharding`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

ROOT = 0


@dataclass(frozen=True)
class ParameterShape:
    """One parameter."""

    elements: int  # in it
    rows: int  # its first dimension, along which FSDP2 cuts it; 1 for a scalar
    itemsize: int  # bytes of an element
    trained: bool  # whether it gets a gradient
    group: int | None  # number of the optimizer's group it is in; None in none

    @property
    def size_bytes(self) -> int:
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
    """A model, as engines see it."""

    parameters: tuple[ParameterShape, ...]  # each once, however many modules share it
    # the parameters that each module itself has, by number; the first module is the model
    modules: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...]  # numbers of the modules that FSDP2 gathers by themselves
    block_parameters: tuple[tuple[int, ...], ...]  # what belongs to each of them
    buffer_bytes: int  # of the model's buffers

    @cached_property
    def rest(self) -> tuple[int, ...]:
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
        return tuple(number for number, parameter in enumerate(self.parameters) if parameter.trained)

    def size_bytes(self, numbers: Iterable[int] | None = None) -> int:
        chosen: Iterable[int] = range(len(self.parameters)) if numbers is None else numbers
        return sum(self.parameters[number].size_bytes for number in chosen)

    def elements(self, numbers: Sequence[int] | None = None) -> int:
        chosen: Iterable[int] = range(len(self.parameters)) if numbers is None else numbers
        return sum(self.parameters[number].elements for number in chosen)


class ShardPart(StrEnum):
    """Categories of a rank's bytes."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    GATHERED = "gathered parameters"
    ACTIVATIONS = "activations"
    BUFFERS = "communication buffers"
    TEMPORARIES = "temporaries"
    WORKSPACES = "workspaces"


class MemoryAccount:
    """Keeps account of a rank."""

    def __init__(self, *, has_host: bool) -> None:
        self.has_host = has_host  # whether host memory is another than the device's
        self.live: dict[ShardPart, int] = dict.fromkeys(ShardPart, 0)  # bytes by part, on the device
        self.host_bytes = self.peak_host_bytes = 0
        self.peak_bytes = 0  # highest sum on the device
        self.at_peak: dict[ShardPart, int] = {}  # bytes by part there
        self.gradients: dict[int, tuple[int, int]] = {}
        self.dropped: set[int] = set()
        self._total = 0

    def add(self, part: ShardPart, size_bytes: int, *, host: bool = False) -> None:
        """Bytes come, or go where they are negative."""
        if host and self.has_host:
            self.host_bytes += size_bytes
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
            return
        self.live[part] += size_bytes
        self._total += size_bytes
        if self._total > self.peak_bytes:
            self.peak_bytes = self._total
            self.at_peak = dict(self.live)

    def touch(self, part: ShardPart, size_bytes: int) -> None:
        self.add(part, size_bytes)
        self.add(part, -size_bytes)

    def drop_gradient(self, parameter: int) -> None:
        """The gradient that backward made for a parameter goes, as its values are elsewhere now."""
        if parameter in self.gradients:
            storage, size_bytes = self.gradients.pop(parameter)
            self.dropped.add(storage)
            self.add(ShardPart.GRADIENTS, -size_bytes)


# elements of the flat tensor that the optimizer steps in place of each group's parameters
Flats = tuple[int, ...]


class Sharding(ABC):
    """The rules of an engine on one rank; moments are told in the order in which a step has them.

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md ("Bus bandwidth")
    """

    # what a hook of the engine on the model's outputs copies of them: (at the end of forward, in backward)
    copies_outputs = (False, False)
    # whether the engine has linear layers keep parameters for backward, and not views or copies of them
    keeps_parameters = False

    def __init__(self, model: ModelShape, ranks: int, *, offloads: bool = False) -> None:
        self.model = model
        self.ranks = ranks
        self.offloads = offloads
        # whole sizes of what was gathered or reduced to shards; what was reduced for all counts twice, as it is one
        # after the other. Of n ranks in a ring each sends (n - 1) / n of that
        self.ring_bytes = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has sent; it has received as many."""
        return round((self.ranks - 1) / self.ranks * self.ring_bytes)

    @property
    @abstractmethod
    def stepped(self) -> Flats | float:
        """Return what the optimizer steps on this rank: flat tensors, or this share of every parameter."""

    @abstractmethod
    def add_base(self, account: MemoryAccount) -> None:
        """Add what exists throughout, except optimizer state."""

    def forward_begins(self, account: MemoryAccount, module: int) -> None:  # noqa: B027 - most engines do nothing here
        """A module is about to run."""

    def forward_ends(self, account: MemoryAccount, module: int) -> None:  # noqa: B027
        """A module has run."""

    def backward_begins(self, account: MemoryAccount, module: int) -> None:  # noqa: B027
        """A gradient of a module's output is there."""

    def backward_ends(self, account: MemoryAccount, module: int) -> None:  # noqa: B027
        """Gradients of a module's inputs are there."""

    def settled(self, account: MemoryAccount, parameter: int) -> None:  # noqa: B027
        """A parameter's gradient is complete; it is among the account's gradients."""

    def backward_over(self, account: MemoryAccount) -> None:  # noqa: B027
        """The backward pass is over."""

    def update_begins(self, account: MemoryAccount) -> None:  # noqa: B027
        """The optimizers are about to step."""

    def update_over(self, account: MemoryAccount) -> None:
        """The optimizers have stepped, and the loop drops the gradients."""
        for parameter in [*account.gradients]:
            account.drop_gradient(parameter)


class DdpSharding(Sharding):
    """Every rank has everything, and a copy of the gradients in the buckets they are reduced in.

    Buckets are made beforehand (`gradient_as_bucket_view` is off) and kept, and since unused parameters are looked for,
    outputs are copied behind the engine's own hook.
    """

    copies_outputs = (True, False)

    @property
    def stepped(self) -> float:
        return 1.0

    def add_base(self, account: MemoryAccount) -> None:
        account.add(ShardPart.PARAMETERS, self.model.size_bytes() + self.model.buffer_bytes)
        account.add(ShardPart.BUFFERS, self.model.size_bytes(self.model.trained))

    def backward_over(self, account: MemoryAccount) -> None:
        self.ring_bytes += 2 * self.model.size_bytes(self.model.trained)
