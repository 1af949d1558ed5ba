"""Activations off the device between forward and backward.

Every tensor autograd saves is copied to host memory (beside a GPU) or to a file (beside the CPU),
and copied back when the backward pass reads it. Not moved: parameters and buffers, which stay on
the device anyway, and tensors too small to be worth the trip. Tensors that share a storage are
stored once.

Source: `torch.autograd.graph.saved_tensors_hooks`, https://docs.pytorch.org/docs/stable/autograd.html
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.plan import Offloaded, Plan
from memlab.techniques.base import ModelCall, Technique
from memlab.techniques.spill import Spill, resolve_tier
from memlab.workload import Workload

_SMALLEST_BYTES = 1024
# wrapper subclasses keep their data elsewhere
_MOVABLE = (torch.Tensor, FakeTensor)


@dataclass(frozen=True)
class _Parked:
    """A saved tensor off the device: its bytes, and how to see them as the tensor again."""

    stored: torch.Tensor
    device: torch.device
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int

    def bring_back(self) -> torch.Tensor:
        storage = self.stored.to(self.device, copy=True, non_blocking=True)  # [storage bytes], uint8
        return storage.view(self.dtype).as_strided(self.size, self.stride, self.storage_offset)


class OffloadActivations(Technique):
    """Keep saved activations in host memory or in a file until the backward pass needs them."""

    field = "offload"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._model: nn.Module | None = None
        self._spill: Spill | None = None

    @classmethod
    def wanted(cls, plan: Plan) -> bool:
        return plan.tier_of(Offloaded.ACTIVATIONS) is not None

    @classmethod
    def setting(cls, plan: Plan) -> Any:
        return plan.tier_of(Offloaded.ACTIVATIONS)

    def check(self, workload: Workload) -> None:
        self._tier(workload)

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        self._model = workload.model
        self._spill = Spill(self._tier(workload))
        undo.callback(setattr, self, "_model", None)

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert self._model is not None
        staying = {
            tensor.untyped_storage()._cdata
            for tensors in (self._model.parameters(), self._model.buffers())
            for tensor in tensors
        }
        # one table per forward: an address may be used anew by another tensor later
        seen: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], weakref.ref[torch.Tensor]]] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Parked:
            return self._pack(tensor, staying, seen)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return call(*args, **kwargs)

    @property
    def host_bytes(self) -> int:
        return self._spill.peak_bytes if self._spill else 0

    def _tier(self, workload: Workload) -> Any:
        tier = self.plan.tier_of(Offloaded.ACTIVATIONS)
        assert tier is not None
        return resolve_tier(tier, workload.device, Offloaded.ACTIVATIONS)

    def _pack(
        self,
        tensor: torch.Tensor,
        staying: set[int],
        seen: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], weakref.ref[torch.Tensor]]],
    ) -> torch.Tensor | _Parked:
        assert self._spill is not None
        if type(tensor) not in _MOVABLE or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < _SMALLEST_BYTES or storage._cdata in staying:
            return tensor
        # a small view of a large storage is stored alone, contiguous
        whole = storage.nbytes() <= 2 * tensor.numel() * tensor.element_size()
        if not whole:
            return _parked_view(self._spill.store(_bytes_of(tensor.contiguous())), tensor, contiguous=True)
        key = (storage._cdata, tensor._version)
        known = seen.get(key)
        stored = known[1]() if known and known[0]() is not None else None
        if stored is None:
            stored = self._spill.store(_whole_storage(tensor))
            seen[key] = (weakref.ref(storage), weakref.ref(stored))
        return _parked_view(stored, tensor, contiguous=False)


def _whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes behind a tensor, as uint8: [storage bytes]."""
    storage = tensor.untyped_storage()
    if isinstance(tensor, FakeTensor):  # a fake storage fits no other tensor: one of the same size does as well
        return _bytes_of(tensor).as_strided((storage.nbytes(),), (1,), 0)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _parked_view(stored: torch.Tensor, tensor: torch.Tensor, *, contiguous: bool) -> _Parked:
    stride = torch.empty(tensor.shape, device="meta").stride() if contiguous else tensor.stride()
    offset = 0 if contiguous else int(tensor.storage_offset())
    return _Parked(stored, tensor.device, tensor.dtype, tensor.shape, stride, offset)


def _unpack(saved: torch.Tensor | _Parked) -> torch.Tensor:
    return saved.bring_back() if isinstance(saved, _Parked) else saved
