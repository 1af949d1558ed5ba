"""Ranks of a run in many processes: what each needs, by engine and number of processes, and how many of which GPU do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from memlab.records.ranks import Fewest, HowMany, PredictedRanks, RankPrediction
from memlab.report import canvas
from memlab.report.segments import REST, Swatch, scale, swatch
from memlab.report.table import Column, ColumnKind, Table, row, wanted
from memlab.report.tables import of_texts
from memlab.report.wording import NOTHING, bytes_or_nothing
from memlab.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# what ranks need beyond one process, with looks of its own; the rest looks as in every picture
_SWATCHES = {
    "gathered parameters": Swatch("#66B3E0", "oo", "."),
    "communication buffers": Swatch("#D55E00", "--", "-"),
}
_ORDER = (
    "parameters", "gradients", "optimizer state", "gathered parameters", "activations", "communication buffers",
    "temporaries", "workspaces", REST,
)  # fmt: skip
_ROW_INCHES, _GAP_ROWS = 0.26, 0.5
_HEAD_INCHES, _FOOT_INCHES = 0.75, 0.5
_THICK = 0.7


def table(predicted_plans: PredictedRanks) -> Table:
    """Reduce predictions for ranks to the table that people read."""
    every = predicted_plans.predictions
    known = [each for each in every if not each.refused]
    columns = wanted(
        Column[RankPrediction]("plan", lambda each: each.scale, ColumnKind.PLAN),
        Column("ranks", lambda each: str(each.ranks)),
        Column("peak a rank", lambda each: format_bytes(each.peak_allocated_bytes)),
        Column("measured", lambda each: bytes_or_nothing(predicted_plans.measured(each)),
               is_wanted=any(predicted_plans.measured(each) is not None for each in known)),
        Column("on host", lambda each: bytes_or_nothing(each.host_bytes or None),
               is_wanted=any(each.host_bytes for each in known)),
        Column("parameters", lambda each: bytes_or_nothing(each.divided.get("parameters"))),
        Column("gradients", lambda each: bytes_or_nothing(each.divided.get("gradients"))),
        Column("optimizer state", lambda each: bytes_or_nothing(each.divided.get("optimizer state"))),
        Column("sent a step", lambda each: bytes_or_nothing(each.wire_bytes or None)),
    )  # fmt: skip
    left_out = dict.fromkeys(f"left out: {each.refused}" for each in every if each.refused)
    notes = dict.fromkeys(note for each in every for note in each.notes)
    return Table(predicted_plans.title, columns, tuple(row(columns, each) for each in known), (*left_out, *notes))


def how_many(found: HowMany) -> Table:
    """Reduce the answer to a table: a line for each GPU, a column for each engine."""
    engines = list(dict.fromkeys(row.engine for row in found.rows))
    rows = []
    for gpu, listed in groupby(found.rows, key=lambda row: (row.gpu, row.memory_bytes)):
        by_engine = {row.engine: row for row in listed}
        numbers = (_number(by_engine.get(engine), found.most) for engine in engines)
        rows.append((gpu[0], format_bytes(gpu[1]), *numbers))
    heads = ("GPU", "memory", *engines)
    return of_texts(f"{found.title} · number of GPUs", heads, rows, words=("GPU",), foot=found.notes)


def _number(row: Fewest | None, most: int) -> str:
    if row is None:
        return NOTHING
    if row.prediction is None:
        return f"more than {most}"
    return f"{row.prediction.ranks} ({format_bytes(row.prediction.peak_allocated_bytes)} each)"


def png(predicted_plans: PredictedRanks) -> bytes | None:
    """Draw memory per rank: a bar for each engine, groups for the numbers of ranks, on one axis."""
    known = [each for each in predicted_plans.predictions if not each.refused]
    if not known:
        return None
    places = _places(known)
    height = _HEAD_INCHES + _FOOT_INCHES + _ROW_INCHES * (places[-1] + 1)
    figure = canvas.paper(height, predicted_plans.title)
    axes = figure.add_axes((0.26, _FOOT_INCHES / height, 0.72, 1 - (_HEAD_INCHES + _FOOT_INCHES) / height))
    _draw(axes, predicted_plans, known, places)
    parts = _ordered({part: 1 for each in known for part in each.breakdown})
    canvas.legend(figure, canvas.patches(parts, _look), 1 - 0.36 / height, size=8)
    return canvas.encode(figure, title=predicted_plans.title, description=sentence(predicted_plans))


def sentence(predicted_plans: PredictedRanks) -> str:
    """All of it in one sentence."""
    known = [each for each in predicted_plans.predictions if not each.refused]
    if not known:
        return f"{predicted_plans.title}: no engine applies"
    said = (f"{each.scale} on {each.ranks}: {format_bytes(each.peak_allocated_bytes)} a rank" for each in known)
    return f"{predicted_plans.title}: {'; '.join(said)}"


def _places(known: Sequence[RankPrediction]) -> list[float]:
    """Return where each bar is, with a gap between numbers of ranks."""
    found: list[float] = []
    for number, each in enumerate(known):
        is_new = number > 0 and each.ranks != known[number - 1].ranks
        found.append(0.0 if not found else found[-1] + 1 + (_GAP_ROWS if is_new else 0))
    return found


def _draw(
    axes: Axes, predicted_plans: PredictedRanks, known: Sequence[RankPrediction], places: Sequence[float]
) -> None:
    canvas.plain(axes)
    measured = [predicted_plans.measured(each) for each in known]
    most_bytes = max(1, *(each.peak_allocated_bytes for each in known), *(size or 0 for size in measured))
    unit_bytes, name = scale(most_bytes)
    axes.set_xlim(0, 1.12 * most_bytes / unit_bytes)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.grid(visible=True, axis="x", color=canvas.GRID, linewidth=0.8, linestyle="-")
    for place, each, size_bytes in zip(places, known, measured, strict=True):
        end = canvas.stacked_bar(axes, place, _ordered(each.breakdown), unit_bytes, thick=_THICK, look=_look)
        if size_bytes is not None:
            at = size_bytes / unit_bytes
            axes.plot([at, at], [place - 0.45, place + 0.45], color=canvas.INK, linewidth=1.6)
        canvas.say(axes, end, place, f" {format_bytes(each.peak_allocated_bytes)}", fontsize=8)
    axes.set_yticks(list(places))
    axes.set_yticklabels([f"{each.scale.removeprefix('--scale ')} × {each.ranks}" for each in known], size=8)
    ran = "; the stroke is what was measured" if any(size is not None for size in measured) else ""
    canvas.label_x(axes, f"{name} on each rank at its peak, predicted{ran}")


def _look(part: str) -> Swatch:
    return _SWATCHES.get(part) or swatch(part)


def _ordered(breakdown: Mapping[str, int]) -> dict[str, int]:
    return {part: breakdown[part] for part in _ORDER if breakdown.get(part, 0) > 0}
