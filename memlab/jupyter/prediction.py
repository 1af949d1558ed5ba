"""Predictions in a notebook: finding what to predict for, asking, and telling it without getting in the way.

`memlab.predicting` and `memlab.search` are imported when something is asked of them.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from time import monotonic
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from memlab.errors import MemlabError, PlanError, TraceError, WorkloadError
from memlab.jupyter.cell_records import tell_apart
from memlab.jupyter.display import PredictedPlans
from memlab.jupyter.history import History
from memlab.jupyter.parser import CellOptions, PredictOptions
from memlab.live.live_predictions import calibration, is_of_such_batches
from memlab.measuring.device import Device
from memlab.measuring.runs import Workloads, compare
from memlab.plan import Plan
from memlab.plan.scale import Scale
from memlab.records import Measurement, Prediction
from memlab.records.comparison import Comparison
from memlab.records.ranks import PredictedRanks
from memlab.report.ranking import verdict_words
from memlab.runtime.batch import Batch
from memlab.runtime.ownership import optimizers_of
from memlab.runtime.workload import Workload, describe_all
from memlab.session import Session
from memlab.session.tape import tape_of
from memlab.units import format_bytes, format_change, parse_bytes

Say = Callable[[str], None]

# what predictions beside a receipt may take; one that is under way is not cut short
PATIENCE_SECONDS = 5.0
_INTERRUPTED = "no prediction: interrupted"
_SAID_AFTER_SECONDS = 1.0
# what to do about a model that cannot be predicted
COMPARE = 'measure plans instead, as in %memfit compare "--accumulate 4" "--checkpoint"'
_CHOOSE = "choose the plan yourself instead, as in %%memfit --accumulate 4"


# -- what to predict it for -----------------------------------------------------------------------


def workloads_of(
    command: str,
    options: PredictOptions,
    namespace: Mapping[str, Any],
    together: Sequence[Session],
    history_of: Callable[[nn.Module], History],
    *,
    needs_batch: bool = True,
) -> list[Workload]:
    """The live models with their batches: those of the last cell, or those that were named."""
    if options.models or options.optimizer or not together:
        named = [
            Workload.find(namespace, model=each, optimizer=options.optimizer) for each in options.models or (None,)
        ]
        found = [each for each in named if each is not None]
        for each, name in zip(found, options.models, strict=False):
            each.name = name
    else:
        found = [each.workload for each in together]
    if not found:
        raise WorkloadError(
            f"%memfit {command} needs a model: no variable of this notebook is a trainable torch.nn.Module; make it first"
        )
    workloads = [with_loop(each, history_of) for each in found]
    if len(workloads) > 1:
        _require_no_batch(options, found)
    else:
        if workloads[0].loss_fn is None and all(each.workload.model is not found[0].model for each in together):
            workloads[0].batch = None  # the last cell trained other models
        _take_named(workloads[0], options, namespace, is_loaded=command == "worst")
    if needs_batch and any(each.batch is None for each in workloads):
        raise WorkloadError(
            f"%memfit {command} needs a batch: run one training cell with %%memfit first (again after %memfit undo), or pass --batch NAME "
            "(a variable of this notebook)"
        )
    return workloads


def _take_named(workload: Workload, options: PredictOptions, namespace: Mapping[str, Any], *, is_loaded: bool) -> None:
    """Give a workload the batch and the loss function that a line names; one that a loader makes comes later."""
    if options.batch:
        values = tuple(_variable(namespace, "--batch", name) for name in options.batch)
        workload.batch = values[0] if len(values) == 1 else values
        # values of other classes may hold tensors in ways of their own
        if all(isinstance(leaf, (str, bytes, numbers.Number)) for leaf in tree_leaves(workload.batch)):
            what = f"{type(workload.batch).__name__} without a tensor; name what the model is called with"
            raise WorkloadError(f"--batch {','.join(options.batch)}: {what}")
    if options.loss_fn:
        workload.loss_fn = loss_fn = _variable(namespace, "--loss-fn", options.loss_fn)
        if not callable(loss_fn):
            raise WorkloadError(
                f"--loss-fn {options.loss_fn}: a {type(loss_fn).__name__} cannot be called; name what is called with output and target"
            )
        if len(options.batch) != 2 and not is_loaded:
            raise WorkloadError("--loss-fn needs the batch as inputs and target: --batch inputs,target")


def with_loop(live: Workload, history_of: Callable[[nn.Module], History]) -> Workload:
    """A workload with the largest batch of the last cell, and a step of the loop that trains it with others.

    Where it has inputs and target with the loss function that takes them, it keeps these.
    """
    history = history_of(live.model)
    has_both = live.loss_fn is not None and live.batch is not None
    batch, loss_fn = (live.batch, live.loss_fn) if has_both else (history.batch, None)
    workload = Workload(live.model, live.optimizers, batch, loss_fn, live.scheduler, live.name)
    workload.tape = history.tape
    return workload


def _require_no_batch(options: PredictOptions, found: Sequence[Workload]) -> None:
    flag = "--batch" if options.batch else "--loss-fn" if options.loss_fn else ""
    if flag:
        names = ", ".join(each.name for each in found)
        raise WorkloadError(
            f"{flag} with several models ({names}): each has the largest batch of the last %%memfit cell; leave {flag} "
            "out, or name one model with --model"
        )


def only_one(command: str, workloads: Sequence[Workload]) -> Workload:
    """The one model of a command that serves no more."""
    if len(workloads) > 1:
        names = ", ".join(each.name for each in workloads)
        raise WorkloadError(
            f"%memfit {command} is about one model, and the last cell trained {names}; name one with --model"
        )
    return workloads[0]


def _variable(namespace: Mapping[str, Any], flag: str, name: str) -> Any:
    first, *attributes = name.split(".")
    try:
        return reduce(getattr, attributes, namespace[first])
    except (KeyError, AttributeError):
        raise WorkloadError(f"{flag} {name}: no variable of that name") from None


# -- %memfit predict ---------------------------------------------------------------


def predicted_ranks(workload: Workload, options: PredictOptions, scale: Scale, history: History) -> PredictedRanks:
    """Predict a rank of 1, 2, 4 … processes under an engine, beside those that were measured."""
    from memlab.scaleout.predicting import compare_ranks

    powers = [2**power for power in range(options.nproc.bit_length()) if 2**power < options.nproc]
    predicted = compare_ranks(
        workload, scale.plan, engines=[scale.engine], nprocs=[*powers, options.nproc], device=options.device
    )
    return predicted if options.device else replace(predicted, measured_bytes=history.rank_peaks)


def predicted_plans(
    workloads: Sequence[Workload], options: PredictOptions, budget: str, history: History, say: Say
) -> PredictedPlans:
    """Predict all plans, or those that were asked for beside the plan as written."""
    if options.plan is not None and options.plans:
        raise PlanError("%memfit predict: give flags of one plan, or several plans after --plans, not both")
    say(f"predicting for {options.device or workloads[0].device}")
    asked = [options.plan] if options.plan is not None else list(options.plans)
    predictions = _predicted(workloads, asked, options, history, say)
    if options.device is None and not asked:
        history.plan_space = tuple(predictions)
    measured = () if options.device is not None else history.measurements
    labels = {each.plan for each in predictions}
    return PredictedPlans(
        title=f"memfit · {_without_device(workloads)} · predicted for {predictions[0].device if predictions else options.device}",
        predictions=tuple(predictions),
        budget_bytes=parse_bytes(budget) if budget else None,
        every=options.every or bool(asked),
        measurements=tuple(each for each in measured if each.plan in labels and each.fits),
    )


def _predicted(
    workloads: Sequence[Workload], asked: list[Plan], options: PredictOptions, history: History, say: Say
) -> list[Prediction]:
    from memlab.predicting import predict_all
    from memlab.search.finding import considered

    plans: list[Plan] | None = list(dict.fromkeys([Plan(), *asked])) if asked else None
    if options.lossless and not asked:
        plans = list(considered(workloads, options.device, lossless=True))
    known = () if options.device is not None else history.measurements
    with advised(_instead_of_predicting(options, asked)) if asked or options.device else nullcontext():
        predictions = predict_all(
            workloads,
            options.device,
            plans=plans,
            measured=calibration(known, workloads[0]),
            progress=lambda line: say(f"predicting, {line}"),
        )
    if options.plan is not None and predictions[-1].refused:
        # asked for by itself, so that nothing else is worth a table
        raise MemlabError(predictions[-1].refused)
    return predictions


def _instead_of_predicting(options: PredictOptions, asked: list[Plan]) -> str:
    if options.device is not None:
        return "without --device one step is measured here"
    quoted = " ".join(f'"{plan}"' for plan in asked)
    return f"measure {'it' if len(asked) == 1 else 'them'} instead: %memfit compare {quoted}"


@contextmanager
def advised(advice: str) -> Iterator[None]:
    """Say what to do about a model that cannot be predicted."""
    try:
        yield
    except TraceError as error:
        raise TraceError(f"{error}; {advice}", error.operator) from None


def measured_instead(workload: Workload, device: Device, say: Say) -> Comparison:
    """One step as written, for a model that cannot be predicted; a row that says so where it does not fit."""
    say("measuring one step")
    return replace(
        compare(workload, [Plan()], 1, device=device, progress=lambda line: say(f"measuring, {line}")),
        title=f"memfit · {_without_device([workload])} · {device.name} · measured, not predicted",
    )


def _without_device(workloads: Sequence[Workload]) -> str:
    return describe_all(workloads).rpartition(" · ")[0]


# -- %%memfit --budget -----------------------------------------------------------------------------


def choice(
    options: CellOptions,
    history_of: Callable[[Workload], History],
    variables: Callable[[], Mapping[str, Any]],  # those of the notebook
    say: Say,
) -> Callable[[Sequence[Workload]], Plan]:
    """Return what chooses the plan of a cell for its budget, once its model and batch are known.

    The same choice is not made twice: a model that goes on training on such batches under its chosen plan keeps it.
    """
    fixed, budget_bytes = options.plan or Plan(), options.budget_bytes or 0

    def choose(workloads: Sequence[Workload]) -> Plan:
        from memlab.search import choose_plan

        history = history_of(workloads[0])
        workloads = _whole_loop(workloads, history, history_of, variables)
        is_recorded = tape_of(workloads) is not None
        key = (budget_bytes, fixed, options.lossless, is_recorded, *(Batch.of(each.batch).shapes for each in workloads))
        if key not in history.chosen:
            say(f"choosing a plan for {format_bytes(budget_bytes)}")
            with advised(_CHOOSE):
                plan, predictions = choose_plan(
                    workloads, budget_bytes, fixed=fixed, lossless=options.lossless,
                    measured=calibration(history.measurements, workloads[0]), progress=say,
                )  # fmt: skip
            history.chosen[key] = plan
            if len(workloads) > 1:
                history.predicted.clear()  # what was predicted for the first model alone
            history.plan_space = tuple(predictions)
        plan = history.chosen[key]
        history.keep_predictions(each for each in history.plan_space if each.plan == plan.label)
        return plan

    return choose


def _whole_loop(
    workloads: Sequence[Workload],
    history: History,
    history_of: Callable[[Workload], History],
    variables: Callable[[], Mapping[str, Any]],
) -> Sequence[Workload]:
    """Return all models of a loop of which a step on such batches was recorded in an earlier cell, and the workloads elsewhere."""
    tape, first = history.tape, workloads[0]
    if first.tape is not None or tape is None or tape.problem or history.batch is None:
        return workloads
    if Batch.of(first.batch).shapes != history.batch.shapes:
        return workloads
    found: list[Workload] = []
    for model in [model() for model in tape.models]:
        live = next((each for each in workloads if each.model is model), None)
        if live is None and model is not None:
            live = Workload(model, optimizers_of(model))
            live.batch = history_of(live).batch
        if live is None or live.batch is None:
            return workloads
        tell_apart(live, found, variables)
        live.tape = tape
        found.append(live)
    return found


def budget_line(history: History, plan: Plan, budget_bytes: int) -> str:
    """Return what was chosen for a budget, what was predicted for it, and what it came to."""
    words = f"budget {format_bytes(budget_bytes)}: {plan.label}"
    considered = len(history.plan_space)
    if considered > 1:
        words += f", chosen of {considered} plans"
    prediction, measured = history.predicted.get(plan.label), history.measured(plan.label)
    if prediction is not None:
        words += f", predicted {format_bytes(prediction.needed_bytes)} ({verdict_words(prediction, budget_bytes)})"
    if measured is not None and measured.fits:
        over = measured.needed_bytes - budget_bytes
        words += f", measured {format_bytes(measured.needed_bytes)}"
        words += f", {format_bytes(over)} too much" if over > 0 else ""
    return words


# -- the column "predicted" of a receipt -----------------------------------------------------------


def predict_rows(history: History, workloads: Sequence[Workload], plans: Iterable[Plan], say: Say) -> None:
    """Predict the measured plans, for the receipt; what goes wrong becomes one line below it, once per model."""
    if not history.is_predicting:
        return
    measured = {plan: history.measured(plan.label) for plan in plans if plan.label not in history.predicted}
    missing = [plan for plan, row in measured.items() if row is not None and is_of_such_batches(row, workloads[0])]
    calibrating = calibration(history.measurements, workloads[0])
    predictions, problem = _cheaply(workloads, missing, say, calibrating)
    history.keep_predictions(predictions)
    if problem:
        history.is_predicting = False
        history.say(problem)


def predicted_for_ranks(history: History, live: Workload, scale: Scale, ranks: Comparison, say: Say) -> tuple[str, ...]:
    """Return what is predicted for a rank of a run that the history knows, in a line; none where no batch of its size is known."""
    nproc = len(ranks.measurements)
    workload = Workload(live.model, live.optimizers, history.batch, name=live.name)
    whole = replace(ranks.measurements[0], tokens_per_step=sum(each.tokens_per_step for each in ranks.measurements))
    if history.batch is None or not history.is_predicting or not is_of_such_batches(whole, workload):
        return ()
    say(f"predicting {scale}")
    try:
        from memlab.scaleout.predicting import predict_ranks

        predicted_bytes = predict_ranks(workload, scale, nproc=nproc).peak_allocated_bytes
    except MemlabError as error:
        return (f"no prediction: {error}",)
    except KeyboardInterrupt:
        return (_INTERRUPTED,)
    off = format_change(predicted_bytes / history.rank_peaks[str(scale), nproc])
    return (f"predicted for a rank: {format_bytes(predicted_bytes)}, {off} of the highest peak measured",)


def with_predictions(comparison: Comparison, workload: Workloads, say: Say) -> Comparison:
    """The comparison with what was predicted for its plans."""
    plans = [Plan.of_label(each.plan) for each in comparison.measurements]
    predictions, problem = _cheaply(workload, plans, say)
    events = (*comparison.events, problem) if problem else comparison.events
    return replace(comparison, predictions=tuple(predictions), events=events)


def _cheaply(
    workload: Workloads, plans: list[Plan], say: Say, measured: Measurement | None = None
) -> tuple[list[Prediction], str]:
    """Predictions within the time there is, and what went wrong, in words."""
    start = monotonic()
    predictions: list[Prediction] = []
    try:
        from memlab.predicting import predict

        for plan in plans:
            seconds = monotonic() - start
            if seconds > PATIENCE_SECONDS:
                said = f"receipts show no more predictions, which took {seconds:.0f} s; use %memfit predict"
                return predictions, said
            if seconds > _SAID_AFTER_SECONDS:
                say(f"predicting {plan.label}")
            predictions.append(predict(workload, plan, measured=measured))
    except MemlabError as error:
        return predictions, f"no prediction: {error}"
    except KeyboardInterrupt:
        return predictions, _INTERRUPTED
    except Exception as error:  # noqa: BLE001 - a cell that has trained must not fail for the sake of a column
        return predictions, f"no prediction: {type(error).__name__}: {error}".splitlines()[0]
    return [each for each in predictions if not each.refused], ""
