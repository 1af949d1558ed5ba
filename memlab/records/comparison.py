"""Results of runs side by side: comparisons and their verdicts, and plans that were found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memlab.errors import MemlabError
from memlab.plan import Plan
from memlab.records import Measurement, Prediction, prediction_of, ratio
from memlab.records.measurement import Shown
from memlab.units import format_bytes, format_change, format_seconds


@dataclass(frozen=True)
class Row:
    """One line of a comparison: a measurement against the first one, and what was predicted for it."""

    measurement: Measurement  # of one plan
    memory_ratio: float  # its peak as a share of the first one's; NaN where its batches were of another size, or one of both ran out of memory
    # its samples per second as a share of the first one's; NaN where there is none to compare with, or where too few
    # steps were timed to compare
    speed_ratio: float
    loss_drift: float | None  # largest relative difference of its losses from the first one's
    verdict: str  # what is to be said about it
    prediction: Prediction | None = None  # what was predicted for its plan


# a change of the peak below this share is no gain
NO_GAIN = 0.01
# share of the time without a processor from which a machine counts as busy
_BUSY = 0.1
# batches whose sizes differ by more than this share are not compared
_OTHER_SIZE = 0.25


@dataclass(frozen=True)
class Comparison(Shown):
    """Measurements side by side; the first is what the others are compared with.

    Args:
        title: what was trained, on what.
        measurements: at least one; put in the order of `baseline_first`.
        events: what happened on the way, in words (plan changes, refusals).
        predictions: what was predicted for some of the plans, in any order.
        are_ranks: whether the rows are ranks of one run, which are shown side by side and not compared.
        latest: plans that the last cell ran.
    """

    title: str
    measurements: tuple[Measurement, ...]
    events: tuple[str, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    are_ranks: bool = False
    latest: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.measurements:
            raise MemlabError("a comparison needs at least one measurement; run some steps first")
        if not self.are_ranks:
            object.__setattr__(self, "measurements", baseline_first(self.measurements))

    @property
    def rows(self) -> tuple[Row, ...]:
        """Each measurement beside the first one, with a verdict in words (`verdict`)."""
        if self.are_ranks:
            return tuple(Row(each, math.nan, math.nan, None, "; ".join(each.notes)) for each in self.measurements)
        first = self.measurements[0]
        return tuple(
            _row(measurement, first, prediction_of(measurement.plan, self.predictions))
            for measurement in self.measurements
        )

    def add(self, measurement: Measurement) -> Comparison:
        """The same comparison with one more measurement; a plan measured again replaces its old row."""
        if all(known.plan != measurement.plan for known in self.measurements):
            return replace(self, measurements=(*self.measurements, measurement))
        rows = (measurement if known.plan == measurement.plan else known for known in self.measurements)
        return replace(self, measurements=tuple(rows))


def baseline_first(measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Measurements with the one in front that the others are compared with: the plan as written, wherever it was run.

    Where that has not been run, or ran out of memory later than others, the one that was run first stays in front.

    Example:
        >>> fp16, as_written = (Measurement(plan, "cpu", 1, None, 0, {}, (), (), 8, 0) for plan in ("--fp16", "as written"))
        >>> [each.plan for each in baseline_first([fp16, as_written])]
        ['as written', '--fp16']
    """
    label = Plan().label
    first = next((each for each in measurements if each.plan == label and each.fits), None)
    return tuple(measurements) if first is None else (first, *(each for each in measurements if each is not first))


def speed_ratio(measurement: Measurement, other: Measurement) -> float:
    """Samples per second as a share of another measurement's; NaN where too few steps of either were timed."""
    if not (measurement.is_settled and other.is_settled):
        return math.nan
    return ratio(measurement.samples_per_second, other.samples_per_second)


_TIMED_BEFORE = "samples/s are those of an earlier cell: the newest under this plan timed too few steps"


def timed_anew(before: Measurement | None, after: Measurement) -> tuple[Measurement, str]:
    """A plan that was measured, perhaps again: its row, and what is to be said about its times.

    A few steps do not replace the times of many, and what others are compared with does not change unsaid.
    """
    if before is None or _other_batches(after, before) or not (before.is_settled and before.fits and after.fits):
        return after, ""
    if not after.is_settled:
        # batches may be a little larger or smaller than then: a step takes as much longer
        share = after.samples_per_step / before.samples_per_step if before.samples_per_step else 1.0
        seconds = tuple(share * each for each in before.step_seconds)
        notes = (*after.notes, _TIMED_BEFORE)
        kept = replace(after, step_seconds=seconds, is_warm=True, waited_share=before.waited_share, notes=notes)
        return kept, ""
    if (
        after.step_seconds == before.step_seconds or _TIMED_BEFORE in after.notes
    ):  # it is the row before, or has its times
        return after, ""
    slower = format_change(ratio(after.samples_per_second, before.samples_per_second))
    return after, f"{after.plan} was timed again: {slower} samples/s; other rows are compared with the new times"


