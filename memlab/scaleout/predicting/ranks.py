"""`predict_ranks`: what every rank of a run in many processes would need, before any is started.

1. A pass of the rank's rows is traced as for one process, with marks where modules begin and end (`memlab.trace.marks`),
   and laid out by the rules of the engine (`memlab.scaleout.sharding`).
2. The update is traced for parameters of the sizes that the engine leaves the optimizer on a rank.
3. What memlab itself does with the rows is counted: outputs beside the loss are gathered on every rank
   (`memlab.scaleout.rows`).
4. Under ZeRO 3 linear layers are traced as DeepSpeed computes them (`zero3_linear`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import nn

from memlab.errors import RefusalError, ScaleError
from memlab.hardware.gpus import Gpu
from memlab.measuring.runs import require_complete
from memlab.plan import Offloaded, Plan
from memlab.plan.plan import BY_NAME
from memlab.plan.scale import Scale
from memlab.plan.settings.scale import ENGINES
from memlab.predicting.passes import Passes
from memlab.predicting.plan_predictor import of_model
from memlab.predicting.segments import TracedPass
from memlab.predicting.targets import Target, target_for
from memlab.records import Category
from memlab.records.ranks import PredictedRanks, RankPrediction
from memlab.runtime.modules import repeated_blocks
from memlab.runtime.workload import Workload
from memlab.scaleout.predicting.zero3_linear import linear_as_in_stage_3
from memlab.scaleout.sharding.fsdp2 import Fsdp2Sharding
from memlab.scaleout.sharding.sharding import (
    ROOT,
    DdpSharding,
    Flats,
    MemoryAccount,
    ModelShape,
    ParameterShape,
    Sharding,
    ShardPart,
)
from memlab.scaleout.sharding.zero import Zero3, Zero12
from memlab.techniques.accumulation.split import row_ranges
from memlab.trace.marks import Mark, MarkedEvents
from memlab.trace.tracer import Trace, Tracer
from memlab.units import format_bytes

_PART_OF = {
    Category.PARAMETERS: ShardPart.PARAMETERS,
    Category.GRADIENTS: ShardPart.GRADIENTS,
    Category.OPTIMIZER_STATE: ShardPart.OPTIMIZER_STATE,
    Category.ACTIVATIONS: ShardPart.ACTIVATIONS,
    Category.CACHE: ShardPart.ACTIVATIONS,
    Category.TEMPORARIES: ShardPart.TEMPORARIES,
    Category.ELSEWHERE: ShardPart.WORKSPACES,
    Category.WORKSPACES: ShardPart.WORKSPACES,
    Category.UNUSED: ShardPart.WORKSPACES,
}
_KEPT = (ShardPart.PARAMETERS, ShardPart.GRADIENTS, ShardPart.OPTIMIZER_STATE)
# of the peak: outputs larger than this are worth a word
_MOST_OUTPUTS_SHARE = 0.1


# by engine; what memlab does within a rank's model call is in the trace
_SHARDINGS: dict[str, Callable[..., Sharding]] = {
    "ddp": DdpSharding,
    "fsdp2": Fsdp2Sharding,
    "zero1": partial(Zero12, stage=1),
    "zero2": partial(Zero12, stage=2),
    "zero3": Zero3,
}


def predict_ranks(
    workload: Workload, plan: Scale | str, *, nproc: int = 2, device: str | Gpu | None = None
) -> RankPrediction:
    """Predict what each rank needs, without starting any.

    Args:
        workload: with an optimizer and a batch; its parameters may be on the meta device.
        plan: engine and plan, as in ``"--scale zero3 --checkpoint"``.
        nproc: number of ranks.
        device: a GPU of the catalogue to predict it for, or its name; by default the device the model is on.

    Returns:
        What one rank needs.

    Raises:
        RefusalError: the plan does not apply, or the batch has fewer rows than there are ranks.
        PlanError: a plan without an engine, or with flags that are none.
        ScaleError: not a number of ranks.
        TraceError: what the model computes depends on values; it names the operator.
        WorkloadError: no batch or no optimizer.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        >>> workload = Workload(model, torch.optim.SGD(model.parameters()), batch=(torch.zeros(8, 256),))
        >>> [predict_ranks(workload, f"--scale {engine}", nproc=4).divided["parameters"] for engine in ("ddp", "fsdp2")]
        [1052672, 263168]
    """
    return RankPredictor(workload, device).prediction(plan if isinstance(plan, Scale) else Scale.parse(plan), nproc)


def compare_ranks(
    workload: Workload,
    plan: Plan | str = "",
    *,
    engines: Sequence[str] = tuple(ENGINES),
    nprocs: Sequence[int] = (1, 2, 4, 8),
    device: str | Gpu | None = None,
) -> PredictedRanks:
    """Predict ranks under several engines, for several numbers of processes: what each divides.

    Args:
        workload: as for `predict_ranks`.
        plan: what else applies on every rank.
        engines: as in ``--scale``.
        nprocs: numbers of ranks.
        device: as for `predict_ranks`.

    Returns:
        A prediction for each; one that does not apply says why in `refused`, and has no numbers.

    Raises:
        TraceError: as for `predict_ranks`.
        WorkloadError: likewise.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        >>> workload = Workload(model, torch.optim.SGD(model.parameters()), batch=(torch.zeros(8, 256),))
        >>> predicted_plans = compare_ranks(workload, engines=["fsdp2"], nprocs=[1, 4])
        >>> [each.divided["parameters"] for each in predicted_plans.predictions]
        [1052672, 263168]
    """
    predictor = RankPredictor(workload, device)
    wanted = Plan.of(plan)
    predictions = tuple(
        _prediction_or_refusal(predictor, engine, wanted, ranks) for ranks in nprocs for engine in engines
    )
    label = f" · {wanted.label}" if wanted != Plan() else ""
    return PredictedRanks(f"{workload.describe()}{label} · {predictor.target.name}", predictions)


def _prediction_or_refusal(predictor: RankPredictor, engine: str, plan: Plan, ranks: int) -> RankPrediction:
    try:
        return predictor.prediction(Scale(engine, plan), ranks)
    except RefusalError as refusal:
        scale = f"--scale {engine} {plan}".strip()
        return RankPrediction(scale, predictor.target.name, ranks, 0, 0, 0, {}, {}, 0, (0, 0), refused=str(refusal))


class RankPredictor:
    """Traces one workload for one target, and divides it under any engine among any number of ranks."""

    def __init__(self, workload: Workload, device: str | Gpu | None = None) -> None:
        require_complete(workload, "a prediction")
        self.target: Target = target_for(workload, device)
        self._tracer = Tracer(
            workload, self.target.device, self.target.choices, capability=self.target.compute_capability
        )
        model = self._tracer.twin.workload.model
        modules, blocks = _marked(model)
        self._tracer.marked = modules
        self._passes = Passes(self._tracer, self.target.rates_under)
        self._passes_that_keep_parameters = Passes(self._tracer, self.target.rates_under)
        self.shape = _shape(self._tracer.twin.workload, modules, blocks)
        self._flats: dict[Flats, Trace] = {}

    @property
    def rows(self) -> int:
        return self._passes.whole(Plan()).samples

    def prediction(
        self, scale: Scale, ranks: int, *, may_grow: bool = False, gathers_outputs: bool = True
    ) -> RankPrediction:
        """Return what one rank of so many needs.

        With `may_grow` a batch is taken to have a row for every rank; with `gathers_outputs` ranks get the outputs of all,
        as under `memlab.launch`.
        """
        rows = self._rows_of_a_rank(ranks, may_grow=may_grow)
        sharding, settings = self._sharding(scale, ranks), of_model(replace(scale.plan, offload=()))
        traced = self._traced(settings, sharding, rows, is_split=ranks > 1)
        account = MemoryAccount(has_host=self.target.settings is not None)
        update = self._update(sharding)
        self._add_base(account, sharding, update, settings)
        outputs_bytes = sum(traced.outputs_bytes(rows).values()) if gathers_outputs else 0
        # a second step finds what the first has left, and knows its order
        for _ in range(2):
            sharding.ring_bytes = 0
            _run(account, sharding, traced, rows, outputs_bytes)
            sharding.update_begins(account)
            if not (sharding.offloads and account.has_host):
                update.replay(account)
            kept = {str(part): account.live[part] for part in _KEPT if account.live[part]}
            sharding.update_over(account)
        return RankPrediction(
            scale=str(scale),
            device=self.target.name,
            ranks=ranks,
            rows=rows,
            peak_allocated_bytes=account.peak_bytes,
            host_bytes=account.peak_host_bytes,
            breakdown={str(part): size for part, size in account.at_peak.items() if size},
            divided=kept,
            wire_bytes=sharding.sent_bytes,
            interval_bytes=self.target.interval_bytes(account.peak_bytes),
            notes=tuple(_about(traced, account, sharding, outputs_bytes)),
        )

    def _traced(self, settings: Plan, sharding: Sharding, rows: int, *, is_split: bool) -> TracedPass:
        if not sharding.keeps_parameters:
            return self._passes.traced(settings, rows, is_split=is_split)
        with linear_as_in_stage_3():
            return self._passes_that_keep_parameters.traced(settings, rows, is_split=is_split)

    def _add_base(self, account: MemoryAccount, sharding: Sharding, update: _Update, settings: Plan) -> None:
        """Add what exists throughout: the engine's, the optimizer's, the batch (of which a rank has all), workspaces."""
        sharding.add_base(account)
        account.add(ShardPart.OPTIMIZER_STATE, update.state_bytes, host=sharding.offloads)
        inputs_bytes = self._passes.whole(settings).observation.baseline_bytes.get(Category.ACTIVATIONS, 0)
        account.add(ShardPart.ACTIVATIONS, inputs_bytes)
        account.add(ShardPart.WORKSPACES, sum(self.target.workspaces))

    def _rows_of_a_rank(self, ranks: int, *, may_grow: bool) -> int:
        if not isinstance(ranks, int) or ranks < 1:
            raise ScaleError(f"nproc {ranks!r}: expected a whole number of processes, 1 or more")
        if ranks > self.rows and not may_grow:
            raise RefusalError(
                "scale",
                f"the batch has {self.rows} rows, for {ranks} processes",
                f"use batches of {ranks} rows or more, or fewer processes",
            )
        start, stop = row_ranges(max(self.rows, ranks), ranks)[0]
        return stop - start

    def _sharding(self, scale: Scale, ranks: int) -> Sharding:
        _refuse_what_is_not_known(scale)
        offloads = scale.plan.tier_of(Offloaded.OPTIMIZER) is not None
        return _SHARDINGS[scale.engine](self.shape, ranks, offloads=offloads)

    def _update(self, sharding: Sharding) -> _Update:
        stepped = sharding.stepped
        if isinstance(stepped, float):
            return _Update(self._plain, stepped)
        if stepped not in self._flats:
            self._flats[stepped] = self._tracer.update_of_flats(stepped)
        return _Update(self._flats[stepped])

    @cached_property
    def _plain(self) -> Trace:
        return self._tracer.updates(Plan(), self.shape.trained)[1]


def _refuse_what_is_not_known(scale: Scale) -> None:
    strange = [name for name in scale.plan.changes() if not BY_NAME[name].is_beside_engines]
    strange += [f"offload of {what}" for what, _ in scale.plan.offload if what is not Offloaded.OPTIMIZER]
    if scale.engine not in _SHARDINGS:
        strange.insert(0, f"the engine {scale.engine}")
    if strange:
        raise RefusalError(
            "scale",
            f"{strange[0]} is not predicted for ranks",
            f"leave it out ({', '.join(_SHARDINGS)} with --checkpoint, --bf16 and --offload optimizer are known)",
        )


@dataclass(frozen=True)
class _Update:
    """An update like all that follow the first."""

    trace: Trace  # of it
    share: float = 1.0  # of its sizes

    @property
    def state_bytes(self) -> int:
        return round(self.share * self.trace.observation.baseline_bytes.get(Category.OPTIMIZER_STATE, 0))

    def replay(self, account: MemoryAccount) -> None:
        """Do it, on top of what lives; it leaves as much behind as it found."""
        left = 0
        for _, size_bytes, _, _ in self.trace.observation.raw:
            change = round(self.share * size_bytes)
            account.add(ShardPart.TEMPORARIES, change)
            left += change
        account.add(ShardPart.TEMPORARIES, -left)


def _about(traced: TracedPass, account: MemoryAccount, sharding: Sharding, outputs_bytes: int) -> Iterator[str]:
    yield from traced.trace.notes
    whole_bytes = sharding.ranks * outputs_bytes
    if sharding.ranks > 1 and whole_bytes > _MOST_OUTPUTS_SHARE * account.peak_bytes:
        yield (
            f"every rank gathers the outputs of all, {format_bytes(whole_bytes)}: a model that returns only its loss "
            "needs less"
        )


# -- laying a step out -----------------------------------------------------------------------------


def _run(account: MemoryAccount, sharding: Sharding, traced: TracedPass, rows: int, outputs_bytes: int) -> None:
    """A pass, with what the engine does at its marks."""
    marks: dict[int, list[Mark]] = defaultdict(list)
    for mark in traced.trace.marks:
        marks[mark.event].append(mark)
    hidden: dict[int, list[int]] = defaultdict(list)
    for each in traced.hidden(rows):
        for at, size_bytes in each.peaks():
            hidden[at].append(size_bytes)
    events, parts = traced.events(rows), [_PART_OF[category] for category in Category]
    sizes = {number: size_bytes for size_bytes, number, _, _ in events if size_bytes > 0}
    outputs = _Outputs(account, sharding, outputs_bytes)
    account.dropped.clear()
    for at in range(len(events) + 1):
        for mark in marks.get(at, ()):
            _tell(account, sharding, mark, sizes)
            outputs.see(mark)
        for size_bytes in hidden.get(at, ()):
            account.touch(ShardPart.TEMPORARIES, size_bytes)
        if at < len(events):
            size_bytes, number, place, _ = events[at]
            if number not in account.dropped:
                account.add(parts[place], size_bytes)
    sharding.backward_over(account)


def _tell(account: MemoryAccount, sharding: Sharding, mark: Mark, sizes: Mapping[int, int]) -> None:
    if mark.moment is MarkedEvents.SETTLED:
        account.gradients[mark.what] = mark.storage, sizes.get(mark.storage, 0)
        sharding.settled(account, mark.what)
        return
    told = {
        MarkedEvents.FORWARD_BEGINS: sharding.forward_begins,
        MarkedEvents.FORWARD_ENDS: sharding.forward_ends,
        MarkedEvents.BACKWARD_BEGINS: sharding.backward_begins,
        MarkedEvents.BACKWARD_ENDS: sharding.backward_ends,
    }
    told[mark.moment](account, mark.what)


class _Outputs:
    """Handling of the model's outputs beside the loss: every rank gathers those of all."""

    def __init__(self, account: MemoryAccount, sharding: Sharding, part_bytes: int) -> None:
        self._account = account
        self._part_bytes = part_bytes
        self._whole_bytes = part_bytes * sharding.ranks if sharding.ranks > 1 else 0
        self._sharding = sharding
        self._at_the_end, self._in_backward = sharding.copies_outputs
        self._held_bytes = 0

    def see(self, mark: Mark) -> None:
        if mark.moment is MarkedEvents.FORWARD_ENDS and mark.what == ROOT:
            if self._at_the_end:
                self._account.touch(ShardPart.TEMPORARIES, self._part_bytes)
            self._account.add(ShardPart.ACTIVATIONS, self._whole_bytes)
            self._account.touch(ShardPart.TEMPORARIES, self._whole_bytes)
            self._held_bytes = self._whole_bytes
            self._sharding.ring_bytes += self._whole_bytes
        elif mark.moment is MarkedEvents.BACKWARD_BEGINS:
            self._account.add(ShardPart.ACTIVATIONS, -self._held_bytes)
            self._held_bytes = 0
            if mark.what != ROOT and self._in_backward:
                self._in_backward = False
                self._account.touch(ShardPart.TEMPORARIES, self._part_bytes)


