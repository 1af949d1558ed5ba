"""Kernels in torch's dispatcher for the time of a trace.

Composite operators choose between kernels by device, deep inside C++. A kernel registered at
AutogradCPU or AutocastCPU meets each call at that very place, wherever it comes from: Python, another
composite operator, a recomputation in the backward pass. The rules of `cuda_thread` hold: in threads
that trace nothing the call goes on to where it went before.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memlab.measuring.ledger import Ledger
from memlab.runtime.dispatch import StorageWatch, WatchingMode
from memlab.trace.cuda_thread import current_gpu, missing

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Registration:
    """A kernel and its place."""

    operator: str  # overload, as in "softmax.int" or "dropout"
    key: str  # dispatch key, "AutogradCPU" or "AutocastCPU"
    # called as `here(overload, *args, **kwargs)` in a thread that traces; NotImplemented hands the call on
    here: Kernel
    # the same for all other threads, where a kernel of torch is covered up; None hands the call on
    elsewhere: Kernel | None = None


def overload(operator: str) -> Any:
    """The aten overload of this name.

    Example:
        >>> overload("softmax.int")
        <OpOverload(op='aten.softmax', overload='int')>
    """
    packet, _, name = operator.partition(".")
    try:
        return getattr(getattr(torch.ops.aten, packet), name or "default")
    except AttributeError:
        raise missing(f"operator aten::{operator}") from None


def exists(operator: str) -> bool:
    """Return whether this torch has an aten operator."""
    return bool(torch._C._dispatch_has_kernel(f"aten::{operator}"))


@functools.cache
def operators_with(key: str) -> frozenset[str]:
    """Every aten operator that has a kernel of its own at a dispatch key."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(name.removeprefix("aten::") for name in names if has_kernel(name, key))


def register(registrations: Iterable[Registration], undo: ExitStack) -> None:
    """Put kernels into the dispatcher; `undo` gets what takes them out again."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    undo.callback(library._destroy)
    with _no_word_about_covering():
        for registration in registrations:
            kernel = _kernel(registration)
            library.impl(registration.operator, kernel, registration.key, with_keyset=True)  # type: ignore[no-untyped-call]


@contextmanager
def _no_word_about_covering() -> Iterator[None]:
    """Torch says once per process that a kernel covers another; keep that for whoever needs it."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # so the "once" is not used up
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_warn_always(always)


def _kernel(registration: Registration) -> Kernel:
    operator = overload(registration.operator)
    here, elsewhere = registration.here, registration.elsewhere
    hand_on = _ON[registration.key](operator)

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        chosen = elsewhere if current_gpu() is None else here
        result = NotImplemented if chosen is None else chosen(operator, *args, **kwargs)
        return hand_on(keyset, *args, **kwargs) if result is NotImplemented else result

    return kernel


def _on_below_autocast(operator: Any) -> Kernel:
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)
    return lambda keyset, *args, **kwargs: operator.redispatch(keyset & below, *args, **kwargs)


def _on_to_its_parts(operator: Any) -> Kernel:
    """Take a composite operator apart, where torch would; below autograd it would have no gradient."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), composite):
        raise missing(f"composite operator {operator.name()}")
    return lambda _, *args, **kwargs: operator._op_dk(composite, *args, **kwargs)


_ON: dict[str, Callable[[Any], Kernel]] = {"AutocastCPU": _on_below_autocast, "AutogradCPU": _on_to_its_parts}


def is_watched() -> bool:
    """Return whether modes are in force in every step, as in selective checkpointing: torch writes less in place then.

    What watches for writes does so in the first run alone.
    """
    modes = _get_current_dispatch_mode_stack()
    return any(isinstance(mode, WatchingMode) and not isinstance(mode, (Ledger, StorageWatch)) for mode in modes)
