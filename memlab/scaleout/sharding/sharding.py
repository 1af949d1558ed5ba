"""`Sharding`: what an engine adds to the step of a rank, and takes from it; `Ddp`, under which nothing is divided."""

from __future__ import annotations

from abc import ABC, abstractmethod

from memlab.scaleout.sharding.memory_account import MemoryAccount, Part
from memlab.scaleout.sharding.shape import ModelShape
from memlab.scaleout.sharding.wire import Wire

# elements of the flat tensor that the optimizer steps in place of each group's parameters
Flats = tuple[int, ...]


class Sharding(ABC):
    """The rules of an engine on one rank; moments are told in the order in which a step has them.

    Args:
        model: what is divided.
        ranks: among how many.
        offloads: whether optimizer state is in host memory.

    Attributes:
        wire: what has been sent over the wire.
    """

    # what a hook of the engine on the model's outputs copies of them: (at the end of forward, in backward)
    copies_outputs = (False, False)
    # whether the engine has linear layers keep parameters for backward, and not views or copies of them
    keeps_parameters = False

    def __init__(self, model: ModelShape, ranks: int, *, offloads: bool = False) -> None:
        self.model = model
        self.ranks = ranks
        self.offloads = offloads
        self.wire = Wire(ranks)

    @property
    @abstractmethod
    def stepped(self) -> Flats | float:
        """Return what the optimizer steps on this rank: flat tensors, or this share of every parameter."""

    @abstractmethod
    def stands(self, account: MemoryAccount) -> None:
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
        """They have stepped, and the loop drops the gradients."""
        for parameter in [*account.gradients]:
            account.drop_gradient(parameter)


class Ddp(Sharding):
    """Every rank has everything, and a copy of the gradients in the buckets they are reduced in.

    Buckets are made beforehand (`gradient_as_bucket_view` is off) and kept, and since unused parameters are looked for,
    outputs are copied behind the engine's own hook.
    """

    copies_outputs = (True, False)

    @property
    def stepped(self) -> float:
        return 1.0

    def stands(self, account: MemoryAccount) -> None:
        account.add(Part.PARAMETERS, self.model.size_bytes() + self.model.buffer_bytes)
        account.add(Part.BUFFERS, self.model.size_bytes(self.model.trained))

    def backward_over(self, account: MemoryAccount) -> None:
        self.wire.all_reduced(self.model.size_bytes(self.model.trained))
