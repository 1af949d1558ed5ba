"""Facts on settings: read once, and everything that goes by them."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from memlab.plan import FIELDS, Checkpointing, Offloaded, Plan, Precision
from memlab.plan.savings import SAVINGS, changed, more_micro_batches, to_measure, usual_cost


@pytest.mark.parametrize("text", ["off", "full", "selective", "every:3", "budget:2GiB"])
def test_checkpointing_stays_the_text_it_was(text: str) -> None:
    value = Checkpointing(text)
    assert (value, str(value), json.dumps(value)) == (text, text, f'"{text}"')
    for same in (copy.deepcopy(value), pickle.loads(pickle.dumps(value)), Plan(checkpointing=text).checkpointing):  # type: ignore[arg-type]
        assert (same, same.kind, same.every, same.budget_bytes) == (text, value.kind, value.every, value.budget_bytes)


def test_checkpointing_as_numbers() -> None:
    assert [Checkpointing(text).every for text in ("full", "every:3")] == [1, 3]
    assert [Checkpointing(text).budget_bytes for text in ("full", "budget:2KiB")] == [None, 2048]


def test_an_ablation_adds_exact_settings_first_by_cost() -> None:
    assert [str(plan) for plan in to_measure()] == [
        "--chunk-loss",
        "--accumulate 4",
        "--checkpoint selective",
        "--tile 4",
        "--checkpoint",
        "--release-grads",
        "--offload optimizer",
        "--offload activations",
        "--offload params",
        "--adam8bit",
        "--bf16",
    ]


def test_costs_multiply() -> None:
    assert usual_cost(Plan()) == 1
    assert usual_cost(Plan.parse("--accumulate 4 --checkpoint --bf16")) == pytest.approx(1.03**2 * 1.3 * 0.6)


def test_each_stronger_setting_contains_the_one_before_and_ends() -> None:
    for saving in SAVINGS:
        plan: Plan | None = Plan()
        for _ in range(10):
            assert plan is not None
            stronger = saving.raised(plan, 16, Precision.FP16)
            if stronger is None:
                break
            assert stronger.contains(plan)
            assert not plan.contains(stronger)
            assert changed(plan, stronger) == [saving]
            plan = stronger
        else:
            raise AssertionError(f"{saving.field.name} does not end")


def test_what_changes_numerics() -> None:
    exact = {spec.name for spec in FIELDS if spec.is_exact}
    assert exact >= {"accumulation", "checkpointing", "offload", "loss", "gradients", "tiling"}
    assert exact.isdisjoint({"batchnorm", "precision", "optimizer", "adapters"})
    eight, paged = Plan.parse("--adam8bit"), Plan.parse("--optim paged-adam8bit")
    assert paged.has_numbers_of(eight)
    assert paged.contains(eight)
    assert not eight.contains(paged)
    assert not eight.has_numbers_of(Plan())


def test_more_micro_batches_end_with_the_rows() -> None:
    assert more_micro_batches(Plan.parse("--accumulate 4"), rows=6) == "--accumulate 6"
    assert more_micro_batches(Plan.parse("--accumulate 6"), rows=6) == ""


def test_settings_that_exclude_each_other_are_not_raised() -> None:
    moments = next(saving for saving in SAVINGS if saving.field.name == "optimizer")
    offload = next(saving for saving in SAVINGS if saving.what is Offloaded.OPTIMIZER)
    assert moments.raised(Plan.parse("--adam8bit --offload optimizer"), 1, Precision.BF16) is None
    assert offload.raised(Plan.parse("--optim paged-adam8bit"), 1, Precision.BF16) is None
