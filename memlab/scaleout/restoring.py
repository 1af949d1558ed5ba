"""Results of ranks, written into the live objects: all of them, once all have arrived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from memlab.runtime.interrupts import uninterrupted
from memlab.runtime.workload import Workload
from memlab.scaleout import tensors
from memlab.scaleout.worker import Home
from memlab.session.snapshot import restore_random_states

Optimizer = torch.optim.Optimizer


def restore_results(folder: Path, home: Home, workload: Workload) -> None:
    """Write what came home into the live objects, which stay the same objects.

    Args:
        folder: where the ranks stored the tensors.
        home: what came beside them.
        workload: the live objects.
    """
    arrived = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in tensors.stored(folder).items()}
    tensors.fill(arrived, folder)
    # nothing that could fail comes after this line: all is read and checked
    with uninterrupted(), torch.no_grad():
        _write_model(workload, arrived)
        for number, optimizer in enumerate(workload.optimizers):
            _write_state(optimizer, number, arrived, home.plain_state[number], workload)
            for group, settings in zip(optimizer.param_groups, home.groups[number], strict=True):
                group.update(settings)
        if workload.scheduler is not None:
            workload.scheduler.load_state_dict(home.scheduler)
        restore_random_states(home.random, workload.device)


def _write_model(workload: Workload, arrived: dict[str, torch.Tensor]) -> None:
    model = workload.model
    for key, tensor in {**tensors.parameter_keys(model), **tensors.buffer_keys(model)}.items():
        tensor.copy_(arrived[key])


def _write_state(
    optimizer: Optimizer,
    number: int,
    arrived: dict[str, torch.Tensor],
    plain: dict[str, dict[str, Any]],
    workload: Workload,
) -> None:
    names = tensors.names_of(workload.model)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            prefix = tensors.state_key(number, name, "")
            found = {key.removeprefix(prefix): value for key, value in arrived.items() if key.startswith(prefix)}
            entries: dict[str, Any] = {**found, **plain.get(name, {})}
            if entries:
                _write_entries(optimizer.state[parameter], entries, parameter)


def _write_entries(state: dict[str, Any], entries: dict[str, Any], parameter: torch.Tensor) -> None:
    for entry, value in entries.items():
        kept = state.get(entry)
        if isinstance(kept, torch.Tensor) and isinstance(value, torch.Tensor) and kept.shape == value.shape:
            kept.copy_(value)
        elif isinstance(value, torch.Tensor):
            state[entry] = value.to(parameter.device) if value.dim() else value
        else:
            state[entry] = value
