"""`Panel`: the widgets through which a run is looked at and steered.

1. Callbacks only ask (`memlab.live.source.Source`) and return in milliseconds, on whatever thread the front end's
   message comes in.
2. Whoever has something to show calls `draw` with a `Moment`; only what differs is sent to the page.
3. What goes wrong in a callback is shown in the panel: ipywidgets would swallow it.
4. The panel knows its source and no model. It is closed when its cell is run again, and lets go of everything then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from html import escape
from typing import Any

from memlab.errors import PlanError
from memlab.exporting import TARGETS, export
from memlab.extras import require
from memlab.jupyter.comms import Hearing, let_through, tree
from memlab.jupyter.controls import BudgetRow, RunRow, SettingRow, put
from memlab.jupyter.figure_widget import LiveFigure
from memlab.jupyter.status import status_class
from memlab.live.effects import effect_of
from memlab.live.source import Source
from memlab.plan import FIELDS, Plan
from memlab.records.comparison import Comparison
from memlab.records.live_state import Activity, Asked, Moment
from memlab.report import html, tables
from memlab.units import format_bytes

_MOST_EVENTS = 6
_MAGIC = "magic"


def require_widgets() -> None:
    """Import what a panel is made of.

    Raises:
        MissingExtraError: something of it is not installed.
    """
    for package in ("ipywidgets", "anywidget", "plotly"):
        require(package)


class Panel:
    """A view of a run, with controls.

    Raises:
        MissingExtraError: ipywidgets, anywidget or plotly is not installed.
    """

    def __init__(self, source: Source, hearing: Hearing | None = None) -> None:
        require_widgets()
        widgets = require("ipywidgets")
        self._source = source
        self._hearing = hearing or Hearing(None)
        self._lock = threading.RLock()
        self._drawing: int | None = None  # the thread that sets widgets, whose callbacks are not clicks
        self._is_closed = False
        self._frame = -1
        self._errors: list[str] = []
        self._settings = [SettingRow(spec, source, self._guarded) for spec in FIELDS]
        self._budget = BudgetRow(source, self._guarded)
        self._buttons = RunRow(source, self._guarded, self._copy, (_MAGIC, *TARGETS))
        self._title = widgets.HTML()
        self._code = widgets.Textarea(
            layout={"display": "none", "width": "100%", "height": "170px"}, description="Code"
        )
        self._figure = LiveFigure()
        self._table = widgets.HTML()
        self._status = status_class()(names=self._names())
        self._status.on_msg(self._heard)
        self.widget = self._arranged(widgets)
        self._undo = ExitStack()
        self._undo.callback(let_through(self.widget))
        self._undo.callback(source.watch(self.draw))
        self.draw(source.moment())

    def draw(self, moment: Moment) -> None:
        """Show a moment: settings and the status always, figure and table where the moment has new ones."""
        with self._lock:
            if self._is_closed:
                return
            self._drawing = threading.get_ident()
            try:
                self._draw_settings(moment)
                if moment.frame != self._frame:
                    self._frame = moment.frame
                    self._draw_figures(moment)
                if moment.activity is Activity.GONE:
                    self._figure.close()
            finally:
                self._drawing = None

    def close(self) -> None:
        """Take the panel off the page and let go of the run; harmless when done."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._undo.close()
        self._figure.close()
        for widget in tuple(tree(self.widget)):
            widget.unobserve_all()
            widget.close()

    def closing(self, done: Callable[[], None]) -> None:
        """Have something done when the panel closes."""
        self._undo.callback(done)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        bundle = self.widget._repr_mimebundle_(**options)
        data, *metadata = bundle if isinstance(bundle, tuple) else (bundle,)
        # for pages that show no widgets, and for the saved notebook
        data["text/plain"] = as_text(self._source)
        return (data, *metadata) if metadata else data

    # -- drawing -------------------------------------------------------------------------------

    def _draw_settings(self, moment: Moment) -> None:
        put(self._title, value=f"<b>{escape(moment.title)}</b>")
        for row in self._settings:
            row.draw(moment)
        self._budget.draw(moment)
        self._buttons.draw(moment, self._source.can())
        put(self._status, line=moment.status)
        put(self._status, world=moment.world or self._hearing.words())
        put(self._status, said=_spoken(moment))
        put(self._status, errors="\n".join((*moment.errors, *self._errors)))

    def _draw_figures(self, moment: Moment) -> None:
        self._figure.show(moment)
        put(self._table, value=_table(moment))

    def _arranged(self, widgets: Any) -> Any:
        controls = widgets.VBox(
            [
                widgets.Box([row.widget for row in self._settings], layout={"flex_flow": "row wrap"}),
                self._budget.widget,
                *self._buttons.rows,
                self._status,
                self._code,
            ],
            # beside the figure as narrow as that, below each other as wide as the page
            layout={"flex": "1 1 350px"},
        )
        controls.add_class("memlab-controls")
        figure = widgets.Box([self._figure.widget], layout={"flex": "999 1 520px", "min_width": "min(520px, 100%)"})
        panel = widgets.VBox([
            self._title,
            widgets.Box([controls, figure], layout={"display": "flex", "flex_flow": "row wrap", "align_items": "flex-start"}),
            self._table,
        ])  # fmt: skip
        panel.add_class("memlab-panel")
        return panel

    def _names(self) -> dict[str, str]:
        return {row.class_name: row.label for row in self._settings} | {
            "memlab-choice-target": "Copy as code, for what"
        }

    # -- callbacks -----------------------------------------------------------------------------

    def _guarded(self, react: Callable[[Any], None]) -> Callable[[Any], None]:
        """A callback that is deaf to what the panel itself sets, and tells its errors in the panel."""

        def callback(change: Any) -> None:
            if self._drawing == threading.get_ident() or self._is_closed:
                return
            self._hearing.heard()
            try:
                react(change)
            except Exception as error:  # noqa: BLE001 - ipywidgets would log it where nobody looks
                self._tell(f"{type(error).__name__}: {error}")

        return callback

    def _heard(self, _widget: Any, message: dict[str, Any], _buffers: Any) -> None:
        self._hearing.heard()
        if message.get("kind") == "drawn":
            self._figure.send_again()
            return
        if message.get("kind") == "not copied":
            self._tell("the browser did not let the code be copied: it stands below")
        self.draw(self._source.moment())

    def _copy(self, target: str) -> None:
        plan = self._source.moment().plan
        code = f"%%memfit {plan}".strip() if target == _MAGIC else export(plan, target)
        self._code.value = code
        self._code.layout.display = ""
        self._status.copied = ""
        self._status.copied = code

    def _tell(self, words: str) -> None:
        self._errors = [*self._errors, words.splitlines()[0]][-3:]
        self.draw(self._source.moment())


