"""Tables as plain text: what a terminal, a log file and `text/plain` show."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from memlab.records import Measurement, Profile
from memlab.records.comparison import Comparison
from memlab.report.segments import heading, segments
from memlab.report.table import ColumnKind, Table, TableRow
from memlab.report.wording import flag_lines
from memlab.units import format_bytes, format_change

_MOST_CHARACTERS = 148
_PLAN_CHARACTERS = 44
_LEAST_PLAN_CHARACTERS = 23
_GAPS = ("   ", "  ")
_NOTE_INDENT = "    ↳ "


def table(content: Table) -> str:
    """Print a table, aligned.

    Returns:
        Lines of at most 148 characters: title, table, foot. A plan that is too long is broken between flags; a note that
        does not fit beside its row stands below it.

    Example:
        >>> from memlab.report import tables
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {}, (), (0.5,) * 5, 8, 0)
        >>> print(table(tables.comparison(Comparison("gpt2 124M", (m,)))))
        gpt2 124M
        plan         peak allocated   vs first    samples/s   vs first
        ──────────────────────────────────────────────────────────────
        as written         1.00 GiB          –   16.0 ± 0 %          –
    """
    lines = [*_wrapped(content.title), *(_Sheet(content).lines() if content.columns else ())]
    lines += [line for inner in content.more for line in table(inner).split("\n")]
    lines += [part for line in content.foot for part in _wrapped(line)]
    return "\n".join(line.rstrip() for line in lines)


class _Sheet:
    """The columns of a table, without its notes, and how wide each is."""

    def __init__(self, content: Table) -> None:
        self._rows = content.rows
        self._places = [n for n, column in enumerate(content.columns) if column.kind is not ColumnKind.NOTE]
        self._columns = [content.columns[place] for place in self._places]
        self._note = next((n for n, column in enumerate(content.columns) if column.kind is ColumnKind.NOTE), None)
        self._head = [column.title for column in self._columns]
        self._note_head = content.columns[self._note].title if self._note is not None else ""
        natural = [max(map(len, texts)) for texts in zip(self._head, *map(self._texts, self._rows), strict=True)]
        self._widths = [
            min(width, _PLAN_CHARACTERS) if column.kind is ColumnKind.PLAN else width
            for column, width in zip(self._columns, natural, strict=True)
        ]
        self._gap = _GAPS[0] if self._too_much(_GAPS[0]) <= 0 else _GAPS[1]
        too_much = max(0, self._too_much(self._gap))
        self._widths = [
            max(min(width, _LEAST_PLAN_CHARACTERS), width - too_much) if column.kind is ColumnKind.PLAN else width
            for column, width in zip(self._columns, self._widths, strict=True)
        ]

    def lines(self) -> list[str]:
        beside = self._notes_fit_beside()
        head = self._line(self._head) + (self._gap + self._note_head if beside else "")
        firsts, blocks = [head.rstrip()], []
        for each in self._rows:
            first, *more = self._broken(self._texts(each))
            if beside:
                first += self._gap + self._note_of(each)
            firsts.append(first.rstrip())
            blocks += [first, *more, *([] if beside else _note_lines(self._note_of(each)))]
        return [head, "─" * max(map(len, firsts)), *blocks]

    def _texts(self, each: TableRow) -> list[str]:
        texts = [each.texts[place] for place in self._places]
        mark = " ✓ fits" if each.fits else " ◂ this cell" if each.is_new else ""
        return [f"{texts[0]}{mark}", *texts[1:]]

    def _note_of(self, each: TableRow) -> str:
        """Return what a row is, and what came of it."""
        note = each.texts[self._note] if self._note is not None else ""
        return "; ".join(part for part in (each.below, note) if part)

    def _too_much(self, gap: str) -> int:
        return sum(self._widths) + len(gap) * (len(self._widths) - 1) - _MOST_CHARACTERS

    def _notes_fit_beside(self) -> bool:
        """Return whether no note makes a line too long; where rows say what they are as well, notes stand below them."""
        if self._note is None or any(each.below for each in self._rows):
            return False
        left = -self._too_much(self._gap) - len(self._gap)
        return all(len(self._note_of(each)) <= left for each in self._rows)

    def _line(self, texts: Sequence[str]) -> str:
        return self._gap.join(
            text.rjust(width) if column.kind is ColumnKind.NUMBER else text.ljust(width)
            for column, width, text in zip(self._columns, self._widths, texts, strict=True)
        )

    def _broken(self, texts: list[str]) -> list[str]:
        """The lines of a row: more than one where its plan is too long."""
        at = next((n for n, column in enumerate(self._columns) if column.kind is ColumnKind.PLAN), None)
        if at is None or len(texts[at]) <= self._widths[at]:
            return [self._line(texts)]
        plan, *more = flag_lines(texts[at], self._widths[at] - 2)
        indent = " " * (sum(self._widths[:at]) + len(self._gap) * at + 2)
        return [self._line([*texts[:at], plan, *texts[at + 1 :]]), *(indent + rest for rest in more)]


def breakdown(profile: Profile) -> str:
    """Print what the memory is used for at the peak, measured or predicted."""
    parts = segments(profile)
    whole = max(1, sum(parts.values()))
    lines = [heading(profile)]
    for name, size in parts.items():
        share = size / whole
        lines.append(f"{name:<16}  {format_bytes(size):>9}  {share * 100:>4.0f} %  {'█' * max(1, round(share * 24))}")
    where = f"   in the {profile.phase_of_peak.words}" if profile.phase_of_peak else ""
    totals = {
        "peak allocated": profile.peak_allocated_bytes,
        "peak reserved": profile.peak_reserved_bytes,
        "device used": profile.driver_bytes if isinstance(profile, Measurement) else None,
        "offloaded": profile.host_bytes or None,
    }
    for name, total in totals.items():
        if total is not None:
            lines.append(f"{name:<16}  {format_bytes(total):>9}{where if name == 'peak allocated' else ''}")
    return "\n".join(lines)


def summary(comparison: Comparison) -> str:
    """One sentence for status lines, screen readers and the alternative text of pictures."""
    first, *others = comparison.rows
    kind = "row" if comparison.are_ranks else "setting"
    count = f"{len(comparison.rows)} {kind}{'s' if others else ''} measured: "
    peaks = "peaks at" if first.measurement.fits else "needs more than"
    sentence = f"{count}{first.measurement.plan} {peaks} {format_bytes(first.measurement.peak_allocated_bytes)}"
    others = [row for row in others if row.measurement.fits]
    if not others:
        return f"{sentence}{'; the others ran out of memory' if len(comparison.rows) > 1 else ''}."
    least = min(others, key=lambda row: row.measurement.peak_allocated_bytes)
    less = f" ({format_change(least.memory_ratio)})" if math.isfinite(least.memory_ratio) else ""
    memory = f"{format_bytes(least.measurement.peak_allocated_bytes)}{less}"
    speed = f" at {format_change(least.speed_ratio)} samples per second" if math.isfinite(least.speed_ratio) else ""
    takes = "is the lowest of the others with" if len(comparison.rows) > 2 else "takes"
    return f"{sentence}; {least.measurement.plan} {takes} {memory}{speed}."


def _note_lines(note: str) -> list[str]:
    return textwrap.wrap(note, _MOST_CHARACTERS, initial_indent=_NOTE_INDENT, subsequent_indent=" " * len(_NOTE_INDENT))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _MOST_CHARACTERS, subsequent_indent="  ")
