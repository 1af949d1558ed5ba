"""Accelerators: what the backend of a device has, and how it is asked. No other module knows backends by their names.

A backend is named by torch's device type: "cuda" (ROCm's too), "xpu", "mps", or what a package calls its own. Its module
(`torch.get_device_module`) is asked first, and `torch.accelerator` where that has no such function. What neither has is missing: whoever needs it does without, or refuses by `name_of`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_HOST = ("cpu", "meta")
_NAMES = {"cuda": "ROCm" if torch.version.hip else "CUDA", "xpu": "XPU", "mps": "MPS"}
# whose memory is that of the host: what goes there frees nothing
_SHARING = ("cpu", "mps")
# of any other backend torch.accelerator.empty_host_cache may end the process: it asks for an allocator that need not be there
_CACHING_PINNED = ("cuda", "xpu")


@dataclass(frozen=True)
class Counters:
    """Bytes that the allocator of a device has counted; without peaks where its backend counts none."""

    allocated: int = 0
    reserved: int = 0
    allocated_peak: int | None = 0
    reserved_peak: int | None = 0
    requested: int = 0  # as asked for: a block may be up to a MiB larger
    active: int = 0
    inactive_split: int = 0  # in pieces between tensors
    retries: int = 0  # how often the cache was given back because there was no room

    @property
    def has_peaks(self) -> bool:
        return self.allocated_peak is not None


# --- which ------------------------------------------------------------------------------------------


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is neither the host nor one without values, and torch has a module to ask about it.

    Example:
        >>> is_accelerator(torch.device("cuda")), is_accelerator(torch.device("meta")), is_accelerator(torch.device("xla"))
        (True, False, False)
    """
    return device.type not in _HOST and hasattr(torch, device.type)


def device_type() -> str | None:
    """Return the device type of the accelerators that torch finds; None where it finds none."""
    kind = _built_for()
    return kind if _ask(torch.device(kind), "is_available")() else None


def name_of(device: torch.device) -> str:
    """Return what people call the backend of a device.

    Example:
        >>> name_of(torch.device("mps")), name_of(torch.device("cpu"))
        ('MPS', 'CPU')
    """
    return _NAMES.get(device.type, device.type.upper() if device.type in _HOST else device.type)


def is_in_use() -> bool:
    """Return whether this process has begun to use an accelerator."""
    kind = torch.device(_built_for())
    is_initialized = getattr(_module(kind), "is_initialized", None)
    return bool(is_initialized()) if is_initialized is not None else device_type() is not None


def with_index(device: torch.device) -> torch.device:
    """Return a device with its number: of the current one where it has none."""
    if device.index is not None:
        return device
    return torch.device(device.type, _ask(device, "current_device", "current_device_index")())


def current() -> torch.device:
    """Return the accelerator that is the current one."""
    return with_index(torch.device(_built_for()))


def every() -> Sequence[torch.device]:
    """Return the accelerators that this process can use."""
    kind = _built_for()
    return [torch.device(kind, index) for index in range(_ask(torch.device(kind), "device_count")())]


def device_name(device: torch.device) -> str:
    """Return what the driver calls a device, or else its backend."""
    get = getattr(_module(device), "get_device_name", None)
    return name_of(device) if get is None else str(get(device))


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU of NVIDIA's; None for other devices, whose numbers mean something else."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def shares_host_memory(device: torch.device) -> bool:
    """Return whether the memory of a device is that of the host.

    Example:
        >>> shares_host_memory(torch.device("mps")), shares_host_memory(torch.device("xpu"))
        (True, False)
    """
    return device.type in _SHARING


def allocates_like_cuda(device: torch.device) -> bool:
    """Return whether the allocator of a device follows the rules that `memlab.allocator` has.

    ROCm's is CUDA's own; XPU's has the same sizes, pools and ways of splitting (c10/xpu/XPUCachingAllocator.cpp: `round_size`,
    `get_allocation_size`, `get_free_block`).
    """
    return device.type in ("cuda", "xpu")


def has_kernel(operator: str, device: torch.device) -> bool:
    """Return whether a registered operator has a kernel of its own for a device.

    Example:
        >>> has_kernel("aten::mm", torch.device("cpu")), has_kernel("aten::no_such_operator", torch.device("cpu"))
        (True, False)
    """
    try:
        key = torch._C._dispatch_key_for_device(device.type)
        return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
    except RuntimeError:  # there is no such operator
        return False


