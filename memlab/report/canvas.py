"""The sheet that static pictures are drawn on: its colours, its axes, and the PNG it becomes.

Drawn on matplotlib's own Agg canvas: pyplot, its registry of open figures and the user's `rcParams`
are neither used nor changed. The background is opaque, so a picture reads on a dark page too.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from memlab.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER = "#FCFCFB"
INK = "#22262B"
FAINT = "#6B7178"
GRID = "#E3E4E6"
BUDGET = "#B3261E"
FONT = "DejaVu Sans"  # comes with matplotlib: the same picture on every machine
_DOTS_PER_INCH = 144
_COLOURS = 128
_WIDTH_INCHES = 11.0


def paper(height_inches: float) -> Figure:
    """An empty sheet of this height."""
    require("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), dpi=_DOTS_PER_INCH, facecolor=PAPER)
    figure.set_layout_engine("none")  # whatever the user's rcParams ask for
    FigureCanvasAgg(figure)
    return figure


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
        texts.add_text(name.capitalize(), _latin(text))
    buffer = io.BytesIO()
    palette.save(buffer, "png", optimize=True, pnginfo=texts, dpi=(_DOTS_PER_INCH, _DOTS_PER_INCH))
    return buffer.getvalue()


def _latin(text: str) -> str:
    """PNG text chunks are Latin-1."""
    plain = text.replace("−", "-").replace("–", "-")
    return plain.encode("latin-1", "replace").decode("latin-1")


def write(figure: Figure, x: float, y: float, text: str, **style: Any) -> None:
    """Write on the sheet, at a place from 0 to 1."""
    figure.text(x, y, text, color=INK, family=FONT, parse_math=False, **style)


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
