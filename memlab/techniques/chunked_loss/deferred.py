"""`DeferredLogits`: logits that are not computed, and the operations that keep them so or give few numbers for each row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from memlab.runtime.callers import handed_over
from memlab.runtime.dispatch import never_compile
from memlab.runtime.lazy import LazyTensor, with_graph
from memlab.techniques.chunked_loss.tiles import OfRows, derived, logits_of, of_rows, sum_of_cross_entropies

# what is done to logits [n, v], row by row: gives as many numbers
Steps = Callable[[torch.Tensor], torch.Tensor]


def _as_they_are(logits: torch.Tensor) -> torch.Tensor:
    return logits


class DeferredLogits(LazyTensor):
    """Logits that are not computed: `steps(hidden @ weight.T + bias)`, seen as another shape.

    Attributes:
        hidden: input of the head, [..., d].
        weight, bias: of the head, [v, d] and [v] or None, as they were in this forward.
        compute_dtype: of the product; None for that of its factors.
        steps: what was done to the logits since, for each row by itself.
        is_cast: whether that was nothing but casts.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    compute_dtype: torch.dtype | None
    steps: Steps
    is_cast: bool

    @classmethod
    def of(cls, hidden: torch.Tensor, head: nn.Linear) -> DeferredLogits:
        device_type = hidden.device.type
        autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        dtype = autocast or hidden.dtype
        return cls.make(hidden, head.weight, head.bias, autocast, dtype, _as_they_are, is_cast=True)

    @classmethod
    def make(
        cls,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        compute_dtype: torch.dtype | None,
        dtype: torch.dtype,
        steps: Steps,
        *,
        is_cast: bool,
    ) -> DeferredLogits:
        def compute(hidden: Any, weight: Any, bias: Any) -> torch.Tensor:
            return steps(logits_of(hidden, weight, bias, compute_dtype))

        def computed() -> torch.Tensor:
            return compute(hidden, weight, bias)

        def gradients(gradient: torch.Tensor) -> Sequence[torch.Tensor | None]:
            return derived(compute, gradient, hidden, weight, bias)

        shape = (*hidden.shape[:-1], weight.shape[0])
        deferred: DeferredLogits = with_graph(
            lambda: cls(shape, dtype, hidden.device, computed), (hidden, weight, bias), gradients
        )
        deferred.hidden, deferred.weight, deferred.bias, deferred.compute_dtype = hidden, weight, bias, compute_dtype
        deferred.steps, deferred.is_cast = steps, is_cast
        return deferred

    @property
    def holds(self) -> tuple[torch.Tensor, ...]:
        return (*super().holds, self.hidden)

    def with_hidden(self, hidden: torch.Tensor) -> DeferredLogits:
        """The same of other rows."""
        return self._made(hidden, self.weight, self.bias, self.dtype, self.steps, is_cast=self.is_cast)

    def then(self, step: Steps, *, is_cast: bool = False) -> DeferredLogits:
        """The same with one more step."""
        before, here = self.steps, as_here(step, self.device.type)
        return self.with_steps(lambda logits: here(before(logits)), is_cast=is_cast and self.is_cast)

    def with_steps(self, steps: Steps, *, is_cast: bool = False) -> DeferredLogits:
        """The same product with other steps."""
        # no rows: the steps say what they give
        product = self.compute_dtype or self.hidden.dtype
        dtype = steps(torch.empty(0, self.weight.shape[0], dtype=product, device=self.device)).dtype
        return self._made(self.hidden, self.weight, self.bias, dtype, steps, is_cast=is_cast)

    def _made(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        steps: Steps,
        *,
        is_cast: bool,
    ) -> DeferredLogits:
        return DeferredLogits.make(hidden, weight, bias, self.compute_dtype, dtype, steps, is_cast=is_cast)

    def of_rows(self, function: OfRows, *others: torch.Tensor) -> torch.Tensor:
        """What a function of values [n, v], and of tensors that have the same rows, gives for each row."""
        steps, rows = self.steps, self.hidden.shape[:-1]
        flat = [each.reshape(-1, *each.shape[len(rows) :]) for each in others]
        found = of_rows(
            lambda logits, *of_tile: function(steps(logits), *of_tile),
            self.hidden.reshape(-1, self.hidden.shape[-1]), self.weight, self.bias, self.compute_dtype, *flat,
        )  # fmt: skip
        return found.reshape(*rows, *found.shape[1:])

    def is_of_same(self, other: Any) -> bool:
        """Return whether another one has the very same rows of the same head."""
        return (
            isinstance(other, DeferredLogits)
            and other.is_deferred
            and (other.hidden is self.hidden and other.weight is self.weight and other.bias is self.bias)
            and other.compute_dtype is self.compute_dtype
        )

    def with_gradient(self, pass_through: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
        # each gradient is linear in that of the logits, so the change may be made on the far side
        bias = None if self.bias is None else pass_through(self.bias)
        made = self._made(
            pass_through(self.hidden), pass_through(self.weight), bias, self.dtype, self.steps, is_cast=self.is_cast
        )
        return made.follow(self, pass_through)

    def with_rows_placed(self, place: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return self.with_hidden(place(self.hidden)).follow(self, place)

    @property
    def is_deferred(self) -> bool:
        """Return whether nobody has looked, at what it is a view of neither, and the weights are those of the forward."""
        return self._compute is not None and (self._origin is None or cast("DeferredLogits", self._origin).is_deferred)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func := handed_over(func))
        places = 2 if handler is _each else 1
        at = next((n for n, each in enumerate(args[:places]) if isinstance(each, DeferredLogits)), None)
        if handler is None or at is None or not (logits := args[at]).is_deferred:
            return super().__torch_function__(func, types, args, kwargs)
        options = dict(kwargs or {})
        result = _each(func, logits, *args, **options) if handler is _each else handler(*args, **options)
        if result is NotImplemented:
            return super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, DeferredLogits) and result is not logits:
            before, after = args[:at], args[at + 1 :]  # what held `args` would hold the logits twice, see `may_be_read`
            how = as_here(lambda values: func(*before, values, *after, **options), logits.device.type)
            return result.follow(logits, how)
        return result


