"""`predict` and `predict_all`: what plans would cost, before any is applied.

A plan's step is put together from parts that are traced once for all plans that share them:

1. A *pass*, forward and backward, for each combination of settings that work on the model (checkpointing,
   precision, activations off the device, chunked loss), at two numbers of rows, from which any other follows.
2. An *update* for each combination of settings that work on the optimizers.
3. Accumulation repeats the pass with fewer rows: the first makes the gradients, the others add to them.

Where that does not hold (two traces that are not alike; a loop with its own loss, whose micro-batches are replayed),
the whole step is traced as it would run. `tests/predicting` holds both ways to the CPU ledger.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memlab.devices import Gpu
from memlab.errors import RefusalError, WorkloadError
from memlab.lattice import lattice
from memlab.plan import Loss, Offloaded, OptimizerChoice, Plan, Precision
from memlab.predicting.reserved import Reserved, reserved_by
from memlab.predicting.segments import (
    ACTIVATIONS,
    NOTHING,
    OUTSIDE,
    Levels,
    NotAlikeError,
    Segment,
    TracedPass,
    added,
    by_name,
    levels,
    segment_of,
    without_state,
)
from memlab.predicting.targets import Target, interval_seconds, target_for
from memlab.records import Category, Measurement, Prediction, TimelinePoint, thin
from memlab.roofline import Bill
from memlab.session import check
from memlab.techniques import TECHNIQUES
from memlab.techniques._micro import LAZY_FROM_BYTES
from memlab.techniques._split import row_ranges
from memlab.trace.tracer import Trace, Tracer
from memlab.workload import Workload

_SILENT_SECONDS = 2.0


def predict(
    workload: Workload, plan: Plan | str = "", device: str | Gpu | None = None, *, measured: Measurement | None = None
) -> Prediction:
    """Foretell memory and time of a plan, without applying it.

    Args:
        workload: with an optimizer and a batch (and a `loss_fn` when the model returns no loss).
        plan: a plan, or its flags.
        device: a GPU of the catalogue to foretell it for, or its name; by default the device the model is on.
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
    wanted = plan if isinstance(plan, Plan) else Plan.parse(plan)
    foreteller = Foreteller(workload, device)
    check(foreteller.twin, wanted)
    prediction = foreteller.prediction(wanted)
    return calibrated([prediction], measured, foreteller)[0]


def predict_all(
    workload: Workload,
    device: str | Gpu | None = None,
    *,
    plans: Iterable[Plan | str] | None = None,
    measured: Measurement | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Prediction]:
    """Foretell many plans at once; a plan that does not apply comes back with the reason in `refused`.

    Args:
        workload: as for `predict`.
        device: as for `predict`.
        plans: by default the whole lattice (`memlab.lattice`).
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
    foreteller = Foreteller(workload, device)
    wanted = _plans(foreteller, plans)
    say = progress or _say_when_long()
    predictions = []
    for number, plan in enumerate(wanted, 1):
        say(f"{number} of {len(wanted)}: {plan.label}")
        predictions.append(foreteller.prediction_or_refusal(plan))
    return calibrated(predictions, measured, foreteller)


def _plans(foreteller: Foreteller, plans: Iterable[Plan | str] | None) -> list[Plan]:
    if plans is None:
        return list(lattice(rows=foreteller.rows))
    return [plan if isinstance(plan, Plan) else Plan.parse(plan) for plan in plans]


def calibrated(predictions: list[Prediction], measured: Measurement | None, foreteller: Foreteller) -> list[Prediction]:
    """Times put right by one that was measured; the first plan's when it is among the predictions."""
    if measured is None or not measured.step_seconds:
        return predictions
    own = foreteller.prediction(Plan.parse("" if measured.plan == Plan().label else measured.plan))
    factor = measured.median_step_seconds / own.step_seconds
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


