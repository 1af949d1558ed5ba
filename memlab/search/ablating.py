"""`ablation`: techniques added one after another to the live model, each measured, everything put back.

Rules, beside those of the record (`memlab.records.ablation`):

1. *Documented order*: techniques that leave the gradient as it is come first, the cheapest in time first; then those that
   change numerics. So one can stop at the first row that fits, having paid as little as possible in both.
2. *Order by gain*: the next technique is the one that is predicted to free the most bytes for each second it adds to a
   step, judged anew after each row, since techniques overlap. Techniques predicted to cost no time come first, by bytes;
   those predicted to give nothing come last, and are run all the same: a prediction is no measurement.
3. With a budget it ends at the first row that fits.
4. A technique that does not apply, or that runs out of memory, becomes a row that says so, and it goes on. After
   Ctrl-C the rows so far are returned.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, get_args

from memlab.errors import MemlabError, MissingExtraError, PlanError, RefusalError, TraceError
from memlab.measuring.device import Device
from memlab.measuring.runs import given_or_for, require_complete, require_steps, rows_of, say_when_long
from memlab.plan import Plan, Precision
from memlab.plan.savings import more_micro_batches, to_measure
from memlab.plan.space import half_format
from memlab.predicting.plan_predictor import PlanPredictor
from memlab.predicting.plans import predicted_by
from memlab.records import Measurement, Prediction
from memlab.records.ablation import Ablation, AblationRow, helps, technique_words
from memlab.records.comparison import NO_GAIN
from memlab.runtime.workload import Workload
from memlab.search.finding import Run, Say, bytes_of, compute_capability_of, run_trial
from memlab.units import format_bytes

Order = Literal["documented", "gain"]


def ablation(
    workload: Workload,
    techniques: Iterable[Plan | str] | None = None,
    *,
    order: Order = "documented",
    budget: str = "",
    fixed: Plan | str = "",
    lossless: bool = False,
    steps: int = 5,
    device: Device | None = None,
    progress: Say | None = None,
) -> Ablation:
    """Add one memory-saving technique after another and measure what each saves, in memory and throughput.

    Weights, moments, gradients, scheduler, random state and the plan in force are afterwards as they were.

    Args:
        workload: as for `measure`.
        techniques: plans or their flags, to be added one by one; by default those that memlab has, see `default_techniques`.
        order: "documented" adds them in the order given (by default: exact ones first, the cheapest in time
            first); "gain" adds next the one that is predicted to free the most bytes for the time it costs.
        budget: size to fit into, such as "8GiB"; the ablation ends at the first row that fits.
        fixed: a plan, or its flags: settings that all rows have.
        lossless: use only those default techniques that keep the gradient unchanged.
        steps: steps to time in each row.
        device: what to count memory on, with its capacity; by default that of the model.
        progress: called with a line before each row; by default lines go to standard error once the work takes
            longer than two seconds.

    Returns:
        The ablation, which prints as a table. After Ctrl-C, the rows so far.

    Raises:
        PlanError: an unknown order; a setting, the budget or the flags cannot be read.
        RefusalError: the model is refused, whatever the plan (compiled, sharded), or a setting in `fixed` is.
        TraceError: order="gain", and nothing can be predicted since what the model computes depends on values.
        WorkloadError: no batch or no optimizer, or the model gives no loss.
        KeyboardInterrupt: before the first row was measured.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(64, 64)
        >>> workload = Workload(model, torch.optim.AdamW(model.parameters()), loss_fn=torch.nn.functional.mse_loss,
        ...                     batch=(torch.zeros(256, 64), torch.zeros(256, 64)))
        >>> found = ablation(workload, ["--accumulate 4"], steps=1)
        >>> [row.label for row in found.rows]
        ['as written', '+ --accumulate 4']
    """
    start = Plan.of(fixed)
    given = default_techniques(workload, start, lossless=lossless) if techniques is None else techniques
    wanted = [Plan.of(each) for each in given]
    if order not in get_args(Order):
        raise PlanError(f"order={order!r}: allowed are 'documented' and 'gain'")
    require_steps(steps)
    budget_bytes = None if budget == "" else bytes_of(budget)
    require_complete(workload)
    with given_or_for(device, workload) as counted_on:
        run = _Ablating(
            workload, start, wanted, order, budget_bytes, lambda plan: run_trial(workload, plan, steps, counted_on)
        )
        found = run.measured(progress or say_when_long("ablation:"))
        return replace(found, title=f"{workload.describe().rpartition(' · ')[0]} · {counted_on.name}")


def default_techniques(
    workload: Workload,
    fixed: Plan = Plan(),  # noqa: B008 - frozen; settings that all rows have
    *,
    lossless: bool = False,  # those only that leave the gradient as it is
) -> list[Plan]:
    """The settings that are measured by default, as they suit a batch and a device, less the fields that are fixed.

    A batch of fewer than four rows is split into as many micro-batches as it has rows; a GPU without bf16 gets fp16.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> workload = Workload(model, torch.optim.SGD(model.parameters()), batch=(torch.zeros(2, 4),))
        >>> [str(technique) for technique in default_techniques(workload, Plan.parse("--checkpoint"), lossless=True)]
        ['--chunk-loss', '--accumulate 2', '--tile 4', '--release-grads', '--offload optimizer', '--offload activations', \
'--offload params']
    """
    rows = rows_of(workload)
    half = half_format(compute_capability_of(workload.device, None))
    suited = (_suited(technique, rows, half) for technique in to_measure())
    free = [technique for technique in suited if not set(technique.changes()) & set(fixed.changes())]
    return [technique for technique in free if not lossless or technique.is_exact]


def _suited(technique: Plan, rows: int | None, half: Precision) -> Plan:
    if technique.accumulation > 1 and rows is not None:
        # a batch of one row keeps the technique, which is then refused with its reason
        return replace(technique, accumulation=max(2, min(technique.accumulation, rows)))
    return replace(technique, precision=half) if technique.precision is Precision.BF16 else technique


class _Ablating:
    """One ablation: what was measured by now, and what is left to add."""

    def __init__(
        self,
        workload: Workload,
        start: Plan,
        techniques: Sequence[Plan],
        order: Order,
        budget_bytes: int | None,
        run: Run,
    ) -> None:
        self._workload, self._order, self._budget_bytes, self._run = workload, order, budget_bytes, run
        self._plan = start
        self._left = list(techniques)
        self._rows: list[AblationRow] = []
        self._predictions = _Predictions(workload, is_needed=order == "gain")

    def measured(self, say: Say) -> Ablation:
        """Add techniques until they or the budget end it, or a Ctrl-C does."""
        is_interrupted = False
        try:
            self._begin(say)
            while not self._fits and (technique := self._next()) is not None:
                self._add(technique, say)
        except KeyboardInterrupt:
            if not self._rows:
                raise
            is_interrupted = True
        events = (self._ending(is_interrupted=is_interrupted), self._predictions.problem)
        return Ablation(self._workload.describe(), tuple(self._rows), self._budget_bytes, tuple(filter(None, events)))

    def _begin(self, say: Say) -> None:
        start = self._plan
        say(f"1 of {len(self._left) + 1}: {start.label}")
        prediction = self._predictions.of_first(start)
        measurement = self._run(start)
        self._predictions.calibrate(measurement)
        what = "the loop as it is" if start == Plan() else "in every row"
        self._rows.append(AblationRow("", start.label, what, measurement, prediction))

    def _next(self) -> Plan | None:
        """The technique to add now; None when none is left, nor worth another try."""
        if not self._left:
            return self._second_chance()
        # of equal ones the first
        return self._left[0] if self._order == "documented" else max(self._left, key=self._worth)

    def _second_chance(self) -> Plan | None:
        """Return, of the techniques that gave nothing, the one that is predicted to help most by now; each gets one more try."""
        tried = [row.technique for row in self._rows if not row.kept and not row.refused]
        once = [Plan.parse(technique) for technique in tried if tried.count(technique) == 1]
        best = max(once, key=self._worth, default=None)
        return best if best is not None and self._worth(best)[0] else None

    def _worth(self, technique: Plan) -> tuple[int, float]:
        """Techniques that cost no time before those that do, and those before the ones that give nothing."""
        before, after = self._predictions.of(self._plan), self._predictions.of(_with(self._plan, technique))
        if before is None or after is None:
            return 0, 0.0
        freed_bytes = before.needed_bytes - after.needed_bytes
        added_seconds = after.step_seconds - before.step_seconds
        if freed_bytes < NO_GAIN * before.needed_bytes:
            return 0, 0.0
        # where no rate of the device is known there are no seconds either, and bytes alone decide
        return (1, freed_bytes / added_seconds) if added_seconds > 0 else (2, float(freed_bytes))

    def _add(self, technique: Plan, say: Say) -> None:
        """Measure one more technique on top of those that were kept."""
        before = next(row for row in reversed(self._rows) if row.kept)
        again = technique not in self._left
        say(f"{len(self._rows) + 1} of {len(self._rows) + len(self._left) + again}: + {technique}{_so_far(before)}")
        row = replace(self._tried(technique), again=again)
        kept = helps(before, row)
        self._rows.append(replace(row, kept=kept))
        if not again:
            self._left.remove(technique)
        if kept:
            self._plan = self._plan.joined(technique)
        if before.ran is None and row.ran is not None:
            self._predictions.calibrate(row.ran)

    def _tried(self, technique: Plan) -> AblationRow:
        """The row of a technique; what does not apply here, or fails, says so."""
        row = AblationRow(str(technique), self._plan.label, technique_words(Plan(), technique))
        try:
            plan = self._plan.joined(technique)
            row = replace(row, plan=plan.label, what=technique_words(self._plan, plan))
            prediction = self._predictions.of(plan)
            return replace(row, measurement=self._run(plan), prediction=prediction)
        except (PlanError, RefusalError, MissingExtraError) as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - one technique must not cost the rows of the others
            why = f"failed with {type(error).__name__}: {error}".splitlines()[0]
        # out of the handler: until here the traceback held the failed step's tensors
        gc.collect()
        return replace(row, refused=why)

    @property
    def _fits(self) -> bool:
        last = self._rows[-1].ran
        return self._budget_bytes is not None and last is not None and last.needed_bytes <= self._budget_bytes

    def _ending(self, *, is_interrupted: bool) -> str:
        """Return why the ablation is not longer, or that nothing in it fits; empty where there is nothing to say."""
        left = ", ".join(map(str, self._left))
        if is_interrupted:
            return f"interrupted; not tried: {left}" if left else "interrupted"
        if left:
            return f"ended at the first row that fits; not tried: {left}"
        if self._budget_bytes is None or self._fits:
            return ""
        needed = [row.ran.needed_bytes for row in self._rows if row.ran is not None]
        least = f"the lowest needs {format_bytes(min(needed))}" if needed else "memory ran out on all of them"
        more = more_micro_batches(self._plan, rows_of(self._workload))
        return (
            f"no row fits {format_bytes(self._budget_bytes)}: {least}; {f'more micro-batches ({more}) or ' if more else ''}"
            "a smaller batch needs less, and %memfit find searches all plans"
        )


class _Predictions:
    """Predictions of rows, as long as they can be predicted."""

    def __init__(self, workload: Workload, *, is_needed: bool) -> None:
        self._workload, self._is_needed = workload, is_needed
        self._predictor: PlanPredictor | None = None
        self._measured: Measurement | None = None
        self._known: dict[Plan, Prediction] = {}
        self.problem = ""  # why they cannot, in words; empty while they can

    def of_first(self, plan: Plan) -> Prediction | None:
        """Return what is predicted for the first row; where that is nothing, nothing is predicted for any."""
        prediction = self._predicted(plan)
        if prediction is not None and prediction.refused:
            self.problem, prediction = f"no prediction: {prediction.refused}", None
        if self.problem and self._is_needed:
            raise TraceError(f"order='gain' needs predictions; {self.problem}; order='documented' needs none")
        return prediction

    def of(self, plan: Plan | None) -> Prediction | None:
        """Return what is predicted for a plan; None where it is refused or cannot be predicted."""
        prediction = self._predicted(plan) if plan is not None else None
        return prediction if prediction is not None and not prediction.refused else None

    def calibrate(self, measured: Measurement) -> None:
        """Put predicted times right by a row that ran."""
        if measured.fits:
            self._measured = measured
            self._known.clear()

    def _predicted(self, plan: Plan) -> Prediction | None:
        if not self.problem and plan not in self._known:
            try:
                self._predictor = self._predictor or PlanPredictor(self._workload)
                self._known[plan] = predicted_by(self._predictor, plan, self._measured)
            except MemlabError as error:
                self.problem = f"no prediction: {error}"
            except Exception as error:  # noqa: BLE001 - what was measured must not be lost for the sake of a column
                self.problem = f"no prediction: {type(error).__name__}: {error}".splitlines()[0]
        return self._known.get(plan)


def _with(plan: Plan, technique: Plan) -> Plan | None:
    """A plan with one more technique; None when they exclude each other."""
    try:
        return plan.joined(technique)
    except PlanError:
        return None


def _so_far(row: AblationRow) -> str:
    return f", after {format_bytes(row.ran.peak_allocated_bytes)}" if row.ran is not None else ""
