"""The panel's widgets, without a browser: what they show of a moment, and what they ask."""

from __future__ import annotations

import gc
import importlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from memlab.jupyter import display
from memlab.jupyter import panel as panel_module
from memlab.jupyter.panel import Panel
from memlab.jupyter.saved_view import as_text
from memlab.live.control import Control
from memlab.plan import FIELDS, Plan
from memlab.records import Measurement
from memlab.records.live_state import Activity
from memlab.runtime.workload import Workload
from memlab.session import Session
from memlab.units import format_bytes
from tests.helpers.hand import Hand
from tests.helpers.stages import Later, Playing

for package in ("ipywidgets", "anywidget"):
    pytest.importorskip(package, reason=f"needs {package}")

TRIED = tuple(
    Measurement(plan, "cpu", peak, None, 0, {"parameters": peak}, (), (0.5,) * 5, 8, 0)
    for plan, peak in (("as written", 2**30), ("--checkpoint", 2**29))
)


@pytest.fixture
def control() -> Iterator[Control]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    made = Control(model, Playing())
    made.begin(Workload(model, optimizer, (torch.randn(8, 16), torch.randn(8, 1)), mse_loss))
    made.keepalive = (model, optimizer)  # type: ignore[attr-defined] # a notebook's variables
    yield made
    if made.model.session is not None:
        made.model.session.undo()


@pytest.fixture
def panel(control: Control) -> Iterator[Panel]:
    before = set(open_widgets())
    made = Panel(control)
    yield made
    made.close()
    assert set(open_widgets()) <= before, "widgets are left open"


def open_widgets() -> list[str]:
    return list(importlib.import_module("ipywidgets.widgets.widget")._instances)


def session_of(control: Control) -> Session:
    assert control.model.session is not None
    return control.model.session


@pytest.fixture
def hand(panel: Panel) -> Hand:
    return Hand(panel)


def test_there_is_a_labelled_box_for_every_field_of_a_plan(panel: Panel, hand: Hand) -> None:
    assert [each["title"] for each in panel.widget.fixed["settings"]] == [spec.title for spec in FIELDS]
    assert [hand.choices(spec.name) for spec in FIELDS] == [list(spec.choices[1:]) for spec in FIELDS]


def test_flipping_a_box_applies_the_setting_and_says_so(hand: Hand, control: Control) -> None:
    hand.flip("accumulation")
    assert session_of(control).plan == Plan.parse("--accumulate 4")
    assert hand.setting("accumulation")["on"]
    assert hand.setting("accumulation")["said"] == "✓ applied at step 1"
    hand.choose("accumulation", "2")
    assert session_of(control).plan == Plan.parse("--accumulate 2")
    hand.flip("accumulation", on=False)
    assert session_of(control).plan == Plan()
    assert not hand.setting("accumulation")["on"]
    assert hand.setting("accumulation")["said"] == "off since step 1"


def test_a_choice_without_its_box_asks_for_nothing(hand: Hand, control: Control) -> None:
    hand.choose("precision", "fp16")
    assert session_of(control).plan == Plan()
    assert (hand.setting("precision")["on"], hand.setting("precision")["choice"]) == (False, "fp16")
    hand.flip("precision")
    assert session_of(control).plan == Plan.parse("--fp16")


def test_a_refusal_puts_the_box_back_and_says_why(hand: Hand) -> None:
    hand.flip("loss")
    assert not hand.setting("loss")["on"]
    assert "✕ refused: loss: Sequential has no linear layer" in hand.setting("loss")["said"]


def test_settings_of_a_magic_are_shown_even_where_no_choice_stands_for_them(hand: Hand, control: Control) -> None:
    session_of(control).switch("--accumulate 3")
    control.views.draw()
    assert hand.setting("accumulation")["on"]
    assert hand.setting("accumulation")["choice"] == "3"
    assert ["3", "3"] in hand.setting("accumulation")["choices"]


def test_two_panels_on_one_model_show_one_state(hand: Hand, control: Control) -> None:
    other = Panel(control)
    try:
        hand.flip("accumulation")
        assert Hand(other).setting("accumulation")["on"]
        assert "applied at step 1" in Hand(other).setting("accumulation")["said"]
    finally:
        other.close()


def test_a_click_from_another_thread_is_asked_for_as_well(hand: Hand, control: Control) -> None:
    stage = control.loop.stage = Later()
    clicking = threading.Thread(target=hand.flip, args=("accumulation",))
    clicking.start()
    clicking.join()
    assert hand.setting("accumulation")["said"] == "… pending"
    stage.idle()
    assert session_of(control).plan == Plan.parse("--accumulate 4")


