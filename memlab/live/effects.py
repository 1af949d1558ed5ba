"""`PredictedEffect`: what single settings would change in a live run, read off predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from memlab.errors import PlanError
from memlab.plan import Plan, PlanField
from memlab.plan.plan import BY_NAME
from memlab.records import Fit, Verdict, prediction_of, ratio
from memlab.records.live_state import Moment
from memlab.units import format_change, format_difference


@dataclass(frozen=True)
class PredictedEffect:
    """The difference one setting makes, beside the other settings as they are."""

    change_bytes: int = 0  # what the plan needs with it, less what it needs without
    of_bytes: int = 0  # what the plan needs without it
    # samples per second with it, as a share of those without; NaN where no time is predicted
    speed_ratio: float = math.nan
    verdict: Verdict | None = None  # whether the plan with it fits the budget; None without a budget
    refused: str = ""  # why it does not apply; empty when it does, and then the numbers count
    is_near: bool = False  # predicted beside other settings than those in force, because no more is known yet

    @property
    def text(self) -> str:
        """The effect in a few words.

        Example:
            >>> PredictedEffect(-2 * 2**30, 8 * 2**30, 0.75).text
            '−2.00 GiB · −25 % speed'
        """
        if self.refused:
            return "does not apply"
        parts = [f"{'≈ ' if self.is_near else ''}{format_difference(self.change_bytes, self.of_bytes)}"]
        if not math.isnan(self.speed_ratio):
            parts.append(f"{format_change(self.speed_ratio)} speed")
        if self.verdict is not None and self.verdict.fit is Fit.NO:
            parts.append("over budget")
        return " · ".join(parts)


def effect_of(moment: Moment, field: str, text: str) -> PredictedEffect | None:
    """Return what a setting gives beside the others that are in force or pending."""
    spec = BY_NAME[field]
    beside = moment.pending or moment.plan
    for base in dict.fromkeys((beside, Plan())):
        found = _effect(moment, base, spec, text)
        if found is not None:
            # whether it fits is not known where the plan it was predicted for is another one
            return found if base == beside else replace(found, verdict=None, is_near=True)
    return None


def _effect(moment: Moment, base: Plan, spec: PlanField, text: str) -> PredictedEffect | None:
    try:
        there, without = (base.with_setting(spec.name, each) for each in (text, spec.choices[0]))
    except PlanError as error:
        return PredictedEffect(refused=str(error))
    label = there.label  # it is made anew each time
    predicted = next((each for each in moment.predictions if each.plan == label), None)
    if predicted is not None and predicted.refused:
        return PredictedEffect(refused=predicted.refused)
    before = prediction_of(without.label, moment.predictions)
    if predicted is None or before is None or before.refused:
        return None
    return PredictedEffect(
        change_bytes=predicted.needed_bytes - before.needed_bytes,
        of_bytes=before.needed_bytes,
        speed_ratio=ratio(predicted.samples_per_second, before.samples_per_second),
        verdict=predicted.verdict(moment.budget_bytes) if moment.budget_bytes is not None else None,
    )
