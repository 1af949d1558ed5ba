"""The allocator's segments and blocks at one moment, as values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memlab.allocator.blocks import Block
from memlab.allocator.history import Context


@dataclass(frozen=True, slots=True)
class SegmentBlock:
    """A stretch of a segment.

    Args:
        address: where it begins.
        size: its bytes.
        requested: bytes the program asked for, 0 when it is free.
        allocated: whether it is in use.
        context: where the request came from.
    """

    address: int
    size: int
    requested: int
    allocated: bool
    context: Context


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory from the driver in one piece, or a mapped stretch of an expandable segment.

    Args:
        address: where it begins.
        stream: number of the stream it serves.
        is_small: whether it belongs to the pool of blocks up to 1 MiB.
        is_expandable: whether it is part of an expandable segment.
        blocks: what it is divided into, by address.
    """

    address: int
    stream: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[SegmentBlock, ...]

    @property
    def size(self) -> int:
        """All its bytes."""
        return sum(block.size for block in self.blocks)

    @property
    def allocated(self) -> int:
        """Bytes of its blocks in use."""
        return sum(block.size for block in self.blocks if block.allocated)

    @property
    def requested(self) -> int:
        """Bytes the program asked for."""
        return sum(block.requested for block in self.blocks)


def segments_of(blocks: Iterable[Block]) -> tuple[Segment, ...]:
    """Put blocks together into their segments, by address."""
    heads = (block for block in blocks if block.prev is None or not block.prev.mapped)
    return tuple(_segment(head) for head in sorted(heads, key=lambda head: head.address))


def _segment(head: Block) -> Segment:
    blocks = []
    block: Block | None = head
    while block is not None and block.mapped:
        blocks.append(SegmentBlock(block.address, block.size, block.requested, block.allocated, block.context))
        block = block.next
    return Segment(head.address, head.stream, head.pool.is_small, head.range is not None, tuple(blocks))
