"""`find_plan`: the fastest plan that fits a budget, proven by running it.

Rules of the search:

1. What is predicted not to fit is not run. What may or may not fit is run only where it is expected to be
   faster than what fits for certain, weighted by how likely it fits: a failed trial is cheap, not free.
2. Every trial teaches two things, the ratio of measured to predicted memory and that of time. In logarithms a
   ratio is the sum of one overall error and one error of each setting of the plan; with normal priors (shrinkage)
   each trial corrects all of them at once, and with them the prediction of every other plan.
3. Another plan is run only while the gain expected of it is worth a trial. The expectation counts in how little
   is known about settings that were not run yet: a plan predicted to be just slower than the best one may be
   faster. Where settings are mispredicted by up to 10 %, corrected predictions alone end at 97 % of the best speed
   or more in half of synthetic cases, and this rule in four of five, with three trials each.
4. A technique that refuses in a trial is left out of all further plans, with its reason.
5. On a device that enforces its capacity by watching every step (the CPU ledger) speed is measured in a second
   run that is not watched: watching costs between 0 and 120 % of a step, depending on the plan.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch

from memlab.devices import Gpu, smallest_that_holds
from memlab.errors import BudgetError, MissingExtraError, PlanError, RefusalError, WorkloadError
from memlab.lattice import lattice
from memlab.measuring.runs import measure, row_of_failure, say_when_long
from memlab.measuring.steps import Device, device_for, samples_of
from memlab.plan import FIELDS, Offloaded, Plan, Precision
from memlab.predicting import predict_all
from memlab.records import FoundPlan, Measurement, Prediction
from memlab.units import format_bytes, format_seconds, parse_bytes
from memlab.workload import Batch, Workload

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
# a measurement whose steps differ by more than this (half range over median) is taken once more
_NOISY_SPREAD = 0.25
# the CUDA context and its kernels are outside the allocator; memory that CUDA reports is up to 4 % below the catalogue's
_CONTEXT_BYTES = 512 * 2**20
_USABLE_SHARE = 0.96
# time of a step under one setting, relative to none, where no rate of the device is known: an order, not a prediction
_USUAL_COST: Mapping[str, float] = {
    "accumulation": 1.03, "checkpointing:selective": 1.1, "checkpointing:full": 1.3, "precision:fp16": 0.6,
    "precision:bf16": 0.6, "precision:pure-bf16": 0.65, "optimizer:adam8bit": 1.02, "offload:optimizer": 1.3,
    "offload:activations": 1.4, "loss:chunked": 1.02,
}  # fmt: skip

Run = Callable[[Plan], Measurement]
Say = Callable[[str], None]


def find_plan(
    workload: Workload,
    budget: str = "8GiB",
    *,
    device: Device | None = None,
    steps: int = 3,
    trials: int = 3,
    lossless: bool = False,
    fixed: Plan | str = "",
    progress: Say | None = None,
) -> FoundPlan:
    """Find the fastest plan that fits a budget; the answer has been run, not only computed.

    Weights, moments, gradients, scheduler, random state and the plan in force are afterwards as they were.

    Args:
        workload: as for `measure`.
        budget: size to fit into, such as "8GiB".
        device: what to count memory on; by default the model's device, made to behave as one of this size, so that
            a plan that does not fit really runs out of memory.
        steps: steps to time in each trial.
        trials: plans that fit to run at most; as many again, and one more, may run out of memory.
        lossless: consider exact techniques only, see `memlab.lattice`.
        fixed: a plan, or its flags: settings to keep in every plan considered.
        progress: called with a line before each prediction and each trial; by default lines go to standard error
            once the work takes longer than two seconds.

    Returns:
        The plan and its measurement, every trial, and what was foretold.

    Raises:
        BudgetError: no plan fits: with the smallest one, how far off the budget is and which GPU would do.
        PlanError: the budget or the flags cannot be read.
        RefusalError: the model is refused, whatever the plan (compiled, sharded).
        WorkloadError: no batch or no optimizer, no trials, or every plan with the settings in `fixed` is refused.
    """
    budget_bytes = _parsed(budget)
    _require_trials(steps, trials)
    kept = fixed if isinstance(fixed, Plan) else Plan.parse(fixed)
    plans = _considered(workload, kept, lossless=lossless)
    say = progress or say_when_long("looking for a plan:")
    told = None if progress is None else lambda line: progress(f"predicting, {line}")
    predictions = predict_all(workload, plans=plans, progress=told)
    search = _Search(workload.describe(), budget_bytes, plans, predictions)
    counted_on = device or device_for(workload.device, budget_bytes)
    try:
        return _found(search, lambda plan: _run(workload, plan, steps, counted_on, budget_bytes), trials, say)
    finally:
        if device is None:
            counted_on.close()


def choose_plan(
    workload: Workload,
    budget_bytes: int,
    *,
    device: str | Gpu | None = None,
    fixed: Plan = Plan(),  # noqa: B008 - frozen
    lossless: bool = False,
) -> tuple[Plan, list[Prediction]]:
    """The fastest plan that is predicted to fit for certain, without running anything.

    Args:
        workload: as for `predict_all`.
        budget_bytes: size to fit into.
        device: a GPU of the catalogue to choose for, or its name; by default the device the model is on.
        fixed: settings to keep; a field at its default is free.
        lossless: consider exact techniques only.

    Returns:
        The plan, and the predictions of all plans considered. It is `fixed` itself where that fits. Where nothing
        fits for certain, it is the plan most likely to fit.

    Raises:
        BudgetError: every plan is predicted not to fit.
        WorkloadError: no batch or no optimizer, or every plan with the settings in `fixed` is refused.
    """
    plans = _considered(workload, fixed, lossless=lossless)
    predictions = predict_all(workload, device, plans=plans)
    search = _Search(workload.describe(), budget_bytes, plans, predictions)
    if search.fits_for_certain(plans[0]):
        return plans[0], predictions
    chosen = search.most_promising()
    if chosen is None:
        raise search.nothing_left()
    return chosen, predictions


def _parsed(budget: str) -> int:
    if not isinstance(budget, str):
        raise PlanError(f"budget: expected a size as text, as in '8GiB', got {type(budget).__name__} {budget!r}")
    return parse_bytes(budget)


def _require_trials(steps: int, trials: int) -> None:
    if trials < 1:
        raise WorkloadError(f"trials={trials}: at least one plan must be run; choose from predict_all to run none")
    if steps < 1:
        raise WorkloadError(f"steps={steps}: at least one step must be timed")


def _considered(workload: Workload, fixed: Plan, *, lossless: bool) -> tuple[Plan, ...]:
    return lattice(fixed, rows=_rows(workload), lossless=lossless, half=_half_format(workload.device))


def _rows(workload: Workload) -> int | None:
    """Rows of the batch; None when it cannot be told."""
    batch = workload.batch
    if batch is not None and workload.loss_fn is not None:
        batch, _ = batch
    return None if batch is None else samples_of(Batch.of(batch)) or None


def _half_format(device: torch.device) -> Precision:
    """The 16-bit format that a device computes in: GPUs before Ampere have no bf16."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return Precision.FP16
    return Precision.BF16


