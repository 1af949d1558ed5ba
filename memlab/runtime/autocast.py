"""Autocast state: switched off for a while, or saved and entered again later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


def device_types() -> tuple[str, ...]:
    """Device types whose autocast state a training thread may hold."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


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
    """Keep no casts of weights beyond the operators that need them, should there be autocast."""
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    with torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), cache_enabled=False):
        yield


class AutocastState:
    """The autocast state at one moment, to be entered again, as a recomputation must."""

    def __init__(self) -> None:
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
        with ExitStack() as stack:
            for device_type, enabled, dtype in self._states:
                if not (enabled or torch.is_autocast_enabled(device_type)):
                    # off then and now: entering it changes the cache's setting, for which code is compiled anew
                    continue
                # the cache would hand casts made without gradients to a pass that needs them
                stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield
