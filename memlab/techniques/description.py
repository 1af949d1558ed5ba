"""Description of a technique: for the cheat sheet, and for users who choose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Description:
    """One setting of a technique in words.

    Example:
        >>> Description("--accumulate N", "activations ÷ N", "small kernels", "same gradient", "batches of one row").flags
        '--accumulate N'
    """

    flags: str  # what is typed for it
    saves: str  # which bytes on the device, and how many of them
    costs: str  # in time, or off the device
    exactness: str  # how its gradients, updates and losses relate to those of the loop as written
    gives_nothing: str  # where it does not lower the peak, or is refused
