"""`steps`: the memory of several steps over time, drawn on one scale from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memlab.records import Profile
from memlab.report import showing, text, timeline_image
from memlab.report.segments import heading
from memlab.units import format_bytes


@dataclass(frozen=True)
class Steps:
    """A picture of steps, which a notebook shows."""

    profiles: Sequence[Profile]

    def __str__(self) -> str:
        return "\n\n".join(text.breakdown(profile) for profile in self.profiles)

    __repr__ = __str__

    def _repr_mimebundle_(self, **_wanted: Any) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
        said = "; ".join(f"{heading(p)}: peak {format_bytes(p.peak_allocated_bytes)}" for p in self.profiles)
        formats, metadata = showing.picture(timeline_image.together_png(self.profiles), said)
        return formats | {"text/plain": str(self)}, metadata


def steps(*profiles: Profile) -> Steps:
    """Draw steps below each other, on one scale of memory and one of time.

    Example:
        >>> from memlab.records import Measurement, Phase, TimelinePoint
        >>> point = TimelinePoint(0.0, Phase.FORWARD, {"parameters": 2**20})
        >>> m = Measurement("as written", "cpu", 2**20, None, 0, {"parameters": 2**20}, (point,), (0.5,), 8, 0)
        >>> steps(m)
        as written · cpu
        parameters          1.0 MiB   100 %  ████████████████████████
        peak allocated      1.0 MiB   in the forward pass
    """
    return Steps(profiles)
