"""The plain-text receipt."""

from __future__ import annotations

import doctest
import math
from dataclasses import replace
from types import ModuleType

import pytest
import samples

from memlab.records import Measurement
from memlab.records.comparison import Comparison
from memlab.report import (
    html,
    image,
    pareto,
    pareto_image,
    ranking,
    segments,
    tables,
    text,
    wording,
)
from memlab.units import GIB, format_bytes


@pytest.mark.parametrize("module", [text, html, image, wording, segments, tables, ranking, pareto, pareto_image])
def test_examples_in_the_docstrings(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_receipt_in_full() -> None:
    assert text.table(tables.comparison(samples.comparison())) == (
        """\
memfit · model gpt2 124M · AdamW · batch 8 × 512 · CPU ledger (capacity 16 GiB) · 12 steps
plan                          peak allocated   vs first   offloaded    samples/s   vs first   tokens/s   loss drift
───────────────────────────────────────────────────────────────────────────────────────────────────────────────────
as written                         10.89 GiB          –           –   1.31 ± 3 %          –        671            –
--accumulate 4                      5.05 GiB      −54 %           –   1.27 ± 3 %       −3 %        650         2e-7
--accumulate 4 --checkpoint         3.35 GiB      −69 %           –   0.98 ± 2 %      −25 %        502            0
    ↳ the peak is now in the loss: try --chunk-loss
--offload optimizer                10.99 GiB       +1 %    1.00 GiB   1.10 ± 3 %      −16 %        563            0
    ↳ no gain: the peak is in the forward pass, mostly activations
step 7: out of memory (needed 1.20 GiB, 0.31 free) → accumulation 4 → 8, same batch redone, 0 steps lost"""
    )


def test_what_the_last_cell_ran_is_marked_among_others() -> None:
    compared = samples.comparison()
    new = compared.measurements[-1].plan
    lines = text.table(tables.comparison(replace(compared, latest=(new,)))).splitlines()
    assert [line for line in lines if "◂ this cell" in line] == [line for line in lines if line.startswith(new)]
    every = tuple(each.plan for each in compared.measurements)
    assert text.table(tables.comparison(replace(compared, latest=every))) == text.table(tables.comparison(compared))


def test_short_notes_stand_beside_their_rows() -> None:
    first, second = (
        Measurement(plan, "cpu", peak_bytes, None, 0, {}, (), (0.5,) * 5, 4, 0)
        for plan, peak_bytes in (("as written", 4), ("--fp16", 2))
    )
    assert text.table(tables.comparison(Comparison("t", (first, replace(second, notes=("scale 65536",)))))) == (
        """\
t
plan         peak allocated   vs first    samples/s   vs first   note
────────────────────────────────────────────────────────────────────────────
as written              4 B          –   8.00 ± 0 %          –
--fp16                  2 B      −50 %   8.00 ± 0 %       ±0 %   scale 65536"""
    )


def test_every_column_every_line_within_a_page() -> None:
    lines = text.table(tables.comparison(samples.crowded())).splitlines()
    assert max(map(len, lines)) <= 150
    assert "peak reserved" in lines[1]
    wrapped = [line.strip() for line in lines[-5:-2]]
    assert wrapped[0].startswith("--accumulate 4 --checkpoint every:2 --bf16 ")
    assert wrapped[1:] == ["--optim paged-adam8bit", "--offload activations:disk --chunk-loss"]


def test_what_was_not_measured_is_a_dash() -> None:
    unmeasured = replace(samples.measurement("as written", 1, 1.0), step_seconds=(), tokens_per_step=0, losses=())
    lines = text.table(
        tables.comparison(Comparison("t", (unmeasured, replace(unmeasured, plan="--fp16"))))
    ).splitlines()
    row = next(line for line in lines if line.startswith("--fp16"))
    assert row.split()[:2] == ["--fp16", "2.79"]
    assert row.count("–") == 2


def test_a_diverged_loss_is_not_a_small_drift() -> None:
    first = samples.measurement("as written", 1, 1.0)
    bad = replace(first, plan="--fp16", losses=(10.9, float("nan"), 9.8))
    assert "not finite" in text.table(tables.comparison(Comparison("t", (first, bad))))


def test_devices_are_named_when_they_differ() -> None:
    first = samples.measurement("as written", 1, 1.0)
    assert "device" not in text.table(tables.comparison(Comparison("t", (first,))))
    assert "NVIDIA H200" in text.table(
        tables.comparison(Comparison("t", (first, replace(first, plan="--fp16", device="NVIDIA H200"))))
    )


def test_breakdown_in_full() -> None:
    measurement = replace(
        samples.measurement("--fp16", 1.0, 1.0), peak_allocated_bytes=3 * GIB, host_bytes=GIB, driver_bytes=4 * GIB
    )
    assert text.breakdown(measurement) == (
        """\
--fp16 · CPU ledger (capacity 16 GiB)
parameters        471.0 MiB    15 %  ████
optimizer state   952.3 MiB    31 %  ███████
activations        1.00 GiB    33 %  ████████
temporaries       409.6 MiB    13 %  ███
not broken down   215.0 MiB     7 %  ██
peak allocated     3.00 GiB   in the forward pass
device used        4.00 GiB
offloaded          1.00 GiB"""
    )


def test_what_ran_out_of_memory_is_no_saving() -> None:
    comparison = samples.comparison()
    first, *others = comparison.measurements
    ran_out = replace(comparison, measurements=(first, *(replace(each, fits=False) for each in others)))
    assert text.summary(ran_out).endswith("; the others ran out of memory.")
    assert all(math.isnan(row.memory_ratio) for row in ran_out.rows[1:])
    assert text.summary(replace(ran_out, measurements=(replace(first, fits=False),))) == (
        f"1 setting measured: {first.plan} needs more than {format_bytes(first.peak_allocated_bytes)}."
    )


def test_one_sentence_names_the_lowest() -> None:
    comparison = samples.comparison()
    assert text.summary(comparison) == (
        "4 settings measured: as written peaks at 10.89 GiB; --accumulate 4 --checkpoint is the lowest of the others "
        "with 3.35 GiB (−69 %) at −25 % samples per second."
    )
    two = (comparison.measurements[0], comparison.measurements[-1])
    assert text.summary(replace(comparison, measurements=two)) == (
        f"2 settings measured: as written peaks at 10.89 GiB; {two[1].plan} takes 10.99 GiB (+1 %) at −16 % samples per second."
    )
    ranks = tuple(replace(each, plan=f"rank {rank}") for rank, each in enumerate(two))
    assert text.summary(replace(comparison, measurements=ranks, are_ranks=True)) == (
        "2 rows measured: rank 0 peaks at 10.89 GiB; rank 1 takes 10.99 GiB."
    )


def test_what_was_predicted_stands_beside_what_was_measured() -> None:
    predicted = (samples.prediction("as written", 10.8, 1.3), samples.prediction("--accumulate 4", 5.01, 1.2))
    lines = text.table(tables.comparison(replace(samples.comparison(), predictions=predicted))).splitlines()
    assert lines[1].split()[:4] == ["plan", "peak", "allocated", "predicted"]
    assert lines[3].split()[:6] == ["as", "written", "10.89", "GiB", "10.80", "GiB"]
    row = next(line for line in lines if line.startswith("--accumulate 4 --checkpoint"))
    assert row.split()[3:7] == ["3.35", "GiB", "–", "−69"]


def test_a_breakdown_that_is_predicted_says_so() -> None:
    printed = text.breakdown(replace(samples.prediction("--fp16", 3.0, 1.0), peak_reserved_bytes=4 * GIB))
    assert printed.splitlines()[0] == "--fp16 · H100 SXM · predicted"
    assert printed.splitlines()[-2:] == ["peak allocated     3.00 GiB", "peak reserved      4.00 GiB"]
