"""Large linear layers in tiles, on and off on a live model.

Two forms, by what is large beside a layer:

1. *Feed-forward parts over rows.* The result between the two layers of a feed-forward part is several times as wide as
   what goes in, and it never exists whole: rows go through in N tiles, and each tile is run again in the backward pass
   (`torch.utils.checkpoint`, so random state and autocast are as they were), where its gradients are made.
2. *Other layers over output features, under autocast.* Autocast casts a weight whole and autograd keeps the copy until the
   backward pass. Here a tile of it is cast at a time, and cast again in the backward pass.

Large is a weight of at least `LARGE_BYTES`. Weights are read where they are, so tied ones stay tied; classes
and hooks of modules stay. A feed-forward part that keeps state, or has hooks of the loop within, stays whole.

Sources of the ideas: Rajbhandari et al., "ZeRO-Infinity", https://arxiv.org/abs/2104.07857 (memory-centric tiling);
Bekman et al., "Arctic Long Sequence Training", https://arxiv.org/abs/2506.13996 (tiled feed-forward parts).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memlab.errors import RefusalError
from memlab.plan import Loss, Plan, Precision
from memlab.runtime.autocast import CallSettings, autocast_as_before, without_cached_casts
from memlab.runtime.backward import around_backward_passes
from memlab.runtime.dispatch import HALF
from memlab.runtime.dropped_graphs import held_by_graph
from memlab.runtime.graphs import why_as_written
from memlab.runtime.mechanisms import SeenInCalls
from memlab.runtime.model_state import State, Written
from memlab.runtime.modules import repeated_blocks
from memlab.runtime.stand_ins import method_of, stand_in
from memlab.runtime.workload import Workload
from memlab.techniques.accumulation.split import row_ranges
from memlab.techniques.base import Description, ModelCall, Reduces, Technique, Traits
from memlab.techniques.checkpointing.recomputation import RecomputationCheck, contexts
from memlab.techniques.chunked_loss import large_heads
from memlab.techniques.tiling.feed_forward import (
    FeedForward,
    Linear,
    feed_forwards,
    has_hooks,
    linears_of,
    treats_rows_alike,
)
from memlab.units import MIB, format_bytes

LARGE_BYTES = 1 * MIB
# autocast is then off, or casts no weight
_WITHOUT_CASTS = (Precision.FP32, Precision.TF32, Precision.PURE_BF16)


class Tiling(Technique, SeenInCalls):
    """Compute large feed-forward parts, and under autocast other large linear layers, in tiles.

    Known limitations: with dropout within a feed-forward part its masks are drawn tile by tile: other numbers of the
    same distribution. Under checkpointing of whole blocks, feed-forward parts run three times. A gradient of a gradient
    cannot be taken through layers of the second form. Parametrized and quantised layers are left alone, and so are
    feed-forward parts that are called with more than one tensor, that mix rows or keep state, or that have hooks within.
    """

    field = "tiling"
    traits = Traits(Reduces.ACTIVATIONS, needs_uncompiled=True)
    was_reached = True
    descriptions = (
        Description(
            flags="--tile N",
            saves="the wide intermediate result of feed-forward parts: ÷ N",
            costs="feed-forward parts run once more in the backward pass",
            exactness="same gradient; dropout masks there are drawn tile by tile",
            gives_nothing="the peak is in the logits, and blocks are recomputed anyway; refused where no weight has 1 MiB",
        ),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._mixing = 0
        self._unlooked: list[FeedForward] = []
        # by the module
        self._row_parts: set[int] = set()
        self._tiled: dict[str, set[int]] = {"parts": set(), "layers": set()}

    @classmethod
    def setting(cls, plan: Plan) -> Any:
        # whose forward a chunked loss replaces is none of this one's; some layers are tiled under autocast alone
        return plan.tiling, plan.loss, plan.precision in _WITHOUT_CASTS

    def check(self, workload: Workload) -> None:
        model = workload.model
        if self._parts(model):
            return
        layers = self._layers(model)
        if layers and self.plan.precision not in _WITHOUT_CASTS:
            return
        linears = sorted(self._linears(model), key=lambda linear: linear.weight_bytes)
        if layers:
            raise RefusalError(
                self.field,
                f"{workload.name} has no feed-forward part to tile over rows, and tiles save copies of its large "
                f"layers only under autocast",
                "use it with --bf16 or --fp16, or --accumulate N instead",
            )
        largest = f"the largest takes {format_bytes(linears[-1].weight_bytes)}" if linears else "it has none at all"
        has_head = self.plan.loss is Loss.CHUNKED and bool(large_heads(model))
        beside = " beside the head, whose loss is chunked," if has_head else ""
        if any(isinstance(each, nn.Linear) and "weight" not in each._parameters for each in workload.model.modules()):
            beside += " but those with computed weights"
        raise RefusalError(
            self.field,
            f"no linear layer of {workload.name}{beside} has a weight of {format_bytes(LARGE_BYTES)} or more: {largest}",
            "use --accumulate N or --checkpoint, which lower what layers keep",
        )

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        around_backward_passes(self._around_backward, undo)
        self._unlooked = self._parts(workload.model)
        blocks = repeated_blocks(workload.model)
        for part in self._unlooked:
            stand_in(part.owner, part.method, self._over_rows(part, _block_around(part, blocks)), undo)
        for linear in self._layers(workload.model):
            stand_in(linear.module, "forward", self._over_features(linear), undo)

    def _around_backward(self, _roots: Sequence[Any], _inputs: Sequence[Any] | None) -> AbstractContextManager[None]:
        return autocast_as_before()

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # beforehand: within the call a selective checkpoint would take what is looked at for a part of the model
        unlooked, self._unlooked = self._unlooked, []
        self._row_parts |= {id(part.owner) for part in unlooked if not has_hooks(part) and treats_rows_alike(part)}
        self._mixing += len(unlooked) - len(self._row_parts) if unlooked else 0
        output = call(*args, **kwargs)
        self.notes[:] = [self._words()]
        return output

    def _words(self) -> str:
        parts, layers = len(self._tiled["parts"]), len(self._tiled["layers"])
        said = [f"{parts} feed-forward parts over rows"] if parts else []
        said += [f"{layers} linear layers over output features"] if layers else []
        whole = f"{self._mixing} that mix rows, keep state or have hooks stay whole" if self._mixing else ""
        if not said:
            if whole:
                return f"nothing is computed in tiles: feed-forward parts, {whole}"
            return "nothing is computed in tiles: without autocast large layers make no copies that tiles could save"
        return f"in {self.plan.tiling} tiles: {' and '.join(said)}" + (f"; {whole}" if whole else "")

    def _parts(self, model: nn.Module) -> list[FeedForward]:
        return [part for part in feed_forwards(model) if part.weight_bytes >= LARGE_BYTES]

    def _layers(self, model: nn.Module) -> list[Linear]:
        """Large layers outside of the feed-forward parts."""
        elsewhere = {id(linear.module) for part in self._parts(model) for linear in part.linears}
        large = (linear for linear in self._linears(model) if linear.weight_bytes >= LARGE_BYTES)
        return [linear for linear in large if id(linear.module) not in elsewhere]

    def _linears(self, model: nn.Module) -> list[Linear]:
        """Return those within the model; not the head where the loss is computed without its logits."""
        heads = {id(head) for head in large_heads(model)} if self.plan.loss is Loss.CHUNKED else set()
        return [linear for linear in linears_of(model) if id(linear.module) not in {id(model), *heads}]

    def _over_rows(self, part: FeedForward, block: nn.Module | None) -> Callable[..., Any]:
        original = method_of(part.owner, part.method)
        name, numbers = type(part.owner).__name__, itertools.count(1)

        def on_tile(rows: torch.Tensor) -> Any:
            with without_cached_casts(rows.device.type):
                return original(rows)

        @functools.wraps(original)
        def tiled(*args: Any, **kwargs: Any) -> Any:
            hidden = _only_tensor(args, kwargs)
            is_training = part.owner.training and torch.is_grad_enabled() and not why_as_written()
            is_whole = id(part.owner) not in self._row_parts or has_hooks(part)
            if hidden is None or hidden.dim() < 2 or not hidden.numel() or not is_training or is_whole:
                return original(*args, **kwargs)
            self._tiled["parts"].add(id(part.owner))
            rows = hidden.reshape(*[1] * (hidden.dim() - 2), -1, hidden.shape[-1])  # [1, n, d]
            ranges = row_ranges(rows.shape[-2], min(self.plan.tiling, rows.shape[-2]))
            tiles = (rows[..., start:stop, :] for start, stop in ranges)
            settings, state = CallSettings(), State(part.owner.modules(), (), Written(), hidden.device)
            held_by_graph(state, settings.variables)
            comparison = RecomputationCheck(next(numbers), self.field, name)

            def again(rows: torch.Tensor) -> Any:
                with settings.entered(), state.again():
                    return on_tile(rows)

            with comparison.first() as check:
                results = [
                    checkpoint(
                        comparison.twice(on_tile, again),
                        tile,
                        use_reentrant=False,
                        context_fn=functools.partial(contexts, block),
                        determinism_check=check,
                    )
                    for tile in tiles
                ]
            return torch.cat(results, -2).reshape(*hidden.shape[:-1], results[0].shape[-1])

        return tiled

    def _over_features(self, linear: Linear) -> Callable[..., Any]:
        module = linear.module
        original, product = method_of(module, "forward"), type(module).forward

        @functools.wraps(original)
        def tiled(*args: Any, **kwargs: Any) -> Any:
            if type(module).forward is not product:
                return original(*args, **kwargs)
            inputs = _only_tensor(args, kwargs)
            dtype = None if inputs is None else _cast_to(inputs, linear)
            if dtype is None or not (module.training and torch.is_grad_enabled()) or why_as_written():
                return original(*args, **kwargs)
            assert inputs is not None
            self._tiled["layers"].add(id(module))
            weight = linear.weight.t() if linear.is_transposed else linear.weight
            return TiledLinear.apply(inputs.to(dtype), weight, module.bias, self.plan.tiling)  # type: ignore[no-untyped-call]

        return tiled


def _block_around(part: FeedForward, blocks: list[nn.Module]) -> nn.Module | None:
    """The repeated block a part lies in: what brings the block's parameters must bring them for a tile as well."""
    return next((block for block in blocks if any(module is part.owner for module in block.modules())), None)


