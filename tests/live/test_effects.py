"""What each setting gives, read off predictions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from memlab.live.effects import effect_of
from memlab.live.live_predictions import settings_beside
from memlab.plan import FIELDS, Plan
from memlab.records import Fit, Prediction
from memlab.records.live_state import Activity, Moment

GIB = 2**30


def predicted(plan: str, gib: float, seconds: float, refused: str = "") -> Prediction:
    peak = round(gib * GIB)
    return Prediction(
        plan=Plan.parse(plan).label, device="cpu", peak_allocated_bytes=peak, peak_reserved_bytes=None, host_bytes=0,
        breakdown={}, timeline=(), step_seconds=seconds, samples_per_step=8, tokens_per_step=0,
        interval_bytes=(peak, peak), interval_seconds=(seconds, seconds), refused=refused,
    )  # fmt: skip


def moment(*predictions: Prediction, plan: str = "", pending: str | None = None) -> Moment:
    waiting = Plan.parse(pending) if pending is not None else None
    return Moment("gpt2", Activity.IDLE, 0, Plan.parse(plan), waiting, (), predictions=predictions)


def test_the_default_of_every_field_is_its_first_choice() -> None:
    for spec in FIELDS:
        assert spec.default == getattr(Plan(), spec.name)
        assert spec.offer in spec.choices[1:]


def test_settings_beside_a_plan_differ_in_one_field() -> None:
    plan = Plan.parse("--accumulate 4 --checkpoint")
    for other in settings_beside(plan)[1:]:
        assert sum(getattr(plan, spec.name) != getattr(other, spec.name) for spec in FIELDS) == 1


def test_settings_that_exclude_each_other_are_left_out() -> None:
    labels = {plan.label for plan in settings_beside(Plan.parse("--offload optimizer"))}
    assert "--checkpoint --offload optimizer" in labels
    assert not any("sgd" in label or "paged" in label for label in labels)


@pytest.mark.parametrize("plan", ["", "--checkpoint"])
def test_an_effect_is_the_same_whether_the_setting_is_on_or_off(plan: str) -> None:
    effect = effect_of(
        moment(predicted("", 8, 1), predicted("--checkpoint", 5, 1.25), plan=plan), "checkpointing", "full"
    )
    assert effect is not None
    assert effect.text == "−3.00 GiB · −20 % speed"


def test_an_effect_is_beside_the_settings_in_force_or_pending() -> None:
    known = (
        predicted("", 8, 1), predicted("--checkpoint", 5, 1.25), predicted("--accumulate 4", 4, 1),
        predicted("--accumulate 4 --checkpoint", 3, 1.25),
    )  # fmt: skip
    for state in (moment(*known, plan="--accumulate 4"), moment(*known, pending="--accumulate 4")):
        effect = effect_of(state, "checkpointing", "full")
        assert effect is not None
        assert effect.change_bytes == -1 * GIB
        assert not effect.is_near


def test_what_is_predicted_beside_other_settings_only_says_so() -> None:
    state = moment(predicted("", 8, 1), predicted("--checkpoint", 5, 1.25), plan="--bf16")
    effect = effect_of(replace(state, budget_bytes=GIB), "checkpointing", "full")
    assert effect is not None
    assert effect.text == "≈ −3.00 GiB · −20 % speed"
    assert effect.verdict is None


def test_nothing_predicted_is_no_effect() -> None:
    assert effect_of(moment(predicted("", 8, 1)), "checkpointing", "full") is None


def test_a_refusal_is_told_with_its_reason() -> None:
    refused = predicted("--checkpoint", 0, math.nan, "checkpointing: no blocks")
    effect = effect_of(moment(predicted("", 8, 1), refused), "checkpointing", "full")
    assert effect is not None
    assert (effect.text, effect.refused) == ("does not apply", "checkpointing: no blocks")


def test_settings_that_exclude_each_other_are_told() -> None:
    effect = effect_of(moment(plan="--optim sgd"), "offload", "optimizer")
    assert effect is not None
    assert "exclude each other" in effect.refused


def test_the_budget_decides_the_verdict() -> None:
    state = replace(moment(predicted("", 8, 1), predicted("--checkpoint", 5, 1.25)), budget_bytes=4 * GIB)
    effect = effect_of(state, "checkpointing", "full")
    assert effect is not None
    assert effect.verdict is not None
    assert effect.verdict.fit is Fit.NO
    assert effect.text.endswith("over budget")


def test_no_time_predicted_leaves_speed_out() -> None:
    effect = effect_of(
        moment(predicted("", 8, math.nan), predicted("--checkpoint", 5, math.nan)), "checkpointing", "full"
    )
    assert effect is not None
    assert effect.text == "−3.00 GiB"
