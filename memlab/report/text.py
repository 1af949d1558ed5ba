"""Tables as plain text: what a terminal, a log file and `text/plain` show."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from memlab.records import Measurement, Prediction
from memlab.records.ablation import Ladder, Step
from memlab.records.comparison import Comparison, FoundPlan, Row
from memlab.report import ladder as rungs
from memlab.report.columns import NOTE, PLAN, Column, cells, columns, flag_lines
from memlab.report.listing import Listing, found_listing, models_listing, predictions_listing
from memlab.report.segments import Profile, heading, segments
from memlab.units import format_bytes, format_change

_MOST_CHARACTERS = 148
_PLAN_CHARACTERS = 44
_LEAST_PLAN_CHARACTERS = 23
_GAP = "   "
_NARROW_GAP = "  "
_NOTE_INDENT = "    ↳ "
_LEVER = Column[Step](
    "technique", lambda step: rungs.lever(step) + (" ✓ fits" if step.is_first_to_fit else ""), is_number=False
)


def table(comparison: Comparison) -> str:
    """Print a comparison as an aligned table.

    Args:
        comparison: the settings that were tried; the first row is what the others are compared with.

    Returns:
        Lines of at most 148 characters: title, table, events. A note that does not fit beside its
        row stands below it.

    Example:
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {}, (), (0.5,) * 5, 8, 0)
        >>> print(table(Comparison("gpt2 124M", (m,))))
        gpt2 124M
        plan         peak allocated   vs first    samples/s   vs first
        ──────────────────────────────────────────────────────────────
        as written         1.00 GiB          –   16.0 ± 0 %          –
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
    by_model = models_listing(comparison)
    lines += listing(by_model).split("\n") if by_model is not None else []
    events = [line for event in comparison.events for line in _wrapped(event)]
    return "\n".join(line.rstrip() for line in lines + events)


def predictions_table(
    predictions: Sequence[Prediction],
    budget_bytes: int | None = None,
    *,
    title: str = "",
    every: bool = False,
    how_to_see_all: str = "every=True shows them",
) -> str:
    """Print predictions as an aligned table, the best first.

    Args:
        predictions: in any order; the plan as written is what the others are compared with.
        budget_bytes: what they are to fit into; None leaves out the verdicts.
        title: what was predicted; by default the device.
        every: show every row; otherwise a long list keeps the plan as written, the Pareto-optimal
            plans and the best of each verdict.
        how_to_see_all: said where rows are left out.

    Example:
        >>> p = Prediction("as written", "T4", 2**30, None, 0, {}, (), 0.5, 8, 0, (2**30, 2**30), (0.5, 0.5))
        >>> print(predictions_table([p], 2**31))
        predicted for T4 · budget 2.00 GiB
        plan         peak allocated   vs first   samples/s   vs first   verdict
        ───────────────────────────────────────────────────────────────────────────────────────
        as written         1.00 GiB          –        16.0          –   fits, 1.00 GiB to spare
    """
    return listing(
        predictions_listing(predictions, budget_bytes, title=title, every=every, how_to_see_all=how_to_see_all)
    )


def found_table(found: FoundPlan) -> str:
    """Print the evidence for a found plan: its trials in order, predicted beside measured, and what was considered."""
    return listing(found_listing(found))


def ladder_table(ladder: Ladder) -> str:
    """Print a ladder as an aligned table: one row per technique, its notes below it.

    Example:
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {}, (), (0.5,) * 5, 8, 0)
        >>> from memlab.records.ablation import Rung
        >>> print(ladder_table(Ladder("gpt2", (Rung("", "as written", "the loop as it is", m),))))
        gpt2 · batch 8
        technique    peak allocated   vs before   vs first    samples/s   vs before   vs first
        ──────────────────────────────────────────────────────────────────────────────────────
        as written         1.00 GiB           –          –   16.0 ± 0 %           –          –
            ↳ the loop as it is
        as written: 1.00 GiB at 16.0 samples/s
    """
    figures = (_LEVER, *(column for group in rungs.groups(ladder).values() for column in group))
    rows = [tuple(column.cell(step) for column in figures) for step in ladder.steps]
    widths = _widths(figures, rows)
    gap = _GAP if sum(widths) + len(_GAP) * (len(widths) - 1) <= _MOST_CHARACTERS else _NARROW_GAP
    head = _line(figures, widths, [column.title for column in figures], gap)
    lines = [*_wrapped(rungs.heading(ladder)), head, "─" * len(head)]
    for step, texts in zip(ladder.steps, rows, strict=True):
        lines += [_line(figures, widths, list(texts), gap), *_note_lines(rungs.words(step))]
    return "\n".join(
        line.rstrip() for line in (*lines, *(part for line in rungs.foot(ladder) for part in _wrapped(line)))
    )


def listing(content: Listing) -> str:
    """Print a table of ready texts; a plan that is too long is broken between flags."""
    lines = _wrapped(content.title)
    if content.columns:
        widths = _widths(content.columns, list(content.rows))
        gap = _GAP if sum(widths) + len(_GAP) * (len(widths) - 1) <= _MOST_CHARACTERS else _NARROW_GAP
        widths = _fitted(content.columns, widths, gap)
        head = _line(content.columns, widths, [column.title for column in content.columns], gap)
        rows = [line for texts in content.rows for line in _listed(content.columns, widths, texts, gap)]
        lines += [head, "─" * max(len(line.rstrip()) for line in (head, *rows)), *rows]
    return "\n".join(line.rstrip() for line in (*lines, *(part for line in content.foot for part in _wrapped(line))))


