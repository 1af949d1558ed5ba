"""The optimizer's update under rescue: the user's own step where there is room, parts that can be undone where not.

Numbered rules of the mechanism:

1. With plainly enough memory for all an update can need (`need_bytes`, `free_bytes`) everything is updated in one go
   by the user's own step, and nothing is copied: foreach and fused kernels are launched as often as ever.
2. Even then an allocation can fail. An operator that runs out of memory is called again after memory was freed, unless
   it may have written already (`Retrying`).
3. Where memory is tight the update goes bucket by bucket. A bucket without room of its own is copied first, off the
   device if need be; then its failure is undone, and it and the rest follow under another plan. The largest comes first, unless
   the update draws random numbers: what is left when no plan has room for it is as before the step.
4. An update without a copy that has written nothing can be begun again. One that has written cannot, and says so:
   `BrokenUpdateError`. What is done is never done twice.
5. Ctrl-C is held back while the user's own step runs, so that it does not leave half an update behind.

Known limitations: operators are repeated as PyTorch sees them, so a kernel of another library that allocates after it
has begun to write is not. Free memory is known on CUDA and on the CPU device with a capacity; on other accelerators every
bucket is copied.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter

from memlab.errors import MemlabError
from memlab.runtime import accelerator, optimizer_step
from memlab.runtime.buckets import with_gradient
from memlab.runtime.dispatch import WatchingMode, defers
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.mechanisms import Updating, brought
from memlab.runtime.out_of_memory import is_out_of_memory, release
from memlab.runtime.state_layers import order_state
from memlab.techniques.base import Technique
from memlab.techniques.offload.spill import Spill

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter
FreeBytes = Callable[[torch.device, int], float | None]

# In sizes of the parameters, as measured for every optimizer of torch's: tests/rescue/test_update.py holds them to it.
_STATE_COPIES = 3  # made by a first update: Adam with amsgrad, RMSprop centered with momentum
_FOREACH_COPIES = 3  # that come and go within a foreach update: Adadelta
_SINGLE_COPIES = 4  # of the largest parameter, when they are updated one by one
_BYTES_PER_ELEMENT = 4  # at least: updates of half-precision parameters compute in fp32
_MARGIN = 1.5  # for what an allocator loses to rounding and splitting
_SMALL_ELEMENTS = 1024
_ATTEMPTS = 3
# they may be broken off in the middle, and begun again
_IDEMPOTENT = frozenset({"aten::_foreach_copy_", "aten::_foreach_zero_", "aten::copy_", "aten::zero_", "aten::fill_"})


@runtime_checkable
class Limited(Protocol):
    """A dispatch mode that gives the CPU a capacity, as a `memlab.measuring.ledger.Ledger` does."""

    capacity_bytes: int | None
    live_bytes: int

    @property
    def watching(self) -> bool:
        """Return whether it refuses anything at present."""


class BrokenUpdateError(MemlabError, torch.OutOfMemoryError):
    """Memory ran out in the middle of an update that cannot be undone.

    Some weights and moments are updated and others not.
    """


# --- room -----------------------------------------------------------------------------------------


def need_bytes(optimizer: Optimizer, parameters: Iterable[Parameter]) -> dict[torch.device, int]:
    """Return what an update of some parameters may allocate at most, with a margin.

    Returns:
        Bytes by device: state that does not exist yet, and what comes and goes.

    Example:
        >>> parameter = torch.nn.Parameter(torch.ones(1000))
        >>> parameter.grad = torch.ones(1000)
        >>> need_bytes(torch.optim.AdamW([parameter], foreach=True), [parameter])
        {device(type='cpu'): 36000}
    """
    chosen = {id(parameter) for parameter in parameters}
    needed: dict[torch.device, float] = defaultdict(float)
    for group in optimizer.param_groups:
        sizes: dict[torch.device, list[int]] = defaultdict(list)
        for parameter in group["params"]:
            if id(parameter) in chosen:
                size = _size_bytes(parameter)
                sizes[parameter.device].append(size)
                created = 0 if optimizer.state.get(parameter) else _STATE_COPIES * size
                needed[parameter.device] += _MARGIN * created
        for device, here in sizes.items():
            needed[device] += _MARGIN * _passing_bytes(group, device, here)
    return {device: int(size) for device, size in needed.items()}


def _passing_bytes(group: Mapping[str, Any], device: torch.device, sizes: Sequence[int]) -> int:
    """Return what an update of one group holds for a while."""
    if group.get("fused"):
        return 0
    foreach = group.get("foreach", False)
    if foreach or (foreach is None and device.type != "cpu"):  # torch's own choice
        return _FOREACH_COPIES * sum(sizes)
    return _SINGLE_COPIES * max(sizes)


def free_bytes(device: torch.device, enough_bytes: int) -> float | None:
    """Return how much of a device allocations can have.

    Returns:
        Bytes; infinity for the CPU without a capacity, None for a device that cannot be asked.

    Example:
        >>> free_bytes(torch.device("cpu"), 1024)
        inf
    """
    limit = _free_under_limits()
    if device.type == "cpu" or limit < float("inf"):
        return limit
    counted = accelerator.counters(device) if accelerator.is_accelerator(device) else None
    return None if counted is None else _free_of(device, counted, enough_bytes)


def _free_under_limits() -> float:
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Limited) and mode.watching]
    limits = [mode.capacity_bytes - mode.live_bytes for mode in modes if mode.capacity_bytes is not None]
    return min(limits, default=float("inf"))


def _free_of(device: torch.device, counted: accelerator.Counters, enough_bytes: int) -> int:
    """Whole segments that the allocator has cached, and what the driver would still give."""
    # pieces between tensors cannot be joined to larger ones, so they do not count
    cached = max(0, counted.reserved - counted.active - counted.inactive_split)
    if cached >= enough_bytes:
        return cached
    return cached + max(0, accelerator.most_bytes(device) - counted.reserved)


def _size_bytes(parameter: Parameter) -> int:
    return parameter.numel() * max(parameter.element_size(), _BYTES_PER_ELEMENT)


# --- copies ---------------------------------------------------------------------------------------


def _off_device(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() < _SMALL_ELEMENTS:
        return optimizer_step.cloned(tensor)
    return Spill().store(tensor)


# --- operators ------------------------------------------------------------------------------------


class Retrying(WatchingMode):
    """Calls an operator that has run out of memory again, after memory was freed.

    Example:
        >>> attempts = []
        >>> class Full(WatchingMode):
        ...     def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        ...         if not attempts:
        ...             raise torch.OutOfMemoryError
        ...         return func(*args, **kwargs or {})
        >>> with Full(), Retrying(attempts.append):
        ...     torch.ones(1) + 1
        tensor([2.])
        >>> len(attempts)
        1
    """

    def __init__(self, free: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._free = free  # called with the error; an error of its own passes
        # whether an operator has changed a tensor that was there before it; set it to False to begin anew
        self.has_written = False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and defers(types):
            return NotImplemented
        oom: Exception | None = None
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            oom = error
        if oom is not None:
            out = self._again(func, args, kwargs or {}, oom)
        self.has_written = self.has_written or bool(_written(func))
        return out

    def _again(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], oom: Exception) -> Any:
        if not may_repeat(func, args, kwargs):
            self.has_written = True
            raise oom
        for _ in range(_ATTEMPTS):
            self._free(oom)
            try:
                return func(*args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                oom = error
        raise oom


def may_repeat(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator that ran out of memory has certainly not changed a tensor yet.

    Kernels for one tensor allocate before they write. Those for lists of tensors may go from one to the next; but where
    dtypes and layouts need no conversion they allocate nothing, and cannot have run out of memory after they began.

    Example:
        >>> may_repeat(torch.ops.aten.mul_.Tensor, (torch.ones(2), torch.ones(2)), {})
        True
        >>> lists = [torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2).bfloat16()]
        >>> may_repeat(torch.ops.aten._foreach_mul_.List, lists, {})
        False
    """
    if not hasattr(operator, "_schema"):
        return False
    written = _written(operator)
    if not written or operator._schema.name in _IDEMPOTENT:
        return True
    if not operator._schema.name.startswith("aten::") or any(argument.is_out for argument in written):
        return False
    if not any(isinstance(argument.type, torch.ListType) for argument in written):
        return True
    tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
    return len({tensor.dtype for tensor in tensors}) == 1 and all(map(_is_dense, tensors))


