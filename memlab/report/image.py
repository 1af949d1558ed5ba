"""The receipt as a picture: PNG bytes for saved notebooks, GitHub and slides."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from memlab.records.comparison import Comparison
from memlab.report import canvas
from memlab.report.segments import categories_of, finite, scale, segments
from memlab.report.text import summary
from memlab.report.wording import flag_lines, rate, then_change
from memlab.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def png(comparison: Comparison) -> bytes:
    """Draw a comparison: peak memory by category on the left, throughput on the right."""
    labels = ["\n".join(flag_lines(row.measurement.plan, 32)) for row in comparison.rows]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    # a row is as high as its label needs; 1 is the usual row of up to two lines
    rows = [max(2, label.count("\n") + 1) / 2 for label in labels]
    figure, memory, throughput = canvas.memory_beside_throughput(
        comparison.title,
        0.54 * sum(rows),
        min(0.34, 0.035 + longest * 0.0069),
        categories_of([segments(measurement) for measurement in comparison.measurements]),
        predicted=any(row.prediction for row in comparison.rows),
    )
    positions = [end - row / 2 for end, row in zip(accumulate(rows), rows, strict=True)]
    _draw_memory(memory, comparison, positions)
    _draw_throughput(throughput, comparison, positions)
    for axes in (memory, throughput):
        axes.set_ylim(sum(rows), 0)
    memory.set_yticks(positions, labels)
    return canvas.encode(figure, title=comparison.title, description=summary(comparison))


def _draw_memory(axes: Axes, comparison: Comparison, positions: Sequence[float]) -> None:
    parts = [segments(measurement) for measurement in comparison.measurements]
    predicted = (row.prediction.peak_allocated_bytes for row in comparison.rows if row.prediction)
    most_bytes = max(1, *(sum(part.values()) for part in parts), *predicted)
    unit, name = scale(most_bytes)
    for index, (row, part, position) in enumerate(zip(comparison.rows, parts, positions, strict=True)):
        end = canvas.stacked_bar(axes, position, part, unit)
        if row.prediction is not None:
            predicted_end = row.prediction.peak_allocated_bytes / unit
            canvas.mark_predicted(axes, predicted_end, position)
            end = max(end, predicted_end)
        change = then_change(row.memory_ratio) if _is_compared(comparison, index) else ""
        total = format_bytes(row.measurement.peak_allocated_bytes) + change
        canvas.say(axes, end + most_bytes / unit * 0.012, position, total)
    axes.set_xlim(0, most_bytes / unit * 1.30)
    canvas.label_x(axes, f"peak memory allocated, {name}")


def _draw_throughput(axes: Axes, comparison: Comparison, positions: Sequence[float]) -> None:
    bars = []
    for index, (row, position) in enumerate(zip(comparison.rows, positions, strict=True)):
        measured = row.measurement
        change = then_change(row.speed_ratio) if _is_compared(comparison, index) else ""
        text = rate(measured.samples_per_second) + change
        bars.append(canvas.SpeedBar(position, finite(measured.samples_per_second), finite(measured.spread), text))
    canvas.speed_bars(axes, bars, "samples/s")


def _is_compared(comparison: Comparison, index: int) -> bool:
    """Return whether a row is set against the first one."""
    return index > 0 and not comparison.are_ranks
