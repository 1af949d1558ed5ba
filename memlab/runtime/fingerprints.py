"""Sums and norms of what a run gives, by which a second run of the same is recognised without keeping anything.

A second run in the backward pass gives something else where the forward reads what the loop has changed since: a global, an
attribute of a class, what a `with` block or a patch had set. Its gradients would be those of another forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab.errors import RefusalError

_SAMPLE = 2**10  # numbers that are looked at of a large tensor
# what rounding may change where sums have no fixed order, relative to the norm
_TOLERANCES = {
    dtype: min(2.0**10 * torch.finfo(dtype).eps, 0.02)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
}
# a GPU may choose another kernel where memory is short, with TF32 or without
_OF_TF32 = 5e-3
_ALWAYS = 4
_PLAIN = (torch.Tensor, torch.nn.Parameter)
CHANGED = "something that it reads was changed in between, as by a with block or a patch around the call"


def is_due(number: int) -> bool:
    """Return whether the run of this number is compared on a GPU: the first four, and each that is a power of two.

    Comparing has the host wait there, so not every run is.
    """
    return number <= _ALWAYS or number & (number - 1) == 0


@dataclass
class Fingerprint:
    """Values of a tensor in two numbers: its sum and its norm."""

    _numbers: list[float] | torch.Tensor  # on a GPU until they are asked for: reading them has the host wait
    tolerance: float  # relative to the norm
    is_number: bool

    @classmethod
    def of(cls, value: Any, number: int = 1) -> Fingerprint | None:
        """Return that of a tensor of numbers with a fraction, None for anything else; on a GPU not every run is compared."""
        if type(value) not in _PLAIN or (tolerance := _TOLERANCES.get(value.dtype)) is None:
            return None
        if value.layout is not torch.strided or value.is_meta or not value.numel():
            return None
        if not value.is_cpu:
            if not is_due(number):
                return None
            if value.dtype in (torch.float32, torch.complex64):
                tolerance = _OF_TF32
        # neither counted nor changed by anybody's modes
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            values = value.detach()
            if values.is_complex():
                values = torch.view_as_real(values.resolve_conj())
            if values.numel() > _SAMPLE:
                values = _sample(values)
            wide = torch.float64 if values.dtype is torch.float64 else torch.float32
            total, norm = values.sum(dtype=wide), torch.linalg.vector_norm(values, dtype=wide)
            numbers = [total.item(), norm.item()] if value.is_cpu else torch.stack([total, norm])
        return cls(numbers, tolerance, value.numel() == 1)

    @property
    def numbers(self) -> list[float]:
        """Return the two."""
        if isinstance(self._numbers, torch.Tensor):
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                self._numbers = self._numbers.tolist()
        return self._numbers

    def is_like(self, other: Fingerprint | None, tolerance: float = 0.0) -> bool:
        """Return whether two runs have given the same, but for rounding and a tolerance relative to the norm."""
        if other is None:
            return True
        # the mean of what cancels out is far smaller than what was rounded
        size = max(self.numbers[1], other.numbers[1], 1.0 if self.is_number else 0.0)
        allowed = max(self.tolerance, other.tolerance, tolerance) * size
        pairs = zip(self.numbers, other.numbers, strict=True)
        return all(a == b or abs(a - b) <= allowed or (a != a and b != b) for a, b in pairs)


def _sample(values: torch.Tensor) -> torch.Tensor:
    """Return some of many values; an odd step does not fall on one feature alone."""
    step = values.numel() // _SAMPLE | 1
    if values.is_contiguous():
        return values.view(-1)[::step]
    # the same ones: a second run may have joined them in another layout; what is kept on a GPU would count in its peak
    places = _places if values.is_cpu else _places.__wrapped__
    return values[places(values.shape, step, values.device)]


@functools.lru_cache(maxsize=128)  # finding them takes three times as long as reading there
def _places(shape: torch.Size, step: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return torch.unravel_index(torch.arange(0, shape.numel(), step, device=device), shape)


def fingerprints(values: Mapping[Any, Any], number: int = 1) -> dict[Any, Fingerprint]:
    """Return those of the tensors among some values that the run of this number has given."""
    return {key: found for key, value in values.items() if (found := Fingerprint.of(value, number)) is not None}


def are_others(gave: Mapping[Any, Fingerprint], gives: Mapping[Any, Any], tolerance: float = 0.0) -> bool:
    """Return whether a second run gives other values than the fingerprints of the first say, beyond a tolerance."""
    return any(not found.is_like(Fingerprint.of(gives[key]), tolerance) for key, found in gave.items())


def other_results(field: str, name: str, instead: str = "use --offload activations") -> RefusalError:
    """Return the refusal of a part, named for people, that this field of the plan has run again."""
    return RefusalError(
        field,
        f"{name} computed something else when it ran again in the backward pass: {CHANGED}",
        f"leave the change until after backward(), or {instead}",
    )


class Saved:
    """Facts of a tensor that a part saves: torch compares those of its first run with those when it runs again.

    Values are compared where a gradient passes: what has none may be statistics, which are updated once.

    Raises:
        RefusalError: on comparing, the second run has saved something else.
    """

    def __init__(self, tensor: torch.Tensor, number: int, field: str, name: str) -> None:
        self._form = _form_of(tensor)
        self._holds = Fingerprint.of(tensor, number) if tensor.requires_grad else None
        if self._holds is not None:
            _ = self._holds.numbers  # kept on a GPU, those of all tensors would count in the peak
        self._field, self._name = field, name

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Saved):  # by a backward pass within a first run
            form, holds = other._form, other._holds
        elif isinstance(other, torch.Tensor):
            form, holds = _form_of(other), None if self._holds is None else Fingerprint.of(other)
        else:
            return NotImplemented
        if form != self._form or (self._holds is not None and not self._holds.is_like(holds)):
            raise other_results(self._field, self._name)
        return True

    __hash__ = None  # type: ignore[assignment]


def _form_of(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
