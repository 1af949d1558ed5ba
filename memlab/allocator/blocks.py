"""The device's memory, blocks of it, pools that keep the free ones in order of size, and segments as values."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memlab.allocator.history import NO_CONTEXT, Context
from memlab.allocator.sizes import MIN_BLOCK_BYTES, OWN_SEGMENT_STEP_BYTES, SMALL_BLOCK_BYTES, round_up

# where a CUDA process finds its device memory; only the order of addresses matters, and that traces look familiar
_FIRST_ADDRESS = 0x7F00_0000_0000


class DeviceMemory:
    """Memory that is taken and given back by whole segments and pages."""

    __slots__ = ("next_address", "peak_bytes", "used_bytes")

    def __init__(self) -> None:
        self.used_bytes = self.peak_bytes = 0
        self.next_address = _FIRST_ADDRESS

    def take(self, size: int) -> None:
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def give_back(self, size: int) -> None:
        self.used_bytes -= size

    def new_addresses(self, size: int) -> int:
        """Addresses no segment had before, so that a trace can tell all of them apart; none begins where another ends."""
        address = self.next_address
        self.next_address += round_up(size, OWN_SEGMENT_STEP_BYTES) + OWN_SEGMENT_STEP_BYTES
        return address


class Range:
    """Addresses set aside for one expandable segment, of which pages are mapped as they are needed."""

    __slots__ = ("address", "page_bytes", "size")

    def __init__(self, address: int, size: int, page_bytes: int) -> None:
        self.address = address
        self.size = size
        self.page_bytes = page_bytes


class Block:
    """A stretch of one segment: in use, free, or (in an expandable segment) not mapped."""

    __slots__ = (
        "address", "allocated", "context", "mapped", "next", "pool", "prev", "range", "requested", "size", "stream",
    )  # fmt: skip

    def __init__(self, address: int, size: int, stream: int, pool: BlockPool, range: Range | None = None) -> None:  # noqa: A002
        self.address = address
        self.size = size
        self.stream = stream
        self.pool = pool
        self.range = range
        self.requested = 0
        self.allocated = False
        self.mapped = True
        self.prev: Block | None = None
        self.next: Block | None = None
        self.context: Context = NO_CONTEXT

    def __repr__(self) -> str:
        state = "allocated" if self.allocated else "free" if self.mapped else "unmapped"
        return f"Block(address={self.address:#x}, size={self.size}, stream={self.stream}, {state})"

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    @property
    def reach(self) -> int:
        """Its size with the unmapped addresses behind it, into which it could grow."""
        return self.size + (self.next.size if self.next is not None and not self.next.mapped else 0)

    def split_off(self, size: int) -> Block:
        """Cut a new block of this size off the low end; this one keeps the rest."""
        low = Block(self.address, size, self.stream, self.pool, self.range)
        low.mapped = self.mapped
        self.address += size
        self.size -= size
        low.link(self.prev, self)
        return low

    def link(self, before: Block | None, after: Block | None) -> None:
        """Stand between two neighbours."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self

    def absorb(self, other: Block | None) -> None:
        """Merge with a neighbour where that is free and in the same state."""
        if other is None or other.allocated or other.mapped != self.mapped:
            return
        other.pool.remove(other)
        if other is self.prev:
            self.address = other.address
            self.link(other.prev, self.next)
        else:
            self.link(self.prev, other.next)
        self.size += other.size