def test_a_moment_that_another_thread_draws_late_does_not_come_back(panel: Panel, hand: Hand, control: Control) -> None:
    late = control.moment()
    hand.flip("accumulation")
    panel.draw(late)
    assert hand.setting("accumulation")["on"]


def test_a_view_hears_which_of_its_messages_are_dealt_with(hand: Hand, control: Control) -> None:
    control.loop.stage = Later()
    hand.send("flip", field="accumulation", on=True, view="a", number=2)
    hand.send("hello", view="b", number=1)
    assert hand.shown["heard"] == {"a": 2, "b": 1}
    for view in "cdefghij":
        hand.send("hello", view=view, number=1)
    assert list(hand.shown["heard"]) == list("cdefghij")


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "flip", "field": "nothing", "on": True},
        {"kind": "flip", "field": "checkpointing", "on": "yes"},
        {"kind": "choose", "field": "precision", "text": "fp7"},
        {"kind": "target", "text": "fortran"},
        {"kind": "press", "button": "self-destruct"},
        {"kind": "budget", "position": "low"},
        {"kind": 7},
        {},
    ],
)
def test_messages_of_another_page_change_nothing(hand: Hand, panel: Panel, control: Control, message: Any) -> None:
    before = hand.shown
    panel.widget._handle_custom_msg(message, [])
    assert hand.shown == before
    assert session_of(control).plan == Plan()


def test_an_error_in_a_callback_is_shown(hand: Hand, control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_field: str, _text: str) -> None:
        raise ZeroDivisionError("nothing to divide by")

    monkeypatch.setattr(control, "ask", broken)
    hand.flip("accumulation")
    assert "ZeroDivisionError: nothing to divide by" in hand.shown["errors"]


def test_effects_appear_once_they_are_predicted(hand: Hand, control: Control) -> None:
    assert hand.setting("accumulation")["effect"] == ""
    control.predict()
    control.loop.stage.play_out()  # type: ignore[attr-defined]
    assert "% speed" in hand.setting("accumulation")["effect"]
    assert hand.setting("loss")["effect"] == "does not apply"
    assert "Sequential has no linear layer" in hand.setting("loss")["why"]


def test_buttons_follow_what_can_be_asked_for(panel: Panel, hand: Hand, control: Control) -> None:
    def can_press() -> tuple[bool, ...]:
        return tuple(map(hand.can_press, ("run", "pause", "cancel")))

    assert can_press() == (True, False, False)
    hand.press("run")
    played = control.loop.stage.played[-1]  # type: ignore[attr-defined]
    assert played.advance()
    assert can_press() == (False, True, True)
    hand.press("pause")
    assert hand.shown["pause"] == "Resume"
    assert not played.advance()
    hand.press("pause")
    assert played.advance()
    hand.press("cancel")
    assert hand.can_press("run")
    assert "as written" in panel.widget.table
    assert "idle, step 2" in hand.shown["line"]


@pytest.mark.parametrize("keep", [False, True])
def test_what_a_run_of_its_own_trains_is_kept_where_that_is_asked_for(hand: Hand, control: Control, keep: bool) -> None:
    model = session_of(control).workload.model
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hand.send("keep", on=keep)
    hand.press("run")
    assert control.loop.stage.played[-1].advance()  # type: ignore[attr-defined]
    hand.press("cancel")
    assert all(map(torch.equal, before, model.parameters())) is not keep


def test_a_run_makes_as_many_steps_as_the_panel_says(hand: Hand, control: Control) -> None:
    assert hand.shown["steps"] == 20
    hand.send("steps", count=2)
    hand.press("run")
    (run,) = control.loop.stage.played  # type: ignore[attr-defined]
    assert run.advance()
    assert control.moment().status.endswith("1 of 2 steps")
    assert run.advance()
    assert not run.advance()
    assert control.moment().status.startswith("idle, step 2")
    assert "of 2 steps" not in control.moment().status
    for count, shown in ((0, ""), (-1, ""), (10**9, "")):  # until Cancel; and what the page cannot send
        hand.send("steps", count=count)
        assert hand.shown["steps"] == shown
    hand.press("run")
    run = control.loop.stage.played[-1]  # type: ignore[attr-defined]
    assert all(run.advance() for _ in range(30))
    assert control.moment().status.startswith("measuring, step 32")
    hand.press("cancel")


def test_before_any_batch_nothing_can_be_run_and_the_button_says_why() -> None:
    model = nn.Linear(4, 1)
    control = Control(model, Playing())
    control.begin(Workload(model, torch.optim.AdamW(model.parameters())))
    panel = Panel(control)
    off = Hand(panel).shown["off"]
    panel.close()
    session_of(control).undo()
    said = "needs a batch (train a step with %%memfit first), and no cell that runs in the background"
    assert (off["run"], off["steps"], off["keep"], off["find"]) == (said,) * 4


