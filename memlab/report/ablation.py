"""An ablation's table and what it says, before it is text or HTML."""

from __future__ import annotations

import math
from collections.abc import Callable

from memlab.records import Measurement
from memlab.records.ablation import Ablation, Step
from memlab.report.segments import segments
from memlab.report.table import Bar, BarLook, Column, ColumnKind, Table, row, wanted
from memlab.report.tables import predicted_peak, predicted_speed
from memlab.report.wording import NOTHING, bytes_or_nothing, change, mark_means, rate, speed
from memlab.units import format_bytes

PEAK = "peak allocated"


def heading(ablation: Ablation) -> str:
    """Return what was trained, on what, on which batch, for which budget."""
    measurement = ablation.first.measurement
    batch = _batch_words(measurement) if measurement is not None else ""
    budget = f"budget {format_bytes(ablation.budget_bytes)}" if ablation.budget_bytes is not None else ""
    return " · ".join(part for part in (ablation.title, batch, budget) if part)


def unit(ablation: Ablation) -> str:
    """Return what throughput is counted in."""
    return "tokens/s" if ablation.counts_tokens else "samples/s"


def table(ablation: Ablation) -> Table:
    """Reduce an ablation to a table: memory that descends like stairs, and the throughput beside it."""
    columns = _columns(ablation)
    rows = tuple(
        row(columns, step, below=step.row.what, fits=step.is_first_to_fit, is_left_out=not step.row.kept)
        for step in ablation.steps
    )
    means = mark_means(each.texts for each in rows)
    return Table(heading(ablation), columns, rows, (sentence(ablation), *ablation.events, *_keys(ablation), *means))


def _columns(ablation: Ablation) -> tuple[Column[Step], ...]:
    measured = [each.measurement for each in ablation.rows if each.measurement is not None]
    reserved = any(each.peak_reserved_bytes is not None for each in measured)
    has_times = any(_has_time(step) for step in ablation.steps)
    return wanted(
        Column[Step]("technique", technique, ColumnKind.PLAN),
        Column(PEAK, _of_measured(lambda each: each.peak_text, "refused"), bar=_memory_bar, group="memory"),
        Column("predicted", lambda step: predicted_peak(step.row.prediction, step.row.ran), group="memory",
               is_wanted=any(each.prediction for each in ablation.rows)),
        Column("vs before", lambda step: change(step.memory_before), group="memory"),
        Column("vs first", lambda step: change(step.memory_first), group="memory"),
        Column("peak reserved", _of_measured(lambda m: bytes_or_nothing(m.peak_reserved_bytes)), group="memory",
               is_wanted=reserved),
        Column("offloaded", _of_measured(lambda m: bytes_or_nothing(m.host_bytes or None)), group="memory",
               is_wanted=any(each.host_bytes for each in measured)),
        Column(unit(ablation), _of_measured(lambda m: speed(m, ablation.speed(m))), group="throughput",
               bar=lambda step: Bar({"": ablation.speed(step.row.ran) if step.row.ran else 0.0}, BarLook.SPEED)),
        Column("predicted", lambda step: _predicted_speed(ablation, step), group="throughput", is_wanted=has_times),
        Column("vs before", lambda step: change(step.speed_before), group="throughput"),
        Column("vs first", lambda step: change(step.speed_first), group="throughput"),
        Column("verdict", lambda step: step.verdict, ColumnKind.NOTE),
    )  # fmt: skip


def _memory_bar(step: Step) -> Bar | None:
    """The breakdown of the peak; of a row that ran out of memory, the size of the device."""
    measurement = step.row.measurement
    if step.row.ran is not None:
        return Bar(segments(step.row.ran))
    return None if measurement is None else Bar({"": measurement.peak_allocated_bytes}, BarLook.TOO_SMALL)


def technique(step: Step) -> str:
    """The technique of a row: in parentheses where it was left out of the rows below."""
    return step.row.label if step.row.kept else f"({step.row.label})"


def sentence(ablation: Ablation) -> str:
    """Return what the ablation came to, for status lines, screen readers and below the table."""
    first, last = ablation.first, ablation.last
    tried, kept = ablation.rows[1:], [each for each in ablation.rows[1:] if each.kept]
    if first.ran is None or last.ran is None:
        return f"{ablation.plan}: ran out of memory"
    end = f"{format_bytes(last.ran.peak_allocated_bytes)} at {rate(ablation.speed(last.ran))} {unit(ablation)}"
    if not tried or first is last:
        return f"{ablation.plan}: {end}"
    step = next(each for each in ablation.steps if each.row is last)
    faster = f", {change(step.speed_first)} {unit(ablation)}" if math.isfinite(step.speed_first) else ""
    return (
        f"{len(kept)} of {len(tried)} techniques kept: {format_bytes(first.ran.peak_allocated_bytes)} at "
        f"{rate(ablation.speed(first.ran))} {unit(ablation)} → {end} ({change(step.memory_first)} memory"
        f"{faster}) with {ablation.plan}"
    )


def _keys(ablation: Ablation) -> tuple[str, ...]:
    left_out = any(not each.kept for each in ablation.rows)
    first = ablation.first
    lines = (
        ("( ) left out of the rows below; before: the last row that was kept", left_out),
        (f"first: {first.label}, the first row that ran", first is not ablation.rows[0]),
        ("predicted speeds are scaled by the first row that ran", any(_has_time(step) for step in ablation.steps)),
    )
    said = [line for line, is_said in lines if is_said]
    return ("; ".join(said),) if said else ()


def _batch_words(measurement: Measurement) -> str:
    rows, tokens = round(measurement.samples_per_step), round(measurement.tokens_per_step)
    if not rows:
        return ""
    return f"batch {rows} × {tokens // rows}" if tokens and tokens % rows == 0 else f"batch {rows}"


def _of_measured(write: Callable[[Measurement], str], refused: str = NOTHING) -> Callable[[Step], str]:
    return lambda step: write(step.row.measurement) if step.row.measurement is not None else refused


def _predicted_speed(ablation: Ablation, step: Step) -> str:
    prediction = step.row.prediction
    return (
        NOTHING if prediction is None else predicted_speed(prediction, step.row.ran, rate(ablation.speed(prediction)))
    )


def _has_time(step: Step) -> bool:
    prediction = step.row.prediction
    return prediction is not None and math.isfinite(prediction.step_seconds)
