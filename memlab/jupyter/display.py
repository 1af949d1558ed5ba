"""Receipts in every format a front end may want.

A `Comparison`, a `PredictedPlans`, a `FoundPlan`, an `Ablation` and what is predicted for ranks are taught to the shell's formatters, so they show as tables and
pictures wherever a notebook shows values: HTML for live pages, PNG for pages that drop HTML, plain text for terminals and GitHub's diff.
All are static: a saved notebook needs no kernel, no widget and no script to show them.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from IPython.display import display, update_display

from memlab.extras import available
from memlab.jupyter.config import MemLab
from memlab.jupyter.predicted_plans import PredictedPlans
from memlab.records.ablation import Ablation
from memlab.records.comparison import Comparison, FoundPlan
from memlab.records.ranks import HowMany, PredictedRanks
from memlab.report import ablation, ablation_image, image, pareto, pareto_image, ranks, showing, tables, text


def teach_receipts(shell: Any, config: MemLab, undo: ExitStack) -> None:
    """Let the shell show what the magics return; `undo` makes it forget."""
    for shown, picture in _PICTURES.items():
        known = {
            "text/plain": _printed,
            "text/html": showing.html_of,
            "image/png": _where_wanted(picture, config),
        }
        for kind, formatter in known.items():
            formatters = shell.display_formatter.formatters[kind]
            formatters.for_type(shown, formatter)
            undo.callback(formatters.pop, shown, None)


_PICTURES: dict[type, Callable[[Any], bytes | None]] = {
    # a picture takes longer than all else at the end of a cell, and of a single row it says no more than its table
    Comparison: lambda comparison: image.png(comparison) if len(comparison.rows) > 1 else None,
    PredictedPlans: lambda predicted_plans: predicted_plans.png,
    FoundPlan: lambda found: pareto_image.png(pareto.found_chart(found)),
    HowMany: lambda _: None,
    PredictedRanks: ranks.png,
    Ablation: ablation_image.png,
}
_SENTENCES: dict[type, Callable[[Any], str]] = {
    Comparison: text.summary,
    PredictedPlans: lambda predicted_plans: predicted_plans.sentence,
    FoundPlan: tables.found_sentence,
    Ablation: ablation.sentence,
}


def _printed(value: Any, printer: Any, _cycle: bool) -> None:
    printer.text(showing.text_of(value))


def _where_wanted(picture: Callable[[Any], bytes | None], config: MemLab) -> Callable[[Any], bytes | None]:
    return lambda value: picture(value) if config.picture and available("matplotlib") else None


def is_rich(shell: Any) -> bool:
    """Return whether the front end shows more than text: a kernel does, IPython in a terminal does not."""
    return getattr(shell, "kernel", None) is not None


def show(data: Any, **options: Any) -> None:
    """IPython's `display`, with its options."""
    display(data, **options)  # type: ignore[no-untyped-call] # unannotated in IPython


def replace_shown(data: Any, **options: Any) -> None:
    """IPython's `update_display`, with its options."""
    update_display(data, **options)  # type: ignore[no-untyped-call] # unannotated in IPython


def show_picture(shell: Any, shown: Any, config: MemLab) -> None:
    """Show the picture of a record by itself, for pages that show HTML and leave out the picture beside it."""
    png = _where_wanted(_PICTURES[type(shown)], config)(shown) if is_rich(shell) else None
    if png is not None:
        show({"image/png": b64encode(png).decode(), "text/plain": _SENTENCES[type(shown)](shown)}, raw=True)
