"""Records: sums, ratios and verdicts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.errors import MemlabError
from memlab.plan import Plan
from memlab.records import (
    Phase,
    Prediction,
    StepRecord,
    measurement_of_steps,
    out_of_memory,
    prediction_of,
    thin,
)
from memlab.records.comparison import Comparison, loss_drift, timed_anew
from tests.records.examples import measured, point, predicted


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=2000), st.integers(1, 300))
def test_thinning_keeps_the_peak_the_order_and_the_limit(totals: list[int], most: int) -> None:
    points = [point(total, seconds=float(index)) for index, total in enumerate(totals)]
    kept = thin(points, most)
    assert len(kept) <= most
    assert max(p.total_bytes for p in kept) == max(totals)
    assert [p.seconds for p in kept] == sorted(p.seconds for p in kept)


def test_speed_is_that_of_the_median_step() -> None:
    m = measured()
    assert (m.median_step_seconds, m.samples_per_second, m.tokens_per_second, m.spread) == (0.5, 8, 80, 0.5)


def test_speed_without_timed_steps_is_not_a_number_and_no_error() -> None:
    for m in (measured(step_seconds=()), measured(step_seconds=(0.0,))):
        assert math.isnan(m.samples_per_second)
        assert math.isnan(Comparison("t", (m, measured("--fp16"))).rows[1].speed_ratio)
    assert math.isnan(Comparison("t", (measured(samples_per_step=0), measured("--fp16"))).rows[1].speed_ratio)


def test_rows_are_compared_with_the_first() -> None:
    rows = Comparison("t", (measured(), measured("--fp16", 250, step_seconds=(1.0,) * 5))).rows
    assert [(row.memory_ratio, row.speed_ratio) for row in rows] == [(1.0, 1.0), (0.25, 0.5)]


@pytest.mark.parametrize("order", list(permutations(["as written", "--checkpoint", "--fp16"])))
def test_the_plan_as_written_is_what_others_are_compared_with(order: tuple[str, ...]) -> None:
    """Whatever was run first; receipt, history and panel read it from here."""
    peaks = {"as written": 1000, "--checkpoint": 500, "--fp16": 800}
    comparison = Comparison("t", (measured(order[0], peaks[order[0]]),))
    for plan in order[1:]:
        comparison = comparison.add(measured(plan, peaks[plan]))
    assert comparison.rows[0].measurement.plan == "as written"
    ratios = {row.measurement.plan: row.memory_ratio for row in comparison.rows}
    assert ratios == {"as written": 1.0, "--checkpoint": 0.5, "--fp16": 0.8}
    assert "no gain" not in comparison.rows[0].verdict


def test_a_plan_as_written_that_ran_out_of_memory_later_is_no_measure() -> None:
    failed = out_of_memory(Plan(), "cpu", 900, "Tried to allocate 1 B")
    assert [each.plan for each in Comparison("t", (measured("--fp16"), failed)).measurements] == [
        "--fp16",
        "as written",
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [({}, {"step_seconds": (1.0,) * 4}), ({"is_warm": False}, {}), ({"step_seconds": (0.5,) * 2}, {})],
)
def test_no_percentage_of_speed_below_five_settled_steps(first: dict[str, Any], second: dict[str, Any]) -> None:
    row = Comparison("t", (measured(**first), measured("--fp16", 250, **second))).rows[1]
    assert math.isnan(row.speed_ratio)
    assert row.memory_ratio == 0.25


def test_what_was_predicted_for_another_batch_is_not_missed() -> None:
    missed = Prediction("as written", "cpu", 900, None, 0, {}, (), 1.0, 4, 0, (890, 910), (1.0, 1.0))
    larger = measured(samples_per_step=40.0)
    row = Comparison("t", (larger,), predictions=(missed,)).rows[0]
    assert row.prediction is None
    assert row.verdict == ""


def test_a_busy_machine_and_a_missed_prediction_are_said() -> None:
    missed = Prediction("as written", "cpu", 900, None, 0, {}, (), 1.0, 4, 0, (890, 910), (1.0, 1.0))
    row = Comparison("t", (measured(waited_share=0.42),), predictions=(missed,)).rows[0]
    assert row.verdict == (
        "the machine was busy: training waited for a processor 42 % of the time; not as predicted: 1000 B is outside 890 B "
        "to 910 B; not as predicted: a step took 500.0 ms, which is outside 1.00 s to 1.00 s"
    )
    near = replace(missed, interval_bytes=(900, 1000), interval_seconds=(0.6, 1.0))
    assert [
        each.verdict for each in Comparison("t", (measured(step_seconds=(0.45, 0.55, 0.5)),), (), (near,)).rows
    ] == ["not as predicted: a step took 500.0 ms, which is outside 600.0 ms to 1.00 s"]
    near = replace(near, interval_seconds=(0.52, 1.0))  # within what its steps differ by
    assert Comparison("t", (measured(step_seconds=(0.45, 0.55, 0.5)),), (), (near,)).rows[0].verdict == ""
    near = replace(near, interval_seconds=(0.5, 1.0))
    assert Comparison("t", (measured(waited_share=0.05),), predictions=(near,)).rows[0].verdict == ""


def test_few_steps_do_not_time_a_plan_anew_and_many_are_said() -> None:
    before = measured()
    kept, said = timed_anew(before, measured(peak_bytes=1100, step_seconds=(3.0,)))
    assert (kept.step_seconds, kept.peak_allocated_bytes, said) == (before.step_seconds, 1100, "")
    assert kept.notes == ("samples/s are those of an earlier cell: the newest under this plan timed too few steps",)
    assert timed_anew(before, kept) == (kept, "")
    smaller, said = timed_anew(before, measured(samples_per_step=before.samples_per_step * 0.9, step_seconds=(3.0,)))
    assert (smaller.samples_per_second, said) == (pytest.approx(before.samples_per_second), "")
    assert timed_anew(before, smaller) == (smaller, "")
    anew, said = timed_anew(before, measured(step_seconds=(1.0,) * 6))
    assert anew.step_seconds == (1.0,) * 6
    assert said == "as written was timed again: −50 % samples/s; other rows are compared with the new times"
    other, said = timed_anew(before, measured(samples_per_step=8, tokens_per_step=80, step_seconds=(3.0,)))
    assert (other.step_seconds, said) == ((3.0,), "")


def test_rows_of_other_batches_are_not_compared() -> None:
    first, second = Comparison("t", (measured(), measured("--accumulate 2", 4000, tokens_per_step=400))).rows
    assert (first.memory_ratio, first.speed_ratio) == (1.0, 1.0)
    assert math.isnan(second.memory_ratio)
    assert math.isnan(second.speed_ratio)
    assert second.verdict == "other batches than the first row: 400 tokens a step instead of 40"
    alike = Comparison("t", (measured(), measured("--accumulate 2", 4000, tokens_per_step=44))).rows[1]
    assert alike.memory_ratio == 4
    rows = Comparison("t", (measured(tokens_per_step=0), measured("x", tokens_per_step=0, samples_per_step=8))).rows
    assert rows[1].verdict == "other batches than the first row: 8 rows a step instead of 4"


def test_drift_of_losses() -> None:
    assert loss_drift((), (1.0,)) is None
    assert loss_drift((2.0, 4.0), (2.0, 4.1, 9.0)) == pytest.approx(0.025)
    assert loss_drift((2.0, 2.0), (2.0, math.nan)) == math.inf
    assert loss_drift((2.0, 2.0), (math.nan, 2.0)) == math.inf


def test_verdict_of_a_plan_that_gained_nothing_says_where_the_peak_is() -> None:
    timeline = (point(1), point(9, Phase.BACKWARD), point(2, Phase.STEP))
    rows = Comparison(
        "t",
        (
            measured(),
            measured("--offload activations", 995, timeline=timeline, notes=("kept on disk",)),
            measured("--fp16", 999),
            measured("--bf16", 1200, breakdown={}),
            measured("--adam8bit", 980),
        ),
    ).rows
    assert [row.verdict for row in rows] == [
        "",
        "no gain: the peak is in the backward pass, mostly activations; kept on disk",
        "no gain: the peak is mostly activations",
        "no gain",
        "",
    ]


@pytest.mark.parametrize(
    ("phase", "words"),
    [("forward", "forward pass"), ("backward", "backward pass"), ("step", "optimizer step"),
     ("other", "loop between steps")],
)  # fmt: skip
def test_phases_in_a_sentence(phase: str, words: str) -> None:
    assert Phase(phase).words == words


def test_a_plan_measured_again_replaces_its_row() -> None:
    comparison = Comparison("t", (measured(), measured("--fp16", 500)))
    assert [m.plan for m in comparison.add(measured("--bf16", 400)).measurements] == ["as written", "--fp16", "--bf16"]
    assert [m.peak_allocated_bytes for m in comparison.add(measured("--fp16", 450)).measurements] == [1000, 450]
    assert [m.peak_allocated_bytes for m in comparison.add(measured(peak_bytes=900)).measurements] == [900, 500]


def test_an_empty_comparison_is_refused() -> None:
    with pytest.raises(MemlabError) as caught:
        Comparison("t", ())
    assert str(caught.value) == "a comparison needs at least one measurement; run some steps first"


def test_steps_reduce_to_a_measurement() -> None:
    steps = [
        StepRecord(1, "--fp16", 9.0, 4, 40, 2000, 2500, 3.0),
        StepRecord(2, "--fp16", 0.5, 4, 40, None, 2600, 2.0),
        StepRecord(3, "--fp16", 0.7, 4, 40, 1000, None, None),
    ]
    m = measurement_of_steps(Plan.parse("--fp16"), "cpu", steps, breakdown={}, timeline=())
    assert (m.plan, m.peak_allocated_bytes, m.peak_reserved_bytes) == ("--fp16", 2000, 2600)
    assert (m.step_seconds, m.is_warm, m.losses) == ((0.5, 0.7), False, (3.0, 2.0))
    assert (m.samples_per_step, m.tokens_per_step) == (4, 40)
    settled = measurement_of_steps(Plan.parse("--fp16"), "cpu", steps, (0.6,), breakdown={}, timeline=())
    assert (settled.step_seconds, settled.is_warm) == ((0.6,), True)


def test_a_first_step_alone_is_timed() -> None:
    steps = [StepRecord(1, "as written", 2.0, 4, 0)]
    m = measurement_of_steps(Plan(), "cpu", steps, breakdown={}, timeline=())
    assert m.step_seconds == (2.0,)
    assert m.peak_reserved_bytes is None


def test_rows_know_what_was_predicted_for_them() -> None:
    refused = predicted("--bf16", 0, refused="precision: no")
    comparison = Comparison("t", (measured(), measured("--fp16"), measured("--bf16")), (), (predicted(), refused))
    assert [row.prediction for row in comparison.rows] == [predicted(), None, None]
    again = comparison.add(measured("--fp16", 400))
    assert prediction_of("as written", again.predictions) == predicted()
