"""Memory in the live figure: of every step, with the changes of the plan, and inside one step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from memlab.records import Phase
from memlab.records.live_state import Change, Moment
from memlab.report.live_sheet import INSIDE, TIMES, Sheet
from memlab.report.segments import CATEGORIES, NEUTRAL_INK, stretches, swatch
from memlab.report.wording import flags

# the picture of one step, by its axes
_STEP = {"xref": "x2", "yref": "y2 domain"}
_PHASE_SHADES = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.10, Phase.STEP: 0.22, Phase.OTHER: 0.0}
# a phase shorter than this share of the picture has no room for its name
_LEAST_SHARE = 0.25


def memory_traces(moment: Moment, sheet: Sheet) -> list[dict[str, Any]]:
    """Return layers by category over steps and inside one step, with the measured peaks and the outline of the step before."""
    return [*_times(sheet), _peaks(moment, sheet), *_inside(sheet), _outline(sheet)]


def _times(sheet: Sheet) -> list[dict[str, Any]]:
    steps = _widened([step for step, _ in sheet.stacks])
    stacks = _to_the_edges([parts for _, parts in sheet.stacks])
    return [
        _layer(category, steps, stacks, sheet, said="step %{x:.0f}", axes=TIMES, shape="hvh", group="steps")
        for category in CATEGORIES
    ]


def _widened(steps: Sequence[int]) -> list[float]:
    """Half a step more at both ends, so that the first and the last step are as wide as the others."""
    return [steps[0] - 0.49, *steps, steps[-1] + 0.49] if steps else []


def _to_the_edges(values: Sequence[Any]) -> list[Any]:
    """Return what is drawn at widened steps."""
    return [*values[:1], *values, *values[-1:]]


def _layer(
    category: str, places: list[float], stacks: Sequence[Mapping[str, int]], sheet: Sheet, *,
    said: str, axes: tuple[str, ...], shape: str, group: str,
) -> dict[str, Any]:  # fmt: skip
    look = swatch(category)
    # the hatch of a category, so that it is known without its colour
    hatch = {"shape": look.pattern, "fgcolor": "rgba(255,255,255,.7)", "bgcolor": look.colour, "size": 7}
    sizes = [parts.get(category, 0) for parts in stacks]
    return {
        "type": "scatter", "name": category, "xaxis": axes[0], "yaxis": axes[1], "stackgroup": group,
        "x": places, "y": [round(size / sheet.unit, 4) for size in sizes] if any(sizes) else [0] * len(places),
        "line": {"width": 0, "shape": shape, "color": look.colour}, "fillcolor": look.colour, "fillpattern": hatch,
        "legendgroup": category, "showlegend": _is_named(category, sheet, axes),
        "hovertemplate": f"{category} %{{y{_digits(sheet.unit)}}} {sheet.name}<br>{said}<extra></extra>",
    }  # fmt: skip


def _is_named(category: str, sheet: Sheet, axes: tuple[str, ...]) -> bool:
    """Once in the legend: in the first picture if it has any of it, or else in the second."""
    over_time = any(parts.get(category) for _, parts in sheet.stacks)
    if axes is TIMES:
        return over_time
    return not over_time and any(point.live_bytes.get(category) for point in sheet.points)


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


def _peaks(moment: Moment, sheet: Sheet) -> dict[str, Any]:
    measured = list(_held_peaks(moment))
    sizes = [round(size / sheet.unit, 4) for _, size in measured]
    return {
        "type": "scatter", "name": "measured peak", "mode": "lines", "xaxis": "x", "yaxis": "y",
        "x": _widened([step for step, _ in measured]), "y": _to_the_edges(sizes),
        "line": {"color": NEUTRAL_INK, "width": 2, "shape": "hvh"}, "showlegend": bool(measured),
        "hovertemplate": f"step %{{x:.0f}}: peak %{{y{_digits(sheet.unit)}}} {sheet.name}<extra></extra>",
    }  # fmt: skip


# --- inside one step ------------------------------------------------------------------------------------------------


def _inside(sheet: Sheet) -> list[dict[str, Any]]:
    times = [round(point.seconds * sheet.seconds_factor, 4) for point in sheet.points]
    said = f"%{{x:.4~r}} {sheet.seconds_name} into the step"
    live = [point.live_bytes for point in sheet.points]
    return [
        _layer(category, times, live, sheet, said=said, axes=INSIDE, shape="hv", group="step")
        for category in CATEGORIES
    ]


def _outline(sheet: Sheet) -> dict[str, Any]:
    points = sheet.before.timeline if sheet.before else ()
    return {
        "type": "scatter", "name": "the setting before", "mode": "lines", "xaxis": "x2", "yaxis": "y2",
        "x": [round(point.seconds * sheet.seconds_factor, 4) for point in points],
        "y": [round(point.total_bytes / sheet.unit, 4) for point in points],
        "line": {"color": NEUTRAL_INK, "dash": "dash", "width": 1.6, "shape": "hv"},
        "hovertemplate": f"before: %{{y{_digits(sheet.unit)}}} {sheet.name}<extra></extra>", "showlegend": bool(points),
    }  # fmt: skip


# --- phases of the step -----------------------------------------------------------------------------------------------


def phase_shapes(sheet: Sheet) -> list[dict[str, Any]]:
    """The phases of a step as pale stretches behind it."""
    factor = sheet.seconds_factor
    return [
        {
            "type": "rect", **_STEP, "y0": 0, "y1": 1, "layer": "below", "line": {"width": 0},
            "x0": stretch.start_seconds * factor, "x1": stretch.stop_seconds * factor,
            "fillcolor": f"rgba(128,128,128,{_PHASE_SHADES[stretch.phase]})",
        }
        for stretch in stretches(sheet.points)
    ]  # fmt: skip


def phase_names(sheet: Sheet) -> list[dict[str, Any]]:
    """The names of the phases at the top, where there is room for them."""
    wide = sheet.longest_seconds * _LEAST_SHARE
    return [
        {"text": str(each.phase), **_STEP, "y": 1, "yanchor": "top", "showarrow": False, "font": {"size": 11},
         "x": (each.start_seconds + each.stop_seconds) / 2 * sheet.seconds_factor}
        for each in stretches(sheet.points) if each.phase is not Phase.OTHER and each.stop_seconds - each.start_seconds > wide
    ]  # fmt: skip


# --- changes of the plan: a line each, and names that stand clear of one another ------------------------------------

# the narrowest picture with names, in pixels (figure.mjs leaves numbers alone in others), and what a character takes
_WIDTH_PIXELS, _HEIGHT_PIXELS, _CHARACTER_PIXELS, _LABEL_PIXELS = 250, 205, 5.8, 14
_MOST_LABEL_ROWS = 4


@dataclass(frozen=True)
class Label:
    """The mark of a change."""

    step: int
    plan: str
    text: str
    at: float
    start: float
    stop: float
    row: int

    def covers(self, other: Label) -> bool:
        """The two texts stand on each other."""
        return self.row == other.row and self.start < other.stop and other.start < self.stop

    def crosses(self, other: Label) -> bool:
        """A line runs through the other's text; a line ends at the row of its own text."""
        return any(
            one.row <= text.row and text.start < one.at < text.stop for one, text in ((self, other), (other, self))
        )