@cache
def takes_other_data(device: torch.device) -> bool:
    """Return whether torch lets a parameter of a device have its data on the host (`parameter.data = …`).

    Example:
        >>> takes_other_data(torch.device("cpu"))
        True
    """
    there, here = (torch.empty(0, device=each) for each in (device, "cpu"))
    return bool(torch._has_compatible_shallow_copy_type(there, here))


# --- memory -----------------------------------------------------------------------------------------


def counters(device: torch.device | None) -> Counters | None:
    """Return what the allocator of a device, or of the current one, has counted; None where its backend counts nothing."""
    module = _module(device or torch.device(_built_for()))
    # not `memory_stats` where it can be helped: that flattens hundreds of counters on every call
    nested: Callable[[torch.device | None], Mapping[str, Any]] | None = getattr(
        module, "memory_stats_as_nested_dict", None
    )
    if nested is not None:
        return _of_nested(nested(device))
    flat = getattr(module, "memory_stats", torch.accelerator.memory_stats)
    with suppress(RuntimeError):  # an allocator that counts nothing
        return _of_flat(flat(device))
    allocated = getattr(module, "current_allocated_memory", None)
    if allocated is None:
        return None
    held = getattr(module, "driver_allocated_memory", allocated)
    return Counters(allocated(), held(), None, None, allocated(), allocated())


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of a device that tensors of this process take."""
    return (counters(device) or Counters()).allocated


def has_peaks(device: torch.device) -> bool:
    """Return whether the backend of a device counts the peaks of its allocator."""
    if not is_accelerator(device):
        return False
    counted = counters(device)
    return counted is not None and counted.has_peaks


def peak_bytes(device: torch.device) -> int:
    """Return the highest bytes allocated since peaks were reset; where none are counted, what the allocator holds now."""
    counted = counters(device) or Counters()
    return counted.reserved if counted.allocated_peak is None else counted.allocated_peak


def reset_peaks(device: torch.device) -> None:
    """Have peaks start from what lives now."""
    _ask(device, "reset_peak_memory_stats")(device)


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a device that the driver has free, and all of them."""
    module = _module(device)
    recommended = getattr(module, "recommended_max_memory", None)
    if recommended is not None:
        total = int(recommended())
        return max(0, total - (counters(device) or Counters()).reserved), total
    asked = getattr(module, "mem_get_info", torch.accelerator.get_memory_info)
    with suppress(RuntimeError):
        free, total = asked(device)
        return int(free), int(total)
    total = total_bytes(device)
    return max(0, total - (counters(device) or Counters()).reserved), total


def total_bytes(device: torch.device) -> int:
    """Return the size of a device's memory."""
    properties = getattr(_module(device), "get_device_properties", None)
    return free_and_total(device)[1] if properties is None else int(properties(device).total_memory)


def most_bytes(device: torch.device) -> int:
    """Return what the allocator of this process has reserved or could still reserve, in bytes."""
    reserved = (counters(device) or Counters()).reserved
    free, total = free_and_total(device)
    return int(min(reserved + free, allowed_share(device) * total))


def allowed_share(device: torch.device) -> float:
    """Return the share of a device that the allocator of this process may reserve; where the backend cannot say, 1 is returned."""
    return float(getattr(_module(device), "get_per_process_memory_fraction", lambda _device: 1.0)(device))


def can_limit(device: torch.device) -> bool:
    """Return whether the allocator of a device can be given a size; the share of MPS is of all memory of the machine, and cannot be read."""
    limit = getattr(_module(device), "set_per_process_memory_fraction", None)
    return limit is not None and len(inspect.signature(limit).parameters) > 1


def limit_share(device: torch.device, share: float) -> None:
    """Have the allocator of this process reserve no more than a share of a device."""
    _module(device).set_per_process_memory_fraction(share, device)


def empty_cache() -> None:
    """Give what allocators have cached back to the driver, where an accelerator is in use."""
    if is_in_use():
        _ask(torch.device(_built_for()), "empty_cache")()


