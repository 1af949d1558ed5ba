"""The picture of memory against throughput, static and live."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import samples

from memlab.records import Fit
from memlab.report import canvas, pareto, pareto_image, timeline_image
from memlab.report.pareto import LOOKS, MEASURED, MOST_POINTS
from memlab.report.ranking import pareto_front
from memlab.report.segments import BUDGET
from memlab.units import GIB

SPACE = samples.plan_space()


def test_a_cloud_is_thinned_but_not_its_front() -> None:
    chart = pareto.chart(SPACE, budget_bytes=4 * GIB)
    assert len(chart.points) <= MOST_POINTS
    assert {point.plan for point in chart.front} == {p.plan for p in pareto_front(SPACE)}
    assert "as written" in {point.plan for point in chart.points}
    assert "as written" in chart.labelled
    assert len(chart.labelled) <= 5


def test_marks_differ_in_shape_as_well_as_in_colour() -> None:
    looks = [*LOOKS.values(), MEASURED]
    assert len({look.colour for look in looks}) == len({look.symbol for look in looks}) == 4
    assert len({look.marker for look in LOOKS.values()}) == 3


@pytest.mark.parametrize("look", [*LOOKS.values(), MEASURED], ids=lambda look: look.name)
def test_colours_read_on_light_and_dark(look: pareto.PointLook) -> None:
    assert all(samples.contrast(look.colour, page) > 3 for page in ("#FFFFFF", "#111111"))


def test_trials_are_connected_with_what_predicted_them() -> None:
    chart = pareto.found_chart(samples.found())
    failed, proven = chart.trials
    assert (failed.ran_out, failed.is_found, proven.ran_out, proven.is_found) == (True, False, False, True)
    assert proven.predicted is not None
    assert proven.predicted.plan == proven.plan
    assert failed.predicted is not None
    assert failed.place == (failed.predicted.memory_bytes, failed.predicted.per_second)
    assert chart.budget_bytes == 4 * GIB
    assert proven.plan in chart.labelled


def test_memory_is_what_the_budget_must_hold() -> None:
    plans = [replace(p, peak_reserved_bytes=p.peak_allocated_bytes * 2) for p in SPACE[:3]]
    chart = pareto.chart(plans)
    assert chart.memory_name == "peak memory reserved"
    assert [point.memory_bytes for point in chart.points] == [p.peak_reserved_bytes for p in plans]


def test_the_description_says_what_is_to_be_seen() -> None:
    said = pareto.found_chart(samples.found()).description
    assert said.startswith("Memory against throughput. 300 plans predicted for H100 SXM: 245 fit, ")
    assert said.endswith("Found --accumulate 2 --bf16 --chunk-loss: 3.87 GiB of 4.00 GiB, 133.1 MiB to spare, "
                         "2.30 ± 3 % samples/s, verified in 2 trials.")  # fmt: skip


def test_the_picture() -> None:
    pytest.importorskip("matplotlib")
    pictures = pytest.importorskip("PIL.Image")
    png = pareto_image.png(pareto.found_chart(samples.found()))
    opened = pictures.open(io.BytesIO(png))
    assert opened.width == 1584
    assert len(png) < 100_000
    assert opened.text["Description"].startswith("Memory against throughput.")
    for look in (LOOKS[Fit.YES], LOOKS[Fit.NO], MEASURED):
        assert samples.share_of(look.colour, png, near=24) > 0.0003
    assert samples.share_of(BUDGET, png) > 0.0003  # the budget line
    assert samples.share_of(BUDGET, pareto_image.png(pareto.chart(SPACE[:30]))) == 0


def test_nothing_predicted_is_still_a_picture() -> None:
    pytest.importorskip("matplotlib")
    timeless = [replace(p, step_seconds=float("nan")) for p in SPACE[:3]]
    for plans in ([], timeless, [samples.refused("--fp16", "no")]):
        chart = pareto.chart(plans)
        assert chart.points == ()
        assert pareto_image.png(chart)[1:4] == b"PNG"


def test_a_wide_interval_does_not_flatten_the_picture() -> None:
    wide = [replace(p, interval_seconds=(p.step_seconds / 10, p.step_seconds)) for p in SPACE[:30]]
    fastest = max(p.samples_per_second for p in wide)
    assert pareto.chart(wide).most_per_second == pytest.approx(1.4 * fastest)
    assert pareto.chart(SPACE[:30]).most_per_second == pytest.approx(fastest / 0.85)


def test_the_static_step_of_a_prediction_is_paler() -> None:
    pytest.importorskip("matplotlib")
    points = samples.timeline(3.0, 2)
    predicted = timeline_image.png(replace(samples.prediction("--accumulate 2", 5, 1), timeline=points))
    measured = timeline_image.png(samples.measurement("--accumulate 2", 3.0, 1, 2))
    assert samples.share_of("#CC79A7", measured, near=4) > 0.05
    assert samples.share_of("#CC79A7", predicted, near=4) < 0.001


def test_names_in_the_picture_stand_beside_lines_and_not_on_them() -> None:
    pytest.importorskip("matplotlib")
    chart = pareto.found_chart(samples.found())
    axes = canvas.paper(5.2).add_axes((0.065, 0.105, 0.92, 0.745))
    axes.set_xlim(0, chart.most_bytes / GIB)
    axes.set_ylim(0, chart.most_per_second * 1.12)
    pareto_image._draw(axes, chart, GIB)
    axes.figure.canvas.draw()
    names = [each for each in axes.texts if each.get_text().startswith(("--", "as written"))]
    assert len(names) == len(chart.labelled)
    boxes = [each.get_window_extent() for each in names]
    drawn = [line for line in axes.lines if line.get_linestyle() != "None"]
    paths = [line.get_transform().transform_path(line.get_path()) for line in drawn]
    assert not any(path.intersects_bbox(box, filled=False) for path in paths for box in boxes)
