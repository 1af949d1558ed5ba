"""A recorded run, looked at and steered as a live one."""

from __future__ import annotations

import gc
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.errors import SessionError
from memlab.live.replaying import RunReplay
from memlab.live.source import Can, Source
from memlab.plan import FIELDS, Plan
from memlab.records import Measurement, Prediction, Rescue, StepRecord
from memlab.records.comparison import Comparison
from memlab.records.live_state import Activity, Asked, Change, LivePoint, Moment
from memlab.records.run_record import RunRecord

GIB = 2**30
# labels, and first steps under them; the last one is of a memlab that knows more
COURSE = [
    ("as written", 1),
    ("--accumulate 4", 11),
    ("as written", 21),
    ("--accumulate 4 --fp16", 31),
    ("--quantize 4", 41),
]
LAST_STEP = 50


def measured(plan: str, peak_gib: float = 4, speed: float = 8.0, **more: object) -> Measurement:
    base = Measurement(plan, "NVIDIA H200", int(peak_gib * GIB), None, 0, {"activations": int(peak_gib * GIB)}, (),
                       (8 / speed,), 8, 0)  # fmt: skip
    return replace(base, **more)  # type: ignore[arg-type]


def predicted(plan: str, peak_gib: float = 3, seconds: float = 0.8, **more: object) -> Prediction:
    peak_bytes = int(peak_gib * GIB)
    base = Prediction(plan, "NVIDIA H200", peak_bytes, None, 0, {}, (), seconds, 8, 0, (peak_bytes, peak_bytes),
                      (seconds, seconds))  # fmt: skip
    return replace(base, **more)  # type: ignore[arg-type]


def plan_at(step: int) -> str:
    return next(plan for plan, start in reversed(COURSE) if start <= step)


def recorded(**more: Any) -> RunRecord:
    comparison = Comparison(
        "memfit · gpt2 · AdamW · NVIDIA H200",
        (
            measured("as written", 8, 16),
            measured("--accumulate 4", 4, 12),
            measured("--accumulate 4 --fp16", 3, 20),
            measured("--checkpoint", 2, 9),
            measured("--bf16", 20, fits=False, step_seconds=()),
        ),
        predictions=(predicted("--adam8bit"), predicted("--accumulate 8", seconds=math.nan)),
    )
    points = tuple(
        LivePoint(step, plan_at(step), 0.5, 16.0, 100 + step, {"activations": 100}) for step in range(1, LAST_STEP + 1)
    )
    whole: dict[str, Any] = {
        "comparison": comparison,
        "points": points,
        "changes": tuple(Change(step, plan) for plan, step in COURSE),
        "versions": {"torch": "2.13.0", "python": "3.12.1"},
        "predictions": (predicted("--accumulate 4"), predicted("--offload optimizer", refused="offload: no state yet")),
        "device": "NVIDIA H200",
        "capacity_bytes": 139 * GIB,
        "budget_bytes": 6 * GIB,
        "rescues": (Rescue(31, "the forward pass", "as written", "--accumulate 4 --fp16", "out of memory", 1, 0.1),),
        "events": ("begun", "step 11: as written → --accumulate 4", "step 31: --accumulate 4 → --fp16"),
        "recorded_at": "2026-11-21 15:11 UTC",
    }
    return RunRecord(**{**whole, **more})


def toggle(replay: RunReplay, field: str) -> tuple[str, str]:
    found = next(each for each in replay.moment().toggles if each.field == field)
    return found.value, found.text


def test_it_opens_at_the_end_with_everything() -> None:
    source: Source = RunReplay(recorded())
    moment = source.moment()
    record = recorded()
    assert (moment.title, moment.activity, moment.step) == (record.comparison.title, Activity.OVER, LAST_STEP)
    assert moment.points == record.points
    assert (moment.changes, moment.rescues, moment.events) == (record.changes, record.rescues, record.events)
    assert moment.measurements == record.comparison.measurements
    assert {each.plan for each in moment.predictions} == {
        "--adam8bit", "--accumulate 8", "--accumulate 4", "--offload optimizer"
    }  # fmt: skip
    assert (moment.budget_bytes, moment.capacity_bytes) == (6 * GIB, 139 * GIB)
    assert source.can() == Can.SWITCH | Can.RUN | Can.FIND
    assert moment.world == (
        "a recording from NVIDIA H200, made 2026-11-21 15:11 UTC with torch 2.13.0, python 3.12.1: nothing is trained here"
    )


