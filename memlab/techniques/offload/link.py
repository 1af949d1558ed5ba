"""Speed of the link to a GPU and of updates on the host, which decide where optimizer state is updated.

Measured once for each GPU, in some tenths of a second, when state is first offloaded from it. Random state, streams of
others and dispatch modes do not notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memlab.runtime import accelerator
from memlab.runtime.host_memory import pinned

_GIGA = 10**9
_COPIED_BYTES = 16 * 2**20  # of which the GPU, which may be nearly full, holds two
_UPDATED_ELEMENTS = 2**22  # with its four tensors more than caches hold
_REPEATS = 3
# over the link for each parameter: two moments in fp32 there and back, or a gradient there and an update back
_STREAMED_BYTES = 8
_HOST_BYTES = 4
# an estimate has to be better by so much before results that differ in the last bit are worth it
_WORTHWHILE = 1.2

_known: dict[torch.device, Link] = {}


@dataclass(frozen=True)
class Link:
    """Rates between a GPU and its host.

    Example:
        >>> pcie4 = Link(down=25e9, up=25e9, both=20e9, updated=3e9)
        >>> pcie4.favours_host
        True
        >>> pcie4.verdict
        'optimizer state is updated on the host: 3.0 G parameters/s there, 2.5 G/s streamed to the GPU \
(link 25 GB/s down, 25 up, 20 each way at once)'
        >>> Link(down=400e9, up=400e9, both=350e9, updated=3e9).favours_host
        False
    """

    down: float
    up: float
    both: float
    updated: float

    @property
    def streamed_rate(self) -> float:
        """Parameters per second when moments visit the GPU, both directions at once."""
        return min(self.both, self.down, self.up) / _STREAMED_BYTES

    @property
    def host_rate(self) -> float:
        """Parameters per second when the host updates while the next gradients and the last updates cross."""
        return min(self.updated, self.down / _HOST_BYTES, self.up / _HOST_BYTES)

    @property
    def favours_host(self) -> bool:
        """Return whether updating on the host is faster by enough."""
        return self.host_rate >= _WORTHWHILE * self.streamed_rate

    @property
    def verdict(self) -> str:
        """The choice and its numbers, in words."""
        link = f"link {self.down / _GIGA:.0f} GB/s down, {self.up / _GIGA:.0f} up, {self.both / _GIGA:.0f} each way at once"
        host, streamed = f"{self.host_rate / _GIGA:.1f} G", f"{self.streamed_rate / _GIGA:.1f} G"
        if self.favours_host:
            return f"optimizer state is updated on the host: {host} parameters/s there, {streamed}/s streamed to the GPU ({link})"
        return f"optimizer state is streamed to the GPU: {streamed} parameters/s, {host}/s updated on the host ({link})"


def measured(device: torch.device) -> Link:
    """The link of a GPU; the first call measures it. Raises `torch.OutOfMemoryError`: the GPU has no room for what is copied."""
    if device not in _known:
        with _disable_current_modes(), torch.no_grad(), torch.inference_mode(False):
            _known[device] = _measured(device)
    return _known[device]


def _measured(device: torch.device) -> Link:
    there = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    here, other_here = (pinned(_COPIED_BYTES).zero_() for _ in range(2))
    other_there = torch.zeros_like(there)
    side = accelerator.new_stream(device)

    def both_ways() -> None:
        side.wait_stream(accelerator.current_stream(device))
        with accelerator.in_stream(side):
            other_there.copy_(other_here, non_blocking=True)
        here.copy_(there, non_blocking=True)
        accelerator.current_stream(device).wait_stream(side)

    return Link(
        down=_rate(_COPIED_BYTES, lambda: here.copy_(there, non_blocking=True), device),
        up=_rate(_COPIED_BYTES, lambda: there.copy_(here, non_blocking=True), device),
        both=_rate(_COPIED_BYTES, both_ways, device),
        updated=host_update_rate(),
    )


def host_update_rate() -> float:
    """Parameters per second of torch's fused AdamW on the CPU, zeroing its output included."""
    tensors = [torch.zeros(_UPDATED_ELEMENTS, dtype=torch.float32, device="cpu") for _ in range(4)]
    change, gradient, first, second = ([tensor] for tensor in tensors)
    step = [torch.ones((), dtype=torch.float32, device="cpu")]

    def update() -> None:
        change[0].zero_()
        torch._fused_adamw_(
            change, gradient, first, second, [], step,
            lr=0.0, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return _rate(_UPDATED_ELEMENTS, update)


def _rate(amount: float, call: Callable[[], Any], device: torch.device | None = None) -> float:
    """Amount per second in the shortest of a few runs, after one to warm up."""
    shortest = float("inf")
    for repeat in range(_REPEATS + 1):
        _wait_for(device)
        start = perf_counter()
        call()
        _wait_for(device)
        if repeat:
            shortest = min(shortest, perf_counter() - start)
    return amount / shortest


def _wait_for(device: torch.device | None) -> None:
    if device is not None:
        accelerator.synchronize(device)
