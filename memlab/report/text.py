"""The receipt as plain text: what a terminal, a log file and `text/plain` show."""

from __future__ import annotations

import math
import textwrap

from memlab.records import Comparison, Measurement, Row
from memlab.report.columns import NOTE, PLAN, Column, cells, columns, flag_lines
from memlab.report.segments import segments
from memlab.units import format_bytes, format_change

_MOST_CHARACTERS = 148
_PLAN_CHARACTERS = 44
_GAP = "   "
_NOTE_INDENT = "    ↳ "


def table(comparison: Comparison) -> str:
    """Print a comparison as an aligned table.

    Args:
        comparison: the settings that were tried; the first row is what the others are compared with.

    Returns:
        Lines of at most 148 characters: title, table, events. A note that does not fit beside its
        row stands below it.

    Example:
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {}, (), (0.5, 0.5), 8, 0)
        >>> print(table(Comparison("gpt2 124M", (m,))))
        gpt2 124M
        plan         peak allocated   vs first   samples/s   vs first
        ─────────────────────────────────────────────────────────────
        as written         1.00 GiB          –        16.0          –
    """
    chosen = columns(comparison)
    figures = tuple(column for column in chosen if column is not NOTE)
    rows = [cells(row, figures, is_first=index == 0) for index, row in enumerate(comparison.rows)]
    widths = _widths(figures, rows)
    used = sum(widths) + len(_GAP) * len(widths)
    head = _line(figures, widths, [column.title for column in figures])
    beside = NOTE in chosen and all(used + len(row.verdict) <= _MOST_CHARACTERS for row in comparison.rows)
    lines = [*_wrapped(comparison.title), head + (_GAP + NOTE.title if beside else "")]
    lines.append("─" * max(len(lines[-1]), used + _longest_note(comparison) if beside else 0))
    for row, texts in zip(comparison.rows, rows, strict=True):
        lines += _row_lines(row, figures, widths, texts, beside=beside)
    events = [line for event in comparison.events for line in _wrapped(event)]
    return "\n".join(line.rstrip() for line in lines + events)


def breakdown(measurement: Measurement) -> str:
    """Print what the memory was used for at the peak.

    Args:
        measurement: a measurement, with or without a breakdown.

    Returns:
        One line per category with its bytes and its share of the peak, then the totals.

    Example:
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {"parameters": 2**30}, (), (), 8, 0)
        >>> print(breakdown(m))
        as written · cpu
        parameters         1.00 GiB   100 %  ████████████████████████
        peak allocated     1.00 GiB
    """
    parts = segments(measurement)
    whole = max(1, sum(parts.values()))
    lines = [f"{measurement.plan} · {measurement.device}"]
    lines += [_breakdown_line(name, size, size / whole) for name, size in parts.items()]
    lines += [f"{name:<16}  {format_bytes(size):>9}" for name, size in _totals(measurement).items()]
    if phase := measurement.phase_of_peak:
        lines[-1 - (len(_totals(measurement)) - 1)] += f"   in the {phase.words}"
    return "\n".join(lines)


def summary(comparison: Comparison) -> str:
    """One sentence for status lines, screen readers and the alternative text of pictures.

    Example:
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {}, (), (0.5, 0.5), 8, 0)
        >>> summary(Comparison("gpt2", (m,)))
        '1 setting measured: as written peaks at 1.00 GiB.'
    """
    first, *others = comparison.rows
    count = f"{len(comparison.rows)} setting{'s' if others else ''} measured: "
    sentence = f"{count}{first.measurement.plan} peaks at {format_bytes(first.measurement.peak_allocated_bytes)}"
    if not others:
        return f"{sentence}."
    least = min(others, key=lambda row: row.memory_ratio)
    memory = f"{format_bytes(least.measurement.peak_allocated_bytes)} ({format_change(least.memory_ratio)})"
    speed = f" at {format_change(least.speed_ratio)} samples per second" if math.isfinite(least.speed_ratio) else ""
    return f"{sentence}; {least.measurement.plan} is the lowest of the others with {memory}{speed}."


def _widths(figures: tuple[Column, ...], rows: list[tuple[str, ...]]) -> list[int]:
    widest = [max(len(text) for text in texts) for texts in zip(*rows, strict=True)]
    widths = [max(len(column.title), width) for column, width in zip(figures, widest, strict=True)]
    return [
        min(width, _PLAN_CHARACTERS) if column is PLAN else width for column, width in zip(figures, widths, strict=True)
    ]


def _line(figures: tuple[Column, ...], widths: list[int], texts: list[str]) -> str:
    padded = (
        text.rjust(width) if column.is_number else text.ljust(width)
        for column, width, text in zip(figures, widths, texts, strict=True)
    )
    return _GAP.join(padded)


def _row_lines(
    row: Row, figures: tuple[Column, ...], widths: list[int], texts: tuple[str, ...], *, beside: bool
) -> list[str]:
    plan, *more = flag_lines(texts[0], widths[0] - 2) if len(texts[0]) > widths[0] else texts[:1]
    first = _line(figures, widths, [plan, *texts[1:]])
    lines = [first + _GAP + row.verdict if beside else first, *(f"  {rest}" for rest in more)]
    if row.verdict and not beside:
        lines += textwrap.wrap(
            row.verdict, _MOST_CHARACTERS, initial_indent=_NOTE_INDENT, subsequent_indent=" " * len(_NOTE_INDENT)
        )
    return lines


def _longest_note(comparison: Comparison) -> int:
    return max(len(row.verdict) for row in comparison.rows)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _MOST_CHARACTERS, subsequent_indent="  ")


def _breakdown_line(name: str, size_bytes: int, share: float) -> str:
    return f"{name:<16}  {format_bytes(size_bytes):>9}  {share * 100:>4.0f} %  {'█' * max(1, round(share * 24))}"


def _totals(measurement: Measurement) -> dict[str, int]:
    totals = {
        "peak allocated": measurement.peak_allocated_bytes,
        "peak reserved": measurement.peak_reserved_bytes,
        "device used": measurement.driver_bytes,
        "on host": measurement.host_bytes or None,
    }
    return {name: size for name, size in totals.items() if size is not None}
