"""`predict_ranks`: what every rank of a run in many processes would need, before any is started.

1. A pass of the rank's rows is traced as for one process, with marks where modules begin and end (`memlab.trace.marks`),
   and laid out by the rules of the engine (`memlab.scaleout.dividing`).
2. The update is traced for parameters of the sizes that the engine leaves the optimizer on a rank.
3. What memlab itself does with the rows is counted: outputs beside the loss are gathered on every rank
   (`memlab.scaleout.rows`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from memlab.devices import Gpu
from memlab.errors import RefusalError, ScaleError
from memlab.plan import Offloaded, Plan
from memlab.predicting.foreteller import of_model, require_complete
from memlab.predicting.passes import Passes
from memlab.predicting.segments import TracedPass
from memlab.predicting.targets import Target, target_for
from memlab.predicting.zero3_linear import linear_as_in_stage_3
from memlab.rank_prediction import RankForecast, RankPrediction
from memlab.records import Category
from memlab.scaleout.dividing.book import Book, Part
from memlab.scaleout.dividing.division import Ddp, Division, Flats
from memlab.scaleout.dividing.fsdp2 import Fsdp2
from memlab.scaleout.dividing.shape import ROOT, ModelShape, ParameterShape
from memlab.scaleout.dividing.zero import Zero3, Zero12
from memlab.scaleout.scale import ENGINES, Scale
from memlab.techniques._modules import repeated_blocks
from memlab.techniques._split import row_ranges
from memlab.trace.marks import Mark, Moment
from memlab.trace.tracer import Trace, Tracer
from memlab.units import format_bytes
from memlab.workload import Workload

_PART_OF = {
    Category.PARAMETERS: Part.PARAMETERS,
    Category.GRADIENTS: Part.GRADIENTS,
    Category.OPTIMIZER_STATE: Part.OPTIMIZER_STATE,
    Category.ACTIVATIONS: Part.ACTIVATIONS,
    Category.CACHE: Part.ACTIVATIONS,
    Category.TEMPORARIES: Part.TEMPORARIES,
    Category.WORKSPACES: Part.WORKSPACES,
    Category.UNUSED: Part.WORKSPACES,
}
_KEPT = (Part.PARAMETERS, Part.GRADIENTS, Part.OPTIMIZER_STATE)
# of the peak: outputs larger than this are worth a word
_MOST_OUTPUTS_SHARE = 0.1


# by engine; what memlab does within a rank's model call is in the trace
_DIVISIONS: dict[str, Callable[..., Division]] = {
    "ddp": Ddp,
    "fsdp2": Fsdp2,
    "zero1": partial(Zero12, stage=1),
    "zero2": partial(Zero12, stage=2),
    "zero3": Zero3,
}
_KNOWN_FIELDS = frozenset({"checkpointing", "precision", "offload"})


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
    return RankForeteller(workload, device).prediction(plan if isinstance(plan, Scale) else Scale.parse(plan), nproc)


def compare_ranks(
    workload: Workload,
    plan: Plan | str = "",
    *,
    engines: Sequence[str] = ENGINES,
    nprocs: Sequence[int] = (1, 2, 4, 8),
    device: str | Gpu | None = None,
) -> RankForecast:
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
        >>> forecast = compare_ranks(workload, engines=["fsdp2"], nprocs=[1, 4])
        >>> [each.divided["parameters"] for each in forecast.predictions]
        [1052672, 263168]
    """
    foreteller = RankForeteller(workload, device)
    wanted = plan if isinstance(plan, Plan) else Plan.parse(plan)
    predictions = tuple(
        _prediction_or_refusal(foreteller, engine, wanted, ranks) for ranks in nprocs for engine in engines
    )
    label = f" · {wanted.label}" if wanted != Plan() else ""
    return RankForecast(f"{workload.describe()}{label} · {foreteller.target.name}", predictions)


def _prediction_or_refusal(foreteller: RankForeteller, engine: str, plan: Plan, ranks: int) -> RankPrediction:
    try:
        return foreteller.prediction(Scale(engine, plan), ranks)
    except RefusalError as refusal:
        scale = f"--scale {engine} {plan}".strip()
        return RankPrediction(scale, foreteller.target.name, ranks, 0, 0, 0, {}, {}, 0, (0, 0), refused=str(refusal))


