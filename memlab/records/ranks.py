"""Predictions for each rank of a run in many processes, and GPUs that hold it: plain values without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memlab.records import Verdict
from memlab.records.measurement import Shown


@dataclass(frozen=True)
class RankPrediction(Shown):
    """Predicted needs of one rank; all ranks need the same up to one row."""

    scale: str  # engine and plan, as flags
    device: str  # what it is predicted for
    ranks: int  # number of processes, each with a device of its own
    rows: int  # rows of the batch that a rank takes
    peak_allocated_bytes: int  # highest bytes in live tensors of a rank
    host_bytes: int  # highest bytes in host memory for a rank, where that is another than the device's
    breakdown: Mapping[str, int]  # bytes by what they are for, at the peak
    divided: Mapping[str, int]  # bytes of parameters, gradients and optimizer state that a rank keeps through the step
    wire_bytes: int  # bytes a rank sends in a step
    interval_bytes: tuple[int, int]  # lowest and highest plausible peak
    notes: tuple[str, ...] = ()  # remarks, in words
    refused: str = ""  # why the engine or the plan does not apply; empty when it does. Without numbers then

    def verdict(self, budget_bytes: int) -> Verdict:
        """Return whether a rank fits into a budget."""
        return Verdict.on(self.interval_bytes, self.peak_allocated_bytes, budget_bytes, self.refused)


@dataclass(frozen=True)
class PredictedRanks(Shown):
    """Ranks of runs under several engines or numbers of processes, side by side."""

    title: str  # what is trained
    predictions: tuple[RankPrediction, ...]  # at least one; of one process first, where there is one
    # peaks that were measured, by scale and number of ranks; empty where nothing was run
    measured_bytes: Mapping[tuple[str, int], int] = field(default_factory=dict)

    def measured(self, prediction: RankPrediction) -> int | None:
        """The highest peak of a rank that was measured for a prediction; None where it was not run."""
        return self.measured_bytes.get((prediction.scale, prediction.ranks))


@dataclass(frozen=True)
class Fewest:
    """The fewest GPUs of one model that hold a workload under one engine."""

    gpu: str  # name of the GPU
    memory_bytes: int  # of one
    engine: str  # as in ``--scale``
    prediction: RankPrediction | None  # of a rank, with that many; None when no number that was asked about is enough

    @property
    def ranks(self) -> int | None:
        """Return how many; None when no number that was asked about is enough."""
        return None if self.prediction is None else self.prediction.ranks


@dataclass(frozen=True)
class HowMany(Shown):
    """Numbers of GPUs of each kind that hold a workload."""

    title: str  # what is trained
    most: int  # largest number of GPUs that was considered
    rows: tuple[Fewest, ...]  # GPUs and engines, by memory
    notes: tuple[str, ...] = ()  # remarks on all of them

    def of(self, gpu: str, engine: str) -> Fewest | None:
        """The row of a GPU under an engine; None when it was not considered."""
        return next((row for row in self.rows if (row.gpu, row.engine) == (gpu, engine)), None)
