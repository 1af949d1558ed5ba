"""One meter for the models that train in one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from memlab.measuring.device import Device
from memlab.measuring.steps import Meter
from memlab.runtime.batch import Batch
from memlab.runtime.observer import Observer
from memlab.session import Session


def meter_of(sessions: Callable[[], Sequence[Session]], device: Device) -> Meter:
    """Make the meter of a loop's sessions, which may become more or others, on the first one's model; the caller closes it."""
    first = sessions()[0].workload
    return Meter(
        first.model,
        first.optimizers,
        device,
        lambda: sum(each.host_bytes for each in sessions()),
        lambda: (tensor for each in sessions() for tensor in each.in_force.held_tensors),
    )


class CompanionObserver(Observer):
    """Tells the meter of one model what happens to another one of the same loop.

    Calls of the other model within a call of the first are part of that call, and steps of a shared optimizer are
    told by the first.
    """

    def __init__(self, meter: Meter, number: int) -> None:
        self._meter = meter
        self._number = number
        self._is_inner = False

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        self._meter.optimizer_found(optimizer)

    def forward_begins(self, batch: Batch) -> None:
        self._is_inner = self._meter.in_forward
        if not self._is_inner:
            self._meter.step_goes_on(self._number, batch)
        self._meter.call_begins(self._number, batch)

    def forward_ended(self, loss: torch.Tensor | None) -> None:
        self._meter.call_ended()
        if not self._is_inner:
            self._meter.forward_is_over(loss)

    def evaluation_begins(self, batch: Batch) -> None:
        self._meter.evaluation_begins(batch)

    def evaluation_ended(self) -> None:
        self._meter.evaluation_ended()

    def gradients_complete(self) -> None:
        self._meter.gradients_complete()

    def only_tried(self) -> None:
        self._meter.only_tried()

    def only_watched(self) -> None:
        self._meter.only_watched()

    def storage_resized(self, storage: torch.UntypedStorage) -> None:
        self._meter.storage_resized(storage)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._meter.step_begins(optimizer)

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        self._meter.step_ended(optimizer, skipped)

    def interrupted(self) -> None:
        self._meter.interrupted()