class RankForeteller:
    """Traces one workload for one target, and divides it under any engine among any number of ranks.

    Args:
        workload: the live objects.
        device: as for `predict_ranks`.

    Raises:
        WorkloadError: no batch or no optimizer.
        TraceError: the model cannot be copied.
        MemlabError: no such GPU in the catalogue.
    """

    def __init__(self, workload: Workload, device: str | Gpu | None = None) -> None:
        require_complete(workload)
        self.target: Target = target_for(workload, device)
        self._tracer = Tracer(workload, self.target.device, self.target.choices)
        model = self._tracer.twin.workload.model
        modules, blocks = _marked(model)
        self._tracer.marked = modules
        self._passes = Passes(self._tracer, self.target.rates)
        self._passes_that_keep_parameters = Passes(self._tracer, self.target.rates)
        self.shape = _shape(self._tracer.twin.workload, modules, blocks)
        self._plain: Trace | None = None
        self._flats: dict[Flats, Trace] = {}

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self._passes.whole(Plan()).samples

    def prediction(
        self, scale: Scale, ranks: int, *, may_grow: bool = False, gathers_outputs: bool = True
    ) -> RankPrediction:
        """Return what one rank of so many needs.

        Args:
            scale: engine and plan.
            ranks: how many.
            may_grow: whether the batch is taken to have a row for every rank if it has fewer.
            gathers_outputs: whether ranks get the outputs of all, as under `memlab.launch`.

        Raises:
            RefusalError: as for `predict_ranks`.
            ScaleError: likewise.
            TraceError: likewise.
        """
        rows = self._rows_of_a_rank(ranks, may_grow=may_grow)
        division = self._division(scale, ranks)
        traced = self._traced(scale, division, rows, is_split=ranks > 1)
        book = Book(has_host=self.target.settings is not None)
        update = self._update(division)
        self._stand(book, division, update, of_model(replace(scale.plan, offload=())))
        outputs_bytes = sum(traced.outputs_bytes(rows).values()) if gathers_outputs else 0
        # a second step finds what the first has left, and knows its order
        for _ in range(2):
            division.wire.clear()
            _run(book, division, traced, rows, outputs_bytes)
            division.update_begins(book)
            if not (division.offloads and book.has_host):
                update.replay(book)
            kept = {str(part): book.live[part] for part in _KEPT if book.live[part]}
            division.update_over(book)
        return RankPrediction(
            scale=str(scale),
            device=self.target.name,
            ranks=ranks,
            rows=rows,
            peak_allocated_bytes=book.peak_bytes,
            host_bytes=book.peak_host_bytes,
            breakdown={str(part): size for part, size in book.at_peak.items() if size},
            divided=kept,
            wire_bytes=division.wire.sent_bytes,
            interval_bytes=self.target.interval_bytes(book.peak_bytes),
            notes=tuple(_about(traced, book, division, outputs_bytes)),
        )

    def _traced(self, scale: Scale, division: Division, rows: int, *, is_split: bool) -> TracedPass:
        settings = of_model(replace(scale.plan, offload=()))
        if not division.keeps_parameters:
            return self._passes.traced(settings, rows, is_split=is_split)
        with linear_as_in_stage_3():
            return self._passes_that_keep_parameters.traced(settings, rows, is_split=is_split)

    def _stand(self, book: Book, division: Division, update: _Update, settings: Plan) -> None:
        """Add what exists throughout: the engine's, the optimizer's, the batch (of which a rank has all), workspaces."""
        division.stands(book)
        book.add(Part.OPTIMIZER_STATE, update.state_bytes, host=division.offloads)
        inputs_bytes = self._passes.whole(settings).observation.baseline_bytes.get(Category.ACTIVATIONS, 0)
        book.add(Part.ACTIVATIONS, inputs_bytes)
        book.add(Part.WORKSPACES, sum(self.target.workspaces))

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

    def _division(self, scale: Scale, ranks: int) -> Division:
        _refuse_what_is_not_known(scale)
        offloads = scale.plan.tier_of(Offloaded.OPTIMIZER) is not None
        return _DIVISIONS[scale.engine](self.shape, ranks, offloads=offloads)

    def _update(self, division: Division) -> _Update:
        stepped = division.stepped
        if isinstance(stepped, float):
            if self._plain is None:
                self._plain = self._tracer.updates(Plan(), self.shape.trained)[1]
            return _Update(self._plain, stepped)
        if stepped not in self._flats:
            self._flats[stepped] = self._tracer.update_of_flats(stepped)
        return _Update(self._flats[stepped])


def _refuse_what_is_not_known(scale: Scale) -> None:
    strange = [name for name in scale.plan.changes() if name not in _KNOWN_FIELDS]
    strange += [f"offload of {what}" for what, _ in scale.plan.offload if what is not Offloaded.OPTIMIZER]
    if scale.engine not in _DIVISIONS:
        strange.insert(0, f"the engine {scale.engine}")
    if strange:
        raise RefusalError(
            "scale",
            f"{strange[0]} is not predicted for ranks",
            f"leave it out ({', '.join(_DIVISIONS)} with --checkpoint, --bf16 and --offload optimizer are known)",
        )


