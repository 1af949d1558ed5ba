"""How a run is going, in a few lines of HTML without script: a sentence, and memory and speed by step as a small picture.

It is drawn anew several times a second beside a loop that trains, so it is cheap: steps are gathered into columns a few
pixels wide, the highest step of each counts, and stretches where nothing changes cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from memlab.moment import LivePoint, Moment
from memlab.records import Category
from memlab.report.columns import flag_lines, rate
from memlab.report.segments import REST, categories_of, ordered, scale, swatch
from memlab.units import format_bytes, format_seconds

BUDGET = "#D9534F"
# pixels of the picture
_WIDTH, _HEIGHT = 640, 128
_LEFT, _RIGHT = 72, 632
_MEMORY_TOP, _MEMORY_BOTTOM = 16, 76
_SPEED_TOP, _SPEED_BOTTOM = 86, 112
_COLUMN = 4
_COLUMNS = (_RIGHT - _LEFT) // _COLUMN
_LETTER = 6.2
# a limit that would squeeze the curve below this share of the height is told, and not drawn
_LEAST_SHARE = 0.4
# less than this share of a peak goes unexplained without a mention
_NO_REST = 0.001

_TEXT = "font-size:13px;font-variant-numeric:tabular-nums;line-height:1.45"
_SVG = "display:block;max-width:100%;height:auto;overflow:visible"
_KEY = "display:inline-block;width:10px;height:10px;margin-right:5px"


def compact(moment: Moment) -> str:
    """Write how a run is going as a piece of HTML.

    Args:
        moment: the run; every text in it is escaped.

    Returns:
        A `<div>` with a status line and, once a step has ended, a picture of 640 by 128 pixels; at most 20 KiB.

    Example:
        >>> from memlab.moment import Activity
        >>> from memlab.plan import Plan
        >>> point = LivePoint(1, "as written", 0.5, 16.0, 2**30, {"parameters": 2**29})
        >>> compact(Moment("t", Activity.TRAINING, 1, Plan(), None, (), (point,)))[:43]
        '<div class="memlab-live" style="font-size:1'
    """
    status = f'<div role="status" aria-live="polite" style="padding:2px 0">{escape(compact_text(moment))}</div>'
    return f'<div class="memlab-live" style="{_TEXT}">{status}{_picture(moment) if moment.points else ""}</div>'


def compact_text(moment: Moment) -> str:
    """How a run is going in one line.

    Example:
        >>> from memlab.moment import Activity
        >>> from memlab.plan import Plan
        >>> point = LivePoint(1, "as written", 0.5, 16.0, 2**30, {})
        >>> compact_text(Moment("t", Activity.TRAINING, 1, Plan(), None, (), (point,), budget_bytes=2**31))
        'memfit · as written · step 1 · 500.0 ms a step · 16.0 samples/s · peak allocated 1.00 GiB of 2.00 GiB budget'
    """
    parts = ["memfit", moment.plan.label]
    if moment.pending is not None:
        parts[-1] += f" → {moment.pending.label} pending"
    if moment.points:
        parts += _newest(moment.points[-1])
        peak_bytes = _peak_under(moment.points, moment.points[-1].plan)
        parts += [f"peak allocated {format_bytes(peak_bytes)}{_of_limit(moment)}"] if peak_bytes is not None else []
    if moment.rescues:
        parts.append(f"{len(moment.rescues)} rescue{'' if len(moment.rescues) == 1 else 's'}")
    return " · ".join(parts)


def _newest(point: LivePoint) -> list[str]:
    parts = [f"step {point.step}", f"{format_seconds(point.seconds)} a step"]
    return [*parts, f"{rate(point.samples_per_second)} samples/s"] if math.isfinite(point.samples_per_second) else parts


def _peak_under(points: Iterable[LivePoint], plan: str) -> int | None:
    peaks = (point.peak_bytes for point in points if point.plan == plan)
    return max((peak for peak in peaks if peak is not None), default=None)


def _of_limit(moment: Moment) -> str:
    limit = _limit(moment)
    return f" of {format_bytes(limit.size_bytes)} {limit.name}" if limit is not None else ""


@dataclass(frozen=True)
class _Limit:
    """The line that memory should stay below."""

    name: str
    size_bytes: int
    colour: str


def _limit(moment: Moment) -> _Limit | None:
    if moment.budget_bytes is not None:
        return _Limit("budget", moment.budget_bytes, BUDGET)
    return _Limit("capacity", moment.capacity_bytes, "currentColor") if moment.capacity_bytes is not None else None


# -- columns


@dataclass(frozen=True)
class _Column:
    """A few pixels in a row: the highest of their steps.

    Attributes:
        peak_bytes: its peak; the one observed last under the plan when its own was not observed, None before.
        parts: bytes by category; what they do not explain of the peak is a category of its own.
        speed: samples per second, the mean of the steps; NaN where none is known.
    """

    peak_bytes: int | None
    parts: Mapping[str, int]
    speed: float


def _columns(points: Sequence[LivePoint]) -> list[_Column]:
    """Steps from left to right; each lasts until the next one."""
    place = _places(points)
    columns: list[_Column] = []
    plan, known = "", _Column(None, {}, math.nan)
    for index, group in groupby(points, key=lambda point: place(point.step) // _COLUMN):
        columns += [known] * (index - len(columns))
        steps = list(group)
        plan_before, plan = plan, steps[-1].plan
        known = _column(steps, known if plan == plan_before else None)
        columns.append(known)
    return columns + [known] * (_COLUMNS - len(columns))


def _column(steps: Sequence[LivePoint], before: _Column | None) -> _Column:
    highest = max(steps, key=lambda step: -1 if step.peak_bytes is None else step.peak_bytes)
    peak_bytes = highest.peak_bytes
    if peak_bytes is None and before is not None:
        peak_bytes = before.peak_bytes
    speeds = [step.samples_per_second for step in steps if math.isfinite(step.samples_per_second)]
    speed = sum(speeds) / len(speeds) if speeds else math.nan
    return _Column(peak_bytes, _completed(highest.live_bytes, peak_bytes), speed)


def _completed(parts: Mapping[str, int], peak_bytes: int | None) -> Mapping[str, int]:
    if peak_bytes is None:
        return parts
    rest = peak_bytes - sum(parts.values()) + parts.get(Category.UNUSED, 0)
    return {**parts, REST: rest} if rest > peak_bytes * _NO_REST else parts


class _Places:
    """Where a step stands, in pixels from the left edge of the plot."""

    def __init__(self, points: Sequence[LivePoint]) -> None:
        self._first = points[0].step
        self._steps = max(1, points[-1].step + 1 - self._first)

    def __call__(self, step: int) -> int:
        share = (step - self._first) / self._steps
        return min(_RIGHT - _LEFT - 1, max(0, int(share * (_RIGHT - _LEFT))))


def _places(points: Sequence[LivePoint]) -> _Places:
    return _Places(points)


# -- picture


@dataclass(frozen=True)
class _Axis:
    """A scale from zero up.

    Attributes:
        most: value at the top.
        top: pixel of the top.
        bottom: pixel of zero.
    """

    most: float
    top: int
    bottom: int

    def height(self, value: float) -> float:
        return (self.bottom - self.top) * min(1.0, max(0.0, value / self.most))

    def y(self, value: float) -> int:
        return round(self.bottom - self.height(value))


def _picture(moment: Moment) -> str:
    columns = _columns(moment.points)
    names = categories_of([column.parts for column in columns])
    memory = _Axis(_top_of(columns, moment), _MEMORY_TOP, _MEMORY_BOTTOM)
    pieces = [
        f"<title>{escape('memory and throughput by step')}</title><desc>{escape(_spoken(moment))}</desc>",
        _memory_scale(memory),
        *_layers(columns, names, memory),
        _peak_line(columns, memory),
        _limit_line(moment, memory),
        _speed_plot(columns),
        _marks(moment),
        _steps_scale(moment.points),
    ]
    return (
        f'<svg role="img" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" style="{_SVG}" '
        f'font-size="11" fill="currentColor">{"".join(pieces)}</svg>{_keys(names)}'
    )