class Foreteller:
    """Foretells plans of one workload on one target; what plans have in common is traced once.

    Args:
        workload: the live objects.
        device: a GPU of the catalogue or its name, or None for the device the model is on.
    """

    def __init__(self, workload: Workload, device: str | Gpu | None = None) -> None:
        _require_complete(workload)
        self.target = target_for(workload, device)
        self._tracer = Tracer(workload, self.target.device, self.target.choices)
        self._passes: dict[Plan, TracedPass] = {}
        self._single_rows: dict[Plan, TracedPass] = {}
        self._updates: dict[Plan, Trace] = {}
        self._look: Segment | None = None
        self._has_state = any(optimizer.state for optimizer in workload.optimizers)
        self._refusals: dict[object, RefusalError | None] = {}

    @property
    def twin(self) -> Workload:
        """The fake counterpart of the workload."""
        return self._tracer.twin.workload

    @functools.cached_property
    def rows(self) -> int:
        """Rows of the batch."""
        return self._pass_traced(Plan()).samples

    def prediction_or_refusal(self, plan: Plan) -> Prediction:
        """The prediction, or one without numbers that says why the plan does not apply."""
        refusal = self._refusal(plan)
        if refusal is None:
            try:
                return self.prediction(plan)
            except RefusalError as error:
                refusal = error
        return _refused(plan, self.target, str(refusal))

    def prediction(self, plan: Plan) -> Prediction:
        """What the plan would cost.

        Raises:
            RefusalError: a technique of the plan does not apply.
            TraceError: what the model computes depends on values.
        """
        parts = self._parts(plan)
        return _assembled(plan, parts, self.target, has_state=self._has_state)

    # -- parts ---------------------------------------------------------------------------------

    def _parts(self, plan: Plan) -> Parts:
        if plan.accumulation > 1 and not self._composes:
            return self._traced_whole(plan)
        try:
            return self._composed(plan)
        except NotAlikeError:
            return self._traced_whole(plan)

    @property
    def _composes(self) -> bool:
        """Whether micro-batches are passes of their own: the model returns its loss."""
        return self.twin.loss_fn is None and not self._pass_traced(Plan()).has_surrogate_loss

    def _traced_whole(self, plan: Plan) -> Parts:
        first, second = self._tracer.steps(plan)
        trace = max((first, second), key=lambda one: one.observation.peak_bytes)
        return Parts(
            base=levels(trace.observation.baseline_bytes),
            segments=(segment_of(trace, self.target.rates),),
            samples=trace.samples,
            tokens=trace.tokens,
            host_bytes=trace.host_bytes,
            notes=trace.notes,
            owned=dict(second.observation.baseline),
        )

    def _composed(self, plan: Plan) -> Parts:
        passed = self._pass(plan)
        probe = self._probe(plan) if plan.accumulation > 1 else None
        update = self._update(plan, passed.trace)
        rows = passed.trace.samples
        sizes = [stop - start for start, stop in row_ranges(rows, min(plan.accumulation, max(1, rows)))]
        kept = _kept(passed) if len(sizes) > 1 else frozenset()
        passes = [
            self._segment(plan, passed, size, accumulating=number > 0, kept=kept) for number, size in enumerate(sizes)
        ]
        if kept:
            passes.append(self._joined(passed, kept))
        before = update.observation.baseline_bytes
        base = added(
            levels({**passed.trace.observation.baseline_bytes}),
            levels({Category.OPTIMIZER_STATE: before.get(Category.OPTIMIZER_STATE, 0)}),
        )
        return Parts(
            base=base,
            segments=(*passes, segment_of(update, self.target.rates)),
            samples=rows,
            tokens=passed.trace.tokens,
            look=probe,
            host_bytes=passed.host_bytes(max(sizes)) + update.host_bytes,
            notes=tuple(dict.fromkeys((*passed.trace.notes, *update.notes))),
            kept_bytes=sum(size for number, size in passed.outputs_bytes(rows).items() if number in kept),
            inputs=tuple(_sizes(passed.trace, Category.ACTIVATIONS).values()),
            owned=_sizes(update, Category.PARAMETERS),
            state=_sizes(update, Category.OPTIMIZER_STATE),
        )

    def _pass(self, plan: Plan) -> TracedPass:
        """The pass of a plan, traced at two numbers of rows when it is split."""
        key = _of_model(plan)
        is_split = plan.accumulation > 1
        known = self._passes.get(key)
        if known is None or (is_split and not known.is_scalable):
            one = known.trace if known is not None else self._pass_traced(key)
            rows = one.samples
            if not is_split:
                known = TracedPass(self.target.rates, one, rows)
            else:
                self._refuse_few_rows(plan, rows)
                other_rows = rows // 2 if rows >= 4 else 2 * rows
                known = TracedPass(self.target.rates, one, rows, self._tracer.one_pass(key, other_rows), other_rows)
            self._passes[key] = known
        elif is_split:
            self._refuse_few_rows(plan, known.trace.samples)
        return known

    def _joined(self, passed: TracedPass, kept: frozenset[int]) -> Segment:
        """Outputs of the micro-batches put together for the loop, which drops them again."""
        whole = passed.outputs_bytes(passed.trace.samples)
        sizes = [whole[number] for number in sorted(kept)]
        births = [(size_bytes, place, ACTIVATIONS, OUTSIDE) for place, size_bytes in enumerate(sizes)]
        deaths = [(-size_bytes, place, ACTIVATIONS, OUTSIDE) for place, size_bytes in enumerate(sizes)]
        return Segment([*births, *deaths], Bill.of([]), self.target.rates)

    def _segment(
        self, plan: Plan, passed: TracedPass, rows: int, *, accumulating: bool, kept: frozenset[int]
    ) -> Segment:
        """The pass with so many rows; of a single one it is traced, as copies of transposed tensors are then spared."""
        if rows > 1 or passed.trace.samples == 1:
            return passed.segment(rows, accumulating=accumulating, kept=kept)
        key = _of_model(plan)
        if key not in self._single_rows:
            self._single_rows[key] = TracedPass(self.target.rates, self._tracer.one_pass(key, 1), 1)
        single = self._single_rows[key]
        return single.segment(1, accumulating=accumulating, kept=frozenset(single.trace.outputs) if kept else kept)

    def _refuse_few_rows(self, plan: Plan, rows: int) -> None:
        if rows < plan.accumulation:
            raise RefusalError("accumulation", f"{plan.label} needs {plan.accumulation} rows, the batch has {rows}")

    @functools.lru_cache(maxsize=64)  # noqa: B019 - lives as long as the predictions are made
    def _pass_traced(self, key: Plan) -> Trace:
        return self._tracer.one_pass(key)

    def _probe(self, plan: Plan) -> Segment:
        """The look at a few rows, taken once; it differs with the dtype of the parameters only."""
        if self._look is None:
            self._look = segment_of(self._tracer.one_probe(plan.accumulation), self.target.rates)
        return self._look

    def _update(self, plan: Plan, trace: Trace) -> Trace:
        key = _of_optimizers(plan)
        if key not in self._updates:
            self._updates[key] = self._tracer.one_update(key, trace.trained)
        return self._updates[key]

    def _refusal(self, plan: Plan) -> RefusalError | None:
        """Why a plan does not apply; each setting of a technique is asked once."""
        for kind in TECHNIQUES:
            if not kind.wanted(plan):
                continue
            key = (kind, kind.setting(plan))
            if key not in self._refusals:
                self._refusals[key] = _asked(kind(plan).check, self.twin) or next(
                    (r for o in self.twin.optimizers if (r := _asked(kind(plan).check_optimizer, o))), None
                )
            if (refusal := self._refusals[key]) is not None:
                return refusal
        return None


