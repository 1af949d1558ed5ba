"""The ablation as a picture: stairs of peak memory going down, with the throughput of each step beside them.

A row's bar ends where its memory does; the arrow to its right is what the technique took away from the row it was
added to. Techniques that were left out are pale, what ran out of memory is an empty outline as long as the device.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memlab.records.ablation import Ablation, AblationRow, Step
from memlab.report.ablation import heading, sentence, unit
from memlab.report.canvas import BUDGET, FAINT, FONT, GRID, INK, PAPER, encode, label_x, paper, plain, write
from memlab.report.segments import categories_of, scale, segments, swatch
from memlab.report.wording import NOTHING, change, flag_lines, rate
from memlab.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PALE = 0.35
_THICK, _THIN = 0.56, 0.26
_HEAD = 0.018  # of an arrow, as a share of the longest bar
_ROW_INCHES = 0.56
_HEAD_INCHES, _BUDGET_INCHES, _FOOT_INCHES = 0.7, 0.16, 0.62
_FOUND = "#009E73"
_TECHNIQUE_CHARACTERS, _WORDS_CHARACTERS = 32, 46


def png(ablation: Ablation) -> bytes:
    """Draw an ablation: memory by category going down on the left, throughput on the right.

    Args:
        ablation: its rows, from top to bottom.

    Returns:
        The bytes of a PNG file, with a one-sentence description in its metadata.

    Raises:
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from memlab.records import Measurement
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {}, (), (0.5,) * 5, 8, 0)
        >>> png(Ablation("gpt2 124M", (AblationRow("", "as written", "the loop as it is", m),)))[1:4]
        b'PNG'
    """
    steps = ablation.steps
    title = "\n".join(textwrap.wrap(heading(ablation), 110))
    above = _HEAD_INCHES + 0.19 * title.count("\n") + (0 if ablation.budget_bytes is None else _BUDGET_INCHES)
    height = above + _FOOT_INCHES + _ROW_INCHES * len(steps)
    figure = paper(height)
    write(figure, 0.012, 1 - 0.10 / height, title, size=11, weight="bold", va="top")
    grid = figure.add_gridspec(
        1, 2, width_ratios=(1.9, 1), left=0.268, right=0.985, top=1 - above / height, bottom=_FOOT_INCHES / height,
        wspace=0.07,
    )  # fmt: skip
    memory, throughput = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    for axes in (memory, throughput):
        plain(axes)
        axes.set_yticks([])
        axes.set_ylim(len(steps) - 0.5, -0.5)
        axes.grid(visible=True, axis="x", color=GRID, linewidth=0.8, linestyle="-")
    _draw_memory(memory, ablation, steps)
    _draw_throughput(throughput, ablation, steps)
    _write_techniques(memory, steps)
    _legend(figure, ablation, 1 - (0.34 + 0.19 * title.count("\n")) / height)
    return encode(figure, title=heading(ablation), description=sentence(ablation))


def _ends(rows: Sequence[AblationRow]) -> list[int]:
    """Bytes at which the bars end; 0 where a technique was refused."""
    return [each.measurement.peak_allocated_bytes if each.measurement is not None else 0 for each in rows]


def _draw_memory(axes: Axes, ablation: Ablation, steps: Sequence[Step]) -> None:
    ends = _ends(ablation.rows)
    predicted = (each.prediction.peak_allocated_bytes for each in ablation.rows if each.prediction is not None)
    most_bytes = max(1, ablation.budget_bytes or 0, *ends, *predicted)
    size, name = scale(most_bytes)
    axes.set_xlim(0, most_bytes / size * 1.34)
    before: int | None = None
    for at, (step, end) in enumerate(zip(steps, ends, strict=True)):
        if step.row.ran_out:
            _outline(axes, at, end / size)
        else:
            _stack(axes, step.row, at, size)
        _mark_predicted(axes, step.row, at, size)
        reach_bytes: float = max(end, _predicted_bytes(step.row))
        if before is not None and ablation.rows[before].ran is not None:
            _stair(axes, (ends[before] / size, before), (end / size, at), step)
            # the head of an arrow is wider than a small change
            head_bytes = most_bytes * _HEAD if end < ends[before] else 0.0
            reach_bytes = max(reach_bytes, ends[before], end + head_bytes)
        _write_total(axes, step, ((reach_bytes + most_bytes * 0.012) / size, at))
        before = at if step.row.kept else before
    if ablation.budget_bytes is not None:
        _mark_budget(axes, ablation.budget_bytes, size)
    label_x(axes, f"peak memory allocated, {name}; changes are against the row a technique was added to")


def _stack(axes: Axes, row: AblationRow, at: int, size: int) -> None:
    start = 0.0
    parts = segments(row.measurement) if row.measurement is not None else {}
    # paper below pale bars, so that no line of the grid shines through
    axes.barh(at, sum(parts.values()) / size, _THICK, color=PAPER)
    for category, part_bytes in parts.items():
        look = swatch(category)
        axes.barh(at, part_bytes / size, _THICK, left=start, color=look.colour, hatch=look.hatch, edgecolor=PAPER,
                  linewidth=0.7, alpha=None if row.kept else _PALE)  # fmt: skip
        start += part_bytes / size


def _outline(axes: Axes, at: int, end: float) -> None:
    axes.barh(at, end, _THICK, facecolor="none", edgecolor=BUDGET, linewidth=1.2, linestyle=(0, (3, 2)))


def _predicted_bytes(row: AblationRow) -> int:
    return row.prediction.peak_allocated_bytes if row.prediction is not None else 0


def _mark_predicted(axes: Axes, row: AblationRow, at: int, size: int) -> None:
    if row.prediction is not None:
        end = row.prediction.peak_allocated_bytes / size
        axes.plot([end, end], [at - 0.37, at + 0.37], color=INK, linewidth=1.2, linestyle=(0, (2, 1.2)), zorder=4)


def _stair(axes: Axes, before: tuple[float, int], after: tuple[float, int], step: Step) -> None:
    """From the end of the row a technique was added to, down to its own row, and back by what it took away."""
    (end_before, at_before), (end, at) = before, after
    if step.row.kept:
        axes.plot([end_before, end_before], [at_before + _THICK / 2, at + _THICK / 2], color=FAINT, linewidth=0.9)
    if step.row.ran is not None and step.row.kept and end < end_before:
        axes.annotate(
            "", (end, at), (end_before, at), annotation_clip=False,
            arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 1,
                        "mutation_scale": 9},
        )  # fmt: skip


def _write_total(axes: Axes, step: Step, at: tuple[float, float]) -> None:
    row = step.row
    style: dict[str, Any] = {
        "va": "center",
        "fontsize": 9,
        "color": INK if row.kept else FAINT,
        "family": FONT,
        "parse_math": False,
    }
    if row.measurement is None:
        axes.text(axes.get_xlim()[1] * 0.008, at[1], "does not apply here", **style)
        return
    if row.ran_out:
        size = format_bytes(row.measurement.peak_allocated_bytes)
        axes.text(axes.get_xlim()[1] * 0.008, at[1], f"ran out of memory at {size}", **style | {"color": BUDGET},
                  bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5})  # fmt: skip
        return
    against = change(step.memory_before)
    words = [
        format_bytes(row.measurement.peak_allocated_bytes),
        against if against != NOTHING else "",
        "" if row.kept else "left out",
    ]
    text = axes.text(*at, "  ".join(word for word in words if word), **style)
    if step.is_first_to_fit:
        text.set_fontweight("bold")
        text.set_text(f"{text.get_text()}  ✓ fits")
        text.set_color(_FOUND)


def _mark_budget(axes: Axes, budget_bytes: int, size: int) -> None:
    axes.axvline(budget_bytes / size, color=BUDGET, linewidth=1.4, linestyle=(0, (5, 3)))
    axes.annotate(
        f"budget {format_bytes(budget_bytes)}", (budget_bytes / size, 1), xycoords=("data", "axes fraction"),
        xytext=(3, 3), textcoords="offset points", fontsize=9, color=BUDGET, family=FONT, annotation_clip=False,
    )  # fmt: skip


def _draw_throughput(axes: Axes, ablation: Ablation, steps: Sequence[Step]) -> None:
    from matplotlib.ticker import MaxNLocator

    ran = {at: step.row.ran for at, step in enumerate(steps) if step.row.ran is not None}
    rates = {at: ablation.speed(measurement) for at, measurement in ran.items()}
    ends = {at: rates[at] * (1 + measurement.spread) for at, measurement in ran.items()}
    most = max((*ends.values(), 1e-12))
    for at, measurement in ran.items():
        kept = steps[at].row.kept
        axes.barh(at, rates[at], _THIN, color="#9AA5B1", edgecolor=PAPER, linewidth=0.7, alpha=None if kept else _PALE)
        axes.errorbar(rates[at], at, xerr=rates[at] * measurement.spread, fmt="none", ecolor=INK if kept else FAINT,
                      elinewidth=1.1, capsize=3, capthick=1.1)  # fmt: skip
        against = change(steps[at].speed_before)
        text = rate(rates[at]) + (f"  {against}" if against != NOTHING else "")
        axes.text(ends[at] + most * 0.03, at, text, va="center", fontsize=9, color=INK if kept else FAINT, family=FONT,
                  parse_math=False)  # fmt: skip
    axes.set_xlim(0, most * 1.62)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    label_x(axes, f"throughput, {unit(ablation)}, with spread")


def _write_techniques(axes: Axes, steps: Sequence[Step]) -> None:
    """A technique's flags, and its words below them, at the left of its row."""
    for at, step in enumerate(steps):
        flags = flag_lines(step.row.label, _TECHNIQUE_CHARACTERS)
        what = textwrap.wrap(step.row.what, _WORDS_CHARACTERS)[:2]
        lines = [
            *((line, 9.5, INK if step.row.kept else FAINT) for line in flags),
            *((line, 8, FAINT) for line in what),
        ]
        top = 0.165 * (len(lines) - 1) / 2
        for number, (line, size, colour) in enumerate(lines):
            inches = top - 0.165 * number
            axes.annotate(
                line, (0.012, at), xycoords=("figure fraction", "data"), xytext=(0, inches * 72),
                textcoords="offset points", va="center", fontsize=size, color=colour, family=FONT, annotation_clip=False,
                parse_math=False,
            )  # fmt: skip


def _legend(figure: Figure, ablation: Ablation, top: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = categories_of([segments(each.ran) for each in ablation.rows if each.ran is not None])
    handles: list[Artist] = [
        Patch(facecolor=swatch(name).colour, hatch=swatch(name).hatch, edgecolor=PAPER, linewidth=0, label=name)
        for name in names
    ]
    if any(each.prediction for each in ablation.rows):
        handles.append(Line2D([], [], color=INK, linewidth=1.3, linestyle=(0, (2, 1.2)), label="predicted"))
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.012, top), ncols=max(1, len(handles)), frameon=False,
        labelcolor=INK, prop={"family": FONT, "size": 9}, borderpad=0, borderaxespad=0, handlelength=1.5,
        handleheight=1.1, columnspacing=1.5, handletextpad=0.5,
    )  # fmt: skip
