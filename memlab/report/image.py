"""Memory and throughput of plans as a picture of bars: a receipt, an ablation, the ranks of a run; PNG bytes.

Every record is reduced to rows, and one painter draws them. A row's bar ends where its memory does. What was predicted is
a stroke through it; an arrow begins where the row ended that it is compared with. Rows that were left out are pale,
what ran out of memory is an empty outline as long as the device.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from memlab.records.ablation import Ablation, Step
from memlab.records.comparison import Comparison
from memlab.records.ranks import PredictedRanks
from memlab.report import ablation, canvas, ranks
from memlab.report.segments import BUDGET, categories_of, finite, scale, segments
from memlab.report.text import summary
from memlab.report.wording import flag_lines, rate, then_change
from memlab.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_THICK, _SPEED_THICK = 0.28, 0.15  # inches
_LINE_INCHES, _LEAST_LINES = 0.165, 2
_FLAGS_CHARACTERS, _WORDS_CHARACTERS = 32, 46
_FOOT_INCHES = 0.6
_FOUND = "#009E73"
_PALE = 0.35


@dataclass(frozen=True)
class _Row:
    label: str  # flags
    end_bytes: int  # where its bar ends
    text: str  # behind the bar
    parts: Mapping[str, int]  # of the bar, by category; empty where memory ran out, or nothing ran
    words: str = ""  # below its label
    predicted_bytes: int | None = None
    before_bytes: int | None = None  # end of the row that this one is compared with, where it lowered that
    per_second: float | None = None  # throughput; None for none
    spread: float = 0.0  # of its steps, as a share
    speed_text: str = ""
    is_pale: bool = False
    fits: bool = False
    ran_out: bool = False

    @property
    def lines(self) -> tuple[list[str], list[str]]:
        """Return its label and what stands below it, broken into lines."""
        return flag_lines(self.label, _FLAGS_CHARACTERS), textwrap.wrap(self.words, _WORDS_CHARACTERS)[:2]

    @property
    def inches(self) -> float:
        return _LINE_INCHES * (max(_LEAST_LINES, sum(map(len, self.lines))) + 1.2)


def png(comparison: Comparison) -> bytes:
    """Draw a receipt."""
    rows: list[_Row] = []
    for each in comparison.rows:
        measured = each.measurement
        # ranks of a run, and the first row, are not compared
        memory, speed = (
            then_change(ratio) if rows and not comparison.are_ranks else ""
            for ratio in (each.memory_ratio, each.speed_ratio)
        )
        parts = segments(measured)
        rows.append(
            _Row(
                label=measured.plan,
                end_bytes=sum(parts.values()),
                text=measured.peak_text + memory,
                parts=parts,
                predicted_bytes=each.prediction.peak_allocated_bytes if each.prediction is not None else None,
                per_second=finite(measured.samples_per_second),
                spread=finite(measured.spread),
                speed_text=rate(measured.samples_per_second) + speed,
            )
        )
    return _drawn(comparison.title, summary(comparison), rows, "peak memory allocated, {}", unit="samples/s")


def ablation_png(shown: Ablation) -> bytes:
    """Draw an ablation: each row against the last one that was kept."""
    rows: list[_Row] = []
    before: Step | None = None
    for step in shown.steps:
        rows.append(_of_step(shown, step, before))
        before = step if step.row.kept else before
    return _drawn(
        ablation.heading(shown), ablation.sentence(shown), rows,
        "peak memory allocated, {}; changes: against the last row kept", unit=ablation.unit(shown),
        budget_bytes=shown.budget_bytes,
    )  # fmt: skip


def _of_step(shown: Ablation, step: Step, before: Step | None) -> _Row:
    row, ran = step.row, step.row.ran
    end_bytes = row.measurement.peak_allocated_bytes if row.measurement is not None else 0
    text = format_bytes(end_bytes) + then_change(step.memory_before) + ("" if row.kept else "  left out")
    if row.measurement is None:
        text = "does not apply here"
    elif row.ran_out:
        text = f"ran out of memory at {format_bytes(end_bytes)}"
    earlier = before.row.ran if before is not None else None
    is_lower = ran is not None and earlier is not None and row.kept and end_bytes < earlier.peak_allocated_bytes
    return _Row(
        label=row.label,
        end_bytes=end_bytes,
        text=f"{text}  ✓ fits" if step.is_first_to_fit else text,
        parts=segments(ran) if ran is not None else {},
        words=row.what,
        predicted_bytes=row.prediction.peak_allocated_bytes if row.prediction is not None else None,
        before_bytes=earlier.peak_allocated_bytes if is_lower and earlier is not None else None,
        per_second=shown.speed(ran) if ran is not None else None,
        spread=ran.spread if ran is not None else 0.0,
        speed_text=rate(shown.speed(ran)) + then_change(step.speed_before) if ran is not None else "",
        is_pale=not row.kept,
        fits=step.is_first_to_fit,
        ran_out=row.ran_out,
    )


def ranks_png(shown: PredictedRanks) -> bytes | None:
    """Draw memory per rank, for each engine and number of ranks; None where no engine applies."""
    rows = [
        _Row(
            label=f"{each.scale.removeprefix('--scale ')} × {each.ranks}",
            end_bytes=each.peak_allocated_bytes,
            text=format_bytes(each.peak_allocated_bytes),
            parts={part: size for part, size in each.breakdown.items() if size > 0},
            predicted_bytes=shown.measured(each),
        )
        for each in shown.predictions
        if not each.refused
    ]
    ran = "; the stroke is what was measured" if any(row.predicted_bytes for row in rows) else ""
    axis = f"{{}} on each rank at its peak, predicted{ran}"
    return _drawn(shown.title, ranks.sentence(shown), rows, axis) if rows else None


# -- the painter


def _drawn(
    title: str, description: str, rows: Sequence[_Row], axis: str, *, unit: str = "", budget_bytes: int | None = None
) -> bytes:
    """Draw rows: memory at the left and, where it has a `unit`, throughput at the right."""
    parts = categories_of([row.parts for row in rows])
    lines = [line for row in rows for line in row.lines[0]] + [line[:38] for row in rows for line in row.lines[1]]
    left = min(0.34, 0.035 + max(map(len, lines)) * 0.0069)
    head = canvas.head_inches(title)
    above = head + (0.16 if budget_bytes is not None else 0)
    rows_inches = sum(row.inches for row in rows)
    height = above + rows_inches + _FOOT_INCHES
    figure = canvas.paper(height, title)
    widths = (1.8, 1) if unit else (1,)
    grid = figure.add_gridspec(
        1, len(widths), width_ratios=widths, left=left, right=0.985, top=1 - above / height,
        bottom=_FOOT_INCHES / height, wspace=0.08,
    )  # fmt: skip
    drawn = [figure.add_subplot(grid[column]) for column in range(len(widths))]
    for axes in drawn:
        canvas.plain(axes)
        axes.set_yticks([])
        axes.set_ylim(rows_inches, 0)
        axes.grid(visible=True, axis="x", color=canvas.GRID, linewidth=0.8, linestyle="-")
    # the middle of each row, in inches from above
    places = [end - row.inches / 2 for row, end in zip(rows, accumulate(row.inches for row in rows), strict=True)]
    is_predicted = bool(unit) and any(row.predicted_bytes is not None for row in rows)
    canvas.legend(figure, canvas.patches(parts, predicted=is_predicted), 1 - (head - 0.41) / height)
    _draw_memory(drawn[0], rows, places, axis, budget_bytes)
    for row, place in zip(rows, places, strict=True):
        _write_label(drawn[0], row, place)
    if unit:
        _draw_throughput(drawn[1], rows, places, unit)
    return canvas.encode(figure, title=title, description=description)


def _draw_memory(
    axes: Axes, rows: Sequence[_Row], places: Sequence[float], axis: str, budget_bytes: int | None
) -> None:
    most_bytes = max(1, budget_bytes or 0, *(max(row.end_bytes, row.predicted_bytes or 0) for row in rows))
    size, name = scale(most_bytes)
    axes.set_xlim(0, most_bytes / size * 1.34)
    for row, place in zip(rows, places, strict=True):
        canvas.stacked_bar(axes, place, row.parts, size, thick=_THICK, alpha=_PALE if row.is_pale else None)
        style: dict[str, Any] = {"color": _FOUND, "fontweight": "bold"} if row.fits else {}
        reach_bytes = max(row.end_bytes, row.predicted_bytes or 0, row.before_bytes or 0)
        if row.ran_out:
            outline: dict[str, Any] = {"edgecolor": BUDGET, "linewidth": 1.2, "linestyle": (0, (3, 2))}
            axes.barh(place, row.end_bytes / size, _THICK, facecolor="none", **outline)
            style, reach_bytes = {"color": BUDGET}, 0
        if row.predicted_bytes is not None:
            canvas.mark_predicted(axes, row.predicted_bytes / size, place, 0.66 * _THICK)
        if row.before_bytes is not None:
            _draw_arrow(axes, row.before_bytes / size, row.end_bytes / size, place)
        canvas.say(axes, (reach_bytes + most_bytes * 0.012) / size, place, row.text, **style)
    if budget_bytes is not None:
        canvas.mark_budget(axes, budget_bytes, size, along="x")
    canvas.label_x(axes, axis.format(name))


def _draw_arrow(axes: Axes, start: float, end: float, place: float) -> None:
    axes.annotate(
        "", (end, place), (start, place), annotation_clip=False,
        arrowprops={"arrowstyle": "-|>", "color": canvas.INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 1,
                    "mutation_scale": 9},
    )  # fmt: skip


def _draw_throughput(axes: Axes, rows: Sequence[_Row], places: Sequence[float], unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    most = max(((row.per_second or 0) * (1 + row.spread) for row in rows), default=0) or 1e-12
    for row, place in zip(rows, places, strict=True):
        if row.per_second is None:
            continue
        spread = row.per_second * row.spread
        axes.barh(place, row.per_second, _SPEED_THICK, color="#9AA5B1", linewidth=0,
                  alpha=_PALE if row.is_pale else None)  # fmt: skip
        axes.errorbar(row.per_second, place, xerr=spread, fmt="none", ecolor=canvas.INK, elinewidth=1.1, capsize=3,
                      capthick=1.1)  # fmt: skip
        canvas.say(axes, row.per_second + spread + most * 0.03, place, row.speed_text)
    axes.set_xlim(0, most * 1.6)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    canvas.label_x(axes, f"throughput, {unit}, with spread")


def _write_label(axes: Axes, row: _Row, place: float) -> None:
    """A row's flags, and its words below them, at the left."""
    flags, words = row.lines
    lines = [*((line, 9.5) for line in flags), *((line, 8) for line in words)]
    top = place - _LINE_INCHES * (len(lines) - 1) / 2
    for number, (line, size) in enumerate(lines):
        axes.annotate(
            line, (0.012, top + _LINE_INCHES * number), xycoords=("figure fraction", "data"), va="center", fontsize=size,
            color=canvas.INK, family=canvas.FONT, annotation_clip=False, parse_math=False,
        )  # fmt: skip
