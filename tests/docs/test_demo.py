"""The demo's page knows what a panel on its recording shows, wherever somebody gets to in it."""

from __future__ import annotations

import doctest
import json
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.errors import MemlabError
from memlab.exporting import TARGETS, export
from memlab.jupyter.controls import MAGIC
from memlab.plan import FIELDS, Plan
from memlab.records.run_record import RunRecord
from tests.docs import demo, patches, record_demo

pytest.importorskip("anywidget", reason="the panel needs anywidget")

_MOST_BYTES = 300_000
RECORD = RunRecord.load(demo.RECORD)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text("ab", max_size=2),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.sampled_from("abc"), each, max_size=3),
    max_leaves=12,
)


def patched(value: Any, patch: Any) -> Any:
    """As `demo.mjs` has it."""
    if patch is None:
        return value
    kind, what = patch[:2]
    if kind == 0:
        return what
    if kind == 2:
        _, at, count, items = patch
        return [*value[:at], *items, *value[at + count :]]
    if kind == 3:
        return [patched(each, what.get(str(number))) for number, each in enumerate(value)]
    made = {name: patched(each, what.get(name)) for name, each in value.items() if name not in patch[2]}
    return made | {name: patched(None, each) for name, each in what.items() if name not in value}


@given(VALUES, VALUES)
def test_a_patch_makes_the_other_value(one: Any, other: Any) -> None:
    patch = json.loads(json.dumps(patches.between(one, other)))
    assert json.dumps(patched(one, patch), sort_keys=True) == json.dumps(other, sort_keys=True)


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(patches).failed == 0


def test_the_recording_is_small_and_of_the_plans_it_is_made_under() -> None:
    assert demo.RECORD.stat().st_size < _MOST_BYTES
    assert [each.plan for each in RECORD.comparison.measurements] == [
        Plan.parse(each).label for each in record_demo.PLANS
    ]
    assert len(RECORD.changes) == len(record_demo.PLANS) - 1


@pytest.fixture(scope="module")
def known() -> Any:
    return json.loads(json.dumps(demo.demo(RECORD)))


def test_it_knows_every_state_that_a_replay_goes_through(known: Any) -> None:
    states = [*accumulate(known["frames"], patched, initial=known["first"])][1:]
    shown = demo.Shown(RECORD)
    assert known["first"] == shown.state()
    shown.play_to(0)
    for state, pause, (tick, until) in zip(states, known["pauses"], pairwise(known["ticks"]), strict=True):
        assert state == shown.state(), tick
        shown.hand.press("pause")
        assert patched(state["controls"], pause) == shown.controls(), tick
        shown.hand.press("pause")
        for _ in range(tick, until):
            is_over = not shown.replay.advance(demo.TICK_SECONDS)
    assert is_over


def test_every_choice_has_an_answer_everywhere(known: Any) -> None:
    asked = {f"{spec.name}={text}" for spec in FIELDS for text in spec.choices}
    for stretch in known["stretches"]:
        assert stretch["playing"].keys() == stretch["standing"].keys() == asked
    assert known["end"].keys() == asked | {"find"}
    led_to = [known["end"], *(stretch["standing"] for stretch in known["stretches"])]
    stands = {answer for answers in led_to for answer in answers.values() if isinstance(answer, int)}
    assert stands == {int(number) for number in known["stands"]}


def test_a_choice_leads_to_where_the_recording_has_it(known: Any) -> None:
    end, plans = known["end"], known["plans"]
    assert plans[end["optimizer=keep"]] == "--checkpoint"
    assert end["optimizer=adam8bit"] is None
    assert plans[known["stretches"][0]["playing"]["accumulation=4"]] == "--accumulate 4"
    assert end["accumulation=4"]["line"].startswith(
        " · gradient accumulation refused: not in this recording; predicted "
    )
    shown = demo.Shown(RECORD)
    shown.replay.ask("optimizer", "keep")
    assert patched(known["first"], known["stands"][str(end["optimizer=keep"])]) == shown.state()


def test_every_plan_has_its_code(known: Any) -> None:
    for label, made in known["code"].items():
        plan = Plan() if label == "as written" else Plan.parse(label)
        assert made == {
            MAGIC: [f"%%memfit {plan}".strip(), ""],
            **{target: exported(plan, target) for target in TARGETS},
        }


def exported(plan: Plan, target: str) -> list[str]:
    try:
        return [export(plan, target), ""]
    except MemlabError as error:
        return ["", f"{type(error).__name__}: {error}"]


def test_the_page_has_everything_in_it() -> None:
    page = demo.page(RECORD)
    assert "[[" not in page.partition('id="known"')[0]
    assert "function drawFigure" in page
    assert page.count("<script") == page.count("</script")
