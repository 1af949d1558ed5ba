"""The sheet of the live figure: what its pictures have in common, and where each lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memlab.records import Measurement, TimelinePoint
from memlab.records.live_state import LivePoint, Moment
from memlab.report.segments import CATEGORIES, REST, completed, finite, scale, time_scale
from memlab.report.wording import flag_lines, flags

# bars for more settings than this leave no room for their names
_MOST_SETTINGS = 10
# a budget farther up than this would press the memory flat: it is written, not drawn
_FARTHEST_BUDGET = 2.5

LEFT, RIGHT, UPPER, LOWER = [0.0, 0.455], [0.55, 1.0], [0.57, 1.0], [0.0, 0.385]
# titles of the pictures, and what stands in them before there is anything to draw
TIMES = ("x", "y", "Memory, step by step", "memory of every step,<br>from the first one on")
INSIDE = ("x2", "y2", "Inside one step", "memory within a step,<br>once a step was observed")
SPEEDS = ("x3", "y3", "Throughput by setting", "samples per second of every setting,<br>once it was timed")
MAP = ("x4", "y4", "Memory against throughput", "every setting predicted or tried")


@dataclass(frozen=True)
class Setting:
    """A setting that was tried, with its number in that order."""

    number: int
    measurement: Measurement
    in_force: bool

    @property
    def per_second(self) -> float:
        return finite(self.measurement.samples_per_second)


@dataclass(frozen=True)
class Sheet:
    """Parts that the pictures have in common."""

    settings: tuple[Setting, ...]  # those that are drawn as bars, in the order in which they were first tried
    shown: Measurement | None  # the setting whose step is drawn, and `before`, the one that was in force before it
    before: Measurement | None
    points: tuple[TimelinePoint, ...]  # the timeline of that step; empty before one was observed
    longest_seconds: float  # how long the longer one of the two steps took; 0 before one was observed
    seconds_factor: float  # what to multiply seconds within a step with, and the unit that it gives
    seconds_name: str
    stacks: tuple[tuple[int, Mapping[str, int]], ...]  # bytes by category of every step that was observed
    unit: int  # of memory over time, with its `name`
    name: str
    most_bytes: int  # upper end of what is drawn there; 0 when there is nothing yet
    budget_bytes: int | None


def sheet_of(moment: Moment) -> Sheet:
    """Reduce a moment to what its pictures have in common."""
    shown, before = _shown(moment)
    stacks = tuple((point.step, _parts(point)) for point in moment.points if point.live_bytes or point.peak_bytes)
    sizes = [sum(parts.values()) for _, parts in stacks]
    timelines = [each.timeline for each in (shown, before) if each]
    sizes += [point.total_bytes for timeline in timelines for point in timeline]
    longest_seconds = max((timeline[-1].seconds for timeline in timelines), default=0)
    most_bytes = max(sizes, default=0)
    budget_bytes = moment.budget_bytes
    if budget_bytes and (not most_bytes or budget_bytes <= most_bytes * _FARTHEST_BUDGET):
        most_bytes = max(most_bytes, budget_bytes)
    unit, name = scale(most_bytes)
    factor, seconds_name = time_scale(longest_seconds)
    return Sheet(
        settings=_settings(moment), shown=shown, before=before, points=shown.timeline if shown else (),
        longest_seconds=longest_seconds, seconds_factor=factor, seconds_name=seconds_name,
        stacks=stacks, unit=unit, name=name, most_bytes=most_bytes, budget_bytes=budget_bytes,
    )  # fmt: skip


def _parts(point: LivePoint) -> Mapping[str, int]:
    """Bytes by category, completed up to the peak; what has no layer here is with the rest."""
    parts = completed(point.live_bytes, point.peak_bytes or 0)
    unknown = [name for name in parts if name not in CATEGORIES]
    if unknown:
        parts[REST] = parts.get(REST, 0) + sum(parts.pop(name) for name in unknown)
    return parts


def _settings(moment: Moment) -> tuple[Setting, ...]:
    """The first setting, the one in force, and the newest of the others."""
    every = [
        Setting(number, each, each.plan == moment.plan.label) for number, each in enumerate(moment.measurements, 1)
    ]
    if len(every) <= _MOST_SETTINGS:
        return tuple(every)
    kept = [each for each in every if each.in_force or each.number == 1]
    others = [each for each in every if each not in kept]
    return tuple(sorted([*kept, *others[len(kept) - _MOST_SETTINGS :]], key=lambda each: each.number))


def _shown(moment: Moment) -> tuple[Measurement | None, Measurement | None]:
    """The measurement whose step is drawn, in force if it can be, and the one that was in force before it."""
    observed = {each.plan: each for each in moment.measurements if each.timeline}
    # in the order in which they came into force: of earlier runs, what this one began with, what it was changed to
    changed = [*(point.plan for point in moment.points[:1]), *(each.plan for each in moment.changes)]
    order = [plan for plan in observed if plan not in changed] + [plan for plan in changed if plan in observed]
    if not order:
        return None, None
    shown = moment.plan.label if moment.plan.label in observed else order[-1]
    latest = len(order) - 1 - order[::-1].index(shown)
    before = next((plan for plan in reversed(order[:latest]) if plan != shown), None)
    return observed[shown], observed[before] if before else None


def shortened(plan: str, most_characters: int) -> str:
    """Return as many flags as there is room for.

    Example:
        >>> shortened("--accumulate 4 --checkpoint", 16), shortened("--offload activations,params", 16)
        ('--accumulate 4 …', '--offload activ…')
    """
    first, *more = flag_lines(plan, most_characters)
    text = f"{first} …" if more else first
    return text if len(text) <= most_characters else f"{text[: most_characters - 1]}…"


def told_apart(plans: Sequence[str], most_characters: Sequence[int]) -> list[str]:
    """Return each plan in as many characters as it has; where others begin like what is left of it, what they lack.

    Example:
        >>> told_apart(["--accumulate 4 --bf16", "--accumulate 4 --checkpoint", "as written"], [16, 16, 16])
        ['… --bf16', '… --checkpoint', 'as written']
    """
    found = []
    for plan, most in zip(plans, most_characters, strict=True):
        name = shortened(plan, most)
        left = name.rstrip("… ")
        alike = [flags(other) for other in plans if left != plan != other and other.startswith(left)]
        lacked = [[flag for flag in flags(plan) if not by(flag in other for other in alike)] for by in (any, all)]
        own = next((each for each in lacked if each), []) if alike else []
        found.append(f"… {shortened(' '.join(own), most - 2)}" if own else name)
    return found
