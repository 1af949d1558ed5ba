"""Objects on their way to other processes: all by value, what is defined in a notebook as well, some tensors apart.

A tensor that travels apart leaves a placeholder in the pickle, one for all who hold it, so that tied weights stay tied.

Source: cloudpickle, https://github.com/cloudpipe/cloudpickle
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterable, Mapping
from types import CodeType
from typing import Any

import torch
from torch import nn

from memlab.errors import ScaleError
from memlab.extras import require
from memlab.runtime.containers import ABSENT, content_of


def pack(what: Mapping[str, Any], apart: Iterable[torch.Tensor] = ()) -> bytes:
    """Pickle objects, without the values of the tensors that travel apart."""
    numbers = {id(tensor) for tensor in apart}
    try:
        return _pickled(dict(what), numbers)
    except Exception as error:  # objects raise what they like when they are pickled
        raise ScaleError(_what_fails(what, numbers, error)) from error


def unpack(packed: bytes) -> dict[str, Any]:
    """Objects of a pickle."""
    opened: dict[str, Any] = pickle.loads(packed)  # noqa: S301 - memlab's own
    return opened


def _pickled(what: Any, apart: Collection[int]) -> bytes:
    class Pickler(require("cloudpickle").Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and id(value) in apart:
                is_parameter = isinstance(value, nn.Parameter)
                return _placeholder, (value.shape, value.dtype, is_parameter, value.requires_grad)
            if isinstance(value, torch.Tensor) and value.is_cuda and type(value) is torch.Tensor:
                return _on_own_device, (value.detach().cpu(), value.requires_grad)
            if isinstance(value, CodeType):  # since 3.1.3 cloudpickle drops the file, which tracebacks show lines of
                _, parts = self.dispatch_table[CodeType](value)
                return _code, (parts, value.co_filename)
            return super().reducer_override(value)

    buffer = io.BytesIO()
    Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(what)
    return buffer.getvalue()


def _placeholder(shape: torch.Size, dtype: torch.dtype, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    empty = torch.empty(shape, dtype=dtype, device="meta")
    return nn.Parameter(empty, requires_grad) if is_parameter else empty


def _code(parts: tuple[Any, ...], filename: str) -> CodeType:
    return CodeType(*parts).replace(co_filename=filename)


def _on_own_device(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A tensor of a GPU arrives on the GPU of the rank."""
    return tensor.to(torch.device("cuda", torch.cuda.current_device())).requires_grad_(requires_grad)


def _what_fails(what: Mapping[str, Any], apart: Collection[int], error: Exception) -> str:
    """One line that names what cannot be pickled: the thing itself, or the variable of a function."""
    for key, value in what.items():
        name = getattr(value, "__name__", key)
        inner = _variables_of(value)
        for variable, held in inner.items():
            if not _can_be_pickled(held, apart):
                return (
                    f"{name} cannot be sent to other processes: its variable {variable} ({type(held).__name__}) "
                    f"cannot be pickled ({error}); make it inside {name}, or leave it out"
                )
        if not _can_be_pickled(value, apart):
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
    cells = zip(code.co_freevars, getattr(value, "__closure__", None) or (), strict=False)
    closed = {name: content_of(cell) for name, cell in cells}
    return {name: scope[name] for name in code.co_names if name in scope} | {
        name: held for name, held in closed.items() if held is not ABSENT
    }


def _can_be_pickled(value: Any, apart: Collection[int]) -> bool:
    try:
        _pickled(value, apart)
    except Exception:  # noqa: BLE001 - as above
        return False
    return True