def test_it_plays_faster_than_the_run_from_the_first_step() -> None:
    replay = RunReplay(recorded())
    assert replay.playing_seconds == pytest.approx(12.5)  # 25 s in half the time
    replay.run(keep=False)
    first = replay.moment()
    assert (first.activity, first.step, len(first.points)) == (Activity.REPLAYING, 1, 1)
    assert [each.plan for each in first.measurements] == ["as written"]
    assert (first.changes, first.events, first.rescues) == (recorded().changes[:1], ("begun",), ())
    assert replay.advance(3.0)
    middle = replay.moment()
    assert (middle.step, middle.plan) == (12, Plan.parse("--accumulate 4"))
    assert [each.plan for each in middle.measurements] == ["as written", "--accumulate 4"]
    assert middle.events[-1] == "step 11: as written → --accumulate 4"
    assert middle.status == "replaying, step 12 of 50 · --accumulate 4"
    assert replay.can() == Can.SWITCH | Can.PAUSE | Can.CANCEL
    assert not replay.advance(100)
    assert replay.moment().measurements == recorded().comparison.measurements
    assert replay.moment().activity is Activity.OVER
    assert not replay.advance(1)


@pytest.mark.parametrize(
    ("step_seconds", "playing"), [(0.001, 4.0), (0.4, 10.0), (60.0, 20.0), (0.0, 20.0), (math.nan, 20.0)]
)
def test_a_recording_plays_in_four_to_twenty_seconds(step_seconds: float, playing: float) -> None:
    points = tuple(replace(each, seconds=step_seconds) for each in recorded().points)
    assert RunReplay(recorded(points=points)).playing_seconds == pytest.approx(playing)


def test_gaps_between_thinned_points_take_their_time() -> None:
    points = tuple(replace(recorded().points[0], step=step) for step in (1, 2, 99, 100))
    replay = RunReplay(recorded(points=points))
    replay.run(keep=False)
    replay.advance(replay.playing_seconds * 0.97)
    assert replay.moment().step == 2


def test_ticks_follow_the_clock() -> None:
    now = 0.0
    replay = RunReplay(recorded(), clock=lambda: now)
    assert not replay.tick()
    now = 50.0
    replay.run(keep=False)
    assert replay.tick()
    assert replay.moment().step == 1
    now = 53.0
    assert replay.tick()
    assert replay.moment().step == 12
    replay.pause()
    now = 90.0
    assert not replay.tick()
    replay.resume()
    assert replay.tick()
    assert replay.moment().step == 12
    now = 120.0
    assert not replay.tick()
    assert replay.moment().activity is Activity.OVER


def test_pause_resume_and_to_the_end() -> None:
    replay = RunReplay(recorded())
    replay.pause()
    replay.resume()
    assert replay.moment().activity is Activity.OVER
    replay.run(keep=True)
    replay.advance(3)
    replay.pause()
    assert replay.can() == Can.SWITCH | Can.RUN | Can.RESUME | Can.CANCEL
    assert replay.moment().status == "replay paused, step 12 of 50 · --accumulate 4"
    assert not replay.advance(3)
    replay.resume()
    assert replay.advance(0.25)
    assert replay.moment().step == 13
    replay.cancel()
    assert (replay.moment().activity, replay.moment().step) == (Activity.OVER, LAST_STEP)


# -- settings


def test_settings_show_the_plan_then_in_force() -> None:
    replay = RunReplay(recorded())
    replay.run(keep=False)
    assert toggle(replay, "accumulation") == ("1", "")
    replay.advance(9)
    assert toggle(replay, "accumulation") == ("4", "applied at step 31")
    assert toggle(replay, "precision") == ("fp16", "applied at step 31")
    assert toggle(replay, "loss") == ("keep", "")


