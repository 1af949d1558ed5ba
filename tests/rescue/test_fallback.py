"""The order of plans when memory runs out, and what no order may do."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.errors import PlanError
from memlab.plan import FIELDS, Loss, Offloaded, OptimizerChoice, Plan, Precision, Tier
from memlab.plan.space import plan_space
from memlab.records import Prediction
from memlab.rescue.fallback import Fallback, Place, next_plans, pinned

PASSES = (Place.FORWARD, Place.BACKWARD, Place.LOOP)
NAMES = [spec.name for spec in FIELDS]


def flags(plan: str, place: Place = Place.FORWARD, rows: int = 4, **options: Any) -> list[str]:
    return [fallback.plan.label for fallback in next_plans(Plan.parse(plan), place, rows=rows, **options)]


def predicted(
    plan: str, gib: float, seconds: float = math.nan, *, doubt: float = 0.0, refused: str = ""
) -> tuple[Plan, Prediction]:
    size_bytes = round(gib * 2**30)
    interval = (round(size_bytes * (1 - doubt)), round(size_bytes * (1 + doubt)))
    parsed = Plan.parse(plan)
    return parsed, Prediction(
        parsed.label, "T4", size_bytes, None, 0, {}, (), seconds, 4, 0, interval, (seconds, seconds), refused=refused
    )


# -- the documented order


def test_a_budget_for_activations_is_raised_to_every_block() -> None:
    assert flags("--checkpoint budget:1GiB", rows=1)[:2] == [
        "--checkpoint budget:1GiB --chunk-loss",
        "--checkpoint --chunk-loss",
    ]
    smaller, larger = (Plan.parse(f"--checkpoint budget:{size}") for size in ("100MiB", "1GiB"))
    assert smaller.contains(larger)
    assert not larger.contains(smaller)
    assert not Plan.parse("--checkpoint selective").contains(larger)


@pytest.mark.parametrize("place", PASSES)
def test_the_order_without_predictions(place: Place) -> None:
    up = "--accumulate 4 --checkpoint"
    assert flags("", place) == [
        "--accumulate 2",
        "--accumulate 4",
        "--accumulate 4 --chunk-loss",
        f"{up} --chunk-loss",
        f"{up} --chunk-loss --tile 4",
        f"{up} --offload activations --chunk-loss --tile 4",
        f"{up} --offload activations,optimizer --chunk-loss --tile 4",
        f"{up} --offload activations,optimizer,params --chunk-loss --tile 4",
        f"{up} --adam8bit --offload activations,optimizer,params --chunk-loss --tile 4",
        f"{up} --bf16 --adam8bit --offload activations,optimizer,params --chunk-loss --tile 4",
    ]


def test_what_each_fallback_changes_in_words() -> None:
    fallbacks = list(next_plans(Plan(), Place.FORWARD, rows=11))

    assert [fallback.why for fallback in fallbacks] == [
        "half the rows at a time",
        "at most 3 rows at a time",
        "at most 2 rows at a time",
        "one row at a time",
        "the loss in tiles, without the full logits",
        "activations of every block recomputed in the backward pass",
        "feed-forward parts in 4 tiles",
        "activations off the device until the backward pass",
        "optimizer state off the device between updates",
        "parameters of blocks off the device between uses",
        "the optimizer's moments in 8 bits",
        "forward and backward pass in bf16",
    ]
    assert [fallback.lossy for fallback in fallbacks] == [False] * 10 + [True] * 2


@pytest.mark.parametrize(
    ("rows", "splits"),
    [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (12, [2, 4, 8, 12])],
)
def test_micro_batches_are_doubled_up_to_one_row_each(rows: int, splits: list[int]) -> None:
    only = set(NAMES) - {"accumulation"}

    assert flags("", rows=rows, keep=only) == [f"--accumulate {n}" for n in splits]


def test_doubling_goes_on_from_what_is_in_force() -> None:
    assert flags("--accumulate 3", rows=10, keep=set(NAMES) - {"accumulation"}) == ["--accumulate 6", "--accumulate 10"]
    assert flags("--accumulate 8", rows=5, keep=set(NAMES) - {"accumulation"}) == []


def test_a_batch_that_must_stay_whole_is_not_split() -> None:
    assert flags("", keeps_rows=True, keep=["precision", "optimizer"]) == [
        "--chunk-loss",
        "--checkpoint --chunk-loss",
        "--checkpoint --chunk-loss --tile 4",
        "--checkpoint --offload activations --chunk-loss --tile 4",
        "--checkpoint --offload activations,optimizer --chunk-loss --tile 4",
        "--checkpoint --offload activations,optimizer,params --chunk-loss --tile 4",
    ]


@pytest.mark.parametrize("setting", ["selective", "every:2"])
def test_checkpointing_is_raised_to_full(setting: str) -> None:
    keep = set(NAMES) - {"checkpointing"}

    assert flags(f"--checkpoint {setting}", keep=keep) == ["--checkpoint"]
    assert flags("--checkpoint full", keep=keep) == []


def test_what_is_offloaded_stays_where_it_is() -> None:
    fallbacks = flags("--offload optimizer:disk", keep=set(NAMES) - {"offload"})

    assert fallbacks == ["--offload activations,optimizer:disk", "--offload activations,optimizer:disk,params"]


def test_a_precision_or_an_optimizer_that_was_chosen_is_not_changed() -> None:
    assert flags("--precision fp32 --optim adafactor", rows=1)[-1] == (
        "--checkpoint --precision fp32 --optim adafactor --offload activations,optimizer,params --chunk-loss --tile 4"
    )


def test_gradient_release_stays_where_it_is() -> None:
    assert not any("--release-grads" in fallback for fallback in flags(""))
    fallbacks = flags("--release-grads")
    assert all("--release-grads" in fallback for fallback in fallbacks)
    assert len(fallbacks) == len(flags(""))
    assert not any("--fp16" in fallback for fallback in flags("--release-grads", half=Precision.FP16))
    predictions = dict([predicted("--release-grads", 1), predicted("--release-grads --checkpoint", 1)])
    assert not any("--release-grads" in fallback for fallback in flags("", predictions=predictions))


def test_settings_that_exclude_each_other_are_left_out() -> None:
    assert flags("--optim sgd", Place.STEP) == ["--optim sgd --offload params"]
    assert flags("--optim paged-adam8bit", Place.STEP) == ["--optim paged-adam8bit --offload params"]


def test_the_16_bit_format_of_the_device() -> None:
    assert flags("", half=Precision.FP16)[-1].startswith("--accumulate 4 --checkpoint --fp16")


def test_in_the_update_only_what_makes_it_smaller() -> None:
    assert flags("", Place.STEP) == [
        "--offload optimizer",
        "--offload optimizer,params",
        "--adam8bit --offload optimizer,params",
    ]
    assert flags("--adam8bit --accumulate 2", Place.STEP) == [
        "--accumulate 2 --adam8bit --offload optimizer",
        "--accumulate 2 --adam8bit --offload optimizer,params",
    ]
    assert flags("", Place.STEP, has_optimizer=False) == []


def test_paged_moments_where_the_state_cannot_be_offloaded() -> None:
    fallbacks = list(next_plans(Plan(), Place.STEP, rows=4, keep=["offload"]))
    assert [(fallback.plan.label, fallback.lossy) for fallback in fallbacks] == [
        ("--adam8bit", True),
        ("--optim paged-adam8bit", True),
    ]
    assert [fallback.why for fallback in fallbacks] == [
        "the optimizer's moments in 8 bits",
        "the optimizer's 8-bit moments paged to the host",
    ]
    # the same numbers, elsewhere
    (paged,) = next_plans(Plan.parse("--adam8bit"), Place.STEP, rows=4, keep=["offload"])
    assert (paged.plan.label, paged.lossy) == ("--optim paged-adam8bit", False)


def test_without_an_optimizer_its_settings_are_left_out() -> None:
    assert flags("", rows=1, has_optimizer=False) == [
        "--chunk-loss",
        "--checkpoint --chunk-loss",
        "--checkpoint --chunk-loss --tile 4",
        "--checkpoint --offload activations --chunk-loss --tile 4",
        "--checkpoint --offload activations,params --chunk-loss --tile 4",
        "--checkpoint --bf16 --offload activations,params --chunk-loss --tile 4",
    ]


def test_a_refused_setting_is_left_out_of_all_that_follows() -> None:
    refused = {Plan.parse("--accumulate 4 --chunk-loss")}

    rest = flags("--accumulate 4", refused=refused)

    assert rest[0] == "--accumulate 4 --checkpoint"
    assert not any("--chunk-loss" in each for each in rest)


def test_a_refusal_on_the_way_is_heeded() -> None:
    refused: set[Plan] = set()
    seen = []
    for fallback in next_plans(Plan(), Place.FORWARD, rows=8, keep=["offload", "tiling"], refused=refused):
        seen.append(fallback.plan.label)
        if fallback.plan.accumulation > 2 or fallback.plan.loss is Loss.CHUNKED:
            refused.add(fallback.plan)

    assert seen == [
        "--accumulate 2",
        "--accumulate 4",
        "--accumulate 2 --chunk-loss",
        "--accumulate 2 --checkpoint",
        "--accumulate 2 --checkpoint --adam8bit",
        "--accumulate 2 --checkpoint --optim paged-adam8bit",
        "--accumulate 2 --checkpoint --bf16 --optim paged-adam8bit",
    ]


def test_plans_that_ran_out_on_the_way_may_be_among_the_refused() -> None:
    tried = {Plan(), Plan.parse("--accumulate 2"), Plan.parse("--accumulate 4")}

    assert flags("--accumulate 4", refused=tried) == flags("--accumulate 4")


def test_one_fallback_at_a_time_gives_the_same_order() -> None:
    """As the rescuer does it: after each failure it asks anew, from the plan that has just failed."""
    plan, seen, tried = Plan(), [], {Plan()}
    while (fallback := next(next_plans(plan, Place.BACKWARD, rows=8, refused=tried), None)) is not None:
        plan = fallback.plan
        tried.add(plan)
        seen.append(plan.label)

    assert seen == flags("", Place.BACKWARD, rows=8)


def test_nothing_above_the_top() -> None:
    top = flags("")[-1]

    assert flags(top) == []


# -- with predictions


def test_predicted_plans_come_first_by_their_speed() -> None:
    predictions = dict(
        [
            predicted("", 9, 1.0),
            predicted("--checkpoint", 4, 1.3),
            predicted("--accumulate 2", 6, 1.1),
            predicted("--accumulate 4", 5, 1.2),
            predicted("--bf16", 6, 0.6),
            predicted("--adam8bit", 7, 1.0),
        ]
    )
    fallbacks = list(
        next_plans(Plan(), Place.FORWARD, rows=4, keep=["offload", "loss", "tiling"], predictions=predictions)
    )

    assert [(fallback.plan.label, fallback.lossy) for fallback in fallbacks] == [
        ("--accumulate 2", False),
        ("--accumulate 4", False),
        ("--checkpoint", False),
        ("--accumulate 4 --checkpoint", False),
        ("--bf16", True),
        ("--adam8bit", True),
        ("--accumulate 4 --checkpoint --adam8bit", True),
        ("--accumulate 4 --checkpoint --optim paged-adam8bit", True),
        ("--accumulate 4 --checkpoint --bf16 --optim paged-adam8bit", True),
    ]
    assert fallbacks[0].why == "half the rows at a time; predicted to need 6.00 GiB"


def test_what_surely_does_not_fit_is_skipped() -> None:
    predictions = dict(
        [
            predicted("--accumulate 2", 6, 1.1, doubt=0.1),
            predicted("--accumulate 4", 4.2, 1.2, doubt=0.1),
            predicted("--checkpoint", 3, 1.3),
        ]
    )
    only = {"offload", "loss", "optimizer", "precision", "tiling"}

    fallbacks = flags("", keep=only, predictions=predictions, budget_bytes=4 * 2**30)

    assert fallbacks == ["--accumulate 4", "--checkpoint", "--accumulate 4 --checkpoint"]


def test_sizes_without_times_leave_the_usual_order() -> None:
    predictions = dict([predicted("--checkpoint", 1), predicted("--accumulate 2", 6), predicted("--accumulate 4", 3)])
    only = {"offload", "loss", "optimizer", "precision", "tiling"}

    fallbacks = flags("", keep=only, predictions=predictions, budget_bytes=4 * 2**30)

    assert fallbacks == ["--accumulate 4", "--accumulate 4 --checkpoint"]


def test_what_is_predicted_to_be_refused_is_left_out() -> None:
    predictions = dict([predicted("--chunk-loss", 0, refused="loss: no large head"), predicted("--checkpoint", 1, 1.3)])

    fallbacks = flags("", predictions=predictions)

    assert fallbacks[0] == "--checkpoint"
    assert not any("--chunk-loss" in each for each in fallbacks)


def test_predictions_of_other_ways_to_train_are_no_fallbacks() -> None:
    predictions = dict(
        predicted(plan, 1, 1.0)
        for plan in ("--optim sgd", "--optim adafactor", "--precision pure-bf16", "--fp16", "--accumulate 16")
    )

    assert flags("", predictions=predictions) == flags("")


def test_predictions_that_take_something_off_are_no_fallbacks() -> None:
    predictions = dict([predicted("--checkpoint", 1, 1.3), predicted("--accumulate 8", 1, 1.3)])

    assert flags("--accumulate 4 --chunk-loss", rows=4, predictions=predictions) == flags("--accumulate 4 --chunk-loss")


def test_in_the_update_predictions_of_passes_do_not_count() -> None:
    predictions = dict([predicted("--checkpoint", 1, 1.3), predicted("--adam8bit", 1, 1.0)])

    assert flags("", Place.STEP, predictions=predictions) == [
        "--offload optimizer",
        "--offload optimizer,params",
        "--adam8bit",
        "--adam8bit --offload optimizer,params",
    ]


# -- what must not change


def test_names_of_fields_and_of_flags() -> None:
    names = ["accumulate", "--checkpoint", "precision", "bf16", "optim", "offload ", "chunk-loss", "--release-grads"]
    names += ["--pack", "--tile", "scale", "--batchnorm", "lora", "--base"]

    assert pinned(names) == set(NAMES)
    assert pinned([]) == frozenset()


def test_an_unknown_name() -> None:
    with pytest.raises(PlanError) as raised:
        pinned(["presicion"])
    assert str(raised.value) == (
        "--keep presicion: allowed are accumulation, batchnorm, checkpointing, precision, optimizer, offload, loss, gradients, "
        "padding, tiling, adapters, base, scale, and the flags that set them; did you mean precision?"
    )


# -- whatever is asked


def a_plan(**settings: Any) -> Plan | None:
    try:
        return Plan(**settings)
    except PlanError:
        return None


tiers = st.sampled_from([None, *Tier])
plans = (
    st.builds(
        lambda state, activations, **settings: a_plan(
            **settings,
            offload=tuple(
                (what, tier)
                for what, tier in ((Offloaded.ACTIVATIONS, activations), (Offloaded.OPTIMIZER, state))
                if tier is not None
            ),
        ),
        state=tiers,
        activations=tiers,
        accumulation=st.integers(1, 20),
        checkpointing=st.sampled_from(["off", "full", "every:2", "selective"]),
        precision=st.sampled_from(Precision),
        optimizer=st.sampled_from(OptimizerChoice),
        loss=st.sampled_from(Loss),
    )
    .filter(lambda plan: plan is not None)
    .map(lambda plan: plan or Plan())
)


@st.composite
def questions(draw: st.DrawFn) -> tuple[Plan, Place, dict[str, Any]]:
    options: dict[str, Any] = {
        "rows": draw(st.integers(1, 40)),
        "keep": frozenset(draw(st.sets(st.sampled_from(NAMES), max_size=4))),
        "keeps_rows": draw(st.booleans()),
        "has_optimizer": draw(st.booleans()),
        "refused": frozenset(draw(st.sets(plans, max_size=4))),
    }
    if draw(st.booleans()):
        seconds = st.sampled_from([0.5, 1.0, 1.1, 1.3, math.nan])
        known = draw(st.sets(st.sampled_from(plan_space()), max_size=30))
        options["predictions"] = dict(
            predicted(str(plan), draw(st.integers(1, 8)), draw(seconds), doubt=0.1) for plan in sorted(known, key=str)
        )
        options["budget_bytes"] = draw(st.sampled_from([None, 2 * 2**30, 4 * 2**30]))
    return draw(plans), draw(st.sampled_from(Place)), options


def value(plan: Plan, name: str) -> object:
    return getattr(plan, name)


def same_numerics(first: Plan, second: Plan) -> bool:
    eight = {OptimizerChoice.ADAM8BIT, OptimizerChoice.PAGED_ADAM8BIT}
    same_optimizer = first.optimizer is second.optimizer or {first.optimizer, second.optimizer} <= eight
    return first.precision is second.precision and same_optimizer


def tried(plan: Plan, place: Place, options: Mapping[str, Any]) -> list[Fallback]:
    fallbacks = next_plans(plan, place, **options)
    taken = []
    for fallback in fallbacks:
        taken.append(fallback)
        assert len(taken) < 1000, "there is no end"
    return taken


@given(questions())
def test_every_order(question: tuple[Plan, Place, dict[str, Any]]) -> None:
    plan, place, options = question
    fallbacks = tried(plan, place, options)
    found = [fallback.plan for fallback in fallbacks]
    lossy = [fallback.lossy for fallback in fallbacks]

    assert all(each.contains(plan) and each != plan for each in found)
    assert len(set(found)) == len(found)
    assert lossy == sorted(lossy)
    assert all(fallback.lossy != same_numerics(fallback.plan, plan) for fallback in fallbacks)
    assert all(value(each, name) == value(plan, name) for each in found for name in options["keep"])
    assert all(each.accumulation <= max(plan.accumulation, options["rows"]) for each in found)
    assert all(fallback.why for fallback in fallbacks)
    assert [fallback.plan for fallback in tried(plan, place, options)] == found
    if options["keeps_rows"] or place is Place.STEP:
        assert all(each.accumulation == plan.accumulation for each in found)
    if not options["has_optimizer"]:
        assert all(each.optimizer is plan.optimizer for each in found)
        assert all(each.tier_of(Offloaded.OPTIMIZER) is plan.tier_of(Offloaded.OPTIMIZER) for each in found)
    assert not any(each.contains(no) for each in found for no in options["refused"] if not plan.contains(no))
    does_not_fit = _surely_too_large(options)
    assert not any(each in does_not_fit for each in found)


def _surely_too_large(options: Mapping[str, Any]) -> Collection[Plan]:
    budget_bytes = options.get("budget_bytes")
    predictions: Mapping[Plan, Prediction] = options.get("predictions", {})
    return {plan for plan, each in predictions.items() if budget_bytes and each.interval_bytes[0] > budget_bytes}


@given(questions())
def test_without_predictions_every_fallback_adds_one_setting(question: tuple[Plan, Place, dict[str, Any]]) -> None:
    plan, place, options = question
    options = {name: option for name, option in options.items() if name not in ("predictions", "budget_bytes")}
    found = [plan, *(fallback.plan for fallback in tried(plan, place, options))]

    for before, after in pairwise(found):
        assert after.contains(before)
        assert sum(value(before, name) != value(after, name) for name in NAMES) == 1


@given(plans, plans, plans)
def test_containing_is_an_order(first: Plan, second: Plan, third: Plan) -> None:
    assert first.contains(first)
    assert not (first.contains(second) and second.contains(first)) or first == second
    assert not (first.contains(second) and second.contains(third)) or first.contains(third)
