"""Tensors of a workload under keys that mean the same in every process: parameters, buffers, optimizer state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from memlab.errors import ScaleError
from memlab.runtime.ownership import parameters_in
from memlab.runtime.workload import Workload

Optimizer = torch.optim.Optimizer


def parameter_keys(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by key; one that several modules share is there once."""
    return {f"parameter.{name}": parameter for name, parameter in model.named_parameters()}


def buffer_keys(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers by key, those that checkpoints leave out as well."""
    return {f"buffer.{name}": buffer for name, buffer in model.named_buffers()}


def state_keys(optimizers: list[Optimizer], names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """Tensors of optimizer state by key."""
    return {
        state_key(i, names[id(parameter)], entry): value
        for i, optimizer in enumerate(optimizers)
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
        for entry, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def state_key(index: int, parameter: str, entry: str) -> str:
    """Key of one entry of the state that optimizer `index` keeps of a parameter."""
    return f"optimizer.{index}.{parameter}.{entry}"


def names_of(model: nn.Module) -> dict[int, str]:
    """Name of each parameter by its id."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def all_of(workload: Workload) -> dict[str, torch.Tensor]:
    """Every tensor that training changes, by key."""
    names = names_of(workload.model)
    for optimizer in workload.optimizers:
        strange = [p for p in parameters_in(optimizer) if id(p) not in names]
        if strange:
            raise ScaleError(
                f"{type(optimizer).__name__} steps {len(strange)} parameters that are not in {workload.name}: "
                "only a model and the optimizers of its own parameters can be sent to other processes"
            )
    return {**parameter_keys(workload.model), **buffer_keys(workload.model), **state_keys(workload.optimizers, names)}


def store(tensors: Mapping[str, torch.Tensor], folder: Path, *, together: bool = False) -> None:
    """Write tensors."""
    with _quiet():
        save({key: tensor.detach() for key, tensor in tensors.items()}, checkpoint_id=folder, no_dist=not together)


def fill(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Read tensors into those that are given, each rank what its shards need."""
    if tensors:
        with _quiet(), torch.no_grad():
            load({key: tensor.detach() for key, tensor in tensors.items()}, checkpoint_id=folder, no_dist=True)


def stored(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return what is stored: shape and dtype by key."""
    kept = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {key: each for key, each in kept.items() if isinstance(each, TensorStorageMetadata)}
    return {key: (each.size, each.properties.dtype) for key, each in tensors.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch warns that one process alone saves, which is what is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(torch.distributed is (disabled|unavailable)|single process).*")
        yield
