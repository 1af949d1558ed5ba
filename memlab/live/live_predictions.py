"""`LivePredictions`: what is predicted for the settings of a live run, a plan at a time, for a batch of one size."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

from memlab.errors import MemlabError
from memlab.live.effects import settings_beside
from memlab.plan import Plan
from memlab.predicting import predict_each
from memlab.records import Fit, Measurement, Prediction, fastest
from memlab.runtime.workload import Batch, Workload
from memlab.search.finding import considered
from memlab.units import format_bytes


class LivePredictions:
    """Predictions of one model's settings, by plan.

    Attributes:
        is_complete: whether everything that was asked for last is predicted.
    """

    def __init__(self) -> None:
        self.is_complete = True
        self._predictions: dict[str, Prediction] = {}
        self._made_for: tuple[Any, ...] | None = None
        self._lock = threading.Lock()

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """All of them, refused ones included."""
        with self._lock:
            return tuple(self._predictions.values())

    def refusal_of(self, plan: Plan) -> str:
        """Why a plan does not apply to the batch that was predicted for; empty when it does, or when that is not known."""
        with self._lock:
            known = self._predictions.get(plan.label)
        return known.refused if known is not None else ""

    def know(self, predictions: Iterable[Prediction]) -> None:
        """Take in what was predicted elsewhere."""
        with self._lock:
            self._predictions |= {each.plan: each for each in predictions}

    def plan_by_plan(
        self, workload: Workload, plan: Plan, measured: Measurement | None = None, *, every: bool = False
    ) -> Iterator[str]:
        """Predict what each setting would change beside a plan, and beside the loop as written.

        Args:
            workload: with its batch; another batch than before makes earlier predictions worthless.
            plan: in force.
            measured: a measurement on such a batch, by which times are calibrated; the first one there is makes
                predictions without it worthless.
            every: every plan worth considering as well.

        Raises:
            TraceError: what the model computes depends on values.
            WorkloadError: no batch or no optimizer.
        """
        self.is_complete = False
        self._begin(workload, is_calibrated=measured is not None)
        wanted = [*settings_beside(plan), *settings_beside(Plan()), *(considered(workload, None) if every else ())]
        missing = [each for each in dict.fromkeys(wanted) if each.label not in self._predictions]
        for number, prediction in enumerate(predict_each(workload, missing, measured=measured), 1):
            self.know([prediction])
            yield f"predicting, {number} of {len(missing)}"
        self.is_complete = True

    def fastest_within(self, budget_bytes: int) -> Plan:
        """The fastest plan that is predicted to fit a budget for certain.

        Raises:
            MemlabError: none is.
        """
        known = [each for each in self.predictions if not each.refused]
        best = fastest(each for each in known if each.verdict(budget_bytes).fit is Fit.YES)
        if best is None:
            smallest = min(known, key=lambda each: each.needed_bytes)
            raise MemlabError(
                f"no plan is predicted to fit {format_bytes(budget_bytes)}; the smallest, {smallest.plan}, needs "
                f"{format_bytes(smallest.needed_bytes)}"
            )
        return Plan.of_label(best.plan)

    def _begin(self, workload: Workload, *, is_calibrated: bool) -> None:
        made_for = (Batch.of(workload.batch).shapes, is_calibrated)
        with self._lock:
            if self._made_for not in (None, made_for):
                self._predictions.clear()
            self._made_for = made_for
