"""`Evidence`: whether memory can run out in the step that begins, so that the loop is guarded only where it can.

A guard costs time and stands between a loop and its graph. It is there when one of these says so, and not otherwise:

1. The device was given a capacity.
2. The device is a GPU, and no step with a batch as large as this one has ended yet: nothing is known of it.
3. The device is a GPU, and the highest peak of the steps so far, with a margin, is more than this process can have:
   what its allocator has reserved, and what the driver has free at this moment.

A CPU without a capacity is never guarded: memory that runs out there ends the process, not the cell.

What is lost where memory runs out all the same (another process took it; a step needs more than one with a larger batch
did): the step that ran out, as without memlab. A forward pass is rescued even then, and from
that moment on every step is guarded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from memlab.runtime import accelerator

_MARGIN = 1.25  # of the highest peak: fragments of the allocator, and steps that differ a little


class Evidence:
    """Facts about one device while a loop trains on it.

    Example:
        >>> Evidence(torch.device("cpu"), None).is_limited
        False
        >>> seen = Evidence(torch.device("cuda"), None, lambda: 1000, lambda: 500)
        >>> seen.is_tight(8)
        True
        >>> seen.step_ended()
        >>> seen.is_tight(8), seen.is_tight(16)
        (False, True)
    """

    def __init__(
        self,
        device: torch.device,  # where the model is
        capacity_bytes: int | None,  # size the device was given, or None
        # what this process can have at the moment; by default asked of the driver and the allocator
        limit_bytes: Callable[[], int] | None = None,
        peak_bytes: Callable[[], int] | None = None,  # the highest peak of the step that ends
    ) -> None:
        self._always = capacity_bytes is not None
        self._is_gpu = accelerator.is_accelerator(device)
        self._limit_bytes = limit_bytes or (lambda: accelerator.most_bytes(device))
        self._peak_bytes = peak_bytes or (lambda: accelerator.peak_bytes(device))
        self._highest_bytes = 0
        self._most_elements = -1  # of a batch whose step has ended
        self._elements = -1  # of the step under way

    @property
    def is_limited(self) -> bool:
        """Return whether anything is known to end on this device at all."""
        return self._always or self._is_gpu

    def is_tight(self, elements: int) -> bool:
        """Return whether memory can run out in a step with a batch of so many elements."""
        self._elements = max(self._elements, elements)
        if self._always or not self._is_gpu:
            return self._always
        if self._elements > self._most_elements:
            return True
        return self._highest_bytes * _MARGIN > self._limit_bytes()

    def step_ended(self) -> None:
        """Take the peak of a step that is over into account."""
        if self._is_gpu and not self._always:
            self._highest_bytes = max(self._highest_bytes, self._peak_bytes())
        self._most_elements = max(self._most_elements, self._elements)
        self._elements = -1

    def ran_out(self) -> None:
        """Guard every step from now on: memory has run out where nothing said that it would."""
        self._always = True
