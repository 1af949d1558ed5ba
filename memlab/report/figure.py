"""The live twins of the pictures: plotly figures with the same colours, on a transparent background.

No background and no template is set, so a figure reads in a light and in a dark notebook and stays
small in the saved file. The default ink is the grey with the same contrast to white and to the dark
theme's background; a panel that knows its theme passes a stronger one.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from memlab.extras import require
from memlab.records import Phase, Prediction, TimelinePoint
from memlab.records.comparison import Comparison
from memlab.report.segments import (
    Profile,
    categories_of,
    finite,
    no_timeline,
    scale,
    segments,
    stretches,
    swatch,
    time_scale,
)
from memlab.report.wording import flag_lines, rate, speed, then_change
from memlab.units import format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NEUTRAL_INK = "#7A7A7A"
_RULE = "rgba(128,128,128,.25)"
_CLEAR = "rgba(0,0,0,0)"
BUDGET = "#D9534F"
_PREDICTED_OPACITY = 0.5
_PHASE_SHADES = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.10, Phase.STEP: 0.22, Phase.OTHER: 0.0}


def comparison(comparison: Comparison, ink: str = NEUTRAL_INK) -> Figure:
    """Peak memory by category beside throughput, one row per setting.

    Args:
        comparison: the settings that were tried, from top to bottom.
        ink: colour of text; the default reads on light and dark.

    Returns:
        A plotly figure; hover shows bytes by category and the notes.

    Raises:
        MissingExtraError: plotly is not installed.

    Example:
        >>> from memlab.records import Measurement
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {"parameters": 2**30}, (), (0.5,), 8, 0)
        >>> comparison(Comparison("gpt2 124M", (m,))).data[0].name
        'parameters'
    """
    go = _plotly()
    figure = go.Figure()
    parts = [segments(measurement) for measurement in comparison.measurements]
    predicted = (row.prediction.peak_allocated_bytes for row in comparison.rows if row.prediction)
    most_bytes = max(*(sum(part.values()) for part in parts), *predicted, 0)
    unit, name = scale(most_bytes)
    plans = ["<br>".join(flag_lines(escape(measurement.plan), 32)) for measurement in comparison.measurements]
    for category in categories_of(parts):
        figure.add_trace(_memory_bars(go, category, plans, parts, unit))
    if any(row.prediction for row in comparison.rows):
        figure.add_trace(_predicted_marks(go, comparison, plans, unit, ink))
    figure.add_trace(_throughput_bars(go, comparison, plans, ink))
    figure.update_layout(
        **bare_layout(ink), barmode="stack", height=150 + len(plans) * _row_pixels(plans),
        xaxis=axis(f"peak memory allocated, {name}", domain=[0, 0.60], range=[0, most_bytes / unit * 1.35]),
        xaxis2=axis("throughput, samples/s", domain=[0.66, 1], anchor="y2", range=[0, _fastest(comparison) * 1.5]),
        yaxis=axis("", autorange="reversed", showgrid=False),
        yaxis2={"matches": "y", "showticklabels": False, "anchor": "x2", "showgrid": False},
        annotations=[*_totals(comparison, plans, parts, unit), *_rates(comparison, plans)],
    )  # fmt: skip
    return figure


def timeline(profile: Profile, budget_bytes: int | None = None, ink: str = NEUTRAL_INK) -> Figure:
    """Memory of one step over time, stacked by category, with its phases and the budget.

    Args:
        profile: a measurement of an observed step, or a prediction, which is paler and has a dashed outline;
            without a timeline the figure says so.
        budget_bytes: draw a line at this size.
        ink: colour of text; the default reads on light and dark.

    Returns:
        A plotly figure.

    Raises:
        MissingExtraError: plotly is not installed.

    Example:
        >>> point = TimelinePoint(0.0, Phase.FORWARD, {"parameters": 2**20})
        >>> from memlab.records import Measurement
        >>> m = Measurement("as written", "cpu", 2**20, None, 0, {}, (point,), (0.5,), 8, 0)
        >>> timeline(m).layout.yaxis.title.text
        'memory allocated, MiB'
    """
    go = _plotly()
    points, is_predicted = profile.timeline, isinstance(profile, Prediction)
    factor, time_name = time_scale(points[-1].seconds if points else 0)
    most_bytes = max([budget_bytes or 0, *(point.total_bytes for point in points)])
    unit, name = scale(most_bytes)
    live = [point.live_bytes for point in points]
    figure = go.Figure([
        _layer(go, category, points, live, factor, unit, is_predicted=is_predicted) for category in categories_of(live)
    ])  # fmt: skip
    if is_predicted:
        figure.add_trace(_outline(go, points, factor, unit, ink))
    figure.update_layout(
        **bare_layout(ink), height=340, hovermode="x unified",
        xaxis=axis(f"time in the step, {time_name}", showgrid=False),
        yaxis=axis(f"memory allocated, {name}", range=[0, most_bytes / unit * 1.22]),
        shapes=phase_shapes(points, factor), annotations=_timeline_notes(profile, factor, unit),
    )  # fmt: skip
    if budget_bytes is not None:
        figure.add_hline(
            budget_bytes / unit, line={"color": BUDGET, "dash": "dash", "width": 1.5},
            annotation={"text": f"budget {format_bytes(budget_bytes)}", "font": {"color": BUDGET}, "xanchor": "right"},
            annotation_position="top right",
        )  # fmt: skip
    return figure


def _plotly() -> Any:
    require("plotly")
    return importlib.import_module("plotly.graph_objects")


def bare_layout(ink: str) -> dict[str, Any]:
    """No background and no template; the legend above."""
    return {
        "template": "none",
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"color": ink, "size": 13},
        "margin": {"l": 10, "r": 10, "t": 46, "b": 44},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
    }


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with its name and pale lines."""
    heading = {"text": title, "font": {"size": 13}, "standoff": 8}
    lines = {"gridcolor": _RULE, "zerolinecolor": _RULE, "linecolor": _RULE}
    return {"title": heading, "automargin": True, **lines, **more}


