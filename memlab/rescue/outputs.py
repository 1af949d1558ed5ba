"""Finding and replacing tensors in whatever a model returns: nests, model outputs, caches and other objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from memlab.runtime.lazy import LazyTensor

# keys, places and names of attributes, from the outside in
Path = tuple[Any, ...]

_DEPTH = 6  # how deep nests are searched; the caches of transformers within a model output need four


def differentiable(output: Any) -> dict[Path, torch.Tensor]:
    """Tensors of an output that have a graph, by where they are; one that appears twice is named once.

    Example:
        >>> y = torch.ones(2, requires_grad=True) * 2
        >>> list(differentiable({"loss": y.sum(), "again": y, "hidden": (y, 3)}))
        [('loss',), ('again',)]
    """
    found: dict[Path, torch.Tensor] = {}
    seen: set[int] = set()
    for path, tensor in _tensors(output, (), _DEPTH):
        if id(tensor) not in seen and not isinstance(tensor, LazyTensor) and tensor.requires_grad:
            seen.add(id(tensor))
            found[path] = tensor
    return found


def at(output: Any, paths: Iterable[Path]) -> dict[Path, torch.Tensor]:
    """The tensors in these places of an output, as far as there are any."""
    wanted = set(paths)
    return {path: tensor for path, tensor in _tensors(output, (), _DEPTH) if path in wanted}


def replaced(output: Any, values: Mapping[Path, torch.Tensor]) -> Any:
    """The output with other tensors in these places, and wherever the ones in these places appear again.

    What can be changed is changed in place, since the model has just made it; tuples are made anew.
    """
    return exchanged(output, {id(t): values[path] for path, t in _tensors(output, (), _DEPTH) if path in values})


def exchanged(value: Any, by_id: Mapping[int, torch.Tensor]) -> Any:
    """Return a value with other tensors in place of some, named by `id`; what can be changed is changed in place."""
    return _with(value, by_id, _DEPTH)


def _tensors(value: Any, path: Path, depth: int) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth:
        for key, item in _items(value):
            yield from _tensors(item, (*path, key), depth - 1)


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Parts of an object that may hold tensors; modules, types and functions are no output of theirs."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, (torch.nn.Module, type)) or callable(value):
        return []
    return list(getattr(value, "__dict__", {}).items())


def _with(value: Any, by_id: Mapping[int, torch.Tensor], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return by_id.get(id(value), value)
    if not depth:
        return value
    changed = {}
    for key, item in _items(value):
        new = _with(item, by_id, depth - 1)
        if new is not item:
            changed[key] = new
    return _put(value, changed) if changed else value


def _put(value: Any, changed: Mapping[Any, Any]) -> Any:
    if isinstance(value, tuple):
        items = [changed.get(place, item) for place, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    for key, item in changed.items():
        if isinstance(value, (Mapping, list)):
            value[key] = item  # type: ignore[index] # a mapping that cannot be changed says so itself
        else:
            object.__setattr__(value, key, item)
    return value