def _only_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The argument of a call that has one, a plain tensor of floats."""
    given = (*args, *kwargs.values())
    alone = len(given) == 1 and isinstance(given[0], torch.Tensor) and given[0].is_floating_point()
    return given[0] if alone else None


def _cast_to(inputs: torch.Tensor, linear: Linear) -> torch.dtype | None:
    """Return what autocast turns the weight of a layer into for these inputs; None where it leaves it as it is."""
    device_type = inputs.device.type
    if not torch.is_autocast_enabled(device_type) or inputs.dtype is torch.float64:
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return dtype if linear.weight.dtype is torch.float32 and dtype in HALF else None


class TiledLinear(torch.autograd.Function):
    """`F.linear` in a lower precision than that of the weight, of which no whole copy is made or kept."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,  # [..., i] in the precision of the product
        weight: torch.Tensor,  # [o, i]
        bias: torch.Tensor | None,  # [o]
        tiles: int,
    ) -> torch.Tensor:
        dtype, tiles = inputs.dtype, min(tiles, len(weight))
        rows = inputs.reshape(-1, inputs.shape[-1])  # [n, i]
        output = rows.new_empty(len(rows), len(weight))  # [n, o]
        with autocast_as_before(), torch.autocast(inputs.device.type, enabled=False):
            for start, stop in row_ranges(len(weight), tiles):
                low_bias = None if bias is None else bias[start:stop].to(dtype)
                output[:, start:stop] = F.linear(rows, weight[start:stop].to(dtype), low_bias)
        ctx.save_for_backward(inputs, weight)
        ctx.tiles, ctx.bias_dtype = tiles, None if bias is None else bias.dtype
        return output.reshape(*inputs.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gradient = gradients[0].reshape(-1, len(weight))  # [n, o]
        rows = inputs.reshape(-1, inputs.shape[-1])  # [n, i]
        if torch.is_grad_enabled():  # as autograd has it under create_graph: the layer as a whole
            whole = (
                (gradient @ weight.to(gradient.dtype)).to(inputs.dtype).reshape(inputs.shape) if needs_inputs else None
            )
            of_weight = (gradient.t() @ rows.to(gradient.dtype)).to(weight.dtype) if needs_weight else None
            return whole, of_weight, gradient.sum(0).to(ctx.bias_dtype) if needs_bias else None, None
        # sums over tiles are kept in fp32: rounding each of them would be worse than rounding the whole once
        grad_rows = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device) if needs_inputs else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        with torch.autocast(inputs.device.type, enabled=False):
            for start, stop in row_ranges(len(weight), ctx.tiles):
                tile = gradient[:, start:stop]
                if grad_rows is not None:
                    grad_rows += tile @ weight[start:stop].to(rows.dtype)
                if grad_weight is not None:
                    grad_weight[start:stop] = tile.t() @ rows
        grad_bias = gradient.sum(0).to(ctx.bias_dtype) if needs_bias else None
        grad_inputs = None if grad_rows is None else grad_rows.to(inputs.dtype).reshape(inputs.shape)
        return grad_inputs, grad_weight, grad_bias, None
