"""`Search`: what is believed of every plan by now, and which one to run next."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from memlab.errors import BudgetError, MissingExtraError, RefusalError, WorkloadError
from memlab.hardware.gpus import gpu_for
from memlab.plan import Plan
from memlab.plan.savings import usual_cost
from memlab.records import Measurement, Prediction, fastest
from memlab.records.comparison import FoundPlan
from memlab.search.corrections import Corrections
from memlab.units import format_bytes, format_seconds

# standard deviations of log(measured / predicted) for time: of what all plans share (a wide one says nothing), and of
# one setting between these bounds (from the width of predicted intervals: two deviations each way, a third its own)
_OVERALL_TIME = 3.0
_SETTING_TIME = (0.05, 0.2)
_SHARE_OF_INTERVAL = 1 / 12
# two runs of the same plan differ by about this much
_LEAST_TIME_NOISE = 0.02
# memory repeats exactly on the CPU ledger and nearly so on CUDA: all of it is relative to the predicted interval
_MEMORY_NOISE = 0.1
# an out of memory says only that the peak is above the budget: by this much, say
_BEYOND_BUDGET = math.log(1.03)
# expected gain in time below which no other plan is run
_WORTH_A_TRIAL = 0.005


@dataclass
class Candidate:
    """A plan, what was predicted for it, and what came of it."""

    plan: Plan
    prediction: Prediction
    log_seconds: float
    measurement: Measurement | None = None

    @property
    def open(self) -> bool:
        """Return whether it could still be run."""
        return self.measurement is None and not self.prediction.refused


@dataclass(frozen=True)
class Estimate:
    """Current estimate for a plan, in logarithms of seconds and bytes."""

    log_seconds: float
    deviation: float
    log_bytes: tuple[float, float, float]
    likelihood: float


class Search:
    """Knowledge about a set of plans and a budget, and the choice of the plan to run next."""

    def __init__(self, title: str, budget_bytes: int, plans: Sequence[Plan], predictions: Iterable[Prediction]) -> None:
        by_label = {prediction.plan: prediction for prediction in predictions}
        known = [(plan, by_label[plan.label]) for plan in plans if plan.label in by_label]
        seconds = _log_seconds(known)
        self._title, self._budget_bytes = title, budget_bytes
        self._candidates = {
            plan: Candidate(plan, prediction, log) for (plan, prediction), log in zip(known, seconds, strict=True)
        }
        self._trials: list[tuple[Plan, Measurement]] = []
        self._time = Corrections(
            _OVERALL_TIME, _setting_deviation(prediction for _, prediction in known), has_doubts=True
        )
        self._memory = Corrections(1.0, 1.0)
        self._estimates: dict[Plan, Estimate] = {}

    # -- what to run

    def next_plan(self, trials: int) -> Plan | None:
        """The plan to run next, or None when none is worth it."""
        best = self._best()
        failures = len(self._trials) - len(self._proven())
        if best is None:
            return self.most_promising() if failures < trials else self._last_resort(failures == trials)
        if len(self._proven()) >= trials or failures > trials:
            return None
        gains = {
            candidate.plan: self._gain(candidate, math.log(best.median_step_seconds))
            for candidate in self._open()
            if failures < trials or self.fits_for_certain(candidate.plan)
        }
        plan = max(gains, key=gains.__getitem__, default=None)
        return plan if plan is not None and gains[plan] > _WORTH_A_TRIAL else None

    def fits_for_certain(self, plan: Plan) -> bool:
        """Return whether a plan is believed to fit without doubt."""
        candidate = self._candidates.get(plan)
        return candidate is not None and candidate.open and self._estimate(candidate).likelihood == 1

    def most_promising(self) -> Plan | None:
        """The fastest plan that fits for certain, or one that probably fits and is faster still."""
        estimates = {candidate.plan: self._estimate(candidate) for candidate in self._open()}
        certain = [plan for plan, estimate in estimates.items() if estimate.likelihood == 1]
        if certain:
            return min(certain, key=lambda plan: estimates[plan].log_seconds)
        likely = [plan for plan, estimate in estimates.items() if estimate.likelihood > 0]
        return max(likely, key=lambda plan: estimates[plan].likelihood, default=None)

    def announcement(self, plan: Plan) -> str:
        """The line before a trial."""
        candidate = self._candidates[plan]
        estimate = self._estimate(candidate)
        expected = f"about {format_bytes(math.exp(estimate.log_bytes[1]))}"
        if math.isfinite(candidate.prediction.step_seconds):
            expected += f" and {format_seconds(math.exp(estimate.log_seconds))} a step"
        return f"trial {len(self._trials) + 1}: {plan.label}, {expected}"

    # -- what came of it

    def learn(self, plan: Plan, measurement: Measurement) -> None:
        """Take in a trial, and correct what is believed of all plans."""
        candidate = self._candidates[plan]
        predicted = math.log(max(1, candidate.prediction.needed_bytes))
        if measurement.fits:
            noise = max(_LEAST_TIME_NOISE, measurement.spread / math.sqrt(len(measurement.step_seconds)))
            self._time.learn(plan, math.log(measurement.median_step_seconds) - candidate.log_seconds, noise)
            self._memory.learn(plan, math.log(max(1, measurement.needed_bytes)) - predicted, _MEMORY_NOISE)
        else:
            expected, _ = self._memory.expected(plan)
            beyond = math.log(self._budget_bytes) + _BEYOND_BUDGET
            seen = math.log(max(1, measurement.needed_bytes))
            self._memory.learn(plan, max(expected, max(beyond, seen) - predicted), _MEMORY_NOISE)
        candidate.measurement = measurement
        self._trials.append((plan, measurement))
        self._estimates.clear()

    def refuse(self, plan: Plan, error: RefusalError | MissingExtraError) -> None:
        """Leave out every plan with the setting that was refused."""
        # packages are missing for optimizers only
        name = error.technique if isinstance(error, RefusalError) else "optimizer"
        if name not in plan.changes():
            raise error
        for candidate in self._open():
            if getattr(candidate.plan, name) == getattr(plan, name):
                candidate.prediction = replace(candidate.prediction, refused=str(error))

    def result(self) -> FoundPlan:
        """The fastest plan that was run and fits.

        Raises:
            BudgetError: none fits.
            WorkloadError: none applies.
        """
        best = self._best()
        if best is None:
            raise self.nothing_left()
        return FoundPlan(
            title=self._title,
            budget_bytes=self._budget_bytes,
            plan=next(plan for plan, measurement in self._trials if measurement is best),
            measurement=best,
            trials=tuple(measurement for _, measurement in self._trials),
            predictions=tuple(candidate.prediction for candidate in sorted(self._candidates.values(), key=self._place)),
        )

    def nothing_left(self) -> BudgetError | WorkloadError:
        """The error for a budget that no plan fits: how far off it is, and which GPU would do."""
        applicable = [candidate for candidate in self._candidates.values() if not candidate.prediction.refused]
        if not applicable:
            reason = next(
                (candidate.prediction.refused for candidate in self._candidates.values()), "none is predicted"
            )
            return WorkloadError(f"no plan applies to {self._title}: {reason}")
        smallest = min(applicable, key=lambda candidate: self._estimate(candidate).log_bytes[1])
        needed_bytes = round(math.exp(self._estimate(smallest).log_bytes[1]))
        budget, needed = format_bytes(self._budget_bytes), format_bytes(needed_bytes)
        if needed_bytes <= self._budget_bytes:
            return BudgetError(
                f"nothing that was run fits into {budget} for {self._title}{self._ran_out()}; the smallest of "
                f"{len(applicable)} plans, {smallest.plan.label}, needs about {needed} and was not run: allow more trials "
                f"(find_plan(…, trials=N)), or apply it"
            )
        return BudgetError(
            f"nothing fits into {budget} for {self._title}: the smallest of {len(applicable)} "
            f"plans, {smallest.plan.label}, needs about {needed}, "
            f"{format_bytes(needed_bytes - self._budget_bytes)} too much{self._ran_out()}; "
            f"{gpu_for(needed_bytes)}, or make the batch smaller"
        )

    def _ran_out(self) -> str:
        labels = [plan.label for plan, measurement in self._trials if not measurement.fits]
        return f" (run and out of memory: {', '.join(labels)})" if labels else ""

    # -- what is believed

    def _open(self) -> list[Candidate]:
        return [candidate for candidate in self._candidates.values() if candidate.open]

    def _proven(self) -> list[Measurement]:
        return [measurement for _, measurement in self._trials if measurement.fits]

    def _best(self) -> Measurement | None:
        return fastest(self._proven())

    def _last_resort(self, is_allowed: bool) -> Plan | None:
        """After as many failures as are allowed: the smallest plan, if it may fit."""
        estimates = {candidate.plan: self._estimate(candidate) for candidate in self._open() if is_allowed}
        plan = min(estimates, key=lambda plan: estimates[plan].log_bytes[1], default=None)
        return plan if plan is not None and estimates[plan].likelihood > 0 else None

    def _gain(self, candidate: Candidate, best_log_seconds: float) -> float:
        """Return by how much running this plan is expected to lower the best logarithm of time."""
        estimate = self._estimate(candidate)
        return estimate.likelihood * _expected_excess(best_log_seconds - estimate.log_seconds, estimate.deviation)

    def _estimate(self, candidate: Candidate) -> Estimate:
        known = self._estimates.get(candidate.plan)
        if known is not None:
            return known
        error, deviation = self._time.expected(candidate.plan)
        low, middle, high = self._corrected_bytes(candidate)
        likelihood = _share_below(math.log(self._budget_bytes), low, high)
        estimate = Estimate(candidate.log_seconds + error, deviation, (low, middle, high), likelihood)
        self._estimates[candidate.plan] = estimate
        return estimate

    def _corrected_bytes(self, candidate: Candidate) -> tuple[float, float, float]:
        """The predicted interval, moved by what is known of its error and narrowed by how well it is known."""
        error, deviation = self._memory.expected(candidate.plan)
        doubt = deviation / self._memory.deviation_before(candidate.plan)
        middle = math.log(max(1, candidate.prediction.needed_bytes))
        low, high = (math.log(max(1, size_bytes)) for size_bytes in candidate.prediction.interval_bytes)
        return middle + error + doubt * (low - middle), middle + error, middle + error + doubt * (high - middle)

    def _place(self, candidate: Candidate) -> tuple[int, float]:
        """Best first: what fits by its time, then what may fit, then the rest by its size; refused ones last."""
        estimate = self._estimate(candidate)
        if candidate.prediction.refused:
            return 3, 0.0
        if candidate.measurement is not None:
            fits = candidate.measurement.fits
            return (0, math.log(candidate.measurement.median_step_seconds)) if fits else (2, estimate.log_bytes[1])
        if estimate.likelihood == 0:
            return 2, estimate.log_bytes[1]
        return (0 if estimate.likelihood == 1 else 1), estimate.log_seconds


def _log_seconds(known: Sequence[tuple[Plan, Prediction]]) -> list[float]:
    """Predicted times in logarithms; the usual order of settings where no time is predicted."""
    predicted = [prediction.step_seconds for _, prediction in known if not prediction.refused]
    if all(math.isfinite(seconds) and seconds > 0 for seconds in predicted):
        return [0.0 if prediction.refused else math.log(prediction.step_seconds) for _, prediction in known]
    return [math.log(usual_cost(plan)) for plan, _ in known]


def _setting_deviation(predictions: Iterable[Prediction]) -> float:
    """Return how wrong the predicted time of one setting may be, from how wide the intervals are."""
    low, high = _SETTING_TIME
    intervals = [prediction.interval_seconds for prediction in predictions if not prediction.refused]
    widths = [math.log(longest / shortest) for shortest, longest in intervals if 0 < shortest <= longest < math.inf]
    return min(high, max(low, statistics.median(widths) * _SHARE_OF_INTERVAL)) if widths else high


def _expected_excess(mean: float, deviation: float) -> float:
    """Mean of the positive part of a normal variable.

    Example:
        >>> round(_expected_excess(0.0, 0.1), 4), _expected_excess(0.2, 0.0)
        (0.0399, 0.2)
    """
    if deviation <= 0:
        return max(0.0, mean)
    z, normal = mean / deviation, statistics.NormalDist()
    return mean * normal.cdf(z) + deviation * normal.pdf(z)


def _share_below(limit: float, low: float, high: float) -> float:
    """Share of an interval below a limit, rounding errors of logarithms aside."""
    if limit >= high - 1e-9:
        return 1.0
    return (limit - low) / (high - low) if limit > low else 0.0
