"""The allocator's counters, under the names of `torch.cuda.memory_stats`.

*Allocated* and *active* bytes are those of blocks, an unsplit remainder included; *requested* bytes are what
was asked for. *Reserved* bytes are what the driver handed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from memlab.allocator.out_of_memory import OutOfMemory

# https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/CachingDeviceAllocator.h, struct DeviceStats
NAMES = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)


class Stat:
    """A number that goes up and down: its value, its highest value, and both sums."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, amount: int) -> None:
        """Count upwards."""
        self.allocated += amount
        self.current += amount
        if self.current > self.peak:  # noqa: PLR1730, RUF100 - max() costs a call, millions of times
            self.peak = self.current

    def remove(self, amount: int) -> None:
        """Count downwards."""
        self.current -= amount
        self.freed += amount

    def change(self, amount: int) -> None:
        """Count upwards or downwards, by the sign."""
        if amount > 0:
            self.add(amount)
        elif amount < 0:
            self.remove(-amount)

    def items(self, name: str) -> Iterator[tuple[str, int]]:
        """The four numbers under their flat names."""
        for part in ("current", "peak", "allocated", "freed"):
            yield f"{name}.{part}", getattr(self, part)


class Meter:
    """The nine numbers of one pool, or of both together."""

    __slots__ = NAMES

    def __init__(self) -> None:
        self.allocation, self.segment, self.active, self.inactive_split = Stat(), Stat(), Stat(), Stat()
        self.allocated_bytes, self.reserved_bytes, self.active_bytes = Stat(), Stat(), Stat()
        self.inactive_split_bytes, self.requested_bytes = Stat(), Stat()

    def hand_out(self, block_bytes: int, requested_bytes: int) -> None:
        """A block goes to the program."""
        self.allocation.add(1)
        self.allocated_bytes.add(block_bytes)
        self.active.add(1)
        self.active_bytes.add(block_bytes)
        self.requested_bytes.add(requested_bytes)

    def take_back(self, block_bytes: int, requested_bytes: int) -> None:
        """A block comes back from the program."""
        self.allocation.remove(1)
        self.allocated_bytes.remove(block_bytes)
        self.active.remove(1)
        self.active_bytes.remove(block_bytes)
        self.requested_bytes.remove(requested_bytes)

    def change_idle(self, blocks: int, size: int) -> None:
        """Idle parts of segments in use become more or fewer."""
        self.inactive_split.change(blocks)
        self.inactive_split_bytes.change(size)

    def stats(self) -> Iterator[tuple[str, Stat]]:
        """Every number with its name."""
        return ((name, getattr(self, name)) for name in NAMES)


class Counters:
    """Counters of the whole allocator."""

    def __init__(self) -> None:
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()


@dataclass(frozen=True)
class Statistics:
    """The allocator's numbers at one moment.

    Args:
        values: every number under its name in `torch.cuda.memory_stats`.
        out_of_memory: the request that did not fit, where a replay ended with one.

    Example:
        >>> from memlab.allocator import Allocator
        >>> allocator = Allocator()
        >>> _ = allocator.malloc(1000)
        >>> statistics = allocator.stats()
        >>> statistics["requested_bytes.all.current"], statistics.allocated_bytes, statistics.reserved_bytes
        (1000, 1024, 2097152)
    """

    values: Mapping[str, int]
    out_of_memory: OutOfMemory | None = None

    def __getitem__(self, name: str) -> int:
        return self.values[name]

    @property
    def fits(self) -> bool:
        """Return whether every request was served."""
        return self.out_of_memory is None

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks in use."""
        return self.values["allocated_bytes.all.current"]

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the driver."""
        return self.values["reserved_bytes.all.current"]

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes of blocks in use, as `torch.cuda.max_memory_allocated` says it."""
        return self.values["allocated_bytes.all.peak"]

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes held from the driver, as `torch.cuda.max_memory_reserved` says it."""
        return self.values["reserved_bytes.all.peak"]

    @property
    def peak_requested_bytes(self) -> int:
        """The most bytes asked for at one time, before any rounding."""
        return self.values["requested_bytes.all.peak"]


def reset_peak(meters: Mapping[str, Meter], counters: Counters) -> None:
    """Let the highest values start again from the present ones."""
    for stat in (stat for meter in meters.values() for _, stat in meter.stats()):
        stat.peak = stat.current
    for stat in (counters.oversize_allocations, counters.oversize_segments):
        stat.peak = stat.current


def values_of(meters: Mapping[str, Meter], counters: Counters, max_split_bytes: int) -> dict[str, int]:
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