def pale(colour: str, opacity: float) -> str:
    """A translucent version of a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def pattern(category: str) -> dict[str, Any]:
    """The hatch of a category, so that it is known without its colour."""
    look = swatch(category)
    return {"shape": look.pattern, "fgcolor": "rgba(255,255,255,.7)", "bgcolor": look.colour, "size": 7}


def _memory_bars(go: Any, category: str, plans: list[str], parts: Sequence[Mapping[str, int]], unit: int) -> Any:
    sizes = [part.get(category, 0) for part in parts]
    return go.Bar(
        name=category, orientation="h", y=plans, x=[size / unit for size in sizes], width=0.62,
        marker={"color": swatch(category).colour, "pattern": pattern(category)},
        customdata=[format_bytes(size) for size in sizes], hovertemplate=f"{category} %{{customdata}}<extra></extra>",
    )  # fmt: skip


def _predicted_marks(go: Any, comparison: Comparison, plans: list[str], unit: int, ink: str) -> Any:
    found = [
        (row.prediction.peak_allocated_bytes, plan)
        for row, plan in zip(comparison.rows, plans, strict=True)
        if row.prediction
    ]
    return go.Scatter(
        name="predicted", mode="markers", x=[size / unit for size, _ in found], y=[plan for _, plan in found],
        marker={"symbol": "line-ns-open", "size": 30, "color": ink, "line": {"width": 2, "color": ink}},
        customdata=[format_bytes(size) for size, _ in found], hovertemplate="predicted %{customdata}<extra></extra>",
    )  # fmt: skip


def _throughput_bars(go: Any, comparison: Comparison, plans: list[str], ink: str) -> Any:
    rates = [finite(m.samples_per_second) for m in comparison.measurements]
    spreads = [each * finite(m.spread) for each, m in zip(rates, comparison.measurements, strict=True)]
    said = [
        f"{speed(row.measurement)} samples/s{then_change(row.speed_ratio)}<br>{escape(row.verdict)}".removesuffix(
            "<br>"
        )
        for row in comparison.rows
    ]
    return go.Bar(
        name="samples/s", orientation="h", y=plans, x=rates, width=0.30, xaxis="x2", yaxis="y2", showlegend=False,
        marker={"color": "#9AA5B1"}, error_x={"type": "data", "array": spreads, "thickness": 1.2, "color": ink},
        customdata=said, hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip


def _totals(
    comparison: Comparison, plans: list[str], parts: Sequence[Mapping[str, int]], unit: int
) -> list[dict[str, Any]]:
    return [
        {
            "x": max(sum(part.values()), row.prediction.peak_allocated_bytes if row.prediction else 0) / unit, "y": plan, "xanchor": "left", "xshift": 5, "showarrow": False,
            "text": format_bytes(row.measurement.peak_allocated_bytes)
            + (then_change(row.memory_ratio) if index else ""),
        }
        for index, (row, plan, part) in enumerate(zip(comparison.rows, plans, parts, strict=True))
    ]  # fmt: skip


def _rates(comparison: Comparison, plans: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "x": finite(row.measurement.samples_per_second) * (1 + finite(row.measurement.spread)), "y": plan,
            "xref": "x2", "yref": "y2", "xanchor": "left", "xshift": 5, "showarrow": False,
            "text": rate(row.measurement.samples_per_second) + (then_change(row.speed_ratio) if index else ""),
        }
        for index, (row, plan) in enumerate(zip(comparison.rows, plans, strict=True))
    ]  # fmt: skip


def _fastest(comparison: Comparison) -> float:
    rates = (finite(m.samples_per_second) * (1 + finite(m.spread)) for m in comparison.measurements)
    return max(rates) or 1.0


def _row_pixels(plans: Sequence[str]) -> int:
    return max(46, *(18 * (1 + plan.count("<br>")) for plan in plans))


def _layer(
    go: Any, category: str, points: Sequence[TimelinePoint], live: Sequence[Mapping[str, int]], factor: float, unit: int,
    *, is_predicted: bool,
) -> Any:  # fmt: skip
    colour = swatch(category).colour
    hatch = pattern(category)
    if is_predicted:
        colour = pale(colour, _PREDICTED_OPACITY)
        hatch |= {"bgcolor": colour}
    sizes = [part.get(category, 0) for part in live]
    return go.Scatter(
        name=category, x=[point.seconds * factor for point in points], y=[size / unit for size in sizes],
        stackgroup="memory", line={"width": 0, "shape": "hv", "color": colour}, fillcolor=colour,
        fillpattern=hatch,
        customdata=[format_bytes(size) for size in sizes], hovertemplate="%{customdata}",
    )  # fmt: skip


def _outline(go: Any, points: Sequence[TimelinePoint], factor: float, unit: int, ink: str) -> Any:
    return go.Scatter(
        name="predicted", x=[point.seconds * factor for point in points], mode="lines",
        y=[point.total_bytes / unit for point in points], line={"color": ink, "dash": "dash", "width": 2, "shape": "hv"},
        customdata=[format_bytes(point.total_bytes) for point in points], hovertemplate="%{customdata}",
    )  # fmt: skip


def phase_shapes(
    points: Sequence[TimelinePoint], factor: float, x: str = "x", y: str = "paper"
) -> list[dict[str, Any]]:
    """The phases of a step as pale stretches behind it.

    Args:
        points: its timeline.
        factor: what its seconds are multiplied with.
        x: name of the axis of time.
        y: what the stretches are as high as.
    """
    return [
        {
            "type": "rect", "xref": x, "yref": y, "y0": 0, "y1": 1, "layer": "below", "line": {"width": 0},
            "x0": stretch.start_seconds * factor, "x1": stretch.stop_seconds * factor,
            "fillcolor": f"rgba(128,128,128,{_PHASE_SHADES[stretch.phase]})",
        }
        for stretch in stretches(points)
    ]  # fmt: skip


def _timeline_notes(profile: Profile, factor: float, unit: int) -> list[dict[str, Any]]:
    points = profile.timeline
    if not points:
        return [{"text": escape(no_timeline(profile)), "xref": "paper", "yref": "paper",
                 "x": 0.5, "y": 0.5, "showarrow": False}]  # fmt: skip
    peak = max(points, key=lambda point: point.total_bytes)
    note = {
        "x": peak.seconds * factor, "y": peak.total_bytes / unit, "yshift": 4, "yanchor": "bottom", "showarrow": False,
        "text": f"peak {format_bytes(peak.total_bytes)} in the {peak.phase.words}",
        "xanchor": "right" if peak.seconds > points[-1].seconds * 0.6 else "left",
    }  # fmt: skip
    return [note, *phase_names(points, factor)]


def phase_names(
    points: Sequence[TimelinePoint], factor: float, x: str = "x", y: str = "paper", least_share: float = 0.08
) -> list[dict[str, Any]]:
    """The names of the phases at the top; a stretch shorter than `least_share` of the step has no room for one."""
    wide = points[-1].seconds * least_share if points else 0
    return [
        {"text": str(each.phase), "xref": x, "yref": y, "y": 1, "yanchor": "top", "showarrow": False,
         "x": (each.start_seconds + each.stop_seconds) / 2 * factor}
        for each in stretches(points) if each.phase is not Phase.OTHER and each.stop_seconds - each.start_seconds > wide
    ]  # fmt: skip
