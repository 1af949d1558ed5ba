"""Memory against throughput as a live figure: the twin of the picture, with every plan's numbers on hover."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from memlab.extras import require
from memlab.records import Fit
from memlab.report.figure import BUDGET, NEUTRAL_INK, axis, bare_layout, pale
from memlab.report.pareto import FOUND_RING, LOOKS, MEASURED, PLAIN, Chart, Look, Point, Trial, axis_names, hover
from memlab.report.segments import scale
from memlab.report.wording import flag_lines
from memlab.units import format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# with more points than this, intervals are drawn for the front alone
_MOST_INTERVALS = 40


def figure(chart: Chart, ink: str = NEUTRAL_INK) -> Figure:
    """Draw predictions as open marks, their Pareto front as a line, trials as filled marks, the budget as a line.

    Args:
        chart: from `memlab.report.pareto.chart` or `found_chart`.
        ink: colour of text; the default reads on light and dark.

    Returns:
        A plotly figure on a transparent background; its layout's `meta` holds the alternative text.

    Raises:
        MissingExtraError: plotly is not installed.

    Example:
        >>> from memlab.records import Prediction
        >>> from memlab.report.pareto import chart
        >>> p = Prediction("as written", "T4", 2**30, None, 0, {}, (), 0.5, 8, 0, (2**30, 2**30), (0.5, 0.5))
        >>> figure(chart([p])).layout.xaxis.title.text
        'peak memory allocated, GiB'
    """
    require("plotly")
    go = importlib.import_module("plotly.graph_objects")
    unit, name = scale(chart.most_bytes)
    memory_name, speed_name = axis_names(chart)
    drawn = go.Figure([*_point_traces(go, chart, unit), *_front(go, chart, unit, ink), *_trial_traces(go, chart, unit)])
    drawn.update_layout(
        **bare_layout(ink), height=430, meta={"description": chart.description},
        xaxis=axis(f"{memory_name}, {name}", range=[0, chart.most_bytes / unit * 1.06]),
        yaxis=axis(speed_name, range=[0, chart.most_per_second * 1.1]),
        annotations=_labels(chart, unit, ink),
    )  # fmt: skip
    if chart.budget_bytes is not None:
        drawn.add_vline(
            chart.budget_bytes / unit, line={"color": BUDGET, "dash": "dash", "width": 1.5},
            annotation={"text": f"budget {format_bytes(chart.budget_bytes)}", "font": {"color": BUDGET}},
            annotation_position="top right" if chart.budget_bytes < chart.most_bytes * 0.8 else "top left",
        )  # fmt: skip
    return drawn


def _point_traces(go: Any, chart: Chart, unit: int) -> list[Any]:
    looks = [LOOKS[Fit.NO], LOOKS[Fit.UNCERTAIN], LOOKS[Fit.YES], PLAIN]
    traces = []
    for look in looks:
        points = [point for point in chart.points if point.look is look]
        if points:
            traces.append(_points(go, points, look, unit, every_interval=len(chart.points) <= _MOST_INTERVALS))
    return traces


def _points(go: Any, points: Sequence[Point], look: Look, unit: int, *, every_interval: bool) -> Any:
    has_interval = [every_interval or point.on_front for point in points]
    speeds = [(p.speed_interval[0], p.per_second, p.speed_interval[1]) for p in points]
    sizes = [(p.memory_interval[0], p.memory_bytes, p.memory_interval[1]) for p in points]
    return go.Scatter(
        name=look.name, mode="markers", x=[point.memory_bytes / unit for point in points],
        y=[point.per_second for point in points],
        marker={"symbol": look.symbol, "color": look.colour, "size": [10 if p.on_front else 6 for p in points],
                "line": {"width": 1.6, "color": look.colour}},
        error_y=_interval(speeds, 1, has_interval, look), error_x=_interval(sizes, unit, has_interval, look),
        customdata=[escape(hover(point)) for point in points], hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip


def _interval(
    values: Sequence[tuple[float, float, float]], unit: int, wanted: Sequence[bool], look: Look
) -> dict[str, Any]:
    pairs = list(zip(values, wanted, strict=True))
    return {
        "type": "data", "symmetric": False, "thickness": 1, "width": 0, "color": pale(look.colour, 0.5),
        "array": [(high - value) / unit if has else 0 for (_, value, high), has in pairs],
        "arrayminus": [(value - low) / unit if has else 0 for (low, value, _), has in pairs],
    }  # fmt: skip


def _front(go: Any, chart: Chart, unit: int, ink: str) -> list[Any]:
    if len(chart.front) < 2:
        return []
    return [
        go.Scatter(
            name="Pareto front", mode="lines", x=[point.memory_bytes / unit for point in chart.front],
            y=[point.per_second for point in chart.front], line={"color": ink, "width": 1.6, "shape": "hv"},
            hoverinfo="skip",
        )
    ]  # fmt: skip


def _trial_traces(go: Any, chart: Chart, unit: int) -> list[Any]:
    measured = [trial for trial in chart.trials if not trial.ran_out]
    failed = [trial for trial in chart.trials if trial.ran_out]
    found = [trial for trial in measured if trial.is_found]
    traces = [_connection(go, trial, trial.predicted, unit) for trial in measured if trial.predicted is not None]
    if failed:
        traces.append(
            _trials(
                go,
                failed,
                unit,
                "ran out of memory",
                {"symbol": "x-thin", "size": 12, "line": {"width": 3, "color": MEASURED.colour}},
            )
        )
    if measured:
        traces.append(
            _trials(
                go, measured, unit, MEASURED.name, {"symbol": MEASURED.symbol, "size": 10, "color": MEASURED.colour}
            )
        )
    if found:
        traces.append(
            _trials(
                go,
                found,
                unit,
                "found",
                {"symbol": "circle-open", "size": 22, "color": FOUND_RING, "line": {"width": 3}},
            )
        )
    return traces


def _connection(go: Any, trial: Trial, predicted: Point, unit: int) -> Any:
    return go.Scatter(
        mode="lines", x=[predicted.memory_bytes / unit, trial.memory_bytes / unit],
        y=[predicted.per_second, trial.per_second], line={"color": MEASURED.colour, "width": 1.4, "dash": "dot"},
        showlegend=False, hoverinfo="skip",
    )  # fmt: skip


def _trials(go: Any, trials: Sequence[Trial], unit: int, name: str, marker: dict[str, Any]) -> Any:
    places = [trial.place for trial in trials]
    return go.Scatter(
        name=name, mode="markers", x=[size / unit for size, _ in places], y=[per_second for _, per_second in places],
        marker=marker, customdata=[escape(hover(trial)) for trial in trials], hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip


def _labels(chart: Chart, unit: int, ink: str) -> list[dict[str, Any]]:
    if not chart.points:
        return [
            {"text": "no speed was predicted", "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
        ]
    places = {point.plan: (point.memory_bytes, point.per_second) for point in chart.points}
    places |= {trial.plan: trial.place for trial in chart.trials if trial.is_found}
    return [
        {
            "text": "<br>".join(flag_lines(escape(plan), 34)), "x": places[plan][0] / unit, "y": places[plan][1],
            "showarrow": True, "arrowhead": 0, "arrowwidth": 1, "arrowcolor": ink, "standoff": 6, "ax": 24, "font": {"size": 11},
            # the lowest one on the left stands above a cloud of others: its label goes below
            "ay": 70 if places[plan][0] < chart.most_bytes * 0.2 else -34, "align": "left",
            "xanchor": "right" if places[plan][0] > chart.most_bytes * 0.7 else "left",
        }
        for plan in chart.labelled if plan in places
    ]  # fmt: skip
