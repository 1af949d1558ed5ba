"""Receipts in every format a front end may want.

A `Comparison`, a `PredictedPlans`, a `FoundPlan`, an `Ablation` and what is predicted for ranks are taught to the shell's formatters, so they show as tables and
pictures wherever a notebook shows values: HTML for live pages, PNG for pages that drop HTML, plain text for terminals and GitHub's diff.
All are static: a saved notebook needs no kernel, no widget and no script to show them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from IPython.display import display, update_display

from memlab.extras import available
from memlab.jupyter.config import MemLab
from memlab.records import Measurement, Prediction, speed_of
from memlab.records.ablation import Ablation
from memlab.records.comparison import Comparison, FoundPlan
from memlab.records.ranks import HowMany, PredictedRanks
from memlab.report import ablation, image, pareto, pareto_image, ranks, showing, tables, text, timeline_image
from memlab.report.pareto import Chart
from memlab.report.table import Table

_HOW_TO_SEE_ALL = "%memfit predict --all shows them"
# fewer plans than this are a pair to look at closely, not a cloud
_LEAST_OF_CLOUD = 3


@dataclass(frozen=True)
class PredictedPlans:
    """Predictions, as a sequence, and how to show them."""

    title: str  # what was predicted, for what
    predictions: tuple[Prediction, ...]  # as `memlab.predict_all` returns them
    budget_bytes: int | None = None  # what they are to fit into, or None
    every: bool = False  # show every row
    measurements: tuple[Measurement, ...] = ()  # what of it was measured already, for the picture

    def __len__(self) -> int:
        return len(self.predictions)

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.predictions)

    def __getitem__(self, index: int) -> Prediction:
        return self.predictions[index]

    @property
    def text(self) -> str:
        """The table; for a plan or two with what the last one needs the memory for."""
        table, closely = text.table(self.table), self.closely
        return table if closely is None else f"{table}\n\n{text.breakdown(closely)}"

    @property
    def table(self) -> Table:
        return tables.predictions(
            self.predictions, self.budget_bytes, title=self.title, every=self.every, how_to_see_all=_HOW_TO_SEE_ALL,
            measurements=self.measurements,
        )  # fmt: skip

    @property
    def png(self) -> bytes | None:
        """Memory against throughput; of a plan or two, the step of the last one; None where there is nothing to draw."""
        closely = self.closely
        if closely is not None:
            return timeline_image.png(closely, self.budget_bytes) if closely.timeline else None
        return pareto_image.png(self.chart) if any(map(speed_of, self._known)) else None

    @property
    def chart(self) -> Chart:
        return pareto.chart(self.predictions, self.measurements, self.budget_bytes, title=self.title)

    @property
    def sentence(self) -> str:
        return tables.predictions_sentence(self.predictions, self.budget_bytes)

    @property
    def _known(self) -> Sequence[Prediction]:
        return [each for each in self.predictions if not each.refused]

    @property
    def closely(self) -> Prediction | None:
        """The one to look at closely, of a plan or two; None for a cloud of them."""
        known = self._known
        return known[-1] if known and len(self.predictions) < _LEAST_OF_CLOUD else None


showing.table_of.register(PredictedPlans, lambda predicted_plans: predicted_plans.table)
showing.text_of.register(PredictedPlans, lambda predicted_plans: predicted_plans.text)


def teach_receipts(shell: Any, config: MemLab, undo: ExitStack) -> None:
    """Let the shell show what the magics return; `undo` makes it forget."""
    for shown in _PICTURES:
        known: dict[str, Callable[..., Any]] = {
            "text/plain": lambda value, printer, _cycle: printer.text(showing.text_of(value)),
            "text/html": showing.html_of,
            "image/png": partial(_picture_with_text, config=config),
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
    PredictedRanks: image.ranks_png,
    Ablation: image.ablation_png,
}
_SENTENCES: dict[type, Callable[[Any], str]] = {
    Comparison: text.summary,
    PredictedPlans: lambda predicted_plans: predicted_plans.sentence,
    FoundPlan: tables.found_sentence,
    Ablation: ablation.sentence,
    PredictedRanks: ranks.sentence,
}


def _picture_with_text(shown: Any, config: MemLab) -> tuple[bytes, dict[str, str]] | None:
    """The picture of a record, with its alternative text, which pages made of a notebook show to who cannot see it."""
    png = _PICTURES[type(shown)](shown) if config.picture and available("matplotlib") else None
    return None if png is None else (png, {"alt": _sentence(shown)})


def _sentence(shown: Any) -> str:
    """Return a record in one sentence: its own, else the title of its table."""
    sentence = _SENTENCES.get(type(shown))
    return sentence(shown) if sentence is not None else showing.text_of(shown).partition("\n")[0]


def is_rich(shell: Any) -> bool:
    """Return whether the front end shows more than text: a kernel does, IPython in a terminal does not."""
    return getattr(shell, "kernel", None) is not None


def tell(text: str) -> None:
    """Print a line of memlab's own below a cell."""
    print(f"memfit: {text}")  # noqa: T201


def show(data: Any, **options: Any) -> None:
    """IPython's `display`, with its options."""
    display(data, **options)  # type: ignore[no-untyped-call] # unannotated in IPython


def replace_shown(data: Any, **options: Any) -> None:
    """IPython's `update_display`, with its options."""
    update_display(data, **options)  # type: ignore[no-untyped-call] # unannotated in IPython


def show_picture(shell: Any, shown: Any, config: MemLab) -> None:
    """Show the picture of a record by itself, for pages that show HTML and leave out the picture beside it."""
    picture = _picture_with_text(shown, config) if is_rich(shell) else None
    if picture is not None:
        png, about = picture
        formats, metadata = showing.picture(png, about["alt"])
        show(formats, raw=True, metadata=metadata)