def _asked(question: Callable[..., None], about: object) -> RefusalError | None:
    try:
        question(about)
    except RefusalError as refusal:
        return refusal
    return None


def _of_model(plan: Plan) -> Plan:
    """The settings that work on the model within a pass."""
    offload = tuple(item for item in plan.offload if item[0] is Offloaded.ACTIVATIONS)
    return replace(plan, accumulation=1, optimizer=OptimizerChoice.KEEP, offload=offload)


def _of_optimizers(plan: Plan) -> Plan:
    """The settings that work on the optimizers."""
    offload = tuple(item for item in plan.offload if item[0] is Offloaded.OPTIMIZER)
    precision = plan.precision if plan.precision is Precision.PURE_BF16 else Precision.KEEP
    return Plan(optimizer=plan.optimizer, offload=offload, precision=precision, loss=Loss.KEEP)


def _kept(passed: TracedPass) -> frozenset[int]:
    """Outputs of micro-batches that are kept until the batch is whole, by number: see `techniques._micro`."""
    whole = passed.outputs_bytes(passed.trace.samples)
    return frozenset(number for number, size_bytes in whole.items() if size_bytes <= LAZY_FROM_BYTES)


def _sizes(trace: Trace, category: Category) -> dict[int, int]:
    """Bytes of what lived before a trace, by number, of one category."""
    categories = trace.observation.categories
    baseline = trace.observation.baseline.items()
    return {number: size for number, size in baseline if categories.get(number) is category}


