"""Sizes of a request: of its block, its pool, and the request to the driver.

1. A request is rounded up: to 512 bytes, or to a fraction of a power of two where settings say so.
2. Blocks up to 1 MiB live in the small pool, whose segments are 2 MiB.
3. Larger ones live in the large pool: below 10 MiB they share a segment of 20 MiB (`large_segment_size_mb`),
   from there on they get a segment of their own, rounded up to 2 MiB.
"""

from __future__ import annotations

# https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/AllocatorConfig.h#L16-L24
SMALL_SEGMENT_BYTES = 2097152  # kSmallBuffer
MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BLOCK_BYTES = 1048576  # kSmallSize: the largest block of the small pool
MIN_OWN_SEGMENT_BYTES = 10485760  # kMinLargeAlloc: from here on a request gets a segment of its own
OWN_SEGMENT_STEP_BYTES = 2097152  # kRoundLarge

# https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/AllocatorConfig.h#L339
LARGE_SEGMENT_BYTES = 20971520  # large_segment_size_ by default

# https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/AllocatorConfig.cpp: kRoundUpPowerOfTwoIntervals and
# kRoundUpPowerOfTwoStart; interval i holds sizes from 2**i MiB, the first one also everything smaller
DIVISION_INTERVALS = 16
_FIRST_INTERVAL_BITS = 20

# std::numeric_limits<size_t>::max(), what C++ keeps for a limit that is not set
UNLIMITED_BYTES = 2**64 - 1


def round_up(size: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `size`."""
    return -(-size // step) * step


def interval_of(size: int) -> int:
    """Return which of the sixteen intervals of `roundup_power2_divisions` a size falls into."""
    return min(max(size.bit_length() - 1 - _FIRST_INTERVAL_BITS, 0), DIVISION_INTERVALS - 1)


def round_size(size: int, divisions: tuple[int, ...]) -> int:
    """The block size for a request (`round_size` in CUDACachingAllocator.cpp).

    Args:
        size: bytes requested, at least 1.
        divisions: parts each power of two is divided into, one number per interval; below 2 it is not.

    Example:
        >>> round_size(1, (0,) * 16), round_size(1000, (0,) * 16)
        (512, 1024)
        >>> round_size(5 * 2**20 + 1, (4,) * 16) / 2**20
        6.0
    """
    if size < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    parts = divisions[interval_of(size)]
    if parts > 1 and size > MIN_BLOCK_BYTES * parts:
        return round_to_division(size, parts)
    return round_up(size, MIN_BLOCK_BYTES)


def round_to_division(size: int, parts: int) -> int:
    """Round up to the next of `parts` equal steps between two powers of two."""
    floor = 1 << (size.bit_length() - 1)
    # at most 512 parts fit between two powers of two of this size: `round_size` sees to it
    return round_up(size, floor // parts)


def segment_size(block_bytes: int, large_segment_bytes: int = LARGE_SEGMENT_BYTES) -> int:
    """Return what is asked of the driver when no cached block fits (`get_allocation_size`).

    Example:
        >>> [segment_size(int(mib * 2**20)) // 2**20 for mib in (1, 1.5, 10, 11.2)]
        [2, 20, 10, 12]
    """
    if block_bytes <= SMALL_BLOCK_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_OWN_SEGMENT_BYTES:
        return large_segment_bytes
    return round_up(block_bytes, OWN_SEGMENT_STEP_BYTES)
