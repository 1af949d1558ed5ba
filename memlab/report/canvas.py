"""The sheet that static pictures are drawn on: its colours, its axes, and the PNG it becomes.

Drawn on matplotlib's own Agg canvas: pyplot, its registry of open figures and the user's `rcParams`
are neither used nor changed. The background is opaque, so a picture reads on a dark page too.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memlab.extras import require
from memlab.report.segments import Swatch, swatch
from memlab.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER = "#FCFCFB"
INK = "#22262B"
FAINT = "#6B7178"
GRID = "#E3E4E6"
BUDGET = "#B3261E"
FONT = "DejaVu Sans"  # comes with matplotlib: the same picture on every machine
# what is predicted, as a stroke through a bar
_STROKE: dict[str, Any] = {"color": INK, "linewidth": 1.3, "linestyle": (0, (2, 1.2))}
_PALE = 0.35
_DOTS_PER_INCH = 144
_COLOURS = 128
_WIDTH_INCHES = 11.0
_TITLE_CHARACTERS = 115


def paper(height_inches: float, title: str = "") -> Figure:
    """A sheet of this height, with a title at its top."""
    require("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), dpi=_DOTS_PER_INCH, facecolor=PAPER)
    figure.set_layout_engine("none")  # whatever the user's rcParams ask for
    FigureCanvasAgg(figure)
    lines = "\n".join(textwrap.wrap(title, _TITLE_CHARACTERS))
    style: dict[str, Any] = {"color": INK, "family": FONT, "parse_math": False, "size": 11, "weight": "bold"}
    figure.text(0.012, 1 - 0.1 / height_inches, lines, va="top", **style)
    return figure


def memory_beside_throughput(
    title: str, rows_inches: float, left: float, names: Iterable[str], *, predicted: bool, room_inches: float = 0.0
) -> tuple[Figure, Axes, Axes]:
    """A sheet for rows of bars: `left` of it for their names, memory, and throughput beside it; `room_inches` are free above.

    The legend explains categories, and the stroke of what is predicted.
    """
    head_inches = 0.19 * max(0, len(textwrap.wrap(title, _TITLE_CHARACTERS)) - 1)
    above = 0.74 + head_inches + room_inches
    height = above + rows_inches + 0.6
    figure = paper(height, title)
    grid = figure.add_gridspec(
        1, 2, width_ratios=(1.8, 1), left=left, right=0.985, top=1 - above / height, bottom=0.6 / height, wspace=0.08
    )
    memory, throughput = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    for axes in (memory, throughput):
        plain(axes)
        axes.set_yticks([])
        axes.grid(visible=True, axis="x", color=GRID, linewidth=0.8, linestyle="-")
    legend(figure, patches(names, predicted=predicted), 1 - (0.33 + head_inches) / height)
    return figure, memory, throughput


def encode(figure: Figure, *, has_small_marks: bool = False, **about: str) -> bytes:
    """PNG bytes with a palette: a notebook holds a picture per receipt, and flat colours need no more."""
    # Pillow comes with matplotlib
    from PIL import Image, PngImagePlugin

    # the canvas is asked, not `savefig`: that one follows the user's rcParams
    canvas: Any = figure.canvas
    canvas.draw()
    pixels = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")
    # of two ways to choose a palette: a few small marks keep their colour under maximum coverage
    method = Image.Quantize.MAXCOVERAGE if has_small_marks else Image.Quantize.MEDIANCUT
    palette = pixels.quantize(_COLOURS, method, dither=Image.Dither.NONE)
    texts = PngImagePlugin.PngInfo()
    for name, text in about.items():
        latin = text.replace("−", "-").replace("–", "-").encode("latin-1", "replace").decode("latin-1")
        texts.add_text(name.capitalize(), latin)  # PNG's texts are Latin-1
    buffer = io.BytesIO()
    palette.save(buffer, "png", optimize=True, pnginfo=texts, dpi=(_DOTS_PER_INCH, _DOTS_PER_INCH))
    return buffer.getvalue()


def plain(axes: Axes) -> None:
    """Axes without frame and ticks."""
    axes.set_facecolor(PAPER)
    axes.set_axisbelow(True)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, labelsize=9, colors=INK, labelfontfamily=FONT)


def label_x(axes: Axes, text: str) -> None:
    """Say what the horizontal axis counts."""
    axes.set_xlabel(text, fontsize=9, color=FAINT, family=FONT, loc="left")


def say(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write beside a mark, at its values."""
    usual: dict[str, Any] = {"va": "center", "fontsize": 9, "color": INK, "family": FONT, "parse_math": False}
    axes.text(x, y, text, **(usual | style))


