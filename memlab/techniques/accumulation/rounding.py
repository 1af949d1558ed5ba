"""`Rounding`: rounds matrix products otherwise, which tells how much of a gradient is rounding; `in_full`: rounds less.

The same rows give other last digits in batches of other sizes, as libraries cut products into other blocks. Where outputs
have come close to their targets, the gradient is a difference of nearly equal numbers, and these digits are most of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from memlab.runtime.autocast import as_fp32
from memlab.runtime.backward import is_in_backward
from memlab.runtime.dispatch import HALF, MATRIX_PRODUCTS, WatchingMode

# what may come from rounding, in times of what noise of one precision changes
TIMES = 8
# noise of so many precisions switches units whose input is next to zero, as rounding may switch one of a million (T5 on an H100: a
# gradient is a thousandth off)
STRONG = 16
_aten = torch.ops.aten
_PRODUCTS = MATRIX_PRODUCTS | {_aten.linear.default, _aten.convolution.default, _aten.convolution_backward.default}

_BIAS = 2  # place of its gradient among those of a convolution


class Rounding(WatchingMode):
    """Adds noise to each matrix product: some times the precision of values of its size, or of what is added up to it.

    Example:
        >>> one = torch.ones(4, 4)
        >>> with Rounding(torch.device("cpu")):
        ...     product = one @ one
        >>> bool((product == 4).all()), bool(torch.allclose(product, one * 4))
        (False, True)
    """

    def __init__(self, device: torch.device, times: int = 1) -> None:
        super().__init__()
        self._times = times
        self._generator = torch.Generator(device)

    def watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func in _PRODUCTS:
            for place, product in enumerate(result if isinstance(result, tuple) else (result,)):
                if isinstance(product, torch.Tensor) and product.is_floating_point() and product.numel():
                    size = torch.linalg.vector_norm(product) / product.numel() ** 0.5
                    if func is _aten.convolution_backward.default and place == _BIAS:
                        # all places are added one after another, and terms that are alike are rounded alike: with n of them
                        # that was seen to be n / 20 times the precision of the sum of their sizes (oneDNN)
                        places = args[0].numel() / product.numel()
                        size = torch.linalg.vector_norm(args[0], 1) / product.numel() * max(1, places / TIMES**2)
                    self._round(product, size)
        return result

    def _round(self, product: torch.Tensor, size: torch.Tensor) -> None:
        # a part that is computed again in the backward pass (--checkpoint) is to give what it gave
        self._generator.manual_seed(hash(float(size)))
        drawn = torch.randn(product.shape, generator=self._generator, device=product.device, dtype=product.dtype)
        product.add_(drawn.mul_(size * self._times * torch.finfo(product.dtype).eps))


@contextmanager
def in_full() -> Iterator[None]:
    """Compute in fp32 what would be computed in half precision.

    Sums over many rows in half precision can lose most of what they add up, and another part for other numbers of rows.
    """
    with _OneType(), _InFull():
        yield


class _OneType(TorchFunctionMode):
    """Casts what a function is given in half precision beside fp32: some look whether types are one before operators are met."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        writes_or_reads = str(getattr(func, "__name__", "")).endswith("_")  # in place, or an attribute
        if torch.float32 in dtypes and not dtypes.isdisjoint(HALF) and not writes_or_reads:
            args, kwargs = tree_map(as_fp32, (args, kwargs))
        return func(*args, **kwargs)


class _InFull(WatchingMode):
    def watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # gradients of weights in half precision are cast to it by the engine
        is_engines = is_in_backward() and not torch.is_grad_enabled()
        if func is _aten._to_copy.default and kwargs.get("dtype") in HALF and not is_engines:
            kwargs = {**kwargs, "dtype": torch.float32}
        schema = func._schema
        if schema.is_mutable or any(each.alias_info for each in schema.returns):
            return func(*args, **kwargs)
        full_args, full_kwargs = tree_map(as_fp32, (args, kwargs))
        return func(*full_args, **full_kwargs)


def is_switched(difference: float, little: float, much: float) -> bool:
    """Return whether a difference is explained by units that rounding switches: strong noise changes it out of proportion to little noise."""
    return much > 2 * STRONG * little and difference <= 2 * much
