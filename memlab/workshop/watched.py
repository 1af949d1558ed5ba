"""`watched`: the memory that a piece of code takes at its peak, what it leaves behind, and how both go from lap to lap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from memlab.measuring.ledger import Ledger
from memlab.units import format_bytes


class _Meter(Protocol):
    """Counts bytes beyond what lived when it began."""

    @property
    def live_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    def reset(self) -> None: ...


class _CpuMeter:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def live_bytes(self) -> int:
        return self._ledger.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self._ledger.peak_bytes

    def reset(self) -> None:
        self._ledger.peak_bytes = self._ledger.live_bytes


class _GpuMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before_bytes = torch.cuda.memory_allocated(device)
        self.reset()

    @property
    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before_bytes

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before_bytes

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class Watched:
    """Memory of a piece of code, beyond what lived before it.

    Args:
        meter: what counts.

    Attributes:
        peak_bytes: the most at any moment so far; of the whole block once it has ended.
        left_bytes: what lives now; at the end of the block once it has ended.
    """

    def __init__(self, meter: _Meter) -> None:
        self._meter: _Meter | None = meter
        self._peak_bytes = 0
        self._left_bytes = 0

    @property
    def peak_bytes(self) -> int:
        return max(self._peak_bytes, self._meter.peak_bytes if self._meter else 0)

    @property
    def left_bytes(self) -> int:
        return self._meter.live_bytes if self._meter else self._left_bytes

    def lap(self) -> int:
        """The most at any moment since the last lap, in bytes; the next lap begins.

        Raises:
            ValueError: the block has ended.
        """
        if self._meter is None:
            raise ValueError("lap: what is watched has ended; call it within the block")
        lap_bytes = self._meter.peak_bytes
        self._peak_bytes = self.peak_bytes
        self._meter.reset()
        return lap_bytes

    def _end(self) -> None:
        self._peak_bytes, self._left_bytes = self.peak_bytes, self.left_bytes
        self._meter = None

    def __str__(self) -> str:
        return f"peak {format_bytes(self.peak_bytes)}, left behind {format_bytes(self.left_bytes)}"

    __repr__ = __str__


@contextmanager
def watched(device: torch.device | str = "cpu") -> Iterator[Watched]:
    """Count the memory that a block of code takes, in training, inference or any other work with tensors.

    Args:
        device: whose memory counts. On a CPU every tensor is counted that an operator of this thread makes, on a GPU what
            the allocator says.

    Yields:
        The numbers, which stay when the block has ended.

    Known limitations:
        On a CPU, tensors that lived before the block are not known: that they die in it lowers nothing.

    Example:
        >>> with watched() as seen:
        ...     kept = [torch.zeros(256)]
        ...     kept.append(torch.zeros(512) + 1)
        >>> seen
        peak 5.0 KiB, left behind 3.0 KiB
    """
    on = torch.device(device)
    if on.type == "cuda":
        yield from _yielded(Watched(_GpuMeter(on)))
        return
    ledger = Ledger()
    ledger.begin([])
    try:
        with ledger:
            yield from _yielded(Watched(_CpuMeter(ledger)))
    finally:
        ledger.close()


def _yielded(seen: Watched) -> Iterator[Watched]:
    try:
        yield seen
    finally:
        seen._end()
