"""Effects of each setting of a panel beside the others, from predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from memlab.errors import PlanError
from memlab.plan import FIELDS, Plan, PlanField
from memlab.plan.fields import BY_NAME
from memlab.records import Fit, Prediction, Verdict
from memlab.records.live_state import Moment
from memlab.units import format_change, format_difference


@dataclass(frozen=True)
class Effect:
    """The difference one setting makes, beside the other settings as they are.

    Args:
        plan: the plan with the setting.
        of_bytes: what the plan needs without it.
        change_bytes: what the plan needs with it, less what it needs without.
        speed_ratio: samples per second with it, as a share of those without; NaN where no time is predicted.
        verdict: whether the plan with it fits the budget; None without a budget.
        refused: why it does not apply; empty when it does, and then the numbers count.
        is_near: predicted beside other settings than those in force, because no more is known yet.
    """

    plan: Plan
    change_bytes: int = 0
    of_bytes: int = 0
    speed_ratio: float = math.nan
    verdict: Verdict | None = None
    refused: str = ""
    is_near: bool = False

    @property
    def text(self) -> str:
        """The effect in a few words.

        Example:
            >>> Effect(Plan.parse("--checkpoint"), -2 * 2**30, 8 * 2**30, 0.75).text
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


def settings_beside(plan: Plan) -> tuple[Plan, ...]:
    """The plan itself, and every plan that differs from it in one setting, without repetition.

    Example:
        >>> [each.label for each in settings_beside(Plan())][:4]
        ['as written', '--accumulate 2', '--accumulate 4', '--accumulate 8']
    """
    beside = [plan]
    for spec in FIELDS:
        for text in spec.choices if spec.is_predicted else ():
            try:
                beside.append(plan.with_setting(spec.name, text))
            except PlanError:  # excluded by another setting
                continue
    return tuple(dict.fromkeys(beside))


def effect_of(moment: Moment, field: str, text: str) -> Effect | None:
    """Return what a setting gives beside the others that are in force or pending."""
    spec = BY_NAME[field]
    beside = moment.pending or moment.plan
    for base in dict.fromkeys((beside, Plan())):
        found = _effect(moment, base, spec, text)
        if found is not None:
            return found if base == beside else _near(found)
    return None


def _effect(moment: Moment, base: Plan, spec: PlanField, text: str) -> Effect | None:
    try:
        there, without = (base.with_setting(spec.name, each) for each in (text, spec.choices[0]))
    except PlanError as error:
        return Effect(base, refused=str(error))
    predicted = _known(moment, there)
    if predicted is not None and predicted.refused:
        return Effect(there, refused=predicted.refused)
    before = moment.predicted(without.label)
    if predicted is None or before is None:
        return None
    return Effect(
        plan=there,
        change_bytes=predicted.needed_bytes - before.needed_bytes,
        of_bytes=before.needed_bytes,
        speed_ratio=predicted.samples_per_second / before.samples_per_second if before.samples_per_second else math.nan,
        verdict=predicted.verdict(moment.budget_bytes) if moment.budget_bytes is not None else None,
    )


def _near(effect: Effect) -> Effect:
    # whether it fits is not known: the plan it was predicted for is another one
    return replace(effect, verdict=None, is_near=True)


def _known(moment: Moment, plan: Plan) -> Prediction | None:
    label = plan.label
    return next((each for each in moment.predictions if each.plan == label), None)