@dataclass(frozen=True)
class _Update:
    """An update like all that follow the first.

    Args:
        trace: of it.
        share: of its sizes.
    """

    trace: Trace
    share: float = 1.0

    @property
    def state_bytes(self) -> int:
        """Return what the optimizer keeps."""
        return round(self.share * self.trace.observation.baseline_bytes.get(Category.OPTIMIZER_STATE, 0))

    def replay(self, book: Book) -> None:
        """Do it, on top of what lives; it leaves as much behind as it found."""
        left = 0
        for _, size_bytes, _, _ in self.trace.observation.raw:
            change = round(self.share * size_bytes)
            book.add(Part.TEMPORARIES, change)
            left += change
        book.add(Part.TEMPORARIES, -left)


def _about(traced: TracedPass, book: Book, division: Division, outputs_bytes: int) -> Iterator[str]:
    """Yield what is to be said about a prediction."""
    yield from traced.trace.notes
    whole_bytes = division.ranks * outputs_bytes
    if division.ranks > 1 and whole_bytes > _MOST_OUTPUTS_SHARE * book.peak_bytes:
        yield (
            f"every rank gathers the outputs of all, {format_bytes(whole_bytes)}: a model that returns only its loss "
            "needs less"
        )


# -- laying a step out -----------------------------------------------------------------------------


def _run(book: Book, division: Division, traced: TracedPass, rows: int, outputs_bytes: int) -> None:
    """A pass, with what the engine does at its marks."""
    marks: dict[int, list[Mark]] = defaultdict(list)
    for mark in traced.trace.marks:
        marks[mark.event].append(mark)
    hidden: dict[int, list[int]] = defaultdict(list)
    for at, size_bytes in traced.hidden(rows):
        hidden[at].append(size_bytes)
    events = traced.events(rows)
    sizes = {number: size_bytes for size_bytes, number, _, _ in events if size_bytes > 0}
    outputs = _Outputs(book, division, outputs_bytes)
    book.dropped.clear()
    for at in range(len(events) + 1):
        for mark in marks.get(at, ()):
            _tell(book, division, mark, sizes)
            outputs.see(mark)
        for size_bytes in hidden.get(at, ()):
            book.touch(Part.TEMPORARIES, size_bytes)
        if at < len(events):
            size_bytes, number, category, _ = events[at]
            if number not in book.dropped:
                book.add(_PART_OF[category], size_bytes)
    division.backward_over(book)


def _tell(book: Book, division: Division, mark: Mark, sizes: Mapping[int, int]) -> None:
    if mark.moment is Moment.SETTLED:
        book.gradients[mark.what] = mark.storage, sizes.get(mark.storage, 0)
        division.settled(book, mark.what)
        return
    told = {
        Moment.FORWARD_BEGINS: division.forward_begins,
        Moment.FORWARD_ENDS: division.forward_ends,
        Moment.BACKWARD_BEGINS: division.backward_begins,
        Moment.BACKWARD_ENDS: division.backward_ends,
    }
    told[mark.moment](book, mark.what)


class _Outputs:
    """Handling of the model's outputs beside the loss: every rank gathers those of all."""

    def __init__(self, book: Book, division: Division, part_bytes: int) -> None:
        self._book = book
        self._part_bytes = part_bytes
        self._whole_bytes = part_bytes * division.ranks if division.ranks > 1 else 0
        self._wire = division.wire
        self._at_the_end, self._in_backward = division.copies_outputs
        self._held_bytes = 0

    def see(self, mark: Mark) -> None:
        """Act on a mark of the pass."""
        if mark.moment is Moment.FORWARD_ENDS and mark.what == ROOT:
            if self._at_the_end:
                self._book.touch(Part.TEMPORARIES, self._part_bytes)
            self._book.add(Part.ACTIVATIONS, self._whole_bytes)
            self._book.touch(Part.TEMPORARIES, self._whole_bytes)
            self._held_bytes = self._whole_bytes
            self._wire.all_gathered(self._whole_bytes)
        elif mark.moment is Moment.BACKWARD_BEGINS:
            self._book.add(Part.ACTIVATIONS, -self._held_bytes)
            self._held_bytes = 0
            if mark.what != ROOT and self._in_backward:
                self._in_backward = False
                self._book.touch(Part.TEMPORARIES, self._part_bytes)


# -- looking at a model ----------------------------------------------------------------------------


def _marked(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Modules that engines hook, the model first, and the blocks among them."""
    from memlab.scaleout.engines.fsdp2 import _shardable

    blocks = _shardable(repeated_blocks(model), model)
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
