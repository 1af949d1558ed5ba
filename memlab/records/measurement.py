"""Records of measurements, predictions and actions: plain values without torch; `comparison` sets them side by side.

Sizes are bytes, times are seconds. Every number says what it counts:

- *allocated*: bytes in live tensors (on CUDA in the allocator's blocks that hold them)
- *reserved*: what the caching allocator holds from the driver, live or not (CUDA only)
- *host*: bytes that memlab itself keeps in host memory or in files for this plan
- *driver*: what the driver reports as used on the device, by everyone (CUDA only)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

from memlab.plan import Plan
from memlab.units import format_bytes


class Shown:
    """A record with a way to be shown.

    Example:
        >>> from memlab.records import Measurement
        >>> print(Measurement("as written", "cpu", 2**30, None, 0, {"parameters": 2**30}, (), (), 8, 0))
        as written · cpu
        parameters         1.00 GiB   100 %  ████████████████████████
        peak allocated     1.00 GiB
    """

    # gives what writes records, with `text_of` and `html_of`; `memlab` sets it to `memlab.report.showing`
    reports: ClassVar[Callable[[], Any]]

    def __str__(self) -> str:
        return str(Shown.reports().text_of(self))

    def _repr_html_(self) -> str | None:
        html: str | None = Shown.reports().html_of(self)
        return html


class Category(StrEnum):
    """Categories of live bytes."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATIONS = "activations"
    CACHE = "KV cache"
    TEMPORARIES = "temporaries"
    ELSEWHERE = "other tensors"  # on the device, and no part of the loop: another model of the notebook, data
    WORKSPACES = "workspaces"
    UNUSED = "unused but reserved"


class Phase(StrEnum):
    """Phases of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    OTHER = "other"

    @property
    def words(self) -> str:
        """Return how a sentence names it: "the peak is in the forward pass"."""
        names = {"forward": "forward pass", "backward": "backward pass", "step": "optimizer step"}
        return names.get(self, "loop between steps")


@dataclass(frozen=True)
class TimelinePoint:
    """Live bytes by category at one moment of a step."""

    seconds: float
    phase: Phase
    live_bytes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.live_bytes.values())


_Point = TypeVar("_Point")


def thin(
    points: Sequence[_Point], most: int = 300, *, size_of: Callable[[_Point], int] = attrgetter("total_bytes")
) -> tuple[_Point, ...]:
    """Keep at most `most` points: of every stretch the highest one, so that no peak is lost."""
    if len(points) <= most:
        return tuple(points)
    edges = [round(i * len(points) / most) for i in range(most + 1)]
    stretches = (points[start:stop] for start, stop in pairwise(edges))
    return tuple(max(stretch, key=size_of) for stretch in stretches)


# what is live and belongs to no model, where parts are told by model
LOOP = "the loop"

# steps whose times do not count
WARMUP_STEPS = 1
# with fewer timed steps than this a speed is shown, and compared with no other
SETTLED_STEPS = 5


def ratio(numerator: float, denominator: float) -> float:
    """NaN instead of an error where nothing was counted or timed: a table prints it as no value."""
    return numerator / denominator if denominator else math.nan


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step of a live loop."""

    step: int  # number of the step in its session, from 1
    plan: str  # label of the plan in force
    seconds: float  # wall time from the end of the step before (first step: from its first forward)
    samples: int  # rows of the batches that went in
    tokens: int  # tokens of the batches that went in; 0 when the inputs are no token ids
    peak_allocated_bytes: int | None = None  # highest live bytes within the step; None when the step was not observed
    peak_reserved_bytes: int | None = None  # highest reserved bytes within the step; None off CUDA
    loss: float | None = None  # the last loss of the step, or None when the model returns none
    skipped: bool = False  # the update was skipped because gradients were not finite (fp16)


@dataclass(frozen=True)
class Profile(Shown):
    """Common part of a measurement and a prediction of a plan."""

    plan: str
    device: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    host_bytes: int
    breakdown: Mapping[str, int]
    timeline: tuple[TimelinePoint, ...]

    @property
    def needed_bytes(self) -> int:
        """Return what a budget must hold: the reserved peak where there is one, else the allocated peak."""
        return self.peak_allocated_bytes if self.peak_reserved_bytes is None else self.peak_reserved_bytes

    @property
    def phase_of_peak(self) -> Phase | None:
        """Return what ran at the peak, from the timeline; None without one."""
        return max(self.timeline, key=lambda point: point.total_bytes).phase if self.timeline else None


