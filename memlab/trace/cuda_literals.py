"""device="cuda", .cuda() and torch.autocast("cuda") in the user's code, served by the twin's CPU tensors; likewise of other accelerators.

Reads of `.device` and `.is_cuda` keep saying "cpu": code that asks acts consistently.

Known limitations: functions of `torch.cuda` itself (streams, synchronize, generators) are not served, nor modules
that are moved inside of a forward (`module.cuda()`): torch cannot exchange fake parameters.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memlab.runtime.callers import handed_over
from memlab.trace.cuda_thread import current_gpu, exchange

_CPU = torch.device("cpu")


def _is_traced(device_type: str) -> bool:
    gpu = current_gpu()
    return gpu is not None and device_type in ("cuda", gpu.device_type)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return _is_traced(device.partition(":")[0])
    if isinstance(device, torch.device):
        return _is_traced(device.type)
    return isinstance(device, int) and not isinstance(device, bool)


class CudaMeansCpu(TorchFunctionMode):
    """Has calls of torch that name a CUDA device mean the CPU; everything else passes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        func = handed_over(func)
        # tensors that take calls themselves (`types` names them) come first
        served = _SERVED.get(func) or (None if types else _RUNS_USER_CODE.get(func))
        if served is not None:
            return served(self, args, dict(kwargs or {}))
        if not kwargs:
            return func(*args)
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


def _cuda(_: CudaMeansCpu, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor: torch.Tensor = args[0]
    memory_format = kwargs.get("memory_format", torch.preserve_format)
    return tensor if memory_format is torch.preserve_format else tensor.contiguous(memory_format=memory_format)


def _to(_: CudaMeansCpu, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor, *rest = args
    if rest and _names_cuda(rest[0]):
        rest[0] = _CPU
    if _names_cuda(kwargs.get("device")):
        kwargs["device"] = _CPU
    return torch.Tensor.to(tensor, *rest, **kwargs)


def _type(_: CudaMeansCpu, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    if rest and isinstance(rest[0], str):
        rest[0] = rest[0].replace("torch.cuda.", "torch.")
    return torch.Tensor.type(tensor, *rest, **kwargs)


# --- backward -------------------------------------------------------------------------------------

_GUARDS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _with_the_mode_on(function: Any) -> Callable[[CudaMeansCpu, tuple[Any, ...], dict[str, Any]], Any]:
    """A function mode is off while it handles a call, but backward runs the user's code: recomputation.

    The function runs as a copy that does not ask for function modes again, with the mode on.
    """
    world = {**function.__globals__, **dict.fromkeys(_GUARDS, lambda *_: False)}
    unguarded = types.FunctionType(function.__code__, world, function.__name__, function.__defaults__)
    unguarded.__kwdefaults__ = function.__kwdefaults__

    def served(mode: CudaMeansCpu, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode:
            return unguarded(*args, **kwargs)

    return served


_RUNS_USER_CODE = {
    function: _with_the_mode_on(function)
    for function in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}
_SERVED: dict[Any, Callable[[CudaMeansCpu, tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.Tensor.cuda: _cuda,
    torch.Tensor.to: _to,
    torch.Tensor.type: _type,
}


# --- autocast -------------------------------------------------------------------------------------


def exchange_autocast(undo: ExitStack) -> None:
    """Let autocast for CUDA act on CPU tensors, and questions about it be answered by theirs."""
    exchange(torch.amp.autocast_mode.autocast, "__init__", _on_cpu, undo)
    exchange(torch, "is_autocast_enabled", _answered_by_cpu, undo)
    exchange(torch, "get_autocast_dtype", _answered_by_cpu, undo)
    exchange(torch, "get_autocast_gpu_dtype", _answered_by_cpu_dtype, undo)


def _on_cpu(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(  # noqa: N807 -- it stands in for one
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if _is_traced(device_type):
            device_type, dtype = "cpu", dtype or torch.float16  # CUDA's default, the CPU's is bf16
        original(self, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    return __init__


def _answered_by_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*device_type: str) -> Any:
        if current_gpu() is not None and all(map(_is_traced, device_type)):
            device_type = ("cpu",)
        return original(*device_type)

    return ask


def _answered_by_cpu_dtype(original: Callable[[], torch.dtype]) -> Callable[[], torch.dtype]:
    return lambda: original() if current_gpu() is None else torch.get_autocast_dtype("cpu")