def test_the_budget_follows_the_slider(hand: Hand, control: Control) -> None:
    assert hand.shown["budget"] == {"known": False, "position": 200, "text": "known after the first step"}
    hand.press("run")
    control.loop.stage.played[-1].advance()  # type: ignore[attr-defined]
    hand.press("cancel")
    assert hand.shown["budget"] == {"known": True, "position": 200, "text": "none"}
    peak = max(each.peak_allocated_bytes for each in control.moment().measurements)
    assert not hand.can_press("find")
    hand.send("budget", position=100)
    budget = control.moment().budget_bytes
    assert budget == pytest.approx(0.55 * peak, rel=0.01)
    assert hand.shown["budget"] == {"known": True, "position": 100, "text": format_bytes(budget)}
    assert hand.can_press("find")
    hand.send("budget", position=0)  # no size is zero
    assert control.moment().budget_bytes > 0
    hand.send("budget", position=200)
    assert control.moment().budget_bytes is None


def test_the_plan_is_copied_as_code(panel: Panel, hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(panel.widget, "send", sent.append)
    hand.flip("accumulation")
    hand.press("copy")
    assert hand.shown["code"] == "%%memfit --accumulate 4"
    assert sent == [{"kind": "copy", "text": "%%memfit --accumulate 4"}]
    hand.send("target", text="trainer")
    hand.press("copy")
    assert "gradient_accumulation_steps=4" in hand.shown["code"]
    hand.send("not copied")
    assert hand.shown["errors"] == "the browser did not let the code be copied: it stands below"


def test_undo_all_gives_the_model_back(hand: Hand, control: Control) -> None:
    hand.flip("accumulation")
    hand.press("undo")
    assert control.model.session is None
    assert not hand.setting("accumulation")["on"]


def test_the_panel_keeps_no_model_alive_and_says_when_it_is_gone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    gone = weakref.ref(model)
    control = Control(model)
    control.begin(Workload(model, torch.optim.AdamW(model.parameters())))
    panel = Panel(control)
    hand = Hand(panel)
    hand.flip("accumulation")
    del model
    gc.collect()
    assert gone() is None
    assert "deleted: this panel is over" in hand.shown["line"]
    assert hand.shown["over"]
    assert set(hand.shown["off"]) == {"run", "steps", "keep", "pause", "cancel", "find", "undo"}
    panel.close()


def test_a_closed_panel_is_let_go(control: Control) -> None:
    panels, widgets = [], []
    for _ in range(5):
        panel = Panel(control)
        panels.append(weakref.ref(panel))
        widgets.append(weakref.ref(panel.widget))
        panel.close()
        panel.close()
    del panel
    gc.collect()
    assert [ref() for ref in (*panels, *widgets)] == [None] * 10
    assert not control.views.any_open


def test_as_text_every_setting_comes_with_its_magic(control: Control) -> None:
    control.ask("accumulation", "4")
    lines = as_text(control.moment()).splitlines()
    first, second, third = lines[3:6]
    assert first.split()[:4] == ["Gradient", "accumulation", "4", "1"]
    assert first.endswith("%memfit undo")
    assert second.endswith("%memfit --accumulate 4 --batchnorm micro")
    assert third.endswith("%memfit --accumulate 4 --checkpoint")


def test_a_page_without_the_kernel_shows_a_table_and_a_picture(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for where, name in ((panel_module, "show"), (display, "show"), (display, "replace_shown")):
        monkeypatch.setattr(where, name, lambda data, **options: shown.append((data, options)))
    panel = Panel(control)
    panel._ipython_display_()
    (view, _), (still, options) = shown
    assert view["application/vnd.jupyter.widget-view+json"]["model_id"] == panel.widget.model_id
    assert "Gradient accumulation" in still["text/html"]
    assert "image/png" not in still
    shown.clear()
    Hand(panel).flip("accumulation")
    ((still, _),) = shown
    assert "%memfit undo" in still["text/html"]
    shown.clear()
    for frame in (6, 7):
        panel.draw(replace(control.moment(), activity=Activity.TRAINING, measurements=TRIED, frame=frame))
    ((still, _),) = shown
    assert "as it was when this run began" in still["text/html"]
    assert "image/png" not in still
    shown.clear()
    panel.draw(replace(control.moment(), activity=Activity.IDLE, measurements=TRIED, frame=8))
    ((still, again),) = shown
    assert again["display_id"] == options["display_id"]
    assert "--checkpoint" in still["text/html"]
    assert "--checkpoint" in still["text/plain"]
    assert still["image/png"]
    panel.close()
