"""Predictions for each rank of a run in many processes, and GPUs that hold it: plain values without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memlab.records import Verdict
from memlab.records.measurement import Shown


@dataclass(frozen=True)
class RankPrediction(Shown):
    """Predicted needs of one rank; all ranks need the same up to one row.

    Args:
        scale: engine and plan, as flags.
        device: what it is predicted for.
        ranks: number of processes, each with a device of its own.
        rows: rows of the batch that a rank takes.
        peak_allocated_bytes: highest bytes in live tensors of a rank.
        host_bytes: highest bytes in host memory for a rank, where that is another than the device's.
        breakdown: bytes by what they are for, at the peak.
        divided: bytes of parameters, gradients and optimizer state that a rank keeps through the step.
        wire_bytes: bytes a rank sends in a step.
        interval_bytes: lowest and highest plausible peak.
        notes: remarks, in words.
        refused: why the engine or the plan does not apply; empty when it does. Without numbers then.
    """

    scale: str
    device: str
    ranks: int
    rows: int
    peak_allocated_bytes: int
    host_bytes: int
    breakdown: Mapping[str, int]
    divided: Mapping[str, int]
    wire_bytes: int
    interval_bytes: tuple[int, int]
    notes: tuple[str, ...] = ()
    refused: str = ""

    def verdict(self, budget_bytes: int) -> Verdict:
        """Return whether a rank fits into a budget."""
        return Verdict.on(self.interval_bytes, self.peak_allocated_bytes, budget_bytes, self.refused)


@dataclass(frozen=True)
class PredictedRanks(Shown):
    """Ranks of runs under several engines or numbers of processes, side by side.

    Args:
        title: what is trained.
        predictions: at least one; of one process first, where there is one.
        measured_bytes: peaks that were measured, by scale and number of ranks; empty where nothing was run.
    """

    title: str
    predictions: tuple[RankPrediction, ...]
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
    """Numbers of GPUs of each kind that hold a workload.

    Args:
        title: what is trained.
        most: largest number of GPUs that was considered.
        rows: GPUs and engines, by memory.
        notes: remarks on all of them.
    """

    title: str
    most: int
    rows: tuple[Fewest, ...]
    notes: tuple[str, ...] = ()

    def of(self, gpu: str, engine: str) -> Fewest | None:
        """The row of a GPU under an engine; None when it was not considered."""
        return next((row for row in self.rows if (row.gpu, row.engine) == (gpu, engine)), None)
