"""The CPU as a device: memory by the ledger, time by the wall clock."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Self

import torch

from memlab.measuring.ledger import Ledger
from memlab.measuring.observation import breakdown_at_peak
from memlab.records import TimelinePoint
from memlab.units import format_bytes


class WallMark:
    """A moment on the wall clock; it is always past."""

    def __init__(self) -> None:
        self.seconds = perf_counter()

    def passed(self) -> bool:
        """Return whether the device has come this far."""
        return True

    def seconds_since(self, earlier: Self) -> float:
        """Time from an earlier mark to this one."""
        return self.seconds - earlier.seconds


class CpuDevice:
    """The CPU, counted by a ledger; peaks are known for observed steps.

    Args:
        capacity_bytes: size to give the device; then every step is observed, as the ledger is what enforces it.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.observes_every_step = capacity_bytes is not None
        capacity = f" (capacity {format_bytes(capacity_bytes)})" if capacity_bytes is not None else ""
        self.name = f"CPU ledger{capacity}"

    def ledger(self) -> Ledger:
        """A new ledger for this device."""
        return Ledger("cpu", self.capacity_bytes)

    def mark(self) -> WallMark:
        """This moment."""
        return WallMark()

    def keep(self, loss: torch.Tensor) -> float:
        """The value of a loss."""
        return float(loss)

    def reset_peaks(self) -> None:
        """Begin a step; the ledger begins by itself."""

    def peaks(self, observed_bytes: int | None) -> tuple[int | None, int | None]:
        """Peak allocated and peak reserved bytes of the step that ends, given what a ledger saw of it."""
        return observed_bytes, None

    def driver_bytes(self) -> int | None:
        """Bytes in use by everyone; there is no driver to ask."""
        return None

    def breakdown(
        self,
        timeline: Iterable[TimelinePoint],
        allocated_bytes: int | None,
        reserved_bytes: int | None,
    ) -> dict[str, int]:
        """Live bytes by category at the peak."""
        return breakdown_at_peak(timeline)

    def close(self) -> None:
        """Give back what the device was given; nothing here."""