def change_labels(moment: Moment) -> list[Label]:
    """Names of the changes, placed so that none stands on another.

    The newest are placed first: where room runs out, the oldest lose theirs.
    """
    if not moment.points:
        return []
    start = moment.points[0].step - 0.5
    steps = max(1, moment.points[-1].step + 0.5 - start)
    numbers = {measurement.plan: number for number, measurement in enumerate(moment.measurements, 1)}
    labels: list[Label] = []
    for each, was in reversed(list(zip(moment.changes, _plans_before(moment), strict=True))):
        at = (each.step - 0.5 - start) / steps * _WIDTH_PIXELS
        labels.append(_placed(each, was, numbers.get(each.plan), at, labels))
    used = sorted({label.row for label in labels if label.text})
    return [replace(label, row=bisect_left(used, label.row)) for label in reversed(labels)]


def _placed(each: Change, was: str, number: int | None, at: float, taken: Sequence[Label]) -> Label:
    """The best place there is left: the number alone, or a line below all words, rather than a line through words."""
    words = what_changed(was, each.plan)
    head = f"<b>{number}</b>" if number else "·"
    candidates = [
        Label(each.step, each.plan, text, at, start, start + long, row)
        for text, characters in ((f"{head} {escape(words)}", len(words) + 2), (head, 2))
        for long in (characters * _CHARACTER_PIXELS + 6,)
        for start in (at, at - long)
        for row in range(_MOST_LABEL_ROWS)
        if start > -2 and start + long < _WIDTH_PIXELS + 8
    ]
    bare = [Label(each.step, each.plan, "", at, at, at, row) for row in range(_MOST_LABEL_ROWS + 1)]
    return next(
        label
        for label in (*candidates, *bare)
        if not any(label.covers(other) or label.crosses(other) for other in taken)
    )


