"""The live figure: what a `Moment` looks like, in four pictures that hang together; the fourth is in `live_map`.

Memory of every step and memory inside one step share their unit and their height, so that a peak on the left
is the summit on the right. A setting has one number, in the order in which it was first tried: it stands at the
mark of its change, at its bar and at its mark in the map.

A drawing always has the same traces in the same order, with the same properties, so that a widget can be brought
up to date by sending what differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from memlab.records import Measurement, TimelinePoint
from memlab.records.comparison import speed_ratio
from memlab.records.live_state import LivePoint, Moment
from memlab.report.live_changes import change_labels, change_lines, change_names, share_below
from memlab.report.live_map import map_key, map_traces, predicted, with_trials
from memlab.report.live_parts import BUDGET, NEUTRAL_INK, pale, pattern, phase_names, phase_shapes
from memlab.report.pareto import MEASURED, Chart, axis_names
from memlab.report.segments import CATEGORIES, REST, finite, scale, swatch, time_scale, unexplained
from memlab.report.wording import NOTHING, flag_lines, speed, then_change
from memlab.units import format_bytes

HEIGHT_PIXELS = 680
# three lines of legend, a title and what explains it
_TOP_PIXELS = 98
# bars for more settings than this leave no room for their names
_MOST_SETTINGS = 10
# a budget farther up than this would press the memory flat: it is written, not drawn
_FARTHEST_BUDGET = 2.5
# of a bar's name and speed, so that they end where the picture does
_MOST_NAME_CHARACTERS = 38
_LEAST_PLAN_CHARACTERS = 14
# the colour of the budget, dark enough for white words
_CHIP = "#B5403C"
_RULE = "rgba(128,128,128,.25)"
_CLEAR = "rgba(0,0,0,0)"

_LEFT, _RIGHT, _UPPER, _LOWER = [0.0, 0.455], [0.55, 1.0], [0.57, 1.0], [0.0, 0.385]
# titles of the pictures, and what stands in them before there is anything to draw
_TIMES = ("x", "y", "Memory, step by step", "memory of every step, from the first one on")
_INSIDE = ("x2", "y2", "Inside one step", "memory within a step,<br>once a step was observed")
_SPEEDS = ("x3", "y3", "Throughput by setting", "samples per second of every setting,<br>once it was timed")
_MAP = ("x4", "y4", "Memory against throughput", "every setting predicted or tried")
_NICE = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0)


@dataclass(frozen=True)
class Drawing:
    """A figure as plain values: traces and layout, as plotly takes them."""

    traces: tuple[dict[str, Any], ...]
    layout: dict[str, Any]


def drawing(moment: Moment, known: Chart | None = None) -> Drawing:
    """Reduce a moment to traces and a layout; a figure's arguments are the same.

    Args:
        moment: what is drawn.
        known: its `predicted`, or that of an earlier moment with the same predictions, settings and budget,
            which saves half of the work.
    """
    sheet = _sheet(moment)
    mapped = with_trials(known or predicted(moment), moment)
    traces = (
        *_times(sheet),
        _peaks(moment, sheet),
        *_inside(sheet),
        _outline(sheet),
        _bars(sheet),
        _bar_names(sheet),
        *map_traces(mapped, moment.plan.label),
    )
    return Drawing(traces, _layout(moment, sheet, mapped))


@dataclass(frozen=True)
class _Setting:
    number: int
    measurement: Measurement
    in_force: bool

    @property
    def per_second(self) -> float:
        return finite(self.measurement.samples_per_second)


@dataclass(frozen=True)
class _Sheet:
    """Parts that the pictures have in common.

    Args:
        settings: those that are drawn as bars, in the order in which they were first tried.
        shown: the setting whose step is drawn, and `before`, the one that was in force before it.
        stacks: bytes by category of every step that was observed.
        unit: of memory over time, with its `name`.
        most_bytes: upper end of what is drawn there; 0 when there is nothing yet.
    """

    settings: tuple[_Setting, ...]
    shown: Measurement | None
    before: Measurement | None
    stacks: tuple[tuple[int, Mapping[str, int]], ...]
    unit: int
    name: str
    most_bytes: int
    budget_bytes: int | None


def _sheet(moment: Moment) -> _Sheet:
    shown, before = _shown(moment)
    stacks = tuple((point.step, _parts(point)) for point in moment.points if point.live_bytes or point.peak_bytes)
    sizes = [sum(parts.values()) for _, parts in stacks]
    sizes += [point.total_bytes for each in (shown, before) if each for point in each.timeline]
    most_bytes = max(sizes, default=0)
    budget_bytes = moment.budget_bytes
    if budget_bytes and (not most_bytes or budget_bytes <= most_bytes * _FARTHEST_BUDGET):
        most_bytes = max(most_bytes, budget_bytes)
    unit, name = scale(most_bytes)
    return _Sheet(_settings(moment), shown, before, stacks, unit, name, most_bytes, budget_bytes)


def _parts(point: LivePoint) -> Mapping[str, int]:
    """Bytes by category, completed up to the peak."""
    parts = point.live_bytes
    rest_bytes = unexplained(parts, point.peak_bytes or 0)
    unknown = [name for name in parts if name not in CATEGORIES]
    if not rest_bytes and not unknown:
        return parts
    known = {name: size for name, size in parts.items() if name in CATEGORIES}
    return known | {REST: known.get(REST, 0) + rest_bytes + sum(parts[name] for name in unknown)}


def _settings(moment: Moment) -> tuple[_Setting, ...]:
    """The first setting, the one in force, and the newest of the others."""
    every = [
        _Setting(number, each, each.plan == moment.plan.label) for number, each in enumerate(moment.measurements, 1)
    ]
    if len(every) <= _MOST_SETTINGS:
        return tuple(every)
    kept = [each for each in every if each.in_force or each.number == 1]
    others = [each for each in every if each not in kept]
    return tuple(sorted([*kept, *others[len(kept) - _MOST_SETTINGS :]], key=lambda each: each.number))


def _shown(moment: Moment) -> tuple[Measurement | None, Measurement | None]:
    """The measurement whose step is drawn, in force if it can be, and the one that was in force before it."""
    observed = {each.plan: each for each in moment.measurements if each.timeline}
    # in the order in which they came into force; what was never changed to was there from the start
    changed = [each.plan for each in moment.changes]
    order = [plan for plan in observed if plan not in changed] + [plan for plan in changed if plan in observed]
    if not order:
        return None, None
    shown = moment.plan.label if moment.plan.label in observed else order[-1]
    latest = len(order) - 1 - order[::-1].index(shown)
    before = next((plan for plan in reversed(order[:latest]) if plan != shown), None)
    return observed[shown], observed[before] if before else None


# --- memory, step by step -------------------------------------------------------------------------------------------


def _times(sheet: _Sheet) -> list[dict[str, Any]]:
    steps = _widened([step for step, _ in sheet.stacks])
    stacks = _widened([parts for _, parts in sheet.stacks], by=None)
    return [
        _layer(category, steps, stacks, sheet, said="step %{x:.0f}", axes=_TIMES, shape="hvh", group="steps")
        for category in CATEGORIES
    ]


def _widened(values: Sequence[Any], by: float | None = 0.49) -> list[Any]:
    """Half a step more at both ends, so that the first and the last step are as wide as the others."""
    if not values:
        return []
    first, last = (values[0], values[-1]) if by is None else (values[0] - by, values[-1] + by)
    return [first, *values, last]


def _layer(
    category: str, places: list[float], stacks: Sequence[Mapping[str, int]], sheet: _Sheet, *,
    said: str, axes: tuple[str, ...], shape: str, group: str,
) -> dict[str, Any]:  # fmt: skip
    colour = swatch(category).colour
    sizes = [parts.get(category, 0) for parts in stacks]
    return {
        "type": "scatter", "name": category, "xaxis": axes[0], "yaxis": axes[1], "stackgroup": group,
        "x": places, "y": [round(size / sheet.unit, 4) for size in sizes] if any(sizes) else [0] * len(places),
        "line": {"width": 0, "shape": shape, "color": colour}, "fillcolor": colour, "fillpattern": pattern(category),
        "legendgroup": category, "showlegend": _is_named(category, sheet, axes),
        "hovertemplate": f"{category} %{{y{_digits(sheet.unit)}}} {sheet.name}<br>{said}<extra></extra>",
    }  # fmt: skip


def _is_named(category: str, sheet: _Sheet, axes: tuple[str, ...]) -> bool:
    """Once in the legend: in the first picture if it has any of it, or else in the second."""
    over_time = any(parts.get(category) for _, parts in sheet.stacks)
    if axes is _TIMES:
        return over_time
    return not over_time and any(point.live_bytes.get(category) for point in _inside_points(sheet))


def _digits(unit: int) -> str:
    return ":.2f" if unit >= 2**30 else ":.1f"


def _held_peaks(moment: Moment) -> Iterator[tuple[int, int]]:
    """Step and peak; between two measured steps of one plan the earlier one's, as long as the plan stays."""
    plan, peak_bytes = "", None
    for point in moment.points:
        if point.plan != plan:
            plan, peak_bytes = point.plan, None
        peak_bytes = point.peak_bytes if point.peak_bytes is not None else peak_bytes
        if peak_bytes is not None:
            yield point.step, peak_bytes


