"""The pictures: PNG bytes of a fitting size, nothing global touched, colours where the data is."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import pytest
import samples

from memlab.errors import MemlabError, MissingExtraError
from memlab.plan import Plan
from memlab.records import Category, Measurement, Phase, TimelinePoint, out_of_memory
from memlab.records.comparison import Comparison
from memlab.report import image, timeline_image
from memlab.report.canvas import paper
from memlab.report.segments import BUDGET, REST, segments, stretches, swatch
from memlab.units import GIB

matplotlib = pytest.importorskip("matplotlib")
pictures = pytest.importorskip("PIL.Image")


def opened(png: bytes):  # type: ignore[no-untyped-def]  # PIL's type, which an optional package brings
    return pictures.open(io.BytesIO(png))


def test_a_row_more_makes_the_picture_higher_not_wider() -> None:
    small, large = opened(image.png(samples.comparison())), opened(image.png(samples.crowded()))
    assert small.width == large.width == 1584
    assert large.height > small.height
    assert len(image.png(samples.crowded())) < 200_000


@pytest.mark.parametrize("page", ["#FFFFFF", "#111111"])
def test_pictures_are_at_home_on_pages_of_either_theme(page: str) -> None:
    for png in (image.png(samples.comparison()), timeline_image.png(samples.measurement("as written", 2, 1))):
        shown = samples.on_page(png, page)
        counts = sorted(((count, value) for count, value in shown.getcolors(2**24)), reverse=True)
        ground = "#{:02X}{:02X}{:02X}".format(*counts[0][1])
        assert ground == page == "#{:02X}{:02X}{:02X}".format(*shown.getpixel((2, 2)))
        # the title is all that stands there
        inks = {value for _, value in shown.crop((0, 0, shown.width, 30)).getcolors(2**16)}
        best = max(samples.contrast(page, "#{:02X}{:02X}{:02X}".format(*ink)) for ink in inks)
        assert best == pytest.approx(4.3, abs=0.2)


def test_what_ran_out_is_above_its_bar_as_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(image, "_drawn", lambda _title, _said, rows, *_, **__: drawn.extend(row.text for row in rows))
    failed = out_of_memory(Plan.parse("--bf16"), "cpu", 8 * GIB, "Tried to allocate 1 GiB")
    image.png(Comparison("t", (samples.measurement("as written", 2, 1), failed)))
    assert drawn == ["3.79 GiB", "> 8.00 GiB"]


def test_area_of_a_colour_follows_its_bytes() -> None:
    def of(activations_bytes: int) -> float:
        parts = {Category.PARAMETERS: GIB, Category.ACTIVATIONS: activations_bytes}
        base = Measurement("as written", "cpu", 8 * GIB, None, 0, {Category.PARAMETERS: 8 * GIB}, (), (1.0,), 1, 0)
        tested = replace(base, plan="--fp16", peak_allocated_bytes=sum(parts.values()), breakdown=parts)
        return samples.share_of(swatch(Category.ACTIVATIONS).colour, image.png(Comparison("t", (base, tested))))

    assert of(0) < of(GIB) / 10  # the legend's swatch is not drawn either
    assert of(4 * GIB) == pytest.approx(2 * of(2 * GIB), rel=0.2)


def test_what_no_category_explains_is_drawn_as_such() -> None:
    measurement = replace(samples.measurement("as written", 1, 1), peak_allocated_bytes=9 * GIB)
    parts = segments(measurement)
    assert sum(parts.values()) == 9 * GIB
    assert list(parts)[-1] == REST
    assert REST not in segments(samples.measurement("as written", 1, 1))


def test_unused_memory_does_not_hide_what_is_missing() -> None:
    parts = segments(Measurement("x", "cpu", 10, 30, 0, {"parameters": 4, "unused but reserved": 20}, (), (), 1, 0))
    assert parts == {"parameters": 4, "unused but reserved": 20, REST: 6}


def test_phases_follow_each_other_without_gaps() -> None:
    found = stretches(samples.timeline(2.0, micro_batches=2))
    assert [str(each.phase) for each in found] == ["other", "forward", "backward", "forward", "backward", "step"]
    assert all(one.stop_seconds == other.start_seconds for one, other in itertools.pairwise(found))


@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_timelines_are_drawn(micro_batches: int) -> None:
    measurement = samples.measurement("--accumulate 4", 2, 1, micro_batches)
    png = timeline_image.png(measurement, budget_bytes=3 * GIB)
    assert opened(png).size == (1584, 619)
    assert samples.share_of(swatch(Category.ACTIVATIONS).colour, png) > 0.05
    assert samples.share_of(BUDGET, png) > 0.0005  # the budget line
    assert samples.share_of(BUDGET, timeline_image.png(measurement)) == 0


def test_steps_together_share_their_scales() -> None:
    one, other = samples.measurement("as written", 4, 1), samples.measurement("--accumulate 4", 1, 1, 4)
    png = timeline_image.together_png([one, other])
    assert opened(png).text["Description"] == "as written peaks at 5.79 GiB; --accumulate 4 peaks at 3.25 GiB"
    assert opened(png).height > opened(timeline_image.png(one)).height
    # on a scale of its own a step alone would fill its frame with activations, however few they are
    assert samples.share_of(
        swatch(Category.ACTIVATIONS).colour, timeline_image.together_png([one, one])
    ) > 1.3 * samples.share_of(swatch(Category.ACTIVATIONS).colour, png)


def test_a_short_step_beside_a_long_one_names_only_phases_that_have_room() -> None:
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.OTHER)
    short = [TimelinePoint(0.1 * at, phase, {}) for at, phase in enumerate(phases)]
    for axis_seconds, wanted in ((0.3, ["forward", "backward", "step"]), (3.0, ["F", "B", "S"]), (30.0, [])):
        axes = paper(2.0).add_subplot()
        timeline_image._draw_phases(axes, short, 1.0, axis_seconds)
        assert [text.get_text() for text in axes.texts] == wanted


def test_steps_without_a_timeline_cannot_be_drawn_together() -> None:
    bare = Measurement("--bf16", "cpu", 0, None, 0, {}, (), (), 0, 0)
    with pytest.raises(MemlabError, match="needs steps with a timeline, and has none of --bf16"):
        timeline_image.together_png([bare])
    with pytest.raises(MemlabError, match="has none of any"):
        timeline_image.together_png([])


def test_a_measurement_without_timeline_or_times_still_draws() -> None:
    bare = Measurement("as written", "cpu", 0, None, 0, {}, (), (), 0, 0)
    assert opened(timeline_image.png(bare)).size == (1584, 619)
    assert opened(image.png(Comparison("a title without letters $of$ mathematics_", (bare,)))).width == 1584


def test_pictures_are_the_same_whatever_the_user_set_up() -> None:
    comparison = samples.comparison()
    before = image.png(comparison)
    with matplotlib.rc_context({"axes.facecolor": "black", "savefig.transparent": True, "font.size": 30.0,
                                "figure.constrained_layout.use": True, "savefig.bbox": "tight"}):  # fmt: skip
        settings = dict(matplotlib.rcParams)
        assert image.png(comparison) == before
        assert dict(matplotlib.rcParams) == settings


def test_the_description_is_in_the_file() -> None:
    text = opened(image.png(samples.comparison())).text
    assert text["Title"] == samples.TITLE
    assert text["Description"].startswith("4 settings measured: as written peaks at 10.89 GiB")


@pytest.mark.full
def test_pyplot_is_never_imported() -> None:
    code = (
        "import sys; from memlab.records import *; from memlab.records.comparison import *; from memlab.report import image, timeline_image, html, text\n"
        "assert 'matplotlib' not in sys.modules and 'plotly' not in sys.modules\n"
        "m = Measurement('as written', 'cpu', 8, None, 0, {}, (), (1.0,), 1, 0)\n"
        "image.png(Comparison('t', (m,))); timeline_image.png(m)\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.full
def test_pictures_leave_no_memory_behind() -> None:
    import gc

    image.png(samples.comparison())
    gc.collect()
    tracemalloc.start()
    for _ in range(3):
        image.png(samples.comparison())
    gc.collect()
    left_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert left_bytes < 2_000_000


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError) as caught:
        image.png(samples.comparison())
    assert str(caught.value) == (
        "the picture of a receipt needs matplotlib, which is not installed: "
        "pip install 'memlab[lab]' (or pip install matplotlib)"
    )
