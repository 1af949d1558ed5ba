"""The memory of a step over time as a picture: PNG bytes, of one step or of several on one scale.

What is predicted is paler than what is measured, and outlined with dashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memlab.errors import MemlabError
from memlab.records import Phase, Prediction, Profile, TimelinePoint
from memlab.report import canvas
from memlab.report.segments import Stretch, categories_of, heading, no_timeline, scale, stretches, swatch, time_scale
from memlab.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# how far predicted layers are mixed with the page
_PREDICTED_ALPHA = 0.5
_PHASES = {Phase.FORWARD: "#DDE3EA", Phase.BACKWARD: "#B9C3CF", Phase.STEP: "#8894A3", Phase.OTHER: "none"}
_INK_ON_PHASES = "#22262B"
_HEAD_INCHES, _TITLE_INCHES, _STEP_INCHES, _FOOT_INCHES, _HEIGHT_ALONE = 0.54, 0.15, 2.3, 0.5, 4.3


def png(profile: Profile, budget_bytes: int | None = None) -> bytes:
    """Draw the memory of one step over time, stacked by category, above a band of its phases."""
    if profile.timeline:
        return _drawn([profile], heading(profile), budget_bytes)
    figure = canvas.paper(_HEIGHT_ALONE, heading(profile))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    canvas.say(axes, 0.5, 0.5, no_timeline(profile), ha="center", color=canvas.INK)
    return _encoded(figure, heading(profile))


def together_png(profiles: Sequence[Profile]) -> bytes:
    """Draw several steps below each other, on one scale of memory and one of time. Raises `MemlabError`: no profile, or one without a timeline."""
    bare = [profile.plan for profile in profiles if not profile.timeline]
    if bare or not profiles:
        raise MemlabError(f"a picture of steps needs steps with a timeline, and has none of {', '.join(bare) or 'any'}")
    return _drawn(profiles)


def _drawn(profiles: Sequence[Profile], title: str = "", budget_bytes: int | None = None) -> bytes:
    above = _HEAD_INCHES + (_TITLE_INCHES if title else 0)
    height = above + _STEP_INCHES * len(profiles) + _FOOT_INCHES if len(profiles) > 1 else _HEIGHT_ALONE
    figure = canvas.paper(height, title)
    most_bytes = max(1, budget_bytes or 0, *map(_peak_bytes, profiles))
    whole_seconds = max(profile.timeline[-1].seconds for profile in profiles)
    factor, time_name = time_scale(whole_seconds)
    steps = figure.add_gridspec(
        len(profiles), 1, left=0.075, right=0.985, top=1 - above / height, bottom=_FOOT_INCHES / height, hspace=0.22
    )
    for number, profile in enumerate(profiles):
        grid = steps[number].subgridspec(2, 1, height_ratios=(14, 1), hspace=0.06)
        memory, band = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
        for axes in (memory, band):
            canvas.plain(axes)
            axes.set_xlim(0, max(whole_seconds * factor, 1e-9))
        _draw_layers(memory, profile, most_bytes, factor)
        if budget_bytes is not None:
            canvas.mark_budget(memory, budget_bytes, scale(most_bytes)[0])
        _draw_phases(band, profile.timeline, factor, whole_seconds)
        band.tick_params(labelbottom=number == len(profiles) - 1)
        if not title:
            style: dict[str, Any] = {"color": canvas.INK, "family": canvas.FONT, "parse_math": False, "fontsize": 10}
            memory.set_title(profile.plan, loc="left", pad=3, **style)
    canvas.label_x(band, f"time in the step, {time_name}{_short_phases(profiles, whole_seconds)}")
    live = [point.live_bytes for profile in profiles for point in profile.timeline]
    is_predicted = all(isinstance(profile, Prediction) for profile in profiles)
    handles = canvas.patches(categories_of(live), alpha=_PREDICTED_ALPHA if is_predicted else None)
    canvas.legend(figure, handles, 1 - (0.39 if title else 0.12) / height)
    if title:
        return _encoded(figure, title)
    words = "; ".join(f"{profile.plan} peaks at {format_bytes(_peak_bytes(profile))}" for profile in profiles)
    return canvas.encode(figure, title="Memory over one training step", description=words)


def _encoded(figure: Figure, title: str) -> bytes:
    return canvas.encode(figure, title=title, description=f"Memory over one training step of {title}")


def _peak_bytes(profile: Profile) -> int:
    return max(point.total_bytes for point in profile.timeline)


def _draw_layers(axes: Axes, profile: Profile, most_bytes: int, factor: float) -> None:
    timeline, is_predicted = profile.timeline, isinstance(profile, Prediction)
    unit, name = scale(most_bytes)
    seconds = [point.seconds * factor for point in timeline]
    floor = [0.0] * len(timeline)
    live: Sequence[Mapping[str, int]] = [point.live_bytes for point in timeline]
    for category in categories_of(live):
        top = [base + part.get(category, 0) / unit for base, part in zip(floor, live, strict=True)]
        look = swatch(category)
        axes.fill_between(seconds, floor, top, step="post", facecolor=look.colour, hatch=look.hatch, edgecolor=canvas.GAP,
                          linewidth=0, alpha=_PREDICTED_ALPHA if is_predicted else None)  # fmt: skip
        floor = top
    if is_predicted:
        axes.step(seconds, floor, where="post", color=canvas.INK, linewidth=1.1, linestyle=(0, (4, 2)))
    _mark_peak(axes, timeline, unit, factor)
    axes.set_ylim(0, most_bytes / unit * 1.14)
    axes.grid(visible=True, axis="y", color=canvas.GRID, linewidth=0.8, linestyle="-")
    axes.tick_params(labelbottom=False)
    axes.set_ylabel(f"memory allocated, {name}", fontsize=9, color=canvas.INK, family=canvas.FONT, loc="top")


def _mark_peak(axes: Axes, timeline: Sequence[TimelinePoint], unit: int, factor: float) -> None:
    peak = max(timeline, key=lambda point: point.total_bytes)
    at = (peak.seconds * factor, peak.total_bytes / unit)
    axes.plot(*at, marker="o", markersize=6, markerfacecolor="none", markeredgecolor=canvas.INK, markeredgewidth=1.4)
    is_late = peak.seconds > timeline[-1].seconds * 0.6
    axes.annotate(
        f"peak {format_bytes(peak.total_bytes)} in the {peak.phase.words}", at, xytext=(-9 if is_late else 9, 7),
        textcoords="offset points", ha="right" if is_late else "left", fontsize=9, color=canvas.INK, family=canvas.FONT,
    )  # fmt: skip


def _draw_phases(axes: Axes, timeline: Sequence[TimelinePoint], factor: float, whole_seconds: float) -> None:
    for stretch in stretches(timeline):
        start, length = stretch.start_seconds * factor, (stretch.stop_seconds - stretch.start_seconds) * factor
        axes.barh(0, length, 1, left=start, color=_PHASES[stretch.phase], linewidth=0)
        if label := _phase_label(stretch, whole_seconds):
            canvas.say(axes, start + length / 2, 0, label, ha="center", fontsize=8.5, color=_INK_ON_PHASES)
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])


def _phase_label(stretch: Stretch, whole_seconds: float) -> str:
    """The phase's name where it fits, else its first letter, else nothing."""
    share = (stretch.stop_seconds - stretch.start_seconds) / max(whole_seconds, 1e-12)
    if stretch.phase is Phase.OTHER or share < 0.012:
        return ""
    return str(stretch.phase) if share > 0.08 else stretch.phase[0].upper()


def _short_phases(profiles: Sequence[Profile], whole_seconds: float) -> str:
    """Letters that stand for phases, in words."""
    labels = {_phase_label(each, whole_seconds) for profile in profiles for each in stretches(profile.timeline)}
    used = [phase for phase in Phase if phase[0].upper() in labels]
    return f"   ({', '.join(f'{phase[0].upper()} {phase}' for phase in used)})" if used else ""