def _peaks(moment: Moment, sheet: _Sheet) -> dict[str, Any]:
    measured = list(_held_peaks(moment))
    sizes = [round(size / sheet.unit, 4) for _, size in measured]
    return {
        "type": "scatter", "name": "measured peak", "mode": "lines", "xaxis": "x", "yaxis": "y",
        "x": _widened([step for step, _ in measured]), "y": _widened(sizes, by=0),
        "line": {"color": NEUTRAL_INK, "width": 2, "shape": "hvh"}, "showlegend": bool(measured),
        "hovertemplate": f"step %{{x:.0f}}: peak %{{y{_digits(sheet.unit)}}} {sheet.name}<extra></extra>",
    }  # fmt: skip


# --- inside one step ------------------------------------------------------------------------------------------------


def _inside(sheet: _Sheet) -> list[dict[str, Any]]:
    points, (factor, unit) = _inside_points(sheet), _inside_scale(sheet)
    times = [round(point.seconds * factor, 4) for point in points]
    said = f"%{{x:.4~r}} {unit} into the step"
    live = [point.live_bytes for point in points]
    return [
        _layer(category, times, live, sheet, said=said, axes=_INSIDE, shape="hv", group="step")
        for category in CATEGORIES
    ]


def _inside_points(sheet: _Sheet) -> Sequence[TimelinePoint]:
    return sheet.shown.timeline if sheet.shown else ()


