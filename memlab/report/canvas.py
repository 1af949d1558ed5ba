"""The sheet that static pictures are drawn on: its colours, its axes, and the PNG it becomes.

Drawn on matplotlib's own Agg canvas: pyplot, its registry of open figures and the user's `rcParams`
are neither used nor changed. There is no background, and text and lines have colours with the same contrast to white and
to a dark theme: a picture is at home on a light and on a dark page, whatever shows it.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from memlab.extras import require
from memlab.report.segments import BUDGET, NEUTRAL_INK, ordered, swatch
from memlab.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

INK = NEUTRAL_INK
GRID = "#80808040"
GAP = "#FFFFFF"  # of hatches, and around marks
FONT = "DejaVu Sans"  # comes with matplotlib: the same picture on every machine
# what is predicted, as a stroke through a bar
_STROKE: dict[str, Any] = {"color": INK, "linewidth": 1.3, "linestyle": (0, (2, 1.2))}
_DOTS_PER_INCH = 144
_COLOURS = 128
_WIDTH_INCHES = 11.0
_TITLE_CHARACTERS = 115


def paper(height_inches: float, title: str = "") -> Figure:
    """A sheet of this height, with a title at its top."""
    require("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), dpi=_DOTS_PER_INCH, facecolor="none")
    figure.set_layout_engine("none")  # whatever the user's rcParams ask for
    FigureCanvasAgg(figure)
    lines = "\n".join(textwrap.wrap(title, _TITLE_CHARACTERS))
    style: dict[str, Any] = {"color": INK, "family": FONT, "parse_math": False, "size": 11, "weight": "bold"}
    figure.text(0.012, 1 - 0.1 / height_inches, lines, va="top", **style)
    return figure


def head_inches(title: str) -> float:
    """Return how much of a sheet a title takes with a legend below it."""
    return 0.74 + 0.19 * max(0, len(textwrap.wrap(title, _TITLE_CHARACTERS)) - 1)


def encode(figure: Figure, **about: str) -> bytes:
    """PNG bytes with a palette: a notebook holds a picture per receipt, and flat colours need no more."""
    # Pillow comes with matplotlib
    from PIL import Image, PngImagePlugin

    # the canvas is asked, not `savefig`: that one follows the user's rcParams
    canvas: Any = figure.canvas
    canvas.draw()
    palette, places = _with_palette(np.asarray(canvas.buffer_rgba()))
    picture = Image.fromarray(places)
    picture.putpalette(palette.tobytes(), "RGBA")
    texts = PngImagePlugin.PngInfo()
    for name, text in about.items():
        latin = text.replace("−", "-").replace("–", "-").encode("latin-1", "replace").decode("latin-1")
        texts.add_text(name.capitalize(), latin)  # PNG's texts are Latin-1
    buffer = io.BytesIO()
    picture.save(buffer, "png", optimize=True, pnginfo=texts, dpi=(_DOTS_PER_INCH, _DOTS_PER_INCH))
    return buffer.getvalue()


def _with_palette(pixels: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The most frequent colours, and for each pixel the place of the nearest: Pillow's own ways drop what is transparent or rare."""
    height, width, _ = pixels.shape
    pixels = pixels.copy()
    pixels[..., 3] = pixels[..., 3] // 16 * 17  # steps of edges that nobody sees, in place of rare colours
    packed, inverse, counts = np.unique(pixels.view(np.uint32), return_inverse=True, return_counts=True)
    colours = packed.view(np.uint8).reshape(-1, 4)
    palette = colours[np.argsort(-counts, kind="stable")[:_COLOURS]]
    distances = np.abs(colours[:, None].astype(np.int16) - palette).sum(axis=-1)
    return palette, distances.argmin(axis=1).astype(np.uint8)[inverse].reshape(height, width)


def plain(axes: Axes) -> None:
    """Axes without frame and ticks."""
    axes.set_facecolor("none")
    axes.set_axisbelow(True)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, labelsize=9, colors=INK, labelfontfamily=FONT)


def label_x(axes: Axes, text: str) -> None:
    """Say what the horizontal axis counts."""
    axes.set_xlabel(text, fontsize=9, color=INK, family=FONT, loc="left")


def say(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write beside a mark, at its values."""
    usual: dict[str, Any] = {"va": "center", "fontsize": 9, "color": INK, "family": FONT, "parse_math": False}
    axes.text(x, y, text, **(usual | style))


def stacked_bar(
    axes: Axes, place: float, parts: Mapping[str, int], unit: int, *, thick: float, alpha: float | None = None
) -> None:
    """Draw bytes by category one behind the other, in units of `unit` bytes."""
    end = 0.0
    for name in ordered({*parts}):
        drawn, size = swatch(name), parts[name] / unit
        axes.barh(place, size, thick, left=end, color=drawn.colour, hatch=drawn.hatch, edgecolor=GAP, linewidth=0,
                  alpha=alpha)  # fmt: skip
        end += size


def mark_predicted(axes: Axes, at: float, place: float, reach: float) -> None:
    """Draw a stroke through a bar where it was predicted to end."""
    axes.plot([at, at], [place - reach, place + reach], zorder=4, **_STROKE)


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


def patches(names: Iterable[str], *, alpha: float | None = None, predicted: bool = False) -> list[Artist]:
    """Entries of a legend: categories by colour and hatch, and the stroke of what is predicted."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = []
    for name in names:
        drawn = swatch(name)
        handles.append(
            Patch(facecolor=drawn.colour, hatch=drawn.hatch, edgecolor=GAP, linewidth=0, label=name, alpha=alpha)
        )
    return [*handles, *([Line2D([], [], label="predicted", **_STROKE)] if predicted else [])]


def legend(figure: Figure, handles: list[Artist], top: float) -> None:
    """Explain marks in one line, `top` of the sheet up."""
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.012, top), ncols=max(1, len(handles)), frameon=False,
        labelcolor=INK, prop={"family": FONT, "size": 9}, borderpad=0, borderaxespad=0, handlelength=1.5,
        handleheight=1.1, columnspacing=1.5, handletextpad=0.5,
    )  # fmt: skip
