"""The live figures: the data of the records, in their units, on a transparent background."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import samples

from memlab.errors import MissingExtraError
from memlab.records import Measurement
from memlab.records.comparison import Comparison
from memlab.report import figure
from memlab.report.segments import segments, swatch
from memlab.units import GIB

pytest.importorskip("plotly")


def test_bars_hold_the_bytes_of_the_records() -> None:
    comparison = samples.comparison()
    drawn = figure.comparison(comparison)
    bars = {trace.name: trace for trace in drawn.data}
    for index, measurement in enumerate(comparison.measurements):
        for name, size in segments(measurement).items():
            assert bars[name].x[index] == pytest.approx(size / GIB)
    assert list(bars["samples/s"].x) == pytest.approx([m.samples_per_second for m in comparison.measurements])
    assert bars["samples/s"].error_x.array[0] == pytest.approx(1.31 * comparison.measurements[0].spread)
    assert drawn.layout.xaxis.title.text == "peak memory allocated, GiB"
    assert drawn.layout.xaxis2.title.text == "throughput, samples/s"


def test_totals_and_changes_are_written_beside_the_bars() -> None:
    words = [note.text for note in figure.comparison(samples.comparison()).layout.annotations]
    assert words == ["10.89 GiB", "5.05 GiB  −54 %", "3.35 GiB  −69 %", "10.99 GiB  +1 %",
                     "1.31", "1.27  −3 %", "0.98  −25 %", "1.10  −16 %"]  # fmt: skip


def test_timeline_holds_the_layers_of_the_step() -> None:
    measurement = samples.measurement("--accumulate 4", 2.8, 1.27, 4)
    drawn = figure.timeline(measurement, budget_bytes=6 * GIB)
    layers = {trace.name: trace for trace in drawn.data}
    top = [sum(values) for values in zip(*(trace.y for trace in layers.values()), strict=True)]
    assert max(top) * GIB == pytest.approx(measurement.peak_allocated_bytes)
    assert all(trace.stackgroup == "memory" and trace.line.shape == "hv" for trace in layers.values())
    words = [note.text for note in drawn.layout.annotations]
    assert "peak 5.05 GiB in the forward pass" in words
    assert "budget 6.00 GiB" in words
    assert words.count("backward") == 4


def test_same_colours_as_the_pictures() -> None:
    for trace in figure.comparison(samples.comparison()).data[:-1]:
        assert trace.marker.color == swatch(trace.name).colour


@pytest.mark.parametrize("drawn", [figure.comparison(samples.comparison()),
                                   figure.timeline(samples.measurement("as written", 2, 1))])  # fmt: skip
def test_transparent_small_and_without_a_template(drawn) -> None:  # type: ignore[no-untyped-def]
    assert drawn.layout.paper_bgcolor == drawn.layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert drawn.layout.font.color == figure.NEUTRAL_INK
    assert len(drawn.to_json()) < 60_000


def test_the_neutral_ink_reads_on_light_and_dark() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    # no grey has more than 4.35 to both pure white and the dark theme's background
    assert contrast(figure.NEUTRAL_INK, "#FFFFFF") > 4.2
    assert contrast(figure.NEUTRAL_INK, "#111111") > 4.2


def test_a_theme_can_bring_its_own_ink() -> None:
    drawn = figure.comparison(samples.comparison(), ink="#EEEEEE")
    assert drawn.layout.font.color == drawn.data[-1].error_x.color == "#EEEEEE"


def test_plans_and_notes_cannot_inject_markup() -> None:
    measurement = replace(samples.measurement("<b>x</b>", 1, 1), notes=("<a href='x'>y</a>",))
    assert "<b>" not in figure.comparison(Comparison("t", (measurement,))).to_json().replace("\\u003c", "<")


def test_nothing_measured_is_still_a_figure() -> None:
    bare = Measurement("as written", "cpu", 0, None, 0, {}, (), (), 0, 0)
    assert figure.timeline(bare).layout.annotations[0].text == "no timeline: no step of this plan was observed"
    assert figure.comparison(Comparison("t", (bare,))).layout.annotations[1].text == "–"


def test_without_plotly_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingExtraError) as caught:
        figure.comparison(samples.comparison())
    needs, _, install = str(caught.value).partition(", which is not installed: ")
    assert needs.endswith("plotly")
    assert install == "pip install 'memlab[lab]' (or pip install plotly)"