def _inside_scale(sheet: _Sheet) -> tuple[float, str]:
    both = [each.timeline[-1].seconds for each in (sheet.shown, sheet.before) if each]
    return time_scale(max(both, default=0))


def _outline(sheet: _Sheet) -> dict[str, Any]:
    points = sheet.before.timeline if sheet.before else ()
    factor, _ = _inside_scale(sheet)
    return {
        "type": "scatter", "name": "the setting before", "mode": "lines", "xaxis": "x2", "yaxis": "y2",
        "x": [round(point.seconds * factor, 4) for point in points],
        "y": [round(point.total_bytes / sheet.unit, 4) for point in points],
        "line": {"color": NEUTRAL_INK, "dash": "dash", "width": 1.6, "shape": "hv"},
        "hovertemplate": f"before: %{{y{_digits(sheet.unit)}}} {sheet.name}<extra></extra>", "showlegend": bool(points),
    }  # fmt: skip


# --- throughput by setting ------------------------------------------------------------------------------------------


def _bars(sheet: _Sheet) -> dict[str, Any]:
    rates = [each.per_second for each in sheet.settings]
    spreads = [each.per_second * finite(each.measurement.spread) for each in sheet.settings]
    solid, weak = MEASURED.colour, pale(MEASURED.colour, 0.6)
    return {
        "type": "bar", "orientation": "h", "xaxis": "x3", "yaxis": "y3", "showlegend": False, "width": 0.34,
        "x": rates, "y": list(range(len(rates))),
        "marker": {"color": [solid if each.in_force else weak for each in sheet.settings]},
        "error_x": {"type": "data", "array": spreads, "thickness": 1.2, "width": 3, "color": NEUTRAL_INK},
        "customdata": [_said(each) for each in sheet.settings], "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip


def _said(setting: _Setting) -> str:
    plan = "<br>".join(flag_lines(escape(setting.measurement.plan), 48))
    peak = format_bytes(setting.measurement.peak_allocated_bytes)
    return f"{setting.number} · {plan}<br>{_speed(setting)}, peak {peak} allocated"


def _speed(setting: _Setting) -> str:
    if not setting.measurement.fits:
        return "ran out of memory"
    said = speed(setting.measurement)
    return "not timed yet" if said == NOTHING else f"{said} samples/s"


def _bar_names(sheet: _Sheet) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "text", "xaxis": "x3", "yaxis": "y3", "showlegend": False, "cliponaxis": False,
        "x": [0] * len(sheet.settings), "y": [row - 0.36 for row in range(len(sheet.settings))],
        "text": [_bar_name(each, sheet.settings[0]) for each in sheet.settings], "textposition": "middle right",
        "textfont": {"size": 11, "color": NEUTRAL_INK}, "hoverinfo": "skip",
    }  # fmt: skip