# -- running ---------------------------------------------------------------------------------------


def _found(search: _Search, run: Run, trials: int, say: Say) -> FoundPlan:
    """Run plans until none is worth a trial."""
    while (plan := search.next_plan(trials)) is not None:
        say(search.announcement(plan))
        try:
            measurement = run(plan)
        except (RefusalError, MissingExtraError) as error:
            search.refuse(plan, error)
        else:
            search.learn(plan, measurement)
    return search.result()


def _run(workload: Workload, plan: Plan, steps: int, device: Device, budget_bytes: int) -> Measurement:
    """The measurement of a plan; the row that says so when it does not fit."""
    _free_cache(workload.device)
    words = ""
    try:
        measured = measure(workload, plan, 1 if device.observes_every_step else steps, device=device)
    except torch.OutOfMemoryError as error:
        words = str(error)
    if words:
        # out of the handler: until here the traceback held the failed step's tensors
        gc.collect()
        return row_of_failure(plan, device, words)
    if _needed(measured) > budget_bytes:
        return replace(measured, fits=False)
    if not device.observes_every_step:
        return _steadied(measured, lambda: measure(workload, plan, steps, device=device))

    def timed() -> Measurement:
        return measure(workload, plan, steps)

    return replace(measured, step_seconds=_steadied(timed(), timed).step_seconds)


def _steadied(measured: Measurement, again: Callable[[], Measurement]) -> Measurement:
    """The faster of two measurements where the first was disturbed."""
    if measured.spread <= _NOISY_SPREAD:
        return measured
    return min(measured, again(), key=lambda each: each.median_step_seconds)


