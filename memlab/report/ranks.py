"""Ranks of a run in many processes: what each needs, by engine and number of processes, and how many of which GPU do."""

from __future__ import annotations

from itertools import groupby

from memlab.records.ranks import Fewest, HowMany, PredictedRanks, RankPrediction
from memlab.report.table import Column, ColumnKind, Table, row, wanted
from memlab.report.tables import of_texts
from memlab.report.wording import NOTHING, bytes_or_nothing
from memlab.units import format_bytes


def table(predicted_plans: PredictedRanks) -> Table:
    """Reduce predictions for ranks to the table that people read."""
    every = predicted_plans.predictions
    known = [each for each in every if not each.refused]
    columns = wanted(
        Column[RankPrediction]("plan", lambda each: each.scale, ColumnKind.PLAN),
        Column("ranks", lambda each: str(each.ranks)),
        Column("peak a rank", lambda each: format_bytes(each.peak_allocated_bytes)),
        Column("measured", lambda each: bytes_or_nothing(predicted_plans.measured(each)),
               is_wanted=any(predicted_plans.measured(each) is not None for each in known)),
        Column("offloaded", lambda each: bytes_or_nothing(each.host_bytes or None),
               is_wanted=any(each.host_bytes for each in known)),
        Column("parameters", lambda each: bytes_or_nothing(each.divided.get("parameters"))),
        Column("gradients", lambda each: bytes_or_nothing(each.divided.get("gradients"))),
        Column("optimizer state", lambda each: bytes_or_nothing(each.divided.get("optimizer state"))),
        Column("sent a step", lambda each: bytes_or_nothing(each.wire_bytes or None)),
    )  # fmt: skip
    left_out = dict.fromkeys(f"left out: {each.refused}" for each in every if each.refused)
    notes = dict.fromkeys(note for each in every for note in each.notes)
    return Table(predicted_plans.title, columns, tuple(row(columns, each) for each in known), (*left_out, *notes))


def how_many(found: HowMany) -> Table:
    """Reduce the answer to a table: a line for each GPU, a column for each engine."""
    engines = list(dict.fromkeys(row.engine for row in found.rows))
    rows = []
    for gpu, listed in groupby(found.rows, key=lambda row: (row.gpu, row.memory_bytes)):
        by_engine = {row.engine: row for row in listed}
        numbers = (_number(by_engine.get(engine), found.most) for engine in engines)
        rows.append((gpu[0], format_bytes(gpu[1]), *numbers))
    heads = ("GPU", "memory", *engines)
    return of_texts(f"{found.title} · number of GPUs", heads, rows, words=("GPU",), foot=found.notes)


def _number(row: Fewest | None, most: int) -> str:
    if row is None:
        return NOTHING
    if row.prediction is None:
        return f"more than {most}"
    return f"{row.prediction.ranks} ({format_bytes(row.prediction.peak_allocated_bytes)} each)"


def sentence(predicted_plans: PredictedRanks) -> str:
    """All of it in one sentence."""
    known = [each for each in predicted_plans.predictions if not each.refused]
    if not known:
        return f"{predicted_plans.title}: no engine applies"
    said = (f"{each.scale} on {each.ranks}: {format_bytes(each.peak_allocated_bytes)} a rank" for each in known)
    return f"{predicted_plans.title}: {'; '.join(said)}"
