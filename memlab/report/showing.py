"""Default display of each kind of record: by `print`, and as the value of a cell."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from memlab.records import Measurement, Prediction
from memlab.records.ablation import Ladder
from memlab.records.comparison import Comparison, FoundPlan
from memlab.records.ranks import HowMany, PredictedRanks, RankPrediction
from memlab.report import html, ranks, text


@singledispatch
def text_of(record: Any) -> str:
    """A record as text.

    Raises:
        TypeError: nothing is known of this kind.
    """
    raise TypeError(f"{type(record).__name__}: no report shows it")


text_of.register(Comparison, text.table)
text_of.register(FoundPlan, text.found_table)
text_of.register(Ladder, text.ladder_table)
text_of.register(Measurement, text.breakdown)
text_of.register(
    RankPrediction, lambda each: text_of(PredictedRanks(f"a rank of {each.ranks} · {each.device}", (each,)))
)
text_of.register(PredictedRanks, lambda predicted_plans: text.listing(ranks.listing_of(predicted_plans)))
text_of.register(HowMany, lambda found: text.listing(ranks.how_many_listing(found)))


@text_of.register
def _(record: Prediction) -> str:
    return f"{record.plan}: {record.refused}" if record.refused else text.breakdown(record)


@singledispatch
def html_of(_record: Any) -> str | None:
    """A record as HTML; None where its text is all there is."""
    return None


html_of.register(Comparison, html.table)
html_of.register(FoundPlan, html.found_table)
html_of.register(Ladder, html.ladder_table)
html_of.register(PredictedRanks, lambda predicted_plans: html.listing(ranks.listing_of(predicted_plans)))
html_of.register(HowMany, lambda found: html.listing(ranks.how_many_listing(found)))
