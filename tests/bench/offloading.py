"""What offload costs a step: memory that is used again against memory that is made anew, and torch's own hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from unittest.mock import patch

import torch

from memlab import Workload
from memlab.measuring.runs import training_step
from memlab.session import fit
from memlab.techniques.offload import pool as _pool
from memlab.techniques.offload.pool import Pool
from tests.bench.figures import Figure
from tests.bench.timing import paired
from tests.bench.workloads import gpt2
from tests.techniques import models

Step = Callable[[], None]

_STEPS = 4  # under one plan, so that changing it counts for little


def offloading(device: torch.device, pairs: int) -> list[Figure]:
    """Steps with activations off the device, and with optimizer state off it, against other ways of the same."""
    on_cpu = device.type == "cpu"
    workload = _workload(device)
    session = fit(workload)

    def train() -> None:
        for _ in range(_STEPS):
            training_step(workload)

    def step(flags: str) -> None:
        if str(session.plan) != flags:
            session.switch(flags, now=True)
        train()

    def anew() -> None:
        with _made_anew():
            step("--offload activations")

    def torchs() -> None:
        session.switch("", now=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=not on_cpu):
            train()

    def offloaded() -> None:
        step("--offload activations")

    ways: list[tuple[str, Step, Step, float | None]] = [
        ("activations offloaded against as written", offloaded, lambda: step(""), None),
        ("optimizer state offloaded against as written", lambda: step("--offload optimizer"), lambda: step(""), None),
        ("activations offloaded against torch's save_on_cpu", offloaded, torchs, None),
    ]
    if on_cpu:
        ways.append(("a pool of file regions against a file per tensor", offloaded, anew, 1.0))
    found = [_figure(name, one, other, bound, pairs) for name, one, other, bound in ways]
    session.undo()
    return found


def _workload(device: torch.device) -> Workload:
    """GPT-2: on a CPU one of 3 million parameters, whose steps are as short as the copies are small."""
    if device.type == "cpu":
        return models.workload(
            models.gpt2(vocabulary=512, layers=4, width=256), **models.ragged_batch(vocabulary=512, length=64)
        )
    return gpt2(device, batch=8, tokens=512)


def _figure(name: str, one: Step, other: Step, bound: float | None, pairs: int) -> Figure:
    ratio = paired(one, other, pairs)
    return Figure(f"{name} (time)", ratio.median, bound, asdict(ratio))


@contextmanager
def _made_anew() -> Iterator[None]:
    """Every tensor gets a file of its own, which goes with it: what a pool saves."""
    with patch.object(Pool, "take", lambda _self, size_bytes: _region(size_bytes)):
        yield


def _region(size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(_pool.file_slab(size_bytes)[:size_bytes], dtype=torch.uint8)