def _written(operator: Any) -> list[Any]:
    """Arguments that an operator writes to, as far as it says so."""
    arguments = operator._schema.arguments if hasattr(operator, "_schema") else []
    return [each for each in arguments if each.alias_info is not None and each.alias_info.is_write]


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous()


# --- the update --------------------------------------------------------------------------------------


class Update:
    """One update of an optimizer's parameters, in whatever way memory allows.

    Example:
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> parameter.grad = torch.ones(1)
        >>> Update(torch.optim.SGD([parameter], lr=0.5), free=lambda error: None).run([])
        True
        >>> parameter.item()
        0.5
    """

    def __init__(
        self,
        optimizer: Optimizer,  # the user's; its update treats parameters one by one (`buckets.is_separable`)
        # called with an out-of-memory error; frees what nobody needs, and leaves the optimizer alone
        free: Callable[[BaseException], None],
        free_bytes: FreeBytes = free_bytes,  # tells how much of a device is free
    ) -> None:
        self._optimizer = optimizer
        self._retrying = Retrying(free)
        self._free_bytes = free_bytes
        self._done: set[Parameter] = set()
        self._known = len(optimizer.state)
        self._is_exposed = False  # the bucket under way has no copy

    @property
    def is_partly_done(self) -> bool:
        """Return whether some parameters are updated."""
        return bool(self._done)

    def run(self, techniques: Sequence[Technique]) -> bool:
        """Update what is not updated yet.

        Returns:
            False when a gradient scaler told the optimizer to skip this step, else True.

        Raises:
            torch.OutOfMemoryError: there was no room. What was under way is as before; `run` does the rest, once
                there is another plan or more memory.
            BrokenUpdateError: what was under way is neither as before nor done.
        """
        if optimizer_step.is_changed(self._optimizer, techniques):
            return self._run_in_buckets(techniques, self._copy_for)
        oom: BaseException | None = None
        try:
            with deferred_interrupts(), self._retrying:
                return self._run_natively(techniques)
        except BaseException as error:
            if not (self._is_exposed and self._retrying.has_written and is_out_of_memory(error)):
                raise
            oom = error
        release(oom)
        raise BrokenUpdateError(
            f"memory ran out in the middle of an update of {type(self._optimizer).__name__}, although there was plenty "
            f"when it began; weights and moments are partly updated: go back to a checkpoint ({oom})"
        )

    def _run_natively(self, techniques: Sequence[Technique]) -> bool:
        waiting = [p for p in with_gradient(self._optimizer) if not self._done or p not in self._done]
        if self._has_room(waiting):
            return optimizer_step.run_step(
                self._optimizer, techniques, sys.maxsize, backup=self._expose, done=self._done
            )
        return self._run_in_buckets(techniques, self._copy_unless_room)

    def _run_in_buckets(self, techniques: Sequence[Technique], copy: optimizer_step.Protection) -> bool:
        largest_first = not any(each.draws_in_update for each in brought(techniques, Updating))
        is_made = optimizer_step.run_step(
            self._optimizer, techniques, backup=copy, done=self._done, largest_first=largest_first
        )
        if len(self._optimizer.state) > self._known:
            order_state(self._optimizer, self._known)
        return is_made

    def _expose(self, _bucket: Sequence[Parameter]) -> None:
        self._is_exposed, self._retrying.has_written = True, False

    def _copy_unless_room(self, bucket: Sequence[Parameter]) -> optimizer_step.Copy | None:
        if self._has_room(bucket):
            self._expose(bucket)
            return None
        self._is_exposed = False
        return self._copy_for(bucket)

    def _copy_for(self, bucket: Sequence[Parameter]) -> optimizer_step.Copy:
        """Return what copies the tensors of a bucket: on the device if there is room beside the update, else off it."""
        copied_bytes = sum(_size_bytes(p) for p in bucket) * (1 + _STATE_COPIES)
        return optimizer_step.cloned if self._has_room(bucket, copied_bytes, unknown=True) else _off_device

    def _has_room(self, parameters: Iterable[Parameter], more_bytes: int = 0, *, unknown: bool = False) -> bool:
        for device, needed_bytes in need_bytes(self._optimizer, parameters).items():
            free = self._free_bytes(device, needed_bytes + more_bytes)
            if free is None and not unknown:
                return False
            if free is not None and free < needed_bytes + more_bytes:
                return False
        return True
