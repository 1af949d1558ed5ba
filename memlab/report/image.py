"""The receipt as a picture: PNG bytes for saved notebooks, GitHub and slides."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from memlab.records.comparison import Comparison, Row
from memlab.report.canvas import FONT, GRID, INK, PAPER, encode, label_x, paper, plain, write
from memlab.report.segments import (
    categories_of,
    finite,
    scale,
    segments,
    swatch,
)
from memlab.report.text import summary
from memlab.report.wording import flag_lines, rate, then_change
from memlab.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def png(comparison: Comparison) -> bytes:
    """Draw a comparison: peak memory by category on the left, throughput on the right.

    Args:
        comparison: the settings that were tried, from top to bottom.

    Returns:
        The bytes of a PNG file, with a one-sentence description in its metadata.

    Raises:
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from memlab.records import Measurement
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {}, (), (0.5,) * 5, 8, 0)
        >>> png(Comparison("gpt2 124M", (m,)))[1:4]
        b'PNG'
    """
    labels = ["\n".join(flag_lines(row.measurement.plan, 32)) for row in comparison.rows]
    rows = _row_heights(labels)
    height = 1.45 + 0.54 * sum(rows)
    figure = paper(height)
    title = "\n".join(textwrap.wrap(comparison.title, 110))
    write(figure, 0.012, 1 - 0.10 / height, title, size=11, weight="bold", va="top")
    grid = figure.add_gridspec(
        1, 2, width_ratios=(1.75, 1), left=_left_margin(labels), right=0.985,
        top=1 - (0.78 + 0.19 * title.count("\n")) / height, bottom=0.58 / height, wspace=0.09,
    )  # fmt: skip
    memory, throughput = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    positions = [end - row / 2 for end, row in zip(accumulate(rows), rows, strict=True)]
    _draw_memory(memory, comparison, positions)
    _draw_throughput(throughput, comparison, positions)
    for axes in (memory, throughput):
        axes.set_ylim(sum(rows), 0)
        axes.grid(visible=True, axis="x", color=GRID, linewidth=0.8, linestyle="-")
    memory.set_yticks(positions, labels)
    throughput.set_yticks([])
    names = categories_of([segments(measurement) for measurement in comparison.measurements])
    predicted = any(row.prediction for row in comparison.rows)
    legend(figure, names, (0.012, 1 - (0.32 + 0.19 * title.count("\n")) / height), predicted=predicted)
    return encode(figure, title=comparison.title, description=summary(comparison))


def _left_margin(labels: Sequence[str]) -> float:
    longest = max(len(line) for label in labels for line in label.split("\n"))
    return min(0.34, 0.035 + longest * 0.0069)


def _row_heights(labels: Sequence[str]) -> list[float]:
    """A row is as high as its label needs; 1 is the usual row of up to two lines."""
    return [max(2, label.count("\n") + 1) / 2 for label in labels]


def _draw_memory(axes: Axes, comparison: Comparison, positions: Sequence[float]) -> None:
    plain(axes)
    parts = [segments(measurement) for measurement in comparison.measurements]
    predicted = (row.prediction.peak_allocated_bytes for row in comparison.rows if row.prediction)
    most_bytes = max(1, *(sum(part.values()) for part in parts), *predicted)
    unit, name = scale(most_bytes)
    starts = [0.0] * len(parts)
    for category in categories_of(parts):
        sizes = [part.get(category, 0) / unit for part in parts]
        _bars(axes, positions, sizes, starts, category)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    for index, (row, position, end) in enumerate(zip(comparison.rows, positions, starts, strict=True)):
        _mark_predicted(axes, row, position, unit)
        right = max(end, row.prediction.peak_allocated_bytes / unit if row.prediction else 0)
        _print_total(
            axes, row, (right + most_bytes / unit * 0.012, position), is_compared=_is_compared(comparison, index)
        )
    axes.set_xlim(0, most_bytes / unit * 1.30)
    label_x(axes, f"peak memory allocated, {name}")


def _is_compared(comparison: Comparison, index: int) -> bool:
    """Return whether a row is set against the first one."""
    return index > 0 and not comparison.are_ranks


def _bars(axes: Axes, positions: Sequence[float], sizes: Sequence[float], starts: Sequence[float], name: str) -> None:
    look = swatch(name)
    axes.barh(positions, sizes, 0.62, left=starts, color=look.colour, hatch=look.hatch, edgecolor=PAPER, linewidth=0.7)


def _mark_predicted(axes: Axes, row: Row, position: float, unit: int) -> None:
    if row.prediction is not None:
        at = row.prediction.peak_allocated_bytes / unit
        axes.plot([at, at], [position - 0.42, position + 0.42], color=INK, linewidth=1.3, linestyle=(0, (2, 1.2)))


def _print_total(axes: Axes, row: Row, at: tuple[float, float], *, is_compared: bool) -> None:
    total = format_bytes(row.measurement.peak_allocated_bytes)
    less = then_change(row.memory_ratio) if is_compared else ""
    axes.text(*at, total + less, va="center", fontsize=9, color=INK, family=FONT, parse_math=False)


def _draw_throughput(axes: Axes, comparison: Comparison, positions: Sequence[float]) -> None:
    plain(axes)
    rows = comparison.rows
    rates = [finite(row.measurement.samples_per_second) for row in rows]
    spreads = [each * finite(row.measurement.spread) for each, row in zip(rates, rows, strict=True)]
    axes.barh(positions, rates, 0.30, color="#9AA5B1", edgecolor=PAPER, linewidth=0.7)
    axes.errorbar(rates, positions, xerr=spreads, fmt="none", ecolor=INK, elinewidth=1.1, capsize=3, capthick=1.1)
    most = max(*(each + spread for each, spread in zip(rates, spreads, strict=True)), 1e-12)
    for index, (row, each, spread) in enumerate(zip(rows, rates, spreads, strict=True)):
        text = rate(row.measurement.samples_per_second)
        more = then_change(row.speed_ratio) if _is_compared(comparison, index) else ""
        axes.text(each + spread + most * 0.03, positions[index], text + more, va="center", fontsize=9, color=INK,
                  family=FONT, parse_math=False)  # fmt: skip
    axes.set_xlim(0, most * 1.55)
    label_x(axes, "throughput, samples/s, with spread")


def legend(
    figure: Figure,
    names: Sequence[str],
    at: tuple[float, float],
    *,
    alpha: float | None = None,
    predicted: bool = False,
) -> None:
    """Name categories by colour and hatch, in a line that begins at a place of the sheet."""
    from matplotlib.artist import Artist
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = [
        Patch(facecolor=swatch(name).colour, hatch=swatch(name).hatch, edgecolor=PAPER, linewidth=0, label=name,
              alpha=alpha)
        for name in names
    ]  # fmt: skip
    if predicted:
        handles.append(Line2D([], [], color=INK, linewidth=1.3, linestyle=(0, (2, 1.2)), label="predicted"))
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=at, ncols=max(1, len(handles)), frameon=False,
        labelcolor=INK, prop={"family": FONT, "size": 9}, borderpad=0, borderaxespad=0, handlelength=1.5,
        handleheight=1.1, columnspacing=1.5, handletextpad=0.5,
    )  # fmt: skip
