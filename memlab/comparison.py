"""What runs come to, side by side: comparisons and their verdicts, and plans that were found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memlab.errors import MemlabError
from memlab.plan import Plan
from memlab.records import Measurement, Prediction, ratio
from memlab.shown import Shown


@dataclass(frozen=True)
class Row:
    """One line of a comparison: a measurement against the first one, and what was foretold for it.

    Args:
        measurement: of one plan.
        memory_ratio: its peak as a share of the first one's; NaN where its batches were of another size.
        speed_ratio: its samples per second as a share of the first one's; NaN where there is none to compare with.
        loss_drift: largest relative difference of its losses from the first one's.
        verdict: what is to be said about it.
        prediction: what was foretold for its plan.
    """

    measurement: Measurement
    memory_ratio: float
    speed_ratio: float
    loss_drift: float | None
    verdict: str
    prediction: Prediction | None = None


# a change of the peak below this share is reported as no gain
_NO_GAIN = 0.01


# batches whose sizes differ by more than this share are not compared
_OTHER_SIZE = 0.25


@dataclass(frozen=True)
class Comparison(Shown):
    """Measurements side by side; the first is what the others are compared with.

    Args:
        title: what was trained, on what.
        measurements: at least one.
        events: what happened on the way, in words (plan changes, refusals).
        predictions: what was foretold for some of the plans, in any order.
        are_ranks: whether the rows are ranks of one run, which are shown side by side and not compared.
    """

    title: str
    measurements: tuple[Measurement, ...]
    events: tuple[str, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    are_ranks: bool = False

    def __post_init__(self) -> None:
        if not self.measurements:
            raise MemlabError("a comparison needs at least one measurement; run some steps first")

    @property
    def rows(self) -> tuple[Row, ...]:
        """Each measurement beside the first one, with what is to be said about it (`verdict`)."""
        if self.are_ranks:
            return tuple(Row(each, math.nan, math.nan, None, "; ".join(each.notes)) for each in self.measurements)
        first = self.measurements[0]
        return tuple(
            _row(measurement, first, self.prediction_of(measurement.plan)) for measurement in self.measurements
        )

    def prediction_of(self, plan: str) -> Prediction | None:
        """What was foretold for a plan, by its label; None when nothing was, or the plan was refused."""
        return next((each for each in self.predictions if each.plan == plan and not each.refused), None)

    def add(self, measurement: Measurement) -> Comparison:
        """The same comparison with one more measurement; a plan measured again replaces its old row."""
        kept = [m for m in self.measurements if m.plan != measurement.plan]
        if self.measurements[0].plan == measurement.plan:
            return replace(self, measurements=(measurement, *kept))
        return replace(self, measurements=(*kept, measurement))


def _row(measurement: Measurement, first: Measurement, prediction: Prediction | None) -> Row:
    is_alike = not _other_batches(measurement, first)
    memory_ratio = measurement.peak_allocated_bytes / max(1, first.peak_allocated_bytes) if is_alike else math.nan
    return Row(
        measurement=measurement,
        memory_ratio=memory_ratio,
        speed_ratio=ratio(measurement.samples_per_second, first.samples_per_second) if is_alike else math.nan,
        loss_drift=loss_drift(first.losses, measurement.losses),
        verdict=_verdict(measurement, first, memory_ratio),
        prediction=prediction,
    )


def loss_drift(reference: Sequence[float], other: Sequence[float]) -> float | None:
    """Largest relative difference between two loss curves, or None when one is missing; infinite for inf and NaN."""
    pairs = list(zip(reference, other, strict=False))
    if not pairs:
        return None
    # max() drops a NaN that is not the first of its arguments: a diverged run would look like a good one
    drifts = [abs(a - b) / max(abs(a), 1e-12) for a, b in pairs]
    return max(drifts) if all(map(math.isfinite, drifts)) else math.inf


def _verdict(measurement: Measurement, first: Measurement, memory_ratio: float) -> str:
    other = _other_batches(measurement, first)
    if other or measurement is first or not measurement.fits or memory_ratio <= 1 - _NO_GAIN:
        return "; ".join((other, *measurement.notes) if other else measurement.notes)
    where = where_the_peak_is(measurement)
    return "; ".join((f"no gain: {where}" if where else "no gain", *measurement.notes))


def _other_batches(measurement: Measurement, first: Measurement) -> str:
    """That a measurement's batches were much larger or smaller than those of the first one; empty if not."""
    for what, mine, others in (
        ("tokens", measurement.tokens_per_step, first.tokens_per_step),
        ("rows", measurement.samples_per_step, first.samples_per_step),
    ):
        if mine and others and abs(mine / others - 1) > _OTHER_SIZE:
            return f"other batches than the first row: {mine:,.0f} {what} a step instead of {others:,.0f}"
    return ""


def where_the_peak_is(measurement: Measurement) -> str:
    """In which part of the step memory peaks, and what most of it is then; empty without a breakdown."""
    if not measurement.breakdown:
        return ""
    largest = max(measurement.breakdown, key=lambda category: measurement.breakdown[category])
    phase = measurement.phase_of_peak
    return f"the peak is in the {phase.words}, mostly {largest}" if phase else f"the peak is mostly {largest}"


@dataclass(frozen=True)
class FoundPlan(Shown):
    """The fastest plan that fits a budget, proven by running it.

    Args:
        title: what was trained, on what.
        budget_bytes: what it had to fit into.
        plan: the plan.
        measurement: what it was measured at.
        trials: every plan that was run, in order; those that did not fit have `fits` False.
        predictions: what was foretold for every plan that was considered, best first.
    """

    title: str
    budget_bytes: int
    plan: Plan
    measurement: Measurement
    trials: tuple[Measurement, ...]
    predictions: tuple[Prediction, ...]
