"""`Wire`: bytes that one rank sends, by the rings of the libraries that do it.

Of n ranks in a ring each sends (n - 1) / n of the whole for an all-gather or a reduce-scatter, and twice that for an
all-reduce, which is one after the other.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md ("Bus bandwidth")
"""

from __future__ import annotations


class Wire:
    """Bytes that a rank has sent.

    Args:
        ranks: number of ranks.

    Attributes:
        gathered_bytes: whole size of what was gathered.
        scattered_bytes: whole size of what was reduced and scattered.
        reduced_bytes: whole size of what was reduced for all.

    Example:
        >>> wire = Wire(4)
        >>> wire.all_reduced(1000)
        >>> wire.all_gathered(1000)
        >>> wire.sent_bytes
        2250
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.gathered_bytes = self.scattered_bytes = self.reduced_bytes = 0

    def all_gathered(self, whole_bytes: int) -> None:
        """Ranks have given each other their parts."""
        self.gathered_bytes += whole_bytes

    def reduce_scattered(self, whole_bytes: int) -> None:
        """Ranks have added something up, and each has a part of the sum."""
        self.scattered_bytes += whole_bytes

    def all_reduced(self, whole_bytes: int) -> None:
        """Ranks have added something up, and each has the sum."""
        self.reduced_bytes += whole_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has sent; it has received as many."""
        share = (self.ranks - 1) / self.ranks
        return round(share * (self.gathered_bytes + self.scattered_bytes + 2 * self.reduced_bytes))
