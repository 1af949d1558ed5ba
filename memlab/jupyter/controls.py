"""`Controls`: what a panel's controls show of a moment, as plain values, and what is asked by using one.

There is a row per field of a plan, a budget, and buttons. They only ask; how they look is the page's affair (`panel.mjs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memlab.exporting import TARGETS
from memlab.live.effects import effect_of
from memlab.live.source import NEEDS_LOSS, Can, Source
from memlab.plan import FIELDS, PlanField
from memlab.records.live_state import Activity, Asked, Moment
from memlab.units import format_bytes

MAGIC = "magic"

_MARKS = {Asked.IDLE: "", Asked.PENDING: "…", Asked.APPLIED: "✓", Asked.REFUSED: "✕"}
_BUDGET_STEPS = 200
_MOST_VIEWS = 8  # of one panel whose messages are counted
_RUN_STEPS, _MOST_RUN_STEPS = 20, 1_000_000
# name, words and tooltip of every button, in its row
_BUTTONS = (
    {
        "run": ("Run", "train on the current batch for so many steps, and measure it"),
        "pause": ("Pause", "pause the run before its next step"),
        "cancel": ("Cancel", "end the run before its next step"),
    },
    {
        "find": ("Find a plan", "the fastest plan predicted to fit the budget"),
        "undo": ("Undo all", "restore the model as it was"),
        "copy": ("Copy as code", "the settings in force as code"),
    },
)
_NEEDS_BATCH = "needs a batch (train a step with %%memfit first), and no cell that runs in the background"
_FAREWELL = (
    "This panel is no longer connected: its kernel was restarted or has closed the panel. Run the "
    "cell again, or %memfit panel, for a new one."
)


def fixed() -> dict[str, Any]:
    """Return what never changes: names, tooltips, and what is said when the kernel is gone."""
    return {
        "settings": [{"name": spec.name, "title": spec.title, "help": spec.help} for spec in FIELDS],
        "buttons": [{name: {"text": text, "help": said} for name, (text, said) in row.items()} for row in _BUTTONS],
        "targets": [MAGIC, *TARGETS],
        "budget": {"steps": _BUDGET_STEPS, "help": "memory that a setting must fit into; at the end of the scale, no limit"},
        "steps": {"most": _MOST_RUN_STEPS, "help": "steps that Run makes; empty: until Cancel"},
        "farewell": _FAREWELL,
    }  # fmt: skip


class Controls:
    """Choices in a panel that are not asked for yet, and the words beside its controls."""

    def __init__(self, source: Source, copy: Callable[[str], None]) -> None:
        self._source = source
        self._choices = {spec.name: spec.offer for spec in FIELDS}
        self._texts = {spec.name: tuple(spec.choices[1:]) for spec in FIELDS}
        self._is_on = dict.fromkeys(self._choices, False)
        self._keeps = False
        self._steps: int | None = _RUN_STEPS
        self._target = MAGIC
        self._most_bytes = 0
        self._heard: dict[str, int] = {}
        self._presses: dict[str, Callable[[], None]] = {
            "run": lambda: source.run(keep=self._keeps and Can.AS_RECORDED not in source.can(), steps=self._steps),
            "pause": lambda: source.resume() if Can.RESUME in source.can() else source.pause(),
            "cancel": source.cancel,
            "find": source.find,
            "undo": source.undo,
            "copy": lambda: copy(self._target),
        }

    # -- what is shown -------------------------------------------------------------------------

    def state(self, moment: Moment) -> dict[str, Any]:
        """Everything that controls show of a moment."""
        can = self._source.can()
        return {
            "title": moment.title,
            "settings": [self._setting(spec, moment) for spec in FIELDS],
            "budget": self._budget(moment),
            "off": {name: why for name, why in _reasons(can, moment).items() if why is not None},
            "pause": "Resume" if Can.RESUME in can else "Pause",
            "keep": self._keeps,
            "steps": self._steps or "",
            "target": self._target,
            "over": moment.activity is Activity.GONE,
            "heard": dict(self._heard),
        }

    def _setting(self, spec: PlanField, moment: Moment) -> dict[str, Any]:
        """One field: what is in force or asked for, what it gives and what has become of it."""
        toggle = next(each for each in moment.toggles if each.field == spec.name)
        shown = toggle.wanted if toggle.asked is Asked.PENDING else toggle.value
        self._is_on[spec.name] = is_on = shown != spec.choices[0]
        if is_on:
            self._choices[spec.name] = shown
            if shown not in self._texts[spec.name]:
                self._texts[spec.name] += (shown,)  # a value of a magic that no choice stands for
        effect = effect_of(moment, spec.name, self._choices[spec.name])
        mark = "" if toggle.is_off else _MARKS[toggle.asked]
        return {
            "on": is_on,
            "choice": self._choices[spec.name],
            "choices": [[spec.names.get(text, text), text] for text in self._texts[spec.name]],
            "effect": effect.text if effect is not None else "",
            "why": effect.refused if effect is not None else "",
            "said": f"{mark} {toggle.text}".strip(),
        }

    def _budget(self, moment: Moment) -> dict[str, Any]:
        """The budget on a scale of the sizes that matter here."""
        most_bytes = _most_bytes(moment)
        if most_bytes and moment.capacity_bytes is None:
            # room beyond what is known, in leaps: a scale that grows with every step cannot be read
            most_bytes = self._most_bytes if most_bytes <= self._most_bytes else round(1.1 * most_bytes)
        self._most_bytes = most_bytes
        if not most_bytes:
            return {"known": False, "position": _BUDGET_STEPS, "text": "known after the first step"}
        if moment.budget_bytes is None:
            return {"known": True, "position": _BUDGET_STEPS, "text": "none"}
        position = min(round(_BUDGET_STEPS * moment.budget_bytes / most_bytes), _BUDGET_STEPS)
        return {"known": True, "position": position, "text": format_bytes(moment.budget_bytes)}

    # -- what is asked -------------------------------------------------------------------------

    def do(self, message: Mapping[str, Any]) -> None:
        """Do what a message of the page asks; one that asks for nothing here is passed over."""
        match message:
            case {"kind": "flip", "field": str(field), "on": bool(is_on)} if field in self._choices:
                spec = next(spec for spec in FIELDS if spec.name == field)
                self._source.ask(field, self._choices[field] if is_on else spec.choices[0])
            case {"kind": "choose", "field": str(field), "text": str(text)} if text in self._texts.get(field, ()):
                self._choices[field] = text
                if self._is_on[field]:
                    self._source.ask(field, text)
            case {"kind": "budget", "position": int(position)}:
                is_none = position >= _BUDGET_STEPS
                self._source.set_budget(None if is_none else round(max(1, position) / _BUDGET_STEPS * self._most_bytes))
            case {"kind": "keep", "on": bool(keeps)}:
                self._keeps = keeps
            case {"kind": "steps", "count": int(count)} if 0 <= count <= _MOST_RUN_STEPS:
                self._steps = count or None
            case {"kind": "target", "text": str(text)} if text in (MAGIC, *TARGETS):
                self._target = text
            case {"kind": "press", "button": str(button)} if button in self._presses:
                self._presses[button]()

    def heard(self, message: Mapping[str, Any]) -> None:
        """Note that a message has been dealt with: the page then shows what has become of it."""
        match message:
            case {"view": str(view), "number": int(number)}:
                self._heard.pop(view, None)
                self._heard[view] = number
                while len(self._heard) > _MOST_VIEWS:
                    del self._heard[next(iter(self._heard))]


def _reasons(can: Can, moment: Moment) -> dict[str, str | None]:
    """Reasons why buttons are greyed out, empty where they are plain; None for a button that can be pressed."""
    unknown = _NEEDS_BATCH if Can.UNDO in can and Can.CANCEL not in can else ""
    run = None if Can.RUN in can else NEEDS_LOSS if Can.PREDICT in can else unknown
    return {
        "run": run,
        "steps": "a recording is played to its end" if run is None and Can.PREDICT not in can else run,
        "keep": NEEDS_LOSS if Can.AS_RECORDED in can else run,
        "pause": None if can & (Can.PAUSE | Can.RESUME) else "",
        "cancel": None if Can.CANCEL in can else "",
        "find": unknown if Can.FIND not in can else "set a budget first" if moment.budget_bytes is None else None,
        "undo": None if Can.UNDO in can else "",
    }


def _most_bytes(moment: Moment) -> int:
    """The largest size that anything here is known to have."""
    if moment.capacity_bytes is not None:
        return moment.capacity_bytes
    sizes = [each.peak_allocated_bytes for each in moment.measurements]
    sizes += [each.needed_bytes for each in moment.predictions if not each.refused]
    most = max(sizes, default=0)
    return max(most, moment.budget_bytes or 0) if most else 0
