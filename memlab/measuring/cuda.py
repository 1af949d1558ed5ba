"""A CUDA device: totals from the allocator's counters on every step, categories from observed steps.

The allocator enforces a capacity by itself (`set_per_process_memory_fraction`), so the ledger here
only observes. Peak counters are reset at the beginning of each step: what the user's own code read
from `torch.cuda.max_memory_allocated` then covers the last step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch

from memlab.measuring.ledger import Ledger
from memlab.measuring.observation import breakdown_at_peak
from memlab.records import Category, TimelinePoint
from memlab.units import format_bytes


class EventMark:
    """A moment in the device's stream, reached when the work queued before it is done."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # unannotated in torch
        self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        """Return whether the device has come this far; never waits."""
        return bool(self._event.query())

    def seconds_since(self, earlier: Self) -> float:
        """Time from an earlier mark to this one; waits until it is reached."""
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1000


class CudaDevice:
    """One GPU, counted by its caching allocator.

    Args:
        device: which one; without an index the current one.
        capacity_bytes: size to make it behave as; the limit before is restored by `close`.

    Known limitations:
        The capacity limits what this process reserves through PyTorch; the CUDA context comes on top. Segments in which
        something lives when the limit begins stay whole, so that a capacity below them refuses new ones only.
    """

    observes_every_step = False

    def __init__(self, device: torch.device, capacity_bytes: int | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.capacity_bytes = capacity_bytes
        capacity = f" (capacity {format_bytes(capacity_bytes)})" if capacity_bytes is not None else ""
        self.name = f"{torch.cuda.get_device_name(self.device)}{capacity}"
        self._fraction_before: float | None = None
        if capacity_bytes is not None:
            self._limit(capacity_bytes)

    def ledger(self) -> Ledger:
        """A new ledger for this kind of device."""
        return Ledger("cuda")

    def mark(self) -> EventMark:
        """The end of what is queued now."""
        return EventMark(self.device)

    def keep(self, loss: torch.Tensor) -> torch.Tensor | float:
        """A copy of a loss in host memory, readable once a mark made after it has passed; on the CPU its value."""
        if not loss.is_cuda:
            return float(loss)
        copy = torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True)
        return copy.copy_(loss, non_blocking=True)

    def reset_peaks(self) -> None:
        """Begin a step: peaks start from what lives now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self, observed_bytes: int | None) -> tuple[int | None, int | None]:
        """Peak allocated and peak reserved bytes of the step that ends, from the allocator."""
        # one call: `max_memory_allocated` and its like each flatten hundreds of counters first
        counters = torch.cuda.memory_stats_as_nested_dict(self.device)
        return _peak(counters, "allocated_bytes"), _peak(counters, "reserved_bytes")

    def driver_bytes(self) -> int | None:
        """Bytes in use on the device by everyone, as the driver reports them."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        return total_bytes - free_bytes

    def breakdown(
        self, timeline: Iterable[TimelinePoint], allocated_bytes: int | None, reserved_bytes: int | None
    ) -> dict[str, int]:
        """Live bytes by category at the peak, and what the allocator holds beyond them."""
        parts = breakdown_at_peak(timeline)
        seen_bytes = sum(parts.values())
        if allocated_bytes is not None and allocated_bytes > seen_bytes:
            parts[str(Category.WORKSPACES)] = allocated_bytes - seen_bytes
        if allocated_bytes is not None and reserved_bytes is not None and reserved_bytes > allocated_bytes:
            parts[str(Category.UNUSED)] = reserved_bytes - allocated_bytes
        return parts

    def close(self) -> None:
        """Give the process back the share of the device it was allowed before."""
        if self._fraction_before is not None:
            torch.cuda.set_per_process_memory_fraction(self._fraction_before, self.device)
            self._fraction_before = None

    def _limit(self, capacity_bytes: int) -> None:
        # the limit refuses new segments only; what an earlier run left cached would be used beyond it
        torch.cuda.empty_cache()
        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        self._fraction_before = torch.cuda.get_per_process_memory_fraction(self.device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, capacity_bytes / total_bytes), self.device)


def _peak(counters: dict[str, dict[str, dict[str, int]]], counter: str) -> int:
    """A peak of the allocator; zero before the device was first used, when there are no counters."""
    return counters[counter]["all"]["peak"] if counters else 0
