"""`how_many`: the fewest GPUs of each model in the catalogue that hold a workload, under each engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from memlab.errors import RefusalError, ScaleError
from memlab.hardware.gpus import Gpu, gpu, usable_bytes
from memlab.measuring.runs import say_when_long
from memlab.plan import Plan
from memlab.plan.scale import Scale
from memlab.records.ranks import Fewest, HowMany, RankPrediction
from memlab.runtime.workload import Workload
from memlab.scaleout.predicting.ranks import RankPredictor

_ENGINES = ("ddp", "zero2", "fsdp2", "zero3")
# one of each size that is rented out today; `of` asks about others
_GPUS = ("T4", "L4", "RTX 5090", "A100 40GB", "L40S", "A100 80GB", "H200", "B200")
_TRACED_FOR = "A100 80GB"
_NOTES = (
    "numbers are powers of two; with more processes than rows in the batch, one row for each process is assumed",
    "outputs beside the loss are not counted: memlab.launch gathers them on every rank, so let the model return its loss",
)


def how_many(
    workload: Workload,
    plan: Plan | str = "--checkpoint",
    *,
    engines: Sequence[str] = _ENGINES,
    of: Iterable[str | Gpu] = _GPUS,
    most: int = 1024,
    progress: Callable[[str], None] | None = None,
) -> HowMany:
    """Return how many GPUs of each kind a workload needs, without running anything.

    Args:
        workload: with an optimizer and a batch; a model on the meta device is enough, however large.
        plan: what else applies on every rank.
        engines: as in ``--scale``.
        of: GPUs of the catalogue, or their names.
        most: largest number of GPUs to consider.
        progress: called with a line now and then; by default lines go to standard error once the work takes longer
            than two seconds.

    Returns:
        A table of GPUs and engines, by memory.

    Raises:
        RefusalError: no engine goes together with the plan.
        ScaleError: not a number of GPUs.
        TraceError: what the model computes depends on values; it names the operator.
        WorkloadError: no batch or no optimizer.
        MemlabError: no such GPU in the catalogue.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     blocks = (torch.nn.Sequential(torch.nn.Linear(16384, 16384), torch.nn.ReLU()) for _ in range(16))
        ...     model = torch.nn.Sequential(*blocks)
        >>> workload = Workload(model, torch.optim.SGD(model.parameters()), batch=(torch.zeros(8, 16384, device="meta"),))
        >>> [how_many(workload, "", engines=["fsdp2"], of=[name]).rows[0].ranks for name in ("T4", "B200")]
        [4, 1]
    """
    if not isinstance(most, int) or most < 1:
        raise ScaleError(f"most={most!r}: expected a whole number of GPUs, 1 or more")
    asked = sorted((each if isinstance(each, Gpu) else gpu(each) for each in of), key=lambda each: each.memory_bytes)
    wanted = Plan.of(plan)
    scales, refusals = _scales(engines, wanted)
    if not scales:
        raise next(iter(refusals.values()))
    # what kernels take of a GPU's memory hardly differs between models, and one trace serves all
    search = _Search(RankPredictor(workload, _TRACED_FOR), most, progress or say_when_long("predicting"))
    rows = tuple(search.fewest(listed, scale) for listed in asked for scale in scales)
    left_out = tuple(f"--scale {engine} is left out: {refusal}" for engine, refusal in refusals.items())
    label = f" · {wanted.label}" if wanted != Plan() else ""
    return HowMany(f"{workload.describe()}{label}", most, rows, (*_NOTES, *left_out))


def _scales(engines: Iterable[str], plan: Plan) -> tuple[list[Scale], dict[str, RefusalError]]:
    scales, refusals = [], {}
    for engine in engines:
        try:
            scales.append(Scale(engine, plan))
        except RefusalError as refusal:
            refusals[engine] = refusal
    return scales, refusals


class _Search:
    """Asks about as few numbers as will do, and about each once for all GPUs."""

    def __init__(self, predictor: RankPredictor, most: int, say: Callable[[str], None]) -> None:
        self._predictor = predictor
        self._powers = [2**power for power in range(most.bit_length())]
        self._say = say
        self._known: dict[tuple[str, int], RankPrediction] = {}

    def fewest(self, listed: Gpu, scale: Scale) -> Fewest:
        """The first power of two that is enough; a rank never needs more when there are more of them."""
        at = bisect_left(self._powers, True, key=lambda ranks: self._fits(listed, scale, ranks))
        found = self._prediction(scale, self._powers[at]) if at < len(self._powers) else None
        return Fewest(listed.name, listed.memory_bytes, scale.engine, found)

    def _fits(self, listed: Gpu, scale: Scale, ranks: int) -> bool:
        return self._prediction(scale, ranks).interval_bytes[1] <= usable_bytes(listed)

    def _prediction(self, scale: Scale, ranks: int) -> RankPrediction:
        key = (str(scale), ranks)
        if key not in self._known:
            self._say(f"{scale} on {ranks}")
            self._known[key] = self._predictor.prediction(scale, ranks, may_grow=True, gathers_outputs=False)
        return self._known[key]
