"""`Rows`: at the model call every rank takes its own rows of the batch, and gets the outputs of all.

1. The loop hands every rank the same batch. How it splits, and how the losses of parts add up, is probed as for
   accumulation (`memlab.techniques.accumulation.probe`), so the loss that comes back is that of the whole batch on every rank.
2. Outputs beside the loss are gathered. A loop that makes its own loss from them gets the right gradient as well.
3. Engines average gradients over ranks. The gradient of a rank's part is multiplied by the number of ranks here, so
   that the average is the sum over parts.
4. Accumulation splits a rank's rows again. All ranks know the weights of all micro-batches, so that none of them runs
   the model once more than the others to find them out.
5. Random numbers drawn in the model differ between ranks; those of the loop (shuffling) stay the same on all.

Needs an initialized process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from memlab.errors import RefusalError
from memlab.runtime.lazy import LazyTensor
from memlab.runtime.modules import CacheOff
from memlab.runtime.rng import RandomState
from memlab.scaleout.engines.base import Engine
from memlab.techniques.accumulation.merge import Join
from memlab.techniques.accumulation.probe import Probe
from memlab.techniques.accumulation.split import Call, Division, Outputs, row_ranges
from memlab.techniques.base import ModelCall


class Rows:
    """One rank's share of every training call."""

    def __init__(
        self,
        engine: Engine,  # runs the model
        around: Callable[[ModelCall], ModelCall],  # puts what surrounds a call of the model around it
        accumulation: int,  # micro-batches that a rank's rows are split into
        name: str,  # how errors call the model
        seed: int,  # from which the ranks' random numbers start
    ) -> None:
        self._engine = engine
        self._around = around
        self._accumulation = accumulation
        self._model = engine.workload.model
        self._name = name
        self._probe = Probe(self._model, name, run=engine.look, buffers_alone=True)
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if engine.shares_rows else (0, 1)
        self._split_before = False
        self._random = self._own_random(seed) if self._ranks > 1 else None

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a training call on this rank's rows."""
        if self._ranks == self._accumulation == 1:
            return self._around(self._engine.call)(*args, **kwargs)
        whole = Call.of(args, CacheOff("scale").options(self._model, self._name, kwargs))
        layout = self._probe.layout(whole)
        each = self._micro_batches_for(layout.rows)
        parts = [layout.take(whole, start, stop) for start, stop in row_ranges(layout.rows, self._ranks * each)]
        weights = self._probe.weights(whole, layout, parts)
        # without a target in any of the parts, each gives its share of the model's own answer, 0/0
        weights = {i: every if any(every) else [1 / len(every)] * len(every) for i, every in weights.items()}
        joins = self._probe.joins(whole)
        own = slice(self._rank * each, (self._rank + 1) * each)
        share = Division(parts[own], layout, {i: every[own] for i, every in weights.items()}, joins)
        with self._own_randomness():
            outputs, loss_weights = self._run(share)
        rows = sum(layout.rows_in(part) for part in parts[own])
        return outputs.rebuild(
            [
                self._whole(leaf, loss_weights.get(i), joins[i], rows, layout.rows)
                for i, leaf in enumerate(outputs.leaves)
            ]
        )

    def _micro_batches_for(self, rows: int) -> int:
        """Micro-batches of each rank, the same number for all."""
        wanted = self._ranks * (self._accumulation if not self._split_before else 1)
        if rows < wanted:
            under = f" and --accumulate {self._accumulation}" if wanted > self._ranks else ""
            raise RefusalError(
                "scale",
                f"a batch of {self._name} has {rows} rows, for {self._ranks} processes{under}",
                f"use batches of {wanted} rows or more, or fewer processes" + (" or micro-batches" if under else ""),
            )
        # a last, smaller batch of an epoch is split as far as it goes
        self._split_before = True
        return min(self._accumulation, rows // self._ranks)

    def _run(self, share: Division) -> tuple[Outputs, dict[int, float]]:
        """Outputs for the rank's rows, and what each scalar among them weighs in the sum over ranks."""
        if len(share.micro_batches) > 1:
            # scalars come weighted
            outputs = Outputs.of(self._engine.accumulate(share, self._around))
            return outputs, dict.fromkeys(share.weights, 1.0)
        outputs = Outputs.of(share.micro_batches[0].run(self._around(self._engine.call)))
        return outputs, {i: weights[0] for i, weights in share.weights.items()}

    def _whole(self, leaf: Any, weight: float | None, join: Join | None, own: int, rows: int) -> Any:
        """An output for all rows, of that for the rank's own."""
        if self._ranks == 1 or not isinstance(leaf, torch.Tensor):
            return leaf
        if weight is not None:
            return _Sum.apply(leaf, weight, self._ranks)  # type: ignore[no-untyped-call]
        if join is None:
            return leaf
        if isinstance(leaf, LazyTensor):
            shape = [*leaf.shape[: join.dim], leaf.size(join.dim) * rows // own, *leaf.shape[join.dim + 1 :]]
            return LazyTensor(shape, leaf.dtype, leaf.device, lambda: self._whole(leaf.value(), None, join, own, rows))
        gathered = _Gather.apply(join.opened(leaf, own), join.at, self._rank, self._ranks)  # type: ignore[no-untyped-call]
        return join.closed(gathered)

    def _own_random(self, seed: int) -> RandomState:
        loops = RandomState()
        torch.manual_seed(seed + self._rank)
        own = RandomState()
        loops.restore()
        return own

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        if self._random is None:
            yield
            return
        loops = RandomState()
        self._random.restore()
        try:
            yield
        finally:
            self._random = RandomState()
            loops.restore()


class _Sum(torch.autograd.Function):
    """A weighted value, summed over ranks."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, weight: float, ranks: int) -> torch.Tensor:
        context.factor = weight * ranks
        # a part without any target weighs nothing, and its loss may be nan
        total = value.detach() * weight if weight else torch.zeros_like(value)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient * context.factor, None, None


class _Gather(torch.autograd.Function):
    """A tensor of which every rank has a part, put together along a dimension."""

    @staticmethod
    def forward(context: Any, part: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
        sizes = [torch.zeros(1, dtype=torch.long, device=part.device) for _ in range(ranks)]
        dist.all_gather(sizes, torch.tensor([part.size(dim)], device=part.device))
        lengths = [int(size) for size in sizes]
        context.dim, context.start, context.length, context.ranks = dim, sum(lengths[:rank]), lengths[rank], ranks
        pieces = [part.new_empty([*part.shape[:dim], length, *part.shape[dim + 1 :]]) for length in lengths]
        _all_gather_uneven(pieces, part.detach().contiguous(), rank)
        return torch.cat(pieces, dim)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        mine = gradient.narrow(context.dim, context.start, context.length)
        return mine * context.ranks, None, None, None


def _all_gather_uneven(pieces: list[torch.Tensor], mine: torch.Tensor, rank: int) -> None:
    """Backends gather parts of one size; here sizes differ by one row."""
    for source, piece in enumerate(pieces):
        if source == rank:
            piece.copy_(mine)
        dist.broadcast(piece, source)