# -- looking at a model ----------------------------------------------------------------------------


def _marked(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Modules that engines hook, the model first, and the blocks among them."""
    from memlab.scaleout.engines.fsdp2 import shardable

    blocks = shardable(repeated_blocks(model), model)
    within = {id(block) for block in blocks}
    others = [
        module
        for module in model.modules()
        if module is not model and (id(module) in within or any(p is not None for p in module._parameters.values()))
    ]
    return [model, *others], blocks


def _shape(workload: Workload, modules: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> ModelShape:
    parameters = list(workload.model.parameters())
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    groups = _groups(workload.optimizers)
    places = {id(module): place for place, module in enumerate(modules)}
    return ModelShape(
        parameters=tuple(
            ParameterShape(
                elements=p.numel(),
                rows=p.shape[0] if p.dim() else 1,
                itemsize=p.element_size(),
                trained=p.requires_grad,
                group=groups.get(id(p)),
            )
            for p in parameters
        ),
        modules=tuple(
            tuple(dict.fromkeys(numbers[id(p)] for p in module._parameters.values() if p is not None))
            for module in modules
        ),
        blocks=tuple(places[id(block)] for block in blocks),
        block_parameters=tuple(tuple(numbers[id(p)] for p in block.parameters()) for block in blocks),
        buffer_bytes=sum(buffer.nbytes for buffer in {id(b): b for b in workload.model.buffers()}.values()),
    )


def _groups(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, int]:
    """Number of the group each parameter is in, over all optimizers."""
    groups: Iterator[dict[str, object]] = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {id(p): number for number, group in enumerate(groups) for p in group["params"]}  # type: ignore[attr-defined]
