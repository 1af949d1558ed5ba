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
from memlab.records import Comparison, Measurement, Phase, TimelinePoint
from memlab.report.columns import change, flag_lines, rate, speed
from memlab.report.segments import categories_of, finite, scale, segments, stretches, swatch, time_scale
from memlab.units import format_bytes, format_change

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NEUTRAL_INK = "#7A7A7A"
_RULE = "rgba(128,128,128,.25)"
_CLEAR = "rgba(0,0,0,0)"
_BUDGET = "#D9534F"
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
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {"parameters": 2**30}, (), (0.5,), 8, 0)
        >>> comparison(Comparison("gpt2 124M", (m,))).data[0].name
        'parameters'
    """
    go = _plotly()
    figure = go.Figure()
    parts = [segments(measurement) for measurement in comparison.measurements]
    most_bytes = max(sum(part.values()) for part in parts)
    unit, name = scale(most_bytes)
    plans = ["<br>".join(flag_lines(escape(measurement.plan), 32)) for measurement in comparison.measurements]
    for category in categories_of(parts):
        figure.add_trace(_memory_bars(go, category, plans, parts, unit))
    figure.add_trace(_throughput_bars(go, comparison, plans, ink))
    figure.update_layout(
        **_bare_layout(ink), barmode="stack", height=150 + len(plans) * _row_pixels(plans),
        xaxis=_axis(f"peak memory allocated, {name}", domain=[0, 0.60], range=[0, most_bytes / unit * 1.35]),
        xaxis2=_axis("throughput, samples/s", domain=[0.66, 1], anchor="y2", range=[0, _fastest(comparison) * 1.5]),
        yaxis=_axis("", autorange="reversed", showgrid=False),
        yaxis2={"matches": "y", "showticklabels": False, "anchor": "x2", "showgrid": False},
        annotations=[*_totals(comparison, plans, parts, unit), *_rates(comparison, plans)],
    )  # fmt: skip
    return figure


def timeline(measurement: Measurement, budget_bytes: int | None = None, ink: str = NEUTRAL_INK) -> Figure:
    """Memory of one step over time, stacked by category, with its phases and the budget.

    Args:
        measurement: a measurement of an observed step; without a timeline the figure says so.
        budget_bytes: draw a line at this size.
        ink: colour of text; the default reads on light and dark.

    Returns:
        A plotly figure.

    Raises:
        MissingExtraError: plotly is not installed.

    Example:
        >>> point = TimelinePoint(0.0, Phase.FORWARD, {"parameters": 2**20})
        >>> m = Measurement("as written", "cpu", 2**20, None, 0, {}, (point,), (0.5,), 8, 0)
        >>> timeline(m).layout.yaxis.title.text
        'memory allocated, MiB'
    """
    go = _plotly()
    points = measurement.timeline
    factor, time_name = time_scale(points[-1].seconds if points else 0)
    most_bytes = max([budget_bytes or 0, *(point.total_bytes for point in points)])
    unit, name = scale(most_bytes)
    live = [point.live_bytes for point in points]
    figure = go.Figure([_layer(go, category, points, live, factor, unit) for category in categories_of(live)])
    figure.update_layout(
        **_bare_layout(ink), height=340, hovermode="x unified",
        xaxis=_axis(f"time in the step, {time_name}", showgrid=False),
        yaxis=_axis(f"memory allocated, {name}", range=[0, most_bytes / unit * 1.22]),
        shapes=_phase_shapes(points, factor), annotations=_timeline_notes(points, factor, unit),
    )  # fmt: skip
    if budget_bytes is not None:
        figure.add_hline(
            budget_bytes / unit, line={"color": _BUDGET, "dash": "dash", "width": 1.5},
            annotation={"text": f"budget {format_bytes(budget_bytes)}", "font": {"color": _BUDGET}, "xanchor": "right"},
            annotation_position="top right",
        )  # fmt: skip
    return figure


def _plotly() -> Any:
    require("plotly")
    return importlib.import_module("plotly.graph_objects")


def _bare_layout(ink: str) -> dict[str, Any]:
    return {
        "template": "none",
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"color": ink, "size": 13},
        "margin": {"l": 10, "r": 10, "t": 46, "b": 44},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
    }


def _axis(title: str, **more: Any) -> dict[str, Any]:
    heading = {"text": title, "font": {"size": 13}, "standoff": 8}
    lines = {"gridcolor": _RULE, "zerolinecolor": _RULE, "linecolor": _RULE}
    return {"title": heading, "automargin": True, **lines, **more}


def _pattern(category: str) -> dict[str, Any]:
    look = swatch(category)
    return {"shape": look.pattern, "fgcolor": "rgba(255,255,255,.7)", "bgcolor": look.colour, "size": 7}


def _memory_bars(go: Any, category: str, plans: list[str], parts: Sequence[Mapping[str, int]], unit: int) -> Any:
    sizes = [part.get(category, 0) for part in parts]
    return go.Bar(
        name=category, orientation="h", y=plans, x=[size / unit for size in sizes], width=0.62,
        marker={"color": swatch(category).colour, "pattern": _pattern(category)},
        customdata=[format_bytes(size) for size in sizes], hovertemplate=f"{category} %{{customdata}}<extra></extra>",
    )  # fmt: skip


def _throughput_bars(go: Any, comparison: Comparison, plans: list[str], ink: str) -> Any:
    rates = [finite(m.samples_per_second) for m in comparison.measurements]
    spreads = [each * finite(m.spread) for each, m in zip(rates, comparison.measurements, strict=True)]
    said = [
        f"{speed(row.measurement)} samples/s ({change(row.speed_ratio)})<br>{escape(row.verdict)}".removesuffix("<br>")
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
            "x": sum(part.values()) / unit, "y": plan, "xanchor": "left", "xshift": 5, "showarrow": False,
            "text": format_bytes(row.measurement.peak_allocated_bytes)
            + (f"  {format_change(row.memory_ratio)}" if index else ""),
        }
        for index, (row, plan, part) in enumerate(zip(comparison.rows, plans, parts, strict=True))
    ]  # fmt: skip


def _rates(comparison: Comparison, plans: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "x": finite(row.measurement.samples_per_second) * (1 + finite(row.measurement.spread)), "y": plan,
            "xref": "x2", "yref": "y2", "xanchor": "left", "xshift": 5, "showarrow": False,
            "text": rate(row.measurement.samples_per_second) + (f"  {change(row.speed_ratio)}" if index else ""),
        }
        for index, (row, plan) in enumerate(zip(comparison.rows, plans, strict=True))
    ]  # fmt: skip


def _fastest(comparison: Comparison) -> float:
    rates = (finite(m.samples_per_second) * (1 + finite(m.spread)) for m in comparison.measurements)
    return max(rates) or 1.0


def _row_pixels(plans: Sequence[str]) -> int:
    return max(46, *(18 * (1 + plan.count("<br>")) for plan in plans))


def _layer(
    go: Any, category: str, points: Sequence[TimelinePoint], live: Sequence[Mapping[str, int]], factor: float, unit: int
) -> Any:
    look = swatch(category)
    sizes = [part.get(category, 0) for part in live]
    return go.Scatter(
        name=category, x=[point.seconds * factor for point in points], y=[size / unit for size in sizes],
        stackgroup="memory", line={"width": 0, "shape": "hv", "color": look.colour}, fillcolor=look.colour,
        fillpattern=_pattern(category),
        customdata=[format_bytes(size) for size in sizes], hovertemplate="%{customdata}",
    )  # fmt: skip


def _phase_shapes(points: Sequence[TimelinePoint], factor: float) -> list[dict[str, Any]]:
    return [
        {
            "type": "rect", "yref": "paper", "y0": 0, "y1": 1, "layer": "below", "line": {"width": 0},
            "x0": stretch.start_seconds * factor, "x1": stretch.stop_seconds * factor,
            "fillcolor": f"rgba(128,128,128,{_PHASE_SHADES[stretch.phase]})",
        }
        for stretch in stretches(points)
    ]  # fmt: skip


def _timeline_notes(points: Sequence[TimelinePoint], factor: float, unit: int) -> list[dict[str, Any]]:
    if not points:
        return [{"text": "no timeline: no step of this plan was observed", "xref": "paper", "yref": "paper",
                 "x": 0.5, "y": 0.5, "showarrow": False}]  # fmt: skip
    peak = max(points, key=lambda point: point.total_bytes)
    note = {
        "x": peak.seconds * factor, "y": peak.total_bytes / unit, "yshift": 4, "yanchor": "bottom", "showarrow": False,
        "text": f"peak {format_bytes(peak.total_bytes)} in the {peak.phase.words}",
        "xanchor": "right" if peak.seconds > points[-1].seconds * 0.6 else "left",
    }  # fmt: skip
    return [note, *_phase_names(points, factor)]


def _phase_names(points: Sequence[TimelinePoint], factor: float) -> list[dict[str, Any]]:
    wide = points[-1].seconds * 0.08
    return [
        {"text": str(each.phase), "yref": "paper", "y": 1, "yanchor": "top", "showarrow": False,
         "x": (each.start_seconds + each.stop_seconds) / 2 * factor}
        for each in stretches(points) if each.phase is not Phase.OTHER and each.stop_seconds - each.start_seconds > wide
    ]  # fmt: skip
