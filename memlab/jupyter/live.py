"""Progress while a cell runs: a line and a small picture, replaced by the receipt."""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from time import monotonic
from uuid import uuid4

from memlab.jupyter.display import replace_shown, show
from memlab.records.live_state import Activity, Moment
from memlab.report.live_svg import compact, compact_text

_LEAST_SECONDS_BETWEEN = 0.25
_STYLE = "font-size:13px;font-variant-numeric:tabular-nums;padding:2px 0"
# A page that is loaded again hears no more of a cell that runs. What it shows of the line then comes to an end of the
# animation, which every new line begins anew; without styles the words are there from the beginning.
_SILENT_SECONDS = 20
_IF_SILENT = (
    "<style>@keyframes memlab-heard{from,to{visibility:hidden}}</style>"
    f'<div style="font-size:12px;opacity:.8;animation:memlab-heard {_SILENT_SECONDS}s">If nothing changes here, this page '
    "was loaded again and does not hear from the cell any more: once it is over, %memfit report shows its receipt.</div>"
)


class Line:
    """A place for one line of text; this one shows nothing."""

    def write(self, text: str, html: str = "") -> None:
        """Replace what stands there; with HTML for pages that show it."""

    def clear(self) -> None:
        """Leave nothing; harmless when nothing was written."""


class NotebookLine(Line):
    """A line in the output of a cell, replaced by its display id."""

    def __init__(self) -> None:
        self._display_id = ""

    def write(self, text: str, html: str = "") -> None:
        line = f'<div role="status" style="{_STYLE}">{escape(text)}</div>' if text else ""
        bundle = {"text/plain": text, "text/html": f"{html or line}{_IF_SILENT}" if text else ""}
        if self._display_id:
            replace_shown(bundle, display_id=self._display_id, raw=True)
        else:
            self._display_id = uuid4().hex
            show(bundle, raw=True, display_id=self._display_id)

    def clear(self) -> None:
        if self._display_id:
            self.write("")


class TerminalLine(Line):
    """The line of a terminal under the cursor; nothing where output goes to a file."""

    def __init__(self) -> None:
        self._written = False

    def write(self, text: str, html: str = "") -> None:
        if sys.stdout.isatty():
            self._written = True
            sys.stdout.write(f"\r\x1b[K{text}")
            sys.stdout.flush()

    def clear(self) -> None:
        if self._written:
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()


class Saying:
    """Says on a line what goes on: at once, and then four times a second at most."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._next_seconds = 0.0

    def __call__(self, text: str) -> None:
        if monotonic() >= self._next_seconds:
            self._line.write(f"memfit · {text}")
            self._next_seconds = monotonic() + _LEAST_SECONDS_BETWEEN


class Progress:
    """Shows how a cell's training goes."""

    AFTER_SECONDS = 2.0  # when that begins; a cell that is over before shows its receipt only

    def __init__(self, line: Line, is_shown_elsewhere: Callable[[], bool] = lambda: False) -> None:
        self._line = line  # where to
        # whether a panel shows the pictures already; a line of text then does
        self._is_shown_elsewhere = is_shown_elsewhere
        self._frame = -1

    def draw(self, moment: Moment) -> None:
        is_new = moment.frame != self._frame and moment.activity is not Activity.IDLE
        if is_new and moment.points:
            self._frame = moment.frame
            self._line.write(compact_text(moment), "" if self._is_shown_elsewhere() else compact(moment))

    def end(self) -> None:
        self._line.clear()
