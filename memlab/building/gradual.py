"""A model made as its factory makes it, but moved to its device and format one tensor at a time.

The usual way, `factory().to(device, dtype)`, holds the whole model on the host in full precision. Making tensors where they
belong to begin with (`with torch.device(...)`, `torch.set_default_dtype`) holds less and gives other weights: a GPU draws other
numbers, what is computed is rounded at every step, and a uniform number that rounds up to its upper bound becomes the lower one.
So here the factory computes on the CPU in full precision, as ever, and finished parameters leave one by one:

1.  A parameter is *wide* when it is made: on the CPU, in full precision.
2.  When wide parameters take more than `WIDE_BYTES`, the oldest become *narrow* (the newest two excepted): `parameter.data` is replaced by its
    copy on the device in the target format. The Parameter stays the same object, so ties stay ties.
3.  A parameter whose storage something else holds too (a view, `.data` in a list) stays wide: what is written there
    later must arrive.
4.  A narrow parameter that is used again is made wide first. An operation that overwrites it gives what it always
    gives; one that reads it reads rounded values, the only place where a result can differ (by one more rounding).
5.  At the end everything that is still wide follows, by the same `Module._apply` that `Module.to` uses.
6.  A tensor made with a dtype of its own (`dtype=torch.float32`, `.float()`), or computed from one, keeps that dtype.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from memlab.runtime.lifetimes import is_shared, storage_of
from memlab.units import MIB

WIDE_BYTES = 32 * MIB
_HOST = torch.device("cpu")

_Tensor = torch.Tensor
# what a parameter is asked or told without its values being looked at
_NOT_ABOUT_VALUES = {
    _Tensor.size,
    _Tensor.dim,
    _Tensor.numel,
    _Tensor.__hash__,
    _Tensor.__len__,
    _Tensor.is_floating_point,
    _Tensor.requires_grad_,
    _Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    *(
        getattr(_Tensor, name).__get__
        for name in ("shape", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "is_meta", "layout", "is_sparse")
    ),
}
# what a narrow parameter answers in place of its present self: as it was, and will be when it is used again
_AS_BEFORE: dict[Any, Callable[[torch.dtype], object]] = {
    _Tensor.dtype.__get__: lambda dtype_before: dtype_before,  # type: ignore[attr-defined]
    _Tensor.device.__get__: lambda _: _HOST,
    _Tensor.is_cpu.__get__: lambda _: True,  # type: ignore[attr-defined]
    _Tensor.is_cuda.__get__: lambda _: False,  # type: ignore[attr-defined]
}
# by name, since Transformers puts functions of its own in the place of torch's for a while
_DRAWS = {
    "normal_",
    "uniform_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "xavier_uniform_",
    "xavier_normal_",
    "trunc_normal_",
}
# they overwrite their first argument whole, so what was in it need not be fetched
_OVERWRITES = _DRAWS | {"zero_", "fill_", "zeros_", "ones_", "constant_"}
_CASTS = {torch.float32: _Tensor.float, torch.float64: _Tensor.double}
_one_at_a_time = threading.RLock()


def built_gradually(
    factory: Callable[[], Any], device: torch.device, dtype: torch.dtype, *, draw: bool = True
) -> tuple[Any, Gradual]:
    """Call a factory, with its parameters leaving for their device as they are made.

    Args:
        factory: what makes the model.
        device: where parameters go.
        dtype: format of floating-point tensors that were not made with a dtype of their own.
        draw: False leaves random initial values of parameters out, for a model whose weights are then loaded.

    Returns:
        What the factory returned, and what finishes it (`Gradual.finish`).
    """
    gradual = Gradual(device, dtype, draw)
    with _one_at_a_time, _parameters_seen(gradual), gradual:
        return factory(), gradual


class Gradual(TorchFunctionMode):
    """Keeps few parameters wide while a factory works; the rules are at the top of this file."""

    def __init__(self, device: torch.device, dtype: torch.dtype, draw: bool = True) -> None:
        super().__init__()
        self._device, self._dtype, self._draw = device, dtype, draw
        self._wide_dtype = torch.get_default_dtype()
        self._wide = WeakTensorKeyDictionary()  # parameters, the newest last
        self._narrow = WeakTensorKeyDictionary()  # parameter -> its dtype when it was wide
        self._freed_bytes = 0  # since freed memory was given back
        self._chosen = _Storages()  # storages of tensors with a dtype of their own

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [tensor for tensor in _tensors((args, kwargs)) if not is_lazy(tensor)]
        name = getattr(func, "__name__", "")
        narrow = [tensor for tensor in given if tensor in self._narrow]
        if narrow and func in _AS_BEFORE:
            return _AS_BEFORE[func](self._narrow[narrow[0]])
        if not self._draw and name in _DRAWS and isinstance(given[0], nn.Parameter):
            return self._left_out(given[0])
        if narrow and func not in _NOT_ABOUT_VALUES:
            self._widen(narrow, given, with_values=name not in _OVERWRITES)
        result = func(*args, **kwargs)
        self._note_choice(func, (args, kwargs), given, result)
        return result

    def before_sharing(self, data: Any) -> None:
        """A parameter is about to be made on the storage of another one: they share it as long as both live."""
        with torch._C.DisableTorchFunction():
            if isinstance(data, torch.Tensor) and data in self._narrow:
                self._widen([data], [data], with_values=True)

    def adopt(self, parameter: Any) -> None:
        """Take a new parameter in charge."""
        with torch._C.DisableTorchFunction():
            if type(parameter) is nn.Parameter and parameter.layout is torch.strided:
                self._wide[parameter] = None
                # a weight gets its values when its bias has been made
                self._trim(in_use=list(self._wide)[-2:])

    def finish(self, model: nn.Module) -> None:
        """Bring what is still wide, and all buffers, to the target."""
        model._apply(self._at_target)  # type: ignore[no-untyped-call]
        give_back_freed_memory()

    def _left_out(self, parameter: torch.Tensor) -> torch.Tensor:
        """Zeros instead of a draw, in memory that is not touched before the weights arrive."""
        if parameter in self._narrow or is_shared(parameter) or parameter in self._chosen:
            parameter.data.zero_()
        else:
            self._wide.pop(parameter, None)  # type: ignore[no-untyped-call]
            self._narrow[parameter] = parameter.dtype
            dtype = self._dtype if parameter.dtype == self._wide_dtype else parameter.dtype
            parameter.data = torch.zeros(parameter.shape, device=self._device, dtype=dtype)
        return parameter

    def _widen(self, narrow: list[torch.Tensor], in_use: list[torch.Tensor], with_values: bool) -> None:
        for parameter in narrow:
            dtype, chosen = self._narrow[parameter], parameter in self._chosen
            self._trim(in_use, room_for=parameter.numel() * dtype.itemsize)
            if with_values:
                parameter.data = parameter.data.to(_HOST, dtype)
            else:
                parameter.data = torch.empty_like(parameter, device=_HOST, dtype=dtype)
            if chosen:
                self._chosen.add(parameter)
            self._wide[parameter] = dtype
            del self._narrow[parameter]

    def _trim(self, in_use: list[torch.Tensor], room_for: int = 0) -> None:
        """Make the oldest wide parameters narrow until the others are few enough."""
        wide = list(self._wide)
        too_much = sum(parameter.nbytes for parameter in wide) + room_for - WIDE_BYTES
        for parameter in wide:
            if too_much <= 0:
                return
            if not is_shared(parameter) and all(parameter is not tensor for tensor in in_use):
                too_much -= parameter.nbytes
                self._make_narrow(parameter)

    def _make_narrow(self, parameter: torch.Tensor) -> None:
        dtype, chosen = parameter.dtype, parameter in self._chosen
        parameter.data = self._at_target(parameter.data)
        if chosen:
            self._chosen.add(parameter)
        del self._wide[parameter]
        self._narrow[parameter] = dtype
        self._freed(parameter.numel() * dtype.itemsize)

    def _freed(self, size_bytes: int) -> None:
        self._freed_bytes += size_bytes
        if self._freed_bytes > WIDE_BYTES:
            give_back_freed_memory()
            self._freed_bytes = 0

    def _at_target(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_lazy(tensor):
            return tensor.to(self._device, self._dtype)
        if tensor in self._narrow:
            return tensor
        by_default = tensor.dtype == self._wide_dtype and tensor not in self._chosen
        return tensor.to(self._device, self._dtype if by_default else tensor.dtype)

    def _note_choice(self, func: Any, arguments: Any, given: list[torch.Tensor], result: Any) -> None:
        """Rule 6: whether what was made has its dtype by the factory's choice."""
        named = func is _CASTS.get(self._wide_dtype) or any(
            value is self._wide_dtype for value in tree_leaves(arguments)
        )
        # as in type promotion, tensors without dimensions have no say beside others
        voices = [tensor for tensor in given if tensor.dim()] or given
        if not named and not any(tensor in self._chosen for tensor in voices):
            return
        for made in _tensors(result):
            fresh = not is_lazy(made) and all(made is not tensor for tensor in given)
            if fresh and made.dtype == self._wide_dtype and not self._shares(made, given):
                self._chosen.add(made)

    @staticmethod
    def _shares(made: torch.Tensor, given: list[torch.Tensor]) -> bool:
        """Return whether a result is a view of an argument, and so has that one's dtype."""
        return any(storage_of(tensor) == storage_of(made) for tensor in given)


