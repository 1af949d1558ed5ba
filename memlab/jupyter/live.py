"""One line that shows how training goes, and is gone when the receipt comes."""

from __future__ import annotations

import sys
from html import escape
from time import monotonic
from typing import Protocol
from uuid import uuid4

from memlab.jupyter.display import replace_shown, show
from memlab.records import StepRecord
from memlab.report.columns import rate
from memlab.units import format_bytes, format_seconds

_FIRST_AFTER_SECONDS = 2.0
_LEAST_SECONDS_BETWEEN = 0.25
_STYLE = "font-size:13px;font-variant-numeric:tabular-nums;padding:2px 0"


class Line(Protocol):
    """A place for one line of text."""

    def write(self, text: str) -> None:
        """Replace what stands there."""

    def clear(self) -> None:
        """Leave nothing; harmless when nothing was written."""


class NotebookLine:
    """A line in the output of a cell, replaced by its display id."""

    def __init__(self) -> None:
        self._display_id = ""

    def write(self, text: str) -> None:
        """Replace what stands there."""
        bundle = {
            "text/plain": text,
            "text/html": f'<div role="status" style="{_STYLE}">{escape(text)}</div>' if text else "",
        }
        if self._display_id:
            replace_shown(bundle, display_id=self._display_id, raw=True)
        else:
            self._display_id = uuid4().hex
            show(bundle, raw=True, display_id=self._display_id)

    def clear(self) -> None:
        """Leave nothing; harmless when nothing was written."""
        if self._display_id:
            self.write("")


class TerminalLine:
    """The line of a terminal under the cursor; nothing where output goes to a file."""

    def __init__(self) -> None:
        self._written = False

    def write(self, text: str) -> None:
        """Replace what stands there."""
        if sys.stdout.isatty():
            self._written = True
            sys.stdout.write(f"\r\x1b[K{text}")
            sys.stdout.flush()

    def clear(self) -> None:
        """Leave nothing; harmless when nothing was written."""
        if self._written:
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()


class Saying:
    """Says on a line what goes on: at once, and then four times a second at most.

    Args:
        line: where to; None for silence.
    """

    def __init__(self, line: Line | None) -> None:
        self._line = line
        self._next_seconds = 0.0

    def __call__(self, text: str) -> None:
        if self._line is not None and monotonic() >= self._next_seconds:
            self._line.write(f"memfit · {text}")
            self._next_seconds = monotonic() + _LEAST_SECONDS_BETWEEN


class Progress:
    """Shows the newest step: after two seconds for the first time, then four times a second at most.

    Args:
        line: where to.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._next_seconds = monotonic() + _FIRST_AFTER_SECONDS

    def is_due(self) -> bool:
        """Whether it is time to show something; costs next to nothing."""
        return monotonic() >= self._next_seconds

    def show(self, steps: list[StepRecord]) -> None:
        """Show the newest step and the highest peak so far."""
        if steps:
            self._line.write(progress_text(steps))
        self._next_seconds = monotonic() + _LEAST_SECONDS_BETWEEN

    def end(self) -> None:
        """Take the line away."""
        self._line.clear()


def progress_text(steps: list[StepRecord]) -> str:
    """The newest step in one line.

    Example:
        >>> progress_text([StepRecord(1, "as written", 0.5, 8, 0, 2**30)])
        'memfit · as written · step 1 · 500.0 ms a step · 16.0 samples/s · peak allocated 1.00 GiB'
    """
    newest = steps[-1]
    parts = ["memfit", newest.plan, f"step {newest.step}", f"{format_seconds(newest.seconds)} a step"]
    if newest.samples and newest.seconds:
        parts.append(f"{rate(newest.samples / newest.seconds)} samples/s")
    peaks = [s.peak_allocated_bytes for s in steps if s.plan == newest.plan and s.peak_allocated_bytes is not None]
    if peaks:
        parts.append(f"peak allocated {format_bytes(max(peaks))}")
    return " · ".join(parts)
