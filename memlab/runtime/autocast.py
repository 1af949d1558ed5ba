"""Settings that a `with` block around a call makes: autocast, kernels, defaults, context variables; saved and entered again later."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from memlab.runtime import accelerator
from memlab.runtime.dispatch import HALF
from memlab.runtime.graphs import repeatable_hooks
from memlab.runtime.interrupts import deferred_interrupts


def as_fp32(leaf: Any) -> Any:
    """Return a tensor of half precision in fp32, and anything else as it is."""
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in HALF else leaf


def device_types() -> tuple[str, ...]:
    """Device types whose autocast state a training thread may hold."""
    found = accelerator.device_type()
    return ("cpu",) if found is None else ("cpu", found)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Run without autocast, whatever surrounds it.

    Where there is none, nothing is entered: casts of weights are cached until the outermost context is left, so a
    recomputation within this one would keep those of every block.
    """
    with ExitStack() as stack:
        for device_type in device_types():
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextmanager
def without_cached_casts(device_type: str) -> Iterator[None]:
    """Keep no casts of weights beyond the operators that need them, should there be autocast.

    Nothing else is set: after a Ctrl-C this may be left later than an autocast around it.
    """
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    are_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(are_cached)


@contextmanager
def autocast_as_before() -> Iterator[None]:
    """Leave autocast as it was, also where a Ctrl-C comes while torch enters or leaves it.

    It would be on from then on, or torch would take itself for being within it, and go on with casts of weights as they were.
    """
    cached, depth = torch.is_autocast_cache_enabled(), _depth()
    states = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in device_types()]
    try:
        yield
    except BaseException:
        with deferred_interrupts():
            for device_type, enabled, dtype in states:
                torch.set_autocast_enabled(device_type, enabled)
                torch.set_autocast_dtype(device_type, dtype)
            torch.set_autocast_cache_enabled(cached)
            for _ in range(_depth() - depth):
                torch.autocast_decrement_nesting()
            for _ in range(depth - _depth()):
                torch.autocast_increment_nesting()
            if not depth:
                torch.clear_autocast_cache()
        raise


def _depth() -> int:
    """Return in how many contexts of autocast this thread is, as torch counts them."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


# settings that choose kernels, and the default dtype, by what reads and what writes them; older torch lacks some
_CHOICES = tuple(
    (getattr(owner, reads), getattr(owner, writes))
    for owner, reads, writes in (
        (torch.backends.cuda, "flash_sdp_enabled", "enable_flash_sdp"),
        (torch.backends.cuda, "mem_efficient_sdp_enabled", "enable_mem_efficient_sdp"),
        (torch.backends.cuda, "math_sdp_enabled", "enable_math_sdp"),
        (torch.backends.cuda, "cudnn_sdp_enabled", "enable_cudnn_sdp"),
        (torch._C, "_get_sdp_priority_order", "_set_sdp_priority_order"),
        (torch._C, "_get_cudnn_enabled", "_set_cudnn_enabled"),
        (torch._C, "_get_mkldnn_enabled", "_set_mkldnn_enabled"),
        (torch._C, "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
        (torch._C, "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
        (torch, "get_deterministic_debug_mode", "set_deterministic_debug_mode"),
        (torch, "get_default_dtype", "set_default_dtype"),
    )
    if hasattr(owner, reads) and hasattr(owner, writes)
)


_UNSET: Any = object()
# by it, drawing random numbers is refused where several gradients are asked for at once (`is_grads_batched`)
_DRAWS_ONCE = torch._C.DispatchKeySet(torch._C._parse_dispatch_key("VmapMode"))  # type: ignore[arg-type]


_COPIED, _MOST_ITEMS = (dict, list, tuple, set), 256  # containers of context variables


class CallSettings:
    """Settings that choose kernels and defaults at one moment (`sdpa_kernel`, `cudnn.flags`, `torch.device`), to be entered again.

    Other kernels save other tensors, and give other rounding; the default device is that of a thread. So are variables of
    `contextvars`, among them the contexts of `decimal` and NumPy. Their lists and dicts are copied: a model may collect in them
    what comes later, whose graph holds these settings, and no garbage collector sees such a circle.
    """

    def __init__(self) -> None:
        self._values: list[Any] = [read() for read, _ in _CHOICES]
        self._device = torch.get_default_device()
        self.variables = [(each, _copied(value)) for each, value in contextvars.copy_context().items()]

    @contextmanager
    def entered(self) -> Iterator[None]:
        with torch._C._ExcludeDispatchKeyGuard(_DRAWS_ONCE), ExitStack() as stack:
            for (read, write), value in zip(_CHOICES, self._values, strict=True):
                if (now := read()) != value:
                    stack.callback(write, now)
                    write(value)
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
            for variable, value in self.variables:
                if variable.get(_UNSET) is not value:
                    stack.callback(variable.reset, variable.set(value))
            yield


def _copied(value: Any, depth: int = 3) -> Any:
    """Copy lists, dicts and sets, and those in them; by hand, as this is done for each part of each call.

    Large ones stay as they are, and those that lie deep, as one that holds itself does.
    """
    kind = type(value)
    if kind not in _COPIED or not depth or len(value) > _MOST_ITEMS:
        return value
    if kind is dict:
        return {key: _copied(each, depth - 1) for key, each in value.items()}
    return kind(value) if kind is set else kind([_copied(each, depth - 1) for each in value])


class CallContext:
    """Surroundings of a call: autocast, `CallSettings`, hooks on saved tensors; entered again where the call is run again."""

    def __init__(self) -> None:
        self._settings, self._saving = CallSettings(), repeatable_hooks()
        self._states = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in device_types()]

    @property
    def is_on(self) -> bool:
        """Return whether the loop runs under autocast."""
        return any(enabled for _, enabled, _ in self._states)

    @property
    def scales_gradients(self) -> bool:
        """Return whether the loop runs in fp16, whose gradients vanish unless they are scaled."""
        return any(enabled and dtype is torch.float16 for _, enabled, dtype in self._states)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self._settings.entered(), self._saving, ExitStack() as stack:
            for device_type, enabled, dtype in self._states:
                if not (enabled or torch.is_autocast_enabled(device_type)):
                    # off then and now: entering it changes the cache's setting, for which code is compiled anew
                    continue
                # the cache would hand casts made without gradients to a pass that needs them
                stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield
