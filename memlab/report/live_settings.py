"""Settings in the live figure: throughput of each that was tried, and the map of all, memory against throughput."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

from memlab.records import Fit
from memlab.records.comparison import speed_ratio
from memlab.records.live_state import Moment
from memlab.report.live_sheet import Setting, Sheet, told_apart
from memlab.report.pareto import DRAWN_IN_ORDER, LOOKS, MEASURED, PLAIN, Chart, PointLook, chart, hover
from memlab.report.segments import NEUTRAL_INK, finite, rgb, scale
from memlab.report.wording import NOTHING, flag_lines, speed, then_change

# of a bar's plan, so that it ends where the picture does
_MOST_NAME_CHARACTERS = 33
# of the picture's width: the rest is for their speeds
BARS_SHARE = 0.64


def speed_traces(sheet: Sheet) -> list[dict[str, Any]]:
    """Return the bars, and the name and the speed of each."""
    return [_bars(sheet), _bar_names(sheet), _bar_speeds(sheet)]


def _bars(sheet: Sheet) -> dict[str, Any]:
    rates = [each.per_second for each in sheet.settings]
    spreads = [each.per_second * finite(each.measurement.spread) for each in sheet.settings]
    solid, weak = MEASURED.colour, f"rgba({rgb(MEASURED.colour)},0.6)"
    return {
        "type": "bar", "orientation": "h", "xaxis": "x3", "yaxis": "y3", "showlegend": False, "width": 0.34,
        "x": rates, "y": list(range(len(rates))),
        "marker": {"color": [solid if each.in_force else weak for each in sheet.settings]},
        "error_x": {"type": "data", "array": spreads, "thickness": 1.2, "width": 3, "color": NEUTRAL_INK},
        "customdata": [_said(each) for each in sheet.settings], "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip


def _said(setting: Setting) -> str:
    plan = "<br>".join(flag_lines(escape(setting.measurement.plan), 48))
    return f"{setting.number} · {plan}<br>{_speed(setting)}, peak {setting.measurement.peak_text} allocated"


def _speed(setting: Setting) -> str:
    if not setting.measurement.fits:
        return "ran out of memory"
    said = speed(setting.measurement)
    return "not timed yet" if said == NOTHING else f"{said} samples/s"


def _bar_names(sheet: Sheet) -> dict[str, Any]:
    plans = [each.measurement.plan for each in sheet.settings]
    names = told_apart(plans, [_MOST_NAME_CHARACTERS] * len(plans))
    texts = [_bar_name(*each) for each in zip(sheet.settings, names, strict=True)]
    return _bar_words([0.0] * len(texts), [row - 0.36 for row in range(len(texts))], texts)


def _bar_speeds(sheet: Sheet) -> dict[str, Any]:
    """Speeds that the bars stand for, and where their whiskers end; how they were timed is in the table."""
    texts = [f"&nbsp; {_bar_speed(each, sheet.settings[0])}" for each in sheet.settings]
    ends = [each.per_second * (1 + finite(each.measurement.spread)) for each in sheet.settings]
    return _bar_words(ends, list(range(len(texts))), texts)


def _bar_words(x: list[float], y: Sequence[float], texts: list[str]) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "text", "xaxis": "x3", "yaxis": "y3", "showlegend": False, "cliponaxis": False,
        "x": x, "y": y, "text": texts, "textposition": "middle right", "hoverinfo": "skip",
        "textfont": {"size": 11, "color": NEUTRAL_INK},
    }  # fmt: skip


def _bar_speed(setting: Setting, first: Setting) -> str:
    said = re.split(r" samples/s$| \(| ±", _speed(setting))[0]
    return said if setting is first else said + then_change(speed_ratio(setting.measurement, first.measurement))


def _bar_name(setting: Setting, plan: str) -> str:
    name = f"{setting.number} · {escape(plan)}"
    return f"<b>▸ {name}</b>" if setting.in_force else name


# --- the map --------------------------------------------------------------------------------------------------------

_KEYS = {Fit.YES: "○ fits", Fit.UNCERTAIN: "◇ uncertain", Fit.NO: "□ does not fit"}
_WRAPPED = "%{customdata}<extra></extra>"


def predicted(moment: Moment) -> Chart:
    """The predictions of a moment, thinned and judged by its budget."""
    return chart(moment.predictions, moment.measurements, moment.budget_bytes)


def with_trials(known: Chart, moment: Moment) -> Chart:
    """The chart with the settings as they are measured by now."""
    points = {point.plan: point for point in known.points}
    trials = chart((), moment.measurements).trials
    return replace(known, trials=tuple(replace(each, predicted=points.get(each.plan)) for each in trials))


def map_traces(mapped: Chart, in_force: str) -> list[dict[str, Any]]:
    """Predictions, the best of them, trials with their numbers, and a ring around the plan that is `in_force`."""
    unit, _ = scale(mapped.most_bytes)
    return [
        *(_points(mapped, look, unit) for look in DRAWN_IN_ORDER),
        _front(mapped, unit),
        _connections(mapped, unit),
        _tried(mapped, unit),
        _ring(mapped, in_force, unit),
    ]


def _mark(places: Sequence[tuple[float, float]], unit: int, **more: Any) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "xaxis": "x4", "yaxis": "y4", "showlegend": False,
        "x": [round(size / unit, 4) for size, _ in places], "y": [per_second for _, per_second in places], **more,
    }  # fmt: skip


def _points(mapped: Chart, look: PointLook, unit: int) -> dict[str, Any]:
    points = [point for point in mapped.points if point.look is look]
    outline = {"width": 1.5, "color": look.colour}
    return _mark(
        [(point.memory_bytes, point.per_second) for point in points], unit, name=look.name,
        marker={"symbol": look.symbol, "color": look.colour, "size": 7, "line": outline},
        customdata=[escape(hover(point)) for point in points], hovertemplate=_WRAPPED,
    )  # fmt: skip


def _front(mapped: Chart, unit: int) -> dict[str, Any]:
    places = [(point.memory_bytes, point.per_second) for point in mapped.front] if len(mapped.front) > 1 else []
    line = {"color": NEUTRAL_INK, "width": 1.2, "shape": "hv"}
    return _mark(places, unit, name="best of both") | {"mode": "lines", "line": line, "hoverinfo": "skip"}


def _connections(mapped: Chart, unit: int) -> dict[str, Any]:
    """Return the lines from what was predicted to what was measured."""
    pairs = [(trial.predicted, trial) for trial in mapped.trials if trial.predicted and not trial.ran_out]
    line = {"color": MEASURED.colour, "width": 1.4, "dash": "dot"}
    return _mark([], unit, name="off by") | {
        "mode": "lines", "line": line, "hoverinfo": "skip",
        "x": [place for was, now in pairs for place in (was.memory_bytes / unit, now.memory_bytes / unit, None)],
        "y": [place for was, now in pairs for place in (was.per_second, now.per_second, None)],
    }  # fmt: skip


def _tried(mapped: Chart, unit: int) -> dict[str, Any]:
    """Full marks with the number of the setting; a cross where it ran out of memory."""
    trials = mapped.trials
    return _mark(
        [trial.place for trial in trials], unit, name="tried", mode="markers+text",
        marker={"symbol": ["x" if trial.ran_out else "circle" for trial in trials], "size": 16, "color": MEASURED.colour},
        text=[str(number) for number in range(1, len(trials) + 1)], textposition="middle center",
        textfont={"size": 10, "color": "#FFFFFF"},
        customdata=[f"{number} · {escape(hover(trial))}" for number, trial in enumerate(trials, 1)],
        hovertemplate=_WRAPPED,
    )  # fmt: skip


def _ring(mapped: Chart, in_force: str, unit: int) -> dict[str, Any]:
    ringed = [trial.place for trial in mapped.trials if trial.plan == in_force]
    marker = {"symbol": "circle-open", "size": 25, "color": NEUTRAL_INK, "line": {"width": 2.5, "color": NEUTRAL_INK}}
    return _mark(ringed, unit, name="in force", marker=marker) | {"hoverinfo": "skip"}


def map_key(mapped: Chart) -> str:
    """The marks, explained in one line that fits a narrow window."""
    used = {point.look for point in mapped.points}
    looks = [(look, _KEYS[fit]) for fit, look in LOOKS.items()] + [(PLAIN, "○ predicted")]
    words = [_coloured(text, look.colour) for look, text in looks if look in used]
    if words and PLAIN not in used:
        words[0] = f"predicted: {words[0]}"
    words += ["─ best of both"] * (len(mapped.front) > 1)
    words += [_coloured("● tried", MEASURED.colour)] * bool(mapped.trials)
    return "&nbsp; ".join(words)


def _coloured(text: str, colour: str) -> str:
    glyph, _, words = text.partition(" ")
    return f'<span style="color:{colour}">{glyph}</span> {words}'
