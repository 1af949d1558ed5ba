"""Progress of a run in a few lines of HTML without script: a sentence, and memory and speed by step as a small picture.

It is drawn anew several times a second beside a loop that trains, so it is cheap: steps are gathered into columns a few
pixels wide, the highest step of each counts, and stretches where nothing changes take no room.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from memlab.records.live_state import Change, LivePoint, Moment
from memlab.report.html import keys
from memlab.report.segments import categories_of, completed, scale, swatch
from memlab.report.wording import rate
from memlab.units import format_bytes, format_seconds

# the picture, in pixels: names of plans, memory, throughput, steps from top to bottom; scales left and right of them
_WIDTH, _HEIGHT = 640, 130
_LEFT, _RIGHT = 62, 566
_NAMES_BASE = 10
_MEMORY_TOP, _MEMORY_BOTTOM = 16, 80
_SPEED_TOP, _SPEED_BOTTOM = 90, 114
_STEPS_BASE = 127
_COLUMN = 3
_COLUMNS = (_RIGHT - _LEFT) // _COLUMN
_LETTER = 6.2
_LEAST_LETTERS = 10
_MOST_LETTERS_LEFT = 40
_MOST_MARKS = 20
# a limit that would squeeze the curve below this share of the height is told, and not drawn
_LEAST_SHARE = 0.4
_HEADROOM = 1.06
# samples per second: one in decades is none
_LEAST_SPEED = 1e-9

_LIMIT = "#D9534F"
_RULE = "rgba(128,128,128,.3)"
_TEXT = "font-size:13px;font-variant-numeric:tabular-nums;line-height:1.45"
_SVG = "display:block;max-width:100%;height:auto"
_KEYS = "font-size:11px;padding-left:62px"


def compact(moment: Moment) -> str:
    """Write how a run is going as a piece of HTML that reads on a light and on a dark page.

    Returns:
        A `<div>` with a status line and, once a step has ended, a picture; at most 20 KiB, whatever the run.
    """
    status = f'<div role="status" aria-live="polite" style="padding:2px 0 4px">{escape(compact_text(moment))}</div>'
    return f'<div class="memlab-live" style="{_TEXT}">{status}{_picture(moment) if moment.points else ""}</div>'


def compact_text(moment: Moment) -> str:
    """Return how a run is going in one line.

    Example:
        >>> from memlab.records.live_state import Activity
        >>> from memlab.plan import Plan
        >>> point = LivePoint(1, "as written", 0.5, 16.0, 2**30, {})
        >>> compact_text(Moment("gpt2", Activity.TRAINING, 1, Plan(), None, (), (point,), budget_bytes=2**31))
        'memfit · as written · step 1 · 500.0 ms a step · 16.0 samples/s · peak allocated 1.00 GiB of 2.00 GiB budget'
    """
    parts = ["memfit", moment.plan.label]
    if moment.pending is not None:
        parts[-1] += f" → {moment.pending.label} (pending)"
    if moment.points:
        newest = moment.points[-1]
        parts += [f"step {newest.step}", f"{format_seconds(newest.seconds)} a step"]
        if math.isfinite(newest.samples_per_second):
            parts.append(f"{rate(newest.samples_per_second)} samples/s")
        peak_bytes = _highest(point for point in moment.points if point.plan == newest.plan)
        if peak_bytes is not None:
            limit = _limit(moment)
            of_limit = f" of {format_bytes(limit.size_bytes)} {limit.name}" if limit is not None else ""
            parts.append(f"peak allocated {format_bytes(peak_bytes)}{of_limit}")
    if moment.rescues:
        parts.append(f"{len(moment.rescues)} rescue{'' if len(moment.rescues) == 1 else 's'}")
    return " · ".join(parts)


def _highest(points: Iterable[LivePoint]) -> int | None:
    return max((point.peak_bytes for point in points if point.peak_bytes is not None), default=None)


@dataclass(frozen=True)
class _Limit:
    """The line that memory should stay below."""

    name: str
    size_bytes: int


def _limit(moment: Moment) -> _Limit | None:
    if moment.budget_bytes is not None:
        return _Limit("budget", moment.budget_bytes)
    return _Limit("capacity", moment.capacity_bytes) if moment.capacity_bytes is not None else None


# -- steps as columns


@dataclass(frozen=True)
class _Column:
    """A few pixels' width of steps."""

    peak_bytes: int | None  # of the highest; where none was observed, as observed last under the plan; None before
    parts: Mapping[str, int]  # bytes by category; what they leave of the peak is a category of its own
    speed: float  # mean samples per second; NaN where none are known

    @property
    def total_bytes(self) -> int:
        return max(self.peak_bytes or 0, sum(self.parts.values()))


_NO_STEPS = _Column(None, {}, math.nan)