def stacked_bar(
    axes: Axes, position: float, parts: Mapping[str, int], unit: int, *,
    thick: float = 0.6, look: Callable[[str], Swatch] = swatch, is_pale: bool = False,
) -> float:  # fmt: skip
    """Draw bytes by category one behind the other; returns where they end, in units of `unit` bytes."""
    end = 0.0
    # paper below pale bars, so that no line of the grid shines through
    axes.barh(position, sum(parts.values()) / unit, thick, color=PAPER)
    for name, size_bytes in parts.items():
        drawn = look(name)
        axes.barh(position, size_bytes / unit, thick, left=end, color=drawn.colour, hatch=drawn.hatch, edgecolor=PAPER,
                  linewidth=0.7, alpha=_PALE if is_pale else None)  # fmt: skip
        end += size_bytes / unit
    return end


def mark_predicted(axes: Axes, at: float, position: float) -> None:
    """Draw a stroke through a bar where it was predicted to end."""
    axes.plot([at, at], [position - 0.4, position + 0.4], zorder=4, **_STROKE)


@dataclass(frozen=True)
class SpeedBar:
    """Throughput of a row: a bar with the spread of its steps, and what is written behind it."""

    position: float
    per_second: float
    spread: float
    text: str
    is_pale: bool = False


def speed_bars(axes: Axes, bars: Iterable[SpeedBar], unit: str) -> None:
    """Draw throughputs below each other; spreads are shares of them."""
    drawn = list(bars)
    most = max((bar.per_second * (1 + bar.spread) for bar in drawn), default=0) or 1e-12
    for bar in drawn:
        ink, spread = FAINT if bar.is_pale else INK, bar.per_second * bar.spread
        axes.barh(bar.position, bar.per_second, 0.3, color="#9AA5B1", edgecolor=PAPER, linewidth=0.7,
                  alpha=_PALE if bar.is_pale else None)  # fmt: skip
        axes.errorbar(bar.per_second, bar.position, xerr=spread, fmt="none", ecolor=ink, elinewidth=1.1, capsize=3,
                      capthick=1.1)  # fmt: skip
        say(axes, bar.per_second + spread + most * 0.03, bar.position, bar.text, color=ink)
    axes.set_xlim(0, most * 1.6)
    label_x(axes, f"throughput, {unit}, with spread")


def mark_budget(axes: Axes, budget_bytes: int, unit: int, *, along: str = "y") -> None:
    """Draw the line of the budget, with its name; memory grows along `y` or along `x`."""
    at = budget_bytes / unit
    style: dict[str, Any] = {"color": BUDGET, "linewidth": 1.4, "linestyle": (0, (5, 3)), "zorder": 1}
    if along == "y":
        axes.axhline(at, **style)
        place, fractions, shift, side = (0.003, at), ("axes fraction", "data"), (0, 4), "left"
    else:
        axes.axvline(at, **style)
        is_late = at > sum(axes.get_xlim()) * 0.8
        place, fractions, side = (at, 1), ("data", "axes fraction"), "right" if is_late else "left"
        shift = (-3 if is_late else 3, 3)
    axes.annotate(
        f"budget {format_bytes(budget_bytes)}", place, xycoords=fractions, xytext=shift, textcoords="offset points",
        ha=side, fontsize=9, color=BUDGET, family=FONT, annotation_clip=False,
    )  # fmt: skip


def patches(
    names: Iterable[str], look: Callable[[str], Swatch] = swatch, *, alpha: float | None = None, predicted: bool = False
) -> list[Artist]:
    """Entries of a legend: categories by colour and hatch, and the stroke of what is predicted."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = []
    for name in names:
        drawn = look(name)
        handles.append(
            Patch(facecolor=drawn.colour, hatch=drawn.hatch, edgecolor=PAPER, linewidth=0, label=name, alpha=alpha)
        )
    return [*handles, *([Line2D([], [], label="predicted", **_STROKE)] if predicted else [])]


def legend(figure: Figure, handles: list[Artist], top: float, size: float = 9) -> None:
    """Explain marks in one line, `top` of the sheet up."""
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.012, top), ncols=max(1, len(handles)), frameon=False,
        labelcolor=INK, prop={"family": FONT, "size": size}, borderpad=0, borderaxespad=0, handlelength=1.5,
        handleheight=1.1, columnspacing=1.5, handletextpad=0.5,
    )  # fmt: skip