def breakdown(profile: Profile) -> str:
    """Print what the memory is used for at the peak, measured or predicted.

    Args:
        profile: a measurement or a prediction, with or without a breakdown.

    Returns:
        One line per category with its bytes and its share of the peak, then the totals.

    Example:
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {"parameters": 2**30}, (), (), 8, 0)
        >>> print(breakdown(m))
        as written · cpu
        parameters         1.00 GiB   100 %  ████████████████████████
        peak allocated     1.00 GiB
    """
    parts = segments(profile)
    whole = max(1, sum(parts.values()))
    totals = _totals(profile)
    lines = [heading(profile)]
    lines += [_breakdown_line(name, size, size / whole) for name, size in parts.items()]
    lines += [f"{name:<16}  {format_bytes(size):>9}" for name, size in totals.items()]
    if phase := profile.phase_of_peak:
        lines[-len(totals)] += f"   in the {phase.words}"
    return "\n".join(lines)


def summary(comparison: Comparison) -> str:
    """One sentence for status lines, screen readers and the alternative text of pictures.

    Example:
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {}, (), (0.5,) * 5, 8, 0)
        >>> summary(Comparison("gpt2", (m,)))
        '1 setting measured: as written peaks at 1.00 GiB.'
    """
    first, *others = comparison.rows
    count = f"{len(comparison.rows)} setting{'s' if others else ''} measured: "
    sentence = f"{count}{first.measurement.plan} peaks at {format_bytes(first.measurement.peak_allocated_bytes)}"
    if not others:
        return f"{sentence}."
    least = min(others, key=lambda row: row.measurement.peak_allocated_bytes)
    less = f" ({format_change(least.memory_ratio)})" if math.isfinite(least.memory_ratio) else ""
    memory = f"{format_bytes(least.measurement.peak_allocated_bytes)}{less}"
    speed = f" at {format_change(least.speed_ratio)} samples per second" if math.isfinite(least.speed_ratio) else ""
    return f"{sentence}; {least.measurement.plan} is the lowest of the others with {memory}{speed}."


def _fitted(figures: tuple[Column[Any], ...], widths: list[int], gap: str) -> list[int]:
    """Widths that make lines of at most a page, at the cost of the plan."""
    too_much = sum(widths) + len(gap) * (len(widths) - 1) - _MOST_CHARACTERS
    return [
        max(min(width, _LEAST_PLAN_CHARACTERS), width - max(0, too_much)) if column.title == PLAN.title else width
        for column, width in zip(figures, widths, strict=True)
    ]


def _listed(figures: tuple[Column[Any], ...], widths: list[int], texts: tuple[str, ...], gap: str) -> list[str]:
    titles = [column.title for column in figures]
    if PLAN.title not in titles:
        return [_line(figures, widths, list(texts), gap)]
    at = titles.index(PLAN.title)
    plan, *more = flag_lines(texts[at], widths[at] - 2) if len(texts[at]) > widths[at] else [texts[at]]
    first = _line(figures, widths, [*texts[:at], plan, *texts[at + 1 :]], gap)
    indent = " " * (sum(widths[:at]) + len(gap) * at + 2)
    return [first, *(indent + rest for rest in more)]


def _widths(figures: tuple[Column[Any], ...], rows: list[tuple[str, ...]]) -> list[int]:
    widest = [max(len(text) for text in texts) for texts in zip(*rows, strict=True)]
    widths = [max(len(column.title), width) for column, width in zip(figures, widest, strict=True)]
    return [
        min(width, _PLAN_CHARACTERS) if column.title == PLAN.title else width
        for column, width in zip(figures, widths, strict=True)
    ]


def _line(figures: tuple[Column[Any], ...], widths: list[int], texts: list[str], gap: str = _GAP) -> str:
    padded = (
        text.rjust(width) if column.is_number else text.ljust(width)
        for column, width, text in zip(figures, widths, texts, strict=True)
    )
    return gap.join(padded)


def _row_lines(
    row: Row, figures: tuple[Column[Any], ...], widths: list[int], texts: tuple[str, ...], *, beside: bool
) -> list[str]:
    plan, *more = flag_lines(texts[0], widths[0] - 2) if len(texts[0]) > widths[0] else texts[:1]
    first = _line(figures, widths, [plan, *texts[1:]])
    lines = [first + _GAP + row.verdict if beside else first, *(f"  {rest}" for rest in more)]
    return lines if beside else [*lines, *_note_lines(row.verdict)]


def _note_lines(note: str) -> list[str]:
    return textwrap.wrap(note, _MOST_CHARACTERS, initial_indent=_NOTE_INDENT, subsequent_indent=" " * len(_NOTE_INDENT))


def _longest_note(comparison: Comparison) -> int:
    return max(len(row.verdict) for row in comparison.rows)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _MOST_CHARACTERS, subsequent_indent="  ")


def _breakdown_line(name: str, size_bytes: int, share: float) -> str:
    return f"{name:<16}  {format_bytes(size_bytes):>9}  {share * 100:>4.0f} %  {'█' * max(1, round(share * 24))}"


def _totals(profile: Profile) -> dict[str, int]:
    totals = {
        "peak allocated": profile.peak_allocated_bytes,
        "peak reserved": profile.peak_reserved_bytes,
        "device used": profile.driver_bytes if isinstance(profile, Measurement) else None,
        "on host": profile.host_bytes or None,
    }
    return {name: size for name, size in totals.items() if size is not None}
