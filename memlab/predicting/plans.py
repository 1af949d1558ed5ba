"""`predict` and `predict_all`: what plans would cost, before any is applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from memlab.errors import RefusalError, TraceError
from memlab.hardware.gpus import Gpu
from memlab.measuring.runs import Workloads, say_when_long
from memlab.plan import Plan
from memlab.plan.space import half_format, plan_space
from memlab.predicting.plan_predictor import Parts, PlanPredictor
from memlab.predicting.reserved import Reserved, reserved_by, script_of
from memlab.predicting.segments import by_name
from memlab.predicting.targets import Target, interval_seconds
from memlab.predicting.together import of_all
from memlab.records import Measurement, Prediction, TimelinePoint, thin
from memlab.runtime.workload import Workload


def predict(
    workload: Workload, plan: Plan | str = "", device: str | Gpu | None = None, *, measured: Measurement | None = None
) -> Prediction:
    """Predict memory and time of a plan, without applying it.

    Args:
        workload: with an optimizer and a batch (and a `loss_fn` when the model returns no loss).
        plan: a plan, or its flags.
        device: a GPU of the catalogue to predict it for, or its name; by default the device the model is on.
        measured: a measurement of any plan on this device, by which times are calibrated.

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
    predictor = PlanPredictor(workload, device)
    return _calibrated([_prediction(predictor, wanted)], measured, predictor)[0]


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
    if not isinstance(workload, Workload):
        asked = None if plans is None else list(plans)
        of_each = [predict_all(each, device, plans=asked, progress=progress) for each in workload]
        return of_all(of_each, [each.name for each in workload])
    predictor = PlanPredictor(workload, device)
    wanted = _plans(predictor, plans, predictor.rows)
    say = progress or say_when_long("predicting")
    predictions = []
    for number, plan in enumerate(wanted, 1):
        say(f"{number} of {len(wanted)}: {plan.label}")
        predictions.append(_prediction_or_refusal(predictor, plan))
    return _calibrated(predictions, measured, predictor)


def predict_each(
    workload: Workload, plans: Iterable[Plan], *, measured: Measurement | None = None
) -> Iterator[Prediction]:
    """Predict plans one at a time, on the device the model is on; as `predict_all`, for who has other things to do.

    Args:
        workload: as for `predict`.
        plans: to predict.
        measured: as for `predict`.

    Yields:
        One prediction per plan, in their order.

    Raises:
        TraceError: what the model computes depends on values; it names the operator.
        WorkloadError: no batch or no optimizer.
    """
    predictor: PlanPredictor | None = None
    for plan in plans:
        predictor = predictor or PlanPredictor(workload)
        yield predicted_by(predictor, plan, measured)


def predicted_by(predictor: PlanPredictor, plan: Plan, measured: Measurement | None = None) -> Prediction:
    """Predict one plan, keeping what was traced for the next one; a plan that does not apply says why in `refused`.

    Args:
        predictor: of the workload.
        plan: to predict.
        measured: as for `predict`.
    """
    return _calibrated([_prediction_or_refusal(predictor, plan)], measured, predictor)[0]


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
    reserved = _reserved(parts, target)
    allocated_bytes = sum(highest) if reserved is None else reserved.allocated_bytes
    reserved_bytes = None if reserved is None else reserved.reserved_bytes
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
        interval_bytes=target.interval_bytes(reserved_bytes or allocated_bytes),
        interval_seconds=interval_seconds(parts.seconds, calibrated=False),
        notes=parts.notes,
    )


def _timeline(parts: Parts) -> tuple[TimelinePoint, ...]:
    begin = 0.0
    points: list[TimelinePoint] = []
    for base, segment in zip(parts.bases(), parts.segments, strict=True):
        points += segment.timeline(begin, base)
        begin += segment.seconds
    return thin(points)


def _reserved(parts: Parts, target: Target) -> Reserved | None:
    if target.settings is None:
        return None
    return reserved_by(script_of(parts, target.workspaces), target.settings)


def _calibrated(
    predictions: list[Prediction], measured: Measurement | None, predictor: PlanPredictor
) -> list[Prediction]:
    """Times put right by one that was measured."""
    if measured is None or not measured.step_seconds:
        return predictions
    own = predictor.parts(Plan.of_label(measured.plan))
    factor = measured.median_step_seconds / own.seconds
    if not math.isfinite(factor):
        return predictions
    return [_scaled(prediction, factor) for prediction in predictions]


def _scaled(prediction: Prediction, factor: float) -> Prediction:
    seconds = prediction.step_seconds * factor
    return replace(
        prediction,
        step_seconds=seconds,
        interval_seconds=interval_seconds(seconds, calibrated=True),
        timeline=tuple(replace(point, seconds=point.seconds * factor) for point in prediction.timeline),
    )
