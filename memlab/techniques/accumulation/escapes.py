"""Tensors with a graph that a model keeps where nobody looks, or finds there."""

from __future__ import annotations

import gc
import inspect
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memlab.runtime.graphs import reaches_before
from memlab.runtime.lazy import LazyTensor
from memlab.runtime.lifetimes import storage_of
from memlab.runtime.surroundings import Surroundings


def escaped(alive: Callable[[], set[int]]) -> tuple[torch.Tensor, str] | None:
    """Return a tensor with a graph in one of the storages that live on, and in words what keeps it; None where there is none."""
    if not _with_graph(alive()):
        return None
    gc.collect()
    found = _with_graph(alive())
    return (found[0], _keeper(found[0], found)) if found else None


def _with_graph(storages: set[int]) -> list[torch.Tensor]:
    return [
        tensor
        for tensor in (gc.get_objects() if storages else ())
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided and _has_graph(tensor)
        and storage_of(tensor) in storages
    ]  # fmt: skip


def _has_graph(tensor: torch.Tensor) -> bool:
    try:
        return tensor.requires_grad  # a leaf that the forward has made is asked for its gradient
    except RuntimeError:  # a view of something that was changed since; it cannot be derived
        return False


def _keeper(tensor: torch.Tensor, candidates: list[torch.Tensor]) -> str:
    for holder in gc.get_referrers(tensor):
        if holder is candidates:
            continue
        if isinstance(holder, dict):
            # no comprehension: its cell would be one more holder
            for key, value in [*holder.items()]:
                if value is tensor:
                    return f"as {str(key)!r} of a dict or object"
        if isinstance(holder, (list, tuple, set, deque)):
            return f"in a {type(holder).__name__}"
        if not inspect.isframe(holder):
            return f"kept by a {type(holder).__name__}"
    return "kept by something else"


def earlier_graph(name: str, leaves: Iterable[Any], sequence_nr: int, before: Surroundings) -> str:
    """Return why outputs cannot be those of parts: each part would go through the graph of a tensor from before the call; else nothing.

    Args:
        name: of the model.
        leaves: the outputs.
        sequence_nr: of torch's operators, when the call began.
        before: what was there before the call.
    """
    computed = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, LazyTensor)]
    if not reaches_before(computed, sequence_nr):
        return ""
    found = ", ".join(before.derived())
    return f"{name} computes with a tensor that had a graph before the call{f' ({found})' if found else ''}"
