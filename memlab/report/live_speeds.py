"""Throughput by setting in the live figure: a bar each."""

from __future__ import annotations

from html import escape
from typing import Any

from memlab.records.comparison import speed_ratio
from memlab.report.live_sheet import Setting, Sheet, shortened
from memlab.report.pareto import MEASURED
from memlab.report.segments import NEUTRAL_INK, finite
from memlab.report.wording import NOTHING, flag_lines, speed, then_change
from memlab.units import format_bytes

# of a bar's name and speed, so that they end where the picture does
_MOST_NAME_CHARACTERS = 38
_LEAST_PLAN_CHARACTERS = 14


def speed_traces(sheet: Sheet) -> list[dict[str, Any]]:
    """Return the bars, and the name of each."""
    return [_bars(sheet), _bar_names(sheet)]


def _bars(sheet: Sheet) -> dict[str, Any]:
    rates = [each.per_second for each in sheet.settings]
    spreads = [each.per_second * finite(each.measurement.spread) for each in sheet.settings]
    solid, weak = MEASURED.colour, _pale(MEASURED.colour, 0.6)
    return {
        "type": "bar", "orientation": "h", "xaxis": "x3", "yaxis": "y3", "showlegend": False, "width": 0.34,
        "x": rates, "y": list(range(len(rates))),
        "marker": {"color": [solid if each.in_force else weak for each in sheet.settings]},
        "error_x": {"type": "data", "array": spreads, "thickness": 1.2, "width": 3, "color": NEUTRAL_INK},
        "customdata": [_said(each) for each in sheet.settings], "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip


def _said(setting: Setting) -> str:
    plan = "<br>".join(flag_lines(escape(setting.measurement.plan), 48))
    peak = format_bytes(setting.measurement.peak_allocated_bytes)
    return f"{setting.number} · {plan}<br>{_speed(setting)}, peak {peak} allocated"


def _speed(setting: Setting) -> str:
    if not setting.measurement.fits:
        return "ran out of memory"
    said = speed(setting.measurement)
    return "not timed yet" if said == NOTHING else f"{said} samples/s"


def _bar_names(sheet: Sheet) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "text", "xaxis": "x3", "yaxis": "y3", "showlegend": False, "cliponaxis": False,
        "x": [0] * len(sheet.settings), "y": [row - 0.36 for row in range(len(sheet.settings))],
        "text": [_bar_name(each, sheet.settings[0]) for each in sheet.settings], "textposition": "middle right",
        "textfont": {"size": 11, "color": NEUTRAL_INK}, "hoverinfo": "skip",
    }  # fmt: skip


def _bar_name(setting: Setting, first: Setting) -> str:
    said = _speed(setting).removesuffix(" samples/s")
    if setting is not first:
        said += then_change(speed_ratio(setting.measurement, first.measurement))
    plan = escape(shortened(setting.measurement.plan, max(_LEAST_PLAN_CHARACTERS, _MOST_NAME_CHARACTERS - len(said))))
    name = f"{setting.number} · {plan}"
    return f"<b>▸ {name}</b>   {said}" if setting.in_force else f"{name}   {said}"


def _pale(colour: str, opacity: float) -> str:
    """A translucent version of a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
