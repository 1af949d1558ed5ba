"""The small live picture: what it says, how big it is, that it is well formed whatever comes."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.live.feed import Track
from memlab.plan import Plan
from memlab.records import Category, Rescue
from memlab.records.live_state import Activity, Change, LivePoint, Moment
from memlab.report.live_svg import compact, compact_text
from memlab.report.segments import REST, swatch
from memlab.units import GIB

LEFT, RIGHT, TOP, BOTTOM = 62, 566, 16, 80
RESCUE = Rescue(7, "the backward pass", "as written", "--accumulate 2", "CUDA out of memory", 1, 0.25)


def point(step: int = 1, plan: str = "as written", peak_gib: float | None = 4, **more: object) -> LivePoint:
    peak_bytes = None if peak_gib is None else int(peak_gib * GIB)
    parts = {"parameters": GIB, "activations": int((peak_gib or 1) * GIB) - GIB}
    return replace(LivePoint(step, plan, 0.5, 16.0, peak_bytes, parts), **more)  # type: ignore[arg-type]


def moment(*points: LivePoint, **more: object) -> Moment:
    step = points[-1].step if points else 0
    base = Moment("memfit · gpt2", Activity.TRAINING, step, Plan(), None, (), points)
    return replace(base, **more)  # type: ignore[arg-type]


def steps(*peaks_gib: float | None) -> tuple[LivePoint, ...]:
    return tuple(point(number, peak_gib=peak) for number, peak in enumerate(peaks_gib, 1))


def svg(drawn: Moment) -> ET.Element:
    found = ET.fromstring(compact(drawn)).find("svg")
    assert found is not None
    return found


def texts(drawn: Moment) -> list[str]:
    return [each.text or "" for each in svg(drawn).iter("text")]


def layer(drawn: Moment, category: str) -> list[int]:
    """Heights of the top of a category's layer, in pixels above zero, from left to right."""
    (path,) = [each for each in svg(drawn).iter("path") if each.get("fill") == swatch(category).colour]
    return heights(path)


def line(drawn: Moment, number: int = 0) -> list[int]:
    """Heights of the peak line (0) or of throughput (1)."""
    lines = [each for each in svg(drawn).iter("path") if each.get("fill") == "none"]
    return heights(lines[number])


def heights(path: ET.Element) -> list[int]:
    return [BOTTOM - int(y) for y in re.findall(r"[V ](\d+)(?=h)", path.get("d", ""))]


# -- words


def test_the_sentence() -> None:
    drawn = moment(
        point(7, peak_gib=5), point(8, "--fp16", peak_gib=2), point(9, "--fp16", peak_gib=1),
        plan=Plan.parse("--fp16"), pending=Plan.parse("--bf16"), budget_bytes=3 * GIB, capacity_bytes=16 * GIB,
        rescues=(RESCUE,),
    )  # fmt: skip
    assert compact_text(drawn) == (
        "memfit · --fp16 → --bf16 (pending) · step 9 · 500.0 ms a step · 16.0 samples/s · "
        "peak allocated 2.00 GiB of 3.00 GiB budget · 1 rescue"
    )
    assert "of 16.00 GiB capacity · 2 rescues" in compact_text(replace(drawn, budget_bytes=None, rescues=(RESCUE,) * 2))
    assert compact_text(moment(point(peak_gib=None, samples_per_second=math.nan))) == (
        "memfit · as written · step 1 · 500.0 ms a step"
    )


def test_before_the_first_step_there_is_only_the_sentence() -> None:
    assert compact_text(moment()) == "memfit · as written"
    html = compact(moment())
    assert "memfit · as written" in html
    assert "<svg" not in html


def test_screen_readers_are_told_politely() -> None:
    drawn = moment(*steps(4, 5), changes=(Change(1, "as written"), Change(2, "--fp16")))
    html = ET.fromstring(compact(drawn))
    (status,) = [each for each in html.iter("div") if each.get("role") == "status"]
    assert (status.get("aria-live"), status.text) == ("polite", compact_text(drawn))
    picture = svg(drawn)
    assert picture.get("role") == "img"
    assert [each.tag for each in picture][:2] == ["title", "desc"]
    assert picture[0].text == "memory and throughput by step"
    assert picture[1].text == "steps 1 to 2; highest peak 5.00 GiB; from step 1: as written; from step 2: --fp16"


def test_text_cannot_inject_markup() -> None:
    bad = "<script>alert('x')</script>"
    drawn = moment(point(1, bad, live_bytes={bad: GIB}), point(2, bad), changes=(Change(1, bad), Change(2, bad)))
    assert "<script" not in compact(drawn)


