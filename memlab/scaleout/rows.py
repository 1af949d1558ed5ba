"""`Rows`: at the model call every rank takes its own rows of the batch, and gets the outputs of all.

1. The loop hands every rank the same batch. How it splits, and how the losses of parts add up, is probed as for
   accumulation (`memlab.techniques._probe`), so the loss that comes back is that of the whole batch on every rank.
2. Outputs beside the loss are gathered. A loop that makes its own loss from them gets the right gradient as well.
3. Engines average gradients over ranks. The gradient of a rank's part is multiplied by the number of ranks here, so
   that the average is the sum over parts.
4. Random numbers drawn in the model differ between ranks; those of the loop (shuffling) stay the same on all.

Needs an initialized process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memlab.errors import RefusalError
from memlab.techniques._aliases import RandomState
from memlab.techniques._modules import without_cache
from memlab.techniques._probe import Probe
from memlab.techniques._split import Call, Outputs, row_ranges

ModelCall = Callable[..., Any]


class Rows:
    """One rank's share of every training call.

    Args:
        model: whose calls are shared out.
        name: how errors call it.
        device: of the batches.
        seed: from which the ranks' random numbers start.
    """

    def __init__(self, model: nn.Module, name: str, device: torch.device, seed: int) -> None:
        self._model = model
        self._name = name
        self._probe = Probe(model, name)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._device = device
        self._random = self._own_random(seed) if self._ranks > 1 else None

    def call(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a training call on this rank's rows.

        Raises:
            RefusalError: the batch cannot be split, or has fewer rows than there are ranks.
        """
        if self._ranks == 1:
            return call(*args, **kwargs)
        whole = Call.of(args, without_cache(self._model, kwargs))
        layout = self._probe.layout(whole)
        if layout.rows < self._ranks:
            raise RefusalError(
                "scale",
                f"a batch of {self._name} has {layout.rows} rows, for {self._ranks} processes",
                f"use batches of {self._ranks} rows or more, or fewer processes",
            )
        parts = [layout.take(whole, start, stop) for start, stop in row_ranges(layout.rows, self._ranks)]
        weights = self._probe.weights(whole, layout, parts)
        joins = self._probe.joins(whole)
        with self._own_randomness():
            outputs = Outputs.of(parts[self._rank].run(call))
        return outputs.rebuild([self._whole(leaf, weights.get(i), joins[i]) for i, leaf in enumerate(outputs.leaves)])

    def _whole(self, leaf: Any, weights: list[float] | None, dim: int | None) -> Any:
        if weights is not None:
            # a part without any target weighs nothing, and its loss may be nan
            return _Sum.apply(leaf if weights[self._rank] else torch.zeros_like(leaf), weights[self._rank], self._ranks)  # type: ignore[no-untyped-call]
        if dim is not None:
            return _Gather.apply(leaf, dim, self._rank, self._ranks)  # type: ignore[no-untyped-call]
        return leaf

    def _own_random(self, seed: int) -> RandomState:
        loops = RandomState(self._device)
        torch.manual_seed(seed + self._rank)
        own = RandomState(self._device)
        loops.restore()
        return own

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        assert self._random is not None
        loops = RandomState(self._device)
        self._random.restore()
        try:
            yield
        finally:
            self._random = RandomState(self._device)
            loops.restore()


class _Sum(torch.autograd.Function):
    """A weighted value, summed over ranks."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, weight: float, ranks: int) -> torch.Tensor:
        context.factor = weight * ranks
        total = value.detach() * weight
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