def as_here(function: Callable[..., torch.Tensor], device_type: str) -> Callable[..., torch.Tensor]:
    """Return a function that runs later under the autocast of now."""
    is_on, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    def later(*args: Any, **options: Any) -> torch.Tensor:
        if not is_on and not torch.is_autocast_enabled(device_type):
            return function(*args, **options)
        with torch.autocast(device_type, dtype=dtype, enabled=is_on, cache_enabled=False):
            return function(*args, **options)

    return later


# -- what keeps logits deferred ------------------------------------------------------------------


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
    """Rows of logits: by slices, numbers, masks and places, none of which reaches the classes."""
    items = index if isinstance(index, tuple) else (index,)
    leading = [item for item in items if item is not Ellipsis]
    if Ellipsis in [item for item in items if not isinstance(item, torch.Tensor)]:
        if any(not isinstance(item, slice) for item in leading):
            return NotImplemented
        reaches_vocabulary = len(leading) >= logits.dim() or items[-1] is not Ellipsis
    else:
        dimensions = sum(map(_dimensions_taken, leading))
        if not all(map(_is_index_of_rows, leading)) or dimensions > logits.dim():
            return NotImplemented
        reaches_vocabulary = dimensions == logits.dim()
    if reaches_vocabulary and not (isinstance(leading[-1], slice) and leading[-1] == slice(None)):
        return NotImplemented
    return logits.with_hidden(logits.hidden[index])


def _is_index_of_rows(item: Any) -> bool:
    is_place = isinstance(item, (slice, int)) and not isinstance(item, bool)
    return is_place or (isinstance(item, torch.Tensor) and not item.is_floating_point() and item.dim() > 0)


def _dimensions_taken(item: Any) -> int:
    return item.dim() if isinstance(item, torch.Tensor) and item.dtype is torch.bool else 1


def _unbound(logits: DeferredLogits, dim: int = 0) -> Any:
    return tuple(logits[row] for row in range(len(logits))) if dim == 0 and logits.dim() > 1 else NotImplemented