def test_no_script_no_class_styles_and_no_ids_that_could_collide() -> None:
    html = compact(moment(*steps(4, 5, 6)))
    assert not re.search(r"<(script|style|link)|\bid=|\bon\w+=|https?:", html)


# -- memory


def test_layers_stack_up_to_the_peak() -> None:
    drawn = moment(*steps(4, 2, 4))
    scale = 64 / (4 * 1.06)
    assert layer(drawn, Category.PARAMETERS) == [round(scale)]
    assert layer(drawn, Category.ACTIVATIONS) == [round(4 * scale), round(2 * scale), round(4 * scale)]
    assert line(drawn) == layer(drawn, Category.ACTIVATIONS)


def test_what_no_category_explains_is_a_layer_of_its_own() -> None:
    drawn = moment(point(live_bytes={"parameters": GIB}))
    assert layer(drawn, REST) == line(drawn) == [round(64 / 1.06)]
    assert "not broken down" in compact(drawn)
    reserved = moment(point(live_bytes={"activations": 4 * GIB, Category.UNUSED: GIB}))
    assert layer(reserved, Category.UNUSED) == [round(64 / 1.06)]
    assert line(reserved) == [round(64 * 4 / 5 / 1.06)]
    assert "not broken down" not in compact(reserved)


def test_a_peak_that_was_not_observed_is_the_one_before_under_the_same_plan() -> None:
    first, *others = steps(4, None, 2, None)
    other_plan = [replace(each, plan="--fp16") for each in others]
    assert line(moment(first, *others)) == [round(64 / 1.06), round(32 / 1.06)]
    (path,) = [each for each in svg(moment(first, *other_plan)).iter("path") if each.get("fill") == "none"][:1]
    assert path.get("d", "").count("M") == 2  # a gap where nothing is known of the new plan


def test_no_peak_is_lost_among_thousands_of_steps() -> None:
    track = Track()
    for step in range(1, 20_001):
        track.add(point(step, peak_gib=9 if step == 12_345 else 1))
    assert max(line(moment(*track.points))) == round(64 / 1.06)
    assert min(line(moment(*track.points))) == round(64 / 9 / 1.06)


def test_a_new_plan_goes_on_at_its_own_height() -> None:
    """Not at that of the old one, whose last step has its first pixels in common with it."""
    drawn = moment(point(1, peak_gib=8), point(9_999, peak_gib=8), point(10_000, "--fp16", peak_gib=2),
                   point(20_000, "--fp16", peak_gib=2))  # fmt: skip
    path = next(each for each in svg(drawn).iter("path") if each.get("fill") == "none").get("d", "")
    (wide_of_old,) = re.findall(r"^M62 \d+h(\d+)", path)
    assert int(wide_of_old) <= (RIGHT - LEFT) / 2 + 3


# -- limits and scales


def limit_lines(drawn: Moment) -> list[float]:
    dashed = [each for each in svg(drawn).iter("path") if each.get("stroke-dasharray") == "5 3"]
    return [BOTTOM - float(re.findall(r"M62 (\d+)H566", each.get("d", ""))[0]) for each in dashed]


def test_the_budget_is_a_line_with_its_name() -> None:
    drawn = moment(*steps(4), budget_bytes=8 * GIB, capacity_bytes=16 * GIB)
    assert limit_lines(drawn) == [round(64 / 1.06)]
    assert {"budget", "8.00 GiB"} <= set(texts(drawn))
    assert {"capacity", "8.00 GiB"} <= set(texts(replace(drawn, budget_bytes=None, capacity_bytes=8 * GIB)))
    assert limit_lines(replace(drawn, budget_bytes=None, capacity_bytes=None)) == []


def test_a_limit_far_above_squeezes_nothing() -> None:
    drawn = moment(*steps(4), capacity_bytes=139 * GIB)
    assert limit_lines(drawn) == []
    assert {"↑ capacity", "139.00 GiB"} <= set(texts(drawn))
    assert line(drawn) == [round(64 / 1.06)]


def test_a_budget_that_is_broken_is_below_the_peak() -> None:
    drawn = moment(*steps(8), budget_bytes=2 * GIB)
    assert limit_lines(drawn) == [round(64 / 4 / 1.06)]
    assert line(drawn) == [round(64 / 1.06)]


def test_scales_have_units() -> None:
    words = texts(moment(*steps(4, 5)))
    assert {"0", "2 GiB", "4 GiB", "step 1", "step 2", "samples/s", "10"} <= set(words)
    small = texts(moment(point(peak_gib=0.1, live_bytes={}, samples_per_second=0.004)))
    assert {"50 MiB", "100 MiB", "0.004"} <= set(small)


