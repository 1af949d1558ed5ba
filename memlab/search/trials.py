"""Running plans: one trial, and trial after trial until none is worth it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from memlab.errors import MissingExtraError, RefusalError
from memlab.measuring.device import Device
from memlab.measuring.runs import Workloads, each_of, measure, row_of_failure
from memlab.plan import Plan
from memlab.records import Measurement
from memlab.records.comparison import FoundPlan
from memlab.search.deciding import Search

# a measurement whose steps differ by more than this (half range over median) is taken once more
_NOISY_SPREAD = 0.25

Run = Callable[[Plan], Measurement]
Say = Callable[[str], None]


def best_of_trials(search: Search, run: Run, trials: int, say: Say) -> FoundPlan:
    """Run plans until none is worth a trial.

    Raises:
        BudgetError: none fits.
        RefusalError: the model is refused, whatever the plan.
        WorkloadError: none applies.
    """
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
    """The measurement of a plan; the row that says so when it does not fit.

    Raises:
        RefusalError: a technique of the plan does not apply.
    """
    _free_cache(each_of(workload)[0].device)
    words = ""
    try:
        measured = measure(workload, plan, 1 if device.observes_every_step else steps, device=device)
    except torch.OutOfMemoryError as error:
        words = str(error)
    if words:
        # out of the handler: until here the traceback held the failed step's tensors
        gc.collect()
        return row_of_failure(plan, device, words)
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


def _free_cache(device: torch.device) -> None:
    """Release what an earlier trial left reserved, which would count towards this one's peak."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