@dataclass(frozen=True)
class _Steps:
    """The axis of steps: each step is as wide as the others, and the last one ends at the right edge."""

    first: int
    last: int

    def x(self, step: int) -> float:
        share = (step - self.first) / (self.last + 1 - self.first)
        return _LEFT + (_RIGHT - _LEFT) * min(1.0, max(0.0, share))

    def column(self, point: LivePoint) -> int:
        return min(_COLUMNS - 1, int((self.x(point.step) - _LEFT) / _COLUMN))


def _columns(points: Sequence[LivePoint], steps: _Steps) -> list[_Column]:
    """Columns from left to right; where no step begins, the one before goes on."""
    columns: list[_Column] = []
    plan, newest = "", _NO_STEPS
    for index, group in groupby(points, key=steps.column):
        columns += [newest] * (index - len(columns))
        gathered = list(group)
        known_bytes = newest.peak_bytes if gathered[0].plan == plan else None
        columns.append(_column(gathered, known_bytes))
        plan, plan_before = gathered[-1].plan, gathered[0].plan
        # what goes on is the newest plan, however high the one before it was
        newest = columns[-1] if plan == plan_before else _column([p for p in gathered if p.plan == plan], None)
    return columns + [newest] * (_COLUMNS - len(columns))


def _column(points: Sequence[LivePoint], peak_before_bytes: int | None) -> _Column:
    highest = max(points, key=lambda point: -1 if point.peak_bytes is None else point.peak_bytes)
    peak_bytes = peak_before_bytes if highest.peak_bytes is None else highest.peak_bytes
    speeds = [point.samples_per_second for point in points if math.isfinite(point.samples_per_second)]
    speed = sum(speeds) / len(speeds) if speeds else math.nan
    return _Column(peak_bytes, completed(highest.live_bytes, peak_bytes or 0), speed)


# -- the picture


@dataclass(frozen=True)
class _Axis:
    """A scale from zero at the bottom to its most at the top."""

    most: float
    top: int
    bottom: int

    def y(self, value: float) -> int:
        return round(self.bottom - (self.bottom - self.top) * min(1.0, max(0.0, value / self.most)))


def _picture(moment: Moment) -> str:
    steps = _Steps(moment.points[0].step, moment.points[-1].step)
    columns = _columns(moment.points, steps)
    names = categories_of([column.parts for column in columns])
    limit = _limit(moment)
    memory = _Axis(_most_bytes(columns, limit), _MEMORY_TOP, _MEMORY_BOTTOM)
    pieces = (
        f"<title>memory and throughput by step</title><desc>{escape(_spoken(moment))}</desc>",
        _memory_scale(memory),
        *_layers(columns, names, memory),
        _line([None if each.peak_bytes is None else memory.y(each.peak_bytes) for each in columns]),
        _limit_line(limit, memory),
        _speed(columns),
        _marks(moment.changes, steps),
        _text(_LEFT, _STEPS_BASE, f"step {steps.first}"),
        _text(_RIGHT, _STEPS_BASE, f"step {steps.last}", "end") if steps.last > steps.first else "",
    )
    return (
        f'<svg role="img" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" style="{_SVG}" '
        f'font-size="11" fill="currentColor">{"".join(pieces)}</svg>{keys(names, _KEYS)}'
    )


def _most_bytes(columns: Sequence[_Column], limit: _Limit | None) -> float:
    """Return what stands at the top: a little more than the peak, and than the limit if that is not too far off."""
    highest = max(1, *(column.total_bytes for column in columns))
    if limit is not None and highest >= limit.size_bytes * _LEAST_SHARE:
        highest = max(highest, limit.size_bytes)
    return highest * _HEADROOM


def _spoken(moment: Moment) -> str:
    first, last = moment.points[0].step, moment.points[-1].step
    highest = _highest(moment.points)
    peak = f"; highest peak {format_bytes(highest)}" if highest is not None else ""
    changes = "".join(f"; from step {each.step}: {each.plan}" for each in moment.changes[-_MOST_MARKS:])
    return f"steps {first} to {last}{peak}{changes}"


def _memory_scale(axis: _Axis) -> str:
    unit, name = scale(axis.most)
    ticks = [0, *_ticks(axis.most / unit, 4)]
    return "".join(
        f"{_rule(axis.y(tick * unit))}{_text(_LEFT - 6, axis.y(tick * unit) + 4, f'{tick:g} {name}' if tick else '0', 'end')}"
        for tick in ticks
    )


def _ticks(most: float, count: int) -> list[float]:
    """Return at most so many round numbers up to `most`, evenly spaced.

    Example:
        >>> _ticks(11.4, 3), _ticks(0.93, 2)
        ([5.0, 10.0], [0.5])
    """
    magnitude = 10.0 ** math.floor(math.log10(most / count))
    step = next(each for factor in (1, 2, 5, 10) if (each := factor * magnitude) * (count + 1) > most)
    return [step * number for number in range(1, int(most / step) + 1)]


