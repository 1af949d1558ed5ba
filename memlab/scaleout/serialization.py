"""Objects on their way to other processes: all by value, what is defined in a notebook as well, some tensors apart.

A tensor that travels apart leaves its key in the pickle. Whoever opens the pickle says what stands in for it there,
once for each key, so that tied weights stay tied.

Source: cloudpickle, https://github.com/cloudpipe/cloudpickle
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memlab.errors import ScaleError
from memlab.extras import require


@dataclass(frozen=True)
class Apart:
    """A tensor that travels apart."""

    key: str  # under which it is stored
    shape: tuple[int, ...]  # its shape
    dtype: torch.dtype  # its dtype
    is_parameter: bool  # whether it is an `nn.Parameter`
    requires_grad: bool  # whether it is trained

    @classmethod
    def of(cls, key: str, tensor: torch.Tensor) -> Apart:
        return cls(key, tuple(tensor.shape), tensor.dtype, isinstance(tensor, nn.Parameter), tensor.requires_grad)

    def placeholder(self) -> torch.Tensor:
        empty = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return nn.Parameter(empty, self.requires_grad) if self.is_parameter else empty


def pack(what: Mapping[str, Any], apart: Mapping[str, torch.Tensor]) -> bytes:
    """Pickle objects."""
    keys = {id(tensor): Apart.of(key, tensor) for key, tensor in apart.items()}
    try:
        return _pickled(dict(what), keys)
    except Exception as error:  # objects raise what they like when they are pickled
        raise ScaleError(_what_fails(what, keys, error)) from error


def unpack(packed: bytes, placeholder: Callable[[Apart], torch.Tensor]) -> dict[str, Any]:
    """Objects of a pickle."""
    opened: dict[str, Any] = _Unpickler(io.BytesIO(packed), placeholder).load()
    return opened


def _pickled(what: Any, keys: Mapping[int, Apart]) -> bytes:
    class Pickler(require("cloudpickle").Pickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> Apart | None:
            return keys.get(id(value)) if isinstance(value, torch.Tensor) else None

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_cuda and type(value) is torch.Tensor:
                return _on_own_device, (value.detach().cpu(), value.requires_grad)
            return super().reducer_override(value)

    buffer = io.BytesIO()
    Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(what)
    return buffer.getvalue()


def _on_own_device(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A tensor of a GPU arrives on the GPU of the rank."""
    return tensor.to(torch.device("cuda", torch.cuda.current_device())).requires_grad_(requires_grad)


def _what_fails(what: Mapping[str, Any], keys: Mapping[int, Apart], error: Exception) -> str:
    """One line that names what cannot be pickled: the thing itself, or the variable of a function."""
    for key, value in what.items():
        name = getattr(value, "__name__", key)
        inner = _variables_of(value)
        for variable, held in inner.items():
            if not _can_be_pickled(held, keys):
                return (
                    f"{name} cannot be sent to other processes: its variable {variable} ({type(held).__name__}) "
                    f"cannot be pickled ({error}); make it inside {name}, or leave it out"
                )
        if not _can_be_pickled(value, keys):
            return (
                f"{name} ({type(value).__name__}) cannot be sent to other processes: {error}; "
                "keep out of it what belongs to this process (open files, locks, generators, connections)"
            )
    return f"the run cannot be sent to other processes: {error}"


def _variables_of(value: Any) -> dict[str, Any]:
    """Return what a function reads from around it."""
    code = getattr(value, "__code__", None)
    if code is None:
        return {}
    scope = getattr(value, "__globals__", {})
    cells = dict(zip(code.co_freevars, getattr(value, "__closure__", None) or (), strict=False))
    closed = {name: cell.cell_contents for name, cell in cells.items() if _is_filled(cell)}
    return {name: scope[name] for name in code.co_names if name in scope} | closed


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - asking is what raises
    except ValueError:
        return False
    return True


def _can_be_pickled(value: Any, keys: Mapping[int, Apart]) -> bool:
    try:
        _pickled(value, keys)
    except Exception:  # noqa: BLE001 - as above
        return False
    return True


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, placeholder: Callable[[Apart], torch.Tensor]) -> None:
        super().__init__(file)
        self._placeholder = placeholder
        self._made: dict[str, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        if pid.key not in self._made:
            self._made[pid.key] = self._placeholder(pid)
        return self._made[pid.key]