class _Storages:
    """A set of storages that keeps none of them alive, asked by tensors on them."""

    def __init__(self) -> None:
        # the weak reference keeps the address from being given to another storage
        self._references: dict[int, StorageWeakRef] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return bool(self._references) and storage_of(tensor) in self._references

    def add(self, tensor: torch.Tensor) -> None:
        self._references[storage_of(tensor)] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(nested) if isinstance(value, torch.Tensor))


@contextmanager
def _parameters_seen(gradual: Gradual) -> Iterator[None]:
    """Hear of every parameter that this thread makes.

    Function modes are not asked when a Parameter is made, and hooks of modules come too late: a list of layers exists before the
    first one is registered, and copied modules register nothing.
    """
    thread, original = threading.get_ident(), nn.Parameter.__dict__["__new__"]

    def new(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        if threading.get_ident() != thread:
            return original.__func__(cls, data, requires_grad)
        gradual.before_sharing(data)
        parameter = original.__func__(cls, data, requires_grad)
        gradual.adopt(parameter)
        return parameter

    nn.Parameter.__new__ = new  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Parameter.__new__ = original  # type: ignore[method-assign]


def give_back_freed_memory() -> None:
    """Return free pages of the heap to the system, where the C library is one that can (glibc).

    While a model is built, long-lived tensors are made between short-lived ones twice their size, and the C library keeps
    the holes: 110 to 140 MiB for a model of 210 MiB, measured.
    """
    with suppress(AttributeError, OSError, TypeError):  # another C library; on Windows, None names no library
        ctypes.CDLL(None).malloc_trim(0)