def as_text(source: Source) -> str:
    """Return what a panel shows, as text, where there are no widgets: every setting, what it gives, and the magic for it."""
    moment = source.moment()
    lines = [moment.title, f"{'setting':<22}{'now':<16}{'instead':<16}{'gives':<36}by"]
    for spec, toggle in zip(FIELDS, moment.toggles, strict=True):
        is_off = toggle.value == spec.choices[0]
        instead = spec.offer if is_off else spec.choices[0]
        effect = effect_of(moment, spec.name, instead if is_off else toggle.value)
        gives = "not predicted" if effect is None else effect.text if is_off else f"no more {effect.text}"
        by = _magic_for(moment.plan, spec.name, instead)
        lines.append(f"{spec.title:<22}{toggle.value:<16}{instead:<16}{gives:<36}{by}")
    return "\n".join((*lines, moment.status))


def _magic_for(plan: Plan, field: str, text: str) -> str:
    try:
        flags = str(plan.with_setting(field, text))
    except PlanError:
        return "excludes another setting"
    return f"%memfit {flags or 'undo'}"


def _table(moment: Moment) -> str:
    """The numbers of the figure as a table, and what happened."""
    if not moment.measurements:
        return ""
    events = tuple(moment.events[-_MOST_EVENTS:])
    return html.table(tables.comparison(Comparison("settings tried", moment.measurements, events, moment.predictions)))


def _spoken(moment: Moment) -> str:
    """Return what a screen reader is told: what has become of settings, and not every step."""
    said = [f"{toggle.field} {toggle.text}" for toggle in moment.toggles if toggle.asked is not Asked.IDLE]
    measured = moment.measured(moment.plan.label)
    if measured is not None:
        said.append(f"peak {format_bytes(measured.peak_allocated_bytes)}")
    return "; ".join([str(moment.activity), *said])
