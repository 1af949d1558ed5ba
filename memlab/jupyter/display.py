"""Receipts in every format a front end may want.

A `Comparison`, a `PredictedPlans`, a `FoundPlan`, an `Ablation` and what is predicted for ranks are taught to the shell's formatters, so they show as tables and
pictures wherever a notebook shows values: HTML for live pages, PNG for pages that drop HTML, plain text for terminals and GitHub's diff.
All three are static: a saved notebook needs no kernel, no widget and no script to show them.
"""

from __future__ import annotations

import json
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
from memlab.report import (
    ablation,
    ablation_image,
    figure,
    image,
    pareto,
    pareto_figure,
    pareto_image,
    ranks,
    showing,
    tables,
    text,
)


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


def show_figure(shell: Any, shown: Comparison | PredictedPlans | FoundPlan | Ablation) -> None:
    """Show the plotly figure, where there is a front end and plotly to show it."""
    if not is_rich(shell) or not available("plotly"):
        return
    if isinstance(shown, Comparison):
        drawn, said = figure.comparison(shown), text.summary(shown)
    elif isinstance(shown, Ablation):
        drawn, said = figure.comparison(shown.comparison), ablation.sentence(shown)
    elif isinstance(shown, FoundPlan):
        drawn, said = pareto_figure.figure(pareto.found_chart(shown)), tables.found_sentence(shown)
    elif shown.closely is not None:
        drawn, said = figure.timeline(shown.closely, shown.budget_bytes), shown.sentence
    else:
        drawn, said = pareto_figure.figure(shown.chart), shown.sentence
    # this format alone: plotly's HTML would put its whole library into the saved notebook
    show({"application/vnd.plotly.v1+json": json.loads(drawn.to_json()), "text/plain": said}, raw=True)
