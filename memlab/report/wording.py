"""Figures in words, for tables and pictures alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from memlab.records import Measurement
from memlab.units import format_bytes, format_change

NOTHING = "–"
_OTHERWISE = "≠ "


def flags(plan: str) -> list[str]:
    """A plan's flags, each with its value.

    Example:
        >>> flags("--accumulate 4 --fp16")
        ['--accumulate 4', '--fp16']
    """
    return re.split(r" (?=--)", plan)


def flag_lines(plan: str, most_characters: int) -> list[str]:
    """Break a plan into lines between flags, never between a flag and its value."""
    lines: list[str] = []
    for flag in flags(plan):
        if lines and len(lines[-1]) + 1 + len(flag) <= most_characters:
            lines[-1] += f" {flag}"
        else:
            lines.append(flag)
    return lines


def change(ratio: float) -> str:
    """A ratio to the first row as a percentage; a dash where there is no ratio."""
    return format_change(ratio) if math.isfinite(ratio) else NOTHING


def then_change(ratio: float) -> str:
    """A change to be written behind a number; nothing where there is no ratio."""
    return f"  {format_change(ratio)}" if math.isfinite(ratio) else ""


def rate(per_second: float) -> str:
    """Three digits, whatever the size.

    Example:
        >>> rate(1.2744), rate(53.21), rate(10240.4), rate(0.00412)
        ('1.27', '53.2', '10,240', '0.0041')
    """
    if not math.isfinite(per_second):
        return NOTHING
    if per_second >= 100:
        return f"{per_second:,.0f}"
    if per_second >= 10:
        return f"{per_second:.1f}"
    return f"{per_second:.2f}" if per_second >= 0.1 else f"{per_second:.2g}"


def speed(measurement: Measurement, per_second: float | None = None) -> str:
    """Samples per second of the median step, with the spread of the timed steps; how many, where they are few.

    Steps that differ by more than they take give no figure with a spread: it would say nothing.

    Args:
        measurement: whose steps were timed.
        per_second: what else is done in a second, in place of samples.

    Example:
        >>> def of(*seconds): return Measurement("", "cpu", 1, None, 0, {}, (), seconds, 8, 0)
        >>> speed(of(*[0.5] * 5)), speed(of(0.5, 0.55, 0.5)), speed(of(0.5)), speed(of()), speed(of(0.5, 0.5, 3.0))
        ('16.0 ± 0 %', '16.0 ± 5 % (3 timed)', '16.0 (1 timed)', '–', '≈ 16.0 (uneven steps)')
    """
    text = rate(measurement.samples_per_second if per_second is None else per_second)
    if text == NOTHING:
        return text
    timed = len(measurement.step_seconds)
    if not measurement.is_warm:
        return f"≈ {text} (warming up)"
    if measurement.spread >= 1:
        return f"≈ {text} (uneven steps)"
    if timed > 1 and math.isfinite(measurement.spread):
        text += f" ± {round(measurement.spread * 100)} %"
    return text if measurement.is_settled else f"{text} ({timed} timed)"


def predicted(text: str, *, came_otherwise: bool) -> str:
    """A prediction; marked where the measured value has left its interval."""
    return f"{_OTHERWISE if came_otherwise else ''}{text}"


def mark_means(rows: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return what the mark of a prediction means, where one of the rows has it."""
    is_used = any(text.startswith(_OTHERWISE) for texts in rows for text in texts)
    return (f"{_OTHERWISE}measured outside of what was predicted",) if is_used else ()


def drift(share: float | None) -> str:
    """Print a relative difference of losses.

    Example:
        >>> drift(2.13e-7), drift(0.0), drift(0.0071), drift(None)
        ('2e-7', '0', '0.71 %', '–')
    """
    if share is None:
        return NOTHING
    if not math.isfinite(share):
        return "not finite"
    if share == 0:
        return "0"
    if share >= 1e-4:
        return f"{share * 100:.2g} %"
    mantissa, exponent = f"{share:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def bytes_or_nothing(size_bytes: int | None) -> str:
    """A size; a dash where there is none."""
    return NOTHING if size_bytes is None else format_bytes(size_bytes)
