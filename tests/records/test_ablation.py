"""The record of an ablation: which techniques are kept, against what each is compared, what is said about it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from memlab.errors import MemlabError, PlanError
from memlab.plan import FIELDS, Plan
from memlab.records import Measurement, Phase, Prediction, TimelinePoint, out_of_memory
from memlab.records.ablation import Ablation, AblationRow, helps, technique_words
from memlab.units import GIB


def measured(peak_gib: float, tokens_per_second: float = 100.0, *, spread: float = 0.0, **more: object) -> Measurement:
    seconds = 1000 / tokens_per_second
    parts = {"parameters": GIB // 4, "activations": int(peak_gib * GIB) - GIB // 4}
    base = Measurement(
        "a plan", "cpu", int(peak_gib * GIB), None, 0, parts, (TimelinePoint(0.0, Phase.BACKWARD, parts),),
        (seconds * (1 - spread), *[seconds] * 3, seconds * (1 + spread)), 8, 1000,
    )  # fmt: skip
    return replace(base, **more)  # type: ignore[arg-type]


def failed(gib: float) -> Measurement:
    return out_of_memory(Plan(), "cpu", int(gib * GIB), "Tried to allocate 1.00 GiB")


def predicted(peak_gib: float) -> Prediction:
    return Prediction("a plan", "cpu", int(peak_gib * GIB), None, 0, {}, (), 1.0, 8, 0, (0, 0), (1.0, 1.0))


def row(technique: str, measurement: Measurement | None, *, kept: bool = True, **more: object) -> AblationRow:
    return replace(AblationRow(technique, technique or "as written", "words", measurement, kept=kept), **more)  # type: ignore[arg-type]


def test_rows_are_compared_with_the_row_before_that_was_kept_and_with_the_first() -> None:
    ablation = Ablation("m", (
        row("", measured(4, 100)), row("--chunk-loss", measured(2, 90)),
        row("--checkpoint", measured(2, 60), kept=False), row("--adam8bit", measured(1, 45)),
    ))  # fmt: skip
    first, chunked, dropped, last = ablation.steps
    assert math.isnan(first.memory_before)
    assert math.isnan(first.memory_first)
    assert (chunked.memory_before, chunked.speed_before) == (0.5, pytest.approx(0.9))
    assert (dropped.memory_before, dropped.speed_before) == (1.0, pytest.approx(60 / 90))
    assert (last.memory_before, last.memory_first) == (0.5, 0.25)
    assert (last.speed_before, last.speed_first) == (pytest.approx(0.5), pytest.approx(0.45))
    assert (ablation.plan, ablation.last, ablation.first) == ("--adam8bit", ablation.rows[3], ablation.rows[0])


def test_a_technique_that_gave_nothing_says_where_the_peak_is() -> None:
    ablation = Ablation("m", (row("", measured(4)), row("--checkpoint", measured(4), kept=False),
                          row("--bf16", measured(5), kept=False)))  # fmt: skip
    assert [step.verdict for step in ablation.steps] == [
        "the peak is in the backward pass, mostly activations",
        "no gain; the peak is in the backward pass, mostly activations; left out below",
        "no gain, and more memory; the peak is in the backward pass, mostly activations; left out below",
    ]


def test_verdicts_of_what_did_not_run_or_was_only_faster() -> None:
    ablation = Ablation("m", (
        row("", failed(4)), row("--chunk-loss", measured(3)), row("--bf16", measured(3, 200)),
        row("--checkpoint", failed(4), kept=False), row("--fp16", None, refused="precision: no", kept=False),
    ))  # fmt: skip
    assert [step.verdict for step in ablation.steps] == [
        "out of memory: Tried to allocate 1.00 GiB",
        "the peak is in the backward pass, mostly activations",
        "no less memory, but faster; the peak is in the backward pass, mostly activations",
        "out of memory: Tried to allocate 1.00 GiB; left out below",
        "refused: precision: no",
    ]


def test_a_note_is_said_once() -> None:
    noted = ("moments are kept in 8 bits",)
    ablation = Ablation("m", (row("", measured(4)), row("--adam8bit", measured(3, notes=noted)),
                          row("--checkpoint", measured(2, notes=noted))))  # fmt: skip
    assert [noted[0] in step.verdict for step in ablation.steps] == [False, True, False]


def test_the_first_row_that_fits_is_marked_and_no_other() -> None:
    rows = (row("", measured(4)), row("--chunk-loss", measured(2)), row("--checkpoint", measured(1)))
    ablation = Ablation("m", rows, budget_bytes=2 * GIB)
    assert [step.is_first_to_fit for step in ablation.steps] == [False, True, False]
    assert ablation.steps[1].verdict.startswith("fits 2.00 GiB, 0 B to spare; ")
    assert Ablation("m", rows).fitting is None
    reserved = (row("", measured(1, peak_reserved_bytes=3 * GIB)),)
    assert Ablation("m", reserved, budget_bytes=2 * GIB).fitting is None, "a budget must hold what is reserved"


def test_where_the_first_ran_out_of_memory_the_first_that_ran_is_first() -> None:
    ablation = Ablation("m", (row("", failed(3)), row("--chunk-loss", measured(2)), row("--checkpoint", measured(1))))
    assert ablation.first is ablation.rows[1]
    assert [math.isnan(step.memory_first) for step in ablation.steps] == [True, True, False]
    assert math.isnan(ablation.steps[1].memory_before)
    assert ablation.steps[2].memory_first == 0.5


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (measured(4), measured(3.9), True),
        (measured(4), measured(3.97), False),
        (measured(4), measured(5, 500), False),  # faster, and more memory
        (measured(4, 100), measured(4, 130), True),
        (measured(4, 100), measured(4, 104), False),
        (measured(4, 100, spread=0.2), measured(4, 130, spread=0.2), False),  # within the spread
        (measured(4, 100), measured(4, 130, step_seconds=(0.1,)), False),  # one step alone has no spread
        (measured(4, 100), measured(4, 130, step_seconds=(7.7, 7.6, 7.8, 7.7)), False),  # too few to compare
        (measured(4, 100, step_seconds=(10.0,)), measured(4, 130), False),
        (measured(4), failed(5), False),
        (failed(4), measured(3), True),
        (failed(4), failed(4), True),
        (measured(4), None, False),
        (failed(4), None, False),
    ],
)
def test_which_techniques_are_kept(before: Measurement, after: Measurement | None, kept: bool) -> None:
    assert helps(row("", before), row("--checkpoint", after)) is kept


@pytest.mark.parametrize(("peak_gib", "kept"), [(5.0, True), (8.0, False)])
def test_of_two_that_ran_out_of_memory_the_prediction_decides(peak_gib: float, kept: bool) -> None:
    before = row("", failed(4), prediction=predicted(8))
    assert helps(before, row("--checkpoint", failed(4), prediction=predicted(peak_gib))) is kept


def test_throughput_is_in_samples_where_there_are_no_tokens() -> None:
    tokens, none = measured(2), measured(2, tokens_per_step=0)
    assert Ablation("m", (row("", tokens),)).counts_tokens
    ablation = Ablation("m", (row("", none),))
    assert not ablation.counts_tokens
    assert ablation.speed(none) == pytest.approx(0.8)


def test_techniques_are_added_not_exchanged() -> None:
    plan = Plan.parse("--offload optimizer --bf16").joined(Plan.parse("--offload activations:disk"))
    assert str(plan) == "--bf16 --offload activations:disk,optimizer"
    with pytest.raises(PlanError, match="exclude each other"):
        Plan.parse("--offload optimizer").joined(Plan.parse("--optim paged-adam8bit"))


def test_every_choice_of_every_field_has_words() -> None:
    for spec in FIELDS:
        before = Plan.parse("--lora") if spec.name == "base" else Plan()  # without which it means nothing
        for choice in spec.choices[1:]:
            said = technique_words(before, before.with_setting(spec.name, choice))
            assert said.startswith(spec.title)
            assert said.endswith(("; same gradient", "; changes numerics"))


def test_words_name_what_is_replaced() -> None:
    before, after = Plan.parse("--checkpoint selective"), Plan.parse("--checkpoint")
    assert technique_words(before, after) == "Checkpointing: every block instead of selective; same gradient"
    micro = Plan.parse("--accumulate 2 --batchnorm micro")
    assert technique_words(Plan.parse("--accumulate 2"), micro) == "BatchNorm per micro-batch; changes numerics"
    both = Plan.parse("--offload optimizer").joined(Plan.parse("--offload activations"))
    assert technique_words(Plan.parse("--offload optimizer"), both) == "Offload: activations; same gradient"


def test_an_ablation_has_rows() -> None:
    with pytest.raises(MemlabError, match="needs at least one row"):
        Ablation("m", ())
