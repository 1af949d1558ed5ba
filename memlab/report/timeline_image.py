"""The memory of a step over time as a picture: PNG bytes, of one step or of several on one scale.

What is predicted is paler than what is measured, and outlined with dashes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memlab.errors import MemlabError
from memlab.records import Phase, Prediction, Profile, TimelinePoint
from memlab.report.canvas import (
    FAINT,
    FONT,
    GRID,
    INK,
    PAPER,
    encode,
    label_x,
    legend,
    mark_budget,
    paper,
    patches,
    plain,
    say,
    write,
)
from memlab.report.segments import (
    Stretch,
    categories_of,
    heading,
    no_timeline,
    scale,
    stretches,
    swatch,
    time_scale,
)
from memlab.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# how far predicted layers are mixed with the paper
_PREDICTED_ALPHA = 0.5
_PHASES = {Phase.FORWARD: "#DDE3EA", Phase.BACKWARD: "#B9C3CF", Phase.STEP: "#8894A3", Phase.OTHER: "#F3F3F2"}
_HEAD_INCHES, _ROW_INCHES, _FOOT_INCHES = 0.5, 2.3, 0.42


def png(profile: Profile, budget_bytes: int | None = None) -> bytes:
    """Draw the memory of one step over time, stacked by category, above a band of its phases.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = paper(4.3)
    title = heading(profile)
    write(figure, 0.012, 0.972, "\n".join(textwrap.wrap(title, 120)), size=11, weight="bold", va="top")
    grid = figure.add_gridspec(
        2, 1, height_ratios=(14, 1), left=0.075, right=0.985, top=0.84, bottom=0.115, hspace=0.06
    )
    memory, band = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    for axes in (memory, band):
        plain(axes)
    if profile.timeline:
        most_bytes = max(1, budget_bytes or 0, _peak_bytes(profile))
        _draw_layers(memory, profile, most_bytes)
        if budget_bytes is not None:
            mark_budget(memory, budget_bytes, scale(most_bytes)[0])
        _draw_phases(band, profile.timeline)
        band.sharex(memory)
        _legend_of(figure, [profile], 0.908)
    else:
        say(memory, 0.5, 0.5, no_timeline(profile), ha="center", color=FAINT)
        memory.set_axis_off()
        band.set_axis_off()
    return encode(figure, title=title, description=f"Memory over one training step of {title}")


def together_png(profiles: Sequence[Profile]) -> bytes:
    """Draw several steps below each other, on one scale of memory and one of time.

    Raises:
        MissingExtraError: matplotlib is not installed.
        MemlabError: no profile, or one without a timeline.
    """
    bare = [profile.plan for profile in profiles if not profile.timeline]
    if bare or not profiles:
        raise MemlabError(f"a picture of steps needs steps with a timeline, and has none of {', '.join(bare) or 'any'}")
    height = _HEAD_INCHES + _ROW_INCHES * len(profiles) + _FOOT_INCHES
    figure = paper(height)
    grid = figure.add_gridspec(
        2 * len(profiles), 1, height_ratios=(12, 1) * len(profiles), left=0.075, right=0.985,
        top=1 - _HEAD_INCHES / height, bottom=_FOOT_INCHES / height, hspace=0.32,
    )  # fmt: skip
    most_bytes = max(map(_peak_bytes, profiles))
    slowest = max((profile.timeline for profile in profiles), key=lambda timeline: timeline[-1].seconds)
    factor, time_name = time_scale(slowest[-1].seconds)
    for number, profile in enumerate(profiles):
        memory, band = figure.add_subplot(grid[2 * number]), figure.add_subplot(grid[2 * number + 1])
        for axes in (memory, band):
            plain(axes)
        _draw_layers(memory, profile, most_bytes, factor)
        _draw_phases(band, profile.timeline, factor, slowest[-1].seconds)
        memory.set_title(profile.plan, loc="left", fontsize=10, color=INK, family=FONT, parse_math=False, pad=3)
        memory.set_xlim(0, max(slowest[-1].seconds * factor, 1e-9))
        band.set_xlim(memory.get_xlim())
        is_last = number == len(profiles) - 1
        label_x(band, f"time in the step, {time_name}{_short_phases(slowest)}" if is_last else "")
        band.tick_params(labelbottom=is_last)
    _legend_of(figure, profiles, 1 - 0.12 / height)
    words = "; ".join(f"{profile.plan} peaks at {format_bytes(_peak_bytes(profile))}" for profile in profiles)
    return encode(figure, title="Memory over one training step", description=words)


