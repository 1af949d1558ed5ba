"""Results of ranks beside tensors, and how all is written into the live objects, once everything has arrived."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.workload import Workload
from memlab.scaleout import serialization, tensors
from memlab.scaleout.engines.base import Engine

Optimizer = torch.optim.Optimizer


# how errors call what cannot be sent
_NAME = "what the loop returned"


@dataclass(frozen=True)
class Results:
    """Results beside tensors, as rank 0 has them in the end."""

    value: Any  # what the function returned
    groups: list[list[dict[str, Any]]]  # settings of each optimizer's groups, without parameters
    # entries of optimizer state that are no tensors, by optimizer, parameter and entry
    plain_state: list[dict[str, dict[str, Any]]]
    scheduler: Any  # its state dict, or None
    random: tuple[Any, ...]  # random states of the loop


def write_results(path: Path, workload: Workload, engine: Engine, value: Any) -> None:
    """Write what comes back beside tensors, as the rank has it."""
    names = tensors.names_of(workload.model)
    plain = [
        {
            names[id(parameter)]: {
                entry: value for entry, value in state.items() if not isinstance(value, torch.Tensor)
            }
            for parameter, state in optimizer.state.items()
            if id(parameter) in names
        }
        for optimizer in workload.optimizers
    ]
    results = Results(
        value,
        [
            [{k: v for k, v in group.items() if k in engine.settings} for group in o.param_groups]
            for o in workload.optimizers
        ],
        plain,
        workload.scheduler.state_dict() if workload.scheduler is not None else None,
        random_states(engine.device),
    )
    path.write_bytes(serialization.pack({_NAME: results}))


def read_results(path: Path) -> Results:
    """Return what `write_results` has written."""
    results: Results = serialization.unpack(path.read_bytes())[_NAME]
    return results


def restore_results(folder: Path, results: Results, workload: Workload) -> None:
    """Write what came back into the live objects, which stay the same objects."""
    arrived = {
        key: torch.empty(size, dtype=dtype, device="cpu") for key, (size, dtype) in tensors.stored(folder).items()
    }
    tensors.fill(arrived, folder)
    # nothing that could fail comes after this line: all is read and checked
    with deferred_interrupts(), torch.no_grad():
        for key, tensor in {**tensors.parameter_keys(workload.model), **tensors.buffer_keys(workload.model)}.items():
            tensor.copy_(arrived[key])
        for number, optimizer in enumerate(workload.optimizers):
            _write_state(optimizer, number, arrived, results.plain_state[number], workload)
            for group, settings in zip(optimizer.param_groups, results.groups[number], strict=True):
                group.update(settings)
        if workload.scheduler is not None:
            workload.scheduler.load_state_dict(results.scheduler)
        restore_random_states(results.random, workload.device)


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


def random_states(device: torch.device) -> tuple[Any, ...]:
    """The random states a loop may draw from, as values that can be sent: torch's, Python's and NumPy's."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()  # noqa: NPY002 - the loop's own


def restore_random_states(states: tuple[Any, ...], device: torch.device) -> None:
    """Put back what `random_states` gave."""
    cpu, cuda, python, numpy_state = states
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
    random.setstate(python)
    np.random.set_state(numpy_state)  # noqa: NPY002
