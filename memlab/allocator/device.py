"""The device behind the allocator: how much it has, and at which addresses it gives it."""

from __future__ import annotations

from memlab.allocator.sizes import OWN_SEGMENT_STEP_BYTES, UNLIMITED_BYTES, round_up

# where a CUDA process finds its device memory; only the order of addresses matters, and that traces look familiar
_FIRST_ADDRESS = 0x7F00_0000_0000
# assumed of a device without a limit, to size the ranges of expandable segments
_UNLIMITED_DEVICE_BYTES = 2**40


class Device:
    """Memory that is taken and given back by whole segments and pages.

    Args:
        capacity_bytes: what the allocator can get, None for no limit.
        total_bytes: what the device has altogether, context and other programs included.
    """

    __slots__ = ("_next_address", "capacity_bytes", "limit_bytes", "total_bytes", "used_bytes")

    def __init__(self, capacity_bytes: int | None, total_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.limit_bytes = UNLIMITED_BYTES if capacity_bytes is None else capacity_bytes
        self.total_bytes = total_bytes or capacity_bytes or _UNLIMITED_DEVICE_BYTES
        self.used_bytes = 0
        self._next_address = _FIRST_ADDRESS

    @property
    def free_bytes(self) -> int:
        """Return what could still be taken."""
        return self.limit_bytes - self.used_bytes

    def take(self, size: int) -> bool:
        """Use up memory, if there is as much."""
        if size > self.free_bytes:
            return False
        self.used_bytes += size
        return True

    def give_back(self, size: int) -> None:
        """Make memory free again."""
        self.used_bytes -= size

    def new_addresses(self, size: int) -> int:
        """Addresses no segment had before, so that a trace can tell all of them apart."""
        address = self._next_address
        self._next_address += round_up(size, OWN_SEGMENT_STEP_BYTES)
        return address
