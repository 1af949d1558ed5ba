"""Giving freed memory of the host back to the system.

While a model is built, long-lived tensors are made between short-lived ones twice their size, and the C library keeps
the holes: 110 to 140 MiB for a model of 210 MiB, measured. It gives them back when it is asked to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def give_back_freed_memory() -> None:
    """Return free pages of the heap to the system, where the C library is one that can (glibc)."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def _malloc_trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library; on Windows, None names no library
        return None
    return found
