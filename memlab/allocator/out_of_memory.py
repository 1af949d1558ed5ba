"""A request the simulated device has no room for, with the numbers of torch's own message."""

from __future__ import annotations

from dataclasses import dataclass

from memlab.errors import MemlabError
from memlab.units import format_bytes


@dataclass(frozen=True)
class OutOfMemory:
    """The requested size, and the memory there was.

    Args:
        requested_bytes: what the program asked for.
        attempted_bytes: what would have been asked of the driver for it.
        allocated_bytes: bytes of blocks in use.
        reserved_bytes: bytes held from the driver after the cache was given back.
        capacity_bytes: what the driver has to give, None without a limit.
        allowed_bytes: what the memory fraction permits, None without one.

    Example:
        >>> print(OutOfMemory(3 * 2**30, 3 * 2**30, 2**30, 2**30 + 2**21, 3 * 2**30, None))
        tried to allocate 3.00 GiB of 3.00 GiB, 2.00 GiB of which are free; 1.00 GiB are allocated and 2.0 MiB are reserved but unallocated
    """

    requested_bytes: int
    attempted_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int | None
    allowed_bytes: int | None

    @property
    def limit_bytes(self) -> int:
        """The lower of capacity and what is allowed."""
        limits = (self.capacity_bytes, self.allowed_bytes)
        return min(limit for limit in limits if limit is not None)

    @property
    def free_bytes(self) -> int:
        """Return what was left below the limit."""
        return self.limit_bytes - self.reserved_bytes

    @property
    def missing_bytes(self) -> int:
        """Return how much more the request needed from the driver."""
        return self.attempted_bytes - self.free_bytes

    def __str__(self) -> str:
        idle = self.reserved_bytes - self.allocated_bytes
        return (
            f"tried to allocate {format_bytes(self.attempted_bytes)} of {format_bytes(self.limit_bytes)}, "
            f"{format_bytes(self.free_bytes)} of which are free; {format_bytes(self.allocated_bytes)} are allocated "
            f"and {format_bytes(idle)} are reserved but unallocated"
        )


class DoesNotFitError(MemlabError):
    """A request the simulated device has no room for.

    Args:
        out_of_memory: the numbers.
    """

    def __init__(self, out_of_memory: OutOfMemory) -> None:
        self.out_of_memory = out_of_memory
        super().__init__(f"simulated device: {out_of_memory}")