@dataclass(frozen=True)
class Measurement(Profile):
    """Memory and speed of one plan, measured on real training steps.

    Args:
        plan: flags of the plan, or "as written".
        device: name of the device, with its capacity when it has one.
        peak_allocated_bytes: highest live bytes over the measured steps.
        peak_reserved_bytes: highest reserved bytes, None off CUDA.
        host_bytes: bytes memlab keeps in host memory or files for this plan.
        driver_bytes: bytes the driver reports as used, None off CUDA.
        breakdown: live bytes by category at the peak.
        timeline: live bytes by category over one step, thinned.
        step_seconds: wall time of each measured step, after the warm-up; of the first steps where there are no others.
        samples_per_step: rows of a step's batches.
        tokens_per_step: tokens of a step's batches, 0 when inputs are no token ids.
        losses: loss of each step from the common starting point, when the model returns one.
        notes: what was refused, kept or skipped, in words.
        fits: False when the plan ran out of memory; the peak is then the size it did not fit into.
        is_warm: False when the times are those of the first steps, because there are no others.
        waited_share: share of the time for which the training thread was ready and had no processor; 0 where the system
            does not tell.
        models: the breakdown of each model, by name, where several trained; what is no model's is under `LOOP`.
    """

    step_seconds: tuple[float, ...]
    samples_per_step: float
    tokens_per_step: float
    driver_bytes: int | None = None
    losses: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    fits: bool = True
    is_warm: bool = True
    waited_share: float = 0.0
    models: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def is_settled(self) -> bool:
        """Return whether enough steps were timed to compare their speed, and they differ by less than they take."""
        return self.is_warm and len(self.step_seconds) >= SETTLED_STEPS and self.spread < 1

    @property
    def median_step_seconds(self) -> float:
        """Median wall time of a measured step; NaN without one."""
        return statistics.median(self.step_seconds) if self.step_seconds else float("nan")

    @property
    def peak_text(self) -> str:
        """The peak in words; of a plan that ran out of memory, what it needs more than."""
        return f"{'' if self.fits else '> '}{format_bytes(self.peak_allocated_bytes)}"

    @property
    def samples_per_second(self) -> float:
        """Samples per second of the median step; NaN when no step was timed."""
        return ratio(self.samples_per_step, self.median_step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the median step; 0 when the inputs are no token ids."""
        return ratio(self.tokens_per_step, self.median_step_seconds)

    @property
    def spread(self) -> float:
        """Half the distance between slowest and fastest timed step, as a share of the median.

        Of ten steps and more the slowest and the fastest tenth are left out.
        """
        if len(self.step_seconds) < 2:
            return 0.0
        tenth = len(self.step_seconds) // 10
        inner = sorted(self.step_seconds)[tenth : len(self.step_seconds) - tenth]
        return ratio((inner[-1] - inner[0]) / 2, self.median_step_seconds)


@dataclass(frozen=True)
class Rescue:
    """Actions taken when memory ran out during training, so that the loop could go on.

    Example:
        >>> print(Rescue(7, "the backward pass", "as written", "--accumulate 2", "CUDA out of memory. …", 1, 0.25))
        step 7: memory ran out in the backward pass: as written → --accumulate 2, same batch again (0.25 s lost)
    """

    step: int  # the step that ran out of memory, counted from 1
    place: str  # where it did, as in "the backward pass"
    before: str  # plan in force when it did
    after: str  # plan in force when the same batch had succeeded
    error: str  # the error the loop did not see
    attempts: int  # how many plans ran out of memory on the way
    seconds: float  # time spent on attempts that failed, and on making room
    numerics: tuple[str, ...] = ()  # fields of the plan by which numbers are others from then on

    @property
    def text(self) -> str:
        """Return what happened, without the step."""
        change = f"{self.before} → {self.after}" if self.after != self.before else "the model's graph was made again"
        tries = f", {self.attempts} attempts" if self.attempts > 1 else ""
        fields = ",".join(self.numerics)
        rounded = f"; numbers are rounded differently from here on; --keep {fields} prevents that" if fields else ""
        return f"memory ran out in {self.place}: {change}, same batch again{tries} ({self.seconds:.2f} s lost){rounded}"

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}"


def out_of_memory(plan: Plan, device: str, capacity_bytes: int, asked: str) -> Measurement:
    """The row of a plan that did not fit."""
    return Measurement(
        plan=plan.label,
        device=device,
        peak_allocated_bytes=capacity_bytes,
        peak_reserved_bytes=None,
        host_bytes=0,
        breakdown={},
        timeline=(),
        step_seconds=(),
        samples_per_step=0,
        tokens_per_step=0,
        notes=(f"out of memory: {asked}",),
        fits=False,
    )


def measurement_of_steps(
    plan: Plan,
    device: str,
    steps: Sequence[StepRecord],
    settled_seconds: tuple[float, ...] = (),  # times that count; without any, those of the first steps stand for them
    *,
    breakdown: Mapping[str, int],
    timeline: tuple[TimelinePoint, ...],
    host_bytes: int = 0,
    driver_bytes: int | None = None,
    waited_share: float = 0.0,
) -> Measurement:
    """Reduce the steps run under one plan to a measurement."""
    peaks = [r.peak_allocated_bytes for r in steps if r.peak_allocated_bytes is not None]
    reserved = [r.peak_reserved_bytes for r in steps if r.peak_reserved_bytes is not None]
    count = max(1, len(steps))
    return Measurement(
        plan=plan.label,
        device=device,
        peak_allocated_bytes=max(peaks, default=0),
        peak_reserved_bytes=max(reserved, default=None),
        host_bytes=host_bytes,
        driver_bytes=driver_bytes,
        breakdown=breakdown,
        timeline=timeline,
        step_seconds=settled_seconds or tuple(r.seconds for r in steps[WARMUP_STEPS:] or steps),
        samples_per_step=sum(r.samples for r in steps) / count,
        tokens_per_step=sum(r.tokens for r in steps) / count,
        losses=tuple(r.loss for r in steps if r.loss is not None),
        is_warm=bool(settled_seconds),
        waited_share=waited_share,
    )
