"""`PredictedPlans`: what `%memfit predict` returns: predictions that a notebook shows as a table and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memlab.records import Measurement, Prediction, speed_of
from memlab.report import html, pareto, pareto_image, showing, tables, text, timeline_image
from memlab.report.pareto import Chart
from memlab.report.table import Table

_HOW_TO_SEE_ALL = "%memfit predict --all shows them"
# fewer plans than this are a pair to look at closely, not a cloud
_LEAST_OF_CLOUD = 3


@dataclass(frozen=True)
class PredictedPlans:
    """Predictions, as a sequence, and how to show them.

    Args:
        title: what was predicted, for what.
        predictions: as `memlab.predict_all` returns them.
        budget_bytes: what they are to fit into, or None.
        every: show every row.
        measurements: what of it was measured already, for the picture.
    """

    title: str
    predictions: tuple[Prediction, ...]
    budget_bytes: int | None = None
    every: bool = False
    measurements: tuple[Measurement, ...] = ()

    def __len__(self) -> int:
        return len(self.predictions)

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.predictions)

    def __getitem__(self, index: int) -> Prediction:
        return self.predictions[index]

    @property
    def text(self) -> str:
        """The table; for a plan or two with what the last one needs the memory for."""
        table, closely = text.table(self._table), self.closely
        return table if closely is None else f"{table}\n\n{text.breakdown(closely)}"

    @property
    def html(self) -> str:
        """The table."""
        return html.table(self._table)

    @property
    def _table(self) -> Table:
        return tables.predictions(
            self.predictions, self.budget_bytes, title=self.title, every=self.every, how_to_see_all=_HOW_TO_SEE_ALL
        )

    @property
    def png(self) -> bytes | None:
        """Memory against throughput; of a plan or two, the step of the last one; None where there is nothing to draw."""
        closely = self.closely
        if closely is not None:
            return timeline_image.png(closely, self.budget_bytes) if closely.timeline else None
        return pareto_image.png(self.chart) if any(map(speed_of, self._known)) else None

    @property
    def chart(self) -> Chart:
        """Memory against throughput."""
        return pareto.chart(self.predictions, self.measurements, self.budget_bytes, title=self.title)

    @property
    def sentence(self) -> str:
        """All of it in one sentence."""
        return tables.predictions_sentence(self.predictions, self.budget_bytes)

    @property
    def _known(self) -> Sequence[Prediction]:
        return [each for each in self.predictions if not each.refused]

    @property
    def closely(self) -> Prediction | None:
        """The one to look at closely, of a plan or two; None for a cloud of them."""
        known = self._known
        return known[-1] if known and len(self.predictions) < _LEAST_OF_CLOUD else None


showing.text_of.register(PredictedPlans, lambda predicted_plans: predicted_plans.text)
showing.html_of.register(PredictedPlans, lambda predicted_plans: predicted_plans.html)
