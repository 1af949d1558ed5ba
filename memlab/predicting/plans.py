"""`predict` and `predict_all`: what plans would cost, before any is applied.

Several models that train together are predicted from a step of their loop, where one was recorded (`memlab.session.tape`).
Elsewhere each is predicted by itself, and they are added up:

1. All have the same plan. What one of them refuses, all do.
2. The peak is that of one model's own step while the others hold what they always hold: parameters, gradients and
   optimizer state. That is what steps in turn need, which is how a trial runs them.
3. A loop may keep graphs of several at once, as a generator's while its judge is called. The upper end of the interval
   is therefore the sum of all peaks, and a plan is only chosen unseen where that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from memlab.errors import RefusalError, TraceError, WorkloadError
from memlab.hardware.gpus import Gpu
from memlab.measuring.runs import Workloads, each_of, say_when_long
from memlab.plan import Plan
from memlab.plan.space import half_format, plan_space
from memlab.predicting.plan_predictor import Parts, PlanPredictor
from memlab.predicting.reserved import reserved_by, script_of
from memlab.predicting.segments import Point, by_name, timeline_of
from memlab.predicting.targets import interval_seconds
from memlab.records import Category, Measurement, Prediction, TimelinePoint
from memlab.runtime.workload import Workload
from memlab.session.tape import tape_of
from memlab.trace.tracer import without_collections
from memlab.units import format_bytes


def predict(
    workload: Workloads, plan: Plan | str = "", device: str | Gpu | None = None, *, measured: Measurement | None = None
) -> Prediction:
    """Predict memory and time of a plan, without applying it.

    Args:
        workload: with an optimizer and a batch (and a `loss_fn` when the model returns no loss); several, where a step of
            the loop that trains them is recorded.
        plan: a plan, or its flags.
        device: a GPU of the catalogue to predict it for, or its name; by default the device the model is on.
        measured: a measurement of any plan on this device: times are calibrated by it, and it tells whether the loop
            holds the model's output until the next call.

    Returns:
        The prediction.

    Raises:
        RefusalError: a technique of the plan does not apply.
        TraceError: what the model computes depends on values; it names the operator.
        WorkloadError: no batch or no optimizer.
        MemlabError: no such GPU in the catalogue.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(512, 512)
        >>> workload = Workload(model, torch.optim.SGD(model.parameters()), batch=(torch.zeros(64, 512),))
        >>> predict(workload).breakdown["parameters"]
        1050624
    """
    wanted = Plan.of(plan)
    if _are_apart(each_of(workload)):
        raise WorkloadError("predict: no step of a loop that trains these models is recorded; use predict_all")
    predictor = _predictor(workload, device, measured)
    return _scaled(_prediction(predictor, wanted), _calibration(measured, predictor))


def predict_all(
    workload: Workloads,
    device: str | Gpu | None = None,
    *,
    plans: Iterable[Plan | str] | None = None,
    measured: Measurement | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Prediction]:
    """Predict many plans at once; a plan that does not apply comes back with the reason in `refused`.

    Args:
        workload: as for `predict`; several that train together have each plan together.
        device: as for `predict`.
        plans: by default the whole plan space (`memlab.plan.space`).
        measured: as for `predict`.
        progress: called with a line now and then; by default lines go to standard error once the work takes
            longer than two seconds.

    Returns:
        One prediction per plan, in their order.

    Raises:
        TraceError: what the model computes depends on values; it names the operator.
        WorkloadError: no batch or no optimizer.
        MemlabError: no such GPU in the catalogue.
    """
    return predicting(workload, device, measured=measured, progress=progress)(plans)


def _are_apart(workloads: Sequence[Workload]) -> bool:
    """Return whether several models train together in a loop of which no step is recorded."""
    return len(workloads) > 1 and tape_of(workloads) is None


Predicting = Callable[[Iterable[Plan | str] | None], list[Prediction]]


def predicting(
    workload: Workloads,
    device: str | Gpu | None = None,
    *,
    measured: Measurement | None = None,
    progress: Callable[[str], None] | None = None,
) -> Predicting:
    """Return what predicts plans, some at a time, and keeps what it has traced; arguments, plans and errors as of `predict_all`."""
    if _are_apart(each_of(workload)):
        for_each = [predicting(each, device, progress=progress) for each in each_of(workload)]
        names = [each.name for each in each_of(workload)]

        def of_several(plans: Iterable[Plan | str] | None) -> list[Prediction]:
            asked = None if plans is None else list(plans)
            return of_all([of_one(asked) for of_one in for_each], names)

        return of_several
    predictor = _predictor(workload, device, measured)
    factor = _calibration(measured, predictor)
    say = progress or say_when_long("predicting")
    made: list[Prediction] = []

    def of_these(plans: Iterable[Plan | str] | None) -> list[Prediction]:
        with without_collections():
            wanted, before = _plans(predictor, plans, predictor.rows), len(made)
            for plan in wanted:
                say(f"{len(made) + 1} of {before + len(wanted)}: {plan.label}")
                made.append(_scaled(_prediction_or_refusal(predictor, plan), factor))
        return made[before:]

    return of_these


def predict_each(
    workload: Workload, plans: Iterable[Plan], *, measured: Measurement | None = None
) -> Iterator[Prediction]:
    """Predict plans one at a time, on the device the model is on; as `predict_all`, for who has other things to do."""
    predictor: PlanPredictor | None = None
    for plan in plans:
        predictor = predictor or _predictor(workload, None, measured)
        yield predicted_by(predictor, plan, measured)


def predicted_by(predictor: PlanPredictor, plan: Plan, measured: Measurement | None = None) -> Prediction:
    """Predict one plan, keeping what was traced for the next one; a plan that does not apply says why in `refused`."""
    return _scaled(_prediction_or_refusal(predictor, plan), _calibration(measured, predictor))


def _predictor(workload: Workloads, device: str | Gpu | None, measured: Measurement | None) -> PlanPredictor:
    predictor = PlanPredictor(workload, device)
    if measured is not None:
        predictor.learn(measured)
    return predictor


def _plans(predictor: PlanPredictor, plans: Iterable[Plan | str] | None, rows: int) -> list[Plan]:
    if plans is None:
        half = half_format(predictor.target.compute_capability)
        return list(plan_space(rows=rows, half=half))
    return [Plan.of(plan) for plan in plans]


def _prediction_or_refusal(predictor: PlanPredictor, plan: Plan) -> Prediction:
    """The prediction, or one without numbers that says why the plan does not apply, or cannot be predicted."""
    try:
        return _prediction(predictor, plan)
    except (RefusalError, TraceError) as refusal:
        refusal.__traceback__ = None  # it is kept, and would keep the frames of the loop
        return Prediction(
            plan=plan.label,
            device=predictor.target.name,
            peak_allocated_bytes=0,
            peak_reserved_bytes=None,
            host_bytes=0,
            breakdown={},
            timeline=(),
            step_seconds=math.nan,
            samples_per_step=0,
            tokens_per_step=0,
            interval_bytes=(0, 0),
            interval_seconds=(math.nan, math.nan),
            refused=str(refusal),
        )


def _prediction(predictor: PlanPredictor, plan: Plan) -> Prediction:
    target = predictor.target
    parts = predictor.parts(plan)
    highest = parts.peak()
    settings = target.settings
    reserved = (
        None if settings is None else reserved_by(script_of(parts, target.workspaces), settings, predictor.replayed)
    )
    allocated_bytes = sum(highest) if reserved is None else reserved.allocated_bytes
    reserved_bytes = None if reserved is None else reserved.reserved_bytes
    low_bytes, high_bytes = target.interval_bytes(reserved_bytes or allocated_bytes)
    return Prediction(
        plan=plan.label,
        device=target.name,
        peak_allocated_bytes=allocated_bytes,
        peak_reserved_bytes=reserved_bytes,
        host_bytes=parts.host_bytes,
        breakdown=by_name(highest),
        timeline=_timeline(parts),
        step_seconds=parts.seconds,
        samples_per_step=parts.samples,
        tokens_per_step=parts.tokens,
        interval_bytes=(low_bytes, max(high_bytes, parts.probe_bytes)),
        interval_seconds=interval_seconds(parts.seconds, calibrated=False),
        notes=(*target.notes, *parts.notes),
    )


def _timeline(parts: Parts) -> tuple[TimelinePoint, ...]:
    begin = 0.0
    points: list[Point] = []
    for base, segment in zip(parts.bases(), parts.segments, strict=True):
        points += segment.points(begin, base)
        begin += segment.seconds
    return timeline_of(points)


def _calibration(measured: Measurement | None, predictor: PlanPredictor) -> float | None:
    """Return measured over predicted seconds of a step; None where there is nothing to say of it."""
    if measured is None or not measured.step_seconds:
        return None
    try:
        own = predictor.parts(Plan.of_label(measured.plan))
    except (RefusalError, TraceError):
        return None  # a plan that cannot be predicted says nothing of others
    factor = measured.median_step_seconds / own.seconds
    return factor if math.isfinite(factor) else None


def _scaled(prediction: Prediction, factor: float | None) -> Prediction:
    if factor is None:
        return prediction
    seconds = prediction.step_seconds * factor
    return replace(
        prediction,
        step_seconds=seconds,
        interval_seconds=interval_seconds(seconds, calibrated=True),
        timeline=tuple(replace(point, seconds=point.seconds * factor) for point in prediction.timeline),
    )


_ALWAYS_HELD = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)


def of_all(of_each: Sequence[Sequence[Prediction]], names: Sequence[str]) -> list[Prediction]:
    """Predictions of the same plans for several models, as those of all together."""
    by_label = [{prediction.plan: prediction for prediction in predictions} for predictions in of_each]
    shared = [label for label in by_label[0] if all(label in each for each in by_label)]
    return [_added([each[label] for each in by_label], names) for label in shared]


def _added(predictions: Sequence[Prediction], names: Sequence[str]) -> Prediction:
    """Predictions of one plan for several models, as one."""
    refused = next((each for each in predictions if each.refused), None)
    if refused is not None:
        return refused
    held = [sum(each.breakdown.get(str(name), 0) for name in _ALWAYS_HELD) for each in predictions]
    peaks = [each.peak_allocated_bytes + sum(held) - own for each, own in zip(predictions, held, strict=True)]
    highest = max(range(len(peaks)), key=peaks.__getitem__)
    first, others_bytes = predictions[highest], sum(held) - held[highest]
    breakdown = dict(first.breakdown)
    for each in predictions:
        for name in _ALWAYS_HELD if each is not first else ():
            breakdown[str(name)] = breakdown.get(str(name), 0) + each.breakdown.get(str(name), 0)
    reserved = first.peak_reserved_bytes
    most_bytes = sum(each.interval_bytes[1] for each in predictions)
    return replace(
        first,
        peak_allocated_bytes=peaks[highest],
        peak_reserved_bytes=None if reserved is None else reserved + others_bytes,
        host_bytes=sum(each.host_bytes for each in predictions),
        breakdown={name: size for name, size in breakdown.items() if size},
        timeline=(),
        step_seconds=sum(each.step_seconds for each in predictions),
        interval_bytes=(first.interval_bytes[0] + others_bytes, most_bytes),
        interval_seconds=(
            sum(each.interval_seconds[0] for each in predictions),
            sum(each.interval_seconds[1] for each in predictions),
        ),
        notes=(
            *dict.fromkeys(note for each in predictions for note in each.notes),
            f"{', '.join(names)} in turn; a loop that keeps graphs of several at once needs up to {format_bytes(most_bytes)}",
        ),
    )