def _bar_name(setting: _Setting, first: _Setting) -> str:
    said = _speed(setting).removesuffix(" samples/s")
    if setting is not first:
        said += then_change(speed_ratio(setting.measurement, first.measurement))
    plan = escape(_shortened(setting.measurement.plan, max(_LEAST_PLAN_CHARACTERS, _MOST_NAME_CHARACTERS - len(said))))
    name = f"{setting.number} · {plan}"
    return f"<b>▸ {name}</b>   {said}" if setting.in_force else f"{name}   {said}"


def _shortened(plan: str, most_characters: int) -> str:
    """As many flags as there is room for."""
    first, *more = flag_lines(plan, most_characters)
    return f"{first} …" if more else first


# --- axes, words and lines ------------------------------------------------------------------------------------------


def _layout(moment: Moment, sheet: _Sheet, mapped: Chart) -> dict[str, Any]:
    labels, step = change_labels(moment), (_inside_points(sheet), _inside_scale(sheet)[0])
    rows = 1 + max((label.row for label in labels), default=-1) + (sheet.most_bytes == sheet.budget_bytes)
    # the labels of the changes stand in a strip above the memory
    top = _roomy(max(1, sheet.most_bytes) / sheet.unit) / share_below(rows)
    return {
        # no background and no template: it reads in a light and in a dark notebook
        "template": "none", "paper_bgcolor": _CLEAR, "plot_bgcolor": _CLEAR, "height": HEIGHT_PIXELS, "autosize": True, "hovermode": "closest", "bargap": 0.1,
        "margin": {"l": 62, "r": 14, "t": _TOP_PIXELS, "b": 44}, "font": {"color": NEUTRAL_INK, "size": 12},
        "hoverlabel": {"bgcolor": "#2B2B2B", "bordercolor": "#8C8C8C", "font": {"color": "#FFFFFF"}, "align": "left"},
        "modebar": {"bgcolor": _CLEAR, "color": NEUTRAL_INK},
        # its lower edge stays where it is, so that no margin moves when it grows by a line
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "traceorder": "normal", "font": {"size": 12},
                   "yref": "container", "y": 1 - (_TOP_PIXELS - 38) / HEIGHT_PIXELS, "yanchor": "bottom"},
        **_axes(sheet, mapped, top),
        "shapes": [*_budget_lines(sheet, mapped), *change_lines(labels), *phase_shapes(*step)],
        "annotations": [*_titles(sheet, mapped), *_empty(sheet, mapped), *_budget_names(sheet, mapped),
                        *change_names(labels), *phase_names(*step)],
    }  # fmt: skip


def _axes(sheet: _Sheet, mapped: Chart, top: float) -> dict[str, Any]:
    unit, name = scale(mapped.most_bytes)
    memory, throughput = axis_names(mapped)
    fastest = max((each.per_second * (1 + finite(each.measurement.spread)) for each in sheet.settings), default=0)
    slots = max(4, len(sheet.settings))
    seconds = _inside_scale(sheet)[1]
    # of a few steps, every one has its tick; of more, plotly chooses
    ticks = "linear" if sheet.stacks and sheet.stacks[-1][0] - sheet.stacks[0][0] < 8 else "auto"
    time = {"showgrid": False, "zeroline": False}
    return {
        "xaxis": _axis("step", "y", _LEFT, tickmode=ticks, dtick=1, tickformat=",.0f", showticklabels=bool(sheet.stacks), **time),
        "yaxis": _axis(f"peak memory of a step, {sheet.name}", "x", _UPPER, range=[0, top]),
        "xaxis2": _axis(f"time in the step, {seconds}", "y2", _RIGHT, showticklabels=sheet.shown is not None, **time),
        "yaxis2": _axis(f"memory allocated, {sheet.name}", "x2", _UPPER, range=[0, top]),
        "xaxis3": _axis(throughput, "y3", _LEFT, range=[0, _roomy(fastest)], showticklabels=bool(sheet.settings)),
        "yaxis3": _axis("", "x3", _LOWER, range=[slots - 0.5, -0.75], showticklabels=False, **time),
        "xaxis4": _axis(f"{memory}, {name}", "y4", _RIGHT, range=[0, _roomy(mapped.most_bytes / unit)]),
        "yaxis4": _axis(throughput, "x4", _LOWER, range=[0, _roomy(mapped.most_per_second)],
                        showticklabels=bool(mapped.points or mapped.trials)),
    }  # fmt: skip


def _axis(title: str, anchor: str, domain: list[float], **more: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "font": {"size": 12}, "standoff": 6},
        "gridcolor": _RULE, "zerolinecolor": _RULE, "linecolor": _RULE, "anchor": anchor, "domain": domain,
        # no margin that grows with the ticks: the pictures would move while they are looked at
        "automargin": False, **more,
    }  # fmt: skip


