"""Optimizer state that lives off the device and visits it one bucket at a time during a step.

Exact: the bytes are copied out and back. The update itself runs on the device, so any optimizer
that keeps its state per parameter is served, with its own arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from memlab.errors import RefusalError
from memlab.plan import Offloaded, Plan, Tier
from memlab.techniques._homes import home_of
from memlab.techniques.base import State, Technique
from memlab.techniques.spill import Spill, resolve_tier
from memlab.workload import Workload

_SMALL_ELEMENTS = 1024  # smaller tensors stay: moving them costs more than they weigh


class OffloadOptimizer(Technique):
    """Keeps optimizer state in host memory beside a GPU, or in files beside the CPU.

    Known limitations:
        Copies run on the stream of the update and do not overlap the backward pass.
    """

    field = "offload"
    changes_state = True
    state_per_step = True

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._spills: dict[Tier, Spill] = {}
        # the same buffer is written at every step, so host memory is pinned once
        self._buffers: MutableMapping[torch.Tensor, dict[str, torch.Tensor]] = WeakTensorKeyDictionary()
        self._streaming = False

    @classmethod
    def wanted(cls, plan: Plan) -> bool:
        return cls.setting(plan) is not None

    @classmethod
    def setting(cls, plan: Plan) -> Tier | None:
        return plan.tier_of(Offloaded.OPTIMIZER)

    def check(self, workload: Workload) -> None:
        self._tier(next(workload.model.parameters()).device)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise RefusalError(
                "offload",
                "LBFGS keeps one history for all parameters and evaluates the loss several times in a step",
                "use torch.optim.AdamW with --offload optimizer, or LBFGS without it",
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._tier(home_of(parameter))

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, undo: ExitStack) -> None:
        undo.callback(self._drop_buffers, optimizer)

    def pack_state(self, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, state: State) -> State:
        known = self._free_buffers(optimizer, parameter)
        moved = {name: self._moved_out(known.get(name), parameter, value) for name, value in state.items()}
        # only what is in use: another technique below may have changed the names
        self._buffers[parameter] = {name: value for name, value in moved.items() if value is not state[name]}
        if parameter.is_cuda and not self._streaming:
            torch.cuda.current_stream(parameter.device).synchronize()
        return moved

    def unpack_state(self, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, state: State) -> State:
        buffers = self._buffers.get(parameter, {})
        return {
            name: _brought_back(parameter, value) if name in buffers and value is buffers[name] else value
            for name, value in state.items()
        }

    @contextmanager
    def around_update(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
    ) -> Iterator[None]:
        # within a step all copies are ordered by the stream; one wait at its end is enough
        self._streaming = True
        yield

    def step_ended(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        if self._streaming:
            self._streaming = False
            for device in _cuda_devices(optimizer):
                torch.cuda.current_stream(device).synchronize()

    @property
    def host_bytes(self) -> int:
        return sum(spill.stored_bytes for spill in self._spills.values())

    def _free_buffers(self, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> State:
        """Buffers that may be written: within a step state is unpacked, but a plan change must not touch live state."""
        in_use = {id(value) for value in optimizer.state.get(parameter, {}).values()}
        return {name: buffer for name, buffer in self._buffers.get(parameter, {}).items() if id(buffer) not in in_use}

    def _tier(self, device: torch.device) -> Tier:
        return resolve_tier(self.setting(self.plan) or Tier.AUTO, device, Offloaded.OPTIMIZER)

    def _spill(self, device: torch.device) -> Spill:
        tier = self._tier(device)
        return self._spills.setdefault(tier, Spill(tier))

    def _moved_out(self, buffer: torch.Tensor | None, parameter: torch.nn.Parameter, value: Any) -> Any:
        if not _moves(value):
            return value
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = self._spill(parameter.device).empty_like(value)
        return buffer.copy_(value.detach(), non_blocking=True)

    def _drop_buffers(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._buffers.pop(parameter, None)


def _moves(value: Any) -> bool:
    # paged tensors of bitsandbytes move by themselves
    return isinstance(value, torch.Tensor) and value.numel() >= _SMALL_ELEMENTS and not hasattr(value, "is_paged")


def _brought_back(parameter: torch.nn.Parameter, spilled: torch.Tensor) -> torch.Tensor:
    # state shaped like its parameter gets its memory layout too: fused kernels walk both side by side
    like = parameter if spilled.shape == parameter.shape else spilled
    resident = torch.empty_like(like, dtype=spilled.dtype, device=parameter.device, requires_grad=False)
    return resident.copy_(spilled, non_blocking=True)


def _cuda_devices(optimizer: torch.optim.Optimizer) -> set[torch.device]:
    return {p.device for group in optimizer.param_groups for p in group["params"] if p.is_cuda}
