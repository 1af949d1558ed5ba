"""Tensors that live off the device: in host memory beside a GPU, or in a file beside the CPU.

A spilled tensor stays an ordinary tensor with the same shape, dtype and layout, so optimizer state that
holds one can still be read, saved and compared at any time. A fake tensor (of a prediction) is
spilled to a fake one, which takes up nothing anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from memlab.errors import RefusalError
from memlab.plan import Offloaded, Plan, Tier
from memlab.runtime.accelerator import is_accelerator, name_of, shares_host_memory, takes_other_data
from memlab.runtime.host_memory import pinned
from memlab.runtime.lifetimes import Departures, WhileAlive
from memlab.runtime.state_layers import SMALL_ELEMENTS
from memlab.runtime.touch import own_class
from memlab.runtime.workload import Workload
from memlab.techniques.base import Technique
from memlab.techniques.offload.pool import Pool, file_slab
from memlab.techniques.offload.transfers import settle

# other classes keep their data elsewhere, or see to it themselves
PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
spilled_storages: WhileAlive[bool] = WhileAlive()
_spilling = False


def is_spilled(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage is kept elsewhere by a `Spill`, so that it takes no memory of the device."""
    return _spilling or spilled_storages.of(storage) is not None


@contextmanager
def births_are_spilled() -> Iterator[None]:
    """Context in which what is born is not counted: a ledger sees a storage at its birth, before it could be registered."""
    global _spilling
    _spilling = True
    try:
        yield
    finally:
        _spilling = False


def resolve_tier(tier: Tier, device: torch.device, what: str) -> Tier:
    """Pick the tier for a device: host memory beside a GPU, a file beside the CPU and where a GPU shares its memory.

    Raises:
        RefusalError: host memory was asked for where it is the device's, and saves nothing.
    """
    if tier is Tier.AUTO:
        return Tier.DISK if shares_host_memory(device) else Tier.HOST
    if tier is Tier.HOST and shares_host_memory(device):
        raise RefusalError(
            "offload",
            f"{what} to host: the model is on {_word(device)}, whose memory is the host's",
            f"use --offload {what}:disk (the default there)",
        )
    return tier


