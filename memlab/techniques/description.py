"""Description of a technique: for the cheat sheet, and for users who choose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Description:
    """One setting of a technique in words.

    Args:
        flags: what is typed for it.
        saves: which bytes on the device, and how many of them.
        costs: in time, or off the device.
        exactness: how its gradients, updates and losses relate to those of the loop as written.
        gives_nothing: where it does not lower the peak, or is refused.

    Example:
        >>> Description("--accumulate N", "activations ÷ N", "small kernels", "same gradient", "batches of one row").flags
        '--accumulate N'
    """

    flags: str
    saves: str
    costs: str
    exactness: str
    gives_nothing: str
