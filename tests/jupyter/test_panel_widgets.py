"""The panel's widgets, without a browser: what they show of a moment, and what they ask."""

from __future__ import annotations

import gc
import importlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from memlab.jupyter.panel import Panel, as_text
from memlab.live.control import Control
from memlab.plan import FIELDS, Plan
from memlab.runtime.workload import Workload
from memlab.session import Session
from tests.helpers.stages import Later, Playing

for package in ("ipywidgets", "plotly", "anywidget"):
    pytest.importorskip(package, reason=f"needs {package}")


@pytest.fixture
def control() -> Iterator[Control]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    made = Control(model, Playing())
    made.begin(Workload(model, optimizer, (torch.randn(8, 16), torch.randn(8, 1)), mse_loss))
    made.keepalive = (model, optimizer)  # type: ignore[attr-defined] # a notebook's variables
    yield made
    if made.session is not None:
        made.session.undo()


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
    assert control.session is not None
    return control.session


def row(panel: Panel, field: str) -> Any:
    return next(each for each in panel._settings if each._spec.name == field)


def state(panel: Panel, field: str) -> str:
    return str(row(panel, field).state.value)


def test_there_is_a_labelled_box_for_every_field_of_a_plan(panel: Panel) -> None:
    assert [each.box.description for each in panel._settings] == [spec.title for spec in FIELDS]
    for each, spec in zip(panel._settings, FIELDS, strict=True):
        assert [value for _, value in each.choice.options] == list(spec.choices[1:])
        assert panel._status.names[each.class_name] == f"{spec.title}, which"


def test_flipping_a_box_applies_the_setting_and_says_so(panel: Panel, control: Control) -> None:
    row(panel, "accumulation").box.value = True
    assert session_of(control).plan == Plan.parse("--accumulate 4")
    assert "applied at step 1" in state(panel, "accumulation")
    row(panel, "accumulation").choice.value = "2"
    assert session_of(control).plan == Plan.parse("--accumulate 2")
    row(panel, "accumulation").box.value = False
    assert session_of(control).plan == Plan()


def test_a_choice_without_its_box_asks_for_nothing(panel: Panel, control: Control) -> None:
    row(panel, "precision").choice.value = "fp16"
    assert session_of(control).plan == Plan()


def test_a_refusal_puts_the_box_back_and_says_why(panel: Panel, control: Control) -> None:
    row(panel, "loss").box.value = True
    assert not row(panel, "loss").box.value
    assert "refused: loss: Sequential has no linear layer" in state(panel, "loss")


def test_settings_of_a_magic_are_shown_even_where_no_choice_stands_for_them(panel: Panel, control: Control) -> None:
    session_of(control).switch("--accumulate 3")
    control.draw()
    assert row(panel, "accumulation").box.value
    assert row(panel, "accumulation").choice.value == "3"


def test_two_panels_on_one_model_show_one_state(panel: Panel, control: Control) -> None:
    other = Panel(control)
    try:
        row(panel, "accumulation").box.value = True
        assert row(other, "accumulation").box.value
        assert "applied at step 1" in state(other, "accumulation")
    finally:
        other.close()


def test_a_click_from_another_thread_is_asked_for_as_well(panel: Panel, control: Control) -> None:
    def click() -> None:
        row(panel, "accumulation").box.value = True

    stage = control.stage = Later()
    clicking = threading.Thread(target=click)
    clicking.start()
    clicking.join()
    assert "pending" in state(panel, "accumulation")
    stage.idle()
    assert session_of(control).plan == Plan.parse("--accumulate 4")


def test_an_error_in_a_callback_is_shown(panel: Panel, control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_field: str, _text: str) -> None:
        raise ZeroDivisionError("nothing to divide by")

    monkeypatch.setattr(control, "ask", broken)
    row(panel, "accumulation").box.value = True
    assert "ZeroDivisionError: nothing to divide by" in panel._status.errors


def test_effects_appear_once_they_are_predicted(panel: Panel, control: Control) -> None:
    assert row(panel, "accumulation").effect.value == ""
    control.predict()
    control.stage.play_out()  # type: ignore[attr-defined]
    assert "% speed" in row(panel, "accumulation").effect.value
    assert "does not apply" in row(panel, "loss").effect.value


def test_buttons_follow_what_can_be_asked_for(panel: Panel, control: Control) -> None:
    buttons = panel._buttons
    assert (buttons.run.disabled, buttons.pause.disabled, buttons.cancel.disabled) == (False, True, True)
    buttons.run.click()
    played = control.stage.played[-1]  # type: ignore[attr-defined]
    assert played.advance()
    assert (buttons.run.disabled, buttons.pause.disabled, buttons.cancel.disabled) == (True, False, False)
    buttons.pause.click()
    assert buttons.pause.description == "Resume"
    assert not played.advance()
    buttons.pause.click()
    assert played.advance()
    buttons.cancel.click()
    assert not buttons.run.disabled
    assert "as written" in panel._table.value
    assert "idle, step 2" in panel._status.line


def test_the_budget_follows_the_slider(panel: Panel, control: Control) -> None:
    assert panel._budget.slider.disabled
    panel._buttons.run.click()
    control.stage.played[-1].advance()  # type: ignore[attr-defined]
    panel._buttons.cancel.click()
    slider = panel._budget.slider
    assert not slider.disabled
    slider.value = slider.max / 2
    budget = control.moment().budget_bytes
    assert budget is not None
    assert budget == pytest.approx(slider.max / 2 * panel._budget._unit, rel=0.01)
    slider.value = slider.max
    assert control.moment().budget_bytes is None


def test_the_plan_is_copied_as_code(panel: Panel, control: Control) -> None:
    row(panel, "accumulation").box.value = True
    panel._buttons.copy.click()
    assert panel._code.value == panel._status.copied == "%%memfit --accumulate 4"
    panel._buttons.target.value = "trainer"
    panel._buttons.copy.click()
    assert "gradient_accumulation_steps=4" in panel._code.value


def test_undo_all_gives_the_model_back(panel: Panel, control: Control) -> None:
    row(panel, "accumulation").box.value = True
    panel._buttons.undo.click()
    assert control.session is None
    assert not row(panel, "accumulation").box.value


def test_the_panel_keeps_no_model_alive_and_closes_its_figure_when_it_is_gone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    gone = weakref.ref(model)
    control = Control(model)
    control.begin(Workload(model, torch.optim.AdamW(model.parameters())))
    panel = Panel(control)
    row(panel, "accumulation").box.value = True
    del model
    gc.collect()
    assert gone() is None
    assert "deleted: this panel is over" in panel._status.line
    assert panel._figure.widget.comm is None
    panel.close()


def test_a_closed_panel_is_let_go(control: Control) -> None:
    figures, panels = [], []
    for _ in range(5):
        panel = Panel(control)
        panels.append(weakref.ref(panel))
        figures.append(weakref.ref(panel._figure))
        panel.close()
        panel.close()
    del panel
    gc.collect()
    assert [ref() for ref in panels] == [None] * 5
    assert [ref() for ref in figures] == [None] * 5
    assert not control.is_watched


def test_as_text_every_setting_comes_with_its_magic(control: Control) -> None:
    control.ask("accumulation", "4")
    lines = as_text(control).splitlines()
    assert "Gradient accumulation" in lines[2]
    assert lines[2].split()[2:4] == ["4", "1"]
    assert lines[2].endswith("%memfit undo")
    assert lines[3].endswith("%memfit --accumulate 4 --batchnorm micro")
    assert lines[4].endswith("%memfit --accumulate 4 --checkpoint")
    assert "text/plain" in Panel(control)._repr_mimebundle_()