def _free_cache(device: torch.device) -> None:
    """What an earlier trial left reserved would count towards this one's peak."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _needed(measured: Measurement) -> int:
    """What a budget must hold, as `Prediction.needed_bytes` says it."""
    return measured.peak_allocated_bytes if measured.peak_reserved_bytes is None else measured.peak_reserved_bytes


# -- deciding --------------------------------------------------------------------------------------


@dataclass
class _Candidate:
    """A plan, what was foretold for it, and what came of it."""

    plan: Plan
    prediction: Prediction
    log_seconds: float
    measurement: Measurement | None = None

    @property
    def open(self) -> bool:
        """Whether it could still be run."""
        return self.measurement is None and not self.prediction.refused


@dataclass(frozen=True)
class _Outlook:
    """What is believed of a plan by now, in logarithms of seconds and bytes.

    Args:
        log_seconds: expected time.
        deviation: standard deviation of it.
        log_bytes: lowest, expected and highest peak.
        likelihood: of fitting.
    """

    log_seconds: float
    deviation: float
    log_bytes: tuple[float, float, float]
    likelihood: float


class _Search:
    """What is known about a set of plans and a budget, and which plan to run next.

    Args:
        title: what is trained, on what.
        budget_bytes: size to fit into.
        plans: those to consider; the first is the one that changes least.
        predictions: what is foretold for them, in any order.
    """

    def __init__(self, title: str, budget_bytes: int, plans: Sequence[Plan], predictions: Iterable[Prediction]) -> None:
        by_label = {prediction.plan: prediction for prediction in predictions}
        known = [(plan, by_label[plan.label]) for plan in plans if plan.label in by_label]
        seconds = _log_seconds(known)
        self._title, self._budget_bytes = title, budget_bytes
        self._candidates = {
            plan: _Candidate(plan, prediction, log) for (plan, prediction), log in zip(known, seconds, strict=True)
        }
        self._trials: list[tuple[Plan, Measurement]] = []
        self._last_refusal: RefusalError | MissingExtraError | None = None
        self._time = _Errors(_OVERALL_TIME, _setting_deviation(prediction for _, prediction in known))
        self._memory = _Errors(1.0, 1.0)
        self._outlooks: dict[Plan, _Outlook] = {}

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
        """Whether a plan is believed to fit without doubt."""
        candidate = self._candidates.get(plan)
        return candidate is not None and candidate.open and self._outlook(candidate).likelihood == 1

    def most_promising(self) -> Plan | None:
        """The fastest plan that fits for certain, or one that probably fits and is faster still."""
        outlooks = {candidate.plan: self._outlook(candidate) for candidate in self._open()}
        certain = [plan for plan, outlook in outlooks.items() if outlook.likelihood == 1]
        if certain:
            return min(certain, key=lambda plan: outlooks[plan].log_seconds)
        likely = [plan for plan, outlook in outlooks.items() if outlook.likelihood > 0]
        return max(likely, key=lambda plan: outlooks[plan].likelihood, default=None)

    def announcement(self, plan: Plan) -> str:
        """The line before a trial."""
        candidate = self._candidates[plan]
        outlook = self._outlook(candidate)
        expected = f"about {format_bytes(math.exp(outlook.log_bytes[1]))}"
        if math.isfinite(candidate.prediction.step_seconds):
            expected += f" and {format_seconds(math.exp(outlook.log_seconds))} a step"
        return f"trial {len(self._trials) + 1}: {plan.label}, {expected}"

    # -- what came of it

    def learn(self, plan: Plan, measurement: Measurement) -> None:
        """Take in a trial, and correct what is believed of all plans."""
        candidate = self._candidates[plan]
        predicted = math.log(max(1, candidate.prediction.needed_bytes))
        if measurement.fits:
            noise = max(_LEAST_TIME_NOISE, measurement.spread / math.sqrt(len(measurement.step_seconds)))
            self._time.learn(plan, math.log(measurement.median_step_seconds) - candidate.log_seconds, noise)
            self._memory.learn(plan, math.log(max(1, _needed(measurement))) - predicted, _MEMORY_NOISE)
        else:
            expected, _ = self._memory.expected(plan)
            beyond = math.log(self._budget_bytes) + _BEYOND_BUDGET
            seen = math.log(max(1, _needed(measurement)))
            self._memory.learn(plan, max(expected, max(beyond, seen) - predicted), _MEMORY_NOISE)
        candidate.measurement = measurement
        self._trials.append((plan, measurement))
        self._outlooks.clear()

    def refuse(self, plan: Plan, error: RefusalError | MissingExtraError) -> None:
        """Leave out every plan with the setting that was refused.

        Raises:
            RefusalError: the model itself is refused, whatever the plan.
        """
        # packages are missing for optimizers only
        name = error.technique if isinstance(error, RefusalError) else "optimizer"
        if name not in _FIELD_NAMES or name not in plan.changes():
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
            reason = next((candidate.prediction.refused for candidate in self._candidates.values()), "none is foretold")
            return WorkloadError(f"no plan applies to {self._title}: {reason}")
        smallest = min(applicable, key=lambda candidate: self._outlook(candidate).log_bytes[1])
        needed_bytes = round(math.exp(self._outlook(smallest).log_bytes[1]))
        return BudgetError(
            f"nothing fits into {format_bytes(self._budget_bytes)} for {self._title}: the smallest of {len(applicable)} "
            f"plans, {smallest.plan.label}, needs about {format_bytes(needed_bytes)}, "
            f"{format_bytes(max(0, needed_bytes - self._budget_bytes))} too much{self._ran_out()}; "
            f"{_gpu_for(needed_bytes)}, or make the batch smaller"
        )

    def _ran_out(self) -> str:
        labels = [plan.label for plan, measurement in self._trials if not measurement.fits]
        return f" (run and out of memory: {', '.join(labels)})" if labels else ""

    # -- what is believed

    def _open(self) -> list[_Candidate]:
        return [candidate for candidate in self._candidates.values() if candidate.open]

    def _proven(self) -> list[Measurement]:
        return [measurement for _, measurement in self._trials if measurement.fits]

    def _best(self) -> Measurement | None:
        return min(self._proven(), key=lambda measurement: measurement.median_step_seconds, default=None)

    def _last_resort(self, is_allowed: bool) -> Plan | None:
        """After as many failures as are allowed: the smallest plan, if it may fit."""
        outlooks = {candidate.plan: self._outlook(candidate) for candidate in self._open() if is_allowed}
        plan = min(outlooks, key=lambda plan: outlooks[plan].log_bytes[1], default=None)
        return plan if plan is not None and outlooks[plan].likelihood > 0 else None

    def _gain(self, candidate: _Candidate, best_log_seconds: float) -> float:
        """By how much running this plan is expected to lower the best logarithm of time."""
        outlook = self._outlook(candidate)
        return outlook.likelihood * _expected_excess(best_log_seconds - outlook.log_seconds, outlook.deviation)

    def _outlook(self, candidate: _Candidate) -> _Outlook:
        outlook = self._outlooks.get(candidate.plan)
        if outlook is None:
            outlook = self._outlooks[candidate.plan] = self._look(candidate)
        return outlook

    def _look(self, candidate: _Candidate) -> _Outlook:
        error, deviation = self._time.expected(candidate.plan)
        low, middle, high = self._corrected_bytes(candidate)
        likelihood = _share_below(math.log(self._budget_bytes), low, high)
        return _Outlook(candidate.log_seconds + error, deviation, (low, middle, high), likelihood)

    def _corrected_bytes(self, candidate: _Candidate) -> tuple[float, float, float]:
        """The predicted interval, moved by what is known of its error and narrowed by how well it is known."""
        error, deviation = self._memory.expected(candidate.plan)
        doubt = deviation / self._memory.deviation_before(candidate.plan)
        middle = math.log(max(1, candidate.prediction.needed_bytes))
        low, high = (math.log(max(1, size_bytes)) for size_bytes in candidate.prediction.interval_bytes)
        return middle + error + doubt * (low - middle), middle + error, middle + error + doubt * (high - middle)

    def _place(self, candidate: _Candidate) -> tuple[int, float]:
        """Best first: what fits by its time, then what may fit, then the rest by its size; refused ones last."""
        outlook = self._outlook(candidate)
        if candidate.prediction.refused:
            return 3, 0.0
        if candidate.measurement is not None:
            fits = candidate.measurement.fits
            return (0, math.log(candidate.measurement.median_step_seconds)) if fits else (2, outlook.log_bytes[1])
        if outlook.likelihood == 0:
            return 2, outlook.log_bytes[1]
        return (0 if outlook.likelihood == 1 else 1), outlook.log_seconds


class _Errors:
    """Logarithms of measured over predicted, as the sum of one overall error and one of each setting.

    Linear regression with normal priors, learnt one observation at a time.

    Args:
        overall: standard deviation of the error that all plans share.
        setting: standard deviation of one setting's error.

    Example:
        >>> errors = _Errors(overall=0.3, setting=0.1)
        >>> errors.learn(Plan(), 0.2, noise=0.01)
        >>> round(errors.expected(Plan.parse("--bf16"))[0], 2)
        0.2
    """

    def __init__(self, overall: float, setting: float) -> None:
        self._overall, self._setting = overall, setting
        self._mean: dict[str, float] = {}
        self._covariance: dict[tuple[str, str], float] = {}

    def expected(self, plan: Plan) -> tuple[float, float]:
        """Mean and standard deviation of the error of a plan."""
        parts = _parts(plan)
        variance = sum(self._between(a, b) for a, b in product(parts, parts))
        return sum(self._mean.get(part, 0.0) for part in parts), math.sqrt(max(0.0, variance))

    def deviation_before(self, plan: Plan) -> float:
        """Standard deviation of the error before anything was learnt."""
        return math.sqrt(sum(self._prior(part) for part in _parts(plan)))

    def learn(self, plan: Plan, error: float, noise: float) -> None:
        """Take in the error of one plan."""
        parts = _parts(plan)
        known = {part for pair in self._covariance for part in pair} | set(parts)
        towards = {part: sum(self._between(part, other) for other in parts) for part in known}
        variance = sum(towards[part] for part in parts) + noise**2
        surprise = error - sum(self._mean.get(part, 0.0) for part in parts)
        for part in known:
            self._mean[part] = self._mean.get(part, 0.0) + towards[part] * surprise / variance
        self._covariance = {
            (a, b): self._between(a, b) - towards[a] * towards[b] / variance for a, b in product(known, known)
        }

    def _between(self, a: str, b: str) -> float:
        """Covariance of two parts; a part that was in no observation is still as its prior."""
        found = self._covariance.get((a, b))
        if found is not None:
            return found
        return self._prior(a) if a == b else 0.0

    def _prior(self, part: str) -> float:
        if part == _EVERY_PLAN:
            return self._overall**2
        return self._setting**2 / (2 if part.partition(":")[0] in _GRADED else 1)


_EVERY_PLAN = "every plan"
_FIELD_NAMES = frozenset(spec.name for spec in FIELDS)
# fields whose settings do the same by degrees: half of the error of 4 micro-batches is that of 8 as well
_GRADED = frozenset({"accumulation", "checkpointing", "precision"})


def _settings(plan: Plan) -> dict[str, tuple[str, ...]]:
    """The settings of a plan that differ from the default, by field; each thing offloaded is one of its own."""
    settings = {name: (str(getattr(plan, name)),) for name in plan.changes() if name != "offload"}
    offloaded = tuple(str(what) for what in Offloaded if plan.tier_of(what))
    return settings | ({"offload": offloaded} if offloaded else {})


@lru_cache(maxsize=4096)
def _parts(plan: Plan) -> tuple[str, ...]:
    """What the error of a plan is the sum of."""
    settings = _settings(plan)
    single = [f"{name}:{value}" for name, values in settings.items() for value in values]
    return (_EVERY_PLAN, *(name for name in settings if name in _GRADED), *single)


def _log_seconds(known: Sequence[tuple[Plan, Prediction]]) -> list[float]:
    """Predicted times in logarithms; the usual order of settings where no time is predicted."""
    foretold = [prediction.step_seconds for _, prediction in known if not prediction.refused]
    if all(math.isfinite(seconds) and seconds > 0 for seconds in foretold):
        return [0.0 if prediction.refused else math.log(prediction.step_seconds) for _, prediction in known]
    return [_usual_log_cost(plan) for plan, _ in known]


def _usual_log_cost(plan: Plan) -> float:
    settings = [f"{name}:{value}" for name, values in _settings(plan).items() for value in values]
    costs = sum(math.log(_USUAL_COST.get(setting, 1.0)) for setting in settings)
    return costs + math.log2(plan.accumulation) * math.log(_USUAL_COST["accumulation"])


def _setting_deviation(predictions: Iterable[Prediction]) -> float:
    """How wrong the predicted time of one setting may be, from how wide the intervals are."""
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
    z = mean / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return mean * (1 + math.erf(z / math.sqrt(2))) / 2 + deviation * density


def _share_below(limit: float, low: float, high: float) -> float:
    """Share of an interval below a limit, rounding errors of logarithms aside."""
    if limit >= high - 1e-9:
        return 1.0
    return (limit - low) / (high - low) if limit > low else 0.0


def _gpu_for(needed_bytes: int) -> str:
    gpu = smallest_that_holds(round((needed_bytes + _CONTEXT_BYTES) / _USABLE_SHARE))
    if gpu is None:
        return "no single GPU of the catalogue holds that: spread the model over several"
    return f"use a GPU with the memory of a {gpu.name} ({format_bytes(gpu.memory_bytes)})"
