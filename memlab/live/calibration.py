"""The measurement by which predicted times of a workload are put right."""

from __future__ import annotations

from collections.abc import Iterable

from memlab.measuring.runs import rows_of
from memlab.records import Measurement
from memlab.runtime.workload import Batch, Workload


def calibration(measurements: Iterable[Measurement], workload: Workload) -> Measurement | None:
    """Find the first measurement with times of steps on batches such as a workload's."""
    rows = rows_of(workload)
    usable = (each for each in measurements if each.step_seconds and each.samples_per_step == rows)
    return next((each for each in usable if is_of_such_batches(each, workload)), None)


def is_of_such_batches(measured: Measurement, workload: Workload) -> bool:
    """Return whether every step had as many tokens as the batch, or a multiple: texts of other lengths need other memory."""
    tokens = workload.batch.tokens if isinstance(workload.batch, Batch) else 0
    return not tokens or measured.tokens_per_step % tokens == 0
