"""The page's half of a panel: one widget, whose state is all that the page draws from.

The page is `panel.mjs` (controls and words) and `figure.mjs` (the live figure, drawn with the part of plotly that is
built in `plotly/`). Nothing is loaded from anywhere else.

What travels:

- to the page, the state: `fixed` (names and choices, set once), `controls` (`memlab.jupyter.controls.Controls.state`), `figure`
  and `table`; and the message `{"kind": "copy", "text": ...}`.
- to the kernel, messages `{"kind": ..., "view": ..., "number": ...}` (`Controls.do`). `controls["heard"]` holds the number of
  the last message of each view that was dealt with: until then a view leaves a control as the user has put it.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from memlab.extras import available, require
from memlab.plan import Plan
from memlab.records.live_state import Activity, Moment
from memlab.report.live_figure import drawing
from memlab.report.live_settings import predicted
from memlab.report.pareto import Chart
from memlab.report.segments import NEUTRAL_INK, rgb

_NOTHING = Moment("", Activity.IDLE, 0, Plan(), None, ())


def require_widgets() -> None:
    """Import what a panel is made of."""
    for package in ("ipywidgets", "anywidget"):
        require(package)


def shows_widgets() -> bool:
    """Return whether widgets reach a page where there is no IPython: marimo gives each of them a connection."""
    if not available("ipywidgets"):
        return False
    import comm
    import ipywidgets

    tried = ipywidgets.Layout()
    try:
        return not isinstance(tried.comm, comm.DummyComm)
    finally:
        tried.close()


class PanelPage:
    """A panel's widget, until it is closed; one thread at a time shows a moment in it.

    It keeps the plain values it showed last, and nothing of the moments it was shown.
    """

    def __init__(self, fixed: Mapping[str, Any]) -> None:
        require_widgets()
        self._key: object = None
        self._map = predicted(_NOTHING)
        self.widget = _widget_class()(fixed=dict(fixed), figure=drawing(_NOTHING))

    def show(self, **state: Any) -> None:
        """Set parts of the state; what is as it was is not sent."""
        for name, value in state.items():
            setattr(self.widget, name, value)

    def show_figure(self, moment: Moment) -> None:
        self.show(figure=drawing(moment, self._predicted(moment)))

    def copy(self, text: str) -> None:
        self.widget.send({"kind": "copy", "text": text})

    def _predicted(self, moment: Moment) -> Chart:
        """The predicted half of the map, made again when something of it is another."""
        key = (moment.predictions, moment.budget_bytes, [each.plan for each in moment.measurements])
        if key != self._key:
            self._key, self._map = key, predicted(moment)
        return self._map

    def close(self) -> None:
        """Take the panel off the page."""
        self._key = None
        self.widget.layout.close()  # a widget of its own
        self.widget.close()


def _packed(figure: dict[str, Any], _widget: object) -> dict[str, Any]:
    """Return a figure with coordinates as bytes: a tenth of the time that lists of numbers take to be written."""
    return figure | {"traces": [_with_bytes(trace) for trace in figure["traces"]]}


def _with_bytes(trace: Mapping[str, Any]) -> dict[str, Any]:
    places = {name: np.array(trace[name], np.float32).data for name in ("x", "y") if trace.get(name)}
    return {**trace, **places}


def _part(name: str) -> str:
    content = files("memlab.jupyter").joinpath(name).read_bytes()
    return (gzip.decompress(content) if name.endswith(".gz") else content).decode()


@cache
def _widget_class() -> Any:
    """The class of the widget; made when it is first needed, since it derives from an optional package."""
    import anywidget
    import traitlets

    class PanelWidget(anywidget.AnyWidget):
        # as a text: from a file, anywidget would connect every widget to it for good (its issue 929)
        _esm = "\n".join(map(_part, ("plotly/plotly.min.js.gz", "figure.mjs", "panel.mjs")))
        _css = _part("panel.css").replace("NEUTRAL_INK", rgb(NEUTRAL_INK))
        fixed = traitlets.Dict().tag(sync=True)
        controls = traitlets.Dict().tag(sync=True)
        figure = traitlets.Dict().tag(sync=True, to_json=_packed)
        table = traitlets.Unicode().tag(sync=True)

    return PanelWidget
