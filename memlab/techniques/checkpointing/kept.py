"""Measurement of what a block's forward keeps for its backward pass, and what running it again would cost."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from memlab.runtime.dispatch import WatchingMode
from memlab.runtime.rng import RandomState

# Arithmetic that a device does in the time in which it moves a byte: tens on CPUs and on GPUs in fp32, a few hundred
# on GPUs in 16 bits. One number for all, so that a choice predicted on one machine is the one made on another.
_OPERATIONS_PER_BYTE = 50


@dataclass(frozen=True)
class Kept:
    """One run of a block."""

    # what its graph keeps, in distinct storages, beside parameters, its inputs and its output: what recomputing the
    # block frees
    own_bytes: int
    cost: float  # of running it again, in operations
    inputs: Mapping[int, int]  # sizes of the storages that came in, by identity; they stay either way


def kept_by(call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Kept]:
    """Run a block's forward with gradients for the sake of what its graph keeps; random state comes back.

    Returns:
        The output, to be dropped, and what is kept for as long as it lives.
    """
    inputs = storages(tree_leaves((args, dict(kwargs))))
    before, run = RandomState(), _Run()
    with run:
        output = call(*args, **kwargs)
    before.restore()
    passed_on = {*inputs, *storages(tree_leaves(output))}
    own_bytes = sum(size_bytes for key, size_bytes in run.living().items() if key not in passed_on)
    return output, Kept(own_bytes, run.cost, {key: storage.nbytes() for key, storage in inputs.items()})


def storages(values: Iterable[Any]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of the tensors among some values, by identity for as long as they are held."""
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.layout is torch.strided)
    # within a transform of torch.func they have none
    storages = (each.untyped_storage() for each in tensors if not torch._C._functorch.is_functorch_wrapped_tensor(each))
    return {storage._cdata: storage for storage in storages}


class _Run(WatchingMode):
    """Outputs of operators and their cost: products by torch's own formulas, and bytes that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = 0.0
        # a storage's Python object lives as long as the storage does
        self._born: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def living(self) -> dict[int, int]:
        """Sizes of the storages made in this run that still live, by identity."""
        found = {key: ref() for key, ref in self._born.items()}
        return {key: storage.nbytes() for key, storage in found.items() if storage is not None}

    def watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        made, cost = made_by(func, args, kwargs, result)
        self._born |= {key: weakref.ref(storage) for key, storage in made.items()}
        self.cost += cost
        return result


def made_by(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> tuple[dict[int, torch.UntypedStorage], float]:
    """Return the storages that an operator has made, by identity, and its operations: products by torch's own formulas, and the bytes it writes."""
    before = storages(tree_leaves((args, kwargs)))
    made = {key: storage for key, storage in storages(tree_leaves(result)).items() if key not in before}
    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    operations = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))
    return made, operations + _OPERATIONS_PER_BYTE * sum(storage.nbytes() for storage in made.values())
