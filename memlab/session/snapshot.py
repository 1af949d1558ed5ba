"""A copy of everything training changes, to be put back.

Copies live off the device (host memory beside a GPU, files beside the CPU), so that taking one does
not change what is being measured.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from memlab.plan import Tier
from memlab.runtime.aliases import overwrite
from memlab.runtime.model_state import State
from memlab.runtime.ownership import parameters_in
from memlab.runtime.state_entries import PackedState, kept_of
from memlab.runtime.workload import Workload
from memlab.techniques.adapters.injected import adapters_of, note_adapters
from memlab.techniques.offload.spill import Spill, resolve_tier
from memlab.techniques.precision.masters import masters_of


class Snapshot:
    """Weights, buffers, gradients, optimizer state and groups, scheduler, modes and random state.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> workload = Workload(model, torch.optim.AdamW(model.parameters()))
        >>> before = Snapshot(workload)
        >>> _ = model.weight.data.zero_()
        >>> before.restore()
        >>> bool(model.weight.any())
        True
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._spill = Spill(resolve_tier(Tier.AUTO, workload.device, "snapshot"))
        # what else training changes: attributes, globals, models beside it, generators of the model's own
        self.reached = State.of_model(workload.model, workload.device)
        self.tensors = {name: self._spill.store(_own_values(tensor)) for name, tensor in self._named_tensors()}
        self.gradients = {
            name: self._spill.store(p.grad) for name, p in workload.model.named_parameters() if p.grad is not None
        }
        self.states = [self._state_of(optimizer) for optimizer in workload.optimizers]
        # state that answers to other names than it is kept under, without what is kept
        self._packed = [
            {
                key: state.around({})
                for key, state in optimizer.state.items()
                if isinstance(state, PackedState) and state.closed is None
            }
            for optimizer in workload.optimizers
        ]
        self.groups = [
            [
                {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
                for group in each.param_groups
            ]
            for each in workload.optimizers
        ]
        self.scheduler = copy.deepcopy(workload.scheduler.state_dict()) if workload.scheduler is not None else None
        self.training = {name: module.training for name, module in workload.model.named_modules()}
        self._adapters = adapters_of(workload.model)
        self._give_learnt_back = None if self._adapters is None else self._adapters.copied()

    def restore(self) -> None:
        """Put everything back into the live objects, keeping their tensors where they fit."""
        workload = self._workload
        note_adapters(workload.model, self._adapters)
        if self._give_learnt_back is not None:
            self._give_learnt_back()
        self.reached.restore()
        with torch.no_grad():
            for name, tensor in self._named_tensors():
                _give_values(tensor, self.tensors[name])
            for name, parameter in workload.model.named_parameters():
                saved = self.gradients.get(name)
                parameter.grad = None if saved is None else saved.to(parameter.device, copy=True)
        each = zip(workload.optimizers, self.states, self._packed, self.groups, strict=False)
        for optimizer, states, packed, groups in each:
            _restore_optimizer(optimizer, states, packed, groups)
        for optimizer in workload.optimizers[len(self.states) :]:
            optimizer.state.clear()
        if self.scheduler is not None:
            workload.scheduler.load_state_dict(copy.deepcopy(self.scheduler))
        for name, module in workload.model.named_modules():
            module.training = self.training[name]
        self.reached.random.restore()  # last: whatever is put back may draw

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self._workload.model
        yield from chain(model.named_parameters(), model.named_buffers())
        for place, module in enumerate(self.reached.beside_it):
            for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
                yield f"{name} of module {place} beside it", tensor

    def _state_of(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        parameters = parameters_in(optimizer)
        return [{key: self._copied(value) for key, value in optimizer.state.get(p, {}).items()} for p in parameters]

    def _copied(self, value: Any) -> Any:
        return self._spill.store(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _own_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter or buffer in the user's own format."""
    masters = masters_of(tensor)
    values = None if masters is None else masters.values(tensor)
    return tensor if values is None else values


def _give_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    masters = masters_of(tensor)
    if masters is None:
        overwrite(tensor, values)
    else:
        masters.write(tensor, values)


def _restore_optimizer(
    optimizer: torch.optim.Optimizer,
    states: list[dict[str, Any]],
    packed: Mapping[Any, PackedState],
    groups: list[dict[str, Any]],
) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key in set(group) - set(saved) - {"params"}:
            del group[key]
        group.update(copy.deepcopy(saved))
    parameters = parameters_in(optimizer)
    for parameter, saved in zip(parameters, states, strict=True):
        if not saved:
            optimizer.state.pop(parameter, None)
            continue
        live = optimizer.state[parameter]
        before = kept_of(live)
        refilled = {key: _refilled(before.get(key), value, parameter) for key, value in saved.items()}
        if parameter in packed or isinstance(live, PackedState):
            form = live if isinstance(live, PackedState) else packed[parameter]
            optimizer.state[parameter] = form.around(refilled) if parameter in packed else refilled
            continue
        for key in set(live) - set(saved):
            del live[key]
        live.update(refilled)


def _refilled(live: Any, saved: Any, parameter: torch.nn.Parameter) -> Any:
    if not isinstance(saved, torch.Tensor):
        return copy.deepcopy(saved)
    if isinstance(live, torch.Tensor) and live.shape == saved.shape and live.dtype is saved.dtype:
        live.copy_(saved)
        return live
    device = parameter.device if saved.dim() else saved.device
    return saved.to(device, copy=True)
