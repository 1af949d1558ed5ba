"""Plans: text and JSON round trips for any plan, and every message in full."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memlab.errors import MemlabError, PlanError
from memlab.plan import (
    FIELDS,
    Gradients,
    Loss,
    Offloaded,
    OptimizerChoice,
    Plan,
    PlanField,
    Precision,
    Tier,
    plan_flags,
)

FLAGS = ", ".join(plan_flags())

_checkpointing = st.one_of(
    st.sampled_from(("off", "full", "selective")),
    st.integers(1, 99).map(lambda n: f"every:{n}"),
    st.integers(1, 2**45).map(lambda size_bytes: f"budget:{size_bytes}B"),
)
_offload = st.dictionaries(st.sampled_from(Offloaded), st.sampled_from(Tier)).map(lambda tiers: tuple(tiers.items()))


def _conflicts(settings: dict[str, object]) -> bool:
    is_offloaded = any(what == "optimizer" for what, _ in settings["offload"])  # type: ignore[attr-defined]
    has_no_state_to_offload = is_offloaded and settings["optimizer"] in ("paged-adam8bit", "sgd")
    keeps_nothing = any(what == "activations" for what, _ in settings["offload"])  # type: ignore[attr-defined]
    is_budgeted = str(settings["checkpointing"]).startswith("budget")
    return (
        has_no_state_to_offload
        or (settings["gradients"], settings["precision"]) == ("release", "fp16")
        or (is_budgeted and keeps_nothing)
    )


_settings = st.fixed_dictionaries(
    {
        "accumulation": st.integers(1, 1024),
        "checkpointing": _checkpointing,
        "precision": st.sampled_from(Precision),
        "optimizer": st.sampled_from(OptimizerChoice),
        "offload": _offload,
        "loss": st.sampled_from(Loss),
        "gradients": st.sampled_from(Gradients),
        "tiling": st.integers(1, 64),
    }
)
_plans = _settings.filter(lambda settings: not _conflicts(settings)).map(lambda settings: Plan(**settings))


def message(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    return str(caught.value)


@given(_plans)
def test_a_plan_reads_back_from_its_own_flags(plan: Plan) -> None:
    again = Plan.parse(str(plan))
    assert again == plan
    assert hash(again) == hash(plan)
    assert str(again) == str(plan)


@given(_plans, _plans)
def test_plans_print_alike_only_when_they_are_equal(one: Plan, other: Plan) -> None:
    assert (str(one) == str(other)) == (one == other)


@given(_plans)
def test_a_plan_is_the_sum_of_its_changes(plan: Plan) -> None:
    changed = {name: getattr(plan, name) for name in plan.changes()}
    assert Plan(**changed) == plan
    assert (plan.changes() == ()) == (plan.label == "as written")


@given(_plans, st.sampled_from(FIELDS), st.data())
def test_a_field_set_from_its_choices_changes_that_field_only(
    plan: Plan, field: PlanField, data: st.DataObject
) -> None:
    text = data.draw(st.sampled_from(field.choices))
    try:
        changed = plan.with_setting(field.name, text)
    except PlanError as error:
        assume("exclude each other" not in str(error) and "add --lora" not in str(error))
        raise
    assert getattr(changed, field.name) == field.parse(text)
    others = {spec.name for spec in FIELDS} - {field.name}
    assert all(getattr(changed, name) == getattr(plan, name) for name in others)


def test_the_default_changes_nothing() -> None:
    assert str(Plan()) == ""
    assert Plan().label == "as written"
    assert Plan().changes() == ()
    assert [field.name for field in dataclasses.fields(Plan)] == [spec.name for spec in FIELDS]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("--checkpoint=full --accumulate=4", "--accumulate 4 --checkpoint"),
        ("--checkpoint --accumulate 4", "--accumulate 4 --checkpoint"),
        ("--precision fp16", "--fp16"),
        ("--optim adam8bit", "--adam8bit"),
        ("--loss chunked", "--chunk-loss"),
        ("--gradients release --adam8bit", "--adam8bit --release-grads"),
        ("--offload optimizer:auto,activations:disk", "--offload activations:disk,optimizer"),
        (
            "--offload none --accumulate 1 --checkpoint off --precision keep --optim keep --loss keep --gradients keep",
            "",
        ),
        ("--checkpoint every:02", "--checkpoint every:2"),
        ("--checkpoint budget:2048MiB", "--checkpoint budget:2GiB"),
        ("--checkpoint=budget:1.5gib", "--checkpoint budget:1536MiB"),
    ],
)
def test_spellings_of_one_plan(text: str, printed: str) -> None:
    assert str(Plan.parse(text)) == printed


def test_words_of_others_are_returned() -> None:
    plan, rest = Plan.parse_known(["--accumulate", "2", "--steps", "5", "cell"])
    assert (str(plan), rest) == ("--accumulate 2", ["--steps", "5", "cell"])


def test_where_something_is_offloaded() -> None:
    plan = Plan.parse("--offload optimizer:disk")
    assert plan.tier_of(Offloaded.OPTIMIZER) is Tier.DISK
    assert plan.tier_of(Offloaded.ACTIVATIONS) is None


def test_flags_are_listed() -> None:
    assert FLAGS.startswith("--accumulate, --batchnorm, --checkpoint, --precision, --fp16, --bf16, --optim, --adam8bit")
    assert {spec.flag for spec in FIELDS} <= {*plan_flags()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--acumulate 4", f"unknown flag --acumulate; did you mean --accumulate?; flags are {FLAGS}"),
        ("--zzz", f"unknown flag --zzz; flags are {FLAGS}"),
        ("fp16", f"unknown flag fp16; did you mean --fp16?; flags are {FLAGS}"),
        ("--accumulate", "--accumulate needs a value: --accumulate N"),
        ("--accumulate --fp16", "--accumulate needs a value: --accumulate N"),
        ("--precision", "--precision needs a value: --precision keep|fp32|tf32|fp16|bf16|pure-bf16"),
        ("--optim", "--optim needs a value: --optim keep|adamw|adam8bit|paged-adam8bit|adamw4bit|lion8bit|adafactor|sgd|muon|apollo"),
        ("--offload", "--offload needs a value: --offload WHAT[:host|:disk][,WHAT…]"),
        ("--loss", "--loss needs a value: --loss keep|chunked"),
        ("--gradients", "--gradients needs a value: --gradients keep|release"),
        *(
            (
                f"--accumulate {value}",
                f"--accumulate {value}: expected a whole number of micro-batches, 1 or more, as in '--accumulate 4'",
            )
            for value in ("0", "-1", "2.5", "four")
        ),
        *(
            (
                f"--checkpoint {value}",
                (f"--checkpoint {value}: allowed are off, full, selective, every:N with N ≥ 1, "
                "as in '--checkpoint every:2', and budget:SIZE, as in '--checkpoint budget:2GiB'"),
            )
            for value in ("every:0", "every", "half", "every:x", "budget", "budget:")
        ),
        ("--checkpoint budget:2GX", "size '2GX': expected a number above zero and its unit, as in '8GiB', '512MiB' or '24GB'"),
        ("--checkpoint budget:0MiB", "size '0MiB': must be one byte or more"),
        (
            "--checkpoint budget:1GiB --offload activations",
            "--checkpoint budget and --offload activations exclude each other: offloaded activations use "
            "nothing of the budget; drop one of the two",
        ),
        ("--scale", "--scale needs a value: --scale none|fsdp2|zero1|zero2|zero3"),
        ("--scale fsdp", "--scale fsdp: allowed are none, fsdp2, zero1, zero2, zero3; did you mean fsdp2?"),
        ("--scale tp", "--scale tp is of several processes: give it to a cell, as in '%%memfit --nproc 2 --scale tp'"),
        (
            "--scale zero2 --adam8bit",
            "--scale zero2 and --adam8bit exclude each other: the engine has the model; drop one of the two",
        ),
        (
            "--scale fsdp2 --fp16",
            "--scale fsdp2 and --precision fp16 exclude each other: it needs scaled losses or converted moments; use --bf16",
        ),
        (
            "--scale fsdp2 --offload activations",
            "--scale fsdp2 and --offload activations exclude each other: the engine runs the model; use --checkpoint",
        ),
        (
            "--scale zero1 --offload optimizer",
            "--scale zero1 and --offload optimizer exclude each other: zero1 keeps optimizer state on the device; use --scale fsdp2, zero2 or zero3",
        ),
        (
            "--scale zero2 --offload params",
            "--scale zero2 and --offload params exclude each other: zero2 keeps parameters on the device; use --scale fsdp2 or zero3",
        ),
        (
            "--scale zero2 --offload optimizer:disk",
            "--scale zero2 and --offload optimizer:disk exclude each other: zero2 does not offload to files; "
            "drop ':disk', or use --scale zero3",
        ),
        (
            "--scale zero3 --offload params",
            "--scale zero3 and --offload params exclude each other: zero3 has the optimizer's state where "
            "parameters are; use --offload optimizer,params",
        ),
        (
            "--precision fp61",
            "--precision fp61: allowed are keep, fp32, tf32, fp16, bf16, pure-bf16; did you mean fp16?",
        ),
        (
            "--optim lion",
            "--optim lion: allowed are keep, adamw, adam8bit, paged-adam8bit, adamw4bit, lion8bit, adafactor, sgd, muon, apollo; did you mean lion8bit?",
        ),
        (
            "--offload optimiser",
            "--offload optimiser: allowed are optimizer, activations, params, frozen; did you mean optimizer?",
        ),
        (
            "--offload optimizer:hots",
            "--offload optimizer: hots: allowed are auto, host, disk; did you mean host?",
        ),
        (
            "--offload optimizer,optimizer:disk",
            ("--offload optimizer,optimizer:disk: optimizer is named twice; name each once, "
            "as in 'optimizer:disk,activations'"),
        ),
        ("--loss tiled", "--loss tiled: allowed are keep, chunked"),
        ("--gradients free", "--gradients free: allowed are keep, release"),
        (
            "--fp16 --release-grads",
            ("--release-grads and --fp16 exclude each other: fp16 updates only when no gradient overflowed, and the "
            "last one is known at the end of the backward pass; use --bf16 with --release-grads"),
        ),
        ("--fp16=yes", "--fp16 takes no value; it stands for '--precision fp16'"),
        ("--fp16 --bf16", "--fp16 and --bf16 both set the precision; give one of them"),
        ("--accumulate 2 --accumulate 4", "--accumulate and --accumulate both set the accumulation; give one of them"),
        (
            "--optim paged-adam8bit --offload optimizer",
            ("--optim paged-adam8bit and --offload optimizer exclude each other: paged moments move to the host by "
            "themselves; drop one of the two"),
        ),
        (
            "--optim sgd --offload optimizer:disk",
            ("--optim sgd and --offload optimizer exclude each other: SGD without momentum keeps no state to offload; "
            "drop one of the two"),
        ),
    ],
)  # fmt: skip
def test_messages_in_full(text: str, expected: str) -> None:
    assert message(text) == expected


def test_python_and_flags_refuse_alike() -> None:
    with pytest.raises(PlanError) as caught:
        Plan(accumulation=0)
    assert str(caught.value) == (
        "--accumulate 0: expected a whole number of micro-batches, 1 or more, as in '--accumulate 4'"
    )
    with pytest.raises(ValueError, match="exclude each other"):
        Plan(optimizer="sgd", offload="optimizer")  # type: ignore[arg-type]


def test_unknown_field_of_a_panel() -> None:
    with pytest.raises(PlanError) as caught:
        Plan().with_setting("colour", "red")
    assert str(caught.value) == (f"no field 'colour' in a plan; there are {', '.join(spec.name for spec in FIELDS)}")


def test_errors_are_one_tree() -> None:
    assert issubclass(PlanError, MemlabError)
    assert issubclass(PlanError, ValueError)
