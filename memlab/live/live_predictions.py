"""Predictions for the settings of a live run: made a plan at a time (`LivePredictions`), while nothing trains (`Predicting`)."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from memlab.errors import MemlabError, PlanError, TraceError
from memlab.live.feed import Feed
from memlab.live.live_loop import LiveLoop
from memlab.live.source import Can
from memlab.live.stage import Playing
from memlab.measuring.runs import rows_of
from memlab.plan import FIELDS, Plan
from memlab.predicting import predict_each
from memlab.records import Fit, Measurement, Prediction, fastest
from memlab.runtime.batch import Batch
from memlab.runtime.workload import Workload
from memlab.search.finding import considered
from memlab.session.tape import tape_of
from memlab.units import format_bytes

# between the end of a cell and predictions: where many cells run one after another, each would wait for one
_QUIET_SECONDS = 0.5
_OTHER_TIMES = 0.1  # by which steps differ whose predicted speeds are not to be compared


class LivePredictions:
    """Predictions of one model's settings, by plan."""

    def __init__(self) -> None:
        self.is_complete = True  # whether everything that was asked for last is predicted
        self._predictions: dict[str, Prediction] = {}
        self._calibrated_by = 0.0  # seconds of a step; 0 where none was measured
        self._made_for: tuple[Any, ...] | None = None
        self._lock = threading.Lock()

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """All of them, refused ones included."""
        with self._lock:
            return tuple(self._predictions.values())

    def refusal_of(self, plan: Plan) -> str:
        """Return why a plan does not apply to the batch that was predicted for; empty when it does, or when that is not known."""
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
        """Predict what each setting would change beside the plan in force, and beside the loop as written; with `every`, also the others.

        Another batch than before makes earlier predictions worthless, and so do times by which those of all plans are calibrated,
        where they are the first or others than before.
        """
        self.is_complete = False
        made_for = (Batch.of(workload.batch).shapes, tape_of([workload]) is not None)
        seconds = statistics.median(measured.step_seconds) if measured is not None else 0.0
        with self._lock:
            is_of_other_times = abs(seconds - self._calibrated_by) > _OTHER_TIMES * max(seconds, self._calibrated_by)
            if self._made_for not in (None, made_for) or (self._made_for is not None and is_of_other_times):
                self._predictions.clear()
            if not self._predictions or self._made_for is None:
                self._calibrated_by = seconds
            self._made_for = made_for
        wanted = [*settings_beside(plan), *settings_beside(Plan()), *(considered(workload, None) if every else ())]
        missing = [each for each in dict.fromkeys(wanted) if each.label not in self._predictions]
        for number, prediction in enumerate(predict_each(workload, missing, measured=measured), 1):
            self.know([prediction])
            yield f"predicting, {number} of {len(missing)}"
        self.is_complete = True

    def fastest_within(self, budget_bytes: int) -> Plan:
        """The fastest plan that is predicted to fit a budget for certain."""
        known = [each for each in self.predictions if not each.refused]
        best = fastest(each for each in known if each.verdict(budget_bytes).fit is Fit.YES)
        if best is None:
            smallest = min(known, key=lambda each: each.needed_bytes)
            raise MemlabError(
                f"no plan is predicted to fit {format_bytes(budget_bytes)}; the smallest, {smallest.plan}, needs "
                f"{format_bytes(smallest.needed_bytes)}"
            )
        return Plan.of_label(best.plan)


def settings_beside(plan: Plan) -> tuple[Plan, ...]:
    """The plan itself, and every plan that differs from it in one setting, without repetition.

    Example:
        >>> [each.label for each in settings_beside(Plan())][:4]
        ['as written', '--accumulate 2', '--accumulate 4', '--accumulate 8']
    """
    beside = [plan]
    for spec in FIELDS:
        for text in spec.choices if spec.is_predicted else ():
            try:
                beside.append(plan.with_setting(spec.name, text))
            except PlanError:  # excluded by another setting
                continue
    return tuple(dict.fromkeys(beside))


def calibration(measurements: Iterable[Measurement], workload: Workload) -> Measurement | None:
    """Find the first measurement with times of steps on batches such as a workload's."""
    rows = rows_of(workload)
    usable = (each for each in measurements if each.step_seconds and each.samples_per_step == rows)
    return next((each for each in usable if is_of_such_batches(each, workload)), None)


def is_of_such_batches(measured: Measurement, workload: Workload) -> bool:
    """Return whether every step had as many tokens as the batch, or a multiple: texts of other lengths need other memory."""
    tokens = workload.batch.tokens if isinstance(workload.batch, Batch) else 0
    return not tokens or measured.tokens_per_step % tokens == 0


class Predicting:
    """Makes predictions of one model's settings while nothing trains, and stops where steps are to be made."""

    def __init__(self, loop: LiveLoop, feed: Feed) -> None:
        self.known = LivePredictions()
        self.budget_bytes: int | None = None  # what a plan that is found must fit
        self.doing = ""  # what is predicted just now, in words
        self._loop = loop
        self._feed = feed
        self._playing: Playing | None = None
        self._is_possible = True

    def go_on(self) -> None:
        """Predict what is not predicted yet, where somebody looks and it can be done."""
        if self._loop.views.any_open and self._loop.model.batch is not None and self._is_possible:
            self.predict()

    def predict(self) -> None:
        """Predict what each setting would change, as soon as no cell runs."""
        self._loop.when_idle(self._predict)

    def find(self, found: Callable[[Plan], None]) -> None:
        """Find the fastest plan that is predicted to fit the budget; what is not predicted yet is predicted first."""
        self._loop.views.errors.clear()
        self._loop.when_idle(lambda: self._predict(found))

    def stop(self) -> None:
        playing, self._playing = self._playing, None
        if playing is not None:
            playing.cancel()

    def _predict(self, found: Callable[[Plan], None] | None = None) -> None:
        self._loop.model.workload()  # says what is missing
        if Can.PREDICT not in self._loop.can():
            return
        self.stop()
        after_seconds = _QUIET_SECONDS if found is None else 0.0
        self._playing = self._loop.stage.play(self._predicted(found), self._ended, after_seconds)

    def _predicted(self, found: Callable[[Plan], None] | None) -> Iterator[None]:
        workload, plan = self._loop.model.workload(), self._loop.pending_changes.plan
        measured = calibration(self._feed.measurements.values(), workload)
        for doing in self.known.plan_by_plan(workload, plan, measured, every=found is not None):
            self.doing = doing
            if self._loop.views.are_figures_due():
                self._loop.views.draw(figures=False)
            yield
        if found is None:
            return
        if self.budget_bytes is None:
            raise MemlabError("find a plan: set a budget first")
        found(self.known.fastest_within(self.budget_bytes))

    def _ended(self, error: BaseException | None) -> None:
        was_stopped, self._playing, self.doing = self._playing is None, None, ""
        if error is not None:
            self._is_possible = not isinstance(error, TraceError)
            self._loop.views.report(error)
        elif not was_stopped and not self.known.is_complete:
            # a cell came in between: the rest is predicted when it has ended
            self.predict()
        self._loop.views.draw()
