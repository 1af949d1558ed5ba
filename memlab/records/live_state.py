"""Content of a panel at one moment: plain values, made by a `memlab.live.source.Source`, drawn by any view.

Sizes are bytes, times are seconds, steps are counted from 1 over the life of the session.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from memlab.plan import Plan
from memlab.plan.plan import BY_NAME
from memlab.records import Measurement, Prediction, Rescue, StepRecord, ratio


class Asked(StrEnum):
    """State of a setting that was asked for."""

    IDLE = "idle"
    PENDING = "pending"
    APPLIED = "applied"
    REFUSED = "refused"


class Activity(StrEnum):
    """State of the run; it ends with its model."""

    IDLE = "idle"
    TRAINING = "training"
    MEASURING = "measuring"
    PAUSED = "paused"
    REPLAYING = "replaying"
    OVER = "over"
    GONE = "gone"


@dataclass(frozen=True)
class Toggle:
    """One field of the plan."""

    field: str  # its name in `plan.FIELDS`
    value: str  # text of the value in force, as one of the field's `choices` (or any other text it parses)
    wanted: str  # text of the value asked for last; equal to `value` when nothing is under way
    asked: Asked = Asked.IDLE  # what has become of it
    step: int | None = None  # first step under it once it was applied; None before
    reason: str = ""  # why it was refused; empty otherwise

    @property
    def is_off(self) -> bool:
        """Return whether the field was set to what changes nothing."""
        return self.asked is Asked.APPLIED and self.value == BY_NAME[self.field].choices[0]

    @property
    def text(self) -> str:
        """Return what has become of it, in words; empty when nothing was asked.

        Example:
            >>> Toggle("loss", "chunked", "chunked", Asked.APPLIED, 12).text
            'applied at step 12'
            >>> Toggle("loss", "keep", "keep", Asked.APPLIED, 47).text
            'off since step 47'
        """
        if self.is_off:
            return f"off since step {self.step}"
        if self.asked is Asked.APPLIED:
            return f"applied at step {self.step}"
        if self.asked is Asked.REFUSED:
            return f"refused: {self.reason}"
        return "pending" if self.asked is Asked.PENDING else ""


@dataclass(frozen=True)
class LivePoint:
    """One step, or the highest of several that one point stands for."""

    step: int  # its number
    plan: str  # label of the plan in force
    seconds: float  # wall time of the step
    samples_per_second: float  # of the step; NaN when it had no rows
    peak_bytes: int | None  # highest allocated bytes within the step; None where the step was not observed
    # bytes by category at the peak, as observed last under this plan; empty before the first time
    live_bytes: Mapping[str, int]
    loss: float | None = None  # loss of the step, None when the model returns none

    @classmethod
    def of(cls, record: StepRecord, measured: Measurement | None, steps_before: int = 0) -> LivePoint:
        """A step of a loop that had made so many before, with the breakdown of what was measured under its plan."""
        return cls(
            step=steps_before + record.step,
            plan=record.plan,
            seconds=record.seconds,
            samples_per_second=ratio(record.samples or math.nan, record.seconds),
            peak_bytes=record.peak_allocated_bytes,
            live_bytes=measured.breakdown if measured is not None else {},
            loss=record.loss,
        )


@dataclass(frozen=True)
class Change:
    """The plan was changed."""

    step: int
    plan: str


@dataclass(frozen=True)
class Moment:
    """State of a run, as views draw it."""

    title: str  # what is trained with what, on what: "memfit · gpt2 124M · AdamW · CPU ledger (capacity 2 GiB)"
    activity: Activity  # what the run is doing
    step: int  # number of the newest step; 0 before the first
    plan: Plan  # the plan in force
    pending: Plan | None  # the plan that waits for the next step boundary, or None
    toggles: tuple[Toggle, ...]  # one per field of a plan, in the order of `plan.FIELDS`
    points: tuple[LivePoint, ...] = ()  # steps, oldest first; bounded, see `memlab.live.feed`
    changes: tuple[Change, ...] = ()  # plan changes, oldest first; bounded
    # settings tried, what the others are compared with in front (`comparison.baseline_first`), then in the order in
    # which they were first tried; each with timeline and breakdown of an observed step (a `Measurement.timeline` is
    # memory within one step), and times of its steps
    measurements: tuple[Measurement, ...] = ()
    predictions: tuple[Prediction, ...] = ()  # settings predicted, tried or not; refused ones included
    budget_bytes: int | None = None  # the budget line, or None for none
    capacity_bytes: int | None = None  # size of the device, or None where it is not limited
    events: tuple[str, ...] = ()  # what happened on the way, newest last, in words; bounded
    rescues: tuple[Rescue, ...] = ()  # rescues of the loop, oldest first
    status: str = ""  # one sentence for the status line and for screen readers
    world: str = ""  # how clicks reach the run here: in words; empty when they arrive at once
    errors: tuple[str, ...] = ()  # errors of callbacks, newest last, in words; bounded
    frame: int = 0  # grows when figures are to be drawn anew; settings and the status are drawn every time
    number: int = 0  # grows from moment to moment of a run: threads may come to draw them in another order

    def measured(self, plan: str) -> Measurement | None:
        """Return what was measured under a plan, by its label."""
        return next((each for each in self.measurements if each.plan == plan), None)
