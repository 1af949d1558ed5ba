"""Content of a ladder's table, before it is text or HTML."""

from __future__ import annotations

import math
from collections.abc import Callable

from memlab.records import Measurement
from memlab.records.ablation import Ladder, Step
from memlab.report.columns import NOTHING, Column, bytes_or_nothing, change, peak, rate, speed
from memlab.units import format_bytes

MEMORY, THROUGHPUT = "memory", "throughput"
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


def groups(ladder: Ladder) -> dict[str, tuple[Column[Step], ...]]:
    """The columns of figures that say something about this ladder, in two groups."""
    measured = [rung.measurement for rung in ladder.rungs if rung.measurement is not None]
    has_reserved = any(each.peak_reserved_bytes is not None for each in measured)
    predicted = any(rung.prediction for rung in ladder.rungs)
    has_times = any(_has_time(step) for step in ladder.steps)
    memory = (
        (Column[Step](PEAK, _peak), True),
        (Column[Step]("predicted", _predicted_bytes), predicted),
        (Column[Step]("vs before", lambda step: change(step.memory_before)), True),
        (Column[Step]("vs first", lambda step: change(step.memory_first)), True),
        (Column[Step]("peak reserved", _of_measured(lambda m: bytes_or_nothing(m.peak_reserved_bytes))), has_reserved),
        (Column[Step]("on host", _of_measured(lambda m: bytes_or_nothing(m.host_bytes or None))),
         any(each.host_bytes for each in measured)),
    )  # fmt: skip
    throughput = (
        (Column[Step](unit(ladder), lambda step: _speed(ladder, step)), True),
        (Column[Step]("predicted", lambda step: _predicted_speed(ladder, step)), has_times),
        (Column[Step]("vs before", lambda step: change(step.speed_before)), True),
        (Column[Step]("vs first", lambda step: change(step.speed_first)), True),
    )
    return {
        MEMORY: tuple(column for column, wanted in memory if wanted),
        THROUGHPUT: tuple(column for column, wanted in throughput if wanted),
    }


def lever(step: Step) -> str:
    """The lever of a row: in parentheses where it was left out of the rows below."""
    return step.rung.label if step.rung.kept else f"({step.rung.label})"


def words(step: Step) -> str:
    """Return what a row's lever is, and what came of it."""
    return "; ".join(part for part in (step.rung.what, step.verdict) if part)


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


def foot(ladder: Ladder) -> tuple[str, ...]:
    """Lines below the table: the outcome, what happened on the way, how to read it."""
    return (sentence(ladder), *ladder.events, *_keys(ladder))


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