@pytest.mark.parametrize("changes", [tuple(Change(step, plan) for plan, step in COURSE[1:]), ()])
def test_a_run_that_was_begun_as_written_shows_its_first_change(changes: tuple[Change, ...]) -> None:
    """As the live panel does, which notes only what was changed; one that has no changes has its steps."""
    replay = RunReplay(recorded(changes=changes))
    assert replay.moment().changes == tuple(Change(step, plan) for plan, step in COURSE[1:])
    replay.run(keep=False)
    assert (replay.moment().changes, toggle(replay, "accumulation")) == ((), ("1", ""))
    replay.advance(3)
    assert toggle(replay, "accumulation") == ("4", "applied at step 11")


def test_a_recorded_setting_is_gone_to() -> None:
    replay = RunReplay(recorded())
    replay.ask_plan(Plan.parse("--accumulate 4"))
    moment = replay.moment()
    assert (moment.step, moment.plan, moment.activity) == (20, Plan.parse("--accumulate 4"), Activity.PAUSED)
    assert [each.plan for each in moment.measurements] == ["as written", "--accumulate 4"]
    replay.ask("accumulation", "1")  # the next time it was in force
    assert replay.moment().step == 30
    replay.ask_plan(Plan.parse("--accumulate 4 --fp16"))
    assert replay.moment().step == 40
    replay.ask_plan(Plan())  # and then from the beginning
    assert replay.moment().step == 10
    replay.resume()
    replay.advance(0.5)
    assert replay.moment().step == 12


def test_while_it_plays_it_goes_on_from_there() -> None:
    replay = RunReplay(recorded())
    replay.run(keep=False)
    replay.ask_plan(Plan.parse("--accumulate 4 --fp16"))
    assert (replay.moment().step, replay.moment().activity) == (31, Activity.REPLAYING)
    replay.advance(0.5)
    assert replay.moment().step == 32


def test_a_setting_measured_apart_is_shown_with_the_whole_recording() -> None:
    replay = RunReplay(recorded())
    replay.run(keep=False)
    replay.ask("checkpointing", "full")
    moment = replay.moment()
    assert (moment.plan, moment.step, moment.activity) == (Plan.parse("--checkpoint"), LAST_STEP, Activity.OVER)
    assert toggle(replay, "checkpointing") == ("full", "")
    replay.ask("checkpointing", "off")
    assert (replay.moment().plan, replay.moment().step) == (Plan(), 10)


@pytest.mark.parametrize(
    ("field", "text", "reason"),
    [
        ("optimizer", "adam8bit", "not in this recording; predicted 3.00 GiB and 10.0 samples/s"),
        ("accumulation", "8", "not in this recording; predicted 3.00 GiB"),
        ("offload", "optimizer", "not in this recording; predicted not to apply: offload: no state yet"),
        ("loss", "chunked", "not in this recording, and not predicted in it"),
        ("precision", "fp99", "--precision fp99: allowed are keep, fp32, tf32, fp16, bf16, pure-bf16"),
    ],
)  # fmt: skip
def test_what_is_not_recorded_is_refused_with_what_was_predicted(field: str, text: str, reason: str) -> None:
    replay = RunReplay(recorded())
    replay.ask_plan(Plan())
    replay.ask(field, text)
    found = next(each for each in replay.moment().toggles if each.field == field)
    assert (found.asked, found.wanted, found.reason) == (Asked.REFUSED, text, reason)
    assert found.value == FIELDS[[spec.name for spec in FIELDS].index(field)].text(getattr(Plan(), field))
    assert reason in replay.moment().status
    assert replay.moment().step == 10
    replay.ask(field, found.value)
    assert toggle(replay, field) == (found.value, "")


def test_a_refused_plan_marks_every_setting_that_differs() -> None:
    replay = RunReplay(recorded())
    replay.ask_plan(Plan())
    replay.ask_plan(Plan.parse("--accumulate 2 --chunk-loss"))
    refused = [each.field for each in replay.moment().toggles if each.asked is Asked.REFUSED]
    assert refused == ["accumulation", "loss"]
    replay.run(keep=False)
    assert all(each.asked is Asked.IDLE for each in replay.moment().toggles)