def _layers(columns: Sequence[_Column], names: Sequence[str], axis: _Axis) -> Iterator[str]:
    """The highest layer first, each down to zero: those below are painted over it."""
    layers, tops = [], [0] * len(columns)
    for name in names:
        tops = [top + column.parts.get(name, 0) for top, column in zip(tops, columns, strict=True)]
        heights = groupby(axis.y(top) for top in tops)
        stairs = "".join(f"V{height}h{_COLUMN * len(list(group))}" for height, group in heights)
        # without smoothed edges, or a layer that is covered would shine through at the rim
        layers.append(
            f'<path shape-rendering="crispEdges" fill="{swatch(name).colour}" '
            f'd="M{_LEFT} {axis.bottom}{stairs}V{axis.bottom}z"/>'
        )
    return reversed(layers)


def _line(heights: Sequence[int | None]) -> str:
    """A line over columns; it is broken where there is no height."""
    pieces, x, is_drawn = [], _LEFT, False
    for height, group in groupby(heights):
        wide = _COLUMN * len(list(group))
        if height is not None:
            pieces.append(f"{'V' if is_drawn else f'M{x} '}{height}h{wide}")
        is_drawn = height is not None
        x += wide
    return f'<path fill="none" stroke="currentColor" stroke-width="1.5" d="{"".join(pieces)}"/>' if pieces else ""


def _limit_line(limit: _Limit | None, axis: _Axis) -> str:
    """The limit with its name at the right; an arrow up where it is far above."""
    if limit is None:
        return ""
    is_far = limit.size_bytes > axis.most
    y = axis.y(limit.size_bytes)
    line = f'<path stroke="{_LIMIT}" stroke-width="1.5" stroke-dasharray="5 3" d="M{_LEFT} {y}H{_RIGHT}"/>'
    base = min(max(y + 1, _MEMORY_TOP + 4), _MEMORY_BOTTOM - 8)
    return (
        f"{'' if is_far else line}{_text(_RIGHT + 5, base, f'↑ {limit.name}' if is_far else limit.name)}"
        f"{_text(_RIGHT + 5, base + 12, format_bytes(limit.size_bytes))}"
    )


def _speed(columns: Sequence[_Column]) -> str:
    speeds = [column.speed for column in columns]
    fastest = max((speed for speed in speeds if math.isfinite(speed)), default=0.0)
    if fastest < _LEAST_SPEED:
        return ""
    axis = _Axis(fastest * _HEADROOM, _SPEED_TOP, _SPEED_BOTTOM)
    (tick, *_) = reversed(_ticks(axis.most, 2))
    scales = "".join(_rule(axis.y(value)) for value in (0, tick))
    return (
        f"{scales}{_text(_LEFT - 6, axis.y(tick) + 4, f'{tick:g}', 'end')}{_text(_LEFT - 6, _SPEED_BOTTOM + 4, '0', 'end')}"
        f"{_line([axis.y(speed) if math.isfinite(speed) else None for speed in speeds])}"
        f"{_text(_RIGHT + 5, (_SPEED_TOP + _SPEED_BOTTOM) // 2 + 4, 'samples/s')}"
    )


def _marks(changes: Sequence[Change], steps: _Steps) -> str:
    """A line where each plan came into force, and its flags above as far as there is room."""
    shown = [change for change in changes if change.step <= steps.last][-_MOST_MARKS:]
    marks = [steps.x(change.step) for change in shown]
    pieces, free_until = [], float(_RIGHT)
    for number in reversed(range(len(shown))):
        x, plan = marks[number], shown[number].plan
        if shown[number].step > steps.first:
            path = f"M{x:.1f} {_NAMES_BASE - 8}V{_SPEED_BOTTOM}"
            pieces.append(f'<path stroke="currentColor" stroke-dasharray="2 2" opacity=".7" d="{path}"/>')
        label = _shortened(plan, int((free_until - x) / _LETTER))
        if not label and number == len(shown) - 1:
            # a plan that has just come into force is named to the left of its mark
            label = _shortened(plan, min(_MOST_LETTERS_LEFT, int((free_until - marks[number - 1]) / _LETTER)))
        start = min(x + 2, free_until - len(label) * _LETTER)
        if label:
            pieces.append(_text(round(start), _NAMES_BASE, label))
        free_until = min(x, start) - _LETTER
    return "".join(pieces)


def _shortened(label: str, letters: int) -> str:
    """A label in so many letters; nothing where a few would tell nothing."""
    if len(label) <= letters:
        return label
    return f"{label[: letters - 1].rstrip()}…" if letters >= _LEAST_LETTERS else ""


def _rule(y: int) -> str:
    return f'<path stroke="{_RULE}" d="M{_LEFT} {y}H{_RIGHT}"/>'


def _text(x: int, y: int, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
