"""Predictions of a plan's memory and speed: records without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from memlab.records.measurement import Measurement, Profile, ratio


class Fit(StrEnum):
    """Answers to whether a prediction fits into a budget."""

    YES = "fits"
    NO = "does not fit"
    UNCERTAIN = "uncertain"


@dataclass(frozen=True)
class Verdict:
    """Verdict on a prediction: whether it fits, and by how much.

    Args:
        fit: the answer; uncertain when the budget lies within the interval of the prediction.
        spare_bytes: budget less the predicted peak; negative when too much is needed.
    """

    fit: Fit
    spare_bytes: int

    @classmethod
    def on(cls, interval_bytes: tuple[int, int], needed_bytes: int, budget_bytes: int, refused: str) -> Verdict:
        """Judge a predicted peak and its interval by a budget; what is refused does not fit."""
        low, high = interval_bytes
        if refused or budget_bytes < low:
            return cls(Fit.NO, budget_bytes - needed_bytes)
        return cls(Fit.YES if budget_bytes >= high else Fit.UNCERTAIN, budget_bytes - needed_bytes)


@dataclass(frozen=True)
class Prediction(Profile):
    """Memory and speed of one plan, predicted; of the same shape as a `Measurement`.

    Args:
        plan: flags of the plan, or "as written".
        device: name of the device it is predicted for.
        peak_allocated_bytes: highest live bytes of a step.
        peak_reserved_bytes: highest bytes the caching allocator reserves, None where there is none (CPU).
        host_bytes: bytes memlab would keep in host memory or files for this plan.
        breakdown: live bytes by category at the peak.
        timeline: live bytes by category over one step, thinned; its seconds are predicted ones.
        step_seconds: predicted time of a step; NaN where no rate of the device is known.
        samples_per_step: rows of a step's batch.
        tokens_per_step: tokens of a step's batch, 0 when inputs are no token ids.
        interval_bytes: lowest and highest plausible peak, of what is compared with a budget.
        interval_seconds: shortest and longest plausible step.
        notes: what the prediction omits or assumes, in words.
        refused: why the plan does not apply here; empty when it does. A refused plan has no numbers.
    """

    step_seconds: float
    samples_per_step: float
    tokens_per_step: float
    interval_bytes: tuple[int, int]
    interval_seconds: tuple[float, float]
    notes: tuple[str, ...] = ()
    refused: str = ""

    @property
    def samples_per_second(self) -> float:
        """Samples per second; NaN when no time is predicted."""
        return ratio(self.samples_per_step, self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second; 0 when the inputs are no token ids."""
        return ratio(self.tokens_per_step, self.step_seconds)

    def verdict(self, budget_bytes: int) -> Verdict:
        """Return whether the plan fits into a budget.

        Args:
            budget_bytes: size of the device, or what may be used of it.
        """
        return Verdict.on(self.interval_bytes, self.needed_bytes, budget_bytes, self.refused)


def prediction_of(plan: str, predictions: Iterable[Prediction]) -> Prediction | None:
    """Return what was predicted for a plan, by its label; None when nothing was, or the plan was refused."""
    return next((each for each in predictions if each.plan == plan and not each.refused), None)


_Known = TypeVar("_Known", Prediction, Measurement)


def speed_of(known: Prediction | Measurement) -> float:
    """Samples per second, or steps per second where no samples are counted; 0 where no time is known."""
    seconds = known.step_seconds if isinstance(known, Prediction) else known.median_step_seconds
    per_second = ratio(known.samples_per_step or 1, seconds)
    return per_second if math.isfinite(per_second) else 0.0


def fastest(known: Iterable[_Known]) -> _Known | None:
    """The fastest plan, of equal ones and where no time is known the smallest; None of none."""
    return max(known, key=lambda each: (speed_of(each), -each.needed_bytes), default=None)
