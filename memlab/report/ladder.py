"""A ladder's table and what it says, before it is text or HTML."""

from __future__ import annotations

import math
from collections.abc import Callable

from memlab.records import Measurement
from memlab.records.ablation import Ladder, Step
from memlab.report.segments import segments
from memlab.report.table import Bar, Column, Kind, Look, Table, row, wanted
from memlab.report.wording import NOTHING, bytes_or_nothing, change, peak, rate, speed
from memlab.units import format_bytes

PEAK = "peak allocated"


def heading(ladder: Ladder) -> str:
    """Return what was trained, on what, on which batch, for which budget."""
    measurement = ladder.first.measurement
    batch = _batch_words(measurement) if measurement is not None else ""
    budget = f"budget {format_bytes(ladder.budget_bytes)}" if ladder.budget_bytes is not None else ""
    return " · ".join(part for part in (ladder.title, batch, budget) if part)


def unit(ladder: Ladder) -> str:
    """Return what throughput is counted in."""
    return "tokens/s" if ladder.counts_tokens else "samples/s"


def table(ladder: Ladder) -> Table:
    """Reduce a ladder to the table that people read: memory that descends like stairs, and the throughput beside it.

    Args:
        ladder: its rungs, from top to bottom. Those that were left out are set back; the first that fits is marked.
    """
    columns = _columns(ladder)
    rows = tuple(
        row(columns, step, below=step.rung.what, fits=step.is_first_to_fit, is_left_out=not step.rung.kept)
        for step in ladder.steps
    )
    return Table(heading(ladder), columns, rows, (sentence(ladder), *ladder.events, *_keys(ladder)))


def _columns(ladder: Ladder) -> tuple[Column[Step], ...]:
    measured = [rung.measurement for rung in ladder.rungs if rung.measurement is not None]
    return wanted(
        (Column[Step]("technique", lever, Kind.PLAN), True),
        (Column(PEAK, _peak, bar=_memory_bar, group="memory"), True),
        (Column("predicted", _predicted_bytes, group="memory"), any(rung.prediction for rung in ladder.rungs)),
        (Column("vs before", lambda step: change(step.memory_before), group="memory"), True),
        (Column("vs first", lambda step: change(step.memory_first), group="memory"), True),
        (
            Column("peak reserved", _of_measured(lambda m: bytes_or_nothing(m.peak_reserved_bytes)), group="memory"),
            any(each.peak_reserved_bytes is not None for each in measured),
        ),
        (
            Column("on host", _of_measured(lambda m: bytes_or_nothing(m.host_bytes or None)), group="memory"),
            any(each.host_bytes for each in measured),
        ),
        (
            Column(
                unit(ladder),
                lambda step: _speed(ladder, step),
                bar=lambda step: Bar({"": ladder.speed(step.rung.ran) if step.rung.ran else 0.0}, Look.SPEED),
                group="throughput",
            ),
            True,
        ),
        (
            Column("predicted", lambda step: _predicted_speed(ladder, step), group="throughput"),
            any(_has_time(step) for step in ladder.steps),
        ),
        (Column("vs before", lambda step: change(step.speed_before), group="throughput"), True),
        (Column("vs first", lambda step: change(step.speed_first), group="throughput"), True),
        (Column("verdict", lambda step: step.verdict, Kind.NOTE), True),
    )


def _memory_bar(step: Step) -> Bar | None:
    """The breakdown of the peak; of a rung that ran out of memory, the size of the device."""
    measurement = step.rung.measurement
    if step.rung.ran is not None:
        return Bar(segments(step.rung.ran))
    return None if measurement is None else Bar({"": measurement.peak_allocated_bytes}, Look.TOO_SMALL)


def lever(step: Step) -> str:
    """The lever of a row: in parentheses where it was left out of the rows below."""
    return step.rung.label if step.rung.kept else f"({step.rung.label})"


def sentence(ladder: Ladder) -> str:
    """Return what the ladder came to, for status lines, screen readers and below the table.

    Example:
        >>> from memlab.records import Measurement
        >>> from memlab.records.ablation import Rung
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {}, (), (0.5,) * 5, 8, 0)
        >>> sentence(Ladder("gpt2", (Rung("", "as written", "the loop as it is", m),)))
        'as written: 1.00 GiB at 16.0 samples/s'
    """
    first, last = ladder.first, ladder.last
    tried, kept = ladder.rungs[1:], [rung for rung in ladder.rungs[1:] if rung.kept]
    if first.ran is None or last.ran is None:
        return f"{ladder.plan}: ran out of memory"
    end = f"{format_bytes(last.ran.peak_allocated_bytes)} at {rate(ladder.speed(last.ran))} {unit(ladder)}"
    if not tried or first is last:
        return f"{ladder.plan}: {end}"
    step = next(each for each in ladder.steps if each.rung is last)
    faster = f", {change(step.speed_first)} {unit(ladder)}" if math.isfinite(step.speed_first) else ""
    return (
        f"{len(kept)} of {len(tried)} techniques kept: {format_bytes(first.ran.peak_allocated_bytes)} at "
        f"{rate(ladder.speed(first.ran))} {unit(ladder)} → {end} ({change(step.memory_first)} memory"
        f"{faster}) with {ladder.plan}"
    )


def _keys(ladder: Ladder) -> tuple[str, ...]:
    left_out = any(not rung.kept for rung in ladder.rungs)
    first = ladder.first
    lines = (
        ("( ) left out of the rows below; before: the last row that was kept", left_out),
        (f"first: {first.label}, the first row that ran", first is not ladder.rungs[0]),
        ("predicted speeds are scaled by the first row that ran", any(_has_time(step) for step in ladder.steps)),
    )
    return ("; ".join(line for line, wanted in lines if wanted),) if any(wanted for _, wanted in lines) else ()


def _batch_words(measurement: Measurement) -> str:
    rows, tokens = round(measurement.samples_per_step), round(measurement.tokens_per_step)
    if not rows:
        return ""
    return f"batch {rows} × {tokens // rows}" if tokens and tokens % rows == 0 else f"batch {rows}"


def _of_measured(write: Callable[[Measurement], str]) -> Callable[[Step], str]:
    return lambda step: write(step.rung.measurement) if step.rung.measurement is not None else NOTHING


def _peak(step: Step) -> str:
    return peak(step.rung.measurement) if step.rung.measurement is not None else "refused"


def _predicted_bytes(step: Step) -> str:
    prediction = step.rung.prediction
    return bytes_or_nothing(prediction.peak_allocated_bytes if prediction is not None else None)


def _has_time(step: Step) -> bool:
    prediction = step.rung.prediction
    return prediction is not None and math.isfinite(prediction.step_seconds)


def _speed(ladder: Ladder, step: Step) -> str:
    if step.rung.ran is None:
        return NOTHING
    return speed(step.rung.ran, ladder.speed(step.rung.ran))


def _predicted_speed(ladder: Ladder, step: Step) -> str:
    prediction = step.rung.prediction
    return rate(ladder.speed(prediction)) if prediction is not None and _has_time(step) else NOTHING