def test_throughput_is_a_second_line() -> None:
    fast, slow = point(1), point(2, samples_per_second=8.0)
    drawn = moment(fast, slow)
    high, low = (each - (BOTTOM - 114) for each in line(drawn, 1))
    assert (high, low) == (round(24 / 1.06), round(12 / 1.06))
    assert "samples/s" not in texts(moment(point(samples_per_second=math.nan)))


# -- marks


def test_marks_and_names_at_plan_changes() -> None:
    changes = (Change(1, "as written"), Change(51, "--fp16"), Change(500, "--bf16"))
    points = [point(n, "as written" if n < 51 else "--fp16") for n in range(1, 101)]
    drawn = moment(*points, changes=changes)
    marks = [each for each in svg(drawn).iter("path") if each.get("stroke-dasharray") == "2 2"]
    assert [each.get("d", "").split()[0] for each in marks] == [f"M{LEFT + (RIGHT - LEFT) / 2:.1f}"]
    assert {"as written", "--fp16"} <= set(texts(drawn))
    assert "--bf16" not in texts(drawn)  # still to come


def test_names_are_shortened_and_the_newest_stands_to_the_left_of_its_mark() -> None:
    long = "--accumulate 4 --checkpoint --bf16 --adam8bit --offload optimizer"
    changes = (Change(1, long), Change(31, long), Change(98, "--fp16 --accumulate 2"))
    drawn = moment(*(point(n) for n in range(1, 101)), changes=changes)
    names = [each for each in svg(drawn).iter("text") if each.get("y") == "10"]
    shown = {each.text: int(each.get("x", "0")) for each in names}
    assert "--fp16 --accumulate 2" in shown
    assert shown["--fp16 --accumulate 2"] < LEFT + (RIGHT - LEFT) * 0.97
    assert all(name == "--fp16 --accumulate 2" or (name and name.endswith("…")) for name in shown)


def test_a_thousand_changes_stay_small() -> None:
    changes = tuple(Change(n, f"--accumulate {n}") for n in range(1, 1001))
    drawn = moment(*(point(n, f"--accumulate {n}") for n in range(701, 1001)), changes=changes)
    assert compact(drawn).count('stroke-dasharray="2 2"') <= 20


# -- any run

sizes = st.integers(0, 2**50)
live_points = st.builds(
    LivePoint,
    step=st.integers(1, 10**9),
    plan=st.sampled_from(["as written", "--fp16", "<&>"]),
    seconds=st.floats(0, 1e6),
    samples_per_second=st.floats(0, 1e12) | st.just(math.nan) | st.just(math.inf),
    peak_bytes=st.none() | sizes,
    live_bytes=st.dictionaries(st.sampled_from([*Category, "something else"]), sizes),
)


@settings(deadline=None)
@given(
    st.lists(live_points, max_size=300, unique_by=lambda p: p.step), st.none() | sizes.filter(bool), st.none() | sizes.filter(bool)
)  # fmt: skip
def test_any_run_is_well_formed_and_small(points: list[LivePoint], budget: int | None, capacity: int | None) -> None:
    ordered = sorted(points, key=lambda p: p.step)
    changes = tuple(Change(p.step, p.plan) for p in ordered)
    html = compact(moment(*ordered, changes=changes, budget_bytes=budget, capacity_bytes=capacity))
    assert len(html.encode()) <= 20 * 1024
    for path in ET.fromstring(html).iter("path"):
        assert all(0 <= float(number) <= 640 for number in re.findall(r"-?[\d.]+", path.get("d", "")))


def test_the_worst_case_is_small() -> None:
    """Three hundred steps in which everything changes."""
    points = [
        LivePoint(n, "as written", 0.1, 10 + n % 7, 8 * GIB + n % 5 * GIB, {name: (n * k % 11) * GIB // 8 for k, name in enumerate(Category, 1)})
        for n in range(1, 301)
    ]  # fmt: skip
    html = compact(moment(*points, budget_bytes=10 * GIB))
    assert 5_000 < len(html.encode()) <= 20 * 1024


@pytest.mark.parametrize(
    "bare",
    [
        LivePoint(1, "as written", 0.0, math.nan, None, {}),
        LivePoint(1, "as written", 0.0, 0.0, 0, {}),
        LivePoint(1, "as written", 1.0, 5e-324, 1, {}),
    ],
)
def test_a_step_of_which_nothing_is_known(bare: LivePoint) -> None:
    ET.fromstring(compact(moment(bare)))
