"""Weights streamed from safetensors files into a model that is there already, a few rows at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlab.errors import BuildError
from memlab.extras import require
from memlab.units import MIB

_SHOWN = 8


def listed(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are.

    Example:
        >>> listed(["a", "b"])
        'a, b'
        >>> listed([str(number) for number in range(10)])
        '0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


_BATCH_BYTES = 64 * MIB
_WIDEST = 8  # bytes of the widest number that a file may hold
_INDEX = "model.safetensors.index.json"


def load_weights(model: nn.Module, path: Path, *, strict: bool) -> None:
    """Fill a model's parameters and persistent buffers from a file, an index of shards, or a folder of either.

    Names and shapes are compared before anything is read. Each tensor is cast to the format of the one it fills, 64 MiB
    at a time; what the file holds is never whole in memory.
    """
    safetensors = require("safetensors")
    file_of = _files(path, safetensors)
    tensors = dict(_named_tensors(model))
    if strict:
        _agree(tensors, set(file_of), path)
    for file in sorted(set(file_of.values())):
        held = {name: tensor for name, tensor in tensors.items() if file_of.get(name) == file}
        with _opened(file, safetensors) as content:
            _check_shapes(content, held, file)
        for name, tensor in held.items():
            rows = max(1, _BATCH_BYTES * max(1, len(tensor)) // max(1, _WIDEST * tensor.numel())) if tensor.dim() else 1
            for first in range(0, len(tensor) if tensor.dim() else 1, rows):
                # a file stays mapped, and what was read of it resident, until it is closed
                with _opened(file, safetensors) as content:
                    _fill(tensor, content, name, first, first + rows)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under each of their names, as in `state_dict()`."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        held = {**module._parameters, **module._buffers}
        for name, tensor in held.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, tensor


def _agree(tensors: dict[str, torch.Tensor], found: set[str], path: Path) -> None:
    # one name of a tied tensor is enough: safetensors stores it once
    filled = {id(tensors[name]) for name in found & set(tensors)}
    missing = [name for name, tensor in tensors.items() if id(tensor) not in filled]
    unexpected = sorted(found - set(tensors))
    if missing or unexpected:
        raise BuildError(disagreement(path, missing, unexpected))


def disagreement(path: Path, missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """Say which names of a model and of its files do not agree, and what can be done."""
    parts = [
        f"{what}: {listed(names)}"
        for what, names in (("missing", sorted(missing)), ("unexpected", sorted(unexpected)))
        if names
    ]
    return (
        f"the weights in {path} are not those of the model ({'; '.join(parts)}); "
        "strict=False leaves missing ones at their initial values and ignores unexpected ones"
    )


def _files(path: Path, safetensors: Any) -> dict[str, Path]:
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise BuildError(f"weights {str(path)!r}: no such file or folder")
    if path.suffix == ".json":
        return _indexed(path)
    if path.suffix != ".safetensors":
        raise BuildError(
            f"weights {str(path)!r}: expected a .safetensors file, an index of shards (*.index.json) or a folder "
            "that holds one; convert other formats with safetensors.torch.save_model"
        )
    with _opened(path, safetensors) as content:
        return dict.fromkeys(content.keys(), path)


def _in_folder(folder: Path) -> Path:
    if (folder / _INDEX).is_file():
        return folder / _INDEX
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    raise BuildError(
        f"weights {str(folder)!r}: expected one .safetensors file or {_INDEX} in it, "
        f"found {listed([file.name for file in found]) if found else 'neither'}; name the file"
    )


def _indexed(index: Path) -> dict[str, Path]:
    try:
        names = json.loads(index.read_text())["weight_map"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"index {str(index)!r}: expected JSON with a 'weight_map' from names to files") from error
    file_of = {name: index.parent / file for name, file in names}
    absent = sorted({file.name for file in file_of.values() if not file.is_file()})
    if absent:
        raise BuildError(f"index {str(index)!r} names files that are not beside it: {listed(absent)}")
    return file_of


def _opened(file: Path, safetensors: Any) -> Any:
    try:
        return safetensors.safe_open(file, framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise BuildError(f"file {str(file)!r} cannot be read as safetensors: {error}") from error


def _check_shapes(content: Any, tensors: dict[str, torch.Tensor], file: Path) -> None:
    absent = sorted(set(tensors) - set(content.keys()))
    if absent:
        raise BuildError(f"file {str(file)!r} does not hold what the index says: {listed(absent)}")
    stored = {name: tuple(content.get_slice(name).get_shape()) for name in tensors}
    other = [
        f"{name} is {stored[name]}, not {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
        if stored[name] != tuple(tensor.shape)
    ]
    if other:
        raise BuildError(f"shapes in {str(file)!r} are not those of the model: {listed(other)}")


@torch.no_grad()
def _fill(tensor: torch.Tensor, content: Any, name: str, first: int, last: int) -> None:
    if tensor.dim():
        tensor[first:last].copy_(content.get_slice(name)[first:last])
    else:
        tensor.copy_(content.get_tensor(name))
