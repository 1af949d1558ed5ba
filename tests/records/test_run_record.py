"""The file a run is saved as: read back, old ones, damaged ones, those of a newer memlab."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.errors import MemlabError
from memlab.records import Phase, Rescue, StepRecord
from memlab.records.comparison import Comparison
from memlab.records.live_state import Change, LivePoint
from memlab.records.run_record import RunRecord
from tests.records.examples import measured, point, predicted

WHAT_TO_DO = "expected a file that %memfit record or RunRecord.save wrote"


def full() -> RunRecord:
    """A record with something in every field."""
    observed = measured(
        "--fp16", timeline=(point(5), point(7, Phase.STEP, 0.5)), losses=(1.5, 1.25),
        notes=("a note",), peak_reserved_bytes=1200, driver_bytes=1300,
    )  # fmt: skip
    return RunRecord(
        comparison=Comparison("title", (measured(), observed), ("an event",), (predicted(notes=("a note",)),)),
        steps=(
            StepRecord(1, "as written", 0.5, 4, 40, 1000, None, 1.5),
            StepRecord(2, "--fp16", 0.4, 4, 40, skipped=True),
        ),
        versions={"torch": "2.13.0"},
        predictions=(predicted("--fp16", refused="precision: no", timeline=()),),
        title="memfit · gpt2",
        device="NVIDIA H200",
        capacity_bytes=8 * 2**30,
        budget_bytes=4 * 2**30,
        points=(
            LivePoint(1, "as written", 0.5, 8.0, 1000, {"activations": 700}, 1.5),
            LivePoint(2, "--quantize 4", 0.4, 10.0, None, {}),
        ),
        changes=(Change(1, "as written"), Change(2, "--quantize 4")),
        rescues=(Rescue(2, "the backward pass", "as written", "--quantize 4", "CUDA out of memory", 1, 0.25),),
        events=("step 2: --quantize 4",),
        recorded_at="2026-11-21 15:11 UTC",
    )


def loaded(record: RunRecord | None = None) -> Any:
    return json.loads((record or full()).to_json())


def message(changed: Any) -> str:
    with pytest.raises(MemlabError) as caught:
        RunRecord.from_json(changed if isinstance(changed, str) else json.dumps(changed))
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_a_run_reads_back_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    full().save(file)
    again = RunRecord.load(file)
    assert again == full()
    assert isinstance(again.comparison.measurements[1].timeline[1].phase, Phase)
    assert isinstance(again.comparison.predictions[0].timeline[0].phase, Phase)
    assert json.loads(file.read_text())["format"] == 2


def test_records_are_plain_json() -> None:
    text = RunRecord(Comparison("t", (measured(timeline=(point(5),)),))).to_json()
    assert json.loads(text)["comparison"]["measurements"][0]["timeline"][0]["phase"] == "forward"


def test_no_numbers_and_infinities_survive_in_json_that_others_read() -> None:
    def refuse(literal: str) -> float:
        raise AssertionError(f"{literal} is no JSON")

    steps = (StepRecord(1, "as written", math.inf, 4, 40, loss=math.nan), StepRecord(2, "a", -math.inf, 0, 0))
    text = RunRecord(Comparison("t", (measured(),)), steps, predictions=(predicted(step_seconds=math.nan),)).to_json()
    json.loads(text, parse_constant=refuse)
    again = RunRecord.from_json(text)
    assert [step.seconds for step in again.steps] == [math.inf, -math.inf]
    assert again.steps[0].loss is not None
    assert math.isnan(again.steps[0].loss)
    assert math.isnan(again.predictions[0].step_seconds)


def test_steps_are_bounded() -> None:
    steps = tuple(StepRecord(n, "as written", 0.5, 4, 40) for n in range(1, 5001))
    kept = RunRecord(Comparison("t", (measured(),)), steps).steps
    assert (len(kept), kept[0].step, kept[-1].step) == (2000, 3001, 5000)


# -- old files, and files of a newer memlab


def test_a_file_without_a_number_is_one_of_the_first_format() -> None:
    first = {name: loaded()[name] for name in ("comparison", "steps", "versions", "predictions")}
    text = json.dumps(first).replace('"seconds": 0.4', '"seconds": NaN')
    again = RunRecord.from_json(text)
    assert again.comparison == full().comparison
    assert math.isnan(again.steps[1].seconds)
    assert (again.points, again.capacity_bytes, again.title) == ((), None, "")


def test_a_file_from_before_there_were_predictions_is_read() -> None:
    old = loaded(RunRecord(Comparison("t", (measured(),))))
    for name in ("format", "predictions", "title", "device", "points", "changes", "rescues", "events"):
        del old[name]
    del old["comparison"]["predictions"]
    assert RunRecord.from_json(json.dumps(old)) == RunRecord(Comparison("t", (measured(),)))


def test_what_a_newer_memlab_added_is_passed_over() -> None:
    newer = loaded()
    newer["colour"] = "red"
    newer["points"][0]["watts"] = 700
    assert RunRecord.from_json(json.dumps(newer)) == full()


def test_a_newer_format_asks_for_an_upgrade() -> None:
    said = "run record: written by memlab with format 3; this one reads up to 2: upgrade memlab"
    assert message({**loaded(), "format": 3}) == said
    assert message({"format": 3}) == said


# -- what is no run record


def refused(reason: str) -> str:
    return f"not a run record of memlab, or a damaged one ({reason}): {WHAT_TO_DO}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("hello", "Expecting value: line 1 column 1 (char 0)"),
        ("[]", "no JSON object"),
        ("{}", "run has no comparison"),
        ('{"cells": [], "nbformat": 4}', "run has no comparison"),
        ('{"comparison": 3}', "run.comparison is 3"),
    ],
)
def test_what_is_no_run_record_is_refused(text: str, reason: str) -> None:
    assert message(text) == refused(reason)


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 10_000])
def test_what_cannot_be_read_at_all_is_refused(text: str) -> None:
    assert message(text).startswith("not a run record of memlab, or a damaged one (")


@given(st.integers(1, 3000))
def test_wherever_a_file_is_cut_off_the_message_is_one_line(length: int) -> None:
    message(full().to_json()[:length])


# -- damaged fields


def place(root: Any, where: str) -> tuple[Any, Any]:
    """What holds a value, and its key there; places are written as the messages name them."""
    keys = [int(key) if key.isdecimal() else key for key in where.replace("[", ".").replace("]", "").split(".")]
    for key in keys[:-1]:
        root = root[key]
    return root, keys[-1]


def change(where: str, value: object) -> Any:
    """The full record with one value replaced."""
    root = loaded()
    holder, key = place(root, where)
    holder[key] = value
    return root


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("capacity_bytes", "8GiB"),
        ("capacity_bytes", 1.5),
        ("capacity_bytes", math.nan),
        ("capacity_bytes", True),
        ("capacity_bytes", 10**40),
        ("title", None),
        ("versions", ["2.13"]),
        ("versions.torch", 2.13),
        ("points", {}),
        ("points[1].samples_per_second", "fast"),
        ("points[1].samples_per_second", False),
        ("points[1].samples_per_second", 10**400),
        ("points[1].plan", 3),
        ("comparison.measurements[0].fits", 1),
        ("comparison.measurements[1].step_seconds[2]", []),
    ],
)
def test_a_wrong_value_is_named(where: str, value: object) -> None:
    assert message(change(where, value)) == refused(f"run.{where} is {json.dumps(value)[:60]}")


def test_what_is_not_among_the_choices_and_lists_of_another_length() -> None:
    said = message(change("comparison.measurements[1].timeline[0].phase", "sideways"))
    assert said == refused("'sideways' is not a valid Phase")
    assert message(change("predictions[0].interval_bytes", [1])).startswith(refused("zip() argument 2")[:60])


@pytest.mark.parametrize(
    ("holder", "name"),
    [("", "comparison"), (".comparison", "title"), (".comparison.measurements[1]", "plan"), (".points[0]", "step")],
)
def test_a_missing_field_is_named(holder: str, name: str) -> None:
    root = loaded()
    parent, key = place(root, f"{holder}.{name}".removeprefix("."))
    del parent[key]
    assert message(root) == refused(f"run{holder} has no {name}")


def test_a_comparison_without_measurements() -> None:
    said = message(change("comparison.measurements", []))
    assert said == "a comparison needs at least one measurement; run some steps first"


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data(), junk)
def test_whatever_stands_in_a_field_is_read_or_refused_in_one_line(data: st.DataObject, value: object) -> None:
    root = loaded()
    holder: Any = root
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(holder[key], dict | list) or not holder[key] or data.draw(st.booleans()):
            break
        holder = holder[key]
    holder[key] = value
    said = ""
    try:
        RunRecord.from_json(json.dumps(root))
    except MemlabError as error:
        said = str(error)
    assert "\n" not in said


# -- files


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    def said(file: Path) -> str:
        with pytest.raises(MemlabError) as caught:
            RunRecord.load(file)
        return str(caught.value)

    assert said(tmp_path / "none.json") == f"{tmp_path}/none.json: No such file or directory"
    assert said(tmp_path) == f"{tmp_path}: Is a directory"
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert said(tmp_path / "binary").startswith(f"{tmp_path}/binary: ")
    (tmp_path / "list").write_text("[]")
    assert said(tmp_path / "list").startswith(f"{tmp_path}/list: not a run record of memlab, or a damaged one (")
    with pytest.raises(MemlabError) as caught:
        full().save(tmp_path / "no folder" / "run.json")
    assert str(caught.value) == f"{tmp_path}/no folder/run.json: No such file or directory"
