"""What differs between two snapshots of one workload."""

from __future__ import annotations

from typing import Any

import torch

from memlab.session.snapshot import Snapshot


def changed_between(one: Snapshot, other: Snapshot) -> list[str]:
    """Names of what is not bit-for-bit the same in two snapshots of the same workload."""
    found = _different("", one.tensors, other.tensors)
    found += _different("gradient of ", one.gradients, other.gradients)
    for index, (mine, theirs) in enumerate(zip(one.states, other.states, strict=False)):
        found += _different(f"optimizer {index} state of ", _flat(mine), _flat(theirs))
    pairs = {
        "number of optimizers": (len(one.states), len(other.states)),
        "parameter groups": (one.groups, other.groups),
        "scheduler": (one.scheduler, other.scheduler),
        "train or eval mode": (one.training, other.training),
        "random state": (True, one.reached.random.equals(other.reached.random)),
    }
    return found + [name for name, (mine, theirs) in pairs.items() if mine != theirs]


def _flat(states: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"parameter {index} ({key})": value for index, state in enumerate(states) for key, value in state.items()}


def _different(prefix: str, mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    names = sorted(set(mine) | set(theirs))
    return [
        prefix + name for name in names if name not in mine or name not in theirs or not _same(mine[name], theirs[name])
    ]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and bool(torch.equal(_bits(a), _bits(b)))
    return bool(a == b)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
