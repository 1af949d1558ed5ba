"""Cross-entropy over a large vocabulary without the full logits.

The head, the linear layer onto the vocabulary, returns *deferred logits*: its input and its weight,
standing in for their product. When they meet `cross_entropy`, loss and gradients are computed over
tiles of rows, each tile's logits living only as long as the tile. Reshaping, casting to fp32 and
slicing of rows stay deferred; any other operation computes the logits as usual, so a loop
that reads them still gets them.

Gradients are those of the plain cross-entropy (tested at 1e-6 relative in fp32).

Source of the idea: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models",
https://arxiv.org/abs/2411.09009
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from memlab.errors import RefusalError
from memlab.plan import Plan
from memlab.runtime.autocast import autocast_as_before
from memlab.runtime.callers import handed_over
from memlab.runtime.dispatch import makes_one_graph, never_compile
from memlab.runtime.graphs import why_as_written
from memlab.runtime.lazy import LazyTensor, Waiting, may_be_read, real, with_graph
from memlab.runtime.loop_reading import made_one_graph
from memlab.runtime.stand_ins import method_of, own_attributes, stand_in
from memlab.runtime.workload import Workload
from memlab.techniques.base import Description, Technique
from memlab.units import MIB

_SMALLEST_VOCABULARY = 2048
# logits of one tile take about this much, in fp32; of a small batch less, so that a tile is small beside the whole
_TILE_BYTES = 32 * MIB
_TILES, _LEAST_ROWS = 8, 64


class ChunkedLoss(Technique):
    """Compute the cross-entropy of a large-vocabulary head in tiles.

    Known limitations: the logits must reach the loss through reshapes, casts and slices of rows only
    (so in Transformers' causal and masked language models, and T5); class weights and label
    smoothing compute the full logits. Heads with a soft cap on their logits gain nothing.
    """

    field = "loss"
    changes_modules = True
    was_reached = True
    descriptions = (
        Description(
            flags="--chunk-loss",
            saves="the logits over the vocabulary, and their gradient",
            costs="gradients of the head are made in the forward pass, tile by tile",
            exactness="same gradient (≤ 2e-6 relative in fp32)",
            gives_nothing="the peak is not in the loss; refused for fewer than 2048 classes",
        ),
    )

    def check(self, workload: Workload) -> None:
        if large_heads(workload.model):
            return
        reason = f"{workload.name} has no linear layer onto {_SMALLEST_VOCABULARY} or more classes"
        if heads := _large(workload.model):
            kind = type(heads[0]).__name__
            reason = (
                f"the layer of {workload.name} onto {heads[0].out_features} classes, a {kind}, has a forward of its own"
            )
        raise RefusalError(self.field, reason, "use --accumulate N, which divides the logits as well")

    def check_loop(self, workload: Workload, frame: FrameType) -> None:
        # one that calls the model itself gets logits that are computed
        if name := made_one_graph(frame, workload.model, calls_it=False):
            raise RefusalError(
                self.field,
                f"the loop calls {name}, of which torch.compile makes one graph (fullgraph=True), and which takes no logits that are "
                "not computed",
                "compile it without fullgraph, or use --accumulate N",
            )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._waiting = Waiting()
        self._has_deferred = False  # in the step under way
        self._in_tiles_before = _in_tiles.count

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        for head in large_heads(workload.model):
            stand_in(head, "forward", _deferring(head, self._deferred), undo)

    def _deferred(self, logits: DeferredLogits) -> None:
        self._waiting.add(logits)
        self._has_deferred = True

    def step_begins(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self._compute_waiting()

    def bucket_coming(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._compute_waiting()  # an update in the backward pass, or after a closure

    def step_ended(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        _expire(self._waiting.taken())
        if self._has_deferred and _in_tiles.count == self._in_tiles_before:
            self.note_once(_NO_EFFECT)
        self._has_deferred, self._in_tiles_before = False, _in_tiles.count

    def _compute_waiting(self) -> None:
        """Compute, before an update, logits that the loop may look at when the weights they came from are gone."""
        for ref in self._waiting.taken():
            if may_be_read([ref]):
                real(ref())
            else:
                _expire([ref])


def _expire(waiting: Sequence[weakref.ref[LazyTensor]]) -> None:
    for ref in waiting:
        if (logits := ref()) is not None:
            logits.expire(_TOO_LATE)


class _InTiles:
    """How many losses were computed in tiles."""

    count = 0


_in_tiles = _InTiles()
_NO_EFFECT = (
    "--chunk-loss had no effect: the loss is no F.cross_entropy of logits [rows, classes] and target numbers [rows] with a mean "
    "or a sum, without class weights and label smoothing; use --accumulate N, which divides the logits as well"
)
_TOO_LATE = (
    "logits of a chunked loss were read after optimizer.step(), when their weights were gone: read them before the step, "
    "or leave --chunk-loss out"
)


def large_heads(model: nn.Module) -> list[nn.Linear]:
    """Linear layers onto a vocabulary that compute their product and nothing else."""
    return [head for head in _large(model) if _is_plain(head)]


def _large(model: nn.Module) -> list[nn.Linear]:
    """Layers onto a vocabulary: the output embeddings, or layers with many more outputs than inputs."""
    find: Any = getattr(model, "get_output_embeddings", None)
    named = find() if find is not None else None
    heads = [named] if isinstance(named, nn.Linear) else _widening_layers(model)
    return [head for head in heads if head.out_features >= _SMALLEST_VOCABULARY]


def _is_plain(head: nn.Linear) -> bool:
    """Return whether neither a head's class nor the user has given it another forward."""
    return type(head).forward is nn.Linear.forward and "forward" not in own_attributes(head)


def _widening_layers(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features > 4 * m.in_features]


def _deferring(head: nn.Linear, made: Callable[[DeferredLogits], None]) -> Callable[[torch.Tensor], Any]:
    original, product = method_of(head, "forward"), type(head).forward

    @functools.wraps(original)
    def deferring(hidden: torch.Tensor) -> Any:
        is_derived = head.training and torch.is_grad_enabled() and not why_as_written()
        is_in_graph = torch.compiler.is_compiling() and makes_one_graph()
        if not is_derived or is_in_graph or type(head).forward is not product:
            return original(hidden)
        logits = DeferredLogits.of(hidden, head)
        made(logits)
        return logits

    return deferring


class DeferredLogits(LazyTensor):
    """Logits that are not computed: `hidden @ weight.T + bias`, seen as another shape and dtype.

    Attributes:
        hidden: input of the head, [..., d].
        head: the head's weight [v, d], its bias [v] or None, as they were in this forward.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    compute_dtype: torch.dtype | None

    @classmethod
    def of(cls, hidden: torch.Tensor, head: nn.Linear) -> DeferredLogits:
        device_type = hidden.device.type
        autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        return cls.make(hidden, head.weight, head.bias, autocast, autocast or hidden.dtype)

    @classmethod
    def make(
        cls,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        compute_dtype: torch.dtype | None,
        dtype: torch.dtype,
    ) -> DeferredLogits:
        shape = (*hidden.shape[:-1], weight.shape[0])
        deferred: DeferredLogits = with_graph(
            lambda: cls(shape, dtype, hidden.device, lambda: _logits(hidden, weight, bias, compute_dtype).to(dtype)),
            (hidden, weight, bias),
            functools.partial(_gradients, hidden, weight, bias, compute_dtype),
        )
        deferred.hidden, deferred.weight, deferred.bias, deferred.compute_dtype = hidden, weight, bias, compute_dtype
        return deferred

    def with_hidden(self, hidden: torch.Tensor) -> DeferredLogits:
        return DeferredLogits.make(hidden, self.weight, self.bias, self.compute_dtype, self.dtype)

    def with_dtype(self, dtype: torch.dtype) -> DeferredLogits:
        return DeferredLogits.make(self.hidden, self.weight, self.bias, self.compute_dtype, dtype)

    def with_gradient(self, pass_through: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
        # each gradient is linear in that of the logits, so the change may be made on the far side
        bias = None if self.bias is None else pass_through(self.bias)
        made = DeferredLogits.make(
            pass_through(self.hidden), pass_through(self.weight), bias, self.compute_dtype, self.dtype
        )
        return made.follow(self, pass_through)

    @property
    def is_deferred(self) -> bool:
        """Return whether nobody has looked, at what it is a view of neither, and the weights are those of the forward."""
        return self._compute is not None and (self._origin is None or cast("DeferredLogits", self._origin).is_deferred)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func := handed_over(func))
        if handler is not None and args and isinstance(args[0], DeferredLogits) and args[0].is_deferred:
            result = handler(*args, **(kwargs or {}))
            if isinstance(result, DeferredLogits) and result is not args[0]:
                others = args[1:]  # a view that held `args` would hold the logits twice, see `may_be_read`
                return result.follow(args[0], lambda logits: func(logits, *others, **(kwargs or {})))
            if result is not NotImplemented:
                return result
        return super().__torch_function__(func, types, args, kwargs)


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, compute_dtype: torch.dtype | None
) -> torch.Tensor:
    if compute_dtype is not None:
        hidden, weight, bias = hidden.to(compute_dtype), weight.to(compute_dtype), _cast(bias, compute_dtype)
    return F.linear(hidden, weight, bias)


def _gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    compute_dtype: torch.dtype | None,
    gradient: torch.Tensor,
) -> list[torch.Tensor | None]:
    """Gradients from that of the logits, which are computed once more."""
    with torch.enable_grad():
        logits = _logits(hidden, weight, bias, compute_dtype)
    return _derived(logits, gradient.to(logits.dtype), hidden, weight, bias)


def _derived(output: torch.Tensor, gradient: torch.Tensor, *sources: torch.Tensor | None) -> list[torch.Tensor | None]:
    trained = [tensor for tensor in sources if tensor is not None and tensor.requires_grad]
    made = torch.autograd.grad(output, trained, gradient, create_graph=torch.is_grad_enabled())
    by_id = dict(zip(map(id, trained), made, strict=True))
    return [by_id.get(id(tensor)) for tensor in sources]


def _cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)


# -- operations that keep logits deferred -------------------------------------------------------


def _reshaped(logits: DeferredLogits, *shape: Any) -> Any:
    sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape)
    vocabulary = logits.weight.shape[0]
    if not sizes or any(not isinstance(size, int) for size in sizes) or sizes[-1] not in (vocabulary, -1):
        return NotImplemented
    if sizes[-1] == -1 and math.prod(sizes[:-1]) * vocabulary != logits.numel():
        return NotImplemented
    return logits.with_hidden(logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1]))


def _flattened(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim not in (logits.dim() - 2, -2):
        return NotImplemented
    return logits.with_hidden(logits.hidden.flatten(start_dim, logits.dim() - 2))


def _indexed(logits: DeferredLogits, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    leading = [item for item in items if item is not Ellipsis]
    if any(not isinstance(item, slice) for item in leading):
        return NotImplemented
    reaches_vocabulary = len(leading) >= logits.dim() or (Ellipsis in items and items[-1] is not Ellipsis)
    if reaches_vocabulary and leading[-1] != slice(None):
        return NotImplemented
    return logits.with_hidden(logits.hidden[index])


def _to_float(logits: DeferredLogits, *_args: Any, **_kwargs: Any) -> Any:
    return logits.with_dtype(torch.float32)


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    target = kwargs.get("dtype", kwargs.get("device", args[0] if len(args) == 1 else None))
    if isinstance(target, torch.dtype) and len(args) + len(kwargs) == 1:
        return logits.with_dtype(target)
    if (
        len(args) + len(kwargs) == 1
        and isinstance(target, (str, torch.device))
        and torch.device(target) == logits.device
    ):
        return logits
    return NotImplemented


def _unchanged(logits: DeferredLogits, *_args: Any, **_kwargs: Any) -> Any:
    return logits.with_hidden(logits.hidden)


@never_compile  # sizes of tiles are numbers, where torch.compile was told that they differ (`mark_dynamic`)
def _cross_entropy(
    logits: DeferredLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if (
        not plain
        or reduction not in ("mean", "sum")
        or logits.dim() != 2
        or target.dim() != 1
        or target.is_floating_point()
    ):
        return NotImplemented
    _in_tiles.count += 1
    total = _TiledCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.hidden, logits.weight, logits.bias, target, ignore_index, logits.compute_dtype
    )
    if reduction == "sum":
        return total
    return total / (target != ignore_index).sum()


_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.view: _reshaped,
    torch.Tensor.reshape: _reshaped,
    torch.reshape: _reshaped,
    torch.Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    torch.Tensor.__getitem__: _indexed,
    torch.Tensor.float: _to_float,
    torch.Tensor.to: _to,
    torch.Tensor.contiguous: _unchanged,
    F.cross_entropy: _cross_entropy,
}


class _TiledCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies over rows, with gradients made in the same pass, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # [n, d]
        weight: torch.Tensor,  # [v, d]
        bias: torch.Tensor | None,  # [v]
        target: torch.Tensor,  # [n]
        ignore_index: int,
        compute_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if bias is not None and needs_bias else None
        dtype = compute_dtype or hidden.dtype
        low_weight, low_bias = weight.to(dtype), _cast(bias, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        rows = _tile_rows(hidden.shape[0], weight.shape[0])
        with autocast_as_before(), torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], rows):
                tile = slice(start, start + rows)
                low_hidden = hidden[tile].to(dtype)
                logits = F.linear(low_hidden, low_weight, low_bias).to(wide)  # [rows, v]
                loss, grad_logits = _tile_loss(logits, target[tile], ignore_index)
                total += loss
                low_grad = grad_logits.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[tile] = low_grad @ low_weight
                if grad_weight is not None:
                    _add_product(grad_weight, low_grad, low_hidden)
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(0).to(grad_bias.dtype)
        ctx.made = grad_hidden, grad_weight, grad_bias
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.others = ignore_index, compute_dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, target = ctx.saved_tensors  # torch refuses a second pass without a graph to keep
        if torch.is_grad_enabled():  # as autograd has it under create_graph
            ignore_index, compute_dtype = ctx.others
            made = _differentiable(hidden, weight, bias, target, ignore_index, compute_dtype, gradients[0])
            return (*made, None, None, None)
        scale = gradients[0]
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return (*(None if grad is None else grad * scale.to(grad.dtype) for grad in ctx.made), None, None, None)
        # in place: a second copy of the head's gradient would stand at the peak of the step
        made, ctx.made = ctx.made, ()
        return (*(None if grad is None else grad.mul_(scale.to(grad.dtype)) for grad in made), None, None, None)


def _differentiable(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    compute_dtype: torch.dtype | None,
    scale: torch.Tensor,
) -> list[torch.Tensor | None]:
    """Gradients with a graph, of logits that are whole."""
    logits = _logits(hidden, weight, bias, compute_dtype)
    total = F.cross_entropy(logits.to(scale.dtype), target, ignore_index=ignore_index, reduction="sum")
    return _derived(total, scale, hidden, weight, bias)


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
