"""The live figure as a widget: sends what has changed, in one update, and is gone when it is closed."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

pytest.importorskip("plotly", reason="needs plotly")
pytest.importorskip("anywidget", reason="needs anywidget")

import comm
import numpy as np
from comm.base_comm import BaseComm
from ipywidgets.widgets import widget as widgets

from memlab.errors import MissingExtraError
from memlab.jupyter.figure_widget import LiveFigure
from memlab.plan import Plan
from memlab.records import Measurement, Phase, Prediction, TimelinePoint
from memlab.records.live_state import Activity, Change, LivePoint, Moment
from memlab.report.live_figure import drawing
from memlab.units import GIB

PARTS = {"parameters": GIB, "activations": 2 * GIB}
TIMELINE = tuple(TimelinePoint(i / 10, Phase.FORWARD, PARTS) for i in range(4))
MEASURED = Measurement("as written", "cpu", 3 * GIB, None, 0, PARTS, TIMELINE, (0.5, 0.6), 8, 0)
PREDICTED = Prediction("--bf16", "cpu", 2 * GIB, None, 0, PARTS, (), 0.4, 8, 0, (GIB, 3 * GIB), (0.3, 0.5))
EMPTY = Moment("gpt2", Activity.IDLE, 0, Plan(), None, ())
RUN = replace(EMPTY, measurements=(MEASURED,), predictions=(PREDICTED,), budget_bytes=4 * GIB)


def at_step(step: int, **more: Any) -> Moment:
    points = tuple(LivePoint(i, "as written", 0.5, 16.0, 3 * GIB + i, PARTS) for i in range(1, step + 1))
    return replace(RUN, step=step, points=points, **more)


class Recorded(BaseComm):
    """A comm that keeps what is sent."""

    sent: ClassVar[list[dict[str, Any]]] = []

    def publish_msg(self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **_: Any) -> None:
        if (data or {}).get("method") == "update":
            self.sent.append(data["state"])


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """States that widgets send while a test runs; widgets that it leaves open make it fail."""
    monkeypatch.setattr(comm, "create_comm", Recorded)
    monkeypatch.setattr(Recorded, "sent", [])
    before = set(widgets._instances)
    yield Recorded.sent
    assert set(widgets._instances) == before


@pytest.fixture
def live(sent: list[dict[str, Any]]) -> Iterator[LiveFigure]:
    made = LiveFigure()
    sent.clear()
    yield made
    made.close()


def updates(sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What plotly is to change; the message after each takes it back, for the next one to be a change again."""
    return [state["_py2js_update"] for state in sent if state.get("_py2js_update")]


def same_figure(live: LiveFigure, moment: Moment) -> bool:
    shown, expected = live.widget.to_dict(), LiveFigure()
    expected.show(moment)
    wanted = expected.widget.to_dict()
    expected.close()
    for each in (*shown["data"], *wanted["data"]):
        each.pop("uid")
    return str(shown) == str(wanted)


def test_a_moment_is_sent_as_one_update(live: LiveFigure, sent: list[dict[str, Any]]) -> None:
    live.show(at_step(3))
    assert len(updates(sent)) == 1
    assert len(sent) == 2
    assert same_figure(live, at_step(3))


def test_coordinates_travel_as_buffers(live: LiveFigure) -> None:
    live.show(at_step(3))
    steps = live.widget.data[0].x
    assert isinstance(steps, np.ndarray)
    assert steps.tolist() == pytest.approx([0.51, 1, 2, 3, 3.49])


def test_the_same_moment_sends_nothing(live: LiveFigure, sent: list[dict[str, Any]]) -> None:
    live.show(at_step(3))
    sent.clear()
    live.show(at_step(3))
    assert sent == []


def test_a_new_step_sends_the_picture_of_steps_alone(live: LiveFigure, sent: list[dict[str, Any]]) -> None:
    live.show(at_step(9))
    sent.clear()
    live.show(at_step(10))
    (update,) = updates(sent)
    changed = [live.widget.data[index] for index in update["style_traces"]]
    assert {each.xaxis for each in changed} == {"x"}
    assert set(update["style_data"]) == {"x", "y"}
    assert not update["layout_data"]


def test_a_change_of_plan_sends_lines_and_words_as_a_whole(live: LiveFigure, sent: list[dict[str, Any]]) -> None:
    live.show(at_step(9))
    sent.clear()
    live.show(at_step(9, changes=(Change(5, "--bf16"),)))
    (update,) = updates(sent)
    assert set(update["layout_data"]) == {"shapes", "annotations", "yaxis.range", "yaxis2.range"}
    assert update["style_data"] == {}
    live.show(at_step(9))
    assert same_figure(live, at_step(9))


