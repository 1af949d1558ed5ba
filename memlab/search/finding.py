"""`find_plan`: the fastest plan that fits a budget, proven by running it.

Rules of the search:

1. What is predicted not to fit is not run. What may or may not fit is run only where it is expected to be
   faster than what fits for certain, weighted by how likely it fits: a failed trial is cheap, not free.
2. Every trial teaches two things, the ratio of measured to predicted memory and that of time, and corrects with
   them what is believed of every other plan (`Corrections`).
3. Another plan is run only while the gain expected of it is worth a trial. The expectation counts in how little
   is known about settings that were not run yet: a plan predicted to be just slower than the best one may be
   faster. Where settings are mispredicted by up to 10 %, corrected predictions alone end at 97 % of the best speed
   or more in half of synthetic cases, and this rule in four of five, with three trials each.
4. A technique that refuses in a trial is left out of all further plans, with its reason.
5. On a device that enforces its capacity by watching every step (the CPU ledger) speed is measured in a second
   run that is not watched: watching costs between 0 and 120 % of a step, depending on the plan.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import torch

from memlab.errors import MissingExtraError, PlanError, RefusalError, WorkloadError
from memlab.hardware.gpus import Gpu, gpu
from memlab.measuring.device import Device, device_for
from memlab.measuring.runs import Workloads, each_of, measure, measured_row, require_steps, rows_of, say_when_long
from memlab.plan import Plan
from memlab.plan.space import half_format, plan_space
from memlab.predicting import predict_all, predicting
from memlab.records import Measurement, Prediction
from memlab.records.comparison import FoundPlan
from memlab.runtime.accelerator import compute_capability, is_accelerator
from memlab.runtime.out_of_memory import collect
from memlab.runtime.workload import describe_all
from memlab.search.deciding import Search
from memlab.units import parse_bytes


def find_plan(
    workload: Workloads,
    budget: str = "8GiB",
    *,
    steps: int = 3,
    trials: int = 3,
    lossless: bool = False,
    fixed: Plan | str = "",
    progress: Say | None = None,
) -> FoundPlan:
    """Find the fastest plan that fits a budget; the plan found has been run, not only predicted.

    Weights, moments, gradients, scheduler, random state and the plan in force are afterwards as they were.

    Args:
        workload: as for `measure`; several that train together get one plan, and run their steps in turn.
        budget: size to fit into, such as "8GiB". The model's device behaves as one of this size, so that a plan that
            does not fit really runs out of memory.
        steps: steps to time in each trial.
        trials: plans that fit to run at most; as many again, and one more, may run out of memory.
        lossless: consider exact techniques only, see `memlab.plan.space`.
        fixed: a plan, or its flags: settings to keep in every plan considered.
        progress: called with a line before each prediction and each trial; by default lines go to standard error
            once the work takes longer than two seconds.

    Returns:
        The plan and its measurement, every trial, and what was predicted.

    Raises:
        BudgetError: no plan fits: with the smallest one, how far off the budget is and which GPU would be large enough.
        PlanError: the budget or the flags cannot be read.
        RefusalError: the model is refused, whatever the plan (compiled, sharded).
        TraceError: what the model computes depends on values, so that nothing can be predicted; it names the operator.
        WorkloadError: no batch or no optimizer, no trials, or every plan with the settings in `fixed` is refused.
    """
    budget_bytes, kept = bytes_of(budget), Plan.of(fixed)
    if trials < 1:
        raise WorkloadError(f"trials={trials}: at least one plan must be run; choose from predict_all to run none")
    require_steps(steps)
    plans = considered(workload, None, kept, lossless=lossless)
    say = progress or say_when_long("looking for a plan:")
    predictions = predict_all(workload, plans=plans, progress=_of_predictions(progress))
    search = Search(describe_all(each_of(workload)), budget_bytes, plans, predictions)
    counted_on = device_for(each_of(workload)[0].device, budget_bytes)
    with closing(counted_on):
        return best_of_trials(
            search, lambda plan: run_trial(workload, plan, steps, counted_on, budget_bytes), trials, say
        )


def choose_plan(
    workload: Workloads,
    budget_bytes: int,  # size to fit into
    *,
    device: str | Gpu | None = None,  # to choose for, as for `predict`
    fixed: Plan = Plan(),  # noqa: B008 - frozen; settings to keep, where a field at its default is free
    lossless: bool = False,  # consider exact techniques only
    measured: Measurement | None = None,  # as for `predict`
    progress: Say | None = None,  # as for `find_plan`
) -> tuple[Plan, list[Prediction]]:
    """The fastest plan that is predicted to fit for certain, without running anything.

    Returns:
        The plan, and what was predicted. It is `fixed` itself where that fits, and nothing else is predicted then. Where
        nothing fits for certain, it is the plan most likely to fit.

    Raises:
        BudgetError: every plan is predicted not to fit.
        TraceError: what the model computes depends on values.
        WorkloadError: no batch or no optimizer, or every plan with the settings in `fixed` is refused.
    """
    plans = considered(workload, device, fixed, lossless=lossless)
    predict = predicting(workload, device, measured=measured, progress=_of_predictions(progress))
    predictions = predict(plans[:1])
    if _fits(predictions[0], budget_bytes):
        return plans[0], predictions
    # micro-batches, which take longest to predict and make no step shorter: only where they could be the fastest that fits
    split = defaultdict(list)
    for plan in plans[1:]:
        whole = replace(plan, accumulation=fixed.accumulation)
        split[whole if whole in plans else plan].append(plan)
    predictions += predict([plan for plan in split if plan != plans[0]])
    seconds = {Plan.of_label(each.plan): each.step_seconds for each in predictions}
    for plan in sorted(seconds, key=lambda plan: (math.isfinite(seconds[plan]), seconds[plan])):
        fastest = min((each.step_seconds for each in predictions if _fits(each, budget_bytes)), default=math.inf)
        if not seconds[plan] >= fastest:  # nor where no time is known
            predictions += predict([each for each in split[plan] if each != plan])
    search = Search(describe_all(each_of(workload)), budget_bytes, plans, predictions)
    chosen = search.most_promising()
    if chosen is None:
        raise search.nothing_left()
    return chosen, predictions


def _fits(prediction: Prediction, budget_bytes: int) -> bool:
    return not prediction.refused and prediction.interval_bytes[1] <= budget_bytes


def bytes_of(budget: str) -> int:
    """A budget in bytes; a number alone says no unit, and is refused."""
    if not isinstance(budget, str):
        raise PlanError(f"budget: expected a size as text, as in '8GiB', got {type(budget).__name__} {budget!r}")
    return parse_bytes(budget)


def _of_predictions(progress: Say | None) -> Say | None:
    return None if progress is None else lambda line: progress(f"predicting, {line}")


def considered(
    workload: Workloads,
    device: str | Gpu | None = None,
    fixed: Plan = Plan(),  # noqa: B008 - frozen
    *,
    lossless: bool = False,
) -> tuple[Plan, ...]:
    """The plans to consider for a batch and a device."""
    workloads = each_of(workload)
    half = half_format(compute_capability_of(workloads[0].device, device))
    rows = min((rows for each in workloads if (rows := rows_of(each)) is not None), default=None)
    return plan_space(fixed, rows=rows, lossless=lossless, half=half)


def compute_capability_of(own: torch.device, named: str | Gpu | None) -> tuple[int, int] | None:
    """Return the compute capability of the GPU named, or of the device a model is on; None for a CPU and where it is not NVIDIA's."""
    if isinstance(named, str):
        if named.strip().casefold() == "cpu":
            return None
        named = gpu(named)
    if named is None:
        return compute_capability(own)
    return named.compute_capability if named.is_of_nvidia else None


# a measurement whose steps differ by more than this (half range over median) is taken once more
_NOISY_SPREAD = 0.25

Run = Callable[[Plan], Measurement]
Say = Callable[[str], None]


def best_of_trials(search: Search, run: Run, trials: int, say: Say) -> FoundPlan:
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


def run_trial(
    workload: Workloads, plan: Plan, steps: int, device: Device, budget_bytes: float = math.inf
) -> Measurement:
    """The measurement of a plan; the row that says so when it does not fit."""
    if is_accelerator(each_of(workload)[0].device):
        collect()  # what an earlier trial left reserved would count towards this one's peak
    measured = measured_row(workload, plan, 1 if device.observes_every_step else steps, device)
    if not measured.fits:
        return measured
    if measured.needed_bytes > budget_bytes:
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