def _peak_bytes(profile: Profile) -> int:
    return max(point.total_bytes for point in profile.timeline)


def _legend_of(figure: Figure, profiles: Sequence[Profile], top: float) -> None:
    live = [point.live_bytes for profile in profiles for point in profile.timeline]
    is_predicted = all(isinstance(profile, Prediction) for profile in profiles)
    legend(figure, patches(categories_of(live), alpha=_PREDICTED_ALPHA if is_predicted else None), top)


def _draw_layers(axes: Axes, profile: Profile, most_bytes: int, factor: float | None = None) -> None:
    timeline, is_predicted = profile.timeline, isinstance(profile, Prediction)
    factor = factor or time_scale(timeline[-1].seconds)[0]
    unit, name = scale(most_bytes)
    seconds = [point.seconds * factor for point in timeline]
    floor = [0.0] * len(timeline)
    live: Sequence[Mapping[str, int]] = [point.live_bytes for point in timeline]
    for category in categories_of(live):
        top = [base + part.get(category, 0) / unit for base, part in zip(floor, live, strict=True)]
        look = swatch(category)
        axes.fill_between(seconds, floor, top, step="post", facecolor=look.colour, hatch=look.hatch, edgecolor=PAPER,
                          linewidth=0, alpha=_PREDICTED_ALPHA if is_predicted else None)  # fmt: skip
        floor = top
    if is_predicted:
        axes.step(seconds, floor, where="post", color=INK, linewidth=1.1, linestyle=(0, (4, 2)))
    _mark_peak(axes, timeline, unit, factor)
    axes.set_xlim(seconds[0], max(seconds[-1], 1e-9))
    axes.set_ylim(0, most_bytes / unit * 1.14)
    axes.grid(visible=True, axis="y", color=GRID, linewidth=0.8, linestyle="-")
    axes.tick_params(labelbottom=False)
    axes.set_ylabel(f"memory allocated, {name}", fontsize=9, color=FAINT, family=FONT, loc="top")


def _mark_peak(axes: Axes, timeline: Sequence[TimelinePoint], unit: int, factor: float) -> None:
    peak = max(timeline, key=lambda point: point.total_bytes)
    at = (peak.seconds * factor, peak.total_bytes / unit)
    axes.plot(*at, marker="o", markersize=6, markerfacecolor=PAPER, markeredgecolor=INK, markeredgewidth=1.4)
    is_late = peak.seconds > timeline[-1].seconds * 0.6
    axes.annotate(
        f"peak {format_bytes(peak.total_bytes)} in the {peak.phase.words}", at, xytext=(-9 if is_late else 9, 7),
        textcoords="offset points", ha="right" if is_late else "left", fontsize=9, color=INK, family=FONT,
    )  # fmt: skip


def _draw_phases(
    axes: Axes, timeline: Sequence[TimelinePoint], factor: float | None = None, axis_seconds: float = 0.0
) -> None:
    own_factor, time_name = time_scale(timeline[-1].seconds)
    factor = factor or own_factor
    whole = max(timeline[-1].seconds - timeline[0].seconds, axis_seconds, 1e-12)
    for stretch in stretches(timeline):
        start, length = stretch.start_seconds * factor, (stretch.stop_seconds - stretch.start_seconds) * factor
        axes.barh(0, length, 1, left=start, color=_PHASES[stretch.phase], edgecolor=PAPER, linewidth=0.6)
        if label := _phase_label(stretch, whole):
            say(axes, start + length / 2, 0, label, ha="center", fontsize=8.5)
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    label_x(axes, f"time in the step, {time_name}{_short_phases(timeline)}")


def _phase_label(stretch: Stretch, whole_seconds: float) -> str:
    """The phase's name where it fits, else its first letter, else nothing."""
    share = (stretch.stop_seconds - stretch.start_seconds) / whole_seconds
    if stretch.phase is Phase.OTHER or share < 0.012:
        return ""
    return str(stretch.phase) if share > 0.08 else stretch.phase[0].upper()


def _short_phases(timeline: Sequence[TimelinePoint]) -> str:
    whole_seconds = max(timeline[-1].seconds - timeline[0].seconds, 1e-12)
    labels = {_phase_label(stretch, whole_seconds) for stretch in stretches(timeline)}
    used = [phase for phase in Phase if phase[0].upper() in labels]
    return f"   ({', '.join(f'{phase[0].upper()} {phase}' for phase in used)})" if used else ""
