"""Marks of the live figure, as plotly takes them: colours, hatches and phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memlab.records import Phase, TimelinePoint
from memlab.report.segments import stretches, swatch

# the grey with the same contrast to white and to the dark theme's background
NEUTRAL_INK = "#7A7A7A"
BUDGET = "#D9534F"
# the picture of one step, by its axes
_STEP = {"xref": "x2", "yref": "y2 domain"}
_PHASE_SHADES = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.10, Phase.STEP: 0.22, Phase.OTHER: 0.0}
# a phase shorter than this share of the step has no room for its name
_LEAST_SHARE = 0.2


def pale(colour: str, opacity: float) -> str:
    """A translucent version of a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def pattern(category: str) -> dict[str, Any]:
    """The hatch of a category, so that it is known without its colour."""
    look = swatch(category)
    return {"shape": look.pattern, "fgcolor": "rgba(255,255,255,.7)", "bgcolor": look.colour, "size": 7}


def phase_shapes(points: Sequence[TimelinePoint], factor: float) -> list[dict[str, Any]]:
    """The phases of a step as pale stretches behind it; its seconds are multiplied with `factor`."""
    return [
        {
            "type": "rect", **_STEP, "y0": 0, "y1": 1, "layer": "below", "line": {"width": 0},
            "x0": stretch.start_seconds * factor, "x1": stretch.stop_seconds * factor,
            "fillcolor": f"rgba(128,128,128,{_PHASE_SHADES[stretch.phase]})",
        }
        for stretch in stretches(points)
    ]  # fmt: skip


def phase_names(points: Sequence[TimelinePoint], factor: float) -> list[dict[str, Any]]:
    """The names of the phases at the top, where there is room for them."""
    wide = points[-1].seconds * _LEAST_SHARE if points else 0
    return [
        {"text": str(each.phase), **_STEP, "y": 1, "yanchor": "top", "showarrow": False, "font": {"size": 11},
         "x": (each.start_seconds + each.stop_seconds) / 2 * factor}
        for each in stretches(points) if each.phase is not Phase.OTHER and each.stop_seconds - each.start_seconds > wide
    ]  # fmt: skip
