"""The ablation as a picture: stairs of peak memory going down, with the throughput of each step beside them.

A row's bar ends where its memory does; the arrow to its right is what the technique took away from the row it was
added to. Techniques that were left out are pale, what ran out of memory is an empty outline as long as the device.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memlab.records.ablation import Ablation, Step
from memlab.report import canvas
from memlab.report.ablation import heading, sentence, unit
from memlab.report.segments import categories_of, scale, segments
from memlab.report.wording import flag_lines, rate, then_change
from memlab.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_THICK = 0.56
_HEAD = 0.018  # of an arrow, as a share of the longest bar
_ROW_INCHES = 0.56
_BUDGET_INCHES = 0.16
_FOUND = "#009E73"
_TECHNIQUE_CHARACTERS, _WORDS_CHARACTERS = 32, 46


def png(ablation: Ablation) -> bytes:
    """Draw an ablation: memory by category going down on the left, throughput on the right."""
    steps = ablation.steps
    figure, memory, throughput = canvas.memory_beside_throughput(
        heading(ablation),
        _ROW_INCHES * len(steps),
        0.268,
        categories_of([segments(each.ran) for each in ablation.rows if each.ran is not None]),
        predicted=any(each.prediction for each in ablation.rows),
        room_inches=0 if ablation.budget_bytes is None else _BUDGET_INCHES,
    )
    for axes in (memory, throughput):
        axes.set_ylim(len(steps) - 0.5, -0.5)
    _draw_memory(memory, ablation, steps)
    _draw_throughput(throughput, ablation, steps)
    _write_techniques(memory, steps)
    return canvas.encode(figure, title=heading(ablation), description=sentence(ablation))


def _draw_memory(axes: Axes, ablation: Ablation, steps: Sequence[Step]) -> None:
    # 0 where a technique was refused
    ends = [row.measurement.peak_allocated_bytes if row.measurement is not None else 0 for row in ablation.rows]
    predicted = (each.prediction.peak_allocated_bytes for each in ablation.rows if each.prediction is not None)
    most_bytes = max(1, ablation.budget_bytes or 0, *ends, *predicted)
    size, name = scale(most_bytes)
    axes.set_xlim(0, most_bytes / size * 1.34)
    before: int | None = None
    for at, (step, end) in enumerate(zip(steps, ends, strict=True)):
        if step.row.ran_out:
            dashed: dict[str, Any] = {"edgecolor": canvas.BUDGET, "linewidth": 1.2, "linestyle": (0, (3, 2))}
            axes.barh(at, end / size, _THICK, facecolor="none", **dashed)
        else:
            parts = segments(step.row.measurement) if step.row.measurement is not None else {}
            canvas.stacked_bar(axes, at, parts, size, thick=_THICK, is_pale=not step.row.kept)
        reach_bytes: float = end
        if step.row.prediction is not None:
            reach_bytes = max(end, step.row.prediction.peak_allocated_bytes)
            canvas.mark_predicted(axes, step.row.prediction.peak_allocated_bytes / size, at)
        if before is not None and ablation.rows[before].ran is not None:
            _stair(axes, (ends[before] / size, before), (end / size, at), step)
            # the head of an arrow is wider than a small change
            head_bytes = most_bytes * _HEAD if end < ends[before] else 0.0
            reach_bytes = max(reach_bytes, ends[before], end + head_bytes)
        _write_total(axes, step, ((reach_bytes + most_bytes * 0.012) / size, at))
        before = at if step.row.kept else before
    if ablation.budget_bytes is not None:
        canvas.mark_budget(axes, ablation.budget_bytes, size, along="x")
    canvas.label_x(axes, f"peak memory allocated, {name}; changes: against the last row kept")


def _stair(axes: Axes, before: tuple[float, int], after: tuple[float, int], step: Step) -> None:
    """Draw a line from the end of the row a technique was added to, down to its own, and back by what it took away."""
    (end_before, at_before), (end, at) = before, after
    if step.row.kept:
        axes.plot(
            [end_before, end_before], [at_before + _THICK / 2, at + _THICK / 2], color=canvas.FAINT, linewidth=0.9
        )
    if step.row.ran is not None and step.row.kept and end < end_before:
        axes.annotate(
            "", (end, at), (end_before, at), annotation_clip=False,
            arrowprops={"arrowstyle": "-|>", "color": canvas.INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 1,
                        "mutation_scale": 9},
        )  # fmt: skip


def _write_total(axes: Axes, step: Step, at: tuple[float, float]) -> None:
    row, start = step.row, axes.get_xlim()[1] * 0.008
    if row.measurement is None:
        canvas.say(axes, start, at[1], "does not apply here", color=canvas.INK if row.kept else canvas.FAINT)
        return
    size = format_bytes(row.measurement.peak_allocated_bytes)
    if row.ran_out:
        canvas.say(axes, start, at[1], f"ran out of memory at {size}", color=canvas.BUDGET,
            bbox={"facecolor": canvas.PAPER, "edgecolor": "none", "pad": 1.5})  # fmt: skip
        return
    total = size + then_change(step.memory_before) + ("" if row.kept else "  left out")
    if step.is_first_to_fit:
        canvas.say(axes, *at, f"{total}  ✓ fits", color=_FOUND, fontweight="bold")
    else:
        canvas.say(axes, *at, total, color=canvas.INK if row.kept else canvas.FAINT)


def _draw_throughput(axes: Axes, ablation: Ablation, steps: Sequence[Step]) -> None:
    from matplotlib.ticker import MaxNLocator

    bars = []
    for at, step in enumerate(steps):
        if (ran := step.row.ran) is not None:
            per_second = ablation.speed(ran)
            text = rate(per_second) + then_change(step.speed_before)
            bars.append(canvas.SpeedBar(at, per_second, ran.spread, text, is_pale=not step.row.kept))
    canvas.speed_bars(axes, bars, unit(ablation))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def _write_techniques(axes: Axes, steps: Sequence[Step]) -> None:
    """A technique's flags, and its words below them, at the left of its row."""
    for at, step in enumerate(steps):
        flags = flag_lines(step.row.label, _TECHNIQUE_CHARACTERS)
        what = textwrap.wrap(step.row.what, _WORDS_CHARACTERS)[:2]
        lines = [
            *((line, 9.5, canvas.INK if step.row.kept else canvas.FAINT) for line in flags),
            *((line, 8, canvas.FAINT) for line in what),
        ]
        top = 0.165 * (len(lines) - 1) / 2
        for number, (line, size, colour) in enumerate(lines):
            inches = top - 0.165 * number
            axes.annotate(
                line, (0.012, at), xycoords=("figure fraction", "data"), xytext=(0, inches * 72),
                textcoords="offset points", va="center", fontsize=size, color=colour, family=canvas.FONT, annotation_clip=False,
                parse_math=False,
            )  # fmt: skip