def _row(measurement: Measurement, first: Measurement, prediction: Prediction | None) -> Row:
    if prediction is not None and _other_batches(measurement, prediction):
        prediction = None  # it is of another batch
    is_alike = not _other_batches(measurement, first)
    # of what ran out it is known only that it needs more
    is_known = is_alike and measurement.fits and first.fits
    memory_ratio = measurement.peak_allocated_bytes / max(1, first.peak_allocated_bytes) if is_known else math.nan
    return Row(
        measurement=measurement,
        memory_ratio=memory_ratio,
        speed_ratio=speed_ratio(measurement, first) if is_alike else math.nan,
        loss_drift=loss_drift(first.losses, measurement.losses),
        verdict="; ".join(
            filter(None, (_verdict(measurement, first, memory_ratio), *_doubts(measurement, prediction)))
        ),
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
    if other or measurement is first or not measurement.fits or memory_ratio <= 1 - NO_GAIN:
        return "; ".join((other, *measurement.notes) if other else measurement.notes)
    where = where_the_peak_is(measurement)
    return "; ".join((f"no gain: {where}" if where else "no gain", *measurement.notes))


def _doubts(measurement: Measurement, prediction: Prediction | None) -> Iterator[str]:
    """Yield what makes the numbers of a row less certain than they look."""
    if measurement.waited_share >= _BUSY:
        yield f"the machine was busy: training waited for a processor {measurement.waited_share * 100:.0f} % of the time"
    if prediction is not None and has_left_interval(measurement, prediction):
        sizes = measurement.needed_bytes, *prediction.interval_bytes
        needed, low, high = map(format_bytes, sizes)
        if needed in (low, high):
            needed, low, high = (f"{size:,} B" for size in sizes)
        yield f"not as predicted: {needed} is outside {low} to {high}"
    if prediction is not None and is_of_other_speed(measurement, prediction):
        took, low, high = map(format_seconds, (measurement.median_step_seconds, *prediction.interval_seconds))
        yield f"not as predicted: a step took {took}, which is outside {low} to {high}"


def has_left_interval(measurement: Measurement, prediction: Prediction) -> bool:
    """Return whether a measured peak lies where the prediction did not expect it."""
    low, high = prediction.interval_bytes
    return measurement.fits and not low <= measurement.needed_bytes <= high


def is_of_other_speed(measurement: Measurement, prediction: Prediction) -> bool:
    """Return whether steps took longer or less long than the prediction expected, by more than they differ; never of a single step."""
    if len(measurement.step_seconds) < 2 or not measurement.is_warm or not math.isfinite(prediction.step_seconds):
        return False
    median, (shortest, longest) = measurement.median_step_seconds, prediction.interval_seconds
    apart = median * measurement.spread
    return median - apart > longest or median + apart < shortest


def _other_batches(measurement: Measurement, first: Measurement | Prediction) -> str:
    """Say that a measurement's batches were much larger or smaller than those of the first one; empty if not."""
    for what, mine, others in (
        ("tokens", measurement.tokens_per_step, first.tokens_per_step),
        ("rows", measurement.samples_per_step, first.samples_per_step),
    ):
        if mine and others and abs(mine / others - 1) > _OTHER_SIZE:
            return f"other batches than the first row: {mine:,.0f} {what} a step instead of {others:,.0f}"
    return ""


def where_the_peak_is(measurement: Measurement) -> str:
    """Return in which part of the step memory peaks, and what most of it is then; empty without a breakdown."""
    if not measurement.breakdown:
        return ""
    largest = max(measurement.breakdown, key=lambda category: measurement.breakdown[category])
    phase = measurement.phase_of_peak
    return f"the peak is in the {phase.words}, mostly {largest}" if phase else f"the peak is mostly {largest}"


@dataclass(frozen=True)
class FoundPlan(Shown):
    """The fastest plan that fits a budget, verified by running it.

    Args:
        title: what was trained, on what.
        budget_bytes: what it had to fit into.
        plan: the plan.
        measurement: what it was measured at.
        trials: every plan that was run, in order; those that did not fit have `fits` False.
        predictions: what was predicted for every plan that was considered, best first.
    """

    title: str
    budget_bytes: int
    plan: Plan
    measurement: Measurement
    trials: tuple[Measurement, ...]
    predictions: tuple[Prediction, ...]
