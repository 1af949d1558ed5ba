"""The plan space: complete, in order, without conflicts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.plan import Gradients, Loss, Offloaded, OptimizerChoice, Plan, Precision
from memlab.plan.space import half_format, plan_space

FLAGS = ["", "--accumulate 3", "--checkpoint every:2", "--precision tf32", "--optim adafactor", "--optim sgd",
         "--optim paged-adam8bit", "--offload optimizer:disk", "--chunk-loss",
         "--accumulate 32 --fp16 --adam8bit"]  # fmt: skip


def on_the_model(plan: Plan) -> tuple[object, ...]:
    """What a plan does to the model: what has to be traced."""
    return plan.checkpointing, plan.precision, plan.tier_of(Offloaded.ACTIVATIONS), plan.loss


def test_few_traces_serve_the_usual_plans() -> None:
    plans = plan_space()
    ways = {on_the_model(plan) for plan in plans}
    assert len(ways) == 10
    # all of them with every accumulation and everything that works on the optimizer
    assert len(plans) == len(set(plans)) == len(ways) * 5 * 2 * 2
    assert not any(plan.precision is Precision.PURE_BF16 for plan in plans)
    labels = {Plan(accumulation=1, checkpointing=plan.checkpointing, precision=plan.precision, loss=plan.loss,
                   offload=tuple(item for item in plan.offload if item[0] is Offloaded.ACTIVATIONS)).label
              for plan in plans}  # fmt: skip
    assert labels == {
        "as written", "--bf16", "--checkpoint selective", "--checkpoint selective --bf16", "--checkpoint",
        "--checkpoint --bf16", "--offload activations", "--chunk-loss", "--checkpoint --chunk-loss",
        "--checkpoint --bf16 --chunk-loss",
    }  # fmt: skip


@pytest.mark.parametrize("flags", FLAGS)
def test_few_traces_serve_whatever_is_fixed(flags: str) -> None:
    assert len({on_the_model(plan) for plan in plan_space(Plan.parse(flags))}) <= 10


def test_what_is_fixed_does_not_count_as_unusual() -> None:
    ways = {on_the_model(plan)[:2] for plan in plan_space(Plan.parse("--chunk-loss"))}
    assert len(ways) == 6
    assert any(plan.tier_of(Offloaded.ACTIVATIONS) for plan in plan_space(Plan.parse("--checkpoint --bf16")))


def test_gradient_release_is_for_those_who_ask() -> None:
    assert not any(plan.gradients is Gradients.RELEASE for plan in plan_space())
    fixed = plan_space(Plan.parse("--release-grads"))
    assert len(fixed) == len(plan_space())
    assert all(plan.gradients is Gradients.RELEASE for plan in fixed)


@pytest.mark.parametrize("flags", FLAGS)
def test_what_is_fixed_comes_first_and_stays(flags: str) -> None:
    fixed = Plan.parse(flags)
    plans = plan_space(fixed)
    assert plans[0] == fixed
    assert all(getattr(plan, name) == getattr(fixed, name) for plan in plans for name in fixed.changes())
    assert all(len(a.changes()) <= len(b.changes()) for a, b in pairwise(plans))


def test_the_order_is_the_same_every_time() -> None:
    assert plan_space() == plan_space()
    assert [plan.label for plan in plan_space()[:3]] == ["as written", "--chunk-loss", "--offload optimizer"]


@pytest.mark.parametrize(
    ("rows", "expected"), [(None, {1, 2, 4, 8, 16}), (1, {1}), (3, {1, 2}), (8, {1, 2, 4, 8}), (100, {1, 2, 4, 8, 16})]
)
def test_a_batch_is_split_into_its_rows_at_most(rows: int | None, expected: set[int]) -> None:
    assert {plan.accumulation for plan in plan_space(rows=rows)} == expected


@pytest.mark.parametrize("flags", ["--optim paged-adam8bit", "--optim sgd"])
def test_what_excludes_each_other_is_left_out(flags: str) -> None:
    plans = plan_space(Plan.parse(flags))
    assert not any(plan.tier_of(Offloaded.OPTIMIZER) for plan in plans)
    assert any(plan.tier_of(Offloaded.ACTIVATIONS) for plan in plans)


def test_lossless_varies_exact_settings_only() -> None:
    plans = plan_space(lossless=True)
    assert {plan.precision for plan in plans} == {Precision.KEEP}
    assert {plan.optimizer for plan in plans} == {OptimizerChoice.KEEP}
    assert {plan.loss for plan in plans} == set(Loss)
    assert len(plans) == 5 * 6 * 2
    with_8bit = plan_space(Plan.parse("--adam8bit"), lossless=True)
    assert {(plan.precision, plan.optimizer) for plan in with_8bit} == {(Precision.KEEP, OptimizerChoice.ADAM8BIT)}


def test_fp16_takes_the_place_of_bf16() -> None:
    plans = plan_space(half=Precision.FP16)
    assert {plan.precision for plan in plans} == {Precision.KEEP, Precision.FP16}
    assert len(plans) == len(plan_space())


@pytest.mark.parametrize(("capability", "half"), [(None, "bf16"), ((6, 1), "fp16"), ((7, 5), "fp16"), ((8, 0), "bf16"),
                                                  ((12, 0), "bf16")])  # fmt: skip
def test_the_16_bits_of_a_device(capability: tuple[int, int] | None, half: str) -> None:
    assert half_format(capability) == half


@given(st.sampled_from(FLAGS), st.none() | st.integers(1, 40), st.booleans())
def test_it_is_a_set_of_plans_whatever_is_asked(flags: str, rows: int | None, lossless: bool) -> None:
    plans = plan_space(Plan.parse(flags), rows=rows, lossless=lossless)
    assert len(plans) == len({plan.label for plan in plans})
    assert set(plans) <= set(plan_space(Plan.parse(flags)))
