"""Default display of each kind of record: by `print`, and as the value of a cell."""

from __future__ import annotations

from base64 import b64encode
from functools import singledispatch
from html import escape
from typing import Any

from memlab.records import Measurement, Prediction
from memlab.records.ablation import Ablation
from memlab.records.comparison import Comparison, FoundPlan
from memlab.records.ranks import HowMany, PredictedRanks, RankPrediction
from memlab.report import ablation, html, ranks, tables, text
from memlab.report.table import Table


@singledispatch
def table_of(_record: Any) -> Table | None:
    """Return a record as a table; None where a record is no table."""
    return None


table_of.register(Comparison, tables.comparison)
table_of.register(FoundPlan, tables.found)
table_of.register(Ablation, ablation.table)
table_of.register(PredictedRanks, ranks.table)
table_of.register(HowMany, ranks.how_many)
table_of.register(
    RankPrediction, lambda each: ranks.table(PredictedRanks(f"a rank of {each.ranks} · {each.device}", (each,)))
)


@singledispatch
def text_of(record: Any) -> str:
    """Return a record as text. Raises `TypeError`: nothing is known of this kind."""
    table = table_of(record)
    if table is None:
        raise TypeError(f"{type(record).__name__}: no report shows it")
    return text.table(table)


text_of.register(Measurement, text.breakdown)


@text_of.register
def _(record: Prediction) -> str:
    return f"{record.plan}: {record.refused}" if record.refused else text.breakdown(record)


def html_of(record: Any) -> str | None:
    """Return a record as HTML; None where its text is all there is."""
    table = table_of(record)
    return None if table is None else html.table(table)


def picture(png: bytes, alt: str) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return a picture in the formats that pages show, and what they are told about them.

    It is HTML as well: JupyterLab gives no alternative text to a picture that it makes of PNG itself.
    """
    data = b64encode(png).decode()
    shown = f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}" style="max-width:100%;height:auto">'
    return {"text/html": shown, "image/png": data, "text/plain": alt}, {"image/png": {"alt": alt}}
