"""Losses and other results of rows of logits, computed over tiles of rows; each tile's logits live only as long as the tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from memlab.runtime.autocast import autocast_as_before
from memlab.runtime.rounds import rounds
from memlab.units import MIB

# logits of one tile take about this much, in fp32; of a small batch less, so that a tile is small beside the whole
_TILE_BYTES = 32 * MIB
_TILES, _LEAST_ROWS = 8, 64

# of logits [n, v], and what belongs to their rows
OfRows = Callable[..., torch.Tensor]


class _InTiles:
    """Number of losses that were computed in tiles."""

    count = 0


in_tiles = _InTiles()


def logits_of(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, compute_dtype: torch.dtype | None
) -> torch.Tensor:
    """Return the product of a head, [..., v], computed in a dtype where one is given."""
    if compute_dtype is not None:
        hidden, weight, bias = hidden.to(compute_dtype), weight.to(compute_dtype), _cast(bias, compute_dtype)
    return F.linear(hidden, weight, bias)


def derived(
    compute: Callable[..., torch.Tensor], gradient: torch.Tensor, *sources: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Return the gradients of sources, from that of what is computed from them; None of those that need none."""
    keeps_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, which have no way to each other: one source may have been computed from another, as with tied weights
        views = [None if each is None else each.view_as(each) for each in sources]
        output = compute(*views)
    trained = [view for view in views if view is not None and view.requires_grad]
    made = torch.autograd.grad(output, trained, gradient.to(output.dtype), create_graph=keeps_graph)
    by_id = dict(zip(map(id, trained), made, strict=True))
    return [by_id.get(id(view)) for view in views]


def sum_of_cross_entropies(
    hidden: torch.Tensor,  # [n, d]
    weight: torch.Tensor,  # [v, d]
    bias: torch.Tensor | None,  # [v]
    target: torch.Tensor,  # [n]
    ignore_index: int,
    compute_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Return the sum of cross-entropies over rows; its gradients are made at once, and logits are computed once."""
    in_tiles.count += 1
    total: torch.Tensor = _TiledCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, target, ignore_index, compute_dtype
    )
    return total


def of_rows(
    function: OfRows,
    hidden: torch.Tensor,  # [n, d]
    weight: torch.Tensor,  # [v, d]
    bias: torch.Tensor | None,  # [v]
    compute_dtype: torch.dtype | None,
    *others: torch.Tensor,
) -> torch.Tensor:
    """Return what a function gives for each row of logits, [n, ...]; the logits are computed again for its gradients.

    Args:
        function: of logits [n, v] and the others, none of which needs a gradient.
        hidden: input of the head.
        weight: of the head.
        bias: of the head.
        compute_dtype: of the product; None for that of its factors.
        others: tensors [n, ...] that belong to the rows.
    """
    found: torch.Tensor = _TiledRows.apply(  # type: ignore[no-untyped-call]
        function, compute_dtype, hidden, weight, bias, *others
    )
    in_tiles.count += found.requires_grad
    return found


class _TiledRows(torch.autograd.Function):
    """Results of rows, with logits that are computed tile by tile, in the forward pass and again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        function: OfRows,
        compute_dtype: torch.dtype | None,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *others: torch.Tensor,
    ) -> torch.Tensor:
        ctx.function, ctx.compute_dtype = function, compute_dtype
        ctx.save_for_backward(hidden, weight, bias, *others)
        device_type = hidden.device.type
        # results are those of the autocast that surrounds them, also when they are computed again
        ctx.autocast = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        head = _Head(hidden, weight, bias, compute_dtype)
        with autocast_as_before():
            return torch.cat([function(head.logits(tile), *(each[tile] for each in others)) for tile in head.tiles()])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, *others = ctx.saved_tensors
        is_on, dtype = ctx.autocast
        around = torch.autocast(hidden.device.type, dtype=dtype, enabled=is_on, cache_enabled=False)
        head = _Head(hidden, weight, bias, ctx.compute_dtype)
        made = _Gradients(hidden, weight, bias, ctx.needs_input_grad[2:5])
        with autocast_as_before():
            if torch.is_grad_enabled():  # as autograd has it under create_graph

                def compute(hidden: Any, weight: Any, bias: Any) -> torch.Tensor:
                    with torch.autocast(hidden.device.type, enabled=False):
                        logits = logits_of(hidden, weight, bias, ctx.compute_dtype)
                    with around:
                        found: torch.Tensor = ctx.function(logits, *others)
                    return found

                return (None, None, *derived(compute, gradients[0], hidden, weight, bias), *(None for _ in others))
            for tile in rounds(head.tiles()):
                logits = head.logits(tile).requires_grad_()
                with torch.enable_grad(), around:
                    out = ctx.function(logits, *(each[tile] for each in others))
                (of_logits,) = torch.autograd.grad(out, logits, gradients[0][tile])
                del logits, out
                made.add(head, tile, of_logits)
        return (None, None, *made.all, *(None for _ in others))