def empty_host_cache() -> None:
    """Give pinned memory that is cached back to the system, where the backend is known to cache any."""
    if _built_for() not in _CACHING_PINNED or not is_in_use():
        return
    (getattr(torch._C, "_host_emptyCache", None) or torch.accelerator.empty_host_cache)()


# --- streams and events -----------------------------------------------------------------------------


@cache
def has_streams(device: torch.device) -> bool:
    """Return whether work can be queued beside the computation of a device.

    Example:
        >>> has_streams(torch.device("cpu"))
        False
    """
    if not is_accelerator(device):
        return False
    if hasattr(_module(device), "Stream"):
        return True
    try:
        return bool(torch.Stream(device) != current_stream(device))
    except RuntimeError:  # there is one alone
        return False


def new_stream(device: torch.device) -> Any:
    """Return another stream of a device."""
    return getattr(_module(device), "Stream", torch.Stream)(device)


def current_stream(device: torch.device) -> Any:
    """Return the stream in which a device computes."""
    return _ask(device, "current_stream")(device)


def in_stream(stream: Any) -> AbstractContextManager[Any]:
    """Context in which work goes to a stream."""
    enter = getattr(_module(stream.device), "stream", None)
    return stream if enter is None else enter(stream)  # type: ignore[no-any-return]


def timed_event(device: torch.device) -> Any:
    """Return an event that tells times, recorded in the stream in which a device computes."""
    module = _module(device)
    # of a backend with one stream alone the module's own takes none
    own = module.Event if hasattr(module, "Event") and hasattr(module, "Stream") else None
    event = torch.Event(device, enable_timing=True) if own is None else own(enable_timing=True)
    event.record(current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Make the host wait for all work of a device."""
    torch.accelerator.synchronize(device)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which a device is the current one."""
    enter = getattr(_module(device), "device", None)
    return torch.accelerator.device_index(device.index) if enter is None else enter(device)


# --- random numbers ---------------------------------------------------------------------------------


def random_states() -> Sequence[torch.Tensor]:
    """States of the generators of all accelerators that are in use; of none where the backend has no generators."""
    if not is_in_use():
        return ()
    module = _module(torch.device(_built_for()))
    if hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()] if hasattr(module, "get_rng_state") else ()


def set_random_states(states: Sequence[torch.Tensor]) -> None:
    """Put back what `random_states` returned."""
    module = _module(torch.device(_built_for()))
    if states and hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(states)
    elif states:
        module.set_rng_state(states[0])


def random_state(device: torch.device) -> torch.Tensor | None:
    """State of the generator of one device; None where the backend has none."""
    read = getattr(_module(device), "get_rng_state", None) if is_accelerator(device) else None
    return None if read is None else read(device)


# --- within this module -----------------------------------------------------------------------------


def _built_for() -> str:
    """Return the device type of the accelerator that torch is built for, or a package has brought; "cuda", which then says that it has none, for none."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and is_accelerator(found) else "cuda"


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _ask(device: torch.device, name: str, general: str = "") -> Callable[..., Any]:
    """Return a function of the backend's own, or that of `torch.accelerator`, which may have another name."""
    own: Callable[..., Any] | None = getattr(_module(device), name, None)
    return own or getattr(torch.accelerator, general or name)


def _of_nested(found: Mapping[str, Any]) -> Counters:
    def value(name: str, which: str) -> int:
        return int(found.get(name, {}).get("all", {}).get(which, 0))

    return _of(value, found)


def _of_flat(found: Mapping[str, Any]) -> Counters:
    return _of(lambda name, which: int(found.get(f"{name}.all.{which}", 0)), found)


def _of(value: Callable[[str, str], int], found: Mapping[str, Any]) -> Counters:
    allocated, peak = (value("allocated_bytes", which) for which in ("current", "peak"))
    is_counted = peak >= allocated  # where it is not it is 0
    return Counters(
        allocated=allocated,
        reserved=value("reserved_bytes", "current"),
        allocated_peak=peak if is_counted else None,
        reserved_peak=value("reserved_bytes", "peak") if is_counted else None,
        # these, too, are 0 of a backend that does not count them
        requested=value("requested_bytes", "current") or allocated,
        active=max(allocated, value("active_bytes", "current")),
        inactive_split=value("inactive_split_bytes", "current"),
        retries=int(found.get("num_alloc_retries", 0)),
    )