def test_an_unknown_field_is_told() -> None:
    replay = RunReplay(recorded())
    replay.ask("colour", "red")
    assert replay.moment().errors[0].startswith("no field 'colour' in a plan; there are accumulation")


def test_a_plan_of_a_newer_memlab_is_kept_as_text() -> None:
    replay = RunReplay(recorded())
    moment = replay.moment()
    assert moment.points[-1].plan == moment.changes[-1].plan == "--quantize 4"
    assert moment.plan == Plan()
    assert (
        moment.status == "a recorded run, shown whole · --quantize 4 · unknown to this version of memlab: --quantize 4"
    )
    replay.ask_plan(Plan())  # is not the same
    assert replay.moment().step == 10


@pytest.mark.parametrize("label", ["--precision int4", "what 'ever", "--accumulate", ""])
def test_labels_that_are_no_plan_are_shown_as_they_are(label: str) -> None:
    points = (replace(recorded().points[0], plan=label),)
    moment = RunReplay(recorded(points=points, changes=())).moment()
    assert (moment.plan, moment.points[0].plan) == (Plan(), label)


def test_the_fastest_that_fits_is_found_among_what_is_recorded() -> None:
    replay = RunReplay(recorded())
    replay.set_budget(4 * GIB)
    replay.find()
    assert replay.moment().plan == Plan.parse("--accumulate 4 --fp16")
    replay.set_budget(2 * GIB)
    replay.find()
    assert replay.moment().plan == Plan.parse("--checkpoint")
    replay.set_budget(GIB)
    replay.find()
    replay.set_budget(None)
    replay.find()
    assert replay.moment().errors == ("no setting of this recording fits 1.00 GiB", "find a plan: set a budget first")


def test_what_needs_a_model_is_told_to_be_impossible() -> None:
    replay = RunReplay(recorded())
    replay.undo()
    assert replay.moment().errors == ("a recording cannot undo: there is no model here",)
    with pytest.raises(SessionError, match=r"a recording cannot train: make a panel with memlab.panel\(workload\)"):
        replay.training()


# -- other recordings


def test_a_file_of_the_first_format_plays_its_steps() -> None:
    steps = tuple(StepRecord(n, plan_at(n), 0.5, 8 if n > 1 else 0, 0, 100 + n) for n in range(1, LAST_STEP + 1))
    old = json.loads(RunRecord(recorded().comparison, steps, {"torch": "2.13.0"}).to_json())
    first_format = {name: old[name] for name in ("comparison", "steps", "versions", "predictions")}
    replay = RunReplay(RunRecord.from_json(json.dumps(first_format)))
    moment = replay.moment()
    assert [point.step for point in moment.points] == list(range(1, LAST_STEP + 1))
    assert moment.points[10].live_bytes == {"activations": 4 * GIB}
    assert moment.points[10].samples_per_second == 16
    assert math.isnan(moment.points[0].samples_per_second)
    assert moment.changes == recorded().changes[1:]  # as written it began
    assert moment.world == "a recording from NVIDIA H200 with torch 2.13.0: nothing is trained here"
    replay.run(keep=False)
    assert replay.advance(3)


def test_a_comparison_without_steps_has_nothing_to_play() -> None:
    replay = RunReplay(RunRecord(recorded().comparison))
    assert replay.can() == Can.SWITCH
    moment = replay.moment()
    assert (moment.points, moment.step, moment.plan, len(moment.measurements)) == ((), 0, Plan(), 5)
    replay.run(keep=False)
    assert replay.moment().errors[0].startswith("this recording has no steps to play")
    replay.ask("accumulation", "4")
    assert replay.moment().plan == Plan.parse("--accumulate 4")


