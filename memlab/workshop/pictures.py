"""Pictures of the notebooks, with alternative texts: `steps`, the memory of several steps on one scale, and `picture`, any figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memlab.records import Profile
from memlab.report import canvas, showing, text, timeline_image
from memlab.report.segments import heading
from memlab.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def picture(figure: Figure, words: str) -> None:
    """Show a figure of matplotlib's with an alternative text, black made a grey that reads on light and dark pages.

    Args:
        figure: as `matplotlib.pyplot.subplots` makes it; pyplot shows it no second time.
        words: what it shows, for who does not see it.
    """
    import matplotlib.pyplot as plt
    from IPython.display import display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_hex
    from matplotlib.text import Text

    plt.close(figure)
    FigureCanvasAgg(figure)
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.set_facecolor("none")
        axes.tick_params(colors=canvas.INK)
        axes.spines[:].set_color(canvas.INK)
    for each in figure.findobj(Text):
        if to_hex(each.get_color()) == "#000000":
            each.set_color(canvas.INK)
    formats, metadata = showing.picture(canvas.encode(figure), words)
    display(formats, raw=True, metadata=metadata)  # type: ignore[no-untyped-call] # unannotated in IPython
