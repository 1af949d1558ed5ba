"""Buckets of parameters that are updated one after another, and how large they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from memlab.runtime.mechanisms import Bringing, Visiting, brought
from memlab.runtime.ownership import parameters_in
from memlab.runtime.state_entries import Optimizer, Parameter

LEAST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 64 * 2**20
_SHARES = 32
_ADAM_BYTES_PER_ELEMENT = 8  # two fp32 moments
_SEPARABLE_PACKAGES = ("torch.optim.", "bitsandbytes.optim.", "transformers.optimization")


def with_gradient(optimizer: Optimizer) -> Iterator[Parameter]:
    """Yield the parameters of an optimizer that have a gradient, in order."""
    return (parameter for parameter in parameters_in(optimizer) if parameter.grad is not None)


def group_of(optimizer: Optimizer, parameter: Parameter) -> dict[str, Any]:
    """Return the group of a parameter; the defaults where it is in none."""
    groups = optimizer.param_groups
    return next((group for group in groups if any(own is parameter for own in group["params"])), optimizer.defaults)


def counts_on_device(group: Mapping[str, Any]) -> bool:
    """Return whether kernels of a group's updates want the count of steps beside the moments, and not on the host."""
    return bool(group.get("capturable") or group.get("fused"))


def buckets(optimizer: Optimizer, bucket_bytes: int) -> Iterator[list[Parameter]]:
    """Parameters with a gradient, in order, grouped up to so many bytes of fp32 moments."""
    bucket: list[Parameter] = []
    filled = 0
    separable = is_separable(optimizer)
    for parameter in with_gradient(optimizer):
        size_bytes = size_of(parameter)
        if bucket and separable and filled + size_bytes > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(parameter)
        filled += size_bytes
    if bucket:
        yield bucket


def bucket_bytes_for(optimizer: Optimizer, techniques: Sequence[Bringing] = ()) -> int:
    """A size for buckets whose copies do not show beside a small model, and that are few beside a large one.

    Args:
        optimizer: whose parameters are updated.
        techniques: those in force; where parameters come for an update, what visits is kept smaller still.

    Example:
        >>> bucket_bytes_for(torch.optim.SGD([torch.nn.Parameter(torch.ones(64))], lr=0.5))
        1048576
    """
    return max(1 if brought(techniques, Visiting) else LEAST_BUCKET_BYTES, share_of(optimizer))


def share_of(optimizer: Optimizer) -> int:
    """A size for buckets by which gradients are freed as they are used: small beside the model, and enough to do.

    Returns:
        Bytes, counted as those of a bucket: a thirty-second of all parameters', at most `BUCKET_BYTES`.

    Example:
        >>> share_of(torch.optim.SGD([torch.nn.Parameter(torch.ones(64))], lr=0.5))
        16
    """
    elements: int = sum(parameter.numel() for parameter in parameters_in(optimizer))
    return min(BUCKET_BYTES, _ADAM_BYTES_PER_ELEMENT * elements // _SHARES)


def size_of(parameter: Parameter) -> int:
    """Bytes of a parameter as buckets count them: two fp32 moments."""
    elements: int = parameter.numel()
    return _ADAM_BYTES_PER_ELEMENT * elements


def is_separable(optimizer: Optimizer) -> bool:
    """Return whether the update of each parameter is known to be independent of all others."""
    kind = type(optimizer)
    return f"{kind.__module__}.".startswith(_SEPARABLE_PACKAGES) and not isinstance(optimizer, torch.optim.LBFGS)
