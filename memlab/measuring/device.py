"""`Device`: what memory and time are counted on, the CPU or an accelerator."""

from __future__ import annotations

import math
from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch

from memlab.errors import WorkloadError
from memlab.measuring.ledger import Ledger
from memlab.records import Category, TimelinePoint
from memlab.runtime import accelerator
from memlab.runtime.cublas import workspaces
from memlab.runtime.host_memory import pinned
from memlab.units import MIB, format_bytes

_CPU = torch.device("cpu")


class TimeMark:
    """A moment: here one of the wall clock, which is always past."""

    def __init__(self) -> None:
        self._seconds = perf_counter()

    def passed(self) -> bool:
        """Return whether the device has come this far; never waits."""
        return True

    def seconds_since(self, earlier: Any) -> float:
        """Time from an earlier mark of the same device; may wait until this one is reached."""
        return float(self._seconds - earlier._seconds)


class StreamMark(TimeMark):
    """A moment in the device's stream, reached when the work queued before it is done."""

    def __init__(self, device: torch.device) -> None:
        self._event = accelerator.timed_event(device)

    def passed(self) -> bool:
        return bool(self._event.query())

    def seconds_since(self, earlier: Any) -> float:
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1000


class Device:
    """The device whose memory is counted: here by the ledger alone, with times of the wall clock.

    Peaks are those of observed steps, and the ledger is what enforces a capacity.

    Attributes:
        name: the device in words, with its size, or the capacity that it was given.
        capacity_bytes: size it was given, or None.
        total_bytes: size it was given, or its own; 0 where that is not known.
        observes_every_step: whether the ledger must watch all steps, because it enforces the capacity.
        counts_every_step: whether each step has a peak of its own; else those that the ledger watches.
    """

    def __init__(self, capacity_bytes: int | None = None, device: torch.device = _CPU) -> None:
        self.device = device
        self.observes_every_step = self.counts_every_step = capacity_bytes is not None
        self._describe(f"{accelerator.name_of(device)} ledger", capacity_bytes)
        self.total_bytes = capacity_bytes or 0

    def _describe(self, name: str, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.name = name if capacity_bytes is None else f"{name} (capacity {format_bytes(capacity_bytes)})"

    def ledger(self) -> Ledger:
        return Ledger(self.device.type, self.capacity_bytes)

    def mark(self) -> TimeMark:
        return TimeMark()

    def keep(self, loss: torch.Tensor) -> torch.Tensor | float:
        """A copy of a loss, readable without waiting once a mark made after it has passed."""
        return float(loss)

    def reset_peaks(self) -> None:
        """Begin a step: peaks start from what lives now."""

    def peaks(self, observed_bytes: int | None) -> tuple[int | None, int | None]:
        """Peak allocated and peak reserved bytes of the step that ends, given what a ledger saw of it."""
        return observed_bytes, None

    def driver_bytes(self) -> int | None:
        """Bytes in use by everyone, where a driver reports them."""
        return None

    def elsewhere_bytes(self, known_bytes: int) -> int:
        """Bytes allocated at this moment for what is no part of the loop, such as another model of the notebook."""
        return 0

    def breakdown(
        self,
        timeline: Iterable[TimelinePoint],  # of the step
        allocated_bytes: int | None,  # its peak, as the allocator counts
        reserved_bytes: int | None,  # likewise
        elsewhere_bytes: int = 0,  # of what lived before it without being part of the loop
    ) -> dict[str, int]:
        """Live bytes by category at the peak of an observed step, and what the allocator holds beyond them."""
        highest = max(timeline, key=lambda point: point.total_bytes)
        return {str(category): size for category, size in highest.live_bytes.items() if size}

    def close(self) -> None:
        """Give back what the device was given."""


class CountedDevice(Device):
    """One accelerator: totals from the allocator's counters on every step, categories from observed steps.

    The allocator enforces a capacity by itself, so the ledger only observes. Peak counters are reset at the beginning of
    each step: what the user's own code reads from `torch.cuda.max_memory_allocated` and its like then covers the last step.

    Known limitations:
        The capacity limits what this process reserves through PyTorch; the CUDA context comes on top. Segments in which
        something lives when the limit begins stay whole, so that a capacity below them refuses new ones only.
    """

    def __init__(self, device: torch.device, capacity_bytes: int | None = None) -> None:
        super().__init__(None, accelerator.with_index(device))
        self.counts_every_step = True
        self.total_bytes = accelerator.total_bytes(self.device)
        name = accelerator.device_name(self.device)
        self._describe(f"{name} ({format_bytes(self.total_bytes)})" if capacity_bytes is None else name, capacity_bytes)
        self._fraction_before: float | None = None
        if capacity_bytes is not None:
            self._limit(capacity_bytes)

    def ledger(self) -> Ledger:
        return Ledger(self.device.type)

    def mark(self) -> TimeMark:
        return StreamMark(self.device)

    def keep(self, loss: torch.Tensor) -> torch.Tensor | float:
        if loss.device.type != self.device.type or not accelerator.has_streams(self.device):
            return float(loss)
        copy = pinned(loss.nbytes).view(loss.dtype).view(loss.shape)
        return copy.copy_(loss, non_blocking=True)

    def reset_peaks(self) -> None:
        accelerator.reset_peaks(self.device)

    def peaks(self, observed_bytes: int | None) -> tuple[int | None, int | None]:
        counted = accelerator.counters(self.device) or accelerator.Counters()
        return counted.allocated_peak, counted.reserved_peak

    def driver_bytes(self) -> int | None:
        free_bytes, total_bytes = accelerator.free_and_total(self.device)
        return total_bytes - free_bytes

    def elsewhere_bytes(self, known_bytes: int) -> int:
        requested_bytes = (accelerator.counters(self.device) or accelerator.Counters()).requested
        capability = accelerator.compute_capability(self.device)
        kept_bytes = 0 if capability is None else sum(workspaces(capability))
        rest_bytes = requested_bytes - known_bytes - kept_bytes
        return rest_bytes if rest_bytes > MIB else 0  # small tensors of the model's own

    def breakdown(
        self,
        timeline: Iterable[TimelinePoint],
        allocated_bytes: int | None,
        reserved_bytes: int | None,
        elsewhere_bytes: int = 0,
    ) -> dict[str, int]:
        parts = super().breakdown(timeline, allocated_bytes, reserved_bytes)
        rest_bytes = 0 if allocated_bytes is None else allocated_bytes - sum(parts.values())
        rests = {
            Category.ELSEWHERE: min(elsewhere_bytes, rest_bytes),
            Category.WORKSPACES: rest_bytes - elsewhere_bytes,
        }
        parts |= {str(category): size for category, size in rests.items() if size > 0}
        if allocated_bytes is not None and reserved_bytes is not None and reserved_bytes > allocated_bytes:
            parts[str(Category.UNUSED)] = reserved_bytes - allocated_bytes
        return parts

    def close(self) -> None:
        if self._fraction_before is not None:
            accelerator.limit_share(self.device, self._fraction_before)
            self._fraction_before = None

    def _limit(self, capacity_bytes: int) -> None:
        # the limit refuses new segments only; what an earlier run left cached would be used beyond it
        accelerator.empty_cache()
        self._fraction_before = accelerator.allowed_share(self.device)
        # rounded up: the allocator drops what the product with the total has behind the point, a byte where it is just below
        fraction = math.nextafter(capacity_bytes / self.total_bytes, math.inf)
        accelerator.limit_share(self.device, min(1.0, fraction))


def device_for(device: torch.device, capacity_bytes: int | None = None) -> Device:
    """The device that counts the memory of tensors on `device`."""
    if device.type == "cpu":
        return Device(capacity_bytes)
    if not accelerator.is_accelerator(device):
        raise WorkloadError(
            f"device {device}: memory is measured on the CPU and on accelerators that torch has a module for (torch.cuda, "
            "torch.xpu, torch.mps); move the model to one of them"
        )
    if accelerator.has_peaks(device) and (capacity_bytes is None or accelerator.can_limit(device)):
        return CountedDevice(device, capacity_bytes)
    return Device(capacity_bytes, device)