def _plans_before(moment: Moment) -> list[str]:
    if not moment.changes:
        return []
    earlier = [point.plan for point in moment.points if point.step < moment.changes[0].step]
    return [earlier[-1] if earlier else "", *(each.plan for each in moment.changes[:-1])]


def what_changed(was: str, now: str) -> str:
    """The flags that came and went, short enough for a mark; the whole plan where there is nothing to compare.

    Example:
        >>> what_changed("--accumulate 4", "--accumulate 4 --checkpoint")
        '+ checkpoint'
        >>> what_changed("--accumulate 4 --bf16", "--accumulate 8 --bf16")
        'accumulate 8'
        >>> what_changed("--accumulate 4 --bf16", "--bf16")
        '− accumulate'
        >>> what_changed("--bf16", "as written")
        'as written'
    """
    if not was.startswith("--") or not now.startswith("--"):
        return now
    old, new = ({flag.split()[0]: flag for flag in flags(plan)} for plan in (was, now))
    gone = [f"− {name[2:]}" for name in old if name not in new]
    came = [f"{'' if name in old else '+ '}{flag[2:]}" for name, flag in new.items() if flag != old.get(name)]
    return " ".join([*gone, *came]) or now


def share_below(rows: int) -> float:
    """Share of the picture's height that is left below so many rows of names."""
    return 1 - (rows * _LABEL_PIXELS + 4) / _HEIGHT_PIXELS


def change_lines(labels: Sequence[Label]) -> list[dict[str, Any]]:
    """Lines of plotly, from the axis up to the names."""
    line = {"color": "rgba(128,128,128,.8)", "dash": "dot", "width": 1.2}
    return [
        {"type": "line", "xref": "x", "x0": each.step - 0.5, "x1": each.step - 0.5, "yref": "y domain",
         "y0": 0, "y1": 1 - each.row * _LABEL_PIXELS / _HEIGHT_PIXELS, "line": line}
        for each in labels
    ]  # fmt: skip


def change_names(labels: Sequence[Label]) -> list[dict[str, Any]]:
    """Annotations of plotly; the whole plan is in the hover text."""
    return [
        {"text": each.text, "x": each.step - 0.5, "xref": "x", "y": 1, "yref": "y domain", "yanchor": "top",
         "yshift": -each.row * _LABEL_PIXELS, "xanchor": "right" if each.start < each.at else "left",
         "showarrow": False, "font": {"size": 11}, "name": "change", "hovertext": escape(f"step {each.step}: {each.plan}")}
        for each in labels
    ]  # fmt: skip
