"""The controls of a panel: one row per field of a plan, and the buttons below; all of them only ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from memlab.extras import require
from memlab.live.effects import effect_of
from memlab.live.source import Can, Source
from memlab.plan import PlanField
from memlab.records.live_state import Activity, Asked, Moment
from memlab.report.segments import scale

Widget = Any
Guard = Callable[[Callable[[Any], None]], Callable[[Any], None]]

_MARKS = {Asked.IDLE: "", Asked.PENDING: "…", Asked.APPLIED: "✓", Asked.REFUSED: "✕"}
_BUDGET_STEPS = 200


class SettingRow:
    """A check box and a choice for one field, with what it gives and what has become of it."""

    def __init__(self, spec: PlanField, source: Source, guarded: Guard) -> None:
        widgets = require("ipywidgets")
        self._spec = spec
        self._source = source
        self._on_texts = spec.choices[1:]
        self.box = widgets.Checkbox(description=spec.title, indent=False, tooltip=spec.help, layout={"width": "180px"})
        self.choice = widgets.Dropdown(
            options=self._options(), value=spec.offer, tooltip=f"{spec.title}: {spec.help}", layout={"width": "148px"}
        )
        self.choice.add_class(self.class_name)
        self._has_choice = len(self._on_texts) > 1
        self.choice.layout.visibility = "visible" if self._has_choice else "hidden"
        self.effect = widgets.HTML(layout={"margin": "0", "width": "auto"})
        self.state = widgets.HTML(layout={"margin": "0", "width": "auto"})
        self.widget = widgets.VBox([
            widgets.HBox([self.box, self.choice], layout={"align_items": "center"}),
            widgets.HBox([self.effect, self.state], layout={"flex_flow": "row wrap", "margin": "-3px 0 1px 24px", "min_height": "4px", "grid_gap": "0 8px"}),
        ], layout={"flex": "1 1 336px"})  # fmt: skip
        self.box.observe(guarded(self._flipped), "value")
        self.choice.observe(guarded(self._chosen), "value")

    @property
    def class_name(self) -> str:
        """Of the choice in the page, where its label is put."""
        return f"memlab-choice-{self._spec.name}"

    @property
    def label(self) -> str:
        """Of the choice, for screen readers."""
        return f"{self._spec.title}, which"

    def draw(self, moment: Moment) -> None:
        """Show what is in force, what was asked for and what it gives."""
        toggle = next(each for each in moment.toggles if each.field == self._spec.name)
        shown = toggle.wanted if toggle.asked is Asked.PENDING else toggle.value
        is_on = shown != self._spec.choices[0]
        if is_on and shown not in self._on_texts:
            self._on_texts = (*self._on_texts, shown)  # a value of a magic that no choice stands for
            self.choice.options = self._options()
        is_over = moment.activity is Activity.GONE
        put(self.box, value=is_on, disabled=is_over)
        put(self.choice, disabled=is_over)
        if is_on:
            put(self.choice, value=shown)
        effect = effect_of(moment, self._spec.name, self.choice.value)
        text = effect.text if effect is not None else ""
        put(self.effect, value=_small(text, effect.refused if effect is not None else "", opacity=0.8))
        mark = "" if toggle.is_off else _MARKS[toggle.asked]
        said = f"{mark} {toggle.text}".strip()
        put(self.state, value=_small(said))
        self.state.layout.display = "" if said else "none"

    def _options(self) -> list[tuple[str, str]]:
        return [(self._spec.names.get(text, text), text) for text in self._on_texts]

    def _flipped(self, change: Mapping[str, Any]) -> None:
        self._source.ask(self._spec.name, self.choice.value if change["new"] else self._spec.choices[0])

    def _chosen(self, change: Mapping[str, Any]) -> None:
        if self.box.value:
            self._source.ask(self._spec.name, change["new"])


class BudgetRow:
    """The budget: a slider over the sizes that matter here."""

    def __init__(self, source: Source, guarded: Guard) -> None:
        widgets = require("ipywidgets")
        self._source = source
        self._unit = 0
        self.slider = widgets.FloatSlider(
            description="Budget", min=0, max=1, value=1, step=0.01, readout_format=".2f", continuous_update=False,
            disabled=True, layout={"width": "280px"}, tooltip="memory that a setting must fit into; at the end of the scale, no limit",
        )  # fmt: skip
        self._said = widgets.HTML()
        self.widget = widgets.HBox([self.slider, self._said], layout={"align_items": "center"})
        self.slider.observe(guarded(self._moved), "value")

    def draw(self, moment: Moment) -> None:
        """Show the budget, once sizes are known."""
        most_bytes = _most_bytes(moment)
        if not most_bytes:
            put(self._said, value=_faint("known after the first step"))
            return
        unit, name = scale(most_bytes)
        if unit != self._unit or self.slider.disabled or most_bytes > self.slider.max * unit * 1.001:
            self._unit = unit
            self._stretch(most_bytes / unit * (1 if moment.capacity_bytes == most_bytes else 1.1))
            self.slider.disabled = False
            put(self.slider, value=self.slider.max)
        if moment.budget_bytes is not None:
            put(self.slider, value=round(moment.budget_bytes / unit, 4))
        put(self.slider, readout=moment.budget_bytes is not None)
        put(self._said, value=_faint(name if moment.budget_bytes is not None else "none"))

    def _stretch(self, most: float) -> None:
        with self.slider.hold_trait_notifications():
            self.slider.max = most
            self.slider.step = most / _BUDGET_STEPS
            self.slider.value = most

    def _moved(self, change: Mapping[str, Any]) -> None:
        is_none = change["new"] >= self.slider.max
        self._source.set_budget(None if is_none else round(change["new"] * self._unit))


class RunRow:
    """Buttons: run, pause, cancel; find a plan, copy as code, undo."""

    def __init__(self, source: Source, guarded: Guard, copy: Callable[[str], None], targets: tuple[str, ...]) -> None:
        widgets = require("ipywidgets")
        self._source = source

        def button(text: str, tooltip: str, clicked: Callable[[], None]) -> Any:
            made = widgets.Button(description=text, tooltip=tooltip, layout={"width": "auto"})
            made.on_click(guarded(lambda _button: clicked()))
            return made

        self.run = button("Run", "train on the current batch and measure it", self._run)
        self.keep = widgets.Checkbox(
            description="keep what it trains", indent=False, layout={"width": "160px"},
            tooltip="off: weights, moments and random state are put back when the run ends",
        )  # fmt: skip
        self.pause = button("Pause", "pause the run before its next step", self._pause)
        self.cancel = button("Cancel", "end the run before its next step", source.cancel)
        self.find = button("Find a plan", "the fastest plan predicted to fit the budget", source.find)
        self.undo = button("Undo all", "restore the model as it was", source.undo)
        self.target = widgets.Dropdown(options=targets, layout={"width": "96px"}, tooltip="Copy as code: for what")
        self.target.add_class("memlab-choice-target")
        self.copy = button("Copy as code", "the settings in force as code", lambda: copy(self.target.value))
        self.rows = (
            widgets.HBox([self.run, self.pause, self.cancel, self.keep], layout={"flex_flow": "row wrap"}),
            widgets.HBox([self.find, self.undo, self.copy, self.target], layout={"flex_flow": "row wrap"}),
        )

    def draw(self, moment: Moment, can: Can) -> None:
        """Grey out what cannot be asked for."""
        put(self.run, disabled=Can.RUN not in can)
        put(self.keep, disabled=Can.RUN not in can)
        put(self.pause, disabled=not can & (Can.PAUSE | Can.RESUME))
        put(self.pause, description="Resume" if Can.RESUME in can else "Pause")
        put(self.cancel, disabled=Can.CANCEL not in can)
        put(self.find, disabled=Can.FIND not in can or moment.budget_bytes is None)
        put(self.undo, disabled=Can.UNDO not in can)

    def _run(self) -> None:
        self._source.run(keep=self.keep.value)

    def _pause(self) -> None:
        if Can.RESUME in self._source.can():
            self._source.resume()
        else:
            self._source.pause()


def _most_bytes(moment: Moment) -> int:
    """The largest size that anything here is known to have."""
    if moment.capacity_bytes is not None:
        return moment.capacity_bytes
    sizes = [each.peak_allocated_bytes for each in moment.measurements]
    sizes += [each.needed_bytes for each in moment.predictions if not each.refused]
    return max(sizes, default=0)


def put(widget: Widget, **values: Any) -> None:
    """Set what differs: every set trait is a message to the page."""
    for name, value in values.items():
        if getattr(widget, name) != value:
            setattr(widget, name, value)


def _faint(text: str) -> str:
    return f'<span style="opacity:.8;font-size:12px;white-space:nowrap">{escape(text)}</span>' if text else ""


def _small(text: str, title: str = "", *, opacity: float = 1.0) -> str:
    style = f"font-size:12px;line-height:1.35;opacity:{opacity}"
    return f'<div style="{style}" title="{escape(title)}">{escape(text)}</div>' if text else ""
