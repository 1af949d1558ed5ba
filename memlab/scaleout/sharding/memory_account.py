"""`MemoryAccount`: live bytes of a rank by what they are for, and the highest point."""

from __future__ import annotations

from enum import StrEnum


class Part(StrEnum):
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
    """Keeps account of a rank.

    Args:
        has_host: whether host memory is another than the device's.

    Attributes:
        live: bytes by part, on the device.
        host_bytes: bytes in host memory, where that is another.
        peak_bytes: highest sum on the device.
        at_peak: bytes by part there.

    Example:
        >>> account = MemoryAccount(has_host=False)
        >>> account.add(Part.GATHERED, 100)
        >>> account.add(Part.GATHERED, -60)
        >>> account.peak_bytes, account.live[Part.GATHERED]
        (100, 40)
    """

    def __init__(self, *, has_host: bool) -> None:
        self.has_host = has_host
        self.live: dict[Part, int] = dict.fromkeys(Part, 0)
        self.host_bytes = self.peak_host_bytes = 0
        self.peak_bytes = 0
        self.at_peak: dict[Part, int] = {}
        self.gradients: dict[int, tuple[int, int]] = {}
        self.dropped: set[int] = set()
        self._total = 0

    def add(self, part: Part, size_bytes: int, *, host: bool = False) -> None:
        """Bytes come, or go where they are negative.

        Args:
            part: what they are for.
            size_bytes: how many.
            host: whether they are in host memory.
        """
        if host and self.has_host:
            self.host_bytes += size_bytes
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
            return
        self.live[part] += size_bytes
        self._total += size_bytes
        if self._total > self.peak_bytes:
            self.peak_bytes = self._total
            self.at_peak = dict(self.live)

    def touch(self, part: Part, size_bytes: int, *, host: bool = False) -> None:
        """Bytes that come and go at once."""
        self.add(part, size_bytes, host=host)
        self.add(part, -size_bytes, host=host)

    def clear(self, part: Part) -> None:
        """All of a part goes."""
        self.add(part, -self.live[part])

    def drop_gradient(self, parameter: int) -> None:
        """The gradient that backward made for a parameter goes, as its values are elsewhere now."""
        if parameter in self.gradients:
            storage, size_bytes = self.gradients.pop(parameter)
            self.dropped.add(storage)
            self.add(Part.GRADIENTS, -size_bytes)
