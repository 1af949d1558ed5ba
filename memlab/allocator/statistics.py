"""The allocator's counters, under the names of `torch.cuda.memory_stats`.

*Allocated* and *active* bytes are those of blocks, an unsplit remainder included; *requested* bytes are what
was asked for. *Reserved* bytes are what the driver handed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from memlab.errors import MemlabError
from memlab.units import format_bytes


@dataclass(frozen=True)
class OutOfMemory:
    """The requested size, and the memory there was.

    Example:
        >>> print(OutOfMemory(3 * 2**30, 3 * 2**30, 2**30, 2**30 + 2**21, 3 * 2**30, None))
        tried to allocate 3.00 GiB of 3.00 GiB, 2.00 GiB of which are free; 1.00 GiB are allocated and 2.0 MiB are reserved but unallocated
    """

    requested_bytes: int  # what the program asked for
    attempted_bytes: int  # what would have been asked of the driver for it
    allocated_bytes: int  # bytes of blocks in use
    reserved_bytes: int  # bytes held from the driver after the cache was given back
    capacity_bytes: int | None  # what the driver has to give, None without a limit
    allowed_bytes: int | None  # what the memory fraction permits, None without one

    @property
    def limit_bytes(self) -> int:
        """The lower of capacity and what is allowed."""
        limits = (self.capacity_bytes, self.allowed_bytes)
        return min(limit for limit in limits if limit is not None)

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.reserved_bytes

    def __str__(self) -> str:
        idle = self.reserved_bytes - self.allocated_bytes
        return (
            f"tried to allocate {format_bytes(self.attempted_bytes)} of {format_bytes(self.limit_bytes)}, "
            f"{format_bytes(self.free_bytes)} of which are free; {format_bytes(self.allocated_bytes)} are allocated "
            f"and {format_bytes(idle)} are reserved but unallocated"
        )


class DoesNotFitError(MemlabError):
    """A request the simulated device has no room for."""

    def __init__(self, out_of_memory: OutOfMemory) -> None:
        self.out_of_memory = out_of_memory
        super().__init__(f"simulated device: {out_of_memory}")


# https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/CachingDeviceAllocator.h, struct DeviceStats
NAMES = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
    "inactive_split_bytes", "requested_bytes",
)  # fmt: skip


class Stat:
    """A number that goes up and down: its value, its highest value, and both sums."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, amount: int) -> None:
        self.allocated += amount
        self.current += amount
        if self.current > self.peak:  # noqa: PLR1730, RUF100 - max() costs a call, millions of times
            self.peak = self.current

    def remove(self, amount: int) -> None:
        self.current -= amount
        self.freed += amount

    def change(self, amount: int) -> None:
        if amount > 0:
            self.add(amount)
        elif amount < 0:
            self.remove(-amount)

    def items(self, name: str) -> Iterator[tuple[str, int]]:
        for part in ("current", "peak", "allocated", "freed"):
            yield f"{name}.{part}", getattr(self, part)


class PoolStatistics:
    """The nine numbers of one pool, or of both together."""

    __slots__ = NAMES

    def __init__(self) -> None:
        self.allocation, self.segment, self.inactive_split = Stat(), Stat(), Stat()
        self.allocated_bytes, self.reserved_bytes = Stat(), Stat()
        self.inactive_split_bytes, self.requested_bytes = Stat(), Stat()
        # no block waits for another stream here
        self.active, self.active_bytes = self.allocation, self.allocated_bytes

    def hand_out(self, block_bytes: int, requested_bytes: int) -> None:
        self.allocation.add(1)
        self.allocated_bytes.add(block_bytes)
        self.requested_bytes.add(requested_bytes)

    def take_back(self, block_bytes: int, requested_bytes: int) -> None:
        self.allocation.remove(1)
        self.allocated_bytes.remove(block_bytes)
        self.requested_bytes.remove(requested_bytes)

    def change_idle(self, blocks: int, size: int) -> None:
        """Idle parts of segments in use become more or fewer."""
        self.inactive_split.change(blocks)
        self.inactive_split_bytes.change(size)

    def stats(self) -> Iterator[tuple[str, Stat]]:
        return ((name, getattr(self, name)) for name in NAMES)


class Counters:
    """Counters of the whole allocator."""

    def __init__(self) -> None:
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()


@dataclass(frozen=True)
class Statistics:
    """The allocator's numbers at one moment."""

    values: Mapping[str, int]  # every number under its name in `torch.cuda.memory_stats`
    out_of_memory: OutOfMemory | None = None  # the request that did not fit, where a replay ended with one

    def __getitem__(self, name: str) -> int:
        return self.values[name]

    @property
    def fits(self) -> bool:
        return self.out_of_memory is None

    @property
    def allocated_bytes(self) -> int:
        return self.values["allocated_bytes.all.current"]

    @property
    def reserved_bytes(self) -> int:
        return self.values["reserved_bytes.all.current"]

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes of blocks in use, as `torch.cuda.max_memory_allocated` says it."""
        return self.values["allocated_bytes.all.peak"]

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes held from the driver, as `torch.cuda.max_memory_reserved` says it."""
        return self.values["reserved_bytes.all.peak"]


def values_of(meters: Mapping[str, PoolStatistics], counters: Counters, max_split_bytes: int) -> dict[str, int]:
    """All numbers under their flat names, sorted as torch sorts them."""
    values = {
        flat: number
        for pool, meter in meters.items()
        for name, stat in meter.stats()
        for flat, number in stat.items(f"{name}.{pool}")
    }
    for name, value in vars(counters).items():
        values.update(value.items(name) if isinstance(value, Stat) else [(name, value)])
    # torch keeps it in a signed number, in which "no limit" reads −1
    values["max_split_size"] = max_split_bytes if max_split_bytes < 2**63 else -1
    return dict(sorted(values.items()))
