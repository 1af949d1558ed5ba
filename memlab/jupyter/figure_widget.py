"""The live figure in a notebook: one plotly `FigureWidget`, brought up to date by what has changed."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from memlab.extras import require
from memlab.plan import Plan
from memlab.records.live_state import Activity, Moment
from memlab.report.live_figure import Drawing, drawing
from memlab.report.live_map import predicted
from memlab.report.pareto import Chart

if TYPE_CHECKING:
    from plotly.graph_objects import FigureWidget

_NOTHING = Moment("", Activity.IDLE, 0, Plan(), None, ())
# what the browser reports after every update and every move of the mouse, and nobody here asks for:
# answering it costs more than drawing
_UNREAD = frozenset({"_js2py_traceDeltas", "_js2py_layoutDelta", "_js2py_pointsCallback"})
# no bar of tools, which would stand on the legend: dragging zooms, a double click undoes it
_CONFIG = {"displayModeBar": False, "responsive": True}


class LiveFigure:
    """One figure for as long as it is open; any thread may show a moment in it.

    It keeps the plain values it drew last, and nothing of the moments it was shown.

    Raises:
        MissingExtraError: plotly, anywidget or ipywidgets is not installed.
    """

    def __init__(self) -> None:
        for package in ("plotly", "anywidget", "ipywidgets"):
            require(package)
        self._lock = threading.RLock()
        self._closed = False
        self._key: object = None
        self._map = predicted(_NOTHING)
        self._drawn = drawing(_NOTHING)
        self.widget: FigureWidget = _widget_class()(self._lock, self._drawn)

    def show(self, moment: Moment) -> None:
        """Bring the figure up to date, in one update of what has changed; does nothing once it is closed."""
        with self._lock:
            if self._closed:
                return
            new = drawing(moment, self._predicted(moment))
            _update(self.widget, self._drawn, new)
            self._drawn = new

    def _predicted(self, moment: Moment) -> Chart:
        """The predicted half of the map, made again when something of it is another."""
        key = (moment.predictions, moment.budget_bytes, [each.plan for each in moment.measurements])
        if key != self._key:
            self._key, self._map = key, predicted(moment)
        return self._map

    def send_again(self) -> None:
        """Send everything, for a page that has only now finished drawing and may have missed what came before."""
        with self._lock:
            if not self._closed:
                _send(self.widget, [dict(_leaves(trace)) for trace in self._drawn.traces], self._drawn)

    def close(self) -> None:
        """Take the figure off the page; a second time does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._drawn, self._key = Drawing((), {}), None
                self.widget.close()


def _update(widget: Any, old: Drawing, new: Drawing) -> None:
    """Send what differs, as the one update that `batch_update` would end with; it checks and copies much on the way."""
    edits = [dict(_differences(was, now)) for was, now in zip(old.traces, new.traces, strict=True)]
    _send(widget, edits, new, dict(_differences(old.layout, new.layout)))


def _send(
    widget: Any, edits: Sequence[Mapping[str, Any]], new: Drawing, layout: Mapping[str, Any] | None = None
) -> None:
    """Send edits of traces, and of the layout: all of it unless given."""
    layout = dict(_leaves(new.layout)) if layout is None else layout
    touched = [index for index, edit in enumerate(edits) if edit]
    names = dict.fromkeys(name for edit in edits for name in edit)
    styles = {name: [_edited(edits[index], new.traces[index], name) for index in touched] for name in names}
    if styles or layout:
        widget.plotly_update(styles, layout, touched)


def _edited(edit: Mapping[str, Any], trace: Mapping[str, Any], path: str) -> Any:
    """Return what a property of one trace is to be, in an update of several traces.

    plotly has a mark for "as it was". The page takes it as that for lists, and for single values as "the default".
    """
    from plotly.basedatatypes import Undefined

    if path in edit:
        return edit[path]
    value: Any = trace
    for name in path.split("."):
        value = value.get(name, Undefined) if isinstance(value, dict) else Undefined
    return Undefined if isinstance(value, (list, tuple)) else value


def _differences(was: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Properties that are no longer the same, by their paths; lists of marks and words count as one property."""
    for name, value in now.items():
        before = was[name]
        if isinstance(value, dict):
            yield from _differences(before, value, f"{path}{name}.")
        elif value != before:
            yield f"{path}{name}", _packed(name, value)


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every property by its path, but what a trace is, which cannot be changed."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{name}.")
        elif name != "type":
            yield f"{path}{name}", _packed(name, value)


def _packed(name: str, value: Any) -> Any:
    """Coordinates as one binary buffer: a tenth of the time that a list of numbers takes to be checked and written."""
    return np.array(value, np.float32) if value and name in ("x", "y") else value


@cache
def _script(plotly: str | None) -> str:
    """What the page runs, with plotly in it or not."""
    loader = files("memlab.jupyter").joinpath("figure_widget.mjs").read_text(encoding="utf-8")
    version = importlib.metadata.version("plotly")
    return f"const VERSION = {json.dumps(version)}, PLOTLY = {json.dumps(plotly)};\n{loader}"


@cache
def _widget_class() -> Any:
    """`FigureWidget`, without what a live figure cannot afford; made when first needed, since plotly is optional."""
    base: Any = importlib.import_module("plotly.graph_objects").FigureWidget
    integer: Any = importlib.import_module("traitlets").Integer

    class LiveFigureWidget(base):  # type: ignore[misc]
        # as a text: from a file, anywidget would connect every figure to it for good (its issue 929)
        _esm = _script(str(base._esm))
        # numbers that the browser repeats in the reports nobody reads: kept here, an update is half as many messages
        _last_layout_edit_id = integer(0)
        _last_trace_edit_id = integer(0)

        def __init__(self, lock: threading.RLock, drawn: Drawing) -> None:
            self._live_lock = lock
            self._is_made = False
            super().__init__(data=list(drawn.traces), layout=drawn.layout)
            self._config = _CONFIG
            self._is_made = True
            self.on_msg(self._answer)

        def _answer(self, _widget: Any, content: Mapping[str, Any], _buffers: object) -> None:
            if content.get("kind") == "plotly":
                self.send({"kind": "plotly"}, [str(base._esm).encode()])

        def set_state(self, sync_data: dict[str, Any]) -> None:
            """Take what the browser reports, never in the middle of an update."""
            wanted = {name: value for name, value in sync_data.items() if name not in _UNREAD}
            if wanted:
                with self._live_lock:
                    super().set_state(wanted)

        def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
            """The figure as it is: plotly's own state is the one it was made with, which a reloaded page would show.

            Such a page asks for plotly. The page that is there when the figure is made gets it with the figure, which
            is to be seen also while a cell keeps the kernel from answering.
            """
            with self._live_lock:
                state: dict[str, Any] = super().get_state(key, drop_defaults)
                if key is None and self._is_made:
                    now = self.to_dict()
                    state |= {"_widget_data": now["data"], "_widget_layout": now["layout"], "_esm": _script(None)}
                return state

        def _repr_mimebundle_(self, *args: Any, **more: Any) -> Any:
            with self._live_lock:
                return super()._repr_mimebundle_(*args, **more)

    return LiveFigureWidget
