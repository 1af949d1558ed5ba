"""`Device`: what memory and time are counted on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from memlab.errors import WorkloadError
from memlab.measuring.cpu import CpuDevice
from memlab.measuring.cuda import CudaDevice
from memlab.measuring.ledger import Ledger
from memlab.records import TimelinePoint


class Mark(Protocol):
    """A moment on a device."""

    def passed(self) -> bool:
        """Return whether the device has come this far; never waits."""

    def seconds_since(self, earlier: Any) -> float:
        """Time from an earlier mark of the same device; may wait until this one is reached."""


class Device(Protocol):
    """The device whose memory is counted.

    Attributes:
        name: the device in words, with its capacity when it was given one.
        capacity_bytes: size it was given, or None.
        observes_every_step: whether the ledger must watch all steps, because it enforces the capacity.
    """

    name: str
    capacity_bytes: int | None
    observes_every_step: bool

    def ledger(self) -> Ledger:
        """A new ledger for this kind of device."""

    def mark(self) -> Mark:
        """This moment."""

    def keep(self, loss: torch.Tensor) -> torch.Tensor | float:
        """A copy of a loss, readable without waiting once a mark made after it has passed."""

    def reset_peaks(self) -> None:
        """Begin a step: peaks start from what lives now."""

    def peaks(self, observed_bytes: int | None) -> tuple[int | None, int | None]:
        """Peak allocated and peak reserved bytes of the step that ends, given what a ledger saw of it."""

    def driver_bytes(self) -> int | None:
        """Bytes in use by everyone, where a driver reports them."""

    def breakdown(
        self, timeline: Iterable[TimelinePoint], allocated_bytes: int | None, reserved_bytes: int | None
    ) -> dict[str, int]:
        """Bytes by category at the peak of an observed step."""

    def close(self) -> None:
        """Give back what the device was given."""


def device_for(device: torch.device, capacity_bytes: int | None = None) -> Device:
    """The device that counts the memory of tensors on `device`.

    Args:
        device: where the model is.
        capacity_bytes: size to make it behave as.

    Raises:
        WorkloadError: neither a CPU nor a CUDA device.
    """
    if device.type == "cpu":
        return CpuDevice(capacity_bytes)
    if device.type == "cuda":
        return CudaDevice(device, capacity_bytes)
    raise WorkloadError(f"device {device}: memory is measured on cpu and cuda; move the model to one of them")