@dataclass(frozen=True)
class Parts:
    """A step, in parts.

    Args:
        base: bytes by category that live throughout.
        segments: its stretches, in order.
        samples: rows of its batch.
        tokens: tokens of its batch.
        host_bytes: kept off the device.
        notes: in words.
        look: of accumulation at a few rows, before its first step; None without.
        kept_bytes: of outputs that stay until the update.
        inputs: sizes of the batch's tensors.
        owned: sizes of what lives before the first step, by number in the last segment.
        state: sizes of the optimizer state that the first step creates, likewise.
    """

    base: Levels
    segments: tuple[Segment, ...]
    samples: int
    tokens: int
    host_bytes: int
    notes: tuple[str, ...]
    look: Segment | None = None
    kept_bytes: int = 0
    inputs: tuple[int, ...] = ()
    owned: Mapping[int, int] = field(default_factory=dict)
    state: Mapping[int, int] = field(default_factory=dict)

    def bases(self) -> list[Levels]:
        """What lives when each segment begins."""
        found, base = [], self.base
        for segment in self.segments:
            found.append(base)
            base = added(base, segment.shape.end)
        if self.kept_bytes:
            found[-1] = added(found[-1], levels({Category.ACTIVATIONS: -self.kept_bytes}))
        return found


def _assembled(plan: Plan, parts: Parts, target: Target, *, has_state: bool) -> Prediction:
    bases = parts.bases()
    peaks = [added(base, segment.shape.peak) for base, segment in zip(bases, parts.segments, strict=True)]
    if parts.look is not None:
        peaks.append(added(parts.base if has_state else without_state(parts.base), parts.look.shape.peak))
    highest = max([*peaks, *bases], key=sum)
    seconds = sum(segment.seconds for segment in parts.segments)
    reserved = _reserved(parts, target)
    allocated_bytes = sum(highest) if reserved is None else reserved.allocated_bytes
    needed_bytes = allocated_bytes if reserved is None else reserved.reserved_bytes
    return Prediction(
        plan=plan.label,
        device=target.name,
        peak_allocated_bytes=allocated_bytes,
        peak_reserved_bytes=None if reserved is None else reserved.reserved_bytes,
        host_bytes=parts.host_bytes,
        breakdown=by_name(highest),
        timeline=_timeline(parts, bases),
        step_seconds=seconds,
        samples_per_step=parts.samples,
        tokens_per_step=parts.tokens,
        interval_bytes=target.interval_bytes(needed_bytes),
        interval_seconds=interval_seconds(seconds, calibrated=False),
        notes=parts.notes,
    )


def _timeline(parts: Parts, bases: Sequence[Levels]) -> tuple[TimelinePoint, ...]:
    begin, points = 0.0, []
    for base, segment in zip(bases, parts.segments, strict=True):
        points += segment.timeline(begin, base)
        begin += segment.seconds
    return thin(points)


def _reserved(parts: Parts, target: Target) -> Reserved | None:
    if target.settings is None:
        return None
    *passes, last = [segment.events for segment in parts.segments]
    return reserved_by(parts.inputs, parts.owned, parts.state, passes, last, target.workspaces, target.settings)


def _refused(plan: Plan, target: Target, reason: str) -> Prediction:
    return Prediction(
        plan=plan.label,
        device=target.name,
        peak_allocated_bytes=0,
        peak_reserved_bytes=None,
        host_bytes=0,
        breakdown=by_name(NOTHING),
        timeline=(),
        step_seconds=math.nan,
        samples_per_step=0,
        tokens_per_step=0,
        interval_bytes=(0, 0),
        interval_seconds=(math.nan, math.nan),
        refused=reason,
    )


def _require_complete(workload: Workload) -> None:
    if workload.batch is None:
        raise WorkloadError("a prediction needs a batch: Workload(model, optimizer, batch={…})")
    if not workload.optimizers:
        raise WorkloadError("a prediction needs the optimizer: Workload(model, optimizer, batch={…})")


def _say_when_long() -> Callable[[str], None]:
    """Progress on standard error, from two seconds on and then every two seconds."""
    last = time.monotonic()

    def say(line: str) -> None:
        nonlocal last
        if time.monotonic() - last > _SILENT_SECONDS:
            last = time.monotonic()
            sys.stderr.write(f"memlab: foretelling {line}\n")

    return say
