"""The live figure: a `Moment` in four pictures that hang together (two of `live_memory`, two of `live_settings`).

Memory of every step and memory inside one step share their unit and their height, so that a peak on the left
is the summit on the right. A setting has one number, in the order in which it was first tried: it stands at the
mark of its change, at its bar and at its mark in the map.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

from memlab.records.live_state import Moment
from memlab.report.live_memory import (
    change_labels,
    change_lines,
    change_names,
    memory_traces,
    phase_names,
    phase_shapes,
    share_below,
)
from memlab.report.live_settings import BARS_SHARE, map_key, map_traces, predicted, speed_traces, with_trials
from memlab.report.live_sheet import INSIDE, LEFT, LOWER, MAP, RIGHT, SPEEDS, TIMES, UPPER, Sheet, sheet_of, told_apart
from memlab.report.pareto import SPEED_NAME, Chart
from memlab.report.segments import BUDGET, NEUTRAL_INK, finite, scale
from memlab.units import format_bytes

HEIGHT_PIXELS = 680
# three lines of legend, a title and what explains it
_TOP_PIXELS = 98
# the colour of the budget, dark enough for white words
_CHIP = "#B5403C"
_RULE = "rgba(128,128,128,.25)"
_CLEAR = "rgba(0,0,0,0)"

_NICE = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0)


def drawing(moment: Moment, known: Chart | None = None) -> dict[str, Any]:
    """Reduce a moment to `traces` and a `layout`, as plotly takes them; with its `predicted`, or that of a like moment, half of the work is saved."""
    sheet = sheet_of(moment)
    mapped = with_trials(known or predicted(moment), moment)
    traces = [*memory_traces(moment, sheet), *speed_traces(sheet), *map_traces(mapped, moment.plan.label)]
    return {"traces": traces, "layout": _layout(moment, sheet, mapped)}


def _layout(moment: Moment, sheet: Sheet, mapped: Chart) -> dict[str, Any]:
    labels = change_labels(moment)
    rows = 1 + max((label.row for label in labels), default=-1) + (sheet.most_bytes == sheet.budget_bytes)
    # the labels of the changes stand in a strip above the memory
    top = _roomy(max(1, sheet.most_bytes) / sheet.unit) / share_below(rows)
    return {
        # no background and no template: it reads in a light and in a dark notebook
        "template": "none", "paper_bgcolor": _CLEAR, "plot_bgcolor": _CLEAR, "height": HEIGHT_PIXELS, "autosize": True, "hovermode": "closest", "bargap": 0.1,
        "uirevision": "kept",  # of what the reader has zoomed into, or hidden by the legend
        "margin": {"l": 62, "r": 14, "t": _TOP_PIXELS, "b": 44}, "font": {"color": NEUTRAL_INK, "size": 12},
        "hoverlabel": {"bgcolor": "#2B2B2B", "bordercolor": "#8C8C8C", "font": {"color": "#FFFFFF"}, "align": "left"},
        "modebar": {"bgcolor": _CLEAR, "color": NEUTRAL_INK},
        # its lower edge stays where it is, so that no margin moves when it grows by a line
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "traceorder": "normal", "font": {"size": 12},
                   "yref": "container", "y": 1 - (_TOP_PIXELS - 38) / HEIGHT_PIXELS, "yanchor": "bottom"},
        **_axes(sheet, mapped, top),
        "shapes": [*_budget_lines(sheet, mapped), *change_lines(labels), *phase_shapes(sheet)],
        "annotations": [*_titles(sheet, mapped), *_empty(sheet, mapped), *_budget_names(sheet, mapped),
                        *change_names(labels), *phase_names(sheet)],
    }  # fmt: skip


def _axes(sheet: Sheet, mapped: Chart, top: float) -> dict[str, Any]:
    unit, name = scale(mapped.most_bytes)
    fastest = max((each.per_second * (1 + finite(each.measurement.spread)) for each in sheet.settings), default=0)
    slots = max(4, len(sheet.settings))
    is_mapped = bool(mapped.points or mapped.trials)
    # of a few steps, every one has its tick; of more, plotly chooses
    ticks = "linear" if sheet.stacks and sheet.stacks[-1][0] - sheet.stacks[0][0] < 8 else "auto"
    time = {"showgrid": False, "zeroline": False}
    # to the steps alone: plotly would make room for names beside them
    first, last = (sheet.stacks[0][0] - 0.5, sheet.stacks[-1][0] + 0.5) if sheet.stacks else (None, None)
    return {
        "xaxis": _axis("step", "y", LEFT, tickmode=ticks, dtick=1, tickformat=",.0f", showticklabels=bool(sheet.stacks),
                       autorangeoptions={"minallowed": first, "maxallowed": last}, **time),
        "yaxis": _axis(f"peak memory of a step, {sheet.name}", "x", UPPER, range=[0, top], showticklabels=bool(sheet.stacks)),
        "xaxis2": _axis(f"time in the step, {sheet.seconds_name}", "y2", RIGHT, showticklabels=sheet.shown is not None, **time),
        "yaxis2": _axis(f"memory allocated, {sheet.name}", "x2", UPPER, range=[0, top], showticklabels=sheet.shown is not None),
        "xaxis3": _axis(SPEED_NAME, "y3", LEFT, range=[0, _roomy(fastest / BARS_SHARE)], showticklabels=bool(sheet.settings)),
        "yaxis3": _axis("", "x3", LOWER, range=[slots - 0.5, -0.75], showticklabels=False, **time),
        "xaxis4": _axis(f"{mapped.memory_name}, {name}", "y4", RIGHT, range=[0, _roomy(mapped.most_bytes / unit)], showticklabels=is_mapped),
        "yaxis4": _axis(SPEED_NAME, "x4", LOWER, range=[0, _roomy(mapped.most_per_second)], showticklabels=is_mapped),
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


def _budget_lines(sheet: Sheet, mapped: Chart) -> list[dict[str, Any]]:
    line = {"color": BUDGET, "dash": "dash", "width": 1.5}
    if sheet.budget_bytes is None:
        return []
    level, place = sheet.budget_bytes / sheet.unit, sheet.budget_bytes / scale(mapped.most_bytes)[0]
    flat = [
        {"type": "line", "xref": f"{axes[0]} domain", "x0": 0, "x1": 1, "yref": axes[1], "y0": level, "y1": level, "line": line}
        for axes in (TIMES, INSIDE) if _is_near(sheet)
    ]  # fmt: skip
    return [
        *flat,
        {"type": "line", "xref": "x4", "x0": place, "x1": place, "yref": "y4 domain", "y0": 0, "y1": 1, "line": line},
    ]


def _is_near(sheet: Sheet) -> bool:
    return sheet.budget_bytes is not None and sheet.budget_bytes <= sheet.most_bytes


def _budget_names(sheet: Sheet, mapped: Chart) -> list[dict[str, Any]]:
    """Names of budgets, on a ground of their own, since they may stand on memory."""
    if sheet.budget_bytes is None:
        return []
    chip = {"text": f"budget {format_bytes(sheet.budget_bytes)}", "bgcolor": _CHIP, "borderpad": 1,
            "font": {"color": "#FFFFFF", "size": 11}, "showarrow": False}  # fmt: skip
    near = chip | {"x": 1, "xanchor": "right", "y": sheet.budget_bytes / sheet.unit, "yanchor": "bottom"}
    both = [near | {"xref": f"{axes[0]} domain", "yref": axes[1]} for axes in (TIMES, INSIDE) if _is_near(sheet)]
    place = sheet.budget_bytes / scale(mapped.most_bytes)[0]
    anchor = "right" if sheet.budget_bytes > mapped.most_bytes * 0.55 else "left"
    below = {"x": place, "xref": "x4", "xanchor": anchor, "y": 1, "yref": "y4 domain", "yanchor": "top"}
    return [*both, chip | below]


def _titles(sheet: Sheet, mapped: Chart) -> list[dict[str, Any]]:
    """Titles over the pictures, and below each what its marks mean."""
    changes = "dotted: the setting was changed" if sheet.stacks else ""
    if sheet.stacks and sheet.budget_bytes and not _is_near(sheet):
        changes += f"; budget {format_bytes(sheet.budget_bytes)} is far above"
    inside = f"{escape(_name_of_shown(sheet))}; shaded: backward" if sheet.shown else ""
    speeds = "▸ in force; whiskers: spread of the steps" if sheet.settings else ""
    keys = (changes, inside, speeds, map_key(mapped))
    pictures = (TIMES, INSIDE, SPEEDS, MAP)
    headings = [_word("title", x, y, f"<b>{title}</b>", 20, 13) for x, y, title, _ in pictures]
    return headings + [_word("key", x, y, key, 4, 11) for (x, y, _, _), key in zip(pictures, keys, strict=True)]


def _name_of_shown(sheet: Sheet) -> str:
    """The plan whose step is drawn, told apart from the others that have bars."""
    assert sheet.shown is not None
    plans = [sheet.shown.plan, *(each.measurement.plan for each in sheet.settings)]
    return told_apart(plans, [22] * len(plans))[0]


def _word(name: str, x: str, y: str, text: str, shift: int, size: int) -> dict[str, Any]:
    return {
        "name": name, "text": text, "xref": f"{x} domain", "x": 0, "xanchor": "left", "yref": f"{y} domain", "y": 1,
        "yanchor": "bottom", "yshift": shift, "showarrow": False, "font": {"size": size}, "align": "left",
    }  # fmt: skip


def _empty(sheet: Sheet, mapped: Chart) -> list[dict[str, Any]]:
    is_empty = [not sheet.stacks, not sheet.shown, not sheet.settings, not (mapped.points or mapped.trials)]
    return [
        {"text": f"<i>{text}</i>", "xref": f"{x} domain", "yref": f"{y} domain", "x": 0.5, "y": 0.5, "showarrow": False}
        for (x, y, _, text), empty in zip((TIMES, INSIDE, SPEEDS, MAP), is_empty, strict=True) if empty
    ]  # fmt: skip
