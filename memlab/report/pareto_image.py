"""Memory against throughput as a static picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from memlab.report import canvas
from memlab.report.pareto import DRAWN_IN_ORDER, FOUND_RING, MEASURED, SPEED_NAME, Chart, Point, PointLook, Trial
from memlab.report.segments import scale
from memlab.report.wording import flag_lines

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_Box = tuple[float, float, float, float]
_Mark = tuple[float, float, int]  # where it is, and how bad it is to hide it
# with more points than this, intervals are drawn for the front alone
_MOST_INTERVALS = 40
_OPEN = {"markerfacecolor": "none"}


def png(chart: Chart) -> bytes:
    """Draw predictions as open marks, their Pareto front as a line, trials as filled marks, the budget as a line."""
    figure = canvas.paper(5.2, chart.title)
    axes = figure.add_axes((0.065, 0.105, 0.92, 0.745))
    canvas.plain(axes)
    axes.grid(visible=True, color=canvas.GRID, linewidth=0.8, linestyle="-")
    unit, name = scale(chart.most_bytes)
    axes.set_xlim(0, chart.most_bytes / unit * 1.06)
    axes.set_ylim(0, chart.most_per_second * 1.12)
    canvas.label_x(axes, f"{chart.memory_name}, {name}")
    axes.set_ylabel(SPEED_NAME, fontsize=9, color=canvas.INK, family=canvas.FONT, loc="top")
    if chart.points:
        _draw(axes, chart, unit)
    else:
        canvas.say(axes, 0.5, 0.5, "no speed was predicted", ha="center", color=canvas.INK, transform=axes.transAxes)
    canvas.legend(figure, _handles(chart), 0.93)
    return canvas.encode(figure, title=chart.title, description=chart.description)


def _draw(axes: Axes, chart: Chart, unit: int) -> None:
    if chart.budget_bytes is not None:
        canvas.mark_budget(axes, chart.budget_bytes, unit, along="x")
    spread = chart.points if len(chart.points) <= _MOST_INTERVALS else chart.front
    for point in spread:
        _draw_interval(axes, point, unit)
    front = [(point.memory_bytes / unit, point.per_second) for point in chart.front]
    axes.step([x for x, _ in front], [y for _, y in front], where="post", color=canvas.INK, linewidth=1.3, zorder=3)
    for look in _looks(chart.points):
        _draw_points(axes, [point for point in chart.points if point.look is look], look, unit)
    for trial in chart.trials:
        _draw_trial(axes, trial, unit)
    _label(axes, chart, unit)


def _looks(points: Iterable[Point]) -> list[PointLook]:
    used = [point.look for point in points]
    return [look for look in DRAWN_IN_ORDER if any(one is look for one in used)]


def _draw_interval(axes: Axes, point: Point, unit: int) -> None:
    x, y = point.memory_bytes / unit, point.per_second
    axes.plot([size / unit for size in point.memory_interval], [y, y], color=point.look.colour, alpha=0.35, linewidth=1)
    axes.plot([x, x], list(point.speed_interval), color=point.look.colour, alpha=0.35, linewidth=1)


def _draw_points(axes: Axes, points: list[Point], look: PointLook, unit: int) -> None:
    for on_front in (False, True):
        chosen = [point for point in points if point.on_front is on_front]
        axes.plot(
            [point.memory_bytes / unit for point in chosen], [point.per_second for point in chosen], linestyle="",
            marker=look.marker, markersize=6.5 if on_front else 4.5, markerfacecolor="none",
            markeredgecolor=look.colour, markeredgewidth=1.6 if on_front else 0.9, alpha=None if on_front else 0.7,
            zorder=4 if on_front else 2,
        )  # fmt: skip


def _draw_trial(axes: Axes, trial: Trial, unit: int) -> None:
    at = (trial.place[0] / unit, trial.place[1])
    if trial.ran_out:
        axes.plot(*at, marker="x", markersize=10, markeredgecolor=MEASURED.colour, markeredgewidth=2.2, zorder=6)
        return
    if trial.predicted is not None:
        steps = (trial.predicted.memory_bytes / unit, at[0]), (trial.predicted.per_second, at[1])
        axes.plot(*steps, color=MEASURED.colour, linewidth=1.2, linestyle=(0, (2, 1)), zorder=5)
    full: dict[str, Any] = {"color": MEASURED.colour, "markeredgecolor": canvas.GAP, "markeredgewidth": 0.8}
    axes.plot(*at, marker="o", markersize=7.5, zorder=6, **full)
    if trial.is_found:
        ring: dict[str, Any] = {**_OPEN, "markeredgecolor": FOUND_RING, "markeredgewidth": 2.4}
        axes.plot(*at, marker="o", markersize=16, zorder=6, **ring)


def _label(axes: Axes, chart: Chart, unit: int) -> None:
    """Names beside some marks, where they hide the fewest others and no line, if that can be."""
    transform = axes.transLimits
    marks: list[_Mark] = [
        (*transform.transform((p.memory_bytes / unit, p.per_second)), 5 if p.on_front else 1) for p in chart.points
    ]
    marks += [(*transform.transform((t.place[0] / unit, t.place[1])), 5) for t in chart.trials]
    in_axes = axes.transAxes.inverted()
    for line in axes.lines:
        if line.get_linestyle() != "None":
            marks += _along(in_axes.transform(line.get_transform().transform(line.get_path().vertices)).tolist())
    places = {point.plan: (point.memory_bytes / unit, point.per_second) for point in chart.points}
    places |= {t.plan: (t.memory_bytes / unit, t.per_second) for t in chart.trials if t.is_found and not t.ran_out}
    taken: list[_Box] = []
    for plan in chart.labelled:
        if plan in places:
            at = transform.transform(places[plan])
            lines = flag_lines(plan, 34)
            boxes = [box for box in _boxes(at[0], at[1], lines) if not any(_overlap(box, other) for other in taken)]
            if boxes:
                best = min(boxes, key=lambda box: _hidden(box, marks))
                taken.append(best)
                _write_label(axes, (at[0], at[1]), best, lines)


def _along(corners: Sequence[Sequence[float]]) -> list[_Mark]:
    """Points on a line, closer to each other than a label is high."""
    found: list[_Mark] = []
    for (left, low), (right, high) in pairwise(corners):
        parts = max(1, round(max(abs(right - left), abs(high - low)) / 0.01))
        steps = [part / parts for part in range(parts + 1)]
        found += [(left + (right - left) * step, low + (high - low) * step, 1) for step in steps]
    return found


def _boxes(x: float, y: float, lines: list[str]) -> list[_Box]:
    """Places for a label around a mark, the nearest first, as left, bottom, right, top in shares of the axes."""
    # a character is about 0.0062 of the axes wide, a line 0.04 high
    wide, tall = max(map(len, lines)) * 0.0062, len(lines) * 0.04
    found = []
    for far in (0.028, 0.075, 0.14, 0.22, 0.3):
        for left in (x, x - wide, x - wide / 2):
            found += [(left, y + far, left + wide, y + far + tall), (left, y - far - tall, left + wide, y - far)]
        found += [(x + far / 2, y - tall / 2, x + far / 2 + wide, y + tall / 2)]
        found += [(x - far / 2 - wide, y - tall / 2, x - far / 2, y + tall / 2)]
    return [box for box in found if box[0] > 0.003 and box[1] > 0.01 and box[2] < 0.997 and box[3] < 0.985]


def _hidden(box: _Box, marks: list[_Mark]) -> int:
    return sum(
        weight for x, y, weight in marks if box[0] - 0.006 < x < box[2] + 0.006 and box[1] - 0.012 < y < box[3] + 0.012
    )


def _write_label(axes: Axes, at: tuple[float, float], box: _Box, lines: list[str]) -> None:
    nearest = (min(max(at[0], box[0]), box[2]), min(max(at[1], box[1]), box[3]))
    if abs(nearest[1] - at[1]) > 0.05 or abs(nearest[0] - at[0]) > 0.03:
        line: dict[str, Any] = {"transform": axes.transAxes, "color": canvas.INK, "linewidth": 0.8, "zorder": 3}
        axes.plot([at[0], nearest[0]], [at[1], nearest[1]], **line)
    axes.annotate(
        "\n".join(lines), (box[0], (box[1] + box[3]) / 2), xycoords="axes fraction", ha="left", va="center", fontsize=8.5, color=canvas.INK, family=canvas.FONT,
        linespacing=1.1, zorder=7, parse_math=False,
    )  # fmt: skip


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _handles(chart: Chart) -> list[Artist]:
    from matplotlib.lines import Line2D

    def mark(label: str, marker: str, colour: str, **style: Any) -> Artist:
        return Line2D([], [], linestyle="", marker=marker, markeredgecolor=colour, label=label, **style)

    ran = [trial for trial in chart.trials if not trial.ran_out]
    handles = [mark(look.name, look.marker, look.colour, **_OPEN, markersize=6) for look in _looks(chart.points)]
    if len(chart.front) > 1:
        handles.append(Line2D([], [], color=canvas.INK, linewidth=1.3, label="Pareto front"))
    if ran:
        handles.append(mark("measured", "o", MEASURED.colour, markerfacecolor=MEASURED.colour, markersize=7))
    if len(ran) < len(chart.trials):
        handles.append(mark("ran out of memory", "x", MEASURED.colour, markeredgewidth=2, markersize=7))
    if any(trial.is_found for trial in ran):
        handles.append(mark("found", "o", FOUND_RING, **_OPEN, markeredgewidth=2.2, markersize=11))
    return handles