def _word(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else name_of(device)


def check_parameters_move(workload: Workload, field: str, nearest: str, what: str = "") -> None:
    """Raise `RefusalError` where torch leaves parameters where they are."""
    if workload.has_values and not takes_other_data(workload.device):
        reason = f"{what}torch lets no parameter on {name_of(workload.device)} have its values elsewhere"
        raise RefusalError(field, reason, nearest)


class Offload(Technique):
    """Base of the techniques that keep something off the device: the setting says where it goes."""

    field = "offload"
    what: ClassVar[Offloaded]

    @classmethod
    def wanted(cls, plan: Plan) -> bool:
        return plan.tier_of(cls.what) is not None

    @classmethod
    def setting(cls, plan: Plan) -> Any:
        return plan.tier_of(cls.what)

    def _tier(self, device: torch.device) -> Tier:
        """Return where it goes from a device. Raises `RefusalError`: to nowhere that saves anything."""
        return resolve_tier(self.plan.tier_of(self.what) or Tier.AUTO, device, self.what)

    def _check_parameters_move(self, workload: Workload) -> None:
        check_parameters_move(workload, self.field, "use --offload optimizer,activations", f"{self.what}: ")


class Spill:
    """A place off the device for tensors, emptied with its owner.

    On disk, tensors lie in a pool of regions of unlinked temporary files: nothing outlives the process, and a
    tensor takes the place of one that is gone.

    Args:
        tier: HOST (pinned when there is a GPU and the system allows it) or DISK; AUTO for whichever is off the device of each tensor.
        pooled: take host memory from a pool as well. Its regions are used again at once, so whoever asks for that
            copies to and from them in the streams of `memlab.techniques.offload.transfers` and nowhere else.
        say: told in a line where host memory is not pinned.

    Example:
        >>> spill = Spill(Tier.DISK)
        >>> kept = spill.store(torch.arange(4))
        >>> kept.tolist(), spill.stored_bytes, is_spilled(kept.untyped_storage())
        ([0, 1, 2, 3], 32, True)
        >>> del kept
        >>> spill.stored_bytes, spill.peak_bytes
        (0, 32)
    """

    def __init__(
        self, tier: Tier = Tier.AUTO, *, pooled: bool = False, say: Callable[[str], None] = lambda _line: None
    ) -> None:
        self.tier = tier
        self._stored_bytes = 0
        self.peak_bytes = 0  # most bytes held at once
        self._gone: Departures[int] = Departures()  # bytes of tensors that have
        self._files = Pool(file_slab)
        self._say = say
        self._pinned = Pool(lambda size_bytes: pinned(size_bytes, say).numpy().data, settle) if pooled else None

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tensors held now."""
        self._stored_bytes -= sum(self._gone.new())
        return self._stored_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the pools, what is free in them included."""
        return self._files.held_bytes + (self._pinned.held_bytes if self._pinned else 0)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A spilled tensor with the shape, dtype and layout of another one, not filled yet; contiguous where that one has gaps."""
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        size_bytes = tensor.numel() * tensor.element_size()
        shape = tensor.shape
        strides = tensor.stride() if is_dense(tensor) else [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        if isinstance(tensor, FakeTensor):
            with births_are_spilled():
                spilled = tensor.new_empty_strided(shape, strides)
        elif self.tier is Tier.DISK or (self.tier is Tier.AUTO and shares_host_memory(tensor.device)):
            spilled = _shaped(self._files.take(size_bytes), tensor, strides)
        elif self._pinned is not None and is_accelerator(tensor.device):
            spilled = _shaped(self._pinned.take(size_bytes), tensor, strides)
        elif is_accelerator(tensor.device):
            spilled = _shaped(pinned(size_bytes, self._say), tensor, strides)
        else:
            with births_are_spilled():  # a mask that a twin's model makes from nothing is no fake
                spilled = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="cpu")
        self._keep_count(spilled.untyped_storage(), size_bytes)
        return spilled

    def store(self, tensor: torch.Tensor) -> torch.Tensor:
        """A spilled copy of a tensor; of one that consists of others (codes and scales), one of the same class made of copies."""
        if consists_of_others(tensor):
            return made_anew(tensor, self.store)
        if tensor.layout is not torch.strided:  # indices and values, in no one storage
            with births_are_spilled():
                return tensor.detach().to("cpu", copy=True)
        spilled = self.empty_like(tensor)
        spilled.copy_(tensor.detach())
        return spilled

    def _keep_count(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        spilled_storages.keep(storage, True)
        self._stored_bytes += size_bytes
        self._gone.watch(storage, size_bytes)
        self.peak_bytes = max(self.peak_bytes, self.stored_bytes)


def _shaped(region: torch.Tensor, tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    # no view: loops detach gradients in place before they zero them
    return region.view(tensor.dtype).as_strided(tensor.shape, strides).detach()


def consists_of_others(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a class of its own has no values itself, and says of which tensors it consists."""
    return own_class(tensor) not in PLAIN and is_traceable_wrapper_subclass(tensor)


def made_anew(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a tensor that consists of others, made of what a function returns for each of these."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {}
    for name in names:
        part = getattr(tensor, name)
        parts[name] = made_anew(part, change) if consists_of_others(part) else change(part)
    made: torch.Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())  # type: ignore[attr-defined]
    return made


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie side by side, in whatever order.

    Example:
        >>> matrix = torch.ones(2, 3)
        >>> is_dense(matrix.t()), is_dense(matrix[:, :2]), is_dense(matrix[:1].expand(2, 3))
        (True, False, False)
    """
    if tensor.layout is not torch.strided:
        return False
    elements = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != elements:
            return False
        elements *= size
    return True


class ParkedStates:
    """Optimizer state of parameters as it was, off the device, until an update has made it stale.

    Example:
        >>> parked, weight = ParkedStates(), torch.nn.Parameter(torch.zeros(100, 100))
        >>> parked.park(weight, {"step": 3, "exp_avg": torch.ones(100, 100)})
        >>> parked.stored_bytes, parked.of(weight)["exp_avg"].sum().item(), parked.of(torch.zeros(1))
        (40000, 10000.0, None)
    """

    def __init__(self) -> None:
        self._spill = Spill()
        self._states: MutableMapping[torch.Tensor, dict[str, Any]] = WeakTensorKeyDictionary()

    @property
    def stored_bytes(self) -> int:
        """Bytes that are off the device."""
        return self._spill.stored_bytes

    def __bool__(self) -> bool:
        return bool(self._states)

    def park(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Keep a copy of the state of a parameter."""
        self._states[parameter] = {name: self._copy(value) for name, value in state.items()}

    def of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """Return what was kept of a parameter, on its device; None for nothing."""
        kept = self._states.get(parameter)
        return None if kept is None else {name: _back(parameter, value) for name, value in kept.items()}

    def is_of_step(self, parameter: torch.Tensor, step: Any) -> bool:
        """Return whether something was kept of a parameter after so many updates."""
        kept = self._states.get(parameter)
        return kept is not None and int(kept["step"]) == step

    def drop_updated(self, steps: Callable[[torch.Tensor], Any]) -> None:
        """Drop what was kept of parameters that have been updated since; `steps` gives how often they were."""
        for parameter in [each for each in self._states if not self.is_of_step(each, steps(each))]:
            del self._states[parameter]

    def drop(self, parameter: torch.Tensor) -> None:
        """Drop what was kept of a parameter, if anything was."""
        self._states.pop(parameter, None)

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.clone() if value.numel() < SMALL_ELEMENTS else self._spill.store(value)


def _back(parameter: torch.Tensor, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.numel() < SMALL_ELEMENTS else value.to(parameter.device, copy=True)
