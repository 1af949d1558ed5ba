"""How a loop is measured: the same for every contestant, from outside, without a session of memlab.

Steps to warm up, steps that are timed, and on a CPU two more that a ledger watches, since it would slow down what is
timed. On a GPU the allocator's counters cover the timed steps, and the driver tells what the device had in use.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from memlab.measuring.device import TimeMark, device_for
from memlab.records import Category

_WARMUP = {"tiny": 1, "small": 1, "full": 5}
_TIMED = {"tiny": 2, "small": 4, "full": 20}
_OBSERVED = 2


@dataclass(frozen=True)
class Job:
    """What a contestant is asked to do.

    Args:
        scale: size of the work.
        device: where to do it.
    """

    scale: str
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def half(self) -> str:
        """The half precision that both sides can run here: what the table used on a GPU, bf16 on a CPU."""
        return "fp16" if self.on_gpu else "bf16"


class Watch:
    """Watches a loop that says when a step has ended.

    Args:
        job: where the loop runs, and how long.
        rows: rows of a step.
    """

    def __init__(self, job: Job, rows: int) -> None:
        self.rows = rows
        self._device = device_for(job.device)
        self._ledger = self._device.ledger()
        self._on_gpu = job.on_gpu
        self._warmup, self._timed = _WARMUP[job.scale], _TIMED[job.scale]
        self._marks: list[TimeMark] = []
        self._ended = 0
        self._at_start_bytes = 0 if job.on_gpu else resident_bytes("VmRSS")
        self._numbers: dict[str, float] = {}

    @property
    def steps(self) -> int:
        """How many steps the loop is to do."""
        return self._warmup + self._timed + (0 if self._on_gpu else _OBSERVED)

    def step_ended(self) -> None:
        """A step of the loop is over, its gradients dropped."""
        self._ended += 1
        if self._warmup <= self._ended <= self._warmup + self._timed:
            self._marks.append(self._device.mark())
        if self._ended == self._warmup:
            self._reset_process_peak()
            self._device.reset_peaks()
        if self._ended == self._warmup + self._timed:
            self._read_peaks()
        if self._ended == self.steps and not self._on_gpu:
            self._numbers["peak_allocated_bytes"] = self._ledger.peak_bytes
            self._ledger.close()

    def numbers(self) -> dict[str, float]:
        """What was measured, when the loop is over."""
        assert self._ended >= self.steps, f"the loop ended {self._ended} of {self.steps} steps"
        seconds = [later.seconds_since(earlier) for earlier, later in zip(self._marks, self._marks[1:], strict=False)]
        step_seconds = statistics.median(seconds)
        return {**self._numbers, "step_seconds": step_seconds, "sample_seconds": step_seconds / self.rows}

    def _read_peaks(self) -> None:
        if self._on_gpu:
            allocated_bytes, reserved_bytes = self._device.peaks(None)
            self._numbers["peak_allocated_bytes"] = allocated_bytes or 0
            self._numbers["peak_reserved_bytes"] = reserved_bytes or 0
            self._numbers["process_bytes"] = self._device.driver_bytes() or 0
            return
        self._numbers["process_bytes"] = max(0, resident_bytes("VmHWM") - self._at_start_bytes)
        gc.collect()
        self._ledger.begin((Category.TEMPORARIES, tensor) for tensor in living_tensors())
        self._ledger.start()

    def _reset_process_peak(self) -> None:
        gc.collect()
        if not self._on_gpu:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew


def living_tensors() -> Iterator[torch.Tensor]:
    """Every tensor of this process, gradients included, which may have no Python object until they are asked for.

    Fake ones, which compilers keep, have a size and no memory.
    """
    for each in [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]:
        if isinstance(each, (FakeTensor, FunctionalTensor)):
            continue
        yield each
        if each.requires_grad and each.is_leaf and each.grad is not None:
            yield each.grad


def resident_bytes(field: str) -> int:
    """A line of this process's memory status: VmRSS (now) or VmHWM (its peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
