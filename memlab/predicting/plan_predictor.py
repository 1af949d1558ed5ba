"""`PlanPredictor`: puts the step of any plan together from parts that are traced once.

1. A *pass*, forward and backward, for each combination of settings that work on the model (checkpointing,
   precision, activations off the device, chunked loss), at two numbers of rows, from which any other follows.
2. An *update* for each combination of settings that work on the optimizers.
3. Accumulation repeats the pass with fewer rows: the first makes the gradients, the others add to them. Where the loop has
   its own loss, micro-batches are replayed; then the pass is traced with all of them.
4. Where a step of the loop is recorded that does more than a call, its backward pass and the update
   (`memlab.session.tape`), the pass is what it does before the update.

Where gradients are released, updates are a part of the backward pass; and where parameters are off the device, passes
and updates have parameters and gradients in common that are nowhere on it: there the whole step is traced as it would run.
`tests/predicting` holds all of it to the CPU ledger.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memlab.errors import MemlabError, RefusalError, TraceError
from memlab.hardware.gpus import Gpu
from memlab.measuring.device import device_for
from memlab.measuring.holdings import gradients_of, inputs_of, parameters_of, state_of
from memlab.measuring.ledger import Ledger
from memlab.measuring.observation import BACKWARD
from memlab.measuring.runs import Workloads, each_of, require_complete
from memlab.plan import BatchNorm, Gradients, Offloaded, OptimizerChoice, Plan, Precision
from memlab.predicting.passes import Passes, without_budget
from memlab.predicting.segments import (
    NOTHING,
    Event,
    Levels,
    Segment,
    added,
    begun_without_state,
    holding,
    levels,
    segment_of,
    without_state,
)
from memlab.predicting.targets import Target, target_for
from memlab.records import Category, Measurement
from memlab.runtime.accelerator import has_peaks
from memlab.runtime.batch import Batch
from memlab.runtime.mechanisms import LoopChecks, brought
from memlab.runtime.ownership import needs_closure
from memlab.runtime.reach import SMALL_BYTES
from memlab.runtime.workload import Workload
from memlab.session import require_compatible, session_of
from memlab.session.tape import tape_of
from memlab.techniques import TECHNIQUES, is_wanted
from memlab.techniques.accumulation.accumulation import Accumulation
from memlab.techniques.accumulation.split import row_ranges
from memlab.techniques.offload.frozen import frozen_beside
from memlab.techniques.precision.first_call import copied
from memlab.trace.tracer import Trace, Tracer
from memlab.units import MIB, format_bytes

# outputs larger than this, and than this share of the peak, are worth a word
_NOTEWORTHY_BYTES = 1 * MIB
_NOTEWORTHY_SHARE = 0.05
# formats whose first call keeps copies of buffers and the like until it is known to run (`techniques.precision.first_call`), and from
# which share of a pass on these count
_IN_16_BITS = (Precision.BF16, Precision.FP16, Precision.PURE_BF16)
_NOTEWORTHY_SHARE_OF_COPIES = 0.001
# of their size: what is measured above a prediction and differs by less is taken for held outputs
_ALIKE_SHARE = 0.1


@dataclass(frozen=True)
class Applied:
    """Way in which a plan was applied to tensors that lived before it."""

    before: Mapping[int, int]  # sizes of what lived, by number, in bytes
    events: Sequence[Event]  # as of a segment
    after: Sequence[int]  # numbers of what lives then, in the order of `Parts.owned`


@dataclass(frozen=True)
class Parts:
    """A step, in parts."""

    base: Levels  # bytes by category that live throughout
    segments: tuple[Segment, ...]  # its stretches, in order; the last one is the update
    samples: int  # rows of its batch
    tokens: int  # tokens of its batch
    host_bytes: int  # kept off the device
    notes: tuple[str, ...]  # in words
    # a pass in the first step in which a technique sees how to run those after it; None for none
    look: Segment | None = None
    look_base: Levels | None = None  # what lives before that, where it is less than later
    # accumulation's look at a few rows, before it first splits a batch: there must be room for it, and no peak is measured of it
    probe: Segment | None = None
    # whether the allocator's cache is given back after what comes once, as when a split has been judged
    empties_cache: bool = False
    has_state: bool = False  # whether the optimizer has taken steps already, so that its state lives during that look
    kept: Levels = NOTHING  # bytes by category of outputs that stay until the update
    inputs: tuple[int, ...] = ()  # sizes of the batch's tensors, and of what else stays
    # sizes of what dies in the pass of the next step, by number there
    carried: Mapping[int, int] = field(default_factory=dict)
    # sizes of what lives before the first step, by number in the last segment
    owned: Mapping[int, int] = field(default_factory=dict)
    # sizes of the optimizer state that the first step creates, likewise
    state: Mapping[int, int] = field(default_factory=dict)
    applied: Applied | None = None  # where applying the plan leaves holes
    first_update: Segment | None = None  # the one that creates the optimizer's state, with its numbers

    def bases(self) -> list[Levels]:
        """Return what lives when each segment begins."""
        found, base = [], self.base
        for segment in self.segments:
            found.append(base)
            base = added(base, segment.shape.end)
        found[-1] = added(found[-1], tuple(-size_bytes for size_bytes in self.kept))
        return found

    def peak(self) -> Levels:
        bases = self.bases()
        peaks = [added(base, segment.shape.peak) for base, segment in zip(bases, self.segments, strict=True)]
        if self.look is not None:
            peaks.append(added(self._first_base, self.look.shape.peak))
        return max([*peaks, *bases], key=sum)

    @property
    def _first_base(self) -> Levels:
        """Bytes that live when the first step begins."""
        base = self.base if self.look_base is None else self.look_base
        return base if self.has_state else without_state(base)

    @property
    def once(self) -> Segment | None:
        """The higher one of what comes once, before or in the first step."""
        found = [each for each in (self.look, self.probe) if each is not None]
        return max(found, key=lambda each: sum(each.shape.peak), default=None)

    @property
    def probe_bytes(self) -> int:
        """Highest live bytes of the look at a few rows; 0 without one."""
        return 0 if self.probe is None else sum(added(self._first_base, self.probe.shape.peak))

    @property
    def seconds(self) -> float:
        return sum(segment.seconds for segment in self.segments)


class PlanPredictor:
    """Traces one workload, or several of which a step is recorded, for one target, and puts plans together."""

    def __init__(self, workloads: Workloads, device: str | Gpu | None = None) -> None:
        workload, *others = each_of(workloads)
        for each in (workload, *others):
            require_complete(each, "a prediction")
        for optimizer in filter(needs_closure, workload.optimizers):
            raise TraceError(
                f"{type(optimizer).__name__} evaluates the loss in its step as often as the values ask for, which a prediction "
                "does not know; measure it instead: measure(workload, plan)"
            )
        self.target: Target = target_for(workload, device)
        self._tracer = Tracer(workload, self.target.device, self.target.choices, others, self.target.compute_capability)
        self._tape = tape_of([workload, *others])
        self._passes = Passes(self._tracer, self.target.rates_under)
        self._workspaces = levels({Category.WORKSPACES: sum(self.target.workspaces)})
        self._elsewhere_bytes = _elsewhere_bytes([workload, *others]) if device is None else 0
        self._frozen_beside = frozen_beside(workload) if self._elsewhere_bytes else None
        self._updates: dict[Plan, tuple[Trace, Segment, Segment]] = {}
        self._look: Segment | None = None
        self._held: dict[tuple[int, Segment], Segment] = {}
        self._copies: dict[BatchNorm, int] = {}
        self._applied: Applied | None = None
        self._replayed: dict[Plan, tuple[Trace, Parts]] = {}
        self._has_state = any(optimizer.state for optimizer in workload.optimizers)
        self._makes_state = not all(optimizer.state for optimizer in workload.optimizers)
        self._refusals: dict[object, RefusalError | None] = {}
        self.replayed: dict[Any, Any] = {}  # known to an allocator's simulation (`memlab.predicting.reserved`)
        self._holds_outputs = False
        if self._tape is not None and not others and not self._can_replay():
            self._tape = None

    def _can_replay(self) -> bool:
        """Return whether the recorded step of one model runs without values, as its loop may ask for some."""
        try:
            self.parts(Plan())
        except MemlabError:
            return False
        return True

    def learn(self, measured: Measurement) -> None:
        """Take from a measurement whether the loop holds the model's output until its next call, as `out = model(…)` does."""
        plan = Plan.of_label(measured.plan)
        if plan.accumulation > 1 or self._tape is not None:
            return
        try:
            predicted_bytes = sum(self.parts(plan).peak()) - self._elsewhere_under(plan)
        except (RefusalError, TraceError):
            return  # a plan that cannot be predicted says nothing of others
        output_bytes = self._passes.large_outputs_bytes(of_model(plan))
        own_bytes = measured.peak_allocated_bytes - measured.breakdown.get(Category.ELSEWHERE, 0)
        more_bytes = own_bytes - predicted_bytes
        self._holds_outputs = abs(more_bytes - output_bytes) < _ALIKE_SHARE * output_bytes

    @property
    def rows(self) -> int:
        if self._tape is not None:
            return self._tape.rows
        return self._passes.whole(Plan()).samples

    def refusal(self, plan: Plan) -> RefusalError | None:
        """Why a plan does not apply here; None when it does. Each setting of a technique is asked once."""
        twins = [twin.workload for twin in self._tracer.twins]
        for number, twin in enumerate(twins):
            if (refusal := _asked(require_compatible, twin, plan, twins[:number])) is not None:
                return refusal
        for kind in TECHNIQUES:
            if not is_wanted(kind, plan):
                continue
            key = (kind, kind.setting(plan))
            if key not in self._refusals:
                technique = kind(plan)
                checks = [technique.check, *(each.check_modes for each in brought([technique], LoopChecks))]
                asked = [_asked(ask, twin) for ask in checks for twin in twins]
                asked += [
                    _asked(technique.check_optimizer, optimizer) for twin in twins for optimizer in twin.optimizers
                ]
                self._refusals[key] = next((refusal for refusal in asked if refusal), None)
            if (refusal := self._refusals[key]) is not None:
                return refusal
        if plan.accumulation > self.rows:
            return RefusalError(
                "accumulation",
                f"--accumulate {plan.accumulation} needs at least {plan.accumulation} rows, this batch has {self.rows}",
                "use fewer micro-batches, or larger batches",
            )
        return None

    def parts(self, plan: Plan) -> Parts:
        if (refusal := self.refusal(plan)) is not None:
            raise refusal
        off = {what for what, _ in plan.offload}
        is_woven = plan.gradients is Gradients.RELEASE or not off.isdisjoint((Offloaded.PARAMS, Offloaded.FROZEN))
        if self._tape is not None:
            is_woven = is_woven or len(self._tracer.twins) > 1 or not self._tape.ends_with_update
        parts = self._traced(plan) if is_woven else self._composed(plan)
        held_bytes, elsewhere_bytes = 0, self._elsewhere_under(plan)
        if self._holds_outputs:
            if plan.accumulation == 1:
                # the ones of the step before live until this step's take their place
                held_bytes = self._passes.large_outputs_bytes(of_model(plan))
            if elsewhere_bytes:  # those of the last step are among what lives at this moment
                elsewhere_bytes = max(0, elsewhere_bytes - self._passes.large_outputs_bytes(of_model(Plan())))
        base = added(parts.base, levels({Category.ACTIVATIONS: held_bytes, Category.ELSEWHERE: elsewhere_bytes}))
        inputs = (*parts.inputs, *filter(None, (held_bytes, elsewhere_bytes)))
        return replace(parts, base=base, inputs=inputs, notes=(*parts.notes, *self._about_frozen(plan)))

    def _elsewhere_under(self, plan: Plan) -> int:
        """Return bytes on the GPU of what is no part of the models; of frozen models that rest, nothing."""
        frozen = self._frozen_beside
        if frozen is None:
            return self._elsewhere_bytes
        is_off = plan.tier_of(Offloaded.FROZEN) is not None
        return max(0, self._elsewhere_bytes + frozen.resting_bytes - is_off * frozen.all_bytes)

    def _about_frozen(self, plan: Plan) -> Iterator[str]:
        """Yield what frozen models bring to the GPU while the loop uses them: when that is, only the loop knows."""
        frozen = self._frozen_beside
        if frozen is not None and frozen.most_bytes and plan.tier_of(Offloaded.FROZEN) is not None:
            yield f"frozen models beside take up to {format_bytes(frozen.most_bytes)} more while they are used"

    @property
    def _is_replayed(self) -> bool:
        """Return whether the loop computes the loss, so that accumulation runs each micro-batch twice."""
        return self._tracer.twin.workload.loss_fn is not None or self._passes.whole(Plan()).has_surrogate_loss

    def _traced(self, plan: Plan) -> Parts:
        tape = self._tape
        steps = self._tracer.steps(plan) if tape is None else self._tracer.steps_of_tape(plan, tape)
        # gradients that are there before the first step of a tape are made where no technique puts them
        is_off = tape is not None and tape.keeps_gradients and plan.tier_of(Offloaded.PARAMS) is not None
        trace = max(steps[bool(is_off) :], key=lambda one: one.observation.peak_bytes)
        return Parts(
            base=added(levels(trace.observation.baseline_bytes), self._workspaces),
            segments=(segment_of(trace, self.target.rates_under(plan)),),
            samples=trace.samples,
            tokens=trace.tokens,
            host_bytes=trace.host_bytes,
            notes=trace.notes,
            owned=dict(trace.observation.baseline),
        )

    def _composed(self, plan: Plan) -> Parts:
        is_split = plan.accumulation > 1
        is_in_parts = self._tape is not None or (is_split and self._is_replayed)
        whole, passed = self._in_parts(plan) if is_in_parts else self._repeated(plan)
        if is_split:
            copies = self._copies_of_split(plan)
            passed = replace(passed, segments=tuple(self._holding(copies, each) for each in passed.segments))
        update, updating, first = self._update(_of_optimizers(plan), whole)
        before = update.observation.baseline_bytes
        state = levels({Category.OPTIMIZER_STATE: before.get(Category.OPTIMIZER_STATE, 0)})
        staying = _sizes(whole, Category.ACTIVATIONS) | _sizes(whole, Category.GRADIENTS)
        return replace(
            passed,
            base=added(added(passed.base, state), self._workspaces),
            segments=(*passed.segments, updating),
            host_bytes=passed.host_bytes + update.host_bytes,
            notes=tuple(dict.fromkeys((*passed.notes, *update.notes))),
            look_base=None if passed.look_base is None else added(passed.look_base, added(state, self._workspaces)),
            empties_cache=is_split,
            has_state=self._has_state,
            inputs=tuple(size for number, size in staying.items() if number not in whole.dying),
            carried={number: size for number, size in staying.items() if number in whole.dying},
            owned=_sizes(update, Category.PARAMETERS),
            state=_sizes(update, Category.OPTIMIZER_STATE),
            applied=self._applying(plan),
            first_update=first,
        )

    def _applying(self, plan: Plan) -> Applied | None:
        """Return how the one setting that replaces parameters is applied, where an allocator is to serve that."""
        if plan.precision is not Precision.PURE_BF16 or self.target.settings is None:
            return None
        if self._applied is None:
            trace, after = self._tracer.applying(Plan(precision=plan.precision))
            before = _sizes(trace, Category.PARAMETERS)
            self._applied = Applied(before, segment_of(trace, self.target.rates).events, after)
        return self._applied

    def _repeated(self, plan: Plan) -> tuple[Trace, Parts]:
        """Return the pass of the whole batch, and a step of it or of one for each micro-batch, without its update."""
        settings = of_model(plan)
        is_split = plan.accumulation > 1
        whole = self._passes.whole(without_budget(settings) if is_split else settings)
        sizes = [stop - start for start, stop in row_ranges(whole.samples, plan.accumulation)]
        about_outputs = () if is_split else self._about_outputs(settings)
        # before passes of fewer rows, which have to know how the batch is split
        probe = self._look_at_rows(plan) if is_split else None
        look = self._looked(settings, sizes)
        return whole, Parts(
            base=without_state(levels(whole.observation.baseline_bytes)),
            segments=tuple(self._passes.segments(settings, sizes)),
            samples=whole.samples,
            tokens=whole.tokens,
            host_bytes=self._passes.host_bytes(settings, max(sizes)),
            notes=(*self._passes.notes(settings, max(sizes)), *about_outputs),
            look=look,
            probe=probe,
            kept=self._passes.kept(settings) if is_split else NOTHING,
        )

    def _in_parts(self, plan: Plan) -> tuple[Trace, Parts]:
        """Return the one pass in which micro-batches are replayed, or that was recorded, and a step of it without its update."""
        settings = replace(of_model(plan), accumulation=plan.accumulation, batchnorm=plan.batchnorm)
        if settings not in self._replayed:
            if self._tape is None:
                first, trace = self._tracer.passes_in_parts(settings)
            else:
                first, trace = self._tracer.passes_of_tape(settings, self._tape)
            rates = self.target.rates_under(settings)
            has_look = plan.accumulation > 1 or first.is_decided
            self._replayed[settings] = (
                trace,
                Parts(
                    base=without_state(levels(trace.observation.baseline_bytes)),
                    segments=(segment_of(trace, rates),),
                    samples=trace.samples,
                    tokens=trace.tokens,
                    host_bytes=trace.host_bytes,
                    notes=trace.notes,
                    look=segment_of(first, rates) if has_look else None,
                    look_base=without_state(levels(first.observation.baseline_bytes)),
                ),
            )
        return self._replayed[settings]

    def _about_outputs(self, settings: Plan) -> Iterator[str]:
        """Yield what a loop adds that holds the model's output until its backward pass is over, as in `out = model(…)`."""
        size_bytes = self._passes.large_outputs_bytes(settings)
        peak_bytes = self._passes.whole(settings).observation.peak_bytes
        if not self._holds_outputs and size_bytes > max(_NOTEWORTHY_BYTES, _NOTEWORTHY_SHARE * peak_bytes):
            yield (
                f"a loop that holds the model's output through backward (out = model(…)) needs up to "
                f"{format_bytes(size_bytes)} more"
            )

    def _looked(self, settings: Plan, sizes: Sequence[int]) -> Segment | None:
        """Return the pass that comes once, the higher one of two."""
        is_split = len(sizes) > 1
        looks = [self._passes.first(settings, sizes[0], is_split=is_split)]
        if settings.precision in _IN_16_BITS and not is_split:
            looks.append(self._first_in_16_bits(settings, sizes))
        return max((look for look in looks if look is not None), key=lambda look: sum(look.shape.peak), default=None)

    def _first_in_16_bits(self, settings: Plan, sizes: Sequence[int]) -> Segment | None:
        """Return the first pass of all, in which buffers and the like are held twice; None where they are too small to matter."""
        # those of a GPU's are kept on the host, but for small ones
        copies = sum(each for each in self._copied if self.target.settings is None or each <= SMALL_BYTES)
        passed = self._passes.segments(settings, sizes)[0]
        if copies < _NOTEWORTHY_SHARE_OF_COPIES * passed.shape.peak_bytes:
            return None
        forward = next((at for at, event in enumerate(passed.events) if event[3] == BACKWARD), len(passed.events))
        return holding(copies, passed, until=forward)

    @functools.cached_property
    def _copied(self) -> list[int]:
        return copied(self._tracer.twin.workload.model)

    def _copies_of_split(self, plan: Plan) -> int:
        """Return bytes of copies that split calls keep; the model is walked once for each way of BatchNorm."""
        if plan.batchnorm not in self._copies:
            self._copies[plan.batchnorm] = Accumulation(plan).copied_bytes(self._tracer.twin.workload.model)
        return self._copies[plan.batchnorm]

    def _holding(self, copies: int, segment: Segment) -> Segment:
        """Return a stretch during which so many bytes of copies are held; the same one every time."""
        if (copies, segment) not in self._held:
            self._held[copies, segment] = holding(copies, segment)
        return self._held[copies, segment]

    def _look_at_rows(self, plan: Plan) -> Segment:
        """Return what accumulation does before it first splits a batch; nearly the same for every plan."""
        if self._look is None:
            self._look = segment_of(self._tracer.one_probe(plan.accumulation), self.target.rates)
        return self._look

    def _update(self, settings: Plan, passed: Trace) -> tuple[Trace, Segment, Segment]:
        """Return an update like all that follow the first, and the first."""
        if settings not in self._updates:
            first, trace = self._tracer.updates(settings, passed.trained)
            segment, first_segment = (segment_of(each, self.target.rates) for each in (trace, first))
            # state that is made on the device and then leaves; beside a GPU later updates have more of it there at once
            is_higher = first.observation.peak_bytes > trace.observation.peak_bytes
            if is_higher and self._makes_state and self.target.settings is None:
                segment = begun_without_state(first_segment, trace, segment)
            self._updates[settings] = trace, segment, first_segment
        return self._updates[settings]