class _TiledCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies over rows, with gradients made in the same pass, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        ignore_index: int,
        compute_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        head = _Head(hidden, weight, bias, compute_dtype)
        made = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        wide = torch.promote_types(head.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        with autocast_as_before(), torch.autocast(hidden.device.type, enabled=False):
            for tile in rounds(head.tiles()):
                loss, of_logits = _tile_loss(head.logits(tile).to(wide), target[tile], ignore_index)
                total += loss
                made.add(head, tile, of_logits)
        ctx.made = made.all
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.others = ignore_index, compute_dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, target = ctx.saved_tensors  # torch refuses a second pass without a graph to keep
        if torch.is_grad_enabled():  # as autograd has it under create_graph
            ignore_index, compute_dtype = ctx.others

            def compute(hidden: Any, weight: Any, bias: Any) -> torch.Tensor:
                logits = logits_of(hidden, weight, bias, compute_dtype).to(gradients[0].dtype)
                return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")

            return (*derived(compute, gradients[0], hidden, weight, bias), None, None, None)
        scale = gradients[0]
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return (*(None if grad is None else grad * scale.to(grad.dtype) for grad in ctx.made), None, None, None)
        # in place: a second copy of the head's gradient would stand at the peak of the step
        made, ctx.made = ctx.made, ()
        return (*(None if grad is None else grad.mul_(scale.to(grad.dtype)) for grad in made), None, None, None)


class _Head:
    """The product of a head, a tile of rows at a time."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, compute_dtype: torch.dtype | None
    ) -> None:
        self.dtype = compute_dtype or hidden.dtype
        self.weight = weight.to(self.dtype)
        self._bias = _cast(bias, self.dtype)
        self._hidden = hidden

    def tiles(self) -> list[slice]:
        total, rows = self._hidden.shape[0], _tile_rows(self._hidden.shape[0], self.weight.shape[0])
        return [slice(start, start + rows) for start in range(0, max(1, total), rows)]

    def hidden(self, tile: slice) -> torch.Tensor:
        return self._hidden[tile].to(self.dtype)

    def logits(self, tile: slice) -> torch.Tensor:
        """Logits of a tile, [rows, v], owned by the caller."""
        with torch.autocast(self._hidden.device.type, enabled=False):
            return F.linear(self.hidden(tile), self.weight, self._bias)


class _Gradients:
    """Gradients of what a head is made of, summed over tiles."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, are_needed: Sequence[bool]
    ) -> None:
        of_hidden, of_weight, of_bias = are_needed
        self._hidden = torch.empty_like(hidden) if of_hidden else None
        self._weight = torch.zeros_like(weight) if of_weight else None
        self._bias = torch.zeros_like(bias) if bias is not None and of_bias else None

    @property
    def all(self) -> tuple[torch.Tensor | None, ...]:
        return self._hidden, self._weight, self._bias

    def add(self, head: _Head, tile: slice, of_logits: torch.Tensor) -> None:
        """Add what the gradient of a tile's logits gives."""
        with torch.autocast(of_logits.device.type, enabled=False):
            low = of_logits.to(head.dtype)
            if self._hidden is not None:
                self._hidden[tile] = low @ head.weight
            if self._weight is not None:
                _add_product(self._weight, low, head.hidden(tile))
            if self._bias is not None:
                self._bias += of_logits.sum(0).to(self._bias.dtype)


def _cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _tile_rows(rows: int, vocabulary: int) -> int:
    """Return how many rows a tile has."""
    share = max(_LEAST_ROWS, -(-rows // _TILES))
    return max(1, min(share, _TILE_BYTES // (4 * vocabulary)))


def _tile_loss(logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of losses of a tile, and the gradient of that sum; the logits are overwritten by it.

    Args:
        logits: [rows, v] in fp32 or fp64, owned by the caller.
        target: [rows].
        ignore_index: target of rows that do not count.
    """
    counted = target != ignore_index  # [rows]
    safe_target = target.where(counted, 0).unsqueeze(1)  # [rows, 1]
    # not by `logsumexp`, which takes another tile
    largest = logits.amax(1, keepdim=True)  # [rows, 1]
    chosen = logits.gather(1, safe_target)  # [rows, 1]
    gradient = logits.sub_(largest).exp_()
    sums = gradient.sum(1, keepdim=True)  # [rows, 1]
    losses = (sums.log() + largest - chosen).squeeze(1)
    gradient.div_(sums)
    gradient.scatter_add_(1, safe_target, torch.full_like(sums, -1.0))
    gradient.mul_(counted.unsqueeze(1))
    return losses.where(counted, 0.0).sum(), gradient


def _add_product(grad_weight: torch.Tensor, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    if grad_weight.dtype is grad_logits.dtype:
        grad_weight.addmm_(grad_logits.t(), hidden)
    else:
        grad_weight += (grad_logits.t() @ hidden).to(grad_weight.dtype)
