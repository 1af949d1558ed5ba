"""The map of the live figure: memory against throughput of every setting that was predicted or tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

from memlab.records import Fit
from memlab.records.live_state import Moment
from memlab.report.pareto import LOOKS, MEASURED, PLAIN, Chart, PointLook, chart, hover
from memlab.report.segments import NEUTRAL_INK, scale

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
    looks = [LOOKS[Fit.NO], LOOKS[Fit.UNCERTAIN], LOOKS[Fit.YES], PLAIN]
    return [
        *(_points(mapped, look, unit) for look in looks),
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