# torch orders free blocks by stream, size, age of the segment (since 2.13, https://github.com/pytorch/pytorch/pull/183591)
# and address; addresses here rise with age. Size and address make one number, as numbers are compared faster than pairs
_ADDRESS_BITS = 64
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class BlockPool:
    """The free and the unmapped blocks of one pool."""

    def __init__(self, *, is_small: bool, is_expandable: bool = False) -> None:
        self.is_small = is_small
        self.keeps_large = not (is_small or is_expandable)  # whether blocks above the split limit stay whole
        # what is left of a block is split off from here on
        self.least_rest_bytes = SMALL_BLOCK_BYTES + 1 if self.keeps_large else MIN_BLOCK_BYTES
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # sizes with addresses, by stream
        self._blocks: dict[int, Block] = {}  # the free ones, by address
        self.unmapped: defaultdict[int, list[tuple[int, Block]]] = defaultdict(list)  # by stream, by address

    def entries(self) -> tuple[int, ...]:
        """Sizes with addresses of what the default stream has free: equal where the same is free."""
        return tuple(self._free[0])

    def refill(self, entries: Iterable[int], used: Iterable[Block]) -> None:
        """Have what is told of free in place of what was, beside blocks in use."""
        self._free[0] = list(entries)
        self._blocks = {(at := each & _ADDRESS): Block(at, each >> _ADDRESS_BITS, 0, self) for each in self._free[0]}
        blocks = sorted([*self._blocks.values(), *used], key=lambda block: block.address)
        for block, before, after in zip(blocks, [None, *blocks], [*blocks[1:], None], strict=False):
            block.prev = before if before is not None and before.address + before.size == block.address else None
            block.next = after if after is not None and block.address + block.size == after.address else None

    def insert(self, block: Block) -> None:
        if block.mapped:
            insort(self._free[block.stream], block.size << _ADDRESS_BITS | block.address)
            self._blocks[block.address] = block
        else:
            insort(self.unmapped[block.stream], (block.address, block))

    def remove(self, block: Block) -> None:
        """Let a block go; its size and address are those it was inserted with."""
        if block.mapped:
            entries = self._free[block.stream]
            del entries[bisect_left(entries, block.size << _ADDRESS_BITS | block.address)]
            del self._blocks[block.address]
        else:
            unmapped = self.unmapped[block.stream]
            del unmapped[bisect_left(unmapped, (block.address,))]

    def free_blocks(self) -> Iterator[Block]:
        """All free blocks, by stream, size and address."""
        return (self._blocks[entry & _ADDRESS] for stream in sorted(self._free) for entry in self._free[stream])

    def take_best(self, size: int, stream: int, limit: int) -> Block | None:
        """Let go the smallest block that holds `size`, the one at the lowest address of equals (`get_free_block`).

        In an expandable segment a block is as large as it could become, so that the one at the end is used last. None, where
        that block has `limit` bytes or more.
        """
        entries = self._free[stream]
        index = bisect_left(entries, size << _ADDRESS_BITS)
        if index == len(entries):
            return None
        block = self._blocks[entries[index] & _ADDRESS]
        if block.range is not None:  # step on while the next block could grow to less than this one
            for at in range(index + 1, len(entries)):
                beyond = self._blocks[entries[at] & _ADDRESS]
                if beyond.reach >= block.reach:
                    break
                index, block = at, beyond
        if block.size >= limit:
            return None
        del entries[index], self._blocks[block.address]
        return block


@dataclass(frozen=True, slots=True)
class SegmentBlock:
    """A stretch of a segment."""

    address: int  # where it begins
    size: int  # its bytes
    requested: int  # bytes the program asked for, 0 when it is free
    allocated: bool  # whether it is in use
    context: Context  # where the request came from


@dataclass(frozen=True, slots=True)
class MemorySegment:
    """Memory from the driver in one piece, or a mapped stretch of an expandable segment."""

    address: int  # where it begins
    stream: int  # number of the stream it serves
    is_small: bool  # whether it belongs to the pool of blocks up to 1 MiB
    is_expandable: bool  # whether it is part of an expandable segment
    blocks: tuple[SegmentBlock, ...]  # what it is divided into, by address

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def allocated(self) -> int:
        return sum(block.size for block in self.blocks if block.allocated)

    @property
    def requested(self) -> int:
        return sum(block.requested for block in self.blocks)


def segments_of(blocks: Iterable[Block]) -> tuple[MemorySegment, ...]:
    """Put blocks together into their segments, by address."""
    heads = (block for block in blocks if block.prev is None or not block.prev.mapped)
    return tuple(_segment(head) for head in sorted(heads, key=lambda head: head.address))


def _segment(head: Block) -> MemorySegment:
    blocks = []
    block: Block | None = head
    while block is not None and block.mapped:
        blocks.append(SegmentBlock(block.address, block.size, block.requested, block.allocated, block.context))
        block = block.next
    return MemorySegment(head.address, head.stream, head.pool.is_small, head.range is not None, tuple(blocks))
