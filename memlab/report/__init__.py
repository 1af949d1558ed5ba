"""Pictures and tables of records: pure functions, nothing here measures or changes anything.

- `text`: tables as plain text; `html`: the same with inline styles, for a saved notebook
- `image`: a receipt as a static PNG, by matplotlib
- `timeline_image`: the memory of a step over time, likewise, or of several steps on one scale
- `figure`: the live twins of the pictures, by plotly
- `pareto`: memory against throughput, drawn by `pareto_image` and `pareto_figure`
- `ablation`: what its table says; drawn by `ablation_image`
- `inference`: calls that only run forward, in words and as a receipt
- `showing`: which of them `print` and a cell use for which record
- `ranks`: ranks of a run in many processes, and how many of which GPU do
- `tables`: records reduced to a `table.Table`; `ranking`: which predictions are shown, in which order; `wording`: figures in words

matplotlib and plotly are imported when a picture is asked for, never before.
"""

from __future__ import annotations

from memlab.report import (
    ablation,
    ablation_image,
    figure,
    html,
    image,
    inference,
    pareto,
    pareto_figure,
    pareto_image,
    ranking,
    ranks,
    tables,
    text,
    timeline_image,
)

__all__ = [
    "ablation",
    "ablation_image",
    "figure",
    "html",
    "image",
    "inference",
    "pareto",
    "pareto_figure",
    "pareto_image",
    "ranking",
    "ranks",
    "tables",
    "text",
    "timeline_image",
]
