"""Micro-batches, and over which rows BatchNorm takes its statistics then."""

from __future__ import annotations

import math
import operator
from enum import StrEnum

from memlab.plan.fields import PlanField, Saving, choice, count

COUNTS = ("1", "2", "4", "8", "16")  # that are offered


class BatchNorm(StrEnum):
    """Over which rows BatchNorm takes its statistics when a batch is split."""

    KEEP = "keep"
    MICRO = "micro"


def _rows_at_a_time(before: int, after: int, rows: int) -> str:
    if after >= rows:
        return "one row at a time"
    if (before, after) == (1, 2):
        return "half the rows at a time"
    return f"at most {math.ceil(rows / after)} rows at a time"


ACCUMULATION = PlanField(
    "accumulation", "--accumulate", "N",
    "split each batch into N micro-batches; the gradient is that of the whole batch",
    count("--accumulate", "micro-batches"),
    choices=COUNTS, offer="4", title="Gradient accumulation", is_exact=True, is_of_calls=True, is_graded=True,
    covers=operator.ge, searched=COUNTS,
    untrained="rows do not wait for each other without an update: feed fewer rows at a time",
    names={"2": "2 micro-batches", "4": "4 micro-batches", "8": "8 micro-batches", "16": "16 micro-batches"},
)  # fmt: skip
BATCHNORM = PlanField(
    "batchnorm", "--batchnorm", "keep|micro",
    "with --accumulate, let BatchNorm take its statistics from each micro-batch, as in accumulation written by hand",
    choice("--batchnorm", BatchNorm),
    choices=tuple(BatchNorm), offer="micro", title="BatchNorm per micro-batch", is_of_calls=True,
)  # fmt: skip
SAVING = Saving(
    ACCUMULATION, _rows_at_a_time, lambda n: 1.03 ** math.log2(n),
    lambda n, rows, _half: max(n, min(2 * n, rows)), measured=("4",),
)  # fmt: skip