def test_many_points_are_thinned_and_sorted() -> None:
    points = [LivePoint(n, "as written", 0.1, 80.0, n, {}) for n in range(5000, 0, -1)]
    shown = RunReplay(recorded(points=tuple(points))).moment().points
    assert len(shown) <= 300
    assert (shown[0].step, shown[-1].step) == (1, 5000)


# -- views


class View:
    def __init__(self) -> None:
        self.drawn: list[Moment] = []

    def draw(self, moment: Moment) -> None:
        self.drawn.append(moment)


def test_views_are_drawn_when_something_has_changed() -> None:
    replay, view = RunReplay(recorded()), View()
    end = replay.watch(view.draw)
    replay.run(keep=False)
    replay.advance(0.01)
    assert len(view.drawn) == 1  # no step came
    replay.advance(3)
    assert view.drawn[-1].step == 12
    frames = [moment.frame for moment in view.drawn]
    assert frames == sorted(set(frames))
    end()
    end()
    replay.cancel()
    assert len(view.drawn) == 2


def test_a_view_that_is_dropped_is_drawn_no_more() -> None:
    replay, view = RunReplay(recorded()), View()
    replay.watch(view.draw)
    drawn = view.drawn
    del view
    gc.collect()
    replay.run(keep=False)
    assert drawn == []


def test_a_view_that_fails_is_told_and_stops_nothing() -> None:
    def failing(moment: Moment) -> None:
        raise RuntimeError("no paper\nno ink")

    replay, view = RunReplay(recorded()), View()
    replay.watch(failing)
    replay.watch(view.draw)
    replay.run(keep=False)
    replay.advance(3)
    assert view.drawn[-1].errors == ("RuntimeError: no paper",)


# -- anything in any order

texts = st.sampled_from([text for spec in FIELDS for text in spec.choices]) | st.text(max_size=8)
asks = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([*(spec.name for spec in FIELDS), "nonsense"]), texts),
    st.tuples(st.just("advance"), st.floats(-1, 20)),
    st.tuples(st.just("set_budget"), st.none() | st.integers(0, 2**60)),
    st.tuples(st.sampled_from(["run", "pause", "resume", "cancel", "find", "undo", "tick"])),
)


@settings(deadline=None)
@given(st.lists(asks, max_size=30))
def test_whatever_is_asked_the_moment_is_one_of_the_recording(pending_changes: list[tuple[Any, ...]]) -> None:
    now = iter(range(10_000))
    record = recorded()
    replay = RunReplay(record, clock=lambda: next(now) / 3)
    for name, *arguments in pending_changes:
        before = replay.moment().plan
        if name == "run":
            replay.run(keep=False)
        else:
            getattr(replay, name)(*arguments)
        moment = replay.moment()
        assert moment.points == record.points[: len(moment.points)]
        assert moment.step == moment.points[-1].step
        assert moment.activity in (Activity.REPLAYING, Activity.PAUSED, Activity.OVER)
        assert (moment.activity is Activity.REPLAYING) == bool(replay.can() & Can.PAUSE)
        assert moment.activity is not Activity.OVER or moment.points == record.points
        assert all(each in record.comparison.measurements for each in moment.measurements)
        assert [each.field for each in moment.toggles] == [spec.name for spec in FIELDS]
        assert all(each.reason for each in moment.toggles if each.asked is Asked.REFUSED)
        assert len(moment.errors) <= 5
        if name == "ask":
            _is_answered(record, moment, before, *arguments)


def _is_answered(record: RunRecord, moment: Moment, before: Plan, field: str, text: str) -> None:
    """What was asked for is in force, or refused, or was no field at all."""
    found = next((each for each in moment.toggles if each.field == field), None)
    if found is None:
        assert any("nonsense" in error for error in moment.errors)
    elif found.asked is Asked.REFUSED:
        assert moment.plan == before
        assert found.wanted == text or found.wanted == FIELDS[moment.toggles.index(found)].text(
            getattr(before.with_setting(field, text), field)
        )
    else:
        assert moment.plan == before.with_setting(field, text)
        labels = {each.plan for each in record.comparison.measurements} | {each.plan for each in record.points}
        assert moment.plan.label in labels
