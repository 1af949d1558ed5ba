"""Timing two ways of doing the same work against each other, so that a drifting machine cancels out."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ratio:
    """Time of one way over that of the other, pair by pair.

    Args:
        median: median of the ratios.
        low: lower quartile.
        high: upper quartile.
        seconds: median time of the first way.
        other_seconds: median time of the second way.
    """

    median: float
    low: float
    high: float
    seconds: float
    other_seconds: float


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of one call, waiting for the device."""
    _wait()
    start = clock()
    work()
    _wait()
    return clock() - start


def paired(
    work: Callable[[], object],
    other: Callable[[], object],
    pairs: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Ratio:
    """Time two ways in turn; which goes first alternates."""
    for _ in range(warmup):
        work()
        other()
    gc.collect()
    times: list[tuple[float, float]] = []
    for index in range(pairs):
        if index % 2:
            second = seconds_of(other, clock)
            times.append((seconds_of(work, clock), second))
        else:
            first = seconds_of(work, clock)
            times.append((first, seconds_of(other, clock)))
    ratios = sorted(a / b for a, b in times)
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return Ratio(median, low, high, statistics.median(a for a, _ in times), statistics.median(b for _, b in times))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
