"""`SavedView`: the panel as a table and a picture, for pages without its kernel; and as text where there are no widgets."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from uuid import uuid4

from memlab.errors import PlanError
from memlab.extras import available
from memlab.jupyter import display
from memlab.live.effects import effect_of
from memlab.live.source import Source
from memlab.plan import FIELDS
from memlab.records import Measurement
from memlab.records.comparison import Comparison
from memlab.records.live_state import Activity, Moment
from memlab.report import html, image, tables, text
from memlab.report.table import Table

_MOST_EVENTS = 6
_RUNS = (
    "as it was when this run began; on a page that is loaded again meanwhile, the panel comes back when the run is over"
)


class SavedView:
    """A display below a panel, which a page hides as long as the panel is alive there; by itself where there are no widgets.

    It is brought up to date where no cell trains, and once when one begins to: a notebook that is saved then has what was
    measured last, and a page that is loaded again meanwhile, on which the panel comes back when the cell is over, says so.
    """

    # with a run to follow by itself, from now on and until it is closed
    def __init__(self, source: Source | None = None) -> None:
        self.name = uuid4().hex  # by which a panel hides it
        self._display = ""
        self._shown: object = None
        self._picture: tuple[tuple[Measurement, ...], str] = ((), "")  # and what of
        self._end: Callable[[], None] | None = None
        if source is not None:
            self.show(source.moment())
            self._end = source.watch(self.update)

    def show(self, moment: Moment) -> None:
        """Show it below what is displayed so far in this cell."""
        self._display, self._shown = uuid4().hex, _key(moment)
        formats, metadata = self._formats(moment)
        display.show(formats, display_id=self._display, raw=True, metadata=metadata)

    def update(self, moment: Moment) -> None:
        """Bring it up to date; nothing before it is shown."""
        if self._display and _key(moment) != self._shown:
            self._shown = _key(moment)
            formats, metadata = self._formats(moment)
            display.replace_shown(formats, display_id=self._display, raw=True, metadata=metadata)

    def close(self) -> None:
        """Follow the run no longer; what is shown stays."""
        if self._end is not None:
            self._end()

    def _formats(self, moment: Moment) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
        """Return it in the formats that pages show, and what they are told about them."""
        tried = _tried(moment)
        shown = [_settings(moment), *([tables.comparison(tried)] if tried else [])]
        formats = {
            "text/html": f'<div class="memlab-still-{self.name}">{"".join(map(html.table, shown))}</div>',
            "text/plain": "\n\n".join(map(text.table, shown)),
        }
        is_idle = moment.activity is Activity.IDLE  # a loop is not to wait for a picture
        if is_idle and tried is not None and len(tried.measurements) > 1 and available("matplotlib"):
            if moment.measurements != self._picture[0]:  # a click is not to wait for it: it takes a fifth of a second
                self._picture = (moment.measurements, b64encode(image.png(tried)).decode())
            formats["image/png"] = self._picture[1]
            return formats, {"image/png": {"alt": text.summary(tried)}}
        return formats, {}


def _key(moment: Moment) -> object:
    """Return what of a moment makes another picture of it: all runs are one, whatever they do."""
    return (moment.plan, moment.measurements) if moment.activity is Activity.IDLE else "runs"


def as_text(moment: Moment) -> str:
    """Return what a panel shows, as text, where there are no widgets."""
    return text.table(_settings(moment))


def tried_as_html(moment: Moment) -> str:
    """Return the numbers of what was tried as a table; empty when nothing was."""
    tried = _tried(moment)
    return html.table(tables.comparison(tried)) if tried is not None else ""


def _tried(moment: Moment) -> Comparison | None:
    """Return the settings that were measured, and what happened."""
    if not moment.measurements:
        return None
    return Comparison("settings tried", moment.measurements, tuple(moment.events[-_MOST_EVENTS:]), moment.predictions)


def _settings(moment: Moment) -> Table:
    """Every setting: what it is, what it could be instead, what that gives where anything is predicted, and the magic for it."""
    heads: tuple[str, ...] = ("setting", "now", "instead", "gives", "by")
    rows: list[tuple[str, ...]] = []
    has_effects = False
    for spec, toggle in zip(FIELDS, moment.toggles, strict=True):
        is_off = toggle.value == spec.choices[0]
        instead = spec.offer if is_off else spec.choices[0]
        effect = effect_of(moment, spec.name, instead if is_off else toggle.value)
        has_effects |= effect is not None and not effect.refused
        gives = "not predicted"
        if effect is not None:
            gives = effect.text if is_off or effect.refused else f"no more {effect.text}"
        try:
            magic = f"%memfit {str(moment.plan.with_setting(spec.name, instead)) or 'undo'}"
        except PlanError:
            magic = "excludes another setting"
        rows.append((spec.title, toggle.value, instead, gives, magic))
    if not has_effects:
        heads, rows = (*heads[:3], heads[4]), [(*row[:3], row[4]) for row in rows]
    foot = (moment.status,) if moment.activity is Activity.IDLE else (moment.status, _RUNS)
    return tables.of_texts(moment.title, heads, rows, words=heads, foot=foot)
