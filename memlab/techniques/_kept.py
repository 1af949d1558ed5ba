"""What a block's forward keeps for its backward pass, and what it would cost to run it again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from memlab.dispatch import WatchingMode, defers
from memlab.techniques._aliases import RandomState

# Arithmetic that a device does in the time in which it moves a byte: tens on CPUs and on GPUs in fp32, a few hundred
# on GPUs in 16 bits. One number for all, so that a choice foretold on one machine is the one made on another.
_OPERATIONS_PER_BYTE = 50


@dataclass(frozen=True)
class Kept:
    """One run of a block.

    Args:
        own_bytes: what its graph keeps, in distinct storages, beside parameters, its inputs and its output: what
            recomputing the block frees.
        cost: of running it again, in operations.
        inputs: sizes of the storages that came in, by identity; they stay either way.
    """

    own_bytes: int
    cost: float
    inputs: Mapping[int, int]


def kept_by(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[Any, Kept]:
    """Run a block's forward with gradients for the sake of what its graph keeps; random state comes back.

    Args:
        call: its forward.
        args: of the call.
        kwargs: of the call.
        device: whose random state comes back, beside that of the CPU.

    Returns:
        The output, to be dropped, and what is kept for as long as it lives.
    """
    inputs = _storages(tree_leaves((args, dict(kwargs))))
    before, run = RandomState(device), _Run()
    with run:
        output = call(*args, **kwargs)
    before.restore()
    passed_on = {*inputs, *_storages(tree_leaves(output))}
    own_bytes = sum(size_bytes for key, size_bytes in run.living().items() if key not in passed_on)
    return output, Kept(own_bytes, run.cost, {key: storage.nbytes() for key, storage in inputs.items()})


def _storages(values: Iterable[Any]) -> dict[int, torch.UntypedStorage]:
    """Storages of the tensors among some values, by identity for as long as they are held."""
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.layout is torch.strided)
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages}


class _Run(WatchingMode):  # type: ignore[no-untyped-call]
    """What operators make, and what they cost: products by torch's own formulas, and bytes that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = 0.0
        # a storage's Python object lives as long as the storage does
        self._born: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def living(self) -> dict[int, int]:
        """Sizes of the storages made in this run that still live, by identity."""
        found = {key: ref() for key, ref in self._born.items()}
        return {key: storage.nbytes() for key, storage in found.items() if storage is not None}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if defers(types):
            return NotImplemented
        options = dict(kwargs or {})
        result = func(*args, **options)
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            self.cost += formula(*args, **options, out_val=result)
        before = _storages(tree_leaves((args, options)))
        for key, storage in _storages(tree_leaves(result)).items():
            if key not in before:
                self._born[key] = weakref.ref(storage)
                self.cost += _OPERATIONS_PER_BYTE * storage.nbytes()
        return result