def _split(logits: DeferredLogits, split_size: Any, dim: int = 0) -> Any:
    if not isinstance(split_size, int) or split_size < 1 or dim not in range(logits.dim() - 1):
        return NotImplemented
    places = [slice(None)] * dim
    starts = range(0, logits.shape[dim], split_size)
    return tuple(logits[(*places, slice(start, start + split_size))] for start in starts)


def _to_float(logits: DeferredLogits) -> Any:
    return logits.then(torch.Tensor.float, is_cast=True)


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    target = kwargs.get("dtype", kwargs.get("device", args[0] if len(args) == 1 else None))
    if isinstance(target, torch.dtype) and len(args) + len(kwargs) == 1:
        return logits.then(lambda tile: tile.to(target), is_cast=True)
    if (
        len(args) + len(kwargs) == 1
        and isinstance(target, (str, torch.device))
        and torch.device(target) == logits.device
    ):
        return logits
    return NotImplemented


def _unchanged(logits: DeferredLogits, *_args: Any, **_kwargs: Any) -> Any:
    return logits.with_hidden(logits.hidden)


def _each(func: Callable[..., Any], logits: DeferredLogits, *args: Any, **options: Any) -> Any:
    """Numbers for each class, of its own with a number or with another one of the same logits: a temperature, a soft cap."""
    are_known = all(logits.is_of_same(each) or _is_option(each) for each in args)
    if not are_known or not all(map(_is_option, options.values())):
        return NotImplemented
    steps = [each.steps if isinstance(each, DeferredLogits) else None for each in args]
    numbers = [None if isinstance(each, DeferredLogits) else each for each in args]  # no step holds logits
    here = as_here(func, logits.device.type)
    return logits.with_steps(
        lambda raw: here(*(n if of is None else of(raw) for n, of in zip(numbers, steps, strict=True)), **options)
    )


