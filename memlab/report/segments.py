"""Parts of the bars and layers of a picture: categories, their colours, phases, axis units.

The colours are Okabe and Ito's, told apart with every common colour blindness; each category also
has a hatch, so that a picture survives a black-and-white printer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from memlab.records import Category, Phase, Prediction, Profile, TimelinePoint
from memlab.units import GIB, KIB, MIB

# measured bytes that no observed step attributed to a category
REST = "not broken down"
# on pages of either theme: the grey with the same contrast to white and to the dark theme's background, and the budget
NEUTRAL_INK = "#7A7A7A"
BUDGET = "#D9534F"


@dataclass(frozen=True)
class Swatch:
    """Style of a category: a colour, a hatch of matplotlib, a pattern of plotly."""

    colour: str
    hatch: str
    pattern: str


_SWATCHES: dict[str, Swatch] = {
    Category.PARAMETERS: Swatch("#0072B2", "", ""),
    Category.GRADIENTS: Swatch("#E69F00", "//", "/"),
    Category.OPTIMIZER_STATE: Swatch("#009E73", "..", "."),
    Category.ACTIVATIONS: Swatch("#CC79A7", "\\\\", "\\"),
    Category.CACHE: Swatch("#F0E442", "++", "+"),
    Category.TEMPORARIES: Swatch("#56B4E9", "xx", "x"),
    Category.ELSEWHERE: Swatch("#999933", "oo", "."),
    Category.WORKSPACES: Swatch("#D55E00", "--", "-"),
    Category.UNUSED: Swatch("#BDBDBD", "", ""),
    REST: Swatch("#8C8C8C", "||", "|"),
}
# every category of a process by itself, in stacking order
CATEGORIES = tuple(_SWATCHES)
# what ranks of a run need beyond that
_OF_RANKS = {
    "gathered parameters": Swatch("#66B3E0", "oo", "."),
    "communication buffers": Swatch("#D55E00", "--", "-"),
}


def swatch(category: str) -> Swatch:
    """The look of a category; what is not known looks like the rest."""
    return (_SWATCHES | _OF_RANKS).get(category, _SWATCHES[REST])


def ordered(categories: Sequence[str] | set[str]) -> tuple[str, ...]:
    """Categories in the order in which every picture stacks them, unknown ones last."""
    order = list(_SWATCHES)
    return tuple(sorted(set(categories), key=lambda name: (order.index(name) if name in order else len(order), name)))


def heading(profile: Profile) -> str:
    """Return what a picture or a breakdown of one plan is called; what is predicted says so."""
    predicted = " · predicted" if isinstance(profile, Prediction) else ""
    return f"{profile.plan} · {profile.device}{predicted}"


def no_timeline(profile: Profile) -> str:
    """Return what stands in the place of a timeline that is not there."""
    if isinstance(profile, Prediction):
        return f"no timeline: {profile.refused or 'none was predicted for this plan'}"
    return "no timeline: no step of this plan was observed"


def segments(profile: Profile) -> dict[str, int]:
    """Bytes by category at the peak, in stacking order, completed up to the peak.

    A measured breakdown comes from one observed step and may fall short of the highest peak; the
    difference is shown as what it is.
    """
    parts = {name: profile.breakdown[name] for name in ordered(set(profile.breakdown))}
    parts = {name: size for name, size in parts.items() if size > 0}
    return completed(parts, profile.peak_allocated_bytes)


def completed(parts: Mapping[str, int], peak_bytes: int) -> dict[str, int]:
    """Return a breakdown with what it leaves open of a peak, as what it is."""
    rest_bytes = unexplained(parts, peak_bytes)
    return {**parts, REST: parts.get(REST, 0) + rest_bytes} if rest_bytes else dict(parts)


def unexplained(parts: Mapping[str, int], peak_bytes: int) -> int:
    """Bytes of a peak that its breakdown leaves open; 0 where that is next to nothing.

    Example:
        >>> unexplained({"parameters": 600}, 1000), unexplained({"parameters": 1000}, 1000)
        (400, 0)
    """
    rest_bytes = peak_bytes - (sum(parts.values()) - parts.get(Category.UNUSED, 0))
    return rest_bytes if rest_bytes > peak_bytes * 0.001 else 0


def categories_of(parts: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    """Every category that occurs in some of the breakdowns, in stacking order."""
    return ordered({name for part in parts for name, size in part.items() if size})


def scale(most_bytes: float) -> tuple[int, str]:
    """The unit of an axis: its bytes and its name."""
    return next(((size, name) for size, name in ((GIB, "GiB"), (MIB, "MiB")) if most_bytes >= size), (KIB, "KiB"))


def time_scale(most_seconds: float) -> tuple[float, str]:
    """Return what to multiply seconds with on an axis, and the unit it gives."""
    return (1.0, "s") if most_seconds >= 1 else (1000.0, "ms")


@dataclass(frozen=True)
class Stretch:
    """A stretch of time in which one phase ran."""

    phase: Phase
    start_seconds: float
    stop_seconds: float


def stretches(timeline: Sequence[TimelinePoint]) -> tuple[Stretch, ...]:
    """The phases of a timeline one after the other; a stretch lasts until the next one begins."""
    if not timeline:
        return ()
    firsts = [(phase, next(group).seconds) for phase, group in groupby(timeline, key=lambda point: point.phase)]
    stops = [start for _, start in firsts[1:]] + [timeline[-1].seconds]
    found = (Stretch(phase, start, stop) for (phase, start), stop in zip(firsts, stops, strict=True))
    return tuple(stretch for stretch in found if stretch.stop_seconds > stretch.start_seconds)


def rgb(colour: str) -> str:
    """Return a colour's red, green and blue, as style sheets have them within ``rgba()``."""
    return ", ".join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))


def finite(number: float) -> float:
    """Zero for what was not measured, so that a bar of no length is drawn."""
    return number if math.isfinite(number) else 0.0