def test_a_moved_budget_is_judged_anew(live: LiveFigure) -> None:
    for budget_bytes in (4 * GIB, GIB // 2, None):
        moment = at_step(2, budget_bytes=budget_bytes)
        live.show(moment)
        assert same_figure(live, moment)


def test_a_page_that_is_loaded_again_gets_the_figure_as_it_is(live: LiveFigure) -> None:
    live.show(at_step(5))
    state = live.widget.get_state()
    assert state["_widget_data"] == live.widget.to_dict()["data"]
    assert state["_widget_layout"]["annotations"] == list(drawing(at_step(5)).layout["annotations"])


def test_plotly_is_no_part_of_what_a_reloaded_page_waits_for(live: LiveFigure, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page waits 4 s for the state of all widgets, and asks for plotly by itself."""
    answers: list[Any] = []
    monkeypatch.setattr(live.widget.comm, "publish_msg", lambda *_, **message: answers.append(message))
    assert len(live.widget.get_state()["_esm"]) < 5_000
    assert len(live.widget._esm) > 1_000_000
    live.widget._handle_msg({"content": {"data": {"method": "custom", "content": {"kind": "plotly"}}}, "buffers": []})
    (answer,) = answers
    assert answer["data"]["content"] == {"kind": "plotly"}
    assert len(answer["buffers"][0]) > 1_000_000


def test_what_the_browser_reports_unasked_is_not_answered(live: LiveFigure, sent: list[dict[str, Any]]) -> None:
    live.widget.set_state({"_js2py_traceDeltas": {"trace_deltas": [], "trace_edit_id": 0}})
    live.widget.set_state({"_js2py_pointsCallback": {"event_type": "plotly_hover"}})
    assert sent == []


def test_a_zoom_of_the_reader_is_kept(live: LiveFigure) -> None:
    live.show(at_step(5))
    zoom = {"xaxis.range[0]": 2, "xaxis.range[1]": 3, "xaxis.autorange": False}
    live.widget.set_state({"_js2py_relayout": {"relayout_data": zoom, "source_view_id": "1"}})
    live.show(at_step(6))
    assert live.widget.to_dict()["layout"]["xaxis"]["range"] == [2, 3]


def test_a_closed_figure_is_gone_and_stays_so(sent: list[dict[str, Any]]) -> None:
    before = set(widgets._instances)
    live = LiveFigure()
    live.show(at_step(2))
    live.close()
    assert set(widgets._instances) == before
    sent.clear()
    live.close()
    live.show(at_step(3))
    assert sent == []


def test_closed_figures_are_released() -> None:
    """Twenty rounds: the first may fill caches, none may stay."""
    released = []
    for step in range(1, 21):
        live = LiveFigure()
        live.show(at_step(step))
        live.widget._repr_mimebundle_()
        live.close()
        released += [weakref.ref(live), weakref.ref(live.widget)]
    del live
    gc.collect()
    assert [ref for ref in released if ref() is not None] == []


def test_no_moment_is_kept(live: LiveFigure) -> None:
    class Parts(dict[str, int]):
        """Bytes by category that can be watched."""

    parts = Parts(PARTS)
    point = LivePoint(1, "as written", 0.5, 16.0, 3 * GIB, parts)
    kept = weakref.ref(parts)
    live.show(replace(RUN, step=1, points=(point,)))
    del parts, point
    gc.collect()
    assert kept() is None


def test_nothing_piles_up_over_many_updates(live: LiveFigure) -> None:
    moments = [at_step(step) for step in (20, 21, 22)]
    for moment in moments * 2:
        live.show(moment)
    gc.collect()
    before = len(gc.get_objects())
    for moment in moments * 20:
        live.show(moment)
        Recorded.sent.clear()
    gc.collect()
    assert len(gc.get_objects()) - before < 60


def test_several_threads_may_show_and_report(live: LiveFigure) -> None:
    failed: list[BaseException] = []

    def showing() -> None:
        try:
            for step in range(1, 40):
                live.show(at_step(step))
        except BaseException as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    thread = threading.Thread(target=showing)
    thread.start()
    for visible in ("legendonly", True) * 20:
        live.widget.set_state({"_js2py_restyle": {"style_data": {"visible": [visible]}, "style_traces": [0],
                                                  "source_view_id": "1"}})  # fmt: skip
        live.widget.get_state()
    thread.join()
    assert failed == []
    assert live.widget.data[0].x.tolist()[1:-1] == list(range(1, 40))
    assert live.widget.data[0].visible is True


@pytest.mark.parametrize("package", ["plotly", "anywidget", "ipywidgets"])
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=f"pip install {package}"):
        LiveFigure()
