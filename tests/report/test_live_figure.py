"""The live figure: what a moment looks like in its four pictures, in words before there is anything to draw."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st

from memlab.plan import Plan
from memlab.records import Category, out_of_memory
from memlab.records.live_state import Activity, Change, LivePoint, Moment
from memlab.report import live_memory, live_settings
from memlab.report.live_figure import BUDGET, NEUTRAL_INK, drawing
from memlab.report.segments import CATEGORIES, REST, swatch
from memlab.units import GIB, MIB

AS_WRITTEN = samples.measurement("as written", 9.1, 1.31)
ACCUMULATED = samples.measurement("--accumulate 4", 2.8, 1.27, 4)
BOTH = samples.measurement("--accumulate 4 --checkpoint", 1.1, 0.98, 4)
EMPTY = Moment("gpt2", Activity.IDLE, 0, Plan(), None, ())
RUN = replace(
    EMPTY,
    activity=Activity.TRAINING,
    step=30,
    plan=Plan.parse(BOTH.plan),
    points=tuple(
        LivePoint(step, m.plan, 1.0, 8.0, m.peak_allocated_bytes, m.breakdown)
        for step in range(1, 31)
        for m in ((AS_WRITTEN, ACCUMULATED, BOTH)[(step - 1) // 10],)
    ),
    changes=(Change(11, ACCUMULATED.plan), Change(21, BOTH.plan)),
    measurements=(AS_WRITTEN, ACCUMULATED, BOTH),
    predictions=tuple(samples.plan_space()[:60]),
    budget_bytes=8 * GIB,
)


Drawn = dict[str, Any]  # as plotly takes it


def layers(drawn: Drawn, axis: str) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in drawn["traces"] if "stackgroup" in trace and trace["xaxis"] == axis}


def trace(drawn: Drawn, name: str) -> dict[str, Any]:
    return next(each for each in drawn["traces"] if each.get("name") == name)


def bars(drawn: Drawn) -> dict[str, Any]:
    return next(each for each in drawn["traces"] if each["type"] == "bar")


def bar_names(drawn: Drawn) -> list[str]:
    return list(next(each for each in drawn["traces"] if each.get("mode") == "text")["text"])


def bar_speeds(drawn: Drawn) -> list[tuple[float, str]]:
    _names, speeds = (each for each in drawn["traces"] if each.get("mode") == "text")
    return list(zip(speeds["x"], speeds["text"], strict=True))


def words(drawn: Drawn) -> list[str]:
    return [note["text"] for note in drawn["layout"]["annotations"]]


def test_steps_are_stacked_up_to_their_peaks() -> None:
    drawn = drawing(RUN)
    stack = layers(drawn, "x")
    assert tuple(stack) == CATEGORIES
    tops = [sum(sizes) for sizes in zip(*(each["y"] for each in stack.values()), strict=True)]
    peaks = [point.peak_bytes / GIB for point in RUN.points if point.peak_bytes]
    assert tops == pytest.approx([peaks[0], *peaks, peaks[-1]], abs=1e-3)
    assert trace(drawn, "measured peak")["y"][1:-1] == pytest.approx(peaks, abs=1e-3)
    for name, each in stack.items():
        assert each["fillcolor"] == swatch(name).colour
        assert each["fillpattern"]["shape"] == swatch(name).pattern
    assert drawn["layout"]["yaxis"]["title"]["text"] == "peak memory of a step, GiB"


def test_the_first_and_the_last_step_are_as_wide_as_the_others() -> None:
    steps = layers(drawing(RUN), "x")[Category.PARAMETERS]["x"]
    assert (steps[0], steps[1], steps[-2], steps[-1]) == (0.51, 1, 30, 30.49)


def test_a_peak_that_no_category_explains_is_shown_as_such() -> None:
    point = LivePoint(1, "as written", 1.0, 8.0, 3 * GIB, {"parameters": GIB, "of another version": GIB})
    drawn = drawing(replace(EMPTY, step=1, points=(point,)))
    assert layers(drawn, "x")[REST]["y"] == [2, 2, 2]


def test_steps_that_were_not_observed_are_left_out() -> None:
    blind = LivePoint(2, "as written", 1.0, 8.0, None, {})
    seen = LivePoint(1, "as written", 1.0, 8.0, GIB, {"parameters": GIB})
    drawn = drawing(replace(EMPTY, step=2, points=(seen, blind)))
    assert layers(drawn, "x")[Category.PARAMETERS]["x"] == [0.51, 1, 1.49]


def test_every_change_has_a_line_and_a_name() -> None:
    drawn = drawing(RUN)
    lines = [shape["x0"] for shape in drawn["layout"]["shapes"] if shape["xref"] == "x" and shape["type"] == "line"]
    assert lines == [10.5, 20.5]
    names = {note["hovertext"]: note["text"] for note in drawn["layout"]["annotations"] if "hovertext" in note}
    assert names == {
        "step 11: --accumulate 4": "<b>2</b>",  # the line of the next runs where its words would stand
        "step 21: --accumulate 4 --checkpoint": "<b>3</b> + checkpoint",
    }


def test_names_of_many_changes_do_not_stand_on_each_other() -> None:
    changes = tuple(Change(step, f"--accumulate {step}") for step in range(2, 31))
    placed = live_memory.change_labels(replace(RUN, changes=changes))
    assert [label.step for label in placed] == [change.step for change in changes]
    assert placed[-1].text.endswith("accumulate 30")
    shown = [label for label in placed if label.text]
    assert len(shown) < len(placed)
    assert not any(one.covers(other) for one in shown for other in shown if one is not other)


@given(st.sets(st.integers(2, 200), max_size=12), st.data())
def test_no_line_of_a_change_runs_through_the_name_of_another(steps: set[int], data: st.DataObject) -> None:
    plans = ("as written", "--checkpoint", "--accumulate 4 --checkpoint", "--accumulate 4 --offload optimizer,params")
    changes = tuple(Change(step, data.draw(st.sampled_from(plans))) for step in sorted(steps))
    points = tuple(replace(RUN.points[0], step=step) for step in range(1, 201))
    placed = live_memory.change_labels(replace(RUN, points=points, changes=changes))
    for one, other in permutations(placed, 2):
        assert not one.covers(other)
        assert not one.crosses(other)


def test_names_of_close_changes_stand_in_rows_of_their_own() -> None:
    """The oldest one had the top row, and its line ran through the names below."""
    changes = tuple(Change(*each) for each in (
        (128, "--checkpoint"), (173, "--accumulate 4 --checkpoint"), (194, "--accumulate 4 --checkpoint --release-grads"),
        (228, "as written"),
    ))  # fmt: skip
    points = tuple(replace(RUN.points[0], step=step) for step in range(1, 228))
    placed = live_memory.change_labels(replace(RUN, points=points, changes=changes))
    assert [(label.row, re.sub("<.*?>", "", label.text)) for label in placed] == [
        (3, "· --checkpoint"), (2, "3 + accumulate 4"), (1, "· + release-grads"), (0, "1 as written"),
    ]  # fmt: skip


def test_the_step_in_force_with_the_outline_of_the_one_before() -> None:
    drawn = drawing(RUN)
    stack = layers(drawn, "x2")
    assert tuple(stack) == CATEGORIES
    tops = [sum(sizes) for sizes in zip(*(each["y"] for each in stack.values()), strict=True)]
    assert max(tops) * GIB == pytest.approx(BOTH.peak_allocated_bytes, rel=1e-3)
    before = trace(drawn, "the setting before")
    assert max(before["y"]) * GIB == pytest.approx(ACCUMULATED.peak_allocated_bytes, rel=1e-3)
    assert before["line"]["dash"] == "dash"
    assert "… --checkpoint; shaded: backward" in words(drawn)  # two settings begin with --accumulate 4
    assert drawn["layout"]["xaxis2"]["title"]["text"] == "time in the step, s"


def test_back_to_an_earlier_setting_outlines_the_one_that_was_left() -> None:
    back = replace(RUN, plan=Plan(), changes=(*RUN.changes, Change(28, "as written")))
    before = trace(drawing(back), "the setting before")
    assert max(before["y"]) * GIB == pytest.approx(BOTH.peak_allocated_bytes, rel=1e-3)


def test_what_this_run_began_with_is_before_what_it_was_changed_to() -> None:
    # a run before this one had ended with the accumulated setting
    points = tuple(replace(point, plan=AS_WRITTEN.plan) for point in RUN.points[:20]) + RUN.points[20:]
    before = trace(drawing(replace(RUN, points=points, changes=RUN.changes[1:])), "the setting before")
    assert max(before["y"]) * GIB == pytest.approx(AS_WRITTEN.peak_allocated_bytes, rel=1e-3)


def test_a_setting_without_a_timeline_leaves_the_newest_that_has_one() -> None:
    blind = replace(BOTH, timeline=())
    drawn = drawing(replace(RUN, measurements=(AS_WRITTEN, ACCUMULATED, blind)))
    assert "--accumulate 4; shaded: backward" in words(drawn)


def test_both_memory_pictures_have_one_scale() -> None:
    layout = drawing(RUN)["layout"]
    assert layout["yaxis"]["range"] == layout["yaxis2"]["range"]
    assert layout["yaxis"]["range"][1] > AS_WRITTEN.peak_allocated_bytes / GIB


def test_the_unit_follows_the_data() -> None:
    point = LivePoint(1, "as written", 1.0, 8.0, 300 * MIB, {"parameters": 300 * MIB})
    drawn = drawing(replace(EMPTY, step=1, points=(point,)))
    assert drawn["layout"]["yaxis"]["title"]["text"] == "peak memory of a step, MiB"
    assert layers(drawn, "x")[Category.PARAMETERS]["y"] == [300, 300, 300]


def test_the_budget_is_a_line_in_three_pictures() -> None:
    drawn = drawing(RUN)
    lines = [shape for shape in drawn["layout"]["shapes"] if shape.get("line", {}).get("color") == BUDGET]
    assert [(line["xref"], line["yref"]) for line in lines] == [
        ("x domain", "y"), ("x2 domain", "y2"), ("x4", "y4 domain"),
    ]  # fmt: skip
    assert lines[0]["y0"] == lines[1]["y1"] == lines[2]["x0"] == 8
    assert words(drawn).count("budget 8.00 GiB") == 3


def test_a_budget_far_above_is_written_not_drawn() -> None:
    drawn = drawing(replace(RUN, budget_bytes=80 * GIB))
    assert drawn["layout"]["yaxis"]["range"][1] < 20
    assert "dotted: the setting was changed; budget 80.00 GiB is far above" in words(drawn)


def test_bars_with_the_spread_of_the_steps() -> None:
    drawn = drawing(RUN)
    measured = bars(drawn)
    assert measured["x"] == pytest.approx([m.samples_per_second for m in RUN.measurements])
    assert measured["error_x"]["array"][0] == pytest.approx(AS_WRITTEN.samples_per_second * AS_WRITTEN.spread)
    assert drawn["layout"]["xaxis3"]["title"]["text"] == "throughput, samples/s"


def test_the_setting_in_force_is_known_without_colours() -> None:
    assert bar_names(drawing(RUN)) == [
        "1 · as written",
        "2 · --accumulate 4",
        "<b>▸ 3 · --accumulate 4 --checkpoint</b>",
    ]


def test_speeds_stand_where_the_whiskers_end_and_within_the_picture() -> None:
    drawn = drawing(RUN)
    spread = bars(drawn)["error_x"]["array"]
    ends = [rate + more for rate, more in zip(bars(drawn)["x"], spread, strict=True)]
    assert [text for _, text in bar_speeds(drawn)] == ["&nbsp; 1.31", "&nbsp; 1.27  −3 %", "&nbsp; 0.98  −25 %"]
    assert [place for place, _ in bar_speeds(drawn)] == pytest.approx(ends)
    assert max(ends) <= 0.64 * drawn["layout"]["xaxis3"]["range"][1]


def test_settings_that_were_not_timed_or_ran_out_say_so() -> None:
    failed = out_of_memory(Plan.parse("--bf16"), "cpu", 8 * GIB, "Tried to allocate 1 GiB")
    drawn = drawing(replace(RUN, measurements=(replace(AS_WRITTEN, step_seconds=()), failed)))
    assert bar_names(drawn) == ["1 · as written", "2 · --bf16"]
    assert bar_speeds(drawn) == [(0, "&nbsp; not timed yet"), (0, "&nbsp; ran out of memory")]


def test_of_many_settings_the_first_the_one_in_force_and_the_newest_have_bars() -> None:
    many = tuple(samples.measurement(f"--accumulate {n}", 2, 1) for n in range(1, 31))
    drawn = drawing(replace(RUN, measurements=many, plan=Plan.parse("--accumulate 5")))
    names = bar_names(drawn)
    assert len(names) == len(bars(drawn)["x"]) == 10
    assert names[0].startswith("1 ·")
    assert names[1].startswith("<b>▸ 5 ·")
    assert [name.split(" ")[0] for name in names[2:]] == [str(number) for number in range(23, 31)]


def test_long_plans_are_shortened_at_a_flag_and_whole_on_hover() -> None:
    drawn = drawing(replace(RUN, measurements=(samples.measurement(samples.LONG_PLAN, 2, 1),)))
    assert bar_names(drawn)[0].startswith("1 · --accumulate 4 …")
    assert bars(drawn)["customdata"][0].replace("<br>", " ").startswith(f"1 · {samples.LONG_PLAN}")


def test_settings_that_begin_alike_are_told_apart() -> None:
    plans = [
        f"--accumulate 4 --offload optimizer{more}"
        for more in ("", " --bf16", " --tile 4", " --tile 4 --release-grads")
    ]
    drawn = drawing(
        replace(RUN, measurements=tuple(samples.measurement(plan, 2, 1) for plan in ("as written", *plans)))
    )
    assert bar_names(drawn) == [
        "1 · as written",
        "2 · --accumulate 4 …",
        "3 · … --bf16",
        "4 · … --tile 4",
        "5 · … --release-grads",
    ]


def test_the_map_of_settings_predicted_and_tried() -> None:
    drawn = drawing(RUN)
    predicted = [each for each in drawn["traces"] if str(each.get("marker", {}).get("symbol")).endswith("-open")][:4]
    known = [each for each in RUN.predictions if not each.refused]
    assert sum(len(each["x"]) for each in predicted) == len(known)
    tried = trace(drawn, "tried")
    assert tried["x"] == pytest.approx([m.peak_allocated_bytes / GIB for m in RUN.measurements], abs=1e-3)
    assert tried["text"] == ["1", "2", "3"]
    assert tried["customdata"][1].startswith("2 · --accumulate 4: measured 5.05 GiB")
    assert trace(drawn, "in force")["x"] == [tried["x"][2]]
    assert drawn["layout"]["xaxis4"]["title"]["text"] == "peak memory allocated, GiB"


def test_at_most_two_hundred_predictions_are_drawn() -> None:
    drawn = drawing(replace(RUN, predictions=tuple(samples.plan_space())))
    maps = [each for each in drawn["traces"] if each["xaxis"] == "x4" and each["mode"] == "markers"]
    assert 150 < sum(len(each["x"]) for each in maps) <= 201


def test_a_chart_made_before_gives_the_same_drawing() -> None:
    earlier = live_settings.predicted(
        replace(RUN, measurements=tuple(replace(m, step_seconds=(9.0,)) for m in RUN.measurements))
    )
    assert drawing(RUN, known=earlier) == drawing(RUN)


def test_before_the_first_step_every_picture_says_what_will_be_there() -> None:
    said = " ".join(words(drawing(EMPTY))).replace("<br>", " ")
    assert "memory of every step, from the first one on" in said
    assert "memory within a step, once a step was observed" in said
    assert "samples per second of every setting, once it was timed" in said
    assert "every setting predicted or tried" in said
    assert not any("<i>" in text for text in words(drawing(RUN)))


@pytest.mark.parametrize("moment", [EMPTY, replace(RUN, points=RUN.points[:1], changes=()), replace(RUN, budget_bytes=None),
                                    replace(RUN, predictions=()), replace(RUN, measurements=())])  # fmt: skip
def test_the_same_traces_and_properties_for_every_moment(moment: Moment) -> None:
    def paths(value: dict[str, Any], under: str = "") -> list[str]:
        return [path for name, each in value.items()
                for path in (paths(each, f"{under}{name}.") if isinstance(each, dict) else [f"{under}{name}"])]  # fmt: skip

    one, other = drawing(moment), drawing(RUN)
    assert [paths(each) for each in one["traces"]] == [paths(each) for each in other["traces"]]
    assert paths(one["layout"]) == paths(other["layout"])
    assert [(each["type"], each.get("name")) for each in one["traces"]] == [
        (each["type"], each.get("name")) for each in other["traces"]
    ]


def test_every_category_is_in_the_legend_once() -> None:
    drawn = drawing(RUN)
    named = [each["name"] for each in drawn["traces"] if "stackgroup" in each and each["showlegend"]]
    assert len(named) == len(set(named)) == 5
    alone = drawing(replace(RUN, points=()))
    assert any(each["showlegend"] for each in layers(alone, "x2").values())


def test_plans_cannot_inject_markup() -> None:
    evil = samples.measurement("--<img src=x>", 2, 1)
    moment = replace(RUN, measurements=(evil,), changes=(Change(5, evil.plan),))
    drawn = drawing(moment)
    assert "<img" not in str(drawn)


def test_axes_stay_while_values_move_a_little() -> None:
    faster = tuple(replace(m, step_seconds=tuple(s * 0.999 for s in m.step_seconds)) for m in RUN.measurements)
    one, other = drawing(RUN)["layout"], drawing(replace(RUN, measurements=faster))["layout"]
    assert all(one[f"{axis}axis{n}"] == other[f"{axis}axis{n}"] for axis in "xy" for n in ("", 2, 3, 4))


def test_plotly_takes_it() -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for moment in (EMPTY, RUN):
        values = drawing(moment)
        drawn = graph_objects.Figure(list(values["traces"]), values["layout"])
        assert len(drawn.data) == len(values["traces"])
        assert drawn.layout.paper_bgcolor == drawn.layout.plot_bgcolor == "rgba(0,0,0,0)"


def test_the_neutral_ink_reads_on_light_and_dark() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    # no grey has more than 4.35 to both pure white and the dark theme's background
    assert contrast(NEUTRAL_INK, "#FFFFFF") > 4.2
    assert contrast(NEUTRAL_INK, "#111111") > 4.2