def _asked(question: Callable[..., None], *about: object) -> RefusalError | None:
    try:
        question(*about)
    except RefusalError as refusal:
        return refusal.with_traceback(None)  # kept: its frames would keep what the loop has made by now
    return None


def of_model(plan: Plan) -> Plan:
    """The settings that work on the model within a pass."""
    offload = tuple(item for item in plan.offload if item[0] is Offloaded.ACTIVATIONS)
    return replace(plan, accumulation=1, batchnorm=BatchNorm.KEEP, optimizer=OptimizerChoice.KEEP, offload=offload)


def _of_optimizers(plan: Plan) -> Plan:
    """The settings that work on the optimizers."""
    offload = tuple(item for item in plan.offload if item[0] is Offloaded.OPTIMIZER)
    precision = plan.precision if plan.precision is Precision.PURE_BF16 else Precision.KEEP
    return Plan(optimizer=plan.optimizer, offload=offload, precision=precision, adapters=plan.adapters, base=plan.base)


def _elsewhere_bytes(workloads: Sequence[Workload]) -> int:
    """Bytes on the GPU of some workloads of what is no part of them; those of the CPU are not known."""
    on_gpu = workloads[0].device
    if not has_peaks(on_gpu):
        return 0
    gc.collect()  # as before measuring: models of earlier cells that only cycles keep are no part of what goes on
    ledger = Ledger(on_gpu.type)
    for each in workloads:
        session = session_of(each.model)
        held = () if session is None else session.in_force.held_tensors
        ledger.know([*parameters_of(each.model), *gradients_of(each.model), *state_of(each.optimizers)])
        ledger.know([*inputs_of(Batch.of(each.batch)), *((Category.PARAMETERS, tensor) for tensor in held)])
    try:
        return device_for(on_gpu).elsewhere_bytes(ledger.live_bytes)
    finally:
        ledger.close()


def _sizes(trace: Trace, category: Category) -> dict[int, int]:
    """Bytes of what lived before a trace, by number, of one category."""
    return trace.before.get(category, {})
