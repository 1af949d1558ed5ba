"""The receipt as a picture: PNG bytes for saved notebooks, GitHub and slides."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from memlab.records.comparison import Comparison
from memlab.report.canvas import (
    GRID,
    SpeedBar,
    encode,
    label_x,
    legend,
    mark_predicted,
    paper,
    patches,
    plain,
    say,
    speed_bars,
    stacked_bar,
    write,
)
from memlab.report.segments import categories_of, finite, scale, segments
from memlab.report.text import summary
from memlab.report.wording import flag_lines, rate, then_change
from memlab.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def png(comparison: Comparison) -> bytes:
    """Draw a comparison: peak memory by category on the left, throughput on the right.

    Raises:
        MissingExtraError: matplotlib is not installed.
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
    legend(figure, patches(names, predicted=predicted), 1 - (0.32 + 0.19 * title.count("\n")) / height)
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
    for index, (row, part, position) in enumerate(zip(comparison.rows, parts, positions, strict=True)):
        end = stacked_bar(axes, position, part, unit)
        if row.prediction is not None:
            predicted_end = row.prediction.peak_allocated_bytes / unit
            mark_predicted(axes, predicted_end, position)
            end = max(end, predicted_end)
        change = then_change(row.memory_ratio) if _is_compared(comparison, index) else ""
        total = format_bytes(row.measurement.peak_allocated_bytes) + change
        say(axes, end + most_bytes / unit * 0.012, position, total)
    axes.set_xlim(0, most_bytes / unit * 1.30)
    label_x(axes, f"peak memory allocated, {name}")


def _draw_throughput(axes: Axes, comparison: Comparison, positions: Sequence[float]) -> None:
    plain(axes)
    bars = []
    for index, (row, position) in enumerate(zip(comparison.rows, positions, strict=True)):
        measured = row.measurement
        change = then_change(row.speed_ratio) if _is_compared(comparison, index) else ""
        text = rate(measured.samples_per_second) + change
        bars.append(SpeedBar(position, finite(measured.samples_per_second), finite(measured.spread), text))
    speed_bars(axes, bars, "samples/s")


def _is_compared(comparison: Comparison, index: int) -> bool:
    """Return whether a row is set against the first one."""
    return index > 0 and not comparison.are_ranks