def _roomy(most: float) -> float:
    """A round number above, so that an axis stays as it is while its values move a little.

    Example:
        >>> _roomy(1.31), _roomy(5.476), _roomy(0.0)
        (1.5, 6.0, 1.0)
    """
    if most <= 1e-9:
        return 1.0
    size = 10.0 ** math.floor(math.log10(most))
    return next(nice * size for nice in (*_NICE, 12.5) if nice * size >= most * 1.04)


def _budget_lines(sheet: _Sheet, mapped: Chart) -> list[dict[str, Any]]:
    line = {"color": BUDGET, "dash": "dash", "width": 1.5}
    if sheet.budget_bytes is None:
        return []
    level, place = sheet.budget_bytes / sheet.unit, sheet.budget_bytes / scale(mapped.most_bytes)[0]
    flat = [
        {"type": "line", "xref": f"{axes[0]} domain", "x0": 0, "x1": 1, "yref": axes[1], "y0": level, "y1": level, "line": line}
        for axes in (_TIMES, _INSIDE) if _is_near(sheet)
    ]  # fmt: skip
    return [
        *flat,
        {"type": "line", "xref": "x4", "x0": place, "x1": place, "yref": "y4 domain", "y0": 0, "y1": 1, "line": line},
    ]


def _is_near(sheet: _Sheet) -> bool:
    return sheet.budget_bytes is not None and sheet.budget_bytes <= sheet.most_bytes


def _budget_names(sheet: _Sheet, mapped: Chart) -> list[dict[str, Any]]:
    """On a ground of its own, since it may stand on memory."""
    if sheet.budget_bytes is None:
        return []
    chip = {"text": f"budget {format_bytes(sheet.budget_bytes)}", "bgcolor": _CHIP, "borderpad": 1,
            "font": {"color": "#FFFFFF", "size": 11}, "showarrow": False}  # fmt: skip
    near = chip | {"x": 1, "xanchor": "right", "y": sheet.budget_bytes / sheet.unit, "yanchor": "bottom"}
    both = [near | {"xref": f"{axes[0]} domain", "yref": axes[1]} for axes in (_TIMES, _INSIDE) if _is_near(sheet)]
    place = sheet.budget_bytes / scale(mapped.most_bytes)[0]
    anchor = "right" if sheet.budget_bytes > mapped.most_bytes * 0.55 else "left"
    below = {"x": place, "xref": "x4", "xanchor": anchor, "y": 1, "yref": "y4 domain", "yanchor": "top"}
    return [*both, chip | below]


def _titles(sheet: _Sheet, mapped: Chart) -> list[dict[str, Any]]:
    """Over every picture its title, and below that what its marks mean."""
    changes = "dotted: the setting was changed" if sheet.stacks else ""
    if sheet.stacks and sheet.budget_bytes and not _is_near(sheet):
        changes += f"; budget {format_bytes(sheet.budget_bytes)} is far above"
    inside = f"{escape(_shortened(sheet.shown.plan, 22))}; shaded: backward" if sheet.shown else ""
    speeds = "▸ in force; whiskers: spread of the steps" if sheet.settings else ""
    keys = (changes, inside, speeds, map_key(mapped))
    pictures = (_TIMES, _INSIDE, _SPEEDS, _MAP)
    headings = [_word(x, y, f"<b>{title}</b>", 20) for x, y, title, _ in pictures]
    return headings + [_word(x, y, key, 4, size=11) for (x, y, _, _), key in zip(pictures, keys, strict=True)]


def _word(x: str, y: str, text: str, shift: int, size: int = 13) -> dict[str, Any]:
    return {
        "text": text, "xref": f"{x} domain", "x": 0, "xanchor": "left", "yref": f"{y} domain", "y": 1,
        "yanchor": "bottom", "yshift": shift, "showarrow": False, "font": {"size": size}, "align": "left",
    }  # fmt: skip


def _empty(sheet: _Sheet, mapped: Chart) -> list[dict[str, Any]]:
    is_empty = [not sheet.stacks, not sheet.shown, not sheet.settings, not (mapped.points or mapped.trials)]
    return [
        {"text": f"<i>{text}</i>", "xref": f"{x} domain", "yref": f"{y} domain", "x": 0.5, "y": 0.5, "showarrow": False}
        for (x, y, _, text), empty in zip((_TIMES, _INSIDE, _SPEEDS, _MAP), is_empty, strict=True) if empty
    ]  # fmt: skip