def _normalized(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return what serves a softmax over the classes."""

    def handler(logits: DeferredLogits, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dim not in (-1, logits.dim() - 1) or not all(map(_is_option, (*args, *kwargs.values()))):
            return NotImplemented
        return logits.then(lambda tile: func(tile, -1, *args, **kwargs))

    return handler


def _is_option(value: Any) -> bool:
    is_number = isinstance(value, torch.Tensor) and type(value) is torch.Tensor and value.dim() == 0
    return (is_number and not value.requires_grad) or value is None or isinstance(value, (int, float, str, torch.dtype))


# -- what gives few numbers for each row ---------------------------------------------------------


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
    is_of_classes = not target.is_floating_point()
    is_plain = weight is None and not label_smoothing and is_of_classes and logits.is_cast and reduction != "none"
    is_known = _is_reduction(reduction, size_average, reduce) and _are_constant(target, weight)
    if not is_known or logits.dim() != 2 or target.dim() != (1 if is_of_classes else 2):
        return NotImplemented
    if is_plain:
        total = sum_of_cross_entropies(
            logits.hidden, logits.weight, logits.bias, target, ignore_index, logits.compute_dtype
        )
        return total if reduction == "sum" else total / (target != ignore_index).sum()
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
    losses = logits.of_rows(lambda tile, of_tile: F.cross_entropy(tile, of_tile, weight, **options), target)
    return _reduced(losses, target if is_of_classes else None, weight, ignore_index, reduction)


@never_compile
def _nll_loss(
    values: DeferredLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    is_known = _is_reduction(reduction, size_average, reduce) and _are_constant(target, weight)
    if not is_known or values.dim() != 2 or target.dim() != 1:
        return NotImplemented
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": "none"}
    losses = values.of_rows(lambda tile, of_tile: F.nll_loss(tile, of_tile, weight, **options), target)
    return _reduced(losses, target, weight, ignore_index, reduction)


def _reduced(
    losses: torch.Tensor, target: torch.Tensor | None, weight: torch.Tensor | None, ignore_index: int, reduction: str
) -> torch.Tensor:
    """Return losses of rows as one number, as torch reduces them; None for targets that are probabilities."""
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if target is None:
        return losses.sum() / len(losses)
    counted = target != ignore_index
    if weight is None:
        return losses.sum() / counted.sum()
    return losses.sum() / weight[target.where(counted, 0)].where(counted, 0.0).sum()


@never_compile
def _kl_div(
    values: DeferredLogits,
    target: torch.Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    is_known = _is_reduction(reduction, size_average, reduce, ("mean", "sum", "batchmean"))
    if not is_known or type(target) is not torch.Tensor or target.shape != values.shape or not _are_constant(target):
        return NotImplemented

    def of_tile(tile: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return F.kl_div(tile, of, reduction="none", log_target=log_target).sum(-1)

    total = values.of_rows(of_tile, target).sum()
    return total / {"mean": values.numel(), "batchmean": values.shape[0], "sum": 1}[reduction]


@never_compile
def _gathered(values: DeferredLogits, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> Any:
    is_of_classes = dim in (-1, values.dim() - 1) and not sparse_grad
    if not is_of_classes or index.dim() != values.dim() or index.shape[:-1] != values.shape[:-1]:
        return NotImplemented
    return values.of_rows(lambda tile, of_tile: tile.gather(-1, of_tile), index)


def _taken(values: DeferredLogits, indices: torch.Tensor, dim: int | None = None) -> Any:
    return NotImplemented if dim is None else _gathered(values, dim, indices)


def _over_classes(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return what serves a function that gives one number for each row."""

    @never_compile
    def handler(values: DeferredLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        if not isinstance(dim, int) or dim not in (-1, values.dim() - 1) or not isinstance(keepdim, bool):
            return NotImplemented
        options = {} if dtype is None else {"dtype": dtype}
        return values.of_rows(lambda tile: func(tile, -1, keepdim, **options))

    return handler


def _is_reduction(
    reduction: str, size_average: bool | None, reduce: bool | None, known: Sequence[str] = ("mean", "sum", "none")
) -> bool:
    """Return whether a reduction is served; torch itself says of others what is wrong with them."""
    return (size_average, reduce) == (None, None) and reduction in known


def _are_constant(*tensors: torch.Tensor | None) -> bool:
    return not any(each is not None and (each.requires_grad or isinstance(each, LazyTensor)) for each in tensors)


def _named(names: Iterable[str], *homes: Any) -> list[Any]:
    return [found for home in homes for name in names if (found := getattr(home, name, None)) is not None]


_EACH = (
    *("exp", "log", "neg", "negative", "tanh", "sigmoid", "square", "abs", "div", "divide", "true_divide", "mul", "multiply"),
    *("add", "sub", "subtract", "clamp", "clamp_min", "clamp_max", "pow", "__truediv__", "__mul__", "__rmul__", "__add__"),
    *("__radd__", "__sub__", "__rsub__", "__neg__", "__pow__", "__rtruediv__", "logsigmoid"),
)  # fmt: skip
_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.view: _reshaped,
    torch.Tensor.reshape: _reshaped,
    torch.reshape: _reshaped,
    torch.Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    torch.Tensor.__getitem__: _indexed,
    torch.Tensor.unbind: _unbound,  # so are they gone through one by one
    torch.unbind: _unbound,
    torch.Tensor.split: _split,
    torch.split: _split,
    torch.Tensor.float: _to_float,
    torch.Tensor.to: _to,
    torch.Tensor.contiguous: _unchanged,
    **dict.fromkeys(_named(_EACH, torch.Tensor, torch, F), _each),
    **{f: _normalized(f) for f in _named(("softmax", "log_softmax"), torch.Tensor, torch)},
    F.log_softmax: _normalized(F.log_softmax),
    F.softmax: _normalized(F.softmax),
    **{f: _over_classes(f) for f in _named(("logsumexp", "sum", "mean", "argmax", "amax"), torch.Tensor, torch)},
    **dict.fromkeys(_named(("gather",), torch.Tensor, torch), _gathered),
    **dict.fromkeys(_named(("take_along_dim",), torch.Tensor, torch), _taken),
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    F.kl_div: _kl_div,
}
