"""The widget of a panel: its state is all that is drawn, and it is gone when it is closed."""

from __future__ import annotations

import gc
import gzip
import json
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from typing import Any, ClassVar

import pytest

pytest.importorskip("anywidget", reason="needs anywidget")

import comm
import numpy as np
from comm.base_comm import BaseComm
from ipywidgets.widgets import widget as widgets

from memlab.errors import MissingExtraError
from memlab.jupyter.panel_page import PanelPage
from memlab.plan import Plan
from memlab.records import Measurement, Phase, Prediction, TimelinePoint
from memlab.records.live_state import Activity, LivePoint, Moment
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
def live(sent: list[dict[str, Any]]) -> Iterator[PanelPage]:
    made = PanelPage({})
    sent.clear()
    yield made
    made.close()


def coordinates(packed: memoryview) -> list[float]:
    return np.frombuffer(packed, np.float32).tolist()  # type: ignore[no-any-return]


def test_a_moment_is_sent_as_one_message(live: PanelPage, sent: list[dict[str, Any]]) -> None:
    live.show_figure(at_step(3))
    (state,) = sent
    assert set(state) == {"figure"}
    assert live.widget.figure["layout"] == drawing(at_step(3))["layout"]
    assert live.widget.figure["traces"] == drawing(at_step(3))["traces"]


def test_coordinates_travel_as_bytes(live: PanelPage) -> None:
    live.show_figure(at_step(3))
    first = live.widget.get_state("figure")["figure"]["traces"][0]
    assert coordinates(first["x"]) == pytest.approx([0.51, 1, 2, 3, 3.49])
    assert coordinates(first["y"]) == [1.0] * 5


def test_the_same_moment_sends_nothing(live: PanelPage, sent: list[dict[str, Any]]) -> None:
    live.show_figure(at_step(3))
    sent.clear()
    live.show_figure(at_step(3))
    assert sent == []


def test_a_page_that_comes_late_or_is_loaded_again_gets_the_figure_as_it_is(live: PanelPage) -> None:
    """The state is all that a page draws from, so there is no update that it could miss."""
    live.show_figure(at_step(5))
    figure = live.widget.get_state()["figure"]
    assert figure["layout"] == drawing(at_step(5))["layout"]
    assert coordinates(figure["traces"][0]["x"])[1:-1] == [1, 2, 3, 4, 5]


def test_a_page_needs_nothing_but_the_figure(live: PanelPage) -> None:
    """No address is loaded, and what travels is small: the answer to a page that is loaded again holds all of it."""
    script = live.widget.get_state()["_esm"]
    assert 1_000_000 < len(script.encode()) < 1_250_000
    own = "\n".join(
        (files("memlab.jupyter") / name).read_text(encoding="utf-8") for name in ("figure.mjs", "panel.mjs")
    )
    assert script.endswith(own)
    assert not re.search(r"\bimport\b|fetch\(|https?:", own)


def test_plotly_is_the_version_that_is_asked_for() -> None:
    folder = files("memlab.jupyter") / "plotly"
    wanted = json.loads((folder / "package.json").read_text(encoding="utf-8"))["dependencies"]["plotly.js"]
    assert f'"{wanted}"' in gzip.decompress((folder / "plotly.min.js.gz").read_bytes()).decode()


def test_a_zoom_of_the_reader_is_kept() -> None:
    """The page keeps what a reader has changed as long as this property stays the same."""
    assert drawing(at_step(5))["layout"]["uirevision"] == drawing(at_step(6, budget_bytes=None))["layout"]["uirevision"]


def test_a_closed_figure_is_gone_and_stays_so(sent: list[dict[str, Any]]) -> None:
    before = set(widgets._instances)
    live = PanelPage({})
    live.show_figure(at_step(2))
    live.close()
    assert set(widgets._instances) == before
    sent.clear()
    live.close()
    live.show_figure(at_step(3))
    assert sent == []


def test_closed_figures_are_released() -> None:
    """Twenty rounds: the first may fill caches, none may stay."""
    released = []
    for step in range(1, 21):
        live = PanelPage({})
        live.show_figure(at_step(step))
        live.widget._repr_mimebundle_()
        live.close()
        released += [weakref.ref(live), weakref.ref(live.widget)]
    del live
    gc.collect()
    assert [ref for ref in released if ref() is not None] == []


def test_no_moment_is_kept(live: PanelPage) -> None:
    class Parts(dict[str, int]):
        """Bytes by category that can be watched."""

    parts = Parts(PARTS)
    point = LivePoint(1, "as written", 0.5, 16.0, 3 * GIB, parts)
    kept = weakref.ref(parts)
    live.show_figure(replace(RUN, step=1, points=(point,)))
    del parts, point
    gc.collect()
    assert kept() is None


def test_nothing_piles_up_over_many_updates(live: PanelPage) -> None:
    moments = [at_step(step) for step in (20, 21, 22)]
    for moment in moments * 2:
        live.show_figure(moment)
    gc.collect()
    before = len(gc.get_objects())
    for moment in moments * 20:
        live.show_figure(moment)
        Recorded.sent.clear()
    gc.collect()
    assert len(gc.get_objects()) - before < 60


def test_several_threads_may_show_and_ask(live: PanelPage) -> None:
    failed: list[BaseException] = []

    def showing() -> None:
        try:
            for step in range(1, 40):
                live.show_figure(at_step(step))
        except BaseException as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    thread = threading.Thread(target=showing)
    thread.start()
    for _ in range(40):
        live.widget.get_state()
    thread.join()
    assert failed == []
    assert live.widget.figure == {
        "traces": drawing(at_step(39))["traces"],
        "layout": drawing(at_step(39))["layout"],
    }


@pytest.mark.parametrize("package", ["anywidget", "ipywidgets"])
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=f"pip install {package}"):
        PanelPage({})
