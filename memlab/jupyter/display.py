"""Receipts in every format a front end may want.

A `Comparison` is taught to the shell's formatters, so it shows as a receipt wherever a notebook shows
values: HTML for live pages, PNG for pages that drop HTML, plain text for terminals and GitHub's diff.
All three are static: a saved notebook needs no kernel, no widget and no script to show them.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

from IPython.display import display, update_display

from memlab.extras import available
from memlab.jupyter.config import MemLab
from memlab.records import Comparison
from memlab.report import figure, html, image, text


def teach_receipts(shell: Any, config: MemLab, undo: ExitStack) -> None:
    """Let the shell show a `Comparison` as a receipt; `undo` makes it forget."""

    def plain(comparison: Comparison, printer: Any, _cycle: bool) -> None:
        printer.text(text.table(comparison))

    def picture(comparison: Comparison) -> bytes | None:
        return image.png(comparison) if config.picture and available("matplotlib") else None

    known = {"text/plain": plain, "text/html": html.table, "image/png": picture}
    for kind, formatter in known.items():
        formatters = shell.display_formatter.formatters[kind]
        formatters.for_type(Comparison, formatter)
        undo.callback(formatters.pop, Comparison, None)


def is_rich(shell: Any) -> bool:
    """Whether the front end shows more than text: a kernel does, IPython in a terminal does not."""
    return getattr(shell, "kernel", None) is not None


def show(data: Any, **options: Any) -> None:
    """IPython's `display`, with its options."""
    display(data, **options)  # type: ignore[no-untyped-call] # unannotated in IPython


def replace_shown(data: Any, **options: Any) -> None:
    """IPython's `update_display`, with its options."""
    update_display(data, **options)  # type: ignore[no-untyped-call] # unannotated in IPython


def show_figure(shell: Any, comparison: Comparison) -> None:
    """Show the plotly figure, where there is a front end and plotly to show it."""
    if not is_rich(shell) or not available("plotly"):
        return
    drawn = json.loads(figure.comparison(comparison).to_json())
    # this format alone: plotly's HTML would put its whole library into the saved notebook
    show({"application/vnd.plotly.v1+json": drawn, "text/plain": text.summary(comparison)}, raw=True)
